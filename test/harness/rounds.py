"""What the drafter did during some requests: differences of the counters in /server_info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from harness.checkpoints import DrafterKind
from harness.client import Answer
from sglang_ssd.target.stats import DRAFTED_SERVED

MIN_ON_TIME = 0.95
"""Of the rows whose prompt the drafter has read, so many must be answered in time, or equality of
the output proves nothing."""
MIN_DRAFTED = 0.95
"""And so many of all rows that ask for drafts must be verified with some, if answers are long."""
MIN_DRAFTED_OF_SHORT = 0.7
"""Of short answers. A drafter as dear as its target, on one core beside it, is still reading when a
request's first round begins; short answers have few other rounds."""


class Counted(Protocol):
    """A server, or one of its replicas."""

    def ssd(self) -> dict[str, Any]: ...


class Rounds(msgspec.Struct, frozen=True):
    """Rows of target rounds, between two looks at a server."""

    rounds: int
    on_time_rows: int
    missing_rows: int
    prefill_rows: int
    plain_rows: int
    correct_drafts: int
    served: dict[str, int]
    served_correct: dict[str, int]
    plain_decode: dict[str, int]
    """Rows by cause."""

    @property
    def on_time_rate(self) -> float:
        return self.on_time_rows / max(1, self.on_time_rows + self.missing_rows)

    @property
    def drafted_rows(self) -> int:
        """Rows verified with a draft at least; a miss under backup none is on time without one."""
        return sum(count for served, count in self.served.items() if served in DRAFTED_SERVED)

    @property
    def drafted_rate(self) -> float:
        rows = self.on_time_rows + self.missing_rows + self.prefill_rows
        return self.drafted_rows / max(1, rows)

    @property
    def hit_rate(self) -> float:
        hits = self.served.get("hit", 0) + self.served.get("chain_hit", 0)
        misses = self.served.get("jit", 0) + self.served.get("none", 0)
        return hits / max(1, hits + misses)

    def accept_length(self, served: str) -> float:
        """Accepted tokens per row that was served that way, the bonus included."""
        return 1 + self.served_correct.get(served, 0) / max(1, self.served.get(served, 0))

    def summary(self) -> dict[str, Any]:
        rows = max(1, self.on_time_rows + self.missing_rows + self.prefill_rows)
        return {
            "rounds": self.rounds,
            "on_time_rate": round(self.on_time_rate, 4),
            "drafted_rate": round(self.drafted_rate, 4),
            "hit_rate": round(self.hit_rate, 4),
            "accept_length": round(1 + self.correct_drafts / rows, 3),
            "served": self.served,
            "plain_decode": self.plain_decode,
        }


class RoundCounter:
    """`since()` tells what happened since it was made, and sees that every row is counted once."""

    def __init__(self, server: Counted) -> None:
        self._server = server
        self._before = server.ssd()

    def since(self) -> Rounds:
        after = self._server.ssd()
        counted, rows = rows_by_fate(self._before, after), after["rows"] - self._before["rows"]
        assert sum(counted.values()) == rows, f"{counted} of {rows} rows"
        return Rounds(
            **{
                name: after[name] - self._before[name]
                for name in (
                    "rounds",
                    "on_time_rows",
                    "missing_rows",
                    "prefill_rows",
                    "plain_rows",
                    "correct_drafts",
                )
            },
            **{
                name: _difference(after[name], self._before[name])
                for name in ("served", "served_correct", "plain_decode")
            },
        )


def rows_by_fate(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """Hits, misses, and plain decode by cause, between two looks."""
    causes = _difference(after["plain_decode"], before["plain_decode"])
    both = {name: after[name] - before[name] for name in ("hits", "misses")}
    return both | {f"plain: {cause}": causes[cause] for cause in sorted(causes)}


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    changes = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in changes.items() if count}


def assert_on_time(rounds: Rounds, *, min_drafted: float = MIN_DRAFTED_OF_SHORT) -> None:
    """Equality of a run's output proves something only if its rounds had drafts."""
    assert rounds.on_time_rate >= MIN_ON_TIME, rounds
    assert rounds.drafted_rate >= min_drafted, rounds


def assert_drafted(kind: DrafterKind, answers: Sequence[Answer]) -> None:
    """Where no draft was ever accepted, equality compares plain decode with itself.

    Of some answers among others; assert_drafting says more, of all that a server did.
    """
    if kind != "random":
        assert sum(answer.num_correct_drafts for answer in answers) > 0, "all decoded plainly"


def assert_drafting(kind: DrafterKind, rounds: Rounds, *, some_declined: bool = False) -> None:
    """The same of rounds: a drafter that is never right has its drafts verified all the same, and
    no request was declined for what it asks, unless some were meant to be."""
    assert rounds.drafted_rows > 0, f"all decoded plainly: {rounds}"
    assert kind == "random" or rounds.correct_drafts > 0, rounds
    assert some_declined or not {"parameter", "opt_out"} & set(rounds.plain_decode), rounds
