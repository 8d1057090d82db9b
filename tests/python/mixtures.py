# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts as other people write them, small: what `loongforge.blocks` recognises, and what it must not."""

import torch
import torch.nn.functional as F
from torch import nn

D = 16


class SwiGLU(nn.Module):
    def __init__(self, names, hidden, d=D, bias=False):
        super().__init__()
        self.names = names
        for name, (i, o) in zip(names, ((d, hidden), (d, hidden), (hidden, d))):
            setattr(self, name, nn.Linear(i, o, bias=bias))

    def forward(self, x):
        gate, up, down = (getattr(self, n) for n in self.names)
        return down(F.silu(gate(x)) * up(x))


class Gelu(SwiGLU):
    def forward(self, x):
        gate, up, down = (getattr(self, n) for n in self.names)
        return down(F.gelu(gate(x)) * up(x))


def sizes(e):
    return [8 + 8 * (i % 3) for i in range(e)]


class Mixture(nn.Module):
    """A hand-written block: mask loop, top-k of a softmax. Subclasses change what they name."""

    k, normalise, noisy, expert_class = 2, True, False, SwiGLU

    def __init__(self, names=("gate", "up", "down"), e=5, bias=False):
        super().__init__()
        self.experts = nn.ModuleList(self.expert_class(names, f, bias=bias) for f in sizes(e))
        self.router = nn.Linear(D, e, bias=False)

    def logits(self, x):
        return self.router(x).float()

    def choose(self, x):
        logits = self.logits(x)
        if self.training and self.noisy:
            logits = logits - torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        weight, ids = F.softmax(logits, -1).topk(self.k, -1)
        return ids, weight / weight.sum(-1, keepdim=True) if self.normalise else weight

    def loop(self, x, ids, weight):
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            row, choice = (ids == e).nonzero(as_tuple=True)
            y = y.index_add(0, row, (expert(x[row]) * weight[row, choice, None]).to(y.dtype))
        return y

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        return self.loop(flat, *self.choose(flat)).view(x.shape)


class Noisy(Mixture):
    """The yardstick's: gumbel noise in training."""

    noisy = True

    def __init__(self):
        super().__init__(("g", "u", "d"), e=16)


class Exponential(Mixture):
    """Gumbel noise as F.gumbel_softmax draws it; the router is used in f32 and not called."""

    k = 3

    def logits(self, x):
        logits = F.linear(x.float(), self.router.weight.float())
        return logits - torch.empty_like(logits).exponential_().log() if self.training else logits


class InF32(Mixture):
    """The router outside autocast."""

    def logits(self, x):
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.router.weight.float())


class Plain(Mixture):
    """Probabilities as they are; names by which gate and up cannot be told, gate registered second."""

    normalise = False

    def __init__(self):
        super().__init__(e=4)
        self.experts = nn.ModuleList(Odd(f) for f in sizes(4))


class Odd(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.b, self.a, self.c = (nn.Linear(i, o, bias=False) for i, o in ((D, hidden), (D, hidden), (hidden, D)))

    def forward(self, x):
        return self.c(F.silu(self.a(x)) * self.b(x))


class Jittered(Mixture):
    """As Mixtral's: jitter, and logits beside the result."""

    def __init__(self):
        super().__init__(("w1", "w3", "w2"))
        self.top_k, self.jitter_noise = 2, 0.0

    def forward(self, x):
        if self.training and self.jitter_noise > 0:
            x *= torch.empty_like(x).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
        flat = x.reshape(-1, D)
        return self.loop(flat, *self.choose(flat)).view(x.shape), self.router(flat)


class Shared(Mixture):
    """As Qwen2's: a shared expert behind a gate of its own."""

    def __init__(self, normalise=False):
        super().__init__(("gate_proj", "up_proj", "down_proj"), e=6)
        self.norm_topk_prob = normalise
        self.shared_expert, self.shared_expert_gate = (
            SwiGLU(("gate_proj", "up_proj", "down_proj"), 20),
            nn.Linear(D, 1, bias=False),
        )

    @property
    def normalise(self):
        return self.norm_topk_prob

    def forward(self, x):
        flat = x.reshape(-1, D)
        y = self.loop(flat, *self.choose(flat)) + torch.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return y.view(x.shape), self.router(flat)


class OwnRoute(Mixture):
    """A router that no recogniser knows, offered as a method: sigmoid, a choice by groups, weights scaled."""

    def __init__(self):
        super().__init__(e=6)

    def route(self, x):
        score = torch.sigmoid(self.router(x).float())
        best = score.view(-1, 3, 2).amax(-1).topk(2).indices
        open_ = torch.zeros_like(score.view(-1, 3, 2)).scatter_(1, best[..., None].expand(-1, -1, 2), 1).view_as(score)
        ids = (score * open_).topk(2).indices
        return 2.5 * score.gather(1, ids), ids

    def choose(self, x):
        return self.route(x)[::-1]


class ByMethod(nn.Module):
    """As DeepSeek's in transformers 4: a router module, and a method that gets its choices."""

    def __init__(self, e=6):
        super().__init__()
        self.experts = nn.ModuleList(SwiGLU(("gate_proj", "up_proj", "down_proj"), 24) for _ in range(e))
        self.gate = TopK(e, 3)
        self.shared_experts = SwiGLU(("gate_proj", "up_proj", "down_proj"), 24)

    def moe(self, hidden, ids, weight):
        return Mixture.loop(self, hidden, ids, weight)

    def forward(self, x):
        weight, ids = self.gate(x.reshape(-1, D))
        return self.moe(x.reshape(-1, D), ids, weight).view(x.shape) + self.shared_experts(x)


class TopK(nn.Module):
    def __init__(self, e, k):
        super().__init__()
        self.weight, self.k = nn.Parameter(torch.randn(e, D)), k

    def forward(self, x):
        weight, ids = torch.sigmoid(F.linear(x.float(), self.weight.float())).topk(self.k)
        return 1.5 * weight / weight.sum(-1, keepdim=True), ids


class FusedExperts(nn.Module):
    """As in transformers 5: all experts in two parameters."""

    def __init__(self, e=6, hidden=24):
        super().__init__()
        self.num_experts = e
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * hidden, D) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(e, D, hidden) * 0.2)

    def forward(self, tokens, top_k_index, top_k_weights):
        y = torch.zeros_like(tokens)
        for e in range(self.num_experts):
            row, choice = (top_k_index == e).nonzero(as_tuple=True)
            gate, up = F.linear(tokens[row], self.gate_up_proj[e]).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, self.down_proj[e]) * top_k_weights[row, choice, None]
            y = y.index_add(0, row, part.to(y.dtype))
        return y


class Fused(nn.Module):
    def __init__(self, experts=FusedExperts):
        super().__init__()
        self.gate, self.experts = TopK(6, 2), experts()

    def forward(self, x):
        weight, ids = self.gate(x.reshape(-1, D))
        return self.experts(x.reshape(-1, D), top_k_weights=weight, top_k_index=ids).view(x.shape)


class ListedExperts(nn.ModuleList):
    """The experts as a list that has a forward."""

    def __init__(self):
        super().__init__(SwiGLU(("w1", "w3", "w2"), 24) for _ in range(6))

    def forward(self, tokens, top_k_index, top_k_weights):
        y = torch.zeros_like(tokens)
        for e, expert in enumerate(self):
            row, choice = (top_k_index == e).nonzero(as_tuple=True)
            y = y.index_add(0, row, expert(tokens[row]) * top_k_weights[row, choice, None].to(tokens.dtype))
        return y


TAKEN = {
    "hand-written": Mixture,
    "noisy": Noisy,
    "exponential": Exponential,
    "router in f32": InF32,
    "plain": Plain,
    "mixtral 4": Jittered,
    "qwen2 4": Shared,
    "qwen3 4": lambda: Shared(normalise=True),
    "own route": OwnRoute,
    "deepseek 4": ByMethod,
    "fused": Fused,
    "listed": lambda: Fused(ListedExperts),
}


# ---- what must be left alone ---------------------------------------------------------------------------------------------


class WithGelu(Mixture):
    expert_class = Gelu


class Detached(Mixture):
    """The same values, another gradient."""

    def choose(self, x):
        ids, weight = super().choose(x)
        return ids, weight.detach()


class Dropping(Mixture):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class NormalNoise(Mixture):
    def logits(self, x):
        logits = super().logits(x)
        return logits + torch.randn_like(logits) if self.training else logits


class Sigmoid(Mixture):
    def choose(self, x):
        weight, ids = torch.sigmoid(self.logits(x)).topk(2)
        return ids, weight


class Clamped(FusedExperts):
    """The shape of SwiGLU, but not SwiGLU."""

    def forward(self, tokens, top_k_index, top_k_weights):
        return super().forward(tokens, top_k_index, top_k_weights).clamp(max=0.5)


class Biased(FusedExperts):
    def __init__(self):
        super().__init__()
        self.down_proj_bias = nn.Parameter(torch.zeros(6, D))


class Transposed(FusedExperts):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(self.gate_up_proj.detach().transpose(1, 2).contiguous())


class Normed(Mixture):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)


class Unlimited(Mixture):
    def __init__(self):
        super().__init__(e=12)
        self.top_k = self.k = 9


class Unrouted(Mixture):
    def __init__(self):
        super().__init__()
        self.router = None

    def forward(self, x):
        return sum(e(x) for e in self.experts)


class NamedExperts(nn.Module):
    """Weights of several experts in one, by names that no recogniser knows."""

    def __init__(self):
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(4, 8, D))

    def forward(self, x):
        return x + self.w13.sum()


def with_hook():
    block = Mixture()
    block.experts[1].up.register_forward_hook(lambda *_: None)
    return block


def with_own_forward():
    block = Mixture()
    block.forward = lambda x: x
    return block


LEFT = {
    "not three nn.Linear without biases": lambda: Mixture(bias=True),
    "is not that of softmax, top-k": WithGelu,
    "in training its forward or its gradient": Detached,
    "in training its forward": Dropping,
    "not that of softmax, top-k of up to 8 and SwiGLU experts and gumbel noise": NormalNoise,
    "its forward is not that of softmax": Sigmoid,
    "compute something else than down": lambda: Fused(Clamped),
    "its weights are gate_up_proj, down_proj, down_proj_bias": lambda: Fused(Biased),
    r"expected \(e, 2 f, d\) and \(e, d, f\)": lambda: Fused(Transposed),
    "the part of norm in it is unknown": Normed,
    "9 choices a token, the kernels take up to 8": Unlimited,
    "no router: expected one nn.Linear with 5 outputs": Unrouted,
    "weights of several experts in one .w13. in a module of unknown shape": NamedExperts,
    "an expert has hooks of its own": with_hook,
    "its forward was replaced on the module itself": with_own_forward,
    "float64, expected float32 or bfloat16": lambda: Mixture().double(),
    "several routers": lambda: _two_routers(),
}


def _two_routers():
    block = Mixture()
    block.second = nn.Linear(D, 5)
    return block
