# SPDX-License-Identifier: Apache-2.0
"""GR00T N1.6: images and text through layers of dynamic sparse attention and a mixture of 16 unequal experts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .attention import Attention
from .config import PRESETS, Gr00tN16Config, preset
from .moe import MixtureOfExperts, expert_balancing_loss

__all__ = ["Gr00tN16", "Gr00tN16Config", "Gr00tN16Output", "PRESETS", "preset"]

IGNORE = -100


@dataclass
class Gr00tN16Output:
    """`loss` is this rank's share: gradients are summed over ranks, never averaged (see `Gr00tN16.forward`)."""

    loss: torch.Tensor  # loss_sum / n_tokens_global + balance_weight * balance_loss
    loss_sum: torch.Tensor  # cross-entropy summed over this rank's trained-on tokens
    n_tokens: torch.Tensor  # int64, trained-on tokens of this rank
    n_tokens_global: torch.Tensor  # int64, the same over all ranks (through reduce_stats)
    balance_loss: torch.Tensor  # over all ranks; the same value on each
    expert_counts: torch.Tensor  # (layers, n_experts) int64 of this rank, detached
    logits: torch.Tensor | None = None  # (b, t_text, vocab), on request


class Block(nn.Module):
    def __init__(self, config: Gr00tN16Config, layer: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.d_model)
        self.moe = MixtureOfExperts(config, layer)

    def forward(self, x, token_index, valid, step, tau):
        """x: (b, t, d) -> (b, t, d), Routed"""
        x = x + self.attention(self.attention_norm(x))
        y, routed = self.moe(self.moe_norm(x), token_index, valid, step, tau)
        return x + y, routed


def identity(stats: torch.Tensor) -> torch.Tensor:
    return stats


def token_loss(hidden, weight, labels):
    """hidden: (b, t, d); weight: (v, d); labels: (b, t), -100 untrained -> (), the sum over next tokens"""
    logits = F.linear(hidden[:, :-1], weight).float()
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")


class Gr00tN16(nn.Module):
    """`reduce_stats` sums a tensor over ranks (default: one process). `step` drives noise and temperature."""

    token_loss = staticmethod(token_loss)

    def __init__(self, config: Gr00tN16Config | str = "n16", reduce_stats: Callable = identity):
        super().__init__()
        self.config = config = preset(config) if isinstance(config, str) else config
        self.reduce_stats = reduce_stats
        self.step = 0
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.patch = nn.Conv2d(3, config.d_model, config.patch_size, config.patch_size)
        if config.position in ("learned", "both"):
            self.position = nn.Embedding(config.max_seq_len, config.d_model)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.last_expert_counts: torch.Tensor | None = None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Each parameter from a generator of its own, keyed by (seed, name): independent of order and threads."""
        c = self.config
        for name, p in self.named_parameters():
            if p.is_meta:
                continue
            if "norm" in name:
                p.fill_(1.0)
            elif name == "patch.bias":
                p.zero_()
            else:
                digest = hashlib.sha256(f"{c.seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
                std = c.init_std
                if name.endswith(("attention.out.weight", "down.weight")):
                    std /= (2 * c.n_layers) ** 0.5
                elif name == "patch.weight":
                    std = p[0].numel() ** -0.5
                p.copy_(torch.empty(p.shape).normal_(0.0, std, generator=generator))

    def set_step(self, step: int) -> None:
        """The optimizer step that the next forward belongs to (all micro-steps of a step share it)."""
        self.step = step

    def forward(self, images, tokens, labels=None, attention_mask=None, *, sample_ids=None, step=None, return_logits=False):
        """images: (b, 3, s, s); tokens: (b, t) int64; labels: (b, t), -100 untrained, default tokens;
        attention_mask: (b, t), nonzero on real tokens (text is right-padded); sample_ids: (b,) int64 global indices of
        the samples within the step, default 0..b-1 -> Gr00tN16Output

        One call of `reduce_stats` a forward carries the counts, probability sums and token counts of all layers. With
        it, the gradients of `loss` summed over ranks equal those of one process that holds all samples.
        """
        c = self.config
        step = self.step if step is None else step
        tau = c.tau(int(step))
        b, t_text = tokens.shape
        if (c.image_scale, c.image_shift) != (1.0, 0.0):
            images = images * c.image_scale + c.image_shift
        patches = self.patch(images).flatten(2).transpose(1, 2)
        t_image = patches.shape[1]
        t = t_image + t_text
        if t > c.max_seq_len:
            raise ValueError(f"sequence of {t_image} patches + {t_text} tokens, expected at most max_seq_len={c.max_seq_len}")
        x = torch.cat([patches, self.embed(tokens).to(patches.dtype)], dim=1)
        position = torch.arange(t, device=tokens.device)
        if c.position in ("learned", "both"):
            x = x + self.position(position)
        if sample_ids is None:
            sample_ids = torch.arange(b, device=tokens.device)
        token_index = (sample_ids[:, None] * c.max_seq_len + position).flatten()
        labels = tokens if labels is None else labels
        valid = None
        if attention_mask is not None:
            text = attention_mask.bool()
            valid = F.pad(text, (t_image, 0), value=True).flatten()
            labels = labels.masked_fill(~text, IGNORE)

        hidden, reports = self.run_layers(x, token_index, valid, step, tau)
        hidden = hidden[:, t_image:]
        loss_sum = self.token_loss(hidden, self.embed.weight, labels)
        n_tokens = (labels[:, 1:] != IGNORE).sum()

        counts = torch.stack([r.counts for r in reports]).long()
        prob_sums = torch.stack([r.prob_sum for r in reports])
        self.last_expert_counts = counts
        balance, n_global = self._balance(counts, prob_sums, n_tokens)
        loss = loss_sum / n_global.clamp(min=1) + c.balance_weight * balance
        logits = F.linear(hidden, self.embed.weight).float() if return_logits else None
        return Gr00tN16Output(loss, loss_sum, n_tokens, n_global, balance, counts, logits)

    def run_layers(self, x, token_index, valid, step, tau):
        """x: (b, t, d); token_index: (b t) int64; valid: (b t) bool or None -> (b, t, d) behind the last norm, Routed by layer"""
        reports = []
        for layer in self.layers:
            x, routed = layer(x, token_index, valid, step, tau)
            reports.append(routed)
        return self.norm(x), reports

    def _balance(self, counts, prob_sums, n_tokens):
        """counts, prob_sums: (layers, n_experts); n_tokens: () -> balance loss (), trained-on tokens of all ranks ()"""
        c = self.config
        local = prob_sums.detach().double()
        # float64 holds the counts exactly, so one reduction carries everything.
        stats = torch.cat([counts.flatten().double(), local.flatten(), n_tokens.double().view(1)])
        stats = self.reduce_stats(stats)
        size = counts.numel()
        counts_all, sums_all = stats[:size].view_as(counts), stats[size : 2 * size].view_as(local)
        n_routed = counts_all[0].sum() / c.experts_per_token
        # Value over all ranks, gradient to this rank's own tokens.
        sums = prob_sums.double() + (sums_all - local)
        balance = expert_balancing_loss(counts_all, sums, n_routed, c.experts_per_token)
        return balance.float(), stats[-1].round().long()
