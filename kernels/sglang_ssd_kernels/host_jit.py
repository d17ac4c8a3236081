"""Native CPU kernels from numba: C functions over one job of int64 fields, compiled once per host.

A kernel takes the address of a job (addresses of tensors, strides in bytes, sizes) and no Python
object, so a call costs about a microsecond and the GIL is free while it runs. Kernels check
nothing: shapes are the business of the wrapper around them. Compiled code is kept on disk where
numba finds a writable folder (NUMBA_CACHE_DIR, the package's, the user's).

`Job.run` runs a kernel on torch's own OpenMP threads: a second pool would compete with torch's for
the cores this process is pinned to. The threads share one job and take their work from its counter.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

_HOST_FEATURES = {name for name, present in binding.get_host_cpu_features().items() if present}
LANES = 16 if "avx512f" in _HOST_FEATURES else 8
"""float32 lanes of one vector; a host with narrower registers runs the same code in parts."""

FLOAT32, BFLOAT16 = 0, 1
ELEMENT_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
ELEMENT_BYTES = {FLOAT32: 4, BFLOAT16: 2}

ELEMENTS_PER_THREAD = 32768
"""Some ten microseconds of element-wise work."""

_OWN_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
KERNEL_SIGNATURE = types.void(types.int64)

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def check_elements(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless a kernel can read this tensor's elements where they are."""
    if tensor.dtype not in ELEMENT_KINDS or not tensor.is_cpu:
        raise ValueError(
            f"invalid type of {name}: expected float32 or bfloat16 on cpu, "
            f"got {tensor.dtype} on {tensor.device}"
        )


class Kernel:
    """Owns the compiled code of one kernel."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._code = _compile(function)
        self.address: int = self._code.address
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self.address)


def _compile(function: Callable[[int], None]) -> Any:
    options = {"nopython": True, "boundscheck": False, "error_model": "numpy"}
    # numba looks only at the function's own file to see whether what it kept is still right.
    function.__qualname__ = f"{function.__name__}_{_OWN_DIGEST}"
    try:
        return cfunc(KERNEL_SIGNATURE, cache=True, **options)(function)
    except (RuntimeError, OSError) as error:
        # RuntimeError is what numba raises where it finds no folder it may write to.
        logger.info("%s is compiled anew at every start: %s", function.__qualname__, error)
        return cfunc(KERNEL_SIGNATURE, **options)(function)


class Job(threading.local):
    """The fields of the call in flight; every Python thread has its own."""

    def __init__(self, num_fields: int) -> None:
        self._layout = struct.Struct(f"{num_fields}q")
        self._buffer = (ctypes.c_int64 * num_fields)()
        self._address = ctypes.addressof(self._buffer)

    def fill(self, *fields: int) -> None:
        self._layout.pack_into(self._buffer, 0, *fields)

    def read(self, index: int) -> int:
        return self._buffer[index]

    def run(self, kernel: Kernel, *, num_threads: int = 1) -> None:
        if num_threads > 1 and _gomp_parallel is not None:
            _gomp_parallel(kernel.address, self._address, num_threads, 0)
        else:
            kernel.call(self._address)


def num_threads_for(num_elements: int) -> int:
    """Threads for an element-wise kernel: one until the work outweighs waking others."""
    return min(torch.get_num_threads(), 1 + num_elements // ELEMENTS_PER_THREAD)


def _find_gomp_parallel() -> Any:
    """The entry to the OpenMP threads that torch runs on; None if torch was built without them."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


_gomp_parallel = _find_gomp_parallel()


def pointer(builder: Any, address: Any, element: Any) -> Any:
    """LLVM: an int64 address as a pointer to elements."""
    return builder.inttoptr(address, element.as_pointer())


@intrinsic
def field(typing_context, job, index):  # type: ignore[no-untyped-def]
    """field(job, index): one int64 of the job at this address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.gep(pointer(builder, args[0], I64), [args[1]]))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def set_field(typing_context, job, index, value):  # type: ignore[no-untyped-def]
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], builder.gep(pointer(builder, args[0], I64), [args[1]]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def take_next(typing_context, job, index):  # type: ignore[no-untyped-def]
    """take_next(job, index): the counter in this field, which goes up by one."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.gep(pointer(builder, args[0], I64), [args[1]])
        return builder.atomic_rmw("add", counter, ir.Constant(I64, 1), "monotonic")

    return types.int64(types.int64, types.int64), codegen


@intrinsic(prefer_literal=True)
def stack_floats(typing_context, num_floats):  # type: ignore[no-untyped-def]
    """stack_floats(n): the address of n float32 on this thread's stack; n is a constant."""
    size = num_floats.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        buffer = cgutils.alloca_once(builder, F32, size=size)
        buffer.align = 64
        return builder.ptrtoint(buffer, I64)

    return types.int64(num_floats), codegen


def _pointer_intrinsic(element: Any) -> Any:
    @intrinsic
    def as_pointer(typing_context, address):  # type: ignore[no-untyped-def]
        result = types.CPointer(element)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(result))

        return result(types.int64), codegen

    return as_pointer


_float32_pointer = _pointer_intrinsic(types.float32)
_bfloat16_pointer = _pointer_intrinsic(types.uint16)


@njit
def float32_array(address, size):  # type: ignore[no-untyped-def]
    return carray(_float32_pointer(address), (size,))


@njit
def bfloat16_array(address, size):  # type: ignore[no-untyped-def]
    """Its elements are uint16, to be read by `widen` and written by `narrow`."""
    return carray(_bfloat16_pointer(address), (size,))


@intrinsic
def float32_from_bits(typing_context, bits):  # type: ignore[no-untyped-def]
    """float32_from_bits(field): the float32 whose bits `float32_bits` put into a field."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], I32), F32)

    return types.float32(types.int64), codegen


@functools.lru_cache(maxsize=8)
def float32_bits(number: float) -> int:
    return ctypes.c_uint32.from_buffer(ctypes.c_float(number)).value


@intrinsic
def widen(typing_context, bits):  # type: ignore[no-untyped-def]
    """widen(uint16): the float32 of a bfloat16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        high = builder.shl(builder.zext(args[0], I32), ir.Constant(I32, 16))
        return builder.bitcast(high, F32)

    return types.float32(types.uint16), codegen


@intrinsic
def narrow(typing_context, value):  # type: ignore[no-untyped-def]
    """narrow(float32): the nearest bfloat16, ties to even, as torch rounds."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(I32, 0x7FFF)))
        rounded = builder.lshr(rounded, ir.Constant(I32, 16))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        chosen = builder.select(is_nan, ir.Constant(I32, 0x7FC0), rounded)
        return builder.trunc(chosen, ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def exponential(typing_context, value):  # type: ignore[no-untyped-def]
    """exponential(float32) to about one float32 ulp, made of what a loop can do on whole vectors.

    value = n ln 2 + r: a polynomial in r, times 2 ** n put into the exponent bits. Beyond +-87,
    where float32 ends, it stays at that bound.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def constant(number: float) -> Any:
            return ir.Constant(F32, number)

        def fused(a: Any, b: Any, c: Any) -> Any:
            signature = ir.FunctionType(F32, [F32] * 3)
            name = "llvm.fmuladd.f32"
            function = cgutils.get_or_insert_function(builder.module, signature, name)
            return builder.call(function, [a, b, c])

        bound = constant(87.0)
        x = builder.select(builder.fcmp_ordered("<", args[0], bound), args[0], bound)
        bound = constant(-87.0)
        x = builder.select(builder.fcmp_ordered(">", x, bound), x, bound)
        # Adding 1.5 * 2 ** 23 leaves the nearest integer in the low bits.
        shifted = fused(x, constant(_float32(1 / math.log(2))), constant(12582912.0))
        n = builder.fsub(shifted, constant(12582912.0))
        r = fused(n, constant(-0.693359375), x)
        r = fused(n, constant(_float32(0.693359375 - math.log(2))), r)
        total = constant(_float32(1 / math.factorial(7)))
        for power in range(6, -1, -1):
            total = fused(total, r, constant(_float32(1 / math.factorial(power))))
        exponent = builder.shl(builder.bitcast(shifted, I32), ir.Constant(I32, 23))
        scale = builder.bitcast(builder.add(exponent, ir.Constant(I32, 0x3F800000)), F32)
        return builder.fmul(total, scale)

    return types.float32(types.float32), codegen


def _float32(number: float) -> float:
    return ctypes.c_float(number).value
