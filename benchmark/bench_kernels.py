r"""Kernels against torch: the linear layers of SmolLM2 and Qwen2.5, and the small layer ops.

    python benchmark/bench_kernels.py
    python benchmark/bench_kernels.py --shapes qwen2.5-1.5b.gate_up --rows 1 2 5 8 24 --threads 1 2

One call takes as many layers in turn as exceed the cache (--cold-mb), so weights come from memory
as in a forward. Variants run in turn, and a figure is the best of --repeats: what else the machine
does can only add to it. `chosen` is what a model's layer uses for that many rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import metadata

import torch
from tqdm import tqdm

from report import add_out_flag, finish, print_table, warn_if_busy
from sglang_ssd_kernels import skinny_linear as linear
from sglang_ssd_kernels.rms_norm import rms_norm, rms_norm_reference
from sglang_ssd_kernels.rotary import apply_rotary_, apply_rotary_reference_
from sglang_ssd_kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

SHAPES = {
    "smollm2-135m.qkv": (960, 576),
    "smollm2-135m.o": (576, 576),
    "smollm2-135m.gate_up": (3072, 576),
    "smollm2-135m.down": (576, 1536),
    "smollm2-135m.lm_head": (49152, 576),
    "qwen2.5-0.5b.qkv": (1152, 896),
    "qwen2.5-0.5b.gate_up": (9728, 896),
    "qwen2.5-0.5b.down": (896, 4864),
    "qwen2.5-0.5b.lm_head": (151936, 896),
    "qwen2.5-1.5b.qkv": (2048, 1536),
    "qwen2.5-1.5b.gate_up": (17920, 1536),
    "qwen2.5-1.5b.down": (1536, 8960),
}
"""[N, K] of a layer."""
MODELS = {
    "smollm2-135m": (576, 1536, 9, 3, 64),
    "qwen2.5-0.5b": (896, 4864, 14, 2, 64),
    "qwen2.5-1.5b": (1536, 8960, 12, 2, 128),
}
"""Hidden size, MLP size, heads, KV heads, head size."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Variants = dict[str, Callable[[], object]]


def best_us(variants: Variants, repeats: int) -> dict[str, float]:
    """Microseconds of each variant, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: min(values[1:]) for name, values in times.items()}


def linear_variants(x: torch.Tensor, weights: list[torch.Tensor]) -> Variants:
    def over_layers(product: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: [product(x, weight) for weight in weights]

    found = {
        "torch": over_layers(torch.nn.functional.linear),
        "skinny": over_layers(linear.skinny_linear),
    }
    if weights[0].dtype == torch.bfloat16:
        found["widened"] = over_layers(lambda x, weight: linear.widened_linear(x, weight, None))
    return found


def measure_linears(args: argparse.Namespace, threads: int) -> list[dict[str, object]]:
    measured: list[dict[str, object]] = []
    cases = [(dtype, shape) for dtype in args.dtypes for shape in args.shapes]
    for dtype, shape in tqdm(cases, desc=f"linear, {threads} threads", leave=False):
        num_out, num_in = SHAPES[shape]
        size = num_out * num_in * DTYPES[dtype].itemsize
        weights = [
            torch.randn(num_out, num_in).to(DTYPES[dtype])
            for _ in range(1 + int(args.cold_mb * 1e6) // size)
        ]
        for rows in args.rows:
            x = torch.randn(rows, num_in).to(DTYPES[dtype])
            times = best_us(linear_variants(x, weights), args.repeats)
            per_layer = {name: us / len(weights) for name, us in times.items()}
            skinny = linear.use_skinny_linear(rows, weights[0])
            other = "widened" if "widened" in per_layer else "torch"
            measured.append(
                {
                    "dtype": dtype,
                    "shape": shape,
                    "threads": threads,
                    "rows": rows,
                    "chosen": "skinny" if skinny else other,
                    "gb_per_s": size / per_layer["skinny"] / 1e3,
                    "us": per_layer,
                }
            )
    return measured


def layer_op_variants(model: str, rows: int, dtype: torch.dtype) -> dict[str, Variants]:
    hidden, mlp, heads, kv_heads, head_dim = MODELS[model]
    x, residual = torch.randn(2, rows, hidden).to(dtype)
    weight, gate_up = torch.randn(hidden).to(dtype), torch.randn(rows, 2 * mlp).to(dtype)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim).to(dtype)
    query, key, _ = qkv.split([heads * head_dim, *[kv_heads * head_dim] * 2], dim=1)
    angles, positions = torch.randn(4096, head_dim).to(dtype), torch.arange(rows)
    rotary = (positions, query, key, angles, head_dim)
    return {
        "rms_norm": {
            "torch": lambda: rms_norm_reference(x, weight, 1e-6, residual),
            "ours": lambda: rms_norm(x, weight, 1e-6, residual),
        },
        "rotary": {
            "torch": lambda: apply_rotary_reference_(*rotary),
            "ours": lambda: apply_rotary_(*rotary),
        },
        "silu_and_mul": {
            "torch": lambda: silu_and_mul_reference(gate_up),
            "ours": lambda: silu_and_mul(gate_up),
        },
    }


def measure_layer_ops(args: argparse.Namespace, threads: int) -> list[dict[str, object]]:
    measured: list[dict[str, object]] = []
    for dtype in args.dtypes:
        for model in MODELS:
            for rows in args.rows:
                for op, variants in layer_op_variants(model, rows, DTYPES[dtype]).items():
                    us = best_us(variants, 10 * args.repeats)
                    labels = {"dtype": dtype, "model": model, "threads": threads, "rows": rows}
                    measured.append({**labels, "op": op, "us": us})
    return measured


def print_linears(measured: list[dict[str, object]]) -> None:
    def us(case: dict[str, object], name: str) -> str:
        times = case["us"]
        assert isinstance(times, dict), "a case has a time for each variant"
        return f"{times[name]:.0f}" if name in times else ""

    print_table(
        ["layer", "dtype", "threads", "rows", "torch us", "widened us", "skinny us", "GB/s", "use"],
        [
            [
                *(case[name] for name in ("shape", "dtype", "threads", "rows")),
                *(us(case, name) for name in ("torch", "widened", "skinny")),
                f"{case['gb_per_s']:.1f}",
                case["chosen"],
            ]
            for case in measured
        ],
    )


def print_layer_ops(measured: list[dict[str, object]]) -> None:
    rows = []
    for case in measured:
        times = case["us"]
        assert isinstance(times, dict), "a case has a time for each variant"
        labels = [case[name] for name in ("op", "model", "dtype", "threads", "rows")]
        rows.append([*labels, *(f"{times[name]:.1f}" for name in ("torch", "ours"))])
    print_table(["op", "model", "dtype", "threads", "rows", "torch us", "ours us"], rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 8, 12, 24, 64, 256])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--cold-mb", type=float, default=100, help="weights of a call (default 100)"
    )
    add_out_flag(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    warn_if_busy()
    start = time.perf_counter()
    linear.compile_kernels()
    compile_s = time.perf_counter() - start
    linears, layer_ops = [], []
    for threads in args.threads:
        torch.set_num_threads(threads)
        linears += measure_linears(args, threads)
        layer_ops += measure_layer_ops(args, threads)
    print_linears(linears)
    print_layer_ops(layer_ops)
    versions = {name: metadata.version(name) for name in ("numba", "llvmlite")}
    results = {"compile_s": compile_s, "linear": linears, "layer_ops": layer_ops}
    finish("kernels", args, {"compiler": versions, **results})


if __name__ == "__main__":
    main()
