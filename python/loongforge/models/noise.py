# SPDX-License-Identifier: Apache-2.0
"""Counter-based router noise: a function of (seed, step, layer, global token, expert) and of nothing else.

Because no generator state exists, the noise of a token is the same on any number of ranks, for any batch
split, in any order of evaluation, and again when a layer is recomputed.
"""

from __future__ import annotations

import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers and key increments of Philox4x32
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def philox4x32(counter, key, rounds: int = 10):
    """counter: 4 x (n,) int64 of 32-bit words; key: 2 words (int or int64 tensors) -> 4 x (n,) int64 words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # Products wrap modulo 2^64; the arithmetic shift is masked, so both halves are exact.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0,
            p1 & _LOW,
            ((p0 >> 32) & _LOW) ^ c3 ^ k1,
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def gumbel_noise(seed: int, step, layer: int, token_index: torch.Tensor, n_experts: int) -> torch.Tensor:
    """token_index: (n,) int64 -> (n, n_experts) float32 standard Gumbel noise.

    Expert e of a token uses output word e % 4 of Philox4x32-10 with counter
    (token low, token high, step, layer * 64 + e // 4) and key (seed low, seed high);
    u = (word >> 8) * 2^-24 + 2^-25 lies inside (0, 1), and the noise is -log(-log(u)), computed in double
    precision (u nearest to one is not a float32) and then rounded. `step` may be an int or a 0-dim tensor.
    """
    if token_index.dtype != torch.int64 or token_index.dim() != 1:
        raise ValueError(f"token_index is {token_index.dtype} of {token_index.dim()} dimensions, expected int64 (n,)")
    if not 1 <= n_experts <= 256:
        raise ValueError(f"n_experts is {n_experts}, expected 1 to 256 (64 counter blocks of four a layer)")
    n, n_words = token_index.numel(), (n_experts + 3) // 4
    token = token_index[:, None].expand(n, n_words)
    block = torch.arange(n_words, device=token_index.device) + layer * 64
    counter = (token & _LOW, (token >> 32) & _LOW, torch.zeros_like(token) + (step & _LOW), block.expand(n, n_words))
    words = torch.stack(philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW)), dim=-1)
    u = (words >> 8).double() * 2.0**-24 + 2.0**-25
    return (-torch.log(-torch.log(u))).float().reshape(n, n_words * 4)[:, :n_experts]
