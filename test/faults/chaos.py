"""A seeded schedule of faults against a real server with requests in flight, and what they cost.

    .venv/bin/python test/faults/chaos.py --model MODEL --faults 200
    .venv/bin/python test/faults/chaos.py --model MODEL --faults 20 --drafter DRAFT_MODEL

The server connects to a proxy (proxy.py); behind it a drafter is kept alive by our own supervisor:
the product's with --drafter, else one without a model (lookup_drafter.py, which has read the
answers), whose start costs so little that faults can come thick. Kinds: kill, restart (told to
end), stop (SIGSTOP, then SIGCONT), slow (replies held back), garbage (malformed frames both ways),
generations (old replies and commits under other generations), cut (all connections dropped). Every
fault is followed by peace for twice as long as it lasted, two seconds at least. Prints a table by
kind and, as the last line, one JSON object; fails if an answer differs from the run without faults,
one is lost, hits stay away for more than two seconds, fewer than half of all rows are hits, a row
is counted twice or not at all, or anything is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import requests

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from faults.fuzz_wire import Fuzzer
from faults.proxy import FaultyProxy
from harness.client import Answer, Request, generate, generate_all
from harness.draws import draw_gap
from harness.prompts import load_prompts
from harness.reference import MAX_ROUNDING_GAP, PROMPTS_PER_ROUNDING, find_divergence
from harness.rounds import rows_by_fate
from harness.server import Server, ServerSpec
from report import add_out_flag, finish, print_table
from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter.process import DrafterHandle, DrafterSettings, start_drafter
from sglang_ssd.target.supervisor import DrafterSupervisor, RestartPace
from sglang_ssd.wire.frames import ProtocolError, decode_to_drafter, decode_to_target, encode
from sglang_ssd.wire.messages import DrafterStatus, SpeculateReply, StatusRequest, VerifyCommit
from sglang_ssd.wire.transport import TargetSocket

IN_FLIGHT = 8
NUM_CASES = 2 * IN_FLIGHT + 1
NUM_STEPS = 4
DEADLINE_MS = 300
MODEL_DEADLINE_MS = 2000
DRAFTER_TOKENS = 16384
HITS_RETURN_S = 2.0
LEAST_PEACE_S = 2.0
LIMIT_S = 120.0
"""Nothing here takes so long unless something is broken."""

WEIGHTS = {
    "kill": 40,
    "restart": 15,
    "stop": 30,
    "slow": 25,
    "garbage": 40,
    "generations": 30,
    "cut": 20,
}
"""How often each kind is drawn; the share of kills, and one of each kind, is not left to chance."""

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.3, "presence_penalty": 0.2, "min_new_tokens": 32},
    {"temperature": 0.8, "top_k": 40},
    {"regex": r"([a-z]{2,9} ){16,40}"},
    {"temperature": 0.9, "min_p": 0.02, "frequency_penalty": 0.3, "logit_bias": {"198": -4.0}},
    {"stop": ["\n\n"]},
)
"""What requests ask for, in turn: what a fault must not change has a state of its own in most."""


class Fault(msgspec.Struct, frozen=True):
    kind: str
    seconds: float
    """How long it lasts, where it lasts."""


class Outcome(msgspec.Struct, frozen=True):
    kind: str
    trouble_s: float
    """Until the drafter was ready again."""
    return_s: float
    """From then until the next hit."""


def schedule(num_faults: int, seed: int) -> list[Fault]:
    """First a kill and as many other kinds as there is room for, each once; a fifth are kills."""
    rng = random.Random(seed)
    others = [kind for kind in WEIGHTS if kind != "kill"]
    first = ["kill", *rng.sample(others, min(num_faults - 1, len(others)))]
    kills = ["kill"] * (num_faults * WEIGHTS["kill"] // sum(WEIGHTS.values()) - 1)
    num_drawn = num_faults - len(first) - len(kills)
    rest = kills + rng.choices(others, [WEIGHTS[kind] for kind in others], k=num_drawn)
    rng.shuffle(first)
    rng.shuffle(rest)
    return [Fault(kind, rng.uniform(0.3, 1.2)) for kind in first + rest]


class Drafter:
    """The lookup drafter, or one with that model, under the product's supervisor."""

    def __init__(
        self, endpoint: str, table: Path, vocab_size: int, model: str | None = None
    ) -> None:
        self.deadline_ms = DEADLINE_MS if model is None else MODEL_DEADLINE_MS
        """Of a target that it serves."""
        self._table = table
        self._vocab_size = vocab_size
        self.pids: list[int] = []
        self.supervisor = DrafterSupervisor(
            self._look_up if model is None else self._draft,
            DrafterSettings(
                model_path=model or "lookup",
                endpoint=endpoint,
                max_total_tokens=DRAFTER_TOKENS,
                cores=str(max(os.sched_getaffinity(0))),
            ),
            RestartPace(
                delay_s=0.1,
                delay_max_s=0.4,
                healthy_s=1.0,
                start_timeout_s=60.0 if model is None else LIMIT_S,
            ),
        )
        self.supervisor.start()

    def _draft(self, settings: DrafterSettings) -> DrafterHandle:
        handle = start_drafter(settings, SsdConfig())
        self.pids.append(handle.pid)
        return handle

    def _look_up(self, settings: DrafterSettings) -> DrafterHandle:
        flags = {
            "--endpoint": settings.endpoint,
            "--table": self._table,
            "--vocab-size": self._vocab_size,
            "--parent-pid": psutil.Process().pid,
        }
        script = Path(__file__).parent / "lookup_drafter.py"
        process = subprocess.Popen(
            [sys.executable, str(script), *(str(part) for pair in flags.items() for part in pair)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pids.append(process.pid)
        return DrafterHandle(process)

    def send_signal(self, what: signal.Signals) -> None:
        psutil.Process(self.supervisor.pid).send_signal(what)

    def wait_for_other_than(self, pid: int) -> None:
        wait_until(lambda: self.supervisor.pid != pid and self.supervisor.alive(), "a new drafter")


class Load:
    """IN_FLIGHT clients that ask the same requests over and over and compare the answers."""

    def __init__(self, url: str, cases: list[Request], expected: list[Answer]) -> None:
        self._url, self._cases, self._expected = url, cases, expected
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.num_answers = 0
        self.different: list[tuple[int, Answer]] = []
        """Number of the case, and what came in place of what was expected."""
        self.lost: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(index,), daemon=True)
            for index in range(IN_FLIGHT)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
            if thread.is_alive():
                self.lost.append("an answer never came")

    def _ask(self, index: int) -> None:
        while not self._stopping.is_set():
            number = index % len(self._cases)
            try:
                answer = generate(self._url, self._cases[number])
            except (requests.RequestException, RuntimeError) as error:
                self.lost.append(f"case {number}: {error}")
                return
            self.compare(number, answer)
            index += IN_FLIGHT + 1

    def compare(self, number: int, answer: Answer) -> None:
        with self._lock:
            self.num_answers += 1
            if not answer.same_as(self._expected[number]):
                self.different.append((number, answer))

    def wrong_answers(self, server: Server) -> list[str]:
        """Differences that are more than rounding, and what is too often to be rounding."""
        gaps = [(n, self._gap(server, n, answer)) for n, answer in self.different]
        wrong = [f"case {n} differs by {gap:g}" for n, gap in gaps if gap > MAX_ROUNDING_GAP]
        rounded = {n for n, gap in gaps if gap <= MAX_ROUNDING_GAP}
        if len(rounded) > len(self._cases) // PROMPTS_PER_ROUNDING:
            wrong.append(f"too many cases differ to be rounding: {sorted(rounded)}")
        return wrong

    def _gap(self, server: Server, number: int, answer: Answer) -> float:
        case, expected = self._cases[number], self._expected[number]
        if answer.output_ids == expected.output_ids:
            return float("inf")  # the text or the reason of the end
        if case.params.get("temperature"):
            return draw_gap(server, case, expected, answer)
        divergence = find_divergence(server, number, case, expected, answer)
        return divergence.gap if divergence is not None else 0.0


class Chaos:
    """Inflicts faults and watches the target get over them; `hits` counts its hits so far."""

    def __init__(
        self, hits: Callable[[], int], proxy: FaultyProxy, drafter: Drafter, seed: int
    ) -> None:
        self._hits, self._proxy, self._drafter = hits, proxy, drafter
        self._fuzzer = Fuzzer(seed)
        self._rng = random.Random(seed)

    def inflict(self, fault: Fault) -> Outcome:
        start = time.monotonic()
        inflict: Callable[[float], None] = getattr(self, f"_{fault.kind}")
        inflict(fault.seconds)
        ready = self._proxy.welcomed_at if fault.kind in ("kill", "restart") else time.monotonic()
        hits = self._hits()
        wait_until(lambda: self._hits() > hits, f"hits after {fault}")
        return Outcome(fault.kind, ready - start, time.monotonic() - ready)

    def restart_drafter(self) -> None:
        self._end_drafter(signal.SIGTERM)

    def _kill(self, seconds: float) -> None:
        self._end_drafter(signal.SIGKILL)

    def _restart(self, seconds: float) -> None:
        self.restart_drafter()

    def _end_drafter(self, how: signal.Signals) -> None:
        pid = self._drafter.supervisor.pid
        self._proxy.expect_drafter_other_than(pid)
        self._drafter.send_signal(how)
        self._drafter.wait_for_other_than(pid)
        wait_until(lambda: self._proxy.welcomed_at > 0, "a Welcome")
        self._drafter.supervisor.note_ready(self._drafter.supervisor.pid)

    def _stop(self, seconds: float) -> None:
        self._drafter.send_signal(signal.SIGSTOP)
        time.sleep(seconds + self._drafter.deadline_ms / 1000)
        self._drafter.send_signal(signal.SIGCONT)

    def _slow(self, seconds: float) -> None:
        self._proxy.delay_s = seconds
        time.sleep(2 * seconds)
        self._proxy.delay_s = 0.0
        time.sleep(seconds)  # what was held back arrives late

    def _cut(self, seconds: float) -> None:
        self._proxy.cut()
        time.sleep(seconds)
        self._proxy.mend()

    def _garbage(self, seconds: float) -> None:
        self._proxy.slip_in(
            to_target=[self._fuzzer.frames("to_target") for _ in range(30)],
            to_drafter=[self._fuzzer.frames("to_drafter") for _ in range(30)],
        )

    def _generations(self, seconds: float) -> None:
        """What was said before, once more, some of it in the name of another opening."""
        self._proxy.slip_in(
            to_target=[self._altered(one, decode_to_target) for one in self._proxy.last_replies],
            to_drafter=[self._altered(one, decode_to_drafter) for one in self._proxy.last_commits],
        )

    def _altered(self, frames: list[bytes], decode: Any) -> list[bytes]:
        try:
            message, ids = decode(frames)
        except ProtocolError:
            return frames
        if not isinstance(message, SpeculateReply | VerifyCommit):
            return frames
        change = self._rng.choice([0, -1, 1, 7])
        generations = [generation + change for generation in message.generations]
        return encode(msgspec.structs.replace(message, generations=generations), [ids])


def hits_of(server: Server) -> int:
    hits: int = status_of(server)["hits"]
    return hits


def status_of(server: Server) -> dict[str, Any]:
    (replica,) = requests.get(f"{server.url}/ssd/status", timeout=LIMIT_S).json()["replicas"]
    state: dict[str, Any] = replica
    return state


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {LIMIT_S:g} s")
        time.sleep(0.02)


def make_cases(model: str, num_cases: int = NUM_CASES) -> list[Request]:
    """Of several kinds and lengths; seeds make the sampled ones the same every time."""
    return [
        Request(
            prompt.input_ids,
            {
                "max_new_tokens": 48 + 16 * (index % 3),
                "ignore_eos": True,
                "sampling_seed": index,
                **ASKED[index % len(ASKED)],
            },
        )
        for index, prompt in enumerate(load_prompts(model, num_cases))
    ]


class Leftovers(msgspec.Struct, frozen=True):
    """What a fault must not leave, after the load has ended."""

    live_sequences: int
    lost_slots: int
    more_fds: int
    more_processes: int
    more_drafters: int


class Count(msgspec.Struct, frozen=True):
    """Of the server's processes."""

    fds: int
    processes: int

    @classmethod
    def of(cls, server: Server) -> Count:
        family = server.family()
        return cls(fds=sum(process.num_fds() for process in family), processes=len(family))


def leftovers(server: Server, back: str, drafter: Drafter, before: Count) -> Leftovers:
    """The drafter's table is read once it has had time to hear of the last closes."""
    wait_until(lambda: status_of(server)["live_sequences"] == 0, "an idle server")
    after = Count.of(server)
    held = ask_status(back, until=lambda status: status.live_sequences == 0)
    return Leftovers(
        live_sequences=held.live_sequences,
        lost_slots=held.total_slots - held.free_slots,
        more_fds=after.fds - before.fds,
        more_processes=after.processes - before.processes,
        more_drafters=sum(psutil.pid_exists(pid) for pid in drafter.pids) - 1,
    )


def ask_status(endpoint: str, until: Callable[[DrafterStatus], bool]) -> DrafterStatus:
    """The drafter's own numbers, as they are wished for or as they are in the end."""
    socket = TargetSocket(endpoint)
    deadline = time.monotonic() + 30
    status = None
    try:
        while time.monotonic() < deadline and (status is None or not until(status)):
            socket.send(StatusRequest())
            for message, _ in socket.receive(0.5):
                status = message if isinstance(message, DrafterStatus) else status
    finally:
        socket.close()
    assert status is not None, "the drafter says nothing"
    return status


class Result(msgspec.Struct, frozen=True):
    outcomes: list[Outcome]
    num_answers: int
    different: list[str]
    """Answers that differ by more than rounding."""
    num_different: int
    """Answers that differ at all."""
    lost: list[str]
    rows: dict[str, int]
    num_rows: int
    """All of them, as the server counts rows."""
    hit_share: float
    leftovers: Leftovers
    seconds: float

    def slow_returns(self) -> list[str]:
        """What a machine that does nothing else must not be too slow for."""
        late = [one for one in self.outcomes if one.return_s > HITS_RETURN_S]
        return [f"hits came back after {one.return_s:.1f} s: {one.kind}" for one in late]

    def failures(self) -> list[str]:
        found = self.different + self.lost
        if self.hit_share < 0.5:
            found.append(f"only {self.hit_share:.0%} of all rows were hits")
        if sum(self.rows.values()) != self.num_rows:
            found.append(f"{self.rows} are not all of {self.num_rows} rows")
        if any(count > 0 for count in msgspec.structs.astuple(self.leftovers)):
            found.append(f"left behind: {self.leftovers}")
        return found


@contextmanager
def served(
    model: str, folder: Path, table: Path, drafter_model: str | None
) -> Iterator[tuple[Server, FaultyProxy, Drafter]]:
    """Server, wire and drafter, from the first to the last process."""
    front, back = f"ipc://{folder}/front", f"ipc://{folder}/back"
    vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    drafter = Drafter(back, table, vocab_size, drafter_model)
    proxy = FaultyProxy(front, back)
    settings = (
        ("endpoint", front),
        ("reply_deadline_ms", drafter.deadline_ms),
        ("reply_deadline_min_ms", 50),
    )
    spec = ServerSpec(model=model, drafter=model, num_steps=NUM_STEPS, settings=settings)
    server = Server(spec, log_path=folder / "server.log")
    try:
        server.wait_until_ready()
        drafter.supervisor.note_ready(drafter.supervisor.pid)
        yield server, proxy, drafter
    finally:
        server.stop()
        proxy.stop()
        drafter.supervisor.stop()


def run(
    model: str,
    num_faults: int,
    seed: int,
    num_cases: int = NUM_CASES,
    drafter_model: str | None = None,
) -> Result:
    """Without faults once, to learn the answers; then with them."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        table = folder / "table.json"
        table.write_text("[]")
        with served(model, folder, table, drafter_model) as (server, proxy, drafter):
            cases = make_cases(model, num_cases)
            expected = generate_all(server.url, cases, concurrency=IN_FLIGHT)
            table.write_text(json.dumps(_sequences(cases, expected)))
            chaos = Chaos(lambda: hits_of(server), proxy, drafter, seed)
            chaos.restart_drafter()  # so that it reads the table
            load = Load(server.url, cases, expected)
            for number, answer in enumerate(generate_all(server.url, cases, concurrency=IN_FLIGHT)):
                load.compare(number, answer)
            before, counts = Count.of(server), status_of(server)
            start = time.monotonic()
            load.start()
            outcomes = _inflict_all(chaos, schedule(num_faults, seed), load)
            load.stop()
            after = status_of(server)
            rows, num_rows = rows_by_fate(counts, after), after["rows"] - counts["rows"]
            return Result(
                outcomes=outcomes,
                num_answers=load.num_answers,
                lost=load.lost,
                rows=rows,
                num_rows=num_rows,
                hit_share=rows["hits"] / max(1, num_rows),
                leftovers=leftovers(server, f"ipc://{folder}/back", drafter, before),
                different=load.wrong_answers(server),
                num_different=len(load.different),
                seconds=time.monotonic() - start,
            )


def _inflict_all(chaos: Chaos, faults: list[Fault], load: Load) -> list[Outcome]:
    outcomes = []
    time.sleep(1.0)
    for number, fault in enumerate(faults):
        start = time.monotonic()
        outcomes.append(chaos.inflict(fault))
        time.sleep(max(LEAST_PEACE_S, 2 * (time.monotonic() - start)))
        if load.lost:
            break
        print(f"\r{number + 1}/{len(faults)} {fault.kind:12}", end="", file=sys.stderr, flush=True)
    return outcomes


def _sequences(cases: list[Request], answers: list[Answer]) -> list[list[int]]:
    return [
        [*map(int, case.prompt), *answer.output_ids]
        for case, answer in zip(cases, answers, strict=True)
    ]


def print_result(result: Result) -> None:
    rows = []
    for kind in WEIGHTS:
        of_kind = [one for one in result.outcomes if one.kind == kind]
        if of_kind:
            trouble = sum(one.trouble_s for one in of_kind) / len(of_kind)
            returns = sorted(one.return_s for one in of_kind)
            rows.append(
                [
                    kind,
                    len(of_kind),
                    f"{trouble:.2f}",
                    f"{returns[len(returns) // 2]:.2f}",
                    f"{returns[-1]:.2f}",
                ]
            )
    print_table(["fault", "times", "s until ready", "s until hits, median", "longest"], rows)
    print(f"{result.num_answers} answers, {result.hit_share:.0%} of the rows hits: {result.rows}")
    for failure in result.failures() + result.slow_returns():
        print(f"FAILED: {failure}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the target's checkpoint")
    parser.add_argument("--drafter", help="a draft model in place of the table of answers")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    add_out_flag(parser)
    args = parser.parse_args()
    result = run(args.model, args.faults, args.seed, drafter_model=args.drafter)
    print_result(result)
    failures = result.failures() + result.slow_returns()
    figures = {**msgspec.to_builtins(result), "failures": failures}
    args.model = Path(args.model).name
    args.drafter = args.drafter and Path(args.drafter).name
    finish("chaos", args, figures)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
