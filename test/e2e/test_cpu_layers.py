"""SGLang's own layers with our kernels give what they give without, and what we leave stays."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("sglang", reason="needs sglang")

from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding import base as rotary_base
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

from sglang_ssd.platform import cpu_layer_ops, cpu_linear
from sglang_ssd.platform.cpu import SsdCpuPlatform
from sglang_ssd_kernels import skinny_linear

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def on_our_platform(monkeypatch):
    """The tests' process may be one in which SGLang settled on no platform."""
    monkeypatch.setattr(rotary_base, "current_platform", SsdCpuPlatform())


class Model(nn.Module):
    """The kinds of layer that a served model has, the lm_head tied to the input embedding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(130, 64, params_dtype=dtype, enable_tp=False)
        self.proj = ReplicatedLinear(64, 50, bias=True, params_dtype=dtype)
        self.plain = nn.Linear(64, 50)
        self.lm_head = self.embed_tokens
        for parameter in self.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_and_a_tied_lm_head(dtype):
    model = Model(dtype)
    x = torch.randn(5, 64).to(dtype)
    stock = model.proj(x)[0], model.lm_head.quant_method.apply(model.lm_head, x)
    assert cpu_linear.use_cpu_linear_layers(model) == 2
    ours = model.proj(x)[0], model.lm_head.quant_method.apply(model.lm_head, x)
    for out, expected in zip(ours, stock, strict=True):
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=0.05)
    embedded = model.embed_tokens.quant_method.embedding(model.embed_tokens, torch.tensor([3]))
    assert embedded.equal(model.embed_tokens.weight[3:4])
    assert cpu_linear.use_cpu_linear_layers(model) == 0  # a second call finds nothing to do


def test_any_number_of_rows_takes_the_same_product(monkeypatch):
    """Prefill goes another way than verify; three dimensions are rows of the last."""
    model = Model(torch.bfloat16)
    x = torch.randn(2, 40, 64).to(torch.bfloat16)
    cpu_linear.use_cpu_linear_layers(model)
    skinny = model.proj(x)[0]
    monkeypatch.setattr(skinny_linear, "use_skinny_linear", lambda num_rows, weight: False)
    assert skinny.shape == (2, 40, 50)
    torch.testing.assert_close(skinny, model.proj(x)[0], rtol=2**-7, atol=1e-2)


def test_leaves_what_is_not_plain():
    class Quantised(UnquantizedLinearMethod):
        pass

    model = Model(torch.float16)
    assert cpu_linear.use_cpu_linear_layers(model) == 0
    model = Model(torch.float32)
    model.proj.quant_method = Quantised()
    assert cpu_linear.use_cpu_linear_layers(model) == 1
    assert type(model.proj.quant_method) is Quantised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_ops_equal_the_native_ones(dtype):
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 2**-6, "atol": 2**-5}  # the native ones round between operations
    norm, gate = RMSNorm(64).to(dtype), SiluAndMul()
    norm.weight.data.normal_()
    rotary = RotaryEmbedding(16, 16, 128, 10000, True, dtype)
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    positions = torch.tensor([0, 3, 3, 100, 127])
    pairs = [
        (cpu_layer_ops.forward_rms_norm(norm, x), norm.forward_native(x)),
        (cpu_layer_ops.forward_rms_norm(norm, x, residual), norm.forward_native(x, residual)),
        (cpu_layer_ops.forward_silu_and_mul(gate, x), gate.forward_native(x)),
    ]
    native = rotary.forward_native(positions, x.clone(), residual[:, :32].clone())
    turned = x.clone(), copy.deepcopy(residual)[:, :32]
    pairs.append((cpu_layer_ops.forward_rotary(rotary, positions, *turned), native))
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, **tolerance)


def test_an_operation_that_the_kernel_does_not_cover_is_the_native_one():
    norm = RMSNorm(64, var_hidden_size=32)
    x = torch.randn(5, 64)
    assert cpu_layer_ops.forward_rms_norm(norm, x).equal(norm.forward_native(x))
    rotary = RotaryEmbedding(16, 16, 128, 10000, False, torch.float32)
    positions = torch.arange(5)
    native = rotary.forward_native(positions, x.clone(), x.clone())
    ours = cpu_layer_ops.forward_rotary(rotary, positions, x.clone(), x.clone())
    assert all(a.equal(b) for a, b in zip(ours, native, strict=True))
