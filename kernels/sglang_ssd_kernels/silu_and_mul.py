"""The gated activation of an MLP: silu of the first half of a row times its second half."""

from __future__ import annotations

import functools

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
    exponential,
    field,
    float32_array,
    narrow,
    num_threads_for,
    take_next,
    widen,
)

# Fields of a job.
X, OUT, KIND, NUM_ROWS, WIDTH, COUNTER = range(6)
_job = Job(6)


def silu_and_mul(
    x: Tensor,  # [M, 2 * I] float32 or bfloat16, contiguous
) -> Tensor:  # [M, I] of x.dtype
    """silu(x[:, :I]) * x[:, I:] in float32, rounded once to x.dtype."""
    _check(x)
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_rows, width)
    _job.fill(x.data_ptr(), out.data_ptr(), ELEMENT_KINDS[x.dtype], num_rows, width, 0)
    _job.run(compile_kernel(), num_threads=num_threads_for(out.numel()))
    return out


def silu_and_mul_reference(x: Tensor) -> Tensor:
    _check(x)
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _check(x: Tensor) -> None:
    if x.dim() != 2 or x.shape[1] % 2 or not x.is_contiguous():
        raise ValueError(
            f"invalid shape of x: expected [M, 2 * I], contiguous, got {list(x.shape)}"
        )
    check_elements("x", x)


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


@njit(error_model="numpy")
def _float32_row(job, row):  # type: ignore[no-untyped-def]
    width = field(job, WIDTH)
    gate = float32_array(field(job, X) + row * width * 8, width)
    up = float32_array(field(job, X) + row * width * 8 + width * 4, width)
    out = float32_array(field(job, OUT) + row * width * 4, width)
    for i in range(width):
        out[i] = _gated(gate[i], up[i])


@njit(error_model="numpy")
def _bfloat16_row(job, row):  # type: ignore[no-untyped-def]
    width = field(job, WIDTH)
    gate = bfloat16_array(field(job, X) + row * width * 4, width)
    up = bfloat16_array(field(job, X) + row * width * 4 + width * 2, width)
    out = bfloat16_array(field(job, OUT) + row * width * 2, width)
    for i in range(width):
        out[i] = narrow(_gated(widen(gate[i]), widen(up[i])))


@njit(error_model="numpy")
def _gated(gate, up):  # type: ignore[no-untyped-def]
    return gate / (np.float32(1) + exponential(-gate)) * up
