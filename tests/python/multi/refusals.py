# SPDX-License-Identifier: Apache-2.0
"""Run by test_nexus.py on two ranks: equal starts; gradients that would be reduced twice are refused."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from loongforge import NexusSync, accelerate, undo

dist.init_process_group("gloo")
rank = dist.get_rank()


def model():
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))


def equal(tensor):
    other = tensor.detach().clone()
    dist.broadcast(other, 0)
    return torch.equal(other, tensor)


def refused(fn):
    try:
        fn()
    except RuntimeError as error:
        return "no_sync" in str(error)
    return False


net = model()
sync = NexusSync(net, reduce="sum")
assert all(equal(p) for p in net.parameters())
x = torch.randn(4, 8)
net(x).square().sum().backward()
assert all(equal(p.grad) for p in net.parameters())
assert refused(lambda: net(x).square().sum().backward())
sync.close()

for zero in (lambda m: m.zero_grad(), lambda m: m.zero_grad(set_to_none=False)):
    net = model()
    sync = NexusSync(net, reduce="sum")
    for _ in range(3):  # zeroing in either form makes the next pass a new one
        net(x).square().sum().backward()
        zero(net)
    with sync.no_sync():
        net(x).square().sum().backward()
    net(x).square().sum().backward()
    reference = model()
    reference.load_state_dict(net.state_dict())
    (2 * reference(x).square().sum()).backward()
    for p, q in zip(net.parameters(), reference.parameters()):
        total = q.grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(p.grad, total)
    sync.close()

net = model()
accelerate(net)
sync = NexusSync(net, skip_empty=True)
assert "skip_empty skips nothing" in sync.describe()
try:
    undo(net)
    raise SystemExit("undone under a NexusSync, which would reduce nothing any more")
except RuntimeError as error:
    assert "sync.close() first" in str(error)
net(x).square().sum().backward()
assert all(equal(p.grad) for p in net.parameters())
sync.close()
undo(net)

net = model()
sync = NexusSync(net, reduce="sum")
y = x.clone().requires_grad_()
for layer in net:
    y = checkpoint(layer, y, use_reentrant=True)
assert refused(lambda: y.square().sum().backward())
print("all refused", flush=True)
# Ranks whose gradients or moments have other dtypes lay their planes out in another way.
for option in ("moments_bf16", "grad_f32"):
    net = model().bfloat16()
    accelerate(net, options={option: rank == 1})
    try:
        NexusSync(net)
        raise AssertionError(f"ranks that differ in {option} were let through")
    except RuntimeError as error:
        assert "planned different maps" in str(error) and "[map] options on every rank" in str(error), error
    undo(net)

dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # see loongforge/train/__main__.py: gloo threads and the shutdown of the interpreter
