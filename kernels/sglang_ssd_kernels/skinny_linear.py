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
    ELEMENT_BYTES,
    ELEMENT_KINDS,
    F32,
    FLOAT32,
    I32,
    I64,
    LANES,
    Job,
    Kernel,
    bfloat16_array,
    check_elements,
    field,
    float32_array,
    narrow,
    pointer,
    stack_floats,
    take_next,
    widen,
)

TILE = 48
"""Weight rows of a tile: a multiple of LANES and of every template's columns."""
CHUNK = 2 * LANES
"""Elements of one step along K."""
L1_FLOATS = 4096
"""float32 of x that a block of K may hold; half of the smallest usual L1 cache."""
ROW_BYTES = 4 * TILE * LANES
"""Accumulators of one row of x and one tile."""

MAX_SKINNY_ROWS = {torch.float32: 64, torch.bfloat16: 128}
"""With more rows torch is as fast or faster, bfloat16 weights widened first; measured on AVX2."""
WIDENED_COLUMNS = 512

SINGLE = 0
COLUMNS = (1, 4, 4, 3, 2, 2, 2)
"""Weight rows of a step for SINGLE, 1, 2, .. rows of x: their accumulators fill 16 registers."""
MAX_GROUP = len(COLUMNS) - 1
PASS_GROUPS = 6
"""Groups whose accumulators are kept at once; more take turns on each tile."""
NUM_ACCUMULATORS = PASS_GROUPS * MAX_GROUP * TILE * LANES

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
    packed = torch.empty(num_rows * (num_in // CHUNK + 1) * CHUNK, dtype=torch.float32)
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


def pays_off(weight: Tensor) -> bool:
    """Whether this weight is better served here than by torch on this host, when rows are few."""
    if not weight.is_cpu or weight.dim() != 2 or weight.stride(1) != 1:
        return False
    if weight.dtype == torch.bfloat16:
        # Where oneDNN has bfloat16 instructions its linear is as fast, and faster with many rows.
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def use_skinny_linear(num_rows: int, weight: Tensor) -> bool:
    return num_rows <= MAX_SKINNY_ROWS[weight.dtype]


def host_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """skinny_linear for a weight that `pays_off`, by the fastest way for this many rows."""
    if use_skinny_linear(x.shape[0], weight):
        return skinny_linear(x, weight, bias)
    if weight.dtype == torch.bfloat16:
        return widened_linear(x, weight, bias)
    return torch.nn.functional.linear(x, weight, bias)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's float32 product with a part of the weights at a time, which stays in the cache."""
    rows = x.float()
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, weight.shape[0], WIDENED_COLUMNS):
        part = slice(start, start + WIDENED_COLUMNS)
        widened = None if bias is None else bias[part].float()
        out[:, part] = torch.nn.functional.linear(rows, weight[part].float(), widened)
    return out


def compile_kernels() -> None:
    """Seconds the first time on a host; from then on what loading a file takes."""
    _pack_kernel()
    _multiply_kernel()


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"invalid shape of x: expected [M, K] for weight [N, K] = {list(weight.shape)}, "
            f"got {list(x.shape)}"
        )
    if weight.stride(1) != 1:
        raise ValueError(f"invalid strides of weight: expected [.., 1], got {weight.stride()}")
    check_elements("x", x)
    check_elements("weight", weight)
    if bias is not None:
        check_elements("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"invalid shape of bias: expected [{weight.shape[0]}], got {list(bias.shape)}"
            )


@functools.cache
def _pack_kernel() -> Kernel:
    return Kernel(_pack)


@functools.cache
def _multiply_kernel() -> Kernel:
    return Kernel(_multiply)


def _pack(job: int) -> None:
    """x in float32 and in the order of its use, then each row's elements beyond the last chunk.

    Rows of one group take turns chunk by chunk; beside bfloat16 weights a chunk holds its even
    elements before its odd ones, which is how those weights are widened.
    """
    num_rows, num_in, x_kind = field(job, ROWS), field(job, NUM_IN), field(job, X_KIND)
    num_chunks = num_in // CHUNK
    packed = float32_array(field(job, PACKED), num_rows * (num_chunks + 1) * CHUNK)
    values = float32_array(stack_floats(CHUNK), CHUNK)
    for group in range(_num_groups(num_rows)):
        first, end = _group_start(num_rows, group), _group_start(num_rows, group + 1)
        for row in range(first, end):
            source = field(job, X) + row * field(job, X_STRIDE)
            for chunk in range(num_chunks):
                _read(x_kind, source, chunk * CHUNK, CHUNK, values)
                place = (first * num_chunks + chunk * (end - first) + row - first) * CHUNK
                if field(job, WEIGHT_KIND) == BFLOAT16:
                    for i in range(LANES):
                        packed[place + i] = values[2 * i]
                        packed[place + LANES + i] = values[2 * i + 1]
                else:
                    for i in range(CHUNK):
                        packed[place + i] = values[i]
            _read(x_kind, source, num_chunks * CHUNK, num_in % CHUNK, values)
            for i in range(num_in % CHUNK):
                packed[(num_rows * num_chunks + row) * CHUNK + i] = values[i]


@njit
def _read(kind, address, first, size, values):  # type: ignore[no-untyped-def]
    if kind == BFLOAT16:
        short = bfloat16_array(address + 2 * first, size)
        for i in range(size):
            values[i] = widen(short[i])
    else:
        floats = float32_array(address + 4 * first, size)
        for i in range(size):
            values[i] = floats[i]


@njit
def _num_groups(num_rows):  # type: ignore[no-untyped-def]
    return -(-num_rows // MAX_GROUP)


@njit
def _group_start(num_rows, group):  # type: ignore[no-untyped-def]
    """Groups of sizes that differ by one at most."""
    return num_rows * group // _num_groups(num_rows)


def _multiply(job: int) -> None:
    accumulators = stack_floats(NUM_ACCUMULATORS)
    num_out, num_groups = field(job, NUM_OUT), _num_groups(field(job, ROWS))
    tile = take_next(job, COUNTER)
    while tile * TILE < num_out:
        first_out = tile * TILE
        width = min(TILE, num_out - first_out)
        for first in range(0, num_groups, PASS_GROUPS):
            end = min(first + PASS_GROUPS, num_groups)
            _accumulate(job, first, end, first_out, width, accumulators)
            _finish(job, first, end, first_out, width, accumulators)
        tile = take_next(job, COUNTER)


@njit
def _accumulate(job, first_group, end_group, first_out, width, accumulators):  # type: ignore[no-untyped-def]
    """The vector accumulators [rows of the groups, TILE, LANES] of one tile, over all chunks."""
    kind, num_rows, stride = field(job, WEIGHT_KIND), field(job, ROWS), field(job, WEIGHT_STRIDE)
    chunk_bytes = CHUNK * (2 if kind == BFLOAT16 else 4)
    num_chunks = field(job, NUM_IN) // CHUNK
    max_group = -(-num_rows // _num_groups(num_rows))
    num_blocks = max(1, -(-num_chunks * CHUNK * max_group // L1_FLOATS))
    first_row = _group_start(num_rows, first_group)
    for block in range(num_blocks):
        start = num_chunks * block // num_blocks
        size = num_chunks * (block + 1) // num_blocks - start
        weight = field(job, WEIGHT) + first_out * stride + start * chunk_bytes
        is_last = block + 1 == num_blocks
        ahead = TILE * stride - start * chunk_bytes if is_last else size * chunk_bytes
        for group in range(first_group, end_group):
            row = _group_start(num_rows, group)
            rows = _group_start(num_rows, group + 1) - row
            x = field(job, PACKED) + (row * num_chunks + start * rows) * CHUNK * 4
            target = accumulators + (row - first_row) * ROW_BYTES
            steps = width // COLUMNS[rows]
            _multiply_rows(kind, rows, steps, x, rows, weight, stride, size, ahead, target, block)
            done = steps * COLUMNS[rows]
            for i in range(rows if done < width else 0):
                _multiply_rows(
                    kind, SINGLE, width - done, x + i * CHUNK * 4, rows, weight + done * stride,
                    stride, size, 0, target + i * ROW_BYTES + done * 4 * LANES, block,
                )  # fmt: skip


@njit
def _finish(job, first_group, end_group, first_out, width, accumulators):  # type: ignore[no-untyped-def]
    """Sum the lanes, add the elements of K beyond the last chunk and the bias, round, store."""
    num_rows, num_in, num_out = field(job, ROWS), field(job, NUM_IN), field(job, NUM_OUT)
    num_chunks = num_in // CHUNK
    sums_address = stack_floats(TILE)
    sums = float32_array(sums_address, TILE)
    first_row = _group_start(num_rows, first_group)
    for row in range(first_row, _group_start(num_rows, end_group)):
        for first in range(0, width, LANES):
            lanes = accumulators + (row - first_row) * ROW_BYTES + first * 4 * LANES
            _sum_lanes(lanes, sums_address + 4 * first)
        rest = field(job, PACKED) + (num_rows * num_chunks + row) * CHUNK * 4
        for i in range(width if num_in % CHUNK else 0):
            weight = field(job, WEIGHT) + (first_out + i) * field(job, WEIGHT_STRIDE)
            for k in range(num_in % CHUNK):
                element = _element(field(job, WEIGHT_KIND), weight, num_chunks * CHUNK + k)
                sums[i] += _element(FLOAT32, rest, k) * element
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


@intrinsic
def _multiply_rows(  # type: ignore[no-untyped-def]
    typing_context, kind, rows, num_steps, x, x_rows, weight, weight_stride,
    num_chunks, ahead, accumulators, block,
):  # fmt: skip
    """Add to accumulators [rows, num_steps * columns, LANES] what num_chunks chunks contribute.

    rows SINGLE means one row, of a group of x_rows, and one column a step. Block 0 starts from
    zero. What lies `ahead` bytes beyond each weight is fetched into the cache meanwhile.
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
            for num_rows, columns in enumerate(COLUMNS):
                case = builder.append_basic_block("rows")
                switch.add_case(ir.Constant(I64, num_rows), case)
                builder.position_at_end(case)
                _emit_template(builder, weight_kind, num_rows, columns, *operands)
                builder.branch(done)
            builder.position_at_end(other)
        builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


def _emit_template(
    builder: Any, kind: int, rows: int, columns: int, num_steps: Any, x: Any, x_rows: Any,
    weight: Any, weight_stride: Any, num_chunks: Any, ahead: Any, accumulators: Any, block: Any,
) -> None:  # fmt: skip
    """LLVM code of one template: per step, rows x columns accumulators stay in registers."""
    is_first = builder.icmp_signed("==", block, ir.Constant(I64, 0))
    x_rows = x_rows if rows == SINGLE else ir.Constant(I64, rows)
    registers = {
        (row, column): cgutils.alloca_once(builder, VECTOR)
        for row in range(max(rows, 1))
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
            chunk_x = _offset(builder, x, builder.mul(chunk.index, x_rows), 4 * CHUNK)
            chunk_weight = _offset(builder, weights, chunk.index, CHUNK * ELEMENT_BYTES[kind])
            _emit_chunk(builder, kind, registers, chunk_x, chunk_weight, weight_stride, ahead)
        for key, register in registers.items():
            builder.store(builder.load(register), pointer(builder, places[key], VECTOR)).align = 4


def _emit_chunk(
    builder: Any, kind: int, registers: Any, x: Any, weight: Any, weight_stride: Any, ahead: Any
) -> None:
    rows, columns = (1 + max(axis) for axis in zip(*registers, strict=True))
    weights = [
        builder.add(weight, builder.mul(weight_stride, ir.Constant(I64, c))) for c in range(columns)
    ]
    for address in weights:
        _emit_prefetch(builder, builder.add(address, ahead))
    widened = [_widen(builder, kind, address) for address in weights]
    fused = _llvm(builder, FUSED, VECTOR, [VECTOR] * 3)
    for half in range(2):
        for row in range(rows):
            values = _load_vector(
                builder, _offset(builder, x, ir.Constant(I64, 2 * row + half), 4 * LANES), VECTOR
            )
            for column in range(columns):
                register = registers[row, column]
                factors = [values, widened[column][half]]
                builder.store(builder.call(fused, [*factors, builder.load(register)]), register)


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
