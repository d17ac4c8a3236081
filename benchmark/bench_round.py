r"""Forward times of a round: verify by width on the target, branch step by rows on the drafter.

A branch step is one pass over a tree: with K drafts and F guesses at every position K passes have
about F * (K + 1) rows and a last one has F (core/outcome_tree.py).

    python benchmark/bench_round.py --target Qwen/Qwen2.5-Coder-1.5B-Instruct \
        --draft Qwen/Qwen2.5-Coder-0.5B-Instruct --dtype bfloat16
    python benchmark/bench_round.py --trace FILE

Each model runs in a process of its own on its own cores, with SGLang's ModelRunner and the plans of
a served round; an idle one sleeps. Both are timed alone and while the other is busy, for two models
that share a memory bus may slow each other down. With --trace the same figures come out of what a
server really did. simulate.py predicts the best K and F from the JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from report import add_out_flag, finish, print_table, warn_if_busy
from simulate import Times
from timeline import (
    BRANCH_STEP,
    DECODE,
    DRAFTER,
    TARGET,
    VERIFY,
    Span,
    find_rounds,
    read_trace,
    select,
)

WARM_UP = 3
MAX_ROWS = 256  # of a forward; behind the prefix every request has slots for as many
HOST_MS = 2.0


class Shape(msgspec.Struct, frozen=True):
    """One forward of a batch: rows per request, and what they see of each other."""

    kind: str  # verify: a causal chain; branch: rows that see the prefix and themselves; decode
    rows: int


class Forward:
    """One model with a filled KV cache; times forwards behind the same prefix."""

    def __init__(self, settings: Any, *, batch_size: int, context: int) -> None:
        from sglang_ssd.drafter.runner import SglangModelStep

        self._model = SglangModelStep(settings, device="cpu", max_sequences=MAX_ROWS)
        self._batch_size = batch_size
        self._context = context
        self._tokens = np.arange(1000, 1000 + context, dtype=np.int64)
        for request in range(batch_size):
            self._prefill(request)

    def times(self, shape: Shape, repeats: int) -> list[float]:
        """Milliseconds of each repeat."""
        run = self._prepare(shape)
        for _ in range(WARM_UP):
            run()
        elapsed = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            elapsed.append((time.perf_counter() - start) * 1000)
        return elapsed

    def _prefill(self, request: int) -> None:
        from sglang_ssd.drafter.model_step import ExtendRow

        slots = self._slots(request, 0)
        self._model.extend([ExtendRow(token_ids=self._tokens, start=0, kv_slots=slots)])

    def _slots(self, request: int, num_new: int) -> Any:
        """Slots of a request's prefix and of rows behind it, of which each has MAX_ROWS."""
        first = 1 + request * (self._context + MAX_ROWS)
        return np.arange(first, first + self._context + num_new, dtype=np.int64)

    def _prepare(self, shape: Shape) -> Callable[[], object]:
        from sglang_ssd.drafter.model_step import ExtendRow

        requests = range(self._batch_size)
        if shape.kind == "decode":
            one = self._tokens[:1]
            rows = [
                ExtendRow(token_ids=one, start=self._context, kv_slots=self._slots(request, 1))
                for request in requests
            ]
            return lambda: self._model.extend(rows)
        branches = [self._branch_rows(request, shape) for request in requests]
        return lambda: self._model.branch_step(branches)

    def _branch_rows(self, request: int, shape: Shape) -> Any:
        import torch

        from sglang_ssd.drafter.model_step import BranchRows

        own = torch.eye(shape.rows, dtype=torch.bool)
        positions = np.full(shape.rows, self._context, dtype=np.int64)
        if shape.kind == "verify":
            own = torch.ones_like(own).tril()
            positions += np.arange(shape.rows)
        prefix = torch.ones((shape.rows, self._context), dtype=torch.bool)
        return BranchRows(
            token_ids=np.arange(2000, 2000 + shape.rows, dtype=np.int64),
            positions=positions,
            kv_slots=self._slots(request, shape.rows),
            mask=torch.cat([prefix, own], dim=1),
        )


def serve(
    model: str, dtype: str, cores: str, batch_size: int, context: int, pipe: Connection
) -> None:
    """The process of one model: (shape, repeats) in, times out; None in, run `busy` until told."""
    os.environ.setdefault("SGLANG_PLATFORM", "ssd_cpu")
    from sglang_ssd.platform.affinity import parse_cores, pin_process

    pin_process(parse_cores(cores))
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_ssd.drafter.process import DrafterSettings

    settings = DrafterSettings(
        model_path=model, dtype=dtype, max_total_tokens=batch_size * (context + MAX_ROWS) + 1
    )
    forward = Forward(settings, batch_size=batch_size, context=context)
    pipe.send("ready")
    while True:
        request = pipe.recv()
        if request is None:
            return
        shape, repeats = request
        if repeats:
            pipe.send(forward.times(shape, repeats))
            continue
        while not pipe.poll():  # busy until the next message, which only ends this
            forward.times(shape, 1)
        pipe.recv()


class Side:
    """One model's process, from outside."""

    def __init__(self, name: str, model: str, cores: str, args: argparse.Namespace) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve,
            args=(model, args.dtype, cores, args.batch_size, args.context, theirs),
            daemon=True,
        )
        self._process.start()
        theirs.close()  # so that its death is an end of file here

    def wait_until_ready(self) -> None:
        try:
            self._pipe.recv()
        except EOFError:
            raise SystemExit(f"the {self.name} process did not come up; see above") from None

    def median_ms(self, shape: Shape, repeats: int) -> float:
        self._pipe.send((shape, repeats))
        return round(float(statistics.median(self._pipe.recv())), 2)

    def be_busy(self, shape: Shape) -> None:
        self._pipe.send((shape, 0))

    def be_idle(self) -> None:
        self._pipe.send("idle")

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(10)
        self._process.terminate()


def measure(args: argparse.Namespace) -> tuple[Times, Times]:
    """Times alone, and while the other side is busy with what it does in a round."""
    target_cores, drafter_cores = args.target_cores, args.drafter_cores
    target = Side("target", args.target, target_cores, args)
    drafter = Side("drafter", args.draft, drafter_cores, args)
    target.wait_until_ready()
    drafter.wait_until_ready()
    busy_verify = Shape("verify", args.widths[len(args.widths) // 2])
    busy_branch = Shape("branch", args.rows[len(args.rows) // 2])
    total = 2 * (len(args.widths) + len(args.rows) + 1)
    with tqdm(total=total, desc="forwards", leave=False) as progress:

        def medians(side: Side, kind: str, sizes: Sequence[int]) -> dict[int, float]:
            found = {}
            for size in sizes:
                found[size] = side.median_ms(Shape(kind, size), args.repeats)
                progress.update()
            return found

        measured = []
        for together in (False, True):
            if together:
                drafter.be_busy(busy_branch)
            verify = medians(target, "verify", args.widths)
            if together:
                drafter.be_idle()
                target.be_busy(busy_verify)
            branch_step = medians(drafter, "branch", args.rows)
            decode = medians(drafter, "decode", [1])[1]
            if together:
                target.be_idle()
            measured.append(Times(verify, branch_step, decode, args.host_ms))
    target.stop()
    drafter.stop()
    return measured[0], measured[1]


def times_from_trace(spans: Sequence[Span], batch_size: int) -> Times:
    """Medians by size of what a server did with batch_size requests; host is a mean."""

    def medians(process: str, name: str, requests: str, size: str) -> dict[int, float]:
        found: dict[int, list[float]] = defaultdict(list)
        for span in select(spans, process, name):
            if span.args[requests] == batch_size and not span.args.get("prefill_tokens"):
                found[int(str(span.args[size]))].append(span.duration)
        return {
            key: round(statistics.median(values), 2)
            for key, values in sorted(found.items())
            if len(values) >= WARM_UP
        }

    branch_step = medians(DRAFTER, BRANCH_STEP, "sequences", "rows")
    decode = medians(DRAFTER, DECODE, "rows", "rows")
    return Times(
        verify=medians(TARGET, VERIFY, "rows", "width"),
        branch_step={rows // batch_size: ms for rows, ms in branch_step.items()},
        decode=decode.get(batch_size, min(branch_step.values(), default=0.0)),
        host=round(statistics.fmean(one.host for one in find_rounds(spans)), 2),
    )


def print_times(alone: Times, together: Times | None) -> None:
    def rows_of(times: Times) -> list[tuple[str, float]]:
        return [
            *((f"verify, {width} tokens", ms) for width, ms in times.verify.items()),
            *((f"branch step, {rows} rows", ms) for rows, ms in times.branch_step.items()),
            ("decode", times.decode),
        ]

    if together is None:
        print_table(["forward", "ms"], rows_of(alone))
        return
    pairs = zip(rows_of(alone), rows_of(together), strict=True)
    print_table(
        ["forward", "ms alone", "ms while the other works", "ratio"],
        [[name, ms, other, f"{other / ms:.2f}"] for (name, ms), (_, other) in pairs],
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="hub id or folder")
    parser.add_argument("--draft", help="hub id or folder")
    parser.add_argument("--trace", type=Path, help="file of --ssd-trace, instead of measuring")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 3, 6, 9, 12, 15, 24])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=200, help="tokens before it (default 200)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--host-ms", type=float, default=HOST_MS, help="of a round (default 2)")
    parser.add_argument("--target-cores", default="0")
    parser.add_argument("--drafter-cores", default="1")
    add_out_flag(parser)
    args = parser.parse_args()
    if args.trace is None and not (args.target and args.draft):
        parser.error("give --target and --draft, or --trace")
    return args


def main() -> None:
    args = parse_arguments()
    if args.trace is not None:
        times = times_from_trace(read_trace(args.trace), args.batch_size)
        print_times(times, None)
        finish("round", args, {"times": times})
        return
    warn_if_busy()
    alone, together = measure(args)
    print_times(alone, together)
    finish("round", args, {"times": together, "times_alone": alone})


if __name__ == "__main__":
    main()
