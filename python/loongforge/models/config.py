# SPDX-License-Identifier: Apache-2.0
"""Configuration and presets of GR00T N1.6."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Hidden sizes of the 16 experts of n16: 3.2x from smallest to largest; 0, 1, 7 and 12 are the largest.
EXPERT_SIZES = (2048, 2048, 640, 704, 768, 832, 896, 2048, 960, 1024, 1088, 1152, 2048, 1216, 1280, 1344)


@dataclass(frozen=True)
class Gr00tN16Config:
    """Sizes, sparse-attention budget and router schedule. Frozen: `with_(...)` makes a changed copy."""

    name: str = "n16"
    vocab_size: int = 50304
    d_model: int = 1024
    n_layers: int = 24
    n_heads: int = 16
    expert_sizes: tuple[int, ...] = EXPERT_SIZES
    experts_per_token: int = 2
    image_size: int = 224
    patch_size: int = 16
    image_scale: float = 1.0  # the model sees images * image_scale + image_shift
    image_shift: float = 0.0
    max_seq_len: int = 2048  # image patches + text; also the stride of global token indices
    position: str = "none"  # none | learned (added to the input) | rotary (in attention) | both
    attention: str = "sparse"  # sparse | dense
    block_size: int = 64  # query and key block of the sparse path
    top_k_blocks: int = 8
    local_blocks: int = 2  # own block and the ones just before it
    first_blocks: int = 1
    tau_start: float = 1.0
    tau_end: float = 0.5
    tau_decay_steps: int = 10000
    router_noise: bool = True  # gumbel noise while training
    noise_decay_steps: int = 0  # the noise fades to nothing over so many steps; 0: it never fades
    balance_weight: float = 0.01
    init_std: float = 0.02
    seed: int = 0  # of the initial weights and of the router noise

    def __post_init__(self):
        checks = (
            (self.d_model % self.n_heads == 0, "n_heads", self.n_heads, f"a divisor of d_model={self.d_model}"),
            (
                self.image_size % self.patch_size == 0,
                "patch_size",
                self.patch_size,
                f"a divisor of image_size={self.image_size}",
            ),
            (
                self.position in ("none", "learned", "rotary", "both"),
                "position",
                self.position,
                "none, learned, rotary or both",
            ),
            (
                self.position not in ("rotary", "both") or self.d_model // self.n_heads % 2 == 0,
                "n_heads",
                self.n_heads,
                "an even head size for rotary positions",
            ),
            (self.attention in ("sparse", "dense"), "attention", self.attention, "sparse or dense"),
            (
                1 <= self.experts_per_token <= len(self.expert_sizes),
                "experts_per_token",
                self.experts_per_token,
                f"1 to {len(self.expert_sizes)}",
            ),
            (self.block_size >= 1, "block_size", self.block_size, "at least 1"),
            (self.local_blocks >= 1, "local_blocks", self.local_blocks, "at least 1 (a query's own block)"),
            (
                self.top_k_blocks >= 0 and self.first_blocks >= 0,
                "top_k_blocks/first_blocks",
                (self.top_k_blocks, self.first_blocks),
                "0 or more",
            ),
            (self.tau_start > 0 and self.tau_end > 0, "tau_start/tau_end", (self.tau_start, self.tau_end), "above 0"),
            (
                self.n_patches < self.max_seq_len,
                "max_seq_len",
                self.max_seq_len,
                f"more than the {self.n_patches} image patches",
            ),
        )
        for ok, field, value, expected in checks:
            if not ok:
                raise ValueError(f"{field} is {value!r}, expected {expected}")

    def with_(self, **changes) -> Gr00tN16Config:
        return replace(self, **changes)

    @property
    def n_experts(self) -> int:
        return len(self.expert_sizes)

    @property
    def n_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def tau(self, step: int) -> float:
        """Router temperature: exponential decay from tau_start to tau_end over tau_decay_steps, then constant."""
        if self.tau_decay_steps <= 0:
            return self.tau_end
        part = min(max(step, 0) / self.tau_decay_steps, 1.0)
        return self.tau_start * (self.tau_end / self.tau_start) ** part

    def noise_scale(self, step: int) -> float:
        """Factor on the router noise while training: 1, or fading linearly to 0 over noise_decay_steps."""
        if not self.router_noise:
            return 0.0
        return max(1.0 - max(step, 0) / self.noise_decay_steps, 0.0) if self.noise_decay_steps > 0 else 1.0


def scaled_experts(d_model: int) -> tuple[int, ...]:
    """The expert sizes of n16 scaled to another width (spread and ranking stay)."""
    return tuple(size * d_model // 1024 for size in EXPERT_SIZES)


PRESETS = {
    "tiny": Gr00tN16Config(
        name="tiny",
        vocab_size=264,
        d_model=128,
        n_layers=2,
        n_heads=4,
        expert_sizes=scaled_experts(128),
        image_size=64,
        patch_size=16,
        image_scale=0.25,  # (x / 255 - 0.5) / 0.25 becomes x / 255 - 0.2, which puts dark backgrounds near zero
        image_shift=0.3,
        max_seq_len=256,
        position="both",
        block_size=16,
        top_k_blocks=4,
        local_blocks=2,
        first_blocks=1,
        tau_decay_steps=600,
        init_std=0.06,
        noise_decay_steps=200,
    ),
    "small": Gr00tN16Config(
        name="small",
        d_model=384,
        n_layers=8,
        n_heads=6,
        expert_sizes=scaled_experts(384),
        max_seq_len=1024,
        position="both",
    ),
    "n16": Gr00tN16Config(),
}


def preset(name: str) -> Gr00tN16Config:
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}, expected one of: {', '.join(PRESETS)}")
    return PRESETS[name]
