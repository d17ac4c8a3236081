"""What is told about rounds while they go on: their times, the interval log line, the metrics.

Everything here comes after the outcome is with the drafter, and all but the times at intervals, so
that a round waits for none of it. The drafter's own numbers are asked for now and then; the answer
comes with its replies.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable

from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.target.metrics import MetricsExporter, Values, values_of
from sglang_ssd.target.stats import ClientStats, hit_rate

logger = logging.getLogger(__name__)

EXPORT_INTERVAL_S = 1.0
STATUS_INTERVAL_S = 5.0


class RoundClock:
    """The times of one round."""

    __slots__ = ("drafts_here", "outcome_known", "started")

    def __init__(self) -> None:
        self.started = self.drafts_here = self.outcome_known = time.monotonic()

    def note_drafts(self) -> None:
        self.drafts_here = time.monotonic()

    def note_outcome(self) -> None:
        """The accept lengths are on the host."""
        self.outcome_known = time.monotonic()


class RoundReporter:
    """One per target, on TP rank 0."""

    def __init__(
        self,
        client: DraftClient,
        *,
        exporter: MetricsExporter | None,
        log_interval: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._exporter = exporter
        self._log_interval = log_interval
        self._clock = clock
        self._logged = ClientStats()
        self._waited = 0.0
        self._next_export = 0.0
        self._next_status = 0.0

    def note_round(self, times: RoundClock) -> None:
        """The end of a round."""
        stats = self._client.stats
        now = self._clock()
        round_s, verify_s = now - times.started, times.outcome_known - times.drafts_here
        wait_s = stats.reply_wait_seconds - self._waited
        self._waited = stats.reply_wait_seconds
        stats.round_seconds += round_s
        stats.verify_seconds += verify_s
        if self._exporter is not None:
            self._exporter.observe_round(round_s=round_s, verify_s=verify_s, wait_s=wait_s)
        if stats.rounds - self._logged.rounds >= self._log_interval:
            self._log(stats)
        self._tell(now)

    def note_idle(self) -> None:
        """The scheduler has nothing to do; it may call this in a tight loop."""
        now = self._clock()
        if now >= self._next_export:
            self._client.receive()
            self._tell(now)

    def _tell(self, now: float) -> None:
        if now >= self._next_export:
            self._next_export = now + EXPORT_INTERVAL_S
            if self._exporter is not None:
                self._exporter.export(_values(self._client))
        if now >= self._next_status:
            self._next_status = now + STATUS_INTERVAL_S
            self._client.request_status()

    def _log(self, stats: ClientStats) -> None:
        logger.info(log_line(self._logged, stats, num_live=self._client.num_live))
        self._logged = copy.deepcopy(stats)


def log_line(before: ClientStats, after: ClientStats, *, num_live: int) -> str:
    """What happened in between, in the style of SGLang's line for a decode batch."""
    rounds, rows = after.rounds - before.rounds, after.rows - before.rows
    hits, misses = after.hits - before.hits, after.misses - before.misses
    plain = {
        cause: number - before.plain_decode.get(cause, 0)
        for cause, number in after.plain_decode.items()
    }
    causes = " ".join(f"{cause} {number}" for cause, number in plain.items() if number)

    def mean_ms(field: str) -> str:
        seconds = getattr(after, field) - getattr(before, field)
        return f"{1000 * seconds / max(1, rounds):.2f}"

    return (
        f"SSD rounds, #round: {rounds}, #row: {rows}, #hit: {hits}, #miss: {misses}, "
        f"#plain: {sum(plain.values())}{f' ({causes})' if causes else ''}, "
        f"hit rate: {hit_rate(hits=hits, misses=misses):.2f}, "
        f"accept len: {1 + (after.correct_drafts - before.correct_drafts) / max(1, rows):.2f}, "
        f"round (ms): {mean_ms('round_seconds')}, verify (ms): {mean_ms('verify_seconds')}, "
        f"reply wait (ms): {mean_ms('reply_wait_seconds')}, #live-seq: {num_live}, "
        f"degraded: {after.degraded}"
    )


def _values(client: DraftClient) -> Values:
    return values_of(
        client.stats,
        num_live=client.num_live,
        num_restarts=client.num_restarts,
        transport=client.transport_stats,
        status=client.drafter_status,
    )
