# SPDX-License-Identifier: Apache-2.0
"""Losses of ours beside the stock loop's: same initial weights, same data, same router noise, bf16 both; and the stock loop with
another seed of noise and data order, for scale.

python3 bench/loom_curves.py --preset small --steps 500 --out curves_small.json
python3 bench/loom_curves.py --plot curves_small.json curves_small.png
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time

import torch
from peers import SortedMoE, StockMoE, stock_of
from report import Report

import loongforge
from loongforge.graph import StepGraph
from loongforge.models.gr00t_n16 import Gr00tN16, preset
from loongforge.models.noise import gumbel_noise


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", choices=("small", "n16"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, help="image patches and text together; default: the preset's longest")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=1.0, help="norm of gradients at most; 0: no limit")
    parser.add_argument("--stock", default="loop", choices=("loop", "sorted"), help="the peer's mixture: the same sums")
    parser.add_argument("--out", default="curves.json")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PNG"))
    return parser.parse_args()


class Text:
    """Token sequences that can be learned: with probability 0.7 the next token is a fixed function of the last one."""

    LONGEST = 64  # steps of the function in a row; more happen once in 10^10 tokens

    def __init__(self, a, config, seed: int):
        self.g = torch.Generator(device="cuda").manual_seed(seed)
        self.shape = (a.batch, a.seq - config.n_patches)
        self.common = min(4096, config.vocab_size)
        follows = torch.randint(0, self.common, (self.common,), device="cuda", generator=torch.Generator("cuda").manual_seed(99))
        powers = [torch.arange(self.common, device="cuda")]
        for _ in range(self.LONGEST):
            powers.append(follows[powers[-1]])
        self.powers = torch.stack(powers)
        self.image = (a.batch, 3, config.image_size, config.image_size)

    def batch(self):
        b, t = self.shape
        drawn = (torch.rand(b, t, device="cuda", generator=self.g).pow(3) * self.common).long().clamp(max=self.common - 1)
        restarts = torch.rand(b, t, device="cuda", generator=self.g) >= 0.7
        place = torch.arange(t, device="cuda").expand(b, t)
        start = torch.where(restarts, place, 0).cummax(1).values
        tokens = self.powers[(place - start).clamp(max=self.LONGEST), drawn.gather(1, start)]
        return torch.randn(self.image, device="cuda", generator=self.g), tokens


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 50)


def token_index(a, config):
    return (torch.arange(a.batch, device="cuda")[:, None] * config.max_seq_len + torch.arange(a.seq, device="cuda")).flatten()


def model_of(config, weights) -> Gr00tN16:
    with torch.device("meta"):
        model = Gr00tN16(config)
    model = model.to_empty(device="cuda")
    model.load_state_dict(weights)
    return model


def run_stock(a, config, first_weights, seed: int) -> list:
    model = model_of(config, first_weights)
    stock = stock_of(model, StockMoE if a.stock == "loop" else SortedMoE)
    del model
    optimizer = torch.optim.AdamW(stock.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    text, losses = Text(a, config, seed), []
    index = token_index(a, config)
    for step in range(a.steps):
        for group in optimizer.param_groups:
            group["lr"] = a.lr * warm_up(step)
        images, tokens = text.batch()
        optimizer.zero_grad()
        noise = [gumbel_noise(seed, step, layer, index, config.n_experts) for layer in range(config.n_layers)]
        with torch.autocast("cuda", torch.bfloat16):
            loss = stock(images, tokens, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stock.parameters(), a.clip or math.inf)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def run_ours(a, config, first_weights, seed: int) -> list:
    model = model_of(config.with_(seed=seed), first_weights)
    held = loongforge.accelerate(model, dtype=torch.bfloat16, options={"grad_f32": False})
    optimizer = loongforge.AdamW(held, lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def forward_backward(images, tokens):
        with torch.autocast("cuda", torch.bfloat16):
            out = model(images, tokens)
        out.loss.backward()
        return out.loss.detach()

    graph, text, losses = StepGraph(forward_backward, optimizer, clip=a.clip), Text(a, config, seed), []
    for step in range(a.steps):
        for group in optimizer.param_groups:
            group["lr"] = a.lr * warm_up(step)
        model.set_step(step)
        losses.append(graph(*text.batch()).clone())
    if graph.reason:
        print("eager: " + graph.reason, file=sys.stderr)
    result = torch.stack(losses).tolist()
    loongforge.undo(model)
    return result


def gap(a: list, b: list, last: int = 50) -> float:
    """Mean absolute difference of two curves over the last steps, relative to their mean."""
    a, b = a[-last:], b[-last:]
    return sum(abs(x - y) for x, y in zip(a, b)) / sum(b)


def plot(path: str, picture: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with open(path) as file:
        found = json.load(file)
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1))
    for name, style in (("stock", "k-"), ("other seed", "c:"), ("ours", "r-")):
        top.plot(found["losses"][name], style, label=name, lw=1)
    top.set_ylabel("loss")
    top.set_title(found["title"])
    top.legend()
    for name, style in (("other seed", "c:"), ("ours", "r-")):
        bottom.plot(
            [x - y for x, y in zip(found["losses"][name], found["losses"]["stock"])], style, label=f"{name} - stock", lw=1
        )
    bottom.axhline(0, color="k", lw=0.5)
    bottom.set_xlabel("step")
    bottom.legend()
    fig.tight_layout()
    fig.savefig(picture, dpi=110)


def main():
    a = arguments()
    if a.plot:
        return plot(*a.plot)
    config = preset(a.preset).with_(attention="dense", balance_weight=0.0, position="none", tau_start=1.0, tau_end=1.0, seed=1)
    config = config.with_(noise_decay_steps=0, image_scale=1.0, image_shift=0.0)
    a.seq = a.seq or config.max_seq_len
    first_weights = {k: v.clone() for k, v in Gr00tN16(config).state_dict().items()}
    losses = {}
    for name, run, seed in (("ours", run_ours, 1), ("stock", run_stock, 1), ("other seed", run_stock, 2)):
        began = time.perf_counter()
        losses[name] = run(a, config, first_weights, seed)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: {losses[name][0]:.4f} to {losses[name][-1]:.4f} in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        with open(a.out, "w") as file:
            title = f"{a.preset}, dense attention, batch {a.batch} x {a.seq}, {a.steps} steps, bf16"
            json.dump({"title": title, "losses": losses}, file)
    Report().add(
        f"loom.curve_gap/{a.preset}",
        gap(losses["ours"], losses["stock"]),
        "relative, mean of the last 50 steps",
        "stock loop against itself with another seed",
        gap(losses["other seed"], losses["stock"]),
    )


if __name__ == "__main__":
    sys.exit(main())
