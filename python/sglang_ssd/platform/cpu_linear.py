"""Linear layers and the lm_head of a model on the CPU platform, served by our kernel.

torch's linear costs M times one row where the CPU has no bfloat16 instructions, and a verify of
K + 1 rows or a step of N branches would then never pay. After a model is loaded its unquantised
layers get a method of the same interface; weights stay where and as they are, so that updating
them, tensor parallelism and tied embeddings work as before.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from sglang_ssd_kernels import skinny_linear


class CpuLinearMethod(UnquantizedLinearMethod):
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _apply(layer, x, bias)


class CpuLmHeadMethod(UnquantizedEmbeddingMethod):
    """Also the input embedding's method where both are one module."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # What LogitsProcessor does for methods that it knows to be unquantised.
        return _apply(layer, x.to(layer.weight.dtype), bias)


def _apply(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = skinny_linear.host_linear(rows, layer.weight, bias)
    return y.view(*x.shape[:-1], layer.weight.shape[0])


def use_cpu_linear_layers(model: nn.Module) -> int:
    """Swap the methods of this loaded model's layers; returns how many.

    A layer keeps SGLang's method if it is quantised or its weights are of a type, or on a CPU, that
    torch serves better.
    """
    methods: list[tuple[Any, Any]] = [
        (module, CpuLinearMethod())
        for module in model.modules()
        if isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod
    ]
    methods += [(lm_head, CpuLmHeadMethod()) for lm_head in _plain_lm_heads(model)]
    methods = [
        (module, method) for module, method in methods if skinny_linear.pays_off(module.weight)
    ]
    for module, method in methods:
        module.quant_method = method
    if methods:
        skinny_linear.compile_kernels()
    return len(methods)


def _plain_lm_heads(model: nn.Module) -> list[Any]:
    """The lm_head, unless its logits are asked for in another precision than its weights'."""
    lm_head = model._modules.get("lm_head")
    for module in model.modules():
        if isinstance(module, LogitsProcessor) and (
            module.use_fp32_lm_head or module.rl_on_policy_target is not None
        ):
            return []
    if not isinstance(lm_head, VocabParallelEmbedding):
        return []
    return [lm_head] if type(lm_head.quant_method) is UnquantizedEmbeddingMethod else []
