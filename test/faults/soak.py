"""A long mixed load on a real server, with clients that go away: nothing grows, nothing is left.

    .venv/bin/python test/faults/soak.py --model MODEL --minutes 20 --plot soak.png

The same load runs on the server without speculation first and on the server with SSD then, each
for --minutes. Requests are greedy, sampled, penalised, constrained, stopped, copied, of one token
and of long prompts; a fifth of all clients close the connection or abort. Prints a table and, as
the last line, one JSON object; fails if memory grows after the warm-up by more than 1 % or 20 MB
beyond what it grows by without speculation, if the last minutes are slower than the first, if the
target or the drafter is left with a sequence or a slot, or if a greedy answer has changed in the
end. Of runs shorter than five minutes neither memory, which is still settling, nor speed is judged.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import requests

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from harness.client import Answer, Request, generate, start_and_leave
from harness.idle import assert_drained
from harness.prompts import load_prompts
from harness.server import Server, ServerSpec
from report import add_out_flag, finish, print_table

IN_FLIGHT = 6
SAMPLE_INTERVAL_S = 1.0
WARM_UP_SHARE = 0.25
JUDGED_MINUTES = 5.0
MAX_GROWTH_SHARE = 0.01
MAX_GROWTH_MB = 20.0
LEAST_SPEED = 0.9
"""Of the last third to the first third after the warm-up. Equal speeds differ by as much: each
third draws requests of its own, and a shared machine is not quieter. What slows a server with every
request, as a list that grows, passes it within minutes."""

SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}}'
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "filtered": {"temperature": 1.2, "top_k": 20, "min_p": 0.02, "sampling_seed": 5},
    "penalised": {"frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "constrained": {"json_schema": SCHEMA},
    "stopped": {"stop": [".", "the"]},
    "copies": {"n": 2, "temperature": 0.7},
    "one token": {"max_new_tokens": 1},
    "long prompt": {},
    "leaves": {"max_new_tokens": 200},
    "aborted": {"max_new_tokens": 200},
}
"""Sampling parameters by kind of request."""


class Sample(msgspec.Struct, frozen=True):
    """What a server had taken and done at a time."""

    seconds: float
    tokens: int
    resident_mb: dict[str, float]
    """By process: target (the scheduler), drafter."""


class Run(msgspec.Struct, frozen=True):
    samples: list[Sample]
    requests: dict[str, int]
    failures: list[str]
    warm_up_share: float

    def settled(self) -> list[Sample]:
        """What came after the warm-up."""
        begin = self.warm_up_share * self.samples[-1].seconds
        return [sample for sample in self.samples if sample.seconds >= begin]

    def growth_mb(self, process: str) -> float:
        """What a straight line through the settled samples gains from end to end."""
        settled = self.settled()
        seconds = [sample.seconds for sample in settled]
        resident = [sample.resident_mb[process] for sample in settled]
        slope = np.polyfit(seconds, resident, 1)[0]
        return float(slope * (seconds[-1] - seconds[0]))

    def resident_mb(self, process: str) -> float:
        return self.settled()[-1].resident_mb[process]

    def speeds(self) -> tuple[float, float]:
        """Tokens a second in the first and in the last third after the warm-up."""
        settled = self.settled()
        third = len(settled) // 3
        return _speed(settled[: third + 1]), _speed(settled[-third - 1 :])


def _speed(samples: Sequence[Sample]) -> float:
    seconds = samples[-1].seconds - samples[0].seconds
    return (samples[-1].tokens - samples[0].tokens) / max(seconds, 1e-9)


class Load:
    """Clients that ask until told to stop: together each kind once, then what each draws."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._prompts = [prompt.input_ids for prompt in load_prompts(server.spec.model, 40)]
        self._threads = [
            threading.Thread(
                target=self._ask,
                args=(random.Random(f"{seed}-{index}"), list(KINDS)[index::IN_FLIGHT]),
            )
            for index in range(IN_FLIGHT)
        ]
        self.num_tokens = 0
        self.requests: Counter[str] = Counter()
        self.failures: list[str] = []

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, rng: random.Random, first: list[str]) -> None:
        while first or not self._stopping.is_set():
            kind = first.pop() if first else rng.choice(list(KINDS))
            try:
                num_tokens = self._one(kind, rng)
            except (requests.RequestException, RuntimeError) as error:
                self.failures.append(f"{kind}: {error}")
                return
            with self._lock:
                self.requests[kind] += 1
                self.num_tokens += num_tokens

    def _one(self, kind: str, rng: random.Random) -> int:
        """Send a request of that kind; returns how many tokens came back."""
        prompt = rng.choice(self._prompts)
        if kind == "long prompt":
            prompt = tuple(token for part in rng.sample(self._prompts, 12) for token in part)[:900]
        params = {"max_new_tokens": rng.randrange(8, 64), **KINDS[kind]}
        request = Request(prompt, params)
        if kind == "leaves":
            start_and_leave(self._server.url, request, after_s=rng.uniform(0, 2))
            return 0
        if kind == "aborted":
            return self._abort(request, rng)
        return sum(answer.meta_info["completion_tokens"] for answer in self._answers(request))

    def _answers(self, request: Request) -> list[Answer]:
        if request.params.get("n", 1) == 1:
            return [generate(self._server.url, request)]
        reply = requests.post(f"{self._server.url}/generate", json=request.body(), timeout=600)
        reply.raise_for_status()
        return [msgspec.convert({"output_ids": [], **one}, Answer) for one in reply.json()]

    def _abort(self, request: Request, rng: random.Random) -> int:
        rid = f"soak-{rng.getrandbits(48)}"
        timer = threading.Timer(rng.uniform(0, 2), self._abort_by_id, (rid,))
        timer.start()
        try:
            answer = generate(
                self._server.url, msgspec.structs.replace(request, options={"rid": rid})
            )
        finally:
            timer.join()
        return int(answer.meta_info["completion_tokens"])

    def _abort_by_id(self, rid: str) -> None:
        requests.post(f"{self._server.url}/abort_request", json={"rid": rid}, timeout=60)


def soak(server: Server, seconds: float, seed: int, warm_up_share: float) -> Run:
    """Load the server for that long, then look whether it is as it was."""
    probe = Request(load_prompts(server.spec.model, 1)[0].input_ids, {"max_new_tokens": 32})
    before = generate(server.url, probe)
    load = Load(server, seed)
    start = time.monotonic()
    samples = []
    load.start()
    try:
        while (now := time.monotonic() - start) < seconds and not load.failures:
            samples.append(Sample(now, load.num_tokens, resident_mb(server)))
            time.sleep(SAMPLE_INTERVAL_S)
    finally:
        load.stop()
    failures = list(load.failures)
    if not generate(server.url, probe).same_as(before):
        failures.append("a greedy answer has changed")
    if server.spec.drafter is not None:
        try:
            assert_drained(server)
        except AssertionError as error:
            failures.append(f"left behind: {error}")
    return Run(
        samples=samples,
        requests=dict(load.requests),
        failures=failures,
        warm_up_share=warm_up_share,
    )


def resident_mb(server: Server) -> dict[str, float]:
    """Of the scheduler, which is the largest of the server's own processes, and of the drafter."""
    if server.spec.drafter is None:
        return {"target": max(map(_resident, server.family()))}
    drafter = server.drafter_process()
    others = [process for process in server.family() if process != drafter]
    return {"target": max(map(_resident, others)), "drafter": _resident(drafter)}


def _resident(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 1e6


def failures_of(plain: Run, ssd: Run) -> list[str]:
    """What the two runs show that must not be."""
    found = plain.failures + ssd.failures
    for process in ("target", "drafter"):
        allowed = max(MAX_GROWTH_SHARE * ssd.resident_mb(process), MAX_GROWTH_MB)
        allowed += max(0.0, plain.growth_mb("target"))
        growth = ssd.growth_mb(process)
        if growth > allowed:
            found.append(f"{process} grew by {growth:.1f} MB, allowed are {allowed:.1f}")
    return found


def slowdown_of(ssd: Run) -> list[str]:
    first, last = ssd.speeds()
    if last >= LEAST_SPEED * first:
        return []
    return [f"{last:.1f} tokens a second in the last third, {first:.1f} in the first"]


def run(
    model: str, drafter: str, minutes: float, seed: int, warm_up_share: float = WARM_UP_SHARE
) -> tuple[Run, Run]:
    """The server without speculation, then the one with SSD."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        for name in (None, drafter):
            spec = ServerSpec(model=model, drafter=name, flags=("--chunked-prefill-size", "256"))
            server = Server(spec, log_path=Path(folder) / "server.log")
            try:
                server.wait_until_ready()
                runs.append(soak(server, 60 * minutes, seed, warm_up_share))
            finally:
                server.stop()
    return runs[0], runs[1]


def rows_of(plain: Run, ssd: Run) -> list[list[str]]:
    rows = []
    for name, one in (("without speculation", plain), ("SSD", ssd)):
        first, last = one.speeds()
        for process in one.samples[-1].resident_mb:
            rows.append(
                [
                    f"{name}, {process}",
                    f"{one.resident_mb(process):.0f}",
                    f"{one.growth_mb(process):+.1f}",
                    f"{first:.1f}",
                    f"{last:.1f}",
                    str(sum(one.requests.values())),
                ]
            )
    return rows


def plot(plain: Run, ssd: Run, path: Path) -> None:
    """Resident memory over time, as the difference to the end of the warm-up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, one in (("without speculation", plain), ("SSD", ssd)):
        for process in one.samples[-1].resident_mb:
            begin = one.settled()[0].resident_mb[process]
            axes.plot(
                [sample.seconds / 60 for sample in one.samples],
                [sample.resident_mb[process] - begin for sample in one.samples],
                label=f"{name}: {process}",
            )
    axes.axvspan(0, ssd.warm_up_share * ssd.samples[-1].seconds / 60, alpha=0.1, label="warm-up")
    axes.set(xlabel="minutes of load", ylabel="resident memory, MB beyond the warm-up")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the target's checkpoint")
    parser.add_argument("--drafter", help="the drafter's checkpoint (default: the target's own)")
    parser.add_argument("--minutes", type=float, default=20.0, help="of each server (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write memory over time to this PNG")
    add_out_flag(parser)
    args = parser.parse_args()
    plain, ssd = run(args.model, args.drafter or args.model, args.minutes, args.seed)
    headers = ["process", "MB", "growth, MB", "tokens/s, first third", "last third", "requests"]
    print_table(headers, rows_of(plain, ssd))
    if args.minutes < JUDGED_MINUTES:
        print(f"neither memory nor speed is judged of less than {JUDGED_MINUTES:g} minutes")
        failures = plain.failures + ssd.failures
    else:
        failures = failures_of(plain, ssd) + slowdown_of(ssd)
    for failure in failures:
        print(f"FAILED: {failure}")
    if args.plot is not None:
        plot(plain, ssd, args.plot)
    args.model, args.drafter = Path(args.model).name, Path(args.drafter or args.model).name
    figures = {name: msgspec.to_builtins(one) for name, one in (("plain", plain), ("ssd", ssd))}
    for name, one in (("plain", plain), ("ssd", ssd)):
        figures[name]["samples"] = figures[name]["samples"][:: max(1, len(one.samples) // 100)]
        figures[name]["growth_mb"] = {
            process: one.growth_mb(process) for process in one.samples[-1].resident_mb
        }
        figures[name]["tokens_per_s"] = one.speeds()
    args.plot = args.plot and args.plot.name
    finish("soak", args, {**figures, "failures": failures})
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
