"""A trace read back: spans of both processes, rounds, and how much drafting lies under a verify.

The file is what `--ssd-trace` writes (sglang_ssd/trace.py): one event a line, times in microseconds
of CLOCK_MONOTONIC. A round runs from one verify's start to the next one's; a round with a prefill
in it is none, for then the target did something else as well.

    target    | verify ......... | accept | host | wait for drafts | verify
    drafter     branch step, branch step, ...      decode
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

TARGET = "target"
DRAFTER = "drafter"
VERIFY = "verify"
WAIT = "wait for drafts"
ACCEPT = "accept"
PREFILL = "prefill"
BRANCH_STEP = "branch step"
DECODE = "decode"
FEED = "feed"
PREFILL_SLICE = "prefill slice"
DRAFTING = (BRANCH_STEP, DECODE, FEED)
"""The drafter's forwards of a round, with what they take along of prompts; one that only reads a
slice of prompts belongs to none."""


class Span(msgspec.Struct, frozen=True):
    process: str
    name: str
    start: float  # ms
    end: float  # ms
    args: dict[str, object]

    @property
    def duration(self) -> float:
        return self.end - self.start


class Round(msgspec.Struct, frozen=True):
    """Times in ms. host is the rest: SGLang's scheduler, acceptance, the commit."""

    start: float
    end: float
    verify: float
    wait: float

    @property
    def duration(self) -> float:
        return self.end - self.start

    @property
    def host(self) -> float:
        return self.duration - self.verify - self.wait


def read_trace(path: Path) -> list[Span]:
    """Spans by start time. ValueError names the line that is no event."""
    processes: dict[int, str] = {}
    spans: list[tuple[int, Span]] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        try:
            event = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: not a trace event ({error})") from error
        if event["ph"] == "M":
            processes[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            start = event["ts"] / 1000
            span = Span("", event["name"], start, start + event["dur"] / 1000, event["args"])
            spans.append((event["pid"], span))
    named = [
        msgspec.structs.replace(span, process=processes.get(pid, str(pid))) for pid, span in spans
    ]
    return sorted(named, key=lambda span: span.start)


def select(
    spans: Iterable[Span],
    process: str,
    names: str | Sequence[str],
    *,
    since: float = float("-inf"),
    until: float = float("inf"),
) -> list[Span]:
    """Spans of these names that lie within [since, until] ms."""
    wanted = (names,) if isinstance(names, str) else names
    return [
        span
        for span in spans
        if span.process == process
        and span.name in wanted
        and span.start >= since
        and span.end <= until
    ]


def find_rounds(
    spans: Sequence[Span], *, since: float = float("-inf"), until: float = float("inf")
) -> list[Round]:
    """Whole rounds in order, those with a prefill left out."""
    verifies = select(spans, TARGET, VERIFY, since=since, until=until)
    waits = select(spans, TARGET, WAIT, since=since, until=until)
    prefills = [span.start for span in select(spans, TARGET, PREFILL)]
    wait_starts = [span.start for span in waits]
    rounds = []
    for verify, following in pairwise(verifies):
        if bisect_left(prefills, verify.start) != bisect_left(prefills, following.start):
            continue
        first = bisect_left(wait_starts, verify.start)
        last = bisect_left(wait_starts, following.start)
        rounds.append(
            Round(
                start=verify.start,
                end=following.start,
                verify=verify.duration,
                wait=sum(wait.duration for wait in waits[first:last]),
            )
        )
    return rounds


def drafting_spans(spans: Sequence[Span], rounds: Sequence[Round]) -> list[Span]:
    """The drafter's forwards that start within a round."""
    starts = [one.start for one in rounds]
    found = []
    for span in select(spans, DRAFTER, DRAFTING):
        index = bisect_left(starts, span.start) - 1
        if index >= 0 and span.start < rounds[index].end:
            found.append(span)
    return found


def time_under(spans: Iterable[Span], covers: Sequence[Span]) -> float:
    """Time of spans that lies under covers, which do not overlap each other and are in order."""
    ends = [cover.end for cover in covers]
    total = 0.0
    for span in spans:
        for cover in covers[bisect_left(ends, span.start) :]:
            if cover.start >= span.end:
                break
            total += min(span.end, cover.end) - max(span.start, cover.start)
    return total


def drafting_under_verify(spans: Sequence[Span], rounds: Sequence[Round]) -> float:
    """Share of the drafting time of these rounds that lies under a verify."""
    drafting = drafting_spans(spans, rounds)
    total = sum(span.duration for span in drafting)
    return time_under(drafting, select(spans, TARGET, VERIFY)) / total if total else 0.0
