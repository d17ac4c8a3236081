"""RMS norm of each row, with the residual stream added before it, in one pass over the row."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from sglang_ssd_kernels.host_jit import (
    BFLOAT16,
    ELEMENT_KINDS,
    Job,
    Kernel,
    bfloat16_array,
    check_elements,
    field,
    float32_array,
    float32_bits,
    float32_from_bits,
    narrow,
    num_threads_for,
    take_next,
    widen,
)

# Fields of a job.
X, RESIDUAL, WEIGHT, OUT, RESIDUAL_OUT, KIND, NUM_ROWS, WIDTH, EPS_BITS, COUNTER = range(10)
_job = Job(10)


def rms_norm(
    x: Tensor,  # [M, H] float32 or bfloat16, contiguous
    weight: Tensor,  # [H] of x.dtype
    eps: float,
    residual: Tensor | None = None,  # [M, H] of x.dtype, contiguous
) -> tuple[Tensor, Tensor | None]:  # [M, H] of x.dtype; x + residual, [M, H] of x.dtype
    """The norm in float32 of x + residual before that is rounded to x.dtype, times weight."""
    _check(x, weight, residual)
    num_rows, width = x.shape
    out = torch.empty_like(x)
    residual_out = None if residual is None else torch.empty_like(x)
    _job.fill(
        x.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        0 if residual_out is None else residual_out.data_ptr(),
        ELEMENT_KINDS[x.dtype],
        num_rows,
        width,
        float32_bits(eps),
        0,
    )
    _job.run(compile_kernel(), num_threads=num_threads_for(x.numel()))
    return out, residual_out


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    _check(x, weight, residual)
    total = x.float() if residual is None else x.float() + residual.float()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    out = (total * scale * weight.float()).to(x.dtype)
    return out, None if residual is None else total.to(x.dtype)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"invalid shape of x: expected [M, H], contiguous, got {list(x.shape)}")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(
            f"invalid shape of weight: expected [{x.shape[1]}], got {list(weight.shape)}"
        )
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(
            f"invalid shape of residual: expected {list(x.shape)}, contiguous, "
            f"got {list(residual.shape)}"
        )
    for name, tensor in (("x", x), ("weight", weight), ("residual", residual)):
        if tensor is None:
            continue
        check_elements(name, tensor)
        if tensor.dtype != x.dtype:
            raise ValueError(f"invalid type of {name}: expected {x.dtype} as x, got {tensor.dtype}")


@functools.cache
def compile_kernel() -> Kernel:
    return Kernel(_rows)


def _rows(job: int) -> None:
    row = take_next(job, COUNTER)
    while row < field(job, NUM_ROWS):
        if field(job, KIND) == BFLOAT16:
            _bfloat16_row(job, row)
        else:
            _float32_row(job, row)
        row = take_next(job, COUNTER)


# The sum is reassociated into vector lanes, in one way for every row.
@njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _float32_row(job, row):  # type: ignore[no-untyped-def]
    width = field(job, WIDTH)
    start = row * width * 4
    x, out = (
        float32_array(field(job, X) + start, width),
        float32_array(field(job, OUT) + start, width),
    )
    weight = float32_array(field(job, WEIGHT), width)
    squares = np.float32(0)
    if field(job, RESIDUAL) != 0:
        residual = float32_array(field(job, RESIDUAL) + start, width)
        total = float32_array(field(job, RESIDUAL_OUT) + start, width)
        for i in range(width):
            total[i] = x[i] + residual[i]
        x = total
    for i in range(width):
        squares += x[i] * x[i]
    scale = _scale(job, squares)
    for i in range(width):
        out[i] = x[i] * scale * weight[i]


@njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
def _bfloat16_row(job, row):  # type: ignore[no-untyped-def]
    width = field(job, WIDTH)
    start = row * width * 2
    x, out = (
        bfloat16_array(field(job, X) + start, width),
        bfloat16_array(field(job, OUT) + start, width),
    )
    weight = bfloat16_array(field(job, WEIGHT), width)
    squares = np.float32(0)
    if field(job, RESIDUAL) == 0:
        for i in range(width):
            squares += widen(x[i]) * widen(x[i])
        scale = _scale(job, squares)
        for i in range(width):
            out[i] = narrow(widen(x[i]) * scale * widen(weight[i]))
    else:
        residual = bfloat16_array(field(job, RESIDUAL) + start, width)
        total = bfloat16_array(field(job, RESIDUAL_OUT) + start, width)
        for i in range(width):
            value = widen(x[i]) + widen(residual[i])
            squares += value * value
        scale = _scale(job, squares)
        for i in range(width):
            value = widen(x[i]) + widen(residual[i])
            total[i] = narrow(value)
            out[i] = narrow(value * scale * widen(weight[i]))


@njit(error_model="numpy")
def _scale(job, squares):  # type: ignore[no-untyped-def]
    eps = float32_from_bits(field(job, EPS_BITS))
    return np.float32(1) / np.float32(math.sqrt(squares / np.float32(field(job, WIDTH)) + eps))
