# SPDX-License-Identifier: Apache-2.0
"""Run by test_mpi.py under mpirun: what ranks tell one another, and gradients of a small model, without torch.distributed."""

import os

import torch
from torch import nn

from loongforge import NexusSync, mpi, nccl_allreduce

torch.set_num_threads(1)
r = mpi.peers()
assert mpi.launched() == (r.rank, int(os.environ["OMPI_COMM_WORLD_SIZE"]), r.rank)
torch.manual_seed(r.rank)  # unequal starts

assert r.gather(("rank", r.rank), "names") == [("rank", i) for i in range(r.world)]
assert r.gather("x" * r.rank, "lengths") == ["x" * i for i in range(r.world)]
assert r.largest(r.rank + 5, "a number") == r.world + 4
assert r.from_first(lambda: [7, r.rank], "rank 0's word") == [7, 0]
assert r.share([r.rank, None], "a list") == [0, None]
for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
    for n in (0, 1, 13):
        t = torch.full((n,), r.rank + 3).to(dtype)
        r.broadcast(t, "a tensor")
        assert (t == 3).all() and t.dtype == dtype

model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 7))
sync = NexusSync(model, transport="mpi", reduce="sum", chunk_bytes=4096)
assert sync.transport == "mpi" and sync.world == r.world and "rank" in sync.describe()
digests = r.gather([p.detach().double().sum().item() for p in model.parameters()], "weights")
assert all(d == digests[0] for d in digests), "rank 0's weights did not come"


def gradients(rank):
    x = torch.arange(80.0).reshape(4, 20) % 7 + rank
    twin = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 7))
    twin.load_state_dict(model.state_dict())
    twin(x).sum().backward()
    return [p.grad for p in twin.parameters()], x


for _ in range(2):
    alone = [gradients(rank)[0] for rank in range(r.world)]
    model.zero_grad()
    model(gradients(r.rank)[1]).sum().backward()
    for i, p in enumerate(model.parameters()):
        assert torch.allclose(p.grad, sum(g[i] for g in alone), rtol=1e-5), f"parameter {i}"
    sync._reopen()  # as a map that is planned anew does: MPI goes on
assert sync.agree(True) and not sync.agree(r.rank != 1)
assert sync.sum(torch.tensor([1, r.rank])).tolist() == [r.world, r.world * (r.world - 1) // 2]
sync.close()
sync = NexusSync(model, "sparse", transport="mpi", reduce="sum", chunk_bytes=4096, k_ratio=0.3)  # posts come from a worker
for _ in range(3):
    model.zero_grad()
    model(gradients(r.rank)[1]).sum().backward()
    all_bits = r.gather([p.grad.clone() for p in model.parameters()], "gradients")
    assert all(torch.equal(a, b) for other in all_bits for a, b in zip(all_bits[0], other, strict=True))
assert sync.sparse and any((p.grad == 0).any() and (p.grad != 0).any() for p in model.parameters())
sync.close()
sync = NexusSync(model, transport="mpi", probe=True)  # whatever it chooses, all ranks choose alike
assert all(rows == sync.chunks() for rows in r.gather(sync.chunks(), "forms"))
try:
    nccl_allreduce(torch.ones(3))
    raise SystemExit("nccl_allreduce took the ranks for one")
except RuntimeError as error:
    assert "torch.distributed" in str(error)
assert r.recent()[-1]["what"] == "forms" and r.recent()[-1]["state"] == "done"
print("rank passed")
