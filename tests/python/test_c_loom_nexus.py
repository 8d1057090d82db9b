# SPDX-License-Identifier: Apache-2.0
"""The extension's calls of ExpertLoom and NexusSync: numbers against torch, transports in Python, bad arguments."""

import gc
import math
import signal
import struct
import threading
import time
import weakref

import pytest
import torch

from loongforge import _C
from loongforge.models.noise import gumbel_noise

F32, BF16 = 1, 2
WEIGHT, GRAD, EXP_AVG, EXP_AVG_SQ = 0, 1, 3, 4


@pytest.fixture(scope="module")
def cpu():
    return _C.device_open("cpu")


def make_map(cpu, params, **options):
    """params: [(name, count, dtype, layer)] -> an allocated map"""
    m = _C.map_open(options)
    for name, count, dtype, layer in params:
        _C.map_add(m, name, (count,), dtype, layer, -1, -1, 0)
    _C.map_plan(m)
    _C.map_allocate(m, cpu)
    return m


def tensor(m, index, role):
    return torch.utils.dlpack.from_dlpack(_C.map_tensor(m, index, role))


class Routing:
    def __init__(self, n, e, k):
        self.expert, self.weight, self.prob = torch.empty(n, k, dtype=torch.int32), torch.empty(n, k), torch.empty(n, e)
        self.count, self.offset = torch.empty(e, dtype=torch.int32), torch.empty(e + 1, dtype=torch.int32)
        self.row, self.slot = torch.empty(n * k, dtype=torch.int32), torch.empty(n * k, dtype=torch.int32)
        all_of_it = (self.expert, self.weight, self.prob, self.count, self.offset, self.row, self.slot)
        self.address = tuple(t.data_ptr() for t in all_of_it)


# ---- ExpertLoom


def schedule(step, noise_scale, temperature):
    return torch.frombuffer(bytearray(struct.pack("=iff", step, noise_scale, temperature)), dtype=torch.uint8)


def loom_route(cpu, logits, token, valid, k, seed, layer, plan, routing, prob_sum):
    n, e = logits.shape
    address = [0 if t is None else t.data_ptr() for t in (token, valid, plan, prob_sum)]
    _C.loom_route(cpu, 0, logits.data_ptr(), *address[:2], n, e, k, seed, layer, address[2], routing.address, address[3])


@pytest.mark.parametrize(
    "n,e,k,masked", [(200, 16, 2, True), (1, 1, 1, False), (33, 256, 8, True), (97, 6, 6, False), (0, 4, 2, False)]
)
def test_routing_is_the_models(cpu, n, e, k, masked):
    """Noise, choice, weights, balance statistics and their gradients against models/moe.py's formulas in float64 autograd."""
    torch.manual_seed(n)
    seed, layer, step, scale, tau = 2**40 + 17, 3, 9, 0.75, 0.6
    token = torch.randint(-(2**62), 2**62, (n,))
    logits = torch.randn(n, e)
    valid = torch.rand(n) > 0.3 if masked else torch.ones(n, dtype=torch.bool)
    r, prob_sum, plan = Routing(n, e, k), torch.full((e,), math.nan), schedule(step, scale, tau)
    loom_route(cpu, logits, token, valid, k, seed, layer, plan, r, prob_sum)

    noisy = (logits + scale * gumbel_noise(seed, step, layer, token, e)) / tau  # f32, rounded as the model rounds it
    ids = noisy.topk(k, dim=-1).indices
    assert torch.equal(r.expert[valid].long(), ids[valid]) and (r.expert[~valid] == -1).all()
    a = logits.double().requires_grad_()
    full = torch.softmax((a + scale * gumbel_noise(seed, step, layer, token, e).double()) / tau, -1)
    weight = full.gather(1, ids)
    weight = weight / weight.sum(-1, keepdim=True) * valid[:, None]
    sums = (torch.softmax(a / tau, -1) * valid[:, None]).sum(0)
    torch.testing.assert_close(r.weight.double(), weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(r.prob.double(), torch.softmax(a / tau, -1).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(prob_sum.double(), sums.detach(), rtol=1e-6, atol=1e-6)

    dweight, dprob_sum, dlogits = torch.randn(n, k), torch.randn(e), torch.full((n, e), math.nan)
    ((weight * dweight).sum() + (sums * dprob_sum).sum()).backward()
    _C.loom_route_backward(
        cpu,
        0,
        r.address,
        valid.data_ptr(),
        dweight.data_ptr(),
        dprob_sum.data_ptr(),
        n,
        e,
        k,
        plan.data_ptr(),
        dlogits.data_ptr(),
    )
    torch.testing.assert_close(dlogits.double(), a.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n,e,d", [(57, 6, 24), (1, 1, 1), (300, 16, 200)])
def test_router_products_match_float64(cpu, dtype, n, e, d):
    torch.manual_seed(d)
    k, code = min(2, e), F32 if dtype is torch.float32 else BF16
    x, weight, dlogits = torch.randn(n, d, dtype=dtype), torch.randn(e, d), torch.randn(n, e)
    logits, dweight, dx = torch.full((n, e), math.nan), torch.ones(e, d), torch.full((n, d), math.nan, dtype=dtype)
    _C.loom_router(cpu, 0, x.data_ptr(), weight.data_ptr(), n, e, d, code, logits.data_ptr())
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)

    workspace = torch.empty(_C.loom_router_workspace(n, e, d), dtype=torch.uint8)
    _C.loom_router_backward(cpu, 0, dlogits.data_ptr(), x.data_ptr(), n, e, d, code, dweight.data_ptr(), 1, workspace.data_ptr())
    torch.testing.assert_close(dweight.double(), 1 + dlogits.double().T @ x.double(), rtol=1e-5, atol=1e-5)

    r, rows = Routing(n, e, k), torch.randn(n * k, d, dtype=dtype)
    loom_route(cpu, logits, None, None, k, 0, 0, None, r, None)
    _C.loom_permute_backward(
        cpu, 0, r.address, rows.data_ptr(), n, e, k, d, code, dlogits.data_ptr(), weight.data_ptr(), dx.data_ptr()
    )
    want = rows.double()[r.slot.long()].view(n, k, d).sum(1) + dlogits.double() @ weight.double()
    torch.testing.assert_close(dx.double(), want, rtol=1e-5 if code == F32 else 2**-8, atol=1e-5)


def test_layer_of_experts_matches_autograd(cpu):
    """Route, permute, one matrix an expert, combine, and all backwards, against the same in plain torch."""
    torch.manual_seed(1)
    n, e, k, d, tau = 57, 6, 2, 24, 0.7
    logits, x, dy = torch.randn(n, e), torch.randn(n, d), torch.randn(n, d)
    matrices = torch.randn(e, d, d)
    valid = torch.rand(n) > 0.2

    a, b = logits.clone().requires_grad_(), x.clone().requires_grad_()
    weight, chosen = torch.softmax(a / tau, -1).topk(k)
    weight = weight / weight.sum(-1, keepdim=True) * valid[:, None]
    y = (torch.einsum("nd,nkdf->nkf", b, matrices[chosen]) * weight[..., None]).sum(1)
    y.backward(dy)

    r = Routing(n, e, k)
    plan = schedule(0, 0.0, tau)
    loom_route(cpu, logits, None, valid, k, 0, 0, plan, r, None)
    assert torch.equal(r.expert[valid].long(), chosen[valid]) and (r.expert[~valid] == -1).all()
    rows, ys, out = torch.full((n * k, d), math.nan), torch.full((n * k, d), math.nan), torch.full((n, d), math.nan)
    _C.loom_permute(cpu, 0, r.address, x.data_ptr(), n, e, k, d, F32, rows.data_ptr())
    bounds = r.offset.tolist()
    for i in range(e):
        ys[bounds[i] : bounds[i + 1]] = rows[bounds[i] : bounds[i + 1]] @ matrices[i]
    _C.loom_combine(cpu, 0, r.address, ys.data_ptr(), n, e, k, d, F32, out.data_ptr())
    torch.testing.assert_close(out, y.detach(), rtol=1e-4, atol=1e-4)

    dys, dweight, drows = (
        torch.full((n * k, d), math.nan),
        torch.full((n, k), math.nan),
        torch.full((n * k, d), math.nan),
    )
    dlogits, dx = torch.full((n, e), math.nan), torch.full((n, d), math.nan)
    _C.loom_combine_backward(cpu, 0, r.address, ys.data_ptr(), dy.data_ptr(), n, e, k, d, F32, dys.data_ptr(), dweight.data_ptr())
    for i in range(e):
        drows[bounds[i] : bounds[i + 1]] = dys[bounds[i] : bounds[i + 1]] @ matrices[i].T
    _C.loom_permute_backward(cpu, 0, r.address, drows.data_ptr(), n, e, k, d, F32, 0, 0, dx.data_ptr())
    _C.loom_route_backward(
        cpu, 0, r.address, valid.data_ptr(), dweight.data_ptr(), 0, n, e, k, plan.data_ptr(), dlogits.data_ptr()
    )
    torch.testing.assert_close(dx, b.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dlogits, a.grad, rtol=1e-4, atol=1e-4)


def test_sort_takes_given_choices(cpu):
    n, e, k = 33, 5, 3
    expert = torch.randint(-1, e + 1, (n, k), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    r = Routing(n, e, k)
    _C.loom_sort(cpu, 0, expert.data_ptr(), n, e, k, r.address)
    inside = (expert >= 0) & (expert < e)
    flat = torch.where(inside, expert, e).flatten()
    assert torch.equal(r.row.long(), flat.argsort(stable=True))
    assert torch.equal(r.slot.long()[r.row.long()], torch.arange(n * k))
    assert torch.equal(r.count.long(), torch.bincount(flat, minlength=e + 1)[:e])
    assert torch.equal(r.offset[1:].long(), r.count.long().cumsum(0)) and r.offset[0] == 0


def test_adamw_is_torchs(cpu):
    torch.manual_seed(2)
    m = make_map(cpu, [("w", 5000, F32, 0)])
    w, g = tensor(m, 0, WEIGHT), tensor(m, 0, GRAD)
    w.copy_(torch.randn(5000))
    p = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.AdamW([p], lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    hyper = torch.zeros(_C.loom_adamw_bytes(), dtype=torch.uint8)
    for step in range(1, 21):
        p.grad = torch.randn(5000) * 0.1
        g.copy_(p.grad)
        optimizer.step()
        _C.loom_adamw_init(hyper.data_ptr(), 3e-4, 0.9, 0.95, 1e-8, 0.1, step, 1.0)
        _C.loom_adamw(m, 0, [(0, 0, 1000), (0, 1000, 4000)], hyper.data_ptr())
    torch.testing.assert_close(w, p.data, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(tensor(m, 0, EXP_AVG_SQ), optimizer.state[p]["exp_avg_sq"], rtol=2e-6, atol=1e-12)


def test_sumsq_and_add(cpu):
    m = make_map(cpu, [("a", 1000, BF16, 0), ("b", 77, BF16, 1)], grad_f32=True)
    g, source, out = tensor(m, 0, GRAD), torch.randn(1000, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.float64)
    _C.loom_add(cpu, 0, g.data_ptr(), F32, source.data_ptr(), BF16, 1000, 0, 0)
    _C.loom_add(cpu, 0, g.data_ptr(), F32, source.data_ptr(), BF16, 1000, 0, 1)
    assert torch.equal(g, 2 * source.float())
    half = torch.tensor([0.5])
    _C.loom_add(cpu, 0, g.data_ptr(), F32, source.data_ptr(), BF16, 1000, half.data_ptr(), 1)
    assert torch.equal(g, 2.5 * source.float())
    _C.loom_sumsq(m, 0, _C.map_cover(m, [0, 1]), GRAD, out.data_ptr())
    assert out.item() == pytest.approx(float(g.double().square().sum()), rel=1e-12)


def test_clip_is_torchs(cpu):
    grad = torch.randn(500)
    p = torch.nn.Parameter(torch.zeros(500))
    for max_norm in (1.0, 100.0):
        hyper, norm = torch.zeros(_C.loom_adamw_bytes(), dtype=torch.uint8), torch.zeros(1)
        _C.loom_adamw_init(hyper.data_ptr(), 1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 0.25)
        sumsq = grad.double().square().sum()
        _C.loom_clip(cpu, 0, sumsq.data_ptr(), max_norm, hyper.data_ptr(), 1, norm.data_ptr())
        p.grad = 0.25 * grad
        assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_([p], max_norm).item(), rel=1e-6)
        scale = hyper.view(torch.float32)[-1]
        torch.testing.assert_close(scale * grad, p.grad)


def test_loom_refuses_bad_arguments(cpu):
    x = torch.zeros(8)
    with pytest.raises(TypeError, match="takes 9 arguments, got 2"):
        _C.loom_add(cpu, 0)
    with pytest.raises(TypeError):
        _C.loom_add(cpu, 0, "here", F32, x.data_ptr(), F32, 8, 0, 0)
    with pytest.raises(OverflowError):
        _C.loom_add(cpu, 0, x.data_ptr(), 2**40, x.data_ptr(), F32, 8, 0, 0)
    with pytest.raises(TypeError, match="lf_device"):
        _C.loom_add(None, 0, x.data_ptr(), F32, x.data_ptr(), F32, 8, 0, 0)
    with pytest.raises(_C.Error, match="f64"):
        _C.loom_add(cpu, 0, x.data_ptr(), 4, x.data_ptr(), F32, 8, 0, 0)
    with pytest.raises(_C.Error, match="stream"):
        _C.loom_add(cpu, 4096, x.data_ptr(), F32, x.data_ptr(), F32, 8, 0, 0)  # the CPU has no native streams
    with pytest.raises(TypeError, match="7 addresses"):
        _C.loom_permute(cpu, 0, (1, 2), x.data_ptr(), 1, 1, 1, 8, F32, x.data_ptr())
    m = make_map(cpu, [("w", 10, F32, 0)])
    with pytest.raises(TypeError, match="list of"):
        _C.loom_adamw(m, 0, None, x.data_ptr())
    with pytest.raises(TypeError):
        _C.loom_adamw(m, 0, [(0, 0)], x.data_ptr())
    with pytest.raises(_C.Error, match="expected inside"):
        _C.loom_adamw(m, 0, [(0, 0, 10**6)], x.data_ptr())
    with pytest.raises(_C.Error, match="lr is -1"):
        _C.loom_adamw_init(x.data_ptr(), -1, 0.9, 0.9, 0, 0, 1, 1)


# ---- NexusSync


class Recorder:
    """A world of one that writes down what it is asked."""

    rank, world = 0, 1

    def __init__(self):
        self.posts, self.waits, self.threads = [], [], set()

    def post(self, address, count, dtype, stream):
        self.threads.add(threading.get_ident())
        self.posts.append((address, count, dtype))
        return len(self.posts)

    def wait(self, ticket, stream, timeout_s):
        assert timeout_s == 7.5
        self.waits.append(ticket)


def test_nexus_posts_from_the_thread_that_marks(cpu):
    m, t = make_map(cpu, [("a", 100, F32, 0), ("b", 3000, F32, 1), ("c", 10, BF16, 1)]), Recorder()
    nexus = _C.nexus_open(m, t, {"timeout_s": 7.5, "chunk_bytes": "4KiB"})
    chunks = _C.nexus_chunks(nexus)
    t.posts.clear()
    _C.nexus_begin(nexus)
    worker = threading.Thread(target=lambda: [_C.nexus_mark(nexus, i, 0) for i in (1, 2, 0)])
    worker.start()
    worker.join()
    assert worker.ident in t.threads and len(t.posts) == len(chunks) == 5
    _C.nexus_finish(nexus, 0)
    for (address, count, dtype), c in zip(t.posts, chunks):
        assert address == _C.map_address(m, c["klass"], c["offset"], c["count"], GRAD)
        assert (count, dtype) == (c["count"], c["dtype"]) and c["form"] == "dense" and c["bytes"] == 4 * count
    stats = _C.nexus_stats(nexus)
    assert stats["steps"] == 1 and stats["collectives"] == 5 and stats["late_blocks"] == 0


def test_nexus_hands_out_runs(cpu):
    m, t = make_map(cpu, [("a", 100, F32, 0), ("b", 3000, F32, 1), ("c", 10, BF16, 1)]), Recorder()
    nexus = _C.nexus_open(m, t, {"timeout_s": 7.5, "chunk_bytes": "4KiB"})
    chunks = _C.nexus_chunks(nexus)
    _C.nexus_begin(nexus)
    with pytest.raises(_C.Error, match="lf_nexus_flush"):
        _C.nexus_take(nexus, 0)
    t.waits.clear()
    _C.nexus_flush(nexus, 0)
    assert not t.waits
    taken = list(iter(lambda: _C.nexus_take(nexus, 0), None))
    assert [i for first, n in taken for i in range(first, first + n)] == list(range(len(chunks))) and len(t.waits) == len(chunks)
    assert [chunks[first]["run"] for first, _ in taken] == list(range(len(taken))) and len(taken) > 1
    assert _C.nexus_stats(nexus)["steps"] == 1


def test_nexus_sums_by_a_python_transport(cpu):
    """Two ranks as threads, summing through Python."""

    class World:
        def __init__(self):
            self.barrier, self.slots = threading.Barrier(2, timeout=30), [None, None]

    class End:
        world = 2

        def __init__(self, shared, rank):
            self.shared, self.rank, self.open = shared, rank, {}

        def post(self, address, count, dtype, stream):
            import ctypes

            kind = {F32: (ctypes.c_float, torch.float32), 5: (ctypes.c_int64, torch.int64)}[dtype]
            self.open[len(self.open)] = torch.frombuffer((kind[0] * count).from_address(address), dtype=kind[1])
            return len(self.open) - 1

        def wait(self, ticket, stream, timeout_s):
            s, mine = self.shared, self.open[ticket]
            s.slots[self.rank] = mine.clone()
            s.barrier.wait()
            mine.copy_(s.slots[0] + s.slots[1])
            s.barrier.wait()

    shared, failures = World(), []

    def rank(r):
        try:
            m = make_map(cpu, [("a", 100, F32, 0), ("b", 3000, F32, 1)])
            nexus = _C.nexus_open(m, End(shared, r), {})
            tensor(m, 0, GRAD).fill_(r + 1)
            tensor(m, 1, GRAD).fill_(9)
            _C.nexus_begin(nexus)
            _C.nexus_mark(nexus, 0, 0)
            if r == 0:
                _C.nexus_mark(nexus, 1, 0)  # rank 1 has no gradient for b
            _C.nexus_finish(nexus, 0)
            assert (tensor(m, 0, GRAD) == 1.5).all() and (tensor(m, 1, GRAD) == 4.5).all()
        except BaseException as error:
            failures.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_nexus_turns_exceptions_into_errors(cpu):
    class Broken(Recorder):
        fail = None

        def post(self, address, count, dtype, stream):
            if self.fail == "post":
                raise ValueError("no route to rank 3")
            return "ticket" if self.fail == "ticket" else super().post(address, count, dtype, stream)

        def wait(self, ticket, stream, timeout_s):
            if self.fail == "wait":
                raise TimeoutError("gloo gave up")

        def query(self, ticket):
            if self.fail == "query":
                raise RuntimeError("asked too much")
            return False

    expected = {
        "post": ("ERR_PEER", "ValueError: no route to rank 3"),
        "ticket": ("ERR_PEER", "TypeError"),
        "wait": ("ERR_TIMEOUT", "TimeoutError: gloo gave up"),
        "query": ("ERR_PEER", "RuntimeError: asked too much"),
    }
    for fail, (status, text) in expected.items():
        m, t = make_map(cpu, [("a", 100, F32, 0)]), Broken()
        nexus = _C.nexus_open(m, t, {"timeout_s": 7.5})
        t.fail = fail
        _C.nexus_begin(nexus)
        with pytest.raises(_C.Error) as error:
            _C.nexus_mark(nexus, 0, 0)
            _C.nexus_finish(nexus, 0)
        assert (
            error.value.args[1] == status and text in error.value.args[2] and "chunk 0 of 1 (group dense" in error.value.args[2]
        )
        with pytest.raises(_C.Error):
            _C.nexus_begin(nexus)


def test_nexus_does_not_swallow_ctrl_c(cpu):
    class Interrupted(Recorder):
        def wait(self, ticket, stream, timeout_s):
            if self.armed:
                raise KeyboardInterrupt

    m, t = make_map(cpu, [("a", 100, F32, 0)]), Interrupted()
    t.armed = False
    nexus = _C.nexus_open(m, t)
    t.armed = True
    _C.nexus_begin(nexus)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process starts with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            try:
                _C.nexus_finish(nexus, 0)
            except _C.Error:
                pass
            for _ in range(1000):
                time.sleep(0.001)
    finally:
        signal.signal(signal.SIGINT, before)


def test_nexus_loopback_and_schedule_alone(cpu):
    m = make_map(cpu, [("a", 100, F32, 0)])
    nexus = _C.nexus_open(m, "loopback")
    tensor(m, 0, GRAD).fill_(3)
    _C.nexus_begin(nexus)
    _C.nexus_mark(nexus, 0, 0)
    with pytest.raises(_C.Error, match="a is marked twice"):
        _C.nexus_mark(nexus, 0, 0)
    _C.nexus_finish(nexus, 0)
    assert (tensor(m, 0, GRAD) == 3).all()
    nexus.close()
    with pytest.raises(ValueError, match="closed"):
        _C.nexus_begin(nexus)
    plan = _C.nexus_open(m, None)
    assert len(_C.nexus_chunks(plan)) == 1
    with pytest.raises(_C.Error, match="without a transport"):
        _C.nexus_begin(plan)


def test_nexus_refuses_bad_arguments(cpu):
    m = make_map(cpu, [("a", 100, F32, 0)])
    with pytest.raises(ValueError, match="carrier"):
        _C.nexus_open(m, "carrier pigeon")
    with pytest.raises(AttributeError):
        _C.nexus_open(m, object())
    with pytest.raises(_C.Error, match="comm_strategy"):
        _C.nexus_open(m, "loopback", {"comm_strategy": "sparser"})
    with pytest.raises(_C.Error, match="chunk_byte"):
        _C.nexus_open(m, "loopback", {"chunk_byte": 1})
    nexus = _C.nexus_open(m, "loopback")
    with pytest.raises(TypeError):
        _C.nexus_mark(nexus, 0)
    with pytest.raises(TypeError):
        _C.nexus_mark(nexus, "a", 0)
    _C.nexus_begin(nexus)
    with pytest.raises(_C.Error, match="block -1"):
        _C.nexus_mark(nexus, 2**40, 0)


def test_nexus_lets_go_of_its_transport(cpu):
    m, t = make_map(cpu, [("a", 100, F32, 0)]), Recorder()
    gone = weakref.ref(t)
    nexus = _C.nexus_open(m, t, {"timeout_s": 7.5})
    del t
    gc.collect()
    assert gone() is not None
    del nexus
    gc.collect()
    assert gone() is None
