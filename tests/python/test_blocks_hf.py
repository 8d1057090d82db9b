# SPDX-License-Identifier: Apache-2.0
"""Tiny randomly initialised models of Hugging Face transformers, accelerated against stock. Skipped without transformers; the
shapes of their blocks are in mixtures.py and tested always."""

import copy
import os

import pytest
import torch

from loongforge import AdamW, accelerate, blocks, undo

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
COMMON = dict(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    num_experts_per_tok=2,
    router_aux_loss_coef=0.02,
    output_router_logits=True,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "Mixtral": dict(num_local_experts=4),
    "Mixtral with jitter": dict(num_local_experts=4, router_jitter_noise=0.1),
    "Olmoe": dict(num_experts=8, num_key_value_heads=4),
    "Qwen2Moe": dict(num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=40),
    "Qwen3Moe": dict(num_experts=6, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True),
    "Qwen3Moe without norm": dict(num_experts=6, moe_intermediate_size=24, head_dim=8, norm_topk_prob=False),
}


def make(name):
    family = name.split()[0]
    config = getattr(transformers, f"{family}Config")(**COMMON | MODELS[name])
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


def pair(name):
    stock = make(name)
    ours = copy.deepcopy(stock)
    held = accelerate(ours)
    assert len(held.woven.taken) == 2 and not held.woven.left
    return stock, ours, held


def batch(number, rows=6):
    return torch.randint(3, 60, (rows, 20), generator=torch.Generator().manual_seed(number))


def step(model, ids):
    torch.manual_seed(1)  # of the jitter
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name):
    """f32: sums in another order, two layers deep. The loss has the routers' auxiliary loss in it."""
    stock, ours, _ = pair(name)
    want, got = step(stock, batch(1)), step(ours, batch(1))
    for a, b in ((want.loss, got.loss), (want.aux_loss, got.aux_loss), (want.logits, got.logits)):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
    assert len(got.router_logits) == len(want.router_logits) == 2
    torch.testing.assert_close(got.router_logits[1], want.router_logits[1], rtol=1e-5, atol=1e-5)
    for (n, p), q in zip(stock.named_parameters(), ours.parameters()):
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(q.grad, grad, rtol=0, atol=1e-5 * max(float(grad.abs().max()), 1e-3), msg=n)


@pytest.mark.parametrize("name", MODELS)
def test_training_twenty_steps(name):
    stock, ours, held = pair(name)
    losses = []
    for model, optimizer in ((stock, torch.optim.AdamW(stock.parameters(), lr=3e-3)), (ours, AdamW(held, lr=3e-3))):
        losses.append([])
        for i in range(20):
            losses[-1].append(step(model, batch(i % 2)).loss.item())
            optimizer.step()
            optimizer.zero_grad()
    want, got = losses
    assert want[-1] < want[0] - 0.3
    assert got == pytest.approx(want, rel=2e-4)


def test_bf16_weights_and_autocast():
    """bf16 rounds at 2^-9; near-ties of the router may fall the other way, so the loss is compared and not the logits."""
    for kind in ("weights", "autocast"):
        stock = make("Qwen2Moe")
        if kind == "weights":
            stock = stock.bfloat16()
        ours = copy.deepcopy(stock)
        accelerate(ours)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            want, got = step(stock, batch(1)), step(ours, batch(1))
        assert got.loss.dtype == want.loss.dtype and got.logits.dtype == want.logits.dtype
        assert float(got.loss.detach()) == pytest.approx(float(want.loss.detach()), abs=2e-2)


def test_bf16_weights_over_f32_masters_under_autocast():
    stock = make("Mixtral")
    ours = copy.deepcopy(stock)
    held = accelerate(ours, dtype=torch.bfloat16)
    optimizer = AdamW(held, lr=1e-3)
    routers = [p for n, p in ours.named_parameters() if n.endswith("gate.weight")]
    assert len(routers) == 2 and all(p.dtype == torch.float32 for p in routers)
    for i in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(ours, batch(i)).loss
        assert torch.isfinite(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert all(v.dtype == torch.float32 for v in ours.state_dict().values())


@pytest.mark.parametrize("name", ("Mixtral", "Qwen2Moe"))
def test_state_dict_copies_and_undo(name, tmp_path):
    stock, ours, _ = pair(name)
    assert {n: p.shape for n, p in ours.state_dict().items()} == {n: p.shape for n, p in stock.state_dict().items()}
    twin = copy.deepcopy(ours)
    torch.testing.assert_close(step(twin, batch(1)).loss, step(ours, batch(1)).loss, rtol=0, atol=0)
    ours.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(batch(2)).logits, stock.eval()(batch(2)).logits, rtol=1e-5, atol=1e-5)
    undo(ours)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    assert not any(isinstance(m, blocks.Woven) for m in ours.modules())
    torch.testing.assert_close(ours.eval()(batch(2)).logits, stock(batch(2)).logits, rtol=0, atol=0)


def test_gradient_checkpointing():
    stock, ours, _ = pair("Olmoe")
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.testing.assert_close(step(ours, batch(1)).loss, step(stock, batch(1)).loss, rtol=1e-5, atol=1e-5)
    for p, q in zip(stock.parameters(), ours.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-5 * max(float(p.grad.abs().max()), 1e-3))
