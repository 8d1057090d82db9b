# SPDX-License-Identifier: Apache-2.0
"""What a traced step sees, and that tracing changes nothing in it."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from test_woven import batch, sizes, woven  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from loongforge import MemSculptor  # noqa: E402


class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.last, self.inner = nn.Linear(8, 32), nn.Linear(32, 8), inner

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def traced(model, x):
    sculptor = MemSculptor(model)
    rows = sculptor.analyze_lifecycle(lambda: model(x).square().mean().backward())
    return {row["name"] for row in rows}


@pytest.mark.skipif(not hasattr(TorchDispatchMode, "ignore_compile_internals"), reason="PyTorch before 2.10")
def test_compiled_code_stays_compiled():
    calls = []

    def backend(graph, inputs):
        def run(*args):
            calls.append(len(args))
            return graph(*args)

        return run

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(torch.compile(lambda h: h.tanh().exp(), backend=backend))
    x = torch.randn(4, 8)
    before = model(x)
    assert len(calls) == 1
    names = traced(model, x)
    assert len(calls) == 2, "the traced step ran eagerly"
    assert any("exp" in name for name in names) or "compiled" in names
    assert torch.equal(model(x), before)


def test_flex_attention_can_be_traced():
    torch.manual_seed(0)

    def attend(h):
        q = h.detach().view(1, 2, -1, 16)  # its CPU form has no backward
        return h + flex_attention(q, q, q).reshape(h.shape)

    model = Net(attend)
    assert any("flex_attention" in name for name in traced(model, torch.randn(4, 8)))


def test_fused_layers_stay_fused():
    config = sizes()
    model, _ = woven(config)
    images, tokens = batch(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows = MemSculptor(model).analyze_lifecycle(lambda: model(images, tokens).loss.backward())
    assert "layers.0.attention" in {row["module"] for row in rows}
    assert not any(row["module"].startswith("layers.0.moe.experts") for row in rows)
