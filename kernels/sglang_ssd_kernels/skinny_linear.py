"""A linear layer whose cost hardly grows with its rows while they are few.

Verifying K + 1 tokens and stepping N branches pay only if several rows cost about what one costs.
Here every weight is read from memory once for all rows and widened to float32 in registers.

    x [M, K] -> float32 rows, packed once per call
    for each tile of TILE weight rows, one thread each:
        for each block of K (its x rows stay in the L1 cache, its weights of the tile in L2):
            for each group of at most 6 rows of x:
                for each 2..4 weight rows: one vector accumulator per output, over the block

An output is one vector accumulator over all of K, its lanes summed at the end in a fixed order,
whatever M, N and the number of threads are. So a row's result does not depend on the rows beside
it: a token verified among others gets the bits that it gets when decoded alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sglang_ssd_kernels.host_jit import (
    BFLOAT16,
    ELEMENT_KINDS,
    F32,
    FLOAT32,
    I32,
    I64,
    LANES,
    Job,
    Kernel,
    bfloat16_array,
    field,
    float32_array,
    narrow,
    pointer,
    stack_floats,
    take_next,
    widen,
)

MAX_ROWS = 32
"""Rows of x whose accumulators are kept at once; more take turns on each tile."""
TILE = 48
"""Weight rows of a tile: a multiple of LANES and of every template's columns."""
CHUNK = 2 * LANES
"""Elements of one step along K."""
L1_FLOATS = 4096
"""float32 of x that a block of K may hold; half of the smallest usual L1 cache."""
NUM_ACCUMULATORS = MAX_ROWS * TILE * LANES
ROW_BYTES = 4 * TILE * LANES
"""Accumulators of one row of x and one tile."""

SINGLE = 0
TEMPLATES = {SINGLE: 1, 1: 4, 2: 4, 3: 3, 4: 3, 5: 2, 6: 2}
"""Weight rows of a step for so many rows of x: their accumulators fill 16 vector registers."""
MAX_GROUP = 6

VECTOR, PAIRS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)
FUSED = f"llvm.fmuladd.v{LANES}f32"

# Fields of a job.
X, X_STRIDE, X_KIND, ROWS, PACKED = 0, 1, 2, 3, 4
WEIGHT, WEIGHT_STRIDE, WEIGHT_KIND, BIAS, BIAS_KIND = 5, 6, 7, 8, 9
OUT, NUM_OUT, NUM_IN, COUNTER = 10, 11, 12, 13
_job = Job(14)


def skinny_linear(
    x: Tensor,  # [M, K] float32 or bfloat16
    weight: Tensor,  # [N, K] float32 or bfloat16, each row contiguous
    bias: Tensor | None = None,  # [N] float32 or bfloat16
) -> Tensor:  # [M, N] of x.dtype
    """x @ weight.T + bias, summed in float32 and rounded once to x.dtype."""
    _check(x, weight, bias)
    if x.stride(1) != 1:
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    (num_rows, num_in), num_out = x.shape, weight.shape[0]
    out = x.new_empty(num_rows, num_out)
    packed = torch.empty(num_rows, -(-num_in // CHUNK) * CHUNK, dtype=torch.float32)
    _job.fill(
        x.data_ptr(),
        x.stride(0) * x.itemsize,
        ELEMENT_KINDS[x.dtype],
        num_rows,
        packed.data_ptr(),
        weight.data_ptr(),
        weight.stride(0) * weight.itemsize,
        ELEMENT_KINDS[weight.dtype],
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else ELEMENT_KINDS[bias.dtype],
        out.data_ptr(),
        num_out,
        num_in,
        0,
    )
    _job.run(_pack_kernel())
    num_threads = min(torch.get_num_threads(), -(-num_out // TILE))
    _job.run(_multiply_kernel(), num_threads=num_threads)
    return out


def skinny_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check(x, weight, bias)
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"invalid shape of x: expected [M, K] for weight [N, K] = {list(weight.shape)}, "
            f"got {list(x.shape)}"
        )
    if weight.stride(1) != 1:
        raise ValueError(f"invalid strides of weight: expected [.., 1], got {weight.stride()}")
    _check_elements("x", x)
    _check_elements("weight", weight)
    if bias is not None:
        _check_elements("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"invalid shape of bias: expected [{weight.shape[0]}], got {list(bias.shape)}"
            )


def _check_elements(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in ELEMENT_KINDS or not tensor.is_cpu:
        raise ValueError(
            f"invalid type of {name}: expected float32 or bfloat16 on cpu, "
            f"got {tensor.dtype} on {tensor.device}"
        )


@functools.cache
def _pack_kernel() -> Kernel:
    return Kernel(_pack)


@functools.cache
def _multiply_kernel() -> Kernel:
    return Kernel(_multiply)


def _pack(job: int) -> None:
    """The rows of x in float32; beside bfloat16 weights in the order in which those are widened."""
    num_in = field(job, NUM_IN)
    num_split = num_in // CHUNK * CHUNK if field(job, WEIGHT_KIND) == BFLOAT16 else 0
    for row in range(field(job, ROWS)):
        source = field(job, X) + row * field(job, X_STRIDE)
        packed = float32_array(field(job, PACKED) + row * _packed_stride(num_in), num_in)
        if field(job, X_KIND) == BFLOAT16:
            short = bfloat16_array(source, num_in)
            for first in range(0, num_split, CHUNK):
                for i in range(LANES):
                    packed[first + i] = widen(short[first + 2 * i])
                    packed[first + LANES + i] = widen(short[first + 2 * i + 1])
            for i in range(num_split, num_in):
                packed[i] = widen(short[i])
        else:
            values = float32_array(source, num_in)
            for first in range(0, num_split, CHUNK):
                for i in range(LANES):
                    packed[first + i] = values[first + 2 * i]
                    packed[first + LANES + i] = values[first + 2 * i + 1]
            for i in range(num_split, num_in):
                packed[i] = values[i]


def _multiply(job: int) -> None:
    accumulators = stack_floats(NUM_ACCUMULATORS)
    num_out, num_rows = field(job, NUM_OUT), field(job, ROWS)
    tile = take_next(job, COUNTER)
    while tile * TILE < num_out:
        first_out = tile * TILE
        width = min(TILE, num_out - first_out)
        for first_row in range(0, num_rows, MAX_ROWS):
            rows = min(MAX_ROWS, num_rows - first_row)
            _accumulate(job, first_row, rows, first_out, width, accumulators)
            _finish(job, first_row, rows, first_out, width, accumulators)
        tile = take_next(job, COUNTER)


@njit
def _accumulate(job, first_row, rows, first_out, width, accumulators):  # type: ignore[no-untyped-def]
    """The vector accumulators [rows, TILE, LANES] of one tile, over all chunks of K."""
    kind, stride = field(job, WEIGHT_KIND), field(job, WEIGHT_STRIDE)
    chunk_bytes = CHUNK * (2 if kind == BFLOAT16 else 4)
    packed_stride = _packed_stride(field(job, NUM_IN))
    num_chunks = field(job, NUM_IN) // CHUNK
    num_groups = -(-rows // MAX_GROUP)
    num_blocks = max(1, -(-num_chunks * CHUNK * -(-rows // num_groups) // L1_FLOATS))
    for block in range(num_blocks):
        start = num_chunks * block // num_blocks
        size = num_chunks * (block + 1) // num_blocks - start
        weight = field(job, WEIGHT) + first_out * stride + start * chunk_bytes
        is_last = block + 1 == num_blocks
        ahead = TILE * stride - start * chunk_bytes if is_last else size * chunk_bytes
        for group in range(num_groups):
            row = rows * group // num_groups
            group_rows = rows * (group + 1) // num_groups - row
            x = field(job, PACKED) + (first_row + row) * packed_stride + start * CHUNK * 4
            target = accumulators + row * ROW_BYTES
            steps = width // _columns_of(group_rows)
            _multiply_rows(
                kind,
                group_rows,
                steps,
                x,
                packed_stride,
                weight,
                stride,
                size,
                ahead,
                target,
                block,
            )
            done = steps * _columns_of(group_rows)
            for i in range(group_rows if done < width else 0):
                _multiply_rows(
                    kind, SINGLE, width - done, x + i * packed_stride, 0,
                    weight + done * stride, stride, size, 0,
                    target + i * ROW_BYTES + done * 4 * LANES, block,
                )  # fmt: skip


@njit
def _finish(job, first_row, rows, first_out, width, accumulators):  # type: ignore[no-untyped-def]
    """Sum the lanes, add the elements of K beyond the last chunk and the bias, round, store."""
    num_in, num_out = field(job, NUM_IN), field(job, NUM_OUT)
    rest = num_in // CHUNK * CHUNK
    sums_address = stack_floats(TILE)
    sums = float32_array(sums_address, TILE)
    for row in range(first_row, first_row + rows):
        for first in range(0, width, LANES):
            lanes = accumulators + (row - first_row) * ROW_BYTES + first * 4 * LANES
            _sum_lanes(lanes, sums_address + 4 * first)
        packed = float32_array(field(job, PACKED) + row * _packed_stride(num_in), num_in)
        for i in range(width if rest < num_in else 0):
            weight = field(job, WEIGHT) + (first_out + i) * field(job, WEIGHT_STRIDE)
            for k in range(rest, num_in):
                sums[i] += packed[k] * _element(field(job, WEIGHT_KIND), weight, k)
        for i in range(width if field(job, BIAS) != 0 else 0):
            sums[i] += _element(field(job, BIAS_KIND), field(job, BIAS), first_out + i)
        _store(field(job, X_KIND), field(job, OUT), row * num_out + first_out, sums, width)


@njit
def _store(kind, address, first, values, size):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        short = bfloat16_array(address + 2 * first, size)
        for i in range(size):
            short[i] = narrow(values[i])
    else:
        out = float32_array(address + 4 * first, size)
        for i in range(size):
            out[i] = values[i]


@njit
def _element(kind, address, index):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        return widen(bfloat16_array(address, index + 1)[index])
    return float32_array(address, index + 1)[index]


@njit
def _packed_stride(num_in):  # type: ignore[no-untyped-def]
    return -(-num_in // CHUNK) * CHUNK * 4


@njit
def _columns_of(rows):  # type: ignore[no-untyped-def]
    if rows <= 2:
        return 4
    return 3 if rows <= 4 else 2


@intrinsic
def _multiply_rows(
    typing_context, kind, rows, num_steps, x, x_stride, weight, weight_stride,
    num_chunks, ahead, accumulators, block,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Add to accumulators [rows, num_steps * columns, LANES] what num_chunks chunks contribute.

    rows SINGLE means one row and one column a step. Block 0 starts from zero. Every weight read
    also asks the cache for the one `ahead` bytes further on.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, rows, operands = args[0], args[1], args[2:]
        done = builder.append_basic_block("done")
        for weight_kind in (FLOAT32, BFLOAT16):
            cases = builder.append_basic_block("kind")
            other = builder.append_basic_block("other")
            is_kind = builder.icmp_signed("==", kind, ir.Constant(I64, weight_kind))
            builder.cbranch(is_kind, cases, other)
            builder.position_at_end(cases)
            switch = builder.switch(rows, done)
            for num_rows, columns in TEMPLATES.items():
                case = builder.append_basic_block("rows")
                switch.add_case(ir.Constant(I64, num_rows), case)
                builder.position_at_end(case)
                _emit_template(builder, weight_kind, max(num_rows, 1), columns, *operands)
                builder.branch(done)
            builder.position_at_end(other)
        builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


def _emit_template(
    builder: Any, kind: int, rows: int, columns: int, num_steps: Any, x: Any, x_stride: Any,
    weight: Any, weight_stride: Any, num_chunks: Any, ahead: Any, accumulators: Any, block: Any,
) -> None:  # fmt: skip
    """LLVM code of one template: per step, rows x columns accumulators stay in registers."""
    is_first = builder.icmp_signed("==", block, ir.Constant(I64, 0))
    registers = {
        (row, column): cgutils.alloca_once(builder, VECTOR)
        for row in range(rows)
        for column in range(columns)
    }
    with cgutils.for_range(builder, num_steps) as step:
        first_column = builder.mul(step.index, ir.Constant(I64, columns))
        tile = _offset(builder, accumulators, first_column, 4 * LANES)
        places = {
            key: _offset(builder, tile, ir.Constant(I64, key[0] * TILE + key[1]), 4 * LANES)
            for key in registers
        }
        for key, register in registers.items():
            earlier = _load_vector(builder, places[key], VECTOR)
            builder.store(builder.select(is_first, ZEROS, earlier), register)
        weights = builder.add(weight, builder.mul(first_column, weight_stride))
        with cgutils.for_range(builder, num_chunks) as chunk:
            _emit_chunk(
                builder, kind, registers, chunk.index, x, x_stride, weights, weight_stride, ahead
            )
        for key, register in registers.items():
            builder.store(builder.load(register), pointer(builder, places[key], VECTOR)).align = 4


def _emit_chunk(
    builder: Any, kind: int, registers: Any, chunk: Any, x: Any, x_stride: Any,
    weight: Any, weight_stride: Any, ahead: Any,
) -> None:  # fmt: skip
    rows, columns = (1 + max(axis) for axis in zip(*registers, strict=True))
    x = _offset(builder, x, chunk, 4 * CHUNK)
    weight = _offset(builder, weight, chunk, CHUNK * (2 if kind == BFLOAT16 else 4))
    weights = [
        builder.add(weight, builder.mul(weight_stride, ir.Constant(I64, c))) for c in range(columns)
    ]
    for address in weights:
        _emit_prefetch(builder, builder.add(address, ahead))
    widened = [_widen(builder, kind, address) for address in weights]
    for half in range(2):
        for row in range(rows):
            address = builder.add(x, builder.mul(x_stride, ir.Constant(I64, row)))
            address = builder.add(address, ir.Constant(I64, half * 4 * LANES))
            values = _load_vector(builder, address, VECTOR)
            for column in range(columns):
                register = registers[row, column]
                total = builder.load(register)
                total = builder.call(
                    _llvm(builder, FUSED, VECTOR, [VECTOR] * 3),
                    [values, widened[column][half], total],
                )
                builder.store(total, register)


def _widen(builder: Any, kind: int, address: Any) -> tuple[Any, Any]:
    """A chunk of weights as two vectors: bfloat16 as its even and its odd elements."""
    if kind == FLOAT32:
        second = builder.add(address, ir.Constant(I64, 4 * LANES))
        return _load_vector(builder, address, VECTOR), _load_vector(builder, second, VECTOR)
    pairs = _load_vector(builder, address, PAIRS)
    even = builder.shl(pairs, ir.Constant(PAIRS, [16] * LANES))
    odd = builder.and_(pairs, ir.Constant(PAIRS, [0xFFFF0000] * LANES))
    return builder.bitcast(even, VECTOR), builder.bitcast(odd, VECTOR)


@intrinsic
def _sum_lanes(typing_context, accumulators, sums):  # type: ignore[no-untyped-def]
    """LANES sums from as many accumulators: neighbouring lanes are added until one is left."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors = [
            _load_vector(builder, _offset(builder, args[0], ir.Constant(I64, i), 4 * LANES), VECTOR)
            for i in range(LANES)
        ]
        even, odd = (
            ir.Constant(PAIRS, [2 * lane + parity for lane in range(LANES)]) for parity in (0, 1)
        )
        while len(vectors) > 1:
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            vectors = [
                builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
                for a, b in pairs
            ]
        builder.store(vectors[0], pointer(builder, args[1], VECTOR)).align = 4
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _load_vector(builder: Any, address: Any, vector: Any) -> Any:
    load = builder.load(pointer(builder, address, vector))
    load.align = 2 if vector is PAIRS else 4
    return load


def _offset(builder: Any, address: Any, index: Any, size: int) -> Any:
    return builder.add(address, builder.mul(index, ir.Constant(I64, size)))


def _llvm(builder: Any, name: str, result: Any, arguments: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def _emit_prefetch(builder: Any, address: Any) -> None:
    byte = ir.IntType(8)
    function = _llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [byte.as_pointer(), I32, I32, I32])
    read, keep_in_l2, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    builder.call(function, [pointer(builder, address, byte), read, keep_in_l2, data])
