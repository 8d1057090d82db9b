# SPDX-License-Identifier: Apache-2.0
"""Dense against dynamic sparse attention on one GPU by sequence length: forward and backward, the choice of blocks included.

python3 bench/attention.py                          32,768 tokens in batches of 1k to 32k, two budgets of blocks of 64
python3 bench/attention.py --lengths 2048 --out f   one length, results appended to f

A row: sparse in ms, its peer the faster of the exact kernels in the same run; a ratio below 1 means that sparse is faster. Every
time is the median of replays of a captured graph of forward and backward down to the gradient of the packed projection. Sparse is
compiled for each length anew, as a run of one length is.
"""

from __future__ import annotations

import argparse

import torch
from report import Report
from torch.nn.attention import SDPBackend, sdpa_kernel

from loongforge.models import attention
from loongforge.models.attention import blockwise_attention, dense_attention, dynamic_sparse_attention

BUDGETS = {"8+2+1": (8, 2, 1), "16+8+1": (16, 8, 1)}  # top + local + first: n16's; near NSA's published 1,664 keys a query


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--tokens", type=int, default=32768, help="in a batch, whatever the length")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--out", help="file that results are appended to")
    return parser.parse_args()


def time_ms(f, replays: int) -> float:
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(3):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(events, events[1:]))[replays // 2]


def flash_attention(qkv):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def main():
    a = arguments()
    report = Report(a.out)
    ratios = {name: {} for name in BUDGETS}
    for t in sorted(map(int, a.lengths.split(","))):
        b = max(a.tokens // t, 1)
        g = torch.Generator(device="cuda").manual_seed(t)
        shape = (b, t, 3, a.heads, a.head_dim)
        qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=g).requires_grad_()
        grad = torch.randn(b, t, a.heads * a.head_dim, device="cuda", dtype=torch.bfloat16, generator=g)

        def both(f, qkv=qkv, grad=grad):
            return time_ms(lambda: torch.autograd.grad(f(qkv), qkv, grad), a.replays)

        dense = {"chosen (cuDNN on Hopper)": both(dense_attention), "flash": both(flash_attention)}
        best = min(dense, key=dense.get)
        where = f"{b}x{t}"
        report.add(f"loom.attention/dense/{where}", dense["chosen (cuDNN on Hopper)"], "ms", "flash", dense["flash"])
        for name, (top_k, local, first) in BUDGETS.items():
            torch._dynamo.reset()
            budget = (a.block, top_k, local, first)
            whole = both(lambda x, budget=budget: dynamic_sparse_attention(x, *budget))
            chosen = attention.choose(qkv.detach(), *budget)
            choosing = time_ms(lambda budget=budget, qkv=qkv: attention.choose(qkv.detach(), *budget), a.replays)
            given = both(lambda x, chosen=chosen: blockwise_attention(x, chosen, a.block))
            n = chosen.shape[2]
            kept = (chosen >= 0).sum(-1).float().mean().item() * 2 / (n + 1)
            report.add(
                f"loom.attention/sparse/{where}/{name}", whole, "ms", f"dense, {best}", dense[best],
                choosing_ms=choosing, blocks_given_ms=given, kept_share=kept,
            )  # fmt: skip
            ratios[name][t] = whole / dense[best]
    for name, ratio in ratios.items():
        paying = [t for t in ratio if ratio[t] < 1]
        if 0 < len(paying) < len(ratio):  # the crossing lies inside this run's lengths
            report.add(f"loom.attention/pays_from/{name}", min(paying), "tokens")


if __name__ == "__main__":
    main()
