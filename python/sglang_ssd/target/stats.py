"""What a target counts: the one source of /server_info, the metrics, the log line and the tests.

A row is one request's part in a round. Every row is counted exactly once, so that always

    rows = hits + misses + sum(plain_decode)

hit: the outcome was guessed and drafted for when it came. miss: it was not guessed, or not drafted
for yet, so that it was drafted for while the batch waited (backup jit, mode sync) or the row
decoded plainly (backup none). Plain decode: the speculation cache had no part in it; `PlainCause`
says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from sglang_ssd.wire.messages import Served

PlainCause = Literal[
    "opt_out",
    "parameter",
    "batch_size",
    "late",
    "prefill",
    "full",
    "context",
    "foreign",
    "drafter_down",
    "bad_reply",
    "ending",
]
"""Why a row decodes plainly.

opt_out: custom_params={"ssd": false}. parameter: one of plain_decode.py. batch_size: the batch is
larger than --ssd-max-batch-size, or was so a round ago. late: no reply within the deadline, or none
waited for after one of those. prefill: the drafter has not read the whole request yet. full,
context: the drafter has no room for the request, or its context is shorter. foreign: the request
has ids that the drafter's vocabulary lacks, or parameters it cannot follow. drafter_down: it is
gone, or is back and has not been told of the request yet. bad_reply: its drafts were not usable.
ending: the request is finished or aborted already.
"""

PLAIN_CAUSES: tuple[PlainCause, ...] = get_args(PlainCause)
NOT_WANTED: frozenset[PlainCause] = frozenset({"opt_out", "parameter", "batch_size", "ending"})
"""Causes of rows for which no drafts were asked."""

NOT_GUESSED = "-1"
"""Key of ClientStats.bonus_rank: the bonus was not among the guesses."""

HIT_SERVED: frozenset[Served] = frozenset({"hit", "chain_hit"})
DRAFTED_SERVED: frozenset[Served] = HIT_SERVED | {"jit", "sync"}


class ClientStats(msgspec.Struct):
    """Counts since start, of TP rank 0."""

    rounds: int = 0  # verify forwards
    rows: int = 0
    hits: int = 0
    misses: int = 0
    plain_decode: dict[str, int] = msgspec.field(default_factory=dict)  # by PlainCause
    served: dict[str, int] = msgspec.field(default_factory=dict)  # rows by Served, in time
    correct_drafts: int = 0
    served_correct: dict[str, int] = msgspec.field(default_factory=dict)
    accept_lens: dict[str, int] = msgspec.field(default_factory=dict)  # rows by accept length
    bonus_rank: dict[str, int] = msgspec.field(default_factory=dict)  # replies by rank, NOT_GUESSED

    round_seconds: float = 0.0  # from asking for drafts until the outcome is sent
    verify_seconds: float = 0.0  # from drafts in hand until the outcome is known
    reply_wait_seconds: float = 0.0
    missed_deadlines: int = 0

    stale_replies: int = 0
    bad_replies: int = 0
    resyncs: int = 0
    degraded: bool = False

    @property
    def on_time_rows(self) -> int:
        """Rows that the speculation cache served in time: hits and misses."""
        return self.hits + self.misses

    @property
    def plain_rows(self) -> int:
        """Rows for which no drafts were asked."""
        return sum(self.plain_decode.get(cause, 0) for cause in NOT_WANTED)

    @property
    def prefill_rows(self) -> int:
        """Rows whose prompt the drafter was still reading."""
        return self.plain_decode.get("prefill", 0)

    @property
    def missing_rows(self) -> int:
        """Rows that were to have drafts and went without: late, or for another cause."""
        return self.rows - self.on_time_rows - self.plain_rows - self.prefill_rows

    def count_served(self, served: Served) -> None:
        """A row whose reply was there in time."""
        _add(self.served, served)
        if served == "prefill":
            self.count_plain("prefill")
        elif served in HIT_SERVED:
            self.hits += 1
        else:
            self.misses += 1

    def count_plain(self, cause: PlainCause) -> None:
        _add(self.plain_decode, cause)

    def count_accepted(self, num_correct: Sequence[int]) -> None:
        """How the rows of a round ended; accept lengths include the bonus."""
        for num in num_correct:
            _add(self.accept_lens, str(num + 1))
        self.correct_drafts += sum(num_correct)

    def count_rank(self, bonus_rank: int) -> None:
        _add(self.bonus_rank, str(bonus_rank))


def _add(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def hit_rate(*, hits: int, misses: int) -> float:
    return hits / max(1, hits + misses)


def summarize(stats: ClientStats) -> dict[str, object]:
    """The counters with the rates that people read, as plain JSON types."""
    return {
        **msgspec.to_builtins(stats),
        "on_time_rows": stats.on_time_rows,
        "missing_rows": stats.missing_rows,
        "prefill_rows": stats.prefill_rows,
        "plain_rows": stats.plain_rows,
        "hit_rate": hit_rate(hits=stats.hits, misses=stats.misses),
        "on_time_rate": stats.on_time_rows / max(1, stats.on_time_rows + stats.missing_rows),
        "accept_length": 1 + stats.correct_drafts / max(1, stats.rows),
    }
