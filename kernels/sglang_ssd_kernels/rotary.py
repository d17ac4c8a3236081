"""Rotary position embedding of queries and keys, in place."""

from __future__ import annotations

import functools

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
    narrow,
    num_threads_for,
    set_field,
    stack_floats,
    take_next,
    widen,
)

# Fields of a job.
POSITIONS, CACHE, CACHE_STRIDE, CACHE_KIND, KIND, NUM_ROWS, HEAD_DIM, ROTARY_DIM = range(8)
QUERY, QUERY_STRIDE, QUERY_HEADS, KEY, KEY_STRIDE, KEY_HEADS = range(8, 14)
CACHE_ROWS, COUNTER, BAD_ROW = range(14, 17)
_job = Job(17)

MAX_ROTARY_DIM = 512


def apply_rotary_(
    positions: Tensor,  # [M] int64
    query: Tensor,  # [M, heads * D] float32 or bfloat16, each row contiguous, written in place
    key: Tensor,  # [M, kv_heads * D] of query.dtype, each row contiguous, written in place
    cos_sin: Tensor,  # [positions, R] float32 or bfloat16: R / 2 cosines, then R / 2 sines
    head_dim: int,
) -> None:
    """Turn the pairs (i, i + R / 2) of each head's first R elements by the row's position."""
    _check(positions, query, key, cos_sin, head_dim)
    _job.fill(
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.stride(0) * cos_sin.itemsize,
        ELEMENT_KINDS[cos_sin.dtype],
        ELEMENT_KINDS[query.dtype],
        query.shape[0],
        head_dim,
        cos_sin.shape[1],
        query.data_ptr(),
        query.stride(0) * query.itemsize,
        query.shape[1] // head_dim,
        key.data_ptr(),
        key.stride(0) * key.itemsize,
        key.shape[1] // head_dim,
        cos_sin.shape[0],
        0,
        -1,
    )
    _job.run(compile_kernel(), num_threads=num_threads_for(query.numel() + key.numel()))
    bad_row = _job.read(BAD_ROW)
    if bad_row >= 0:
        raise ValueError(
            f"invalid position: expected 0..{cos_sin.shape[0] - 1}, got {int(positions[bad_row])}"
        )


def apply_rotary_reference_(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor, head_dim: int
) -> None:
    _check(positions, query, key, cos_sin, head_dim)
    cos, sin = cos_sin[positions].float()[:, None, :].chunk(2, dim=-1)
    for rows in (query, key):
        heads = rows.view(rows.shape[0], -1, head_dim)
        first, second = heads[..., : cos_sin.shape[1]].float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        heads[..., : cos_sin.shape[1]] = turned.to(rows.dtype)


def _check(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor, head_dim: int) -> None:
    num_rows = positions.numel()
    if positions.dim() != 1 or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(
            f"invalid positions: expected [M] int64, got {list(positions.shape)} {positions.dtype}"
        )
    if not positions.is_cpu:
        raise ValueError(f"invalid positions: expected on cpu, got on {positions.device}")
    rotary_dim = cos_sin.shape[-1]
    if cos_sin.dim() != 2 or rotary_dim > min(head_dim, MAX_ROTARY_DIM) or rotary_dim % 2:
        raise ValueError(
            f"invalid shape of cos_sin: expected [.., 2..{min(head_dim, MAX_ROTARY_DIM)}], "
            f"got {list(cos_sin.shape)}"
        )
    for name, rows in (("query", query), ("key", key)):
        if rows.dim() != 2 or rows.shape[0] != num_rows or rows.shape[1] % head_dim:
            raise ValueError(
                f"invalid shape of {name}: expected [{num_rows}, heads * {head_dim}], "
                f"got {list(rows.shape)}"
            )
        if rows.stride(1) != 1:
            raise ValueError(f"invalid strides of {name}: expected [.., 1], got {rows.stride()}")
    for name, tensor in (("query", query), ("key", key), ("cos_sin", cos_sin)):
        check_elements(name, tensor)
    if key.dtype != query.dtype:
        raise ValueError(f"invalid type of key: expected {query.dtype} as query, got {key.dtype}")


@functools.cache
def compile_kernel() -> Kernel:
    return Kernel(_rows)


def _rows(job: int) -> None:
    half = field(job, ROTARY_DIM) // 2
    head_bytes = field(job, HEAD_DIM) * (2 if field(job, KIND) == BFLOAT16 else 4)
    angles = float32_array(stack_floats(MAX_ROTARY_DIM), 2 * half)
    row = take_next(job, COUNTER)
    while row < field(job, NUM_ROWS):
        position = field(field(job, POSITIONS), row)
        if position < 0 or position >= field(job, CACHE_ROWS):
            set_field(job, BAD_ROW, row)
        else:
            _read_angles(job, position, angles)
            for head in range(field(job, QUERY_HEADS)):
                offset = row * field(job, QUERY_STRIDE) + head * head_bytes
                _turn(field(job, KIND), field(job, QUERY) + offset, angles, half)
            for head in range(field(job, KEY_HEADS)):
                offset = row * field(job, KEY_STRIDE) + head * head_bytes
                _turn(field(job, KIND), field(job, KEY) + offset, angles, half)
        row = take_next(job, COUNTER)


@njit
def _read_angles(job, position, angles):  # type: ignore[no-untyped-def]
    address = field(job, CACHE) + position * field(job, CACHE_STRIDE)
    if field(job, CACHE_KIND) == BFLOAT16:
        short = bfloat16_array(address, angles.size)
        for i in range(angles.size):
            angles[i] = widen(short[i])
    else:
        values = float32_array(address, angles.size)
        for i in range(angles.size):
            angles[i] = values[i]


@njit
def _turn(kind, address, angles, half):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        short = bfloat16_array(address, 2 * half)
        for i in range(half):
            first, second = widen(short[i]), widen(short[half + i])
            short[i] = narrow(first * angles[i] - second * angles[half + i])
            short[half + i] = narrow(second * angles[i] + first * angles[half + i])
    else:
        values = float32_array(address, 2 * half)
        for i in range(half):
            first, second = values[i], values[half + i]
            values[i] = first * angles[i] - second * angles[half + i]
            values[half + i] = second * angles[i] + first * angles[half + i]
