"""Norm, rotary embedding and gated activation of a model's layers, served by our kernels.

SGLang's native versions are chains of small torch operations, each of which costs more than its
arithmetic when a forward has few rows. SGLang dispatches an operation on an out-of-tree platform to
what is registered here for its exact class; what a kernel does not cover goes to the native one.
"""

from __future__ import annotations

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from torch import Tensor, nn

from sglang_ssd_kernels import rms_norm, rotary, silu_and_mul
from sglang_ssd_kernels.host_jit import ELEMENT_KINDS


def register_cpu_layer_ops(dispatch_key: str) -> None:
    """Before the first forward, which fixes what every operation is dispatched to."""
    BaseFusedOp.register_oot_forward(RMSNorm, forward_rms_norm, dispatch_key)
    BaseFusedOp.register_oot_forward(SiluAndMul, forward_silu_and_mul, dispatch_key)
    for op_class in (RotaryEmbedding, Llama3RotaryEmbedding):
        BaseFusedOp.register_oot_forward(op_class, forward_rotary, dispatch_key)
    for op in (rms_norm, silu_and_mul, rotary):
        op.compile_kernel()


def forward_rms_norm(
    op: RMSNorm,
    x: Tensor,  # [.., H]
    residual: Tensor | None = None,  # [.., H]
    post_residual_addition: Tensor | None = None,
    quant_linear: nn.Module | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    is_plain = (
        x.dtype in ELEMENT_KINDS
        and op.weight.dtype == x.dtype
        and (residual is None or residual.dtype == x.dtype)
        and post_residual_addition is None
        and op.variance_size_override is None
        and op.override_orig_dtype is None
        and not op.cast_x_before_out_mul
        and not op.fp32_residual
    )
    if not is_plain:
        return op.forward_native(x, residual, post_residual_addition)
    rows = x.contiguous().view(-1, x.shape[-1])
    residual_rows = None if residual is None else residual.contiguous().view(rows.shape)
    out, residual_out = rms_norm.rms_norm(rows, op.weight, op.variance_epsilon, residual_rows)
    if residual_out is None:
        return out.view(x.shape)
    return out.view(x.shape), residual_out.view(x.shape)


def forward_silu_and_mul(op: SiluAndMul, x: Tensor) -> Tensor:  # [.., 2 * I] -> [.., I]
    if x.dtype not in ELEMENT_KINDS or not x.is_contiguous():
        return op.forward_native(x)
    out = silu_and_mul.silu_and_mul(x.view(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], -1)


def forward_rotary(
    op: RotaryEmbedding,
    positions: Tensor,  # [M] int64
    query: Tensor,  # [M, heads * D]
    key: Tensor,  # [M, kv_heads * D]
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: object = None,
) -> tuple[Tensor, Tensor]:
    """In place, as on a GPU."""
    is_plain = (
        op.is_neox_style
        and offsets is None
        and fused_set_kv_buffer_arg is None
        and query.dtype in ELEMENT_KINDS
        and key.dtype == query.dtype
        and query.dim() == 2
        and key.dim() == 2
        and query.stride(1) == 1
        and key.stride(1) == 1
        and positions.dim() == 1
        and positions.dtype == torch.int64
        and op.rotary_dim <= rotary.MAX_ROTARY_DIM
    )
    if not is_plain:
        return op.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    rotary.apply_rotary_(positions.contiguous(), query, key, op.cos_sin_cache, op.head_size)
    return query, key
