# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of other people's models: found, the same results and gradients as their own forward, and put back."""

import copy
import io
import pickle
import warnings

import mixtures
import pytest
import torch
from torch import nn

from loongforge import AdamW, accelerate, blocks, undo
from loongforge.loom import Routing
from loongforge.mapping import map_of
from loongforge.places import is_kept_in_f32, locate


def pair(make, dtype=torch.float32):
    torch.manual_seed(0)
    stock = make().to(dtype)
    ours = copy.deepcopy(stock)
    report = blocks.weave(ours)
    assert len(report.taken) == 1 and not report.left
    return stock, ours


def tokens(dtype=torch.float32, shape=(3, 11, mixtures.D)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(block, x, training=True):
    """-> outputs, gradients of the input and of every parameter; zero where there is none"""
    block.train(training)
    torch.manual_seed(2)
    x = x.clone().requires_grad_()
    out = block(x * 1)
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    sum((o.float() * torch.arange(o.numel()).view(o.shape).cos()).sum() for o in outs).backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in block.parameters()]
    block.zero_grad()
    return outs, [x.grad, *grads]


def close(a, b, share):
    """Within a share of the largest value."""
    assert len(a) == len(b)
    for p, q in zip(a, b):
        assert p.dtype == q.dtype
        largest = float(p.detach().abs().max()) if p.numel() else 0.0
        torch.testing.assert_close(q.float(), p.float(), rtol=0, atol=share * max(largest, 1e-3))


@pytest.mark.parametrize("name", mixtures.TAKEN)
@pytest.mark.parametrize("training", (True, False))
def test_results_and_gradients_are_the_blocks_own(name, training):
    stock, ours = pair(mixtures.TAKEN[name])
    for shape in ((3, 11, mixtures.D), (1, 1, mixtures.D), (0, 4, mixtures.D)):
        x = tokens(shape=shape)
        for a, b in zip(run(stock, x, training), run(ours, x, training)):
            close(a, b, 3e-6)


@pytest.mark.parametrize("name", mixtures.TAKEN)
def test_bf16_within_its_rounding(name):
    """Weights and tokens in bf16: three roundings in a row of 2^-9 each on either side, and sums in another order."""
    stock, ours = pair(mixtures.TAKEN[name], torch.bfloat16)
    for a, b in zip(run(stock, tokens(torch.bfloat16)), run(ours, tokens(torch.bfloat16))):
        close(a, b, 2e-2)


@pytest.mark.parametrize("name", mixtures.TAKEN)
def test_autocast_keeps_the_dtypes(name):
    stock, ours = pair(mixtures.TAKEN[name])
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(run(stock, tokens()), run(ours, tokens())):
            close(a, b, 3e-2)


def test_reruns_have_the_same_bits():
    _, ours = pair(mixtures.Noisy)
    for a, b in zip(run(ours, tokens()), run(ours, tokens())):
        close(a, b, 0)


@pytest.mark.parametrize("name", mixtures.TAKEN)
def test_undo_copies_and_pickles(name):
    stock, ours = pair(mixtures.TAKEN[name])
    names = list(ours.state_dict())
    assert names == list(stock.state_dict()) and isinstance(ours, type(stock))
    want = run(ours, tokens())
    twin = copy.deepcopy(ours)
    assert any(isinstance(m, blocks.Woven) for m in twin.modules())
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in ours.parameters()}
    close(want[0], run(twin, tokens())[0], 0)
    loaded = pickle.loads(pickle.dumps(ours))
    assert [type(m) for m in loaded.modules()] == [type(m) for m in stock.modules()]
    close(run(stock, tokens())[0], run(loaded, tokens())[0], 0)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    assert [type(m) for m in torch.load(file, weights_only=False).modules()] == [type(m) for m in stock.modules()]
    before = [dict(m.__dict__) for m in stock.modules()]
    blocks.unweave(ours)
    for m, original, attributes in zip(ours.modules(), stock.modules(), before):
        assert type(m) is type(original) and list(m.__dict__) == list(attributes)


def test_settings_are_read_when_they_are_used():
    stock, ours = pair(mixtures.Shared)
    for block in (stock, ours):
        block.norm_topk_prob = True
    close(run(stock, tokens())[0], run(ours, tokens())[0], 3e-6)
    stock, ours = pair(mixtures.Jittered)
    for block in (stock, ours):
        block.jitter_noise = 0.2
    for a, b in zip(run(stock, tokens()), run(ours, tokens())):
        close(a, b, 3e-6)


def test_a_forward_left_on_the_module_is_no_obstacle():
    """transformers 4 assigns a module's own forward back to it."""
    block = mixtures.Mixture()
    block.forward = block.forward
    assert blocks.weave(block).taken
    block.forward = block.forward
    copy.deepcopy(block)(tokens())
    blocks.unweave(block)
    assert type(block) is mixtures.Mixture
    block(tokens())


class ByName(nn.Module):
    """Calls a block by name."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x=x)


def test_arguments_go_by_position_or_by_the_blocks_own_name():
    for make in (mixtures.Mixture, mixtures.Jittered):
        _, ours = pair(make)
        close(run(ours, tokens())[0], run(ByName(ours), tokens())[0], 0)
        with pytest.raises(TypeError, match=r"expected \(x\), got 1 of them and mask"):
            ours(tokens(), mask=None)


def test_hooks_of_the_block_run():
    block, seen = mixtures.Mixture(), []
    block.register_forward_hook(lambda *_: seen.append("block"))
    block.router.register_forward_hook(lambda *_: seen.append("router"))
    blocks.weave(block)
    assert not seen  # trying it out ran a copy
    block(tokens())
    assert seen == ["router", "block"]


def test_trying_out_leaves_no_trace():
    block = mixtures.Noisy()
    block.register_buffer("calls", torch.zeros(()))
    stock_forward = mixtures.Noisy.forward

    class Counting(mixtures.Noisy):
        def forward(self, x):
            self.calls += 1
            self.last = x
            return stock_forward(self, x)

    block.__class__ = Counting
    state = torch.get_rng_state()
    block.eval()
    assert blocks.weave(block).taken
    assert block.calls == 0 and not hasattr(block, "last") and torch.equal(state, torch.get_rng_state())
    assert not block.training and all(p.grad is None for p in block.parameters())


@pytest.mark.parametrize("why", mixtures.LEFT)
def test_what_is_left_alone_says_why(why):
    block = nn.Sequential(mixtures.LEFT[why]())
    before = [type(m) for m in block.modules()]
    report = blocks.weave(block)
    assert not report.taken and len(report.left) == 1
    with pytest.raises(blocks.Unfit, match=why):
        raise blocks.Unfit(report.left[0].what)
    assert [type(m) for m in block.modules()] == before


def test_what_is_no_mixture_is_not_reported():
    dense = nn.ModuleDict(
        {
            "layers": nn.ModuleList(mixtures.SwiGLU(("gate", "up", "down"), 24) for _ in range(4)),
            "conv": nn.Conv1d(4, 4, 3),
            "head": nn.Linear(mixtures.D, 50),
        }
    )
    assert blocks.weave(dense) == ([], [])


class Net(nn.Module):
    def __init__(self, *makers):
        super().__init__()
        self.embed = nn.Embedding(40, mixtures.D)
        self.layers = nn.ModuleList(make() for make in makers)
        self.head = nn.Linear(mixtures.D, 40, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            y = layer(x)
            x = x + (y[0] if isinstance(y, tuple) else y)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batches(n, vocab=40, shape=(4, 24)):
    g = torch.Generator().manual_seed(3)
    return n // 2 * [torch.randint(0, vocab, shape, generator=g) for _ in range(2)]


def test_accelerate_reports_once_and_undo_restores():
    torch.manual_seed(4)
    model = Net(mixtures.Mixture, mixtures.Mixture, mixtures.Fused, mixtures.WithGelu)
    classes, state = [type(m) for m in model.modules()], copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="(?s)left as they are.*layers.*WithGelu.*softmax") as caught:
        held = accelerate(model)
    assert len(caught) == 1
    assert [f.name for f in held.woven.taken] == ["layers.0", "layers.1", "layers.2.experts"]
    assert [f.name for f in held.woven.left] == ["layers.3"]
    assert "2 x layers.* (Mixture) through ExpertLoom" in "\n".join(held.woven.lines())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert accelerate(model) is held and len(held.woven.taken) == 3  # again: the same
    now = model.state_dict()
    assert list(now) == list(state) and all(torch.equal(now[n], state[n]) for n in state)
    undo(model)
    assert [type(m) for m in model.modules()] == classes and map_of(model) is None
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())


def losses(model, optimizer, data):
    out = []
    for ids in data:
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def test_training_follows_the_stock_model():
    torch.manual_seed(5)
    stock = Net(mixtures.Mixture, mixtures.Shared, mixtures.Fused, mixtures.ByMethod)
    ours = copy.deepcopy(stock)
    held = accelerate(ours)
    assert len(held.woven.taken) == 4
    want = losses(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2), batches(20))
    got = losses(ours, AdamW(held, lr=1e-2), batches(20))
    assert want[-1] < want[0] - 1
    assert got == pytest.approx(want, rel=1e-4)


def test_routing_of_given_choices():
    ids = torch.tensor([[2, 0], [9, -1], [0, 0], [1, 2]])
    weight = torch.rand(4, 2)
    r = Routing.of(ids, weight, 3)
    assert r.count.tolist() == [3, 1, 2] and r.offset.tolist() == [0, 3, 4, 6]
    assert r.row.tolist() == [1, 4, 5, 6, 0, 7, 2, 3]
    x = torch.randn(4, mixtures.D)
    experts = blocks.Experts(None, (torch.randn(3, 8, mixtures.D), torch.randn(3, mixtures.D, 4)))
    y = blocks.mix_given(x, ids, weight, experts)
    assert (y[1] == 0).all() and (y[0] != 0).all()
    alone = blocks.mix_given(x[2:3], torch.tensor([[0]]), weight[2:3].sum(1, keepdim=True), experts)
    torch.testing.assert_close(y[2:3], alone)


# ---- the map -------------------------------------------------------------------------------------------------------------


def test_experts_are_located_by_structure():
    class Ffn(mixtures.Mixture):
        def __init__(self):
            super().__init__()
            self.ffns, self.experts = self.experts, None

    model = Net(mixtures.Mixture, Ffn, mixtures.Fused, lambda: mixtures.Fused(mixtures.ListedExperts), mixtures.WithGelu)
    places = locate(model)
    assert places["embed.weight"] == (-1, -1) and places["head.weight"] == (2**31 - 1, -1)
    assert places["layers.0.experts.3.up.weight"] == (0, 3) and places["layers.0.router.weight"] == (0, -1)
    assert places["layers.1.ffns.2.gate.weight"] == (1, 2)
    assert places["layers.2.experts.gate_up_proj"] == (2, -1)  # all experts in one
    assert places["layers.3.experts.5.w2.weight"] == (3, 5)
    assert places["layers.4.experts.1.down.weight"] == (4, 1)


def test_gate_and_up_lie_side_by_side_and_parameters_keep_their_order():
    class Registered(mixtures.Jittered):
        """w1, w2, w3 in this order, as Mixtral has them."""

        def __init__(self):
            super().__init__()
            for expert in self.experts:
                expert._modules = {n: expert._modules[n] for n in ("w1", "w2", "w3")}

    model = Net(Registered, mixtures.Plain)
    held = accelerate(model)
    assert [b.param for b in held.blocks] == list(model.parameters())
    for gate, up in [(e.w1, e.w3) for e in model.layers[0].experts] + [(e.a, e.b) for e in model.layers[1].experts]:
        gap = up.weight.data_ptr() - gate.weight.data_ptr()
        assert gap == gate.weight.numel() * 4 + -gate.weight.numel() * 4 % 256  # blocks start on 64 elements
    stock = torch.optim.AdamW(model.parameters())
    optimizer = AdamW(held)
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [p.shape for p in stock.param_groups[0]["params"]]


def test_routers_stay_in_f32():
    small, large = torch.zeros(8, 64), torch.zeros(2048, 64)
    for name in (
        "layers.0.moe.router.weight",
        "block_sparse_moe.gate.weight",
        "mlp.gate.wg.weight",
        "mlp.shared_expert_gate.weight",
    ):
        assert is_kept_in_f32(name, small)
    for name, param in (("experts.3.gate.weight", small), ("mlp.gate_proj.weight", small), ("mlp.gate.weight", large)):
        assert not is_kept_in_f32(name, param)
    assert is_kept_in_f32("norm.weight", torch.zeros(64))


def test_describe_names_the_mixtures():
    with pytest.warns(UserWarning, match="left as they are"):
        held = accelerate(Net(mixtures.Mixture, mixtures.Sigmoid))
    text = held.describe()
    assert "1 x layers.* (Mixture) through ExpertLoom: block with a list of experts" in text
    assert "1 x layers.* (Sigmoid) left as it is: its forward is not that of softmax" in text


# ---- products by the library: on CUDA always, here by hand ----------------------------------------------------------------


@pytest.mark.parametrize("name", mixtures.TAKEN)
@pytest.mark.parametrize("dtype, share", [(torch.float32, 5e-6), (torch.bfloat16, 3e-2)])
def test_planned_products_are_the_same(name, dtype, share):
    torch.manual_seed(0)
    stock = nn.ModuleDict({"block": mixtures.TAKEN[name]()}).to(dtype)
    ours = copy.deepcopy(stock)
    held = accelerate(ours, options={"grad_f32": False})
    assert blocks.plan_products(ours, held) == []
    for passes in (1, 2):  # the second adds to what the first left
        x = tokens(dtype)
        for model in (stock, ours):
            model.train()
            torch.manual_seed(2)
            out = model.block(x * 1)
            for o in [out] if isinstance(out, torch.Tensor) else out:
                (o.float() * torch.arange(o.numel()).view(o.shape).cos()).sum().backward(retain_graph=True)
        close(
            *([p.grad if p.grad is not None else torch.zeros_like(p) for p in m.parameters()] for m in (stock, ours)),
            passes * share,
        )
    twin = copy.deepcopy(ours)
    close(run(ours.block, x)[0], run(twin.block, x)[0], share)  # the copy has no plan
    undo(ours)
    assert not any("_lf_products" in m.__dict__ for m in ours.modules())


def test_planned_products_train_like_the_stock_model_and_survive_a_replan():
    torch.manual_seed(5)
    stock = Net(mixtures.Mixture, mixtures.Shared, mixtures.Fused, mixtures.ByMethod)
    ours = copy.deepcopy(stock)
    held = accelerate(ours)
    assert blocks.plan_products(ours, held) == []
    optimizer = AdamW(held, lr=1e-2)
    want = losses(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2), batches(20))
    got = losses(ours, optimizer, batches(20)[:10])
    held.replan()
    got += losses(ours, optimizer, batches(20)[10:])
    assert got == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("kind", [mixtures.Mixture, mixtures.ByMethod])
def test_hooks_on_an_experts_part_run(kind):
    torch.manual_seed(6)
    stock, calls = nn.ModuleDict({"block": kind()}), []
    ours = copy.deepcopy(stock)
    accelerate(ours)
    hook = ours.block.experts[1].register_forward_hook(lambda m, args, out: calls.append(1))
    with pytest.warns(RuntimeWarning, match=r"experts\.1 has hooks"):
        close([ours.block(tokens())], [stock.block(tokens())], 1e-5)
    assert calls == [1]
    ours.block(tokens())
    hook.remove()
    ours.block(tokens())
    assert calls == [1, 1]


@pytest.mark.parametrize("name", sorted(mixtures.TAKEN))
def test_no_tokens_at_all(name):
    torch.manual_seed(6)
    model = nn.ModuleDict({"block": mixtures.TAKEN[name]()})
    held = accelerate(model)
    for planned in (False, True):
        if planned:
            assert blocks.plan_products(model, held) == []
        x = tokens()[:0].requires_grad_()
        out = model.block(x)
        out = out if isinstance(out, torch.Tensor) else out[0]
        out.sum().backward()
        assert out.shape == x.shape and x.grad.shape == x.shape


def test_products_whose_experts_no_longer_fit_are_torchs_again():
    torch.manual_seed(5)
    stock = Net(mixtures.Mixture, mixtures.Fused)
    ours = copy.deepcopy(stock)
    held = accelerate(ours)
    assert blocks.plan_products(ours, held) == []
    modules = [m for m in ours.modules() if isinstance(m, blocks.Woven)]
    optimizer = AdamW(held, lr=1e-2)
    for model in (stock, ours):
        next(p for p in model.parameters() if p.shape == modules[0].describe().rows[0][0].shape).requires_grad_(False)
    with pytest.warns(RuntimeWarning, match="experts run one by one since the map was planned anew: some of"):
        held.replan()
    assert [m._lf_products.plan is None for m in modules] == [True, False]
    want = losses(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2), batches(5))
    assert losses(ours, optimizer, batches(5)) == pytest.approx(want, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", sorted(set(mixtures.TAKEN) - {"router in f32"}))  # which switches the CPU's autocast off
@pytest.mark.parametrize("kind", ("bf16 weights", "bf16 weights over masters", "f32 weights"))
def test_on_cuda_as_the_stock_block(name, kind):
    """bf16 rounds at 2^-9 on either side. f32 weights have no plan: a warning, and torch's products."""
    torch.manual_seed(0)
    stock = nn.ModuleDict({"block": mixtures.TAKEN[name]()}).cuda()
    stock = stock.bfloat16() if kind == "bf16 weights" else stock
    ours = copy.deepcopy(stock)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        held = accelerate(ours, dtype=torch.bfloat16 if "masters" in kind else None)
    assert bool(caught) == (kind == "f32 weights"), [str(w.message) for w in caught]
    x = tokens().to("cuda", torch.bfloat16 if kind == "bf16 weights" else torch.float32)
    with torch.autocast("cuda", torch.bfloat16, enabled=kind != "bf16 weights"):
        results = [run_on_map(model, held, x) for model in (stock, ours)]
    close(*results, 4e-2)


def run_on_map(model, held, x):
    torch.manual_seed(2)
    out = model.block(x * 1)
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    sum((o.float() * torch.arange(o.numel(), device=o.device).view(o.shape).cos()).sum() for o in outs).backward()
    grads = [held.block_of(p).grad if held.block_of(p) else p.grad for p in model.parameters()]
    return [o.detach().float() for o in outs] + [g.float() for g in grads]


def test_products_that_cannot_be_planned_say_why():
    model = Net(mixtures.Mixture)
    model.layers[0].experts[1].up.requires_grad_(False)
    held = accelerate(model)
    (reason,) = blocks.plan_products(model, held)
    assert "layers.0: some of the experts' weights are frozen" in reason
    assert torch.isfinite(model(batches(2)[0]))
