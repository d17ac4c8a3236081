"""The target's view of the drafter: live sequences, commits out, drafts in. Owned by TP rank 0.

It sits at both ends of a round: `collect` waits, never past the deadline, for the drafts of this
round and `commit` reports how the round ended. Nothing the drafter sends can do more than fail to
speculate: a reply row counts only if it continues exactly the committed ids of the live opening of
its request.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence

from sglang_ssd.target.stats import DRAFTED_SERVED, ClientStats, PlainCause
from sglang_ssd.trace import Tracer
from sglang_ssd.wire.frames import check_token_ids
from sglang_ssd.wire.messages import (
    DraftClose,
    DrafterStatus,
    DraftRule,
    DraftSync,
    Served,
    SpeculateReply,
    StatusRequest,
    ToTarget,
    VerifyCommit,
)
from sglang_ssd.wire.transport import Transport, TransportStats

logger = logging.getLogger(__name__)

_MAX_SKIPPED_ROUNDS = 64
_HOPELESS: dict[Served, PlainCause] = {"full": "full", "context": "context"}


class DraftSequence:
    """One request that the drafter mirrors."""

    __slots__ = (
        "acked_len",
        "drafts",
        "generation",
        "reply_len",
        "rid",
        "rule",
        "served",
        "tokens",
        "told_len",
    )

    def __init__(self, *, rid: str, generation: int, rule: DraftRule, tokens: array[int]) -> None:
        self.rid = rid
        self.generation = generation
        self.rule = rule
        self.tokens = tokens  # all committed ids, the bonus included
        self.acked_len = len(tokens)
        self.told_len = len(tokens)  # committed length that the drafter was last told of
        self.reply_len = -1  # committed length that `drafts` continue
        self.drafts: list[int] = []
        self.served: Served = "none"

    @property
    def awaits_reply(self) -> bool:
        return self.reply_len != len(self.tokens) == self.told_len


class DraftClient:
    """Sequences by request id, and the wait for their drafts."""

    def __init__(
        self,
        transport: Transport,
        *,
        num_steps: int,
        vocab_size: int,
        reply_deadline_s: float,
        drafter_alive: Callable[[], bool],
        max_batch_size: int | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._transport = transport
        self._num_steps = num_steps
        self._vocab_size = vocab_size
        self._reply_deadline_s = reply_deadline_s
        self._drafter_alive = drafter_alive
        self._max_batch_size = max_batch_size
        self._tracer = tracer or Tracer(None, "")
        self._sequences: dict[str, DraftSequence] = {}
        self._declined: dict[str, PlainCause] = {}
        self._batch_too_large = False
        self._next_generation = 1
        self._strikes = 0
        self._skip_rounds = 0
        self._warned = False
        self._dead = False
        self._told_idle = True
        self.stats = ClientStats()
        self.drafter_status: DrafterStatus | None = None

    @property
    def num_live(self) -> int:
        return len(self._sequences)

    @property
    def transport_stats(self) -> TransportStats:
        return self._transport.stats

    def knows(self, rid: str) -> bool:
        """Whether the request was opened or declined before."""
        return rid in self._sequences or rid in self._declined

    def decline(self, rid: str, cause: PlainCause) -> None:
        """This request decodes plainly, for this cause, until it is closed."""
        self._declined[rid] = cause

    def open(self, *, rid: str, tokens: Sequence[int], rule: DraftRule) -> None:
        """Start mirroring a request whose ids so far are `tokens`; replaces an older opening."""
        if self._is_dead():
            return
        self.close(rid)
        self._sync(rid=rid, tokens=array("i", tokens), rule=rule)

    def commit(
        self, *, rids: Sequence[str], new_tokens: Sequence[list[int]], num_verified: Sequence[int]
    ) -> None:
        """Report this round's outcomes; rows that are not mirrored are passed over.

        new_tokens: the accepted ids of each row, bonus last. num_verified: drafts its verify saw.
        """
        live: list[DraftSequence] = []
        verified: list[int] = []
        for rid, tokens, num in zip(rids, new_tokens, num_verified, strict=True):
            sequence = self._sequences.get(rid)
            if sequence is None or not tokens:
                continue
            sequence.tokens.extend(tokens)
            live.append(sequence)
            verified.append(num)
        if live and not self._batch_too_large:
            self._send_commit(live, verified)

    def collect(self, rids: Sequence[str]) -> list[list[int]]:
        """Drafts per row for its committed ids, [] where there are none in time or at all."""
        self.stats.rounds += 1
        self.stats.rows += len(rids)
        rows = [self._sequences.get(rid) for rid in rids]
        mirrored = [row for row in rows if row is not None]
        limit = self._max_batch_size
        self._batch_too_large = limit is not None and len(rids) > limit
        if self._batch_too_large:
            self.receive()
        elif mirrored:
            self._wait_for(mirrored)
        return [self._take_drafts(rid, row) for rid, row in zip(rids, rows, strict=True)]

    def receive(self) -> None:
        """Take in what has arrived; waits for nothing."""
        for message, ids in self._transport.receive(0.0):
            self._handle(message, ids)

    def request_status(self) -> None:
        """Ask for the drafter's own numbers; `drafter_status` has them when they come."""
        self._send(StatusRequest())

    def close(self, rid: str) -> None:
        """Forget a request on both sides; harmless if it is not mirrored."""
        self._declined.pop(rid, None)
        sequence = self._sequences.pop(rid, None)
        if sequence is not None:
            self._send(DraftClose(rids=[rid], generations=[sequence.generation]))

    def close_all(self) -> None:
        """The drafter must hold nothing of ours."""
        self._sequences.clear()
        self._declined.clear()
        self._send(DraftClose(rids=[], generations=[], close_all=True))

    def note_idle(self) -> None:
        """The server is idle: close what is left, once per idle spell, should a close be lost."""
        if not self._told_idle:
            self._told_idle = True
            self._batch_too_large = False
            self.close_all()

    def note_correct_drafts(self, rids: Sequence[str], num_correct: Sequence[int]) -> None:
        """Count how the drafts of the round fared, by how they were served."""
        self.stats.count_accepted(num_correct)
        for rid, num in zip(rids, num_correct, strict=True):
            sequence = self._sequences.get(rid)
            if sequence is not None and sequence.reply_len == len(sequence.tokens):
                counts = self.stats.served_correct
                counts[sequence.served] = counts.get(sequence.served, 0) + num

    def stop(self) -> None:
        self._transport.close()

    def _sync(self, *, rid: str, tokens: array[int], rule: DraftRule) -> None:
        sequence = DraftSequence(
            rid=rid, generation=self._next_generation, rule=rule, tokens=tokens
        )
        self._next_generation += 1
        self._told_idle = False
        self._sequences[rid] = sequence
        message = DraftSync(
            rid=rid,
            generation=sequence.generation,
            committed_len=len(tokens),
            rule=rule,
        )
        self._send(message, tokens)

    def _send_commit(self, live: list[DraftSequence], num_verified: list[int]) -> None:
        ids = array("i")
        for sequence in live:
            ids.extend(sequence.tokens[sequence.acked_len :])
            sequence.told_len = len(sequence.tokens)
        self._send(
            VerifyCommit(
                round_id=self.stats.rounds,
                rids=[s.rid for s in live],
                generations=[s.generation for s in live],
                base_committed_lens=[s.acked_len for s in live],
                num_verified_drafts=num_verified,
                num_tokens=[len(s.tokens) - s.acked_len for s in live],
            ),
            ids,
        )

    def _send(
        self,
        message: DraftSync | VerifyCommit | DraftClose | StatusRequest,
        ids: array[int] | None = None,
    ) -> None:
        if not self._is_dead():
            self._transport.send(message, [] if ids is None else [ids])

    def _wait_for(self, rows: list[DraftSequence]) -> None:
        start = time.monotonic_ns()
        patience = self._patience()
        deadline = time.monotonic() + patience
        while True:
            waiting = self._is_missing(rows)
            timeout = max(0.0, deadline - time.monotonic()) if waiting else 0.0
            received = self._transport.receive(timeout)
            for message, ids in received:
                self._handle(message, ids)
            if not received or not self._is_missing(rows):
                break
        self._note_wait(rows, start, waited=patience > 0)

    def _patience(self) -> float:
        """How long this round may wait: the deadline, or nothing while the drafter lags."""
        if self._is_dead():
            return 0.0
        if self._skip_rounds > 0:
            self._skip_rounds -= 1
            return 0.0
        return self._reply_deadline_s

    def _note_wait(self, rows: list[DraftSequence], start: int, *, waited: bool) -> None:
        end = time.monotonic_ns()
        self._tracer.add("wait for drafts", start, end, rows=len(rows))
        self.stats.waits += 1
        self.stats.reply_wait_seconds += (end - start) / 1e9
        if self._dead:
            return
        if not self._is_missing(rows):
            self._strikes = self._skip_rounds = 0
            self.stats.degraded = False
        elif waited:
            self._strikes += 1
            self._skip_rounds = min(2**self._strikes, _MAX_SKIPPED_ROUNDS)
            self.stats.missed_deadlines += 1
            self._warn(f"no drafts within {self._reply_deadline_s * 1000:g} ms")

    def _is_missing(self, rows: list[DraftSequence]) -> bool:
        return any(row.awaits_reply and self._is_current(row) for row in rows)

    def _warn(self, reason: str) -> None:
        self.stats.degraded = True
        if not self._warned:
            self._warned = True
            logger.warning("SSD drafter: %s; affected requests decode plainly meanwhile.", reason)

    def _is_current(self, row: DraftSequence) -> bool:
        return self._sequences.get(row.rid) is row

    def _is_dead(self) -> bool:
        if not self._dead and not self._drafter_alive():
            self._dead = True
            self._sequences.clear()
            self._warn("the drafter process has ended")
        return self._dead

    def _take_drafts(self, rid: str, row: DraftSequence | None) -> list[int]:
        cause = self._why_plain(rid, row)
        if cause is not None:
            self.stats.count_plain(cause)
            return []
        assert row is not None, "a row without a sequence decodes plainly"
        self.stats.count_served(row.served)
        return row.drafts

    def _why_plain(self, rid: str, row: DraftSequence | None) -> PlainCause | None:
        """Why this row has no reply to use; None if it has one."""
        if row is None or not self._is_current(row):
            return self._declined.get(rid, "drafter_down" if self._dead else "ending")
        if self._batch_too_large or row.told_len != len(row.tokens):
            return "batch_size"
        if row.reply_len != len(row.tokens):
            return "late"
        if not row.drafts and row.served in DRAFTED_SERVED:
            return "bad_reply"
        return None

    def _handle(self, message: ToTarget, ids: list[int]) -> None:
        if isinstance(message, DrafterStatus):
            self.drafter_status = message
        if not isinstance(message, SpeculateReply):
            return
        self._skip_rounds = 0  # it lives: the next round may wait again
        start = 0
        for index, rid in enumerate(message.rids):
            end = start + message.num_drafts[index]
            self._handle_row(message, index, rid, ids[start:end])
            start = end

    def _handle_row(self, message: SpeculateReply, index: int, rid: str, drafts: list[int]) -> None:
        sequence = self._sequences.get(rid)
        if sequence is None or sequence.generation != message.generations[index]:
            self.stats.stale_replies += 1
            return
        served = message.served[index]
        if served == "unknown":
            self.stats.resyncs += 1
            self._sync(rid=rid, tokens=sequence.tokens, rule=sequence.rule)
            return
        if served in _HOPELESS:
            self.close(rid)
            self.decline(rid, _HOPELESS[served])
            return
        base = message.base_committed_lens[index]
        if base != len(sequence.tokens):
            sequence.acked_len = max(sequence.acked_len, min(base, len(sequence.tokens)))
            self.stats.stale_replies += 1
            return
        if len(drafts) > self._num_steps or not check_token_ids(drafts, self._vocab_size):
            self.stats.bad_replies += 1
            drafts = []
        sequence.acked_len = base
        sequence.reply_len = base
        sequence.drafts = drafts
        sequence.served = served
        self.stats.count_rank(message.bonus_ranks[index])
