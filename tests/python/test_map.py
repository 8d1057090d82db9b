# SPDX-License-Identifier: Apache-2.0
"""The life of PyTorch objects on the map: each right, or refused with a sentence."""

import copy
import gc
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loongforge
from loongforge import _C, AdamW, ParameterMap
from loongforge.mapping import EXP_AVG, current, locate, map_of


class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(d, h, bias=False),
            nn.Linear(d, h, bias=False),
            nn.Linear(h, d, bias=False),
        )

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, d, sizes):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(d), nn.Linear(d, d)
        self.experts = nn.ModuleList(Expert(d, h) for h in sizes)

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        return x + sum(e(x) for e in self.experts)


class Net(nn.Module):
    """Embedding tied to the head, two layers of three unequal experts."""

    def __init__(self, d=16, vocab=20, sizes=(24, 8, 16)):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, sizes) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.fixture
def ids():
    return torch.randint(0, 20, (4, 12), generator=torch.Generator().manual_seed(5))


def net(seed=0, dtype=None, **kw):
    torch.manual_seed(seed)
    model = Net(**kw)
    return model.to(dtype) if dtype else model


def pair(**kw):
    stock, ours = net(**kw), net(**kw)
    return stock, ours, ParameterMap(ours)


def same(a, b, **kw):
    torch.testing.assert_close(a, b, rtol=0, atol=0, **kw)


def test_parameters_are_views_with_storages_of_their_own():
    model = net()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    objects = {n: p for n, p in model.named_parameters()}
    held = ParameterMap(model)
    for name, p in model.named_parameters():
        assert p is objects[name]
        same(p.detach(), before[name])
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
    flat = torch.utils.dlpack.from_dlpack(_C.map_flat(held.handle, 0, 0, _C.map_classes(held.handle)[0]["count"], 0))
    first = min(held.blocks, key=lambda b: b.info["offset"])
    with torch.no_grad():
        first.param.fill_(7)
    assert (flat[: first.param.numel()] == 7).all()


def test_places_follow_the_module_tree():
    places = locate(net())
    assert places["embed.weight"] == (-1, -1)
    assert places["layers.1.experts.2.up.weight"] == (1, 2)
    assert places["layers.0.mix.bias"] == (0, -1)
    assert places["norm.weight"][0] == 2**31 - 1


def test_the_slab_outlives_the_map_while_a_tensor_lives():
    model = net()
    held = ParameterMap(model)
    weight = held.blocks[0].weight
    value = weight.clone()
    del held, model
    gc.collect()
    junk = [torch.full((1 << 16,), float(i)) for i in range(20)]
    same(weight, value)
    del junk


def train(model, optimizer, ids, steps=4, zero=None):
    losses = []
    for _ in range(steps):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        zero(optimizer, model) if zero else optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "zero",
    [
        lambda o, m: o.zero_grad(),
        lambda o, m: o.zero_grad(set_to_none=False),
        lambda o, m: m.zero_grad(),
        lambda o, m: m.zero_grad(set_to_none=False),
    ],
    ids=["optimizer-none", "optimizer-zero", "module-none", "module-zero"],
)
def test_training_equals_torch_in_each_zero_grad_form(ids, zero):
    stock, ours, held = pair()
    a = train(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2), ids, zero=zero)
    b = train(ours, AdamW(held, lr=1e-2), ids, zero=zero)
    assert a == pytest.approx(b, rel=1e-6)
    for (n, p), q in zip(stock.named_parameters(), ours.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=n)


def test_a_stock_optimizer_works_on_the_map(ids):
    stock, ours, held = pair()
    a = train(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2), ids)
    b = train(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2), ids)
    assert a == b
    held.check()


def test_gradients_are_the_maps_memory(ids):
    _, ours, held = pair()
    ours(ids).backward()
    for b in held.blocks:
        assert b.param.grad.data_ptr() == b.grad.data_ptr()


def test_gradient_accumulation_and_two_forwards_before_a_backward(ids):
    stock, ours, held = pair()
    for model in (stock, ours):
        model(ids[:2]).backward()
        model(ids[2:]).backward()
        first, second = model(ids[:3]), model(ids[1:])
        (first + second).backward()
    for p, q in zip(stock.parameters(), ours.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-7)


def test_accumulation_in_f32_under_bf16_weights(ids):
    ours = net(dtype=torch.bfloat16)
    held = ParameterMap(ours)
    exact = {}
    for part in (ids[:2], ids[2:]):
        reference = net(dtype=torch.bfloat16)
        reference(part).backward()
        for n, p in reference.named_parameters():
            exact[n] = exact.get(n, 0) + p.grad.float()
        ours(part).backward()
    for b in held.blocks:
        assert b.grad.dtype == torch.float32 and b.param.grad is None
        same(b.grad, exact[b.name])
    AdamW(held, lr=1e-3).step()
    ours(ids[:2]).backward()  # the step consumed them: this overwrites
    reference = copy.deepcopy(ours)
    reference(ids[:2]).backward()
    for b, p in zip(held.blocks, reference.parameters()):
        same(b.grad, p.grad.float())
    held.zero_grad()
    assert held.gradients_present() == []


def test_bf16_training_keeps_masters(ids):
    ours = net(dtype=torch.bfloat16)
    held = ParameterMap(ours)
    train(ours, AdamW(held, lr=1e-4), ids, steps=3)
    for b in held.blocks:
        same(b.master.bfloat16(), b.param.detach())
    assert any((b.master != b.param.float()).any() for b in held.blocks)  # finer than bf16


def test_state_dict_round_trip(ids):
    stock, ours, held = pair()
    assert list(stock.state_dict()) == list(ours.state_dict())
    optimizer = AdamW(held, lr=1e-2)
    train(ours, optimizer, ids)
    saved, saved_optimizer = copy.deepcopy(ours.state_dict()), copy.deepcopy(optimizer.state_dict())
    after = train(ours, optimizer, ids)
    other = net(seed=9)
    other_map = ParameterMap(other)
    other_optimizer = AdamW(other_map, lr=1e-2)
    assert str(other.load_state_dict(saved)) == "<All keys matched successfully>"
    other_optimizer.load_state_dict(saved_optimizer)
    other_map.check()
    assert (
        other_optimizer.state[other_map.blocks[0].param]["exp_avg"].data_ptr()
        == other_map.tensor(other_map.blocks[0], EXP_AVG).data_ptr()
    )
    assert train(other, other_optimizer, ids) == after
    torch_optimizer = torch.optim.AdamW(net().parameters())
    torch_optimizer.load_state_dict(saved_optimizer)  # names and shapes are torch's


def test_f32_state_leaves_and_enters_through_masters(ids):
    model = net()
    before = copy.deepcopy(model.state_dict())
    held = ParameterMap(model, dtype=torch.bfloat16, keep_f32=lambda name, p: False)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    for n, v in model.state_dict().items():
        same(v, before[n])  # exact: masters start from the values before rounding
    train(model, AdamW(held, lr=1e-4), ids)
    wanted = {n: v * 1.0001 for n, v in model.state_dict().items()}
    model.load_state_dict(wanted)
    for b in held.blocks:
        same(b.master, wanted[b.name])
        same(b.param.detach(), wanted[b.name].bfloat16())


def test_norms_and_routers_stay_f32():
    held = ParameterMap(net(), dtype=torch.bfloat16)
    kinds = {b.name: b.param.dtype for b in held.blocks}
    assert kinds["layers.0.norm.weight"] == torch.float32 and kinds["layers.0.mix.weight"] == torch.bfloat16
    assert kinds["layers.1.experts.0.gate.weight"] == torch.bfloat16


def test_torch_save_holds_the_parameter_alone(ids):
    _, ours, held = pair()
    for one in (ours.embed.weight, ours.embed.weight.detach()):
        buffer = io.BytesIO()
        torch.save(one, buffer)
        assert buffer.tell() < one.numel() * 4 + 4096
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    for n, v in torch.load(buffer, weights_only=True).items():
        same(v, ours.state_dict()[n])


def test_deepcopy_and_pickle_give_ordinary_models(ids):
    _, ours, held = pair()
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(ours), torch.load(buffer, weights_only=False)):
        assert map_of(other) is None
        inside = {b.param.data_ptr() for b in held.blocks}
        assert not inside & {p.data_ptr() for p in other.parameters()}
        assert other.head.weight is other.embed.weight
        with torch.no_grad():
            other.embed.weight.add_(1)
        other(ids).backward()
        same(other.state_dict()["embed.weight"], other.embed.weight.detach())
        other.load_state_dict(ours.state_dict())
        same(other.embed.weight.detach(), ours.embed.weight.detach())
    held.check()
    assert all(not b.has_grad for b in held.blocks)


def test_a_moved_parameter_is_named(ids):
    _, ours, held = pair()
    optimizer = AdamW(held)
    ours.to("cpu")
    held.check()
    ours.layers[1].mix.half()
    with pytest.raises(RuntimeError, match=r"layers\.1\.mix\.\w+ left the map"):
        optimizer.step()
    _, ours, held = pair()
    ours.load_state_dict(net(seed=3).state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="embed.weight was replaced"):
        held.check()


def test_tied_weights_share_one_block(ids):
    stock, ours, held = pair()
    assert [b.names for b in held.blocks if "embed.weight" in b.names] == [["embed.weight", "head.weight"]]
    stock(ids).backward()
    ours(ids).backward()
    torch.testing.assert_close(stock.embed.weight.grad, ours.embed.weight.grad, rtol=1e-6, atol=1e-7)


def test_frozen_weights_stay_and_unfreezing_replans(ids):
    stock, ours = net(), net()
    for model in (stock, ours):
        model.layers[0].requires_grad_(False)
    held = ParameterMap(ours)
    frozen = ours.layers[0].mix.weight.detach().clone()
    optimizer = AdamW(held, lr=1e-2)
    a = train(stock, torch.optim.AdamW([p for p in stock.parameters() if p.requires_grad], lr=1e-2), ids)
    assert train(ours, optimizer, ids) == pytest.approx(a, rel=1e-6)
    same(ours.layers[0].mix.weight.detach(), frozen)
    with pytest.raises(ValueError, match="no exp_avg"):
        _C.map_tensor(held.handle, held.block_of(ours.layers[0].mix.weight).index, EXP_AVG)
    values = {n: p.detach().clone() for n, p in ours.named_parameters()}
    ours.layers[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="unfrozen after planning"):
        optimizer.step()
    held.replan()
    held.check()
    for n, p in ours.named_parameters():
        same(p.detach(), values[n])
    optimizer.add_param_group({"params": list(ours.layers[0].parameters())})
    ours(ids).backward()
    optimizer.step()
    assert (ours.layers[0].mix.weight != frozen).any()


def test_user_edits_reach_the_masters(ids):
    ours = net(dtype=torch.bfloat16)
    held = ParameterMap(ours)
    optimizer = AdamW(held, lr=0.0, weight_decay=0.0)
    with torch.no_grad():
        ours.embed.weight.mul_(2)
    edited = ours.embed.weight.detach().clone()
    ours(ids).backward()
    optimizer.step()
    same(ours.embed.weight.detach(), edited)
    ours.embed.weight.data.mul_(2)  # invisible
    held.refresh()
    edited = ours.embed.weight.detach().clone()
    ours(ids).backward()
    optimizer.step()
    same(ours.embed.weight.detach(), edited)


def test_a_graph_kept_across_a_step_is_refused(ids):
    _, ours, held = pair()
    optimizer = AdamW(held, lr=1e-2)
    loss = ours(ids)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_without_a_gradient_are_left_alone(ids):
    stock, ours, held = pair()
    optimizers = torch.optim.AdamW(stock.parameters(), lr=1e-2), AdamW(held, lr=1e-2)
    for model, optimizer in zip((stock, ours), optimizers):
        for _ in range(3):
            optimizer.zero_grad()
            model(ids).backward()
            model.layers[0].mix.weight.grad = None
            optimizer.step()
    for (n, p), q in zip(stock.named_parameters(), ours.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=n)
    same(ours.layers[0].mix.weight.detach(), net().layers[0].mix.weight.detach())


def test_clipping_equals_torch(ids):
    stock, ours, held = pair()
    a, b = torch.optim.AdamW(stock.parameters(), lr=1e-2), AdamW(held, lr=1e-2)
    for _ in range(3):
        for (
            model,
            optimizer,
        ) in ((stock, a), (ours, b)):
            optimizer.zero_grad()
            model(ids).backward()
        norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.1)
        assert b.clip_grad_norm_(0.1).item() == pytest.approx(norm.item(), rel=1e-5)
        a.step()
        b.step()
    for p, q in zip(stock.parameters(), ours.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_param_groups_are_live(ids):
    stock, ours, held = pair()

    def groups(model):
        decay = [p for p in model.parameters() if p.dim() > 1]
        return [{"params": decay}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]

    a, b = (
        torch.optim.AdamW(groups(stock), lr=1e-2, weight_decay=0.3),
        AdamW(groups(ours), lr=1e-2, weight_decay=0.3, map=held),
    )
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.5**s) for o in (a, b)]
    for _ in range(3):
        for model, optimizer, schedule in zip((stock, ours), (a, b), schedules):
            optimizer.zero_grad()
            model(ids).backward()
            optimizer.step()
            schedule.step()
    for (n, p), q in zip(stock.named_parameters(), ours.named_parameters()):
        torch.testing.assert_close(p, q[1], rtol=1e-5, atol=1e-6, msg=n)


def test_pools_take_head_room_without_losing_anything(ids):
    _, ours, held = pair()
    optimizer = AdamW(held, lr=1e-2)
    a = train(ours, optimizer, ids, steps=2)
    ours(ids).backward()
    grads = {b.name: b.grad.clone() for b in held.blocks}
    with pytest.raises(loongforge.Error, match="set to 100 bytes, its parameters need"):
        held.set_pool_size("expert_0", 100)
    held.check()
    held.set_pool_size("expert_0", 64 << 10)
    held.check()
    for b in held.blocks:
        same(b.param.grad, grads[b.name])
    room = [p for p in _C.map_pools(held.handle) if p[0].endswith("expert00")]
    assert len(room) == 2 and all(p[5] * 4 >= 64 << 10 for p in room)
    optimizer.step()
    optimizer.zero_grad()
    other = net()
    other_map = ParameterMap(other)
    other_optimizer = AdamW(other_map, lr=1e-2)
    b = train(other, other_optimizer, ids, steps=3)
    assert a == b[:2]
    assert train(ours, optimizer, ids) == train(other, other_optimizer, ids)


def test_wrappers_beside_the_map_are_refused(ids, tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(RuntimeError, match="DistributedDataParallel"):
            ParameterMap(wrapped)
        ours = net()
        held = ParameterMap(ours)
        with pytest.raises(RuntimeError, match="reduced twice"):
            nn.parallel.DistributedDataParallel(ours)(ids)
        del held
    finally:
        dist.destroy_process_group()


def test_current_map_is_the_only_one(ids):
    gc.collect()
    with pytest.raises(RuntimeError, match="there is none"):
        current()
    one = ParameterMap(net())
    assert current() is one
    two = ParameterMap(net())
    with pytest.raises(RuntimeError, match="there are 2"):
        current()
    del two
    gc.collect()
    assert current() is one


def test_undo_gives_an_ordinary_model(ids):
    stock, ours, held = pair()
    inside = {b.param.data_ptr() for b in held.blocks}
    held.release()
    assert map_of(ours) is None
    assert not inside & {p.data_ptr() for p in ours.parameters()}
    assert train(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2), ids) == train(
        ours, torch.optim.AdamW(ours.parameters(), lr=1e-2), ids
    )


def test_bad_models_are_refused():
    with pytest.raises(TypeError, match="float64"):
        ParameterMap(nn.Linear(2, 2).double())
    model = net()
    held = ParameterMap(model)
    with pytest.raises(RuntimeError, match="on a map already"):
        ParameterMap(model)
    with pytest.raises(TypeError, match="needs the parameters' map"):
        AdamW(model.parameters())
    with pytest.raises(ValueError, match="lr is -1"):
        AdamW(held, lr=-1)
    with pytest.raises(loongforge.Error, match="expert_7"):
        held.set_pool_size("expert_7", 1 << 20)
    held.check()


class HalfUsed(torch.autograd.Function):
    """Gives the second parameter a gradient and the first none, as a layer does whose expert had no token."""

    @staticmethod
    def forward(ctx, unused, used):
        return used.sum()

    @staticmethod
    def backward(ctx, grad):
        return None, grad.expand(3).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_none_is_no_gradient(dtype):
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)])
    held = ParameterMap(model)
    heard = []
    held.passes.on_gradient(lambda b: heard.append(b.name))
    for b in held.blocks:
        b.grad.fill_(7)  # what an earlier step left
    HalfUsed.apply(*model).backward()
    assert heard == ["1"]
    assert [b.name for b in held.gradients_present()] == ["1"]
    assert held.blocks[1].grad.tolist() == [1, 1, 1]


@pytest.mark.parametrize("take", [loongforge.accelerate, loongforge.NexusSync, loongforge.MemSculptor, ParameterMap])
def test_what_is_no_model_is_refused(take):
    with pytest.raises(TypeError, match="model is a str, expected a torch.nn.Module"):
        take("model")
