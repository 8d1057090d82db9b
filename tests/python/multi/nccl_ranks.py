# SPDX-License-Identifier: Apache-2.0
"""Run by test_nccl.py on GPUs, one rank each: torchrun --nproc-per-node 2 nccl_ranks.py sums|twice|capture|torch|sparse

sums     exact sums of a map's gradients, the same bits on every rank and in every run; late blocks; statistics
twice    the tiny preset's gradients of all ranks together are those of one GPU with all samples
capture  steps as graphs with the reductions inside: the weights of eager steps, replicas equal; a capture that fails on one rank
torch    the same sums through torch.distributed, and that two transports agree
sparse   the sparse form's gradients, over NCCL and over torch.distributed; nothing is lost over a flush
"""

import copy
import os
import sys
import time
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from loongforge import AdamW, NexusSync, accelerate
from loongforge.graph import StepGraph
from loongforge.mapping import ParameterMap
from loongforge.models.gr00t_n16 import Gr00tN16, preset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
torch.set_num_threads(1)
torch.backends.cuda.matmul.allow_tf32 = False


def say(*words):
    if rank == 0:
        print(*words, flush=True)


def digest(blocks, what="grad") -> torch.Tensor:
    """() int64: sum of the bits, the same only if (practically) all bits are"""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for i, b in enumerate(blocks):
        t = getattr(b, what)
        if t is None:
            continue
        words = t.contiguous().view(torch.int16).to(torch.int64).flatten()
        total += (words * (torch.arange(words.numel(), device=device) % 8191 + 1 + i)).sum()
    return total.cpu()


def equal_everywhere(value: torch.Tensor) -> bool:
    every = [torch.zeros_like(value) for _ in range(world)]
    dist.all_gather(every, value)
    return all(torch.equal(v, every[0]) for v in every)


def distance(a: dict, b: dict) -> float:
    return max(((a[n] - b[n]).norm() / a[n].norm().clamp(min=1e-12)).item() for n in a)


# ---- sums ----------------------------------------------------------------------------------------------------------------


class Written(torch.autograd.Function):
    """A loss whose gradients are given: parameters get `values`, None for those without a token here."""

    @staticmethod
    def forward(ctx, values, *parameters):
        ctx.values = values
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return None, *ctx.values


def values(step: int, of_rank: int, parameters) -> list:
    out = []
    for i, p in enumerate(parameters):
        g = torch.Generator().manual_seed(1000 * step + 10 * i + of_rank)
        late = i % 3 and (i + step + of_rank) % 4 == 0
        out.append(None if late else torch.randn(p.shape, generator=g).to(p.dtype))
    return out


def sums(transport=None):
    torch.manual_seed(rank)
    layers = [nn.Linear(512, 300 + 8 * i, bias=False, dtype=torch.bfloat16 if i % 2 else torch.float32) for i in range(9)]
    model = nn.ModuleList(layers).to(device)
    held = ParameterMap(model, optimizer_state=False)
    parameters = [b.param for b in held.blocks]
    digests = []
    for _ in range(3):
        sync = NexusSync(model, reduce="sum", chunk_bytes=64 << 10, run_bytes=1 << 20, transport=transport, timeout_s=30.0)
        for step in range(4):
            model.zero_grad()
            mine = [None if v is None else v.to(device) for v in values(step, rank, parameters)]
            Written.apply(mine, *parameters).backward()
            everyone = [values(step, r, parameters) for r in range(world)]
            for i, b in enumerate(held.blocks):
                parts = [v[i].float() for v in everyone if v[i] is not None]
                want = torch.stack(parts).sum(0) if parts else torch.zeros(b.grad.shape)
                want = want.to(b.grad.dtype)
                got = b.grad.cpu()
                if world == 2:  # one addition, rounded once: any order gives the same bits
                    assert torch.equal(got, want), (transport, step, b.name, (got - want).abs().max())
                else:
                    torch.testing.assert_close(got, want, rtol=2e-2 if got.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
            assert equal_everywhere(digest(held.blocks))
        digests.append(digest(held.blocks))
        assert sync.transport == (transport or "nccl"), (sync.transport, sync.note)
        sync.settle()
        stats = sync.stats()
        assert stats["steps"] == 4 and stats["collectives"] == 4 * len(sync.chunks()) and stats["late_blocks"] > 0, stats
        assert sync.agree(True) and not sync.agree(rank == 0)
        assert sync.sum(torch.tensor([1.5, rank], device=device)).tolist() == [1.5 * world, world * (world - 1) / 2]
        assert sync.sum(torch.tensor([rank])).tolist() == [world * (world - 1) // 2]
        text = sync.describe()
        sync.close()
    assert all(torch.equal(d, digests[0]) for d in digests), "reruns differ"
    say(
        f"sums: {text} | p50 {1e6 * stats['p50_s']:.0f} us, busy {1e3 * stats['busy_s']:.2f} ms, exposed "
        f"{1e3 * stats['exposed_s']:.2f} ms"
    )


# ---- the sparse form -----------------------------------------------------------------------------------------------------


def sparse_steps(transport: str, steps: int) -> tuple:
    """-> every step's gradients (bf16 and f32 layers), the digest of the last; the last step takes along what was kept back"""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 150 + 8 * i, bias=False, dtype=torch.bfloat16 if i % 2 else torch.float32) for i in range(6)]
    model = nn.ModuleList(layers).to(device)
    held = ParameterMap(model, optimizer_state=False)
    parameters = [b.param for b in held.blocks]
    sync = NexusSync(
        model, "sparse", reduce="sum", chunk_bytes=64 << 10, run_bytes=256 << 10, transport=transport, timeout_s=30.0
    )
    assert sync.sparse and sync.transport == transport, (sync.transport, sync.note)
    got = []
    for step in range(steps):
        model.zero_grad()
        if step + 1 == steps:
            sync.flush_residual()
        mine = [None if v is None else v.to(device) for v in values(step, rank, parameters)]
        Written.apply(mine, *parameters).backward()
        got.append([b.grad.clone() for b in held.blocks])
        assert equal_everywhere(digest(held.blocks)), "replicas differ"
    sync.settle()
    sync.check()
    sent = sum(c["sent_bytes"] for c in sync.chunks()) / sum(c["bytes"] for c in sync.chunks())
    sync.close()
    return got, parameters, sent


def sparse():
    steps = 7
    (ours, parameters, sent), (theirs, _, _) = sparse_steps("nccl", steps), sparse_steps("torch", steps)
    assert sent < 0.3, sent
    if world == 2:
        assert all(torch.equal(a, b) for x, y in zip(ours, theirs) for a, b in zip(x, y)), "the transports differ"
    zeros = sum((g == 0).sum().item() for g in ours[0]) / sum(g.numel() for g in ours[0])
    assert 0.8 < zeros < 0.9, zeros
    for i, p in enumerate(parameters):
        every = [values(step, r, parameters)[i] for step in range(steps) for r in range(world)]
        want = sum(v.double() for v in every if v is not None)
        have = sum(step[i].double() for step in ours).cpu()
        worst = ((have - want).abs().max() / want.abs().max()).item()
        assert worst < (2e-2 if p.dtype == torch.bfloat16 else 1e-5), (i, worst)
    say(f"sparse: {100 * zeros:.0f} % zeros, {100 * sent:.0f} % of the bytes, nothing lost")


# ---- two GPUs against one ------------------------------------------------------------------------------------------------


def samples(step: int, n: int, config):
    g = torch.Generator().manual_seed(100 + step)
    images = torch.randn(n, 3, config.image_size, config.image_size, generator=g)
    tokens = torch.randint(0, config.vocab_size, (n, 100), generator=g)
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=g) < 0.3, -100)
    return images.to(device), tokens.to(device), labels.to(device), torch.arange(n, device=device)


def twice():
    config = preset("tiny").with_(seed=rank)
    model = Gr00tN16(config).to(device)
    held = accelerate(model)
    sync = NexusSync(model, reduce="sum", chunk_bytes=64 << 10)
    assert equal_everywhere(digest(held.blocks, "weight")), "rank 0's weights did not reach all ranks"
    model.config = config.with_(seed=0)  # the noise's seed is the run's, not the rank's
    for layer in model.layers:
        layer.moe.config = model.config
    one = copy.deepcopy(model)  # an ordinary model with rank 0's weights
    model.reduce_stats = sync.reduce_stats
    n = 4 * world
    images, tokens, labels, ids = samples(0, n, config)
    part = slice(4 * rank, 4 * rank + 4)
    out = model(images[part], tokens[part], labels[part], sample_ids=ids[part])
    out.loss.backward()
    sync.settle()
    ours = {b.name: b.grad.clone() for b in held.blocks}
    out = one(images, tokens, labels, sample_ids=ids)
    out.loss.backward()
    theirs = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
    worst = distance({k: theirs[k] for k in ours}, ours)
    assert worst < 1e-4, worst
    assert equal_everywhere(digest(held.blocks))
    say(f"twice: gradients of {world} GPUs within {worst:.1e} of one with {world}x the batch")
    sync.close()


# ---- captured steps ------------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    losses: list
    digest: torch.Tensor
    reason: str | None
    n_captured: int
    stats: dict
    weights: dict


def train(enabled: bool, steps: int, break_on: int = -1, overlap: bool = False, clip: float = 1.0, **options):
    config = preset("tiny")
    model = Gr00tN16(config).to(device)
    held = accelerate(model, dtype=torch.bfloat16)
    sync = NexusSync(model, reduce="sum", chunk_bytes=256 << 10, timeout_s=30.0, **options)
    model.reduce_stats = sync.reduce_stats
    optimizer = AdamW(held, lr=1e-3)
    capturing = torch.cuda.is_current_stream_capturing

    def forward_backward(images, tokens, labels, ids):
        if rank == break_on and capturing():
            raise RuntimeError("planted")
        with torch.autocast("cuda", torch.bfloat16):
            out = model(images, tokens, labels, sample_ids=ids)
        out.loss.backward()
        return out.loss_sum.detach()

    step_of = StepGraph(forward_backward, optimizer, clip=clip, enabled=enabled, sync=sync, overlap_update=overlap)
    losses = []
    for step in range(steps):
        images, tokens, labels, ids = samples(step, 4 * world, config)
        part = slice(4 * rank, 4 * rank + 4)
        model.set_step(step)
        losses.append(step_of(images[part], tokens[part], labels[part], ids[part]).clone())
    losses = sync.sum(torch.stack(losses)).tolist()
    sync.settle()
    sync.check()
    weights = {b.name: b.weight.float().clone() for b in held.blocks}
    result = Trained(losses, digest(held.blocks, "weight"), step_of.reason, step_of.n_captured, sync.stats(), weights)
    assert equal_everywhere(result.digest), "replicas differ"
    began = time.monotonic()
    sync.close()
    assert time.monotonic() - began < 10, "a captured step kept the communicator from its end"
    return result


def capture():
    eager = train(False, 12)
    captured = train(True, 12)
    again = train(True, 12)
    assert captured.reason is None and captured.n_captured == 1, captured.reason
    assert captured.losses == again.losses and torch.equal(captured.digest, again.digest), "reruns differ"
    assert captured.stats["steps"] == 12, captured.stats
    worst = distance(eager.weights, captured.weights)
    assert worst < 1e-2, worst
    for clip in (1.0, 0.0):
        plain = captured if clip else train(True, 12, clip=clip)
        early = train(True, 12, clip=clip, overlap=True)
        assert early.n_captured == 1, early.reason
        same = early.losses == plain.losses and torch.equal(early.digest, plain.digest)
        assert same, "an update that begins early is another one"
        exposed = [1e6 * run.stats["exposed_s"] / 12 for run in (plain, early)]
        say(f"capture: clip {clip:g}: exposed {exposed[0]:.0f} us a step, {exposed[1]:.0f} with the update beside it")
    for shared in (train(False, 12, shard_optimizer=True), train(True, 12, shard_optimizer=True)):
        worst = distance(eager.weights, shared.weights)
        assert worst < 1e-2 and shared.n_captured == int(shared.reason is None), (worst, shared.reason)
        say(f"capture: in shares, {shared.reason or 'captured'}: weights within {worst:.1e} of the whole optimizer's")
    narrow, by_graph = train(False, 12, wire_dtype="bf16"), train(True, 12, wire_dtype="bf16")
    assert by_graph.n_captured == 1 and torch.equal(narrow.digest, by_graph.digest), by_graph.reason
    assert 0 < distance(eager.weights, narrow.weights) < 2e-2, distance(eager.weights, narrow.weights)
    assert narrow.stats["bytes"] < 0.6 * eager.stats["bytes"], (narrow.stats, eager.stats)
    say(f"capture: summed as bf16, weights within {distance(eager.weights, narrow.weights):.1e} of those summed as f32")
    say(
        f"capture: 12 steps, losses {captured.losses[0]:.2f} to {captured.losses[-1]:.2f} (eager {eager.losses[-1]:.2f}), "
        f"weights {'the same bits' if torch.equal(eager.digest, captured.digest) else f'within {worst:.1e}'}; exposed "
        f"{1e6 * captured.stats['exposed_s'] / 12:.0f} us a step"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broken = train(True, 8, break_on=world - 1)
    assert "planted" in broken.reason if rank == world - 1 else "another rank" in broken.reason, broken.reason
    assert broken.losses == eager.losses[:8], "steps behind a failed capture are not eager steps"
    say("capture: one that fails on a rank is given up on all:", broken.reason)


for name in sys.argv[1:]:
    {"sums": sums, "twice": twice, "capture": capture, "torch": lambda: sums("torch"), "sparse": sparse}[name]()
    dist.barrier()
    say(name, "passed")
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # see loongforge/train/__main__.py: gloo threads and the shutdown of the interpreter
