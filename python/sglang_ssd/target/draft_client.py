"""The target's view of the drafter: live sequences, commits out, drafts in. Owned by TP rank 0.

It sits at both ends of a round: `collect` waits, never past the deadline, for the drafts of this
round and `commit` reports how the round ended. Nothing the drafter sends can do more than fail to
speculate: a reply row counts only if it continues exactly the committed ids of the live opening of
its request.

Sequences outlive the drafter. While it is away they are only kept; one that is back is told of them
in slices of resync_tokens a round, each under a new generation, so that whatever an earlier drafter
still says is a no-op. Nobody waits for a row until the drafter has caught up with it and says so:
by drafts, or by "reading", after which they come.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sglang_ssd.target.draft_sequence import DraftSequence
from sglang_ssd.target.drafter_link import Drafter, DrafterLink
from sglang_ssd.target.reply_deadline import ReplyDeadline
from sglang_ssd.target.stats import DRAFTED_SERVED, ClientStats, PlainCause
from sglang_ssd.trace import Tracer
from sglang_ssd.wire.frames import are_in_vocabulary
from sglang_ssd.wire.messages import (
    DraftClose,
    DrafterStatus,
    DraftRule,
    DraftSync,
    Hello,
    Served,
    SpeculateReply,
    StatusRequest,
    ToTarget,
    VerifyCommit,
)
from sglang_ssd.wire.notices import NoticeLog
from sglang_ssd.wire.transport import Transport, TransportStats

logger = logging.getLogger(__name__)

DrafterState = Literal["starting", "ready", "degraded", "restarting", "dead", "refused"]

_TEACHES: frozenset[Served] = DRAFTED_SERVED | {"none"}
"""The other replies say nothing of how long drafts take."""
_HOPELESS: dict[Served, PlainCause] = {"context": "context", "foreign": "foreign"}
_LIVENESS_S = 0.05  # how soon a wait notices that the drafter's process has ended
_IDLE_LOOK_S = 0.5
_IDLE_HELLO_S = 5.0  # when no round would notice that the drafter is another
_COMMITS_TIMED = 32
_RENEWAL_S = 0.25


@dataclass(slots=True)
class _Asked:
    """A commit that was sent."""

    at: float
    num_owed: int
    """Rows without a reply to it."""


class DraftClient:
    """Sequences by request id, and the wait for their drafts."""

    def __init__(
        self,
        transport: Transport,
        *,
        hello: Hello,
        deadline: ReplyDeadline,
        resync_tokens: int,
        drafter: Drafter | None = None,
        tokens: list[str] | None = None,
        max_batch_size: int | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.link = DrafterLink(
            transport, hello=hello, drafter=drafter, tokens=tokens or [], clock=clock
        )
        self._transport = transport
        self._is_supervised = drafter is not None
        self._num_steps = hello.num_steps
        self._vocab_size = hello.vocab_size
        self._deadline = deadline
        self._resync_tokens = resync_tokens
        self._max_batch_size = max_batch_size
        self._tracer = tracer or Tracer(None, "")
        self._clock = clock
        self._sequences: dict[str, DraftSequence] = {}
        self._declined: dict[str, PlainCause] = {}
        self._batch_too_large = False
        self._why_untold: PlainCause = "late"  # of rows that the last commit left out
        self._num_commits = 0
        self._asked: dict[int, _Asked] = {}  # the last commits by their number
        self._next_renewal = 0.0
        self._lives = 0
        self._next_generation = 1
        self._next_look = 0.0
        self._next_idle_hello = 0.0
        self._looked_at = 0.0
        self._notices = NoticeLog(logger)
        self._told_idle = True
        self.stats = ClientStats()
        self.drafter_status: DrafterStatus | None = None

    @property
    def num_live(self) -> int:
        return len(self._sequences)

    @property
    def num_restarts(self) -> int:
        """Times that another drafter took over."""
        return max(0, self.link.lives - 1)

    @property
    def transport_stats(self) -> TransportStats:
        return self._transport.stats

    @property
    def deadline_s(self) -> float:
        """What a round would wait at most now."""
        return self._deadline.seconds

    @property
    def state(self) -> DrafterState:
        """starting: not welcomed yet. degraded: silent. restarting, dead: gone, with us or without
        us to start it again."""
        gone: DrafterState = "restarting" if self._is_supervised else "dead"
        if self.link.is_ready():
            if not self._deadline.is_silent:
                return "ready"
            return "degraded" if self.link.is_reachable else gone
        if self.link.phase == "refused":
            return "refused"
        return gone if self.link.lives else "starting"

    def knows(self, rid: str) -> bool:
        """Whether the request was opened or declined before."""
        return rid in self._sequences or rid in self._declined

    def decline(self, rid: str, cause: PlainCause) -> None:
        """This request decodes plainly, for this cause, until it is closed."""
        self._declined[rid] = cause

    def open(self, *, rid: str, tokens: Sequence[int], rule: DraftRule) -> None:
        """Start mirroring a request whose ids so far are `tokens`; replaces an older opening."""
        self.close(rid)
        sequence = DraftSequence(rid=rid, rule=rule, tokens=array("i", tokens))
        self._sequences[rid] = sequence
        self._told_idle = False
        if self._can_talk():
            self._sync(sequence)

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
            if sequence.is_synced:
                live.append(sequence)
                verified.append(num)
        if self._batch_too_large:
            self._why_untold = "batch_size"
        elif not self._can_talk():
            self._why_untold = "late" if self.link.is_reachable else "drafter_down"
        elif live:
            self._send_commit(live, verified)

    def keep_alive(self) -> None:
        """Called for every chunk of a prefill and for a batch too large, when nothing is committed:
        renew the leases.

        Of all that is mirrored by name, so that a sequence whose close was lost still ends.
        """
        now = self._clock()
        if now < self._next_renewal or not self._can_talk():
            return
        self._next_renewal = now + _RENEWAL_S
        live = [sequence for sequence in self._sequences.values() if sequence.is_synced]
        nothing = [0] * len(live)
        if live and not self.link.send(self._next_commit(live, nothing, num_tokens=nothing), ()):
            self._deadline.note_unreachable()

    def collect(self, rids: Sequence[str]) -> list[list[int]]:
        """Drafts per row for its committed ids, [] where there are none in time or at all."""
        self.stats.rounds += 1
        self.stats.rows += len(rids)
        self._attend()
        rows = [self._sequences.get(rid) for rid in rids]
        limit = self._max_batch_size
        self._batch_too_large = limit is not None and len(rids) > limit
        if self._batch_too_large:
            self.receive()
            self.keep_alive()
        else:
            self._wait_for([row for row in rows if row is not None])
        return [self._take_drafts(rid, row) for rid, row in zip(rids, rows, strict=True)]

    def receive(self) -> None:
        """Take in what has arrived; waits for nothing."""
        self._hear(0.0)

    def request_status(self) -> None:
        """Ask for the drafter's own numbers; `drafter_status` has them when they come."""
        if self._can_talk() and not self.link.send(StatusRequest()):
            self._deadline.note_unreachable()

    def close(self, rid: str) -> None:
        """Forget a request on both sides; harmless if it is not mirrored."""
        self._declined.pop(rid, None)
        sequence = self._sequences.pop(rid, None)
        if sequence is not None and sequence.is_synced:
            self.link.send(DraftClose(rids=[rid], generations=[sequence.generation]))

    def close_all(self) -> None:
        """The drafter must hold nothing of ours."""
        self._sequences.clear()
        self._declined.clear()
        self.link.send(DraftClose(rids=[], generations=[], close_all=True))

    def note_idle(self) -> None:
        """The server is idle: close what is left, once per idle spell, should a close be lost; and
        look after the drafter now and then."""
        if not self._told_idle:
            self._told_idle = True
            self._batch_too_large = False
            self.close_all()
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + _IDLE_LOOK_S
            self.look()
        if now >= self._next_idle_hello:
            self._next_idle_hello = now + _IDLE_HELLO_S
            if self._can_talk() and not self.link.say_hello():
                self._deadline.note_unreachable()

    def look(self, timeout_s: float = 0.0) -> None:
        """Greet the drafter and hear what it has to say, outside of any round."""
        self._attend()
        self._hear(timeout_s)
        if not self.link.is_ready():
            self.link.greet()

    def note_correct_drafts(self, rids: Sequence[str], num_correct: Sequence[int]) -> None:
        """Count how the drafts of the round fared, by how they were served."""
        self.stats.count_accepted(num_correct)
        for rid, num in zip(rids, num_correct, strict=True):
            sequence = self._sequences.get(rid)
            if sequence is not None and sequence.is_answered:
                counts = self.stats.served_correct
                counts[sequence.served] = counts.get(sequence.served, 0) + num

    def stop(self) -> None:
        self.link.close()

    # The drafter as a whole ---------------------------------------------------------------------

    def _can_talk(self) -> bool:
        """Whether it is worth telling the drafter anything now; a silent one is caught up later."""
        return self.link.is_ready() and not self._deadline.is_silent

    def _attend(self) -> None:
        """Greet or probe a drafter that is away, re-sync one that is back; nothing on most days."""
        if not self._can_talk():
            self._note_trouble()
            self.link.greet()
            return
        self._resync_slice()

    def _note_trouble(self) -> None:
        self.stats.degraded = True
        if not self.link.lives:
            return
        cause = self.link.last_error
        if self.link.phase == "ready":
            waited_ms = self._deadline.seconds * 1000
            cause = f"no drafts within {waited_ms:g} ms, and nothing heard since"
            if not self.link.is_reachable:
                cause = "nobody is there"
        self._notices.warn(
            self.link.phase,
            f"SSD drafter: {cause}; affected requests decode plainly meanwhile.",
        )

    def _meet_drafter(self) -> None:
        """Another drafter than before, or the first: it knows none of our sequences."""
        self._lives = self.link.lives
        self._deadline.start_afresh()
        for sequence in self._sequences.values():
            sequence.is_synced = False
            sequence.full_until = 0.0

    def _resync_slice(self) -> None:
        """Tell the drafter of what it does not know yet, as much as a round may."""
        room, now = self._resync_tokens, self._clock()
        for sequence in self._sequences.values():
            if sequence.is_synced or now < sequence.full_until:
                continue
            is_resync = sequence.was_told
            if room <= 0 or not self._sync(sequence):
                return
            room -= len(sequence.tokens)
            sequence.has_caught_up = False
            self.stats.resyncs += is_resync

    def _sync(self, sequence: DraftSequence) -> bool:
        """Tell the drafter of the sequence under a new generation."""
        sequence.generation = self._next_generation
        self._next_generation += 1
        sequence.acked_len = sequence.told_len = len(sequence.tokens)
        sequence.reply_len = -1
        sequence.drafts = []
        message = DraftSync(
            rid=sequence.rid,
            generation=sequence.generation,
            committed_len=len(sequence.tokens),
            rule=sequence.rule,
        )
        sequence.is_synced = self.link.send(message, sequence.tokens)
        sequence.was_told |= sequence.is_synced
        return sequence.is_synced

    # A round ------------------------------------------------------------------------------------

    def _send_commit(self, live: list[DraftSequence], num_verified: list[int]) -> None:
        ids = array("i")
        for sequence in live:
            ids.extend(sequence.tokens[sequence.acked_len :])
        num_tokens = [len(s.tokens) - s.acked_len for s in live]
        if not self.link.send(self._next_commit(live, num_verified, num_tokens=num_tokens), ids):
            self._deadline.note_unreachable()
            self._why_untold = "drafter_down"
            return
        for sequence in live:
            sequence.told_len = len(sequence.tokens)
            sequence.is_being_read = False
        self._asked[self._num_commits] = _Asked(self._clock(), len(live))
        if len(self._asked) > _COMMITS_TIMED:
            del self._asked[next(iter(self._asked))]

    def _next_commit(
        self, live: list[DraftSequence], num_verified: list[int], *, num_tokens: list[int]
    ) -> VerifyCommit:
        self._num_commits += 1
        return VerifyCommit(
            round_id=self._num_commits,
            rids=[s.rid for s in live],
            generations=[s.generation for s in live],
            base_committed_lens=[s.acked_len for s in live],
            num_verified_drafts=num_verified,
            num_tokens=num_tokens,
        )

    def _wait_for(self, rows: list[DraftSequence]) -> None:
        start = self._clock()
        patience = self._deadline.next_wait(start) if self._can_talk() else 0.0
        deadline = start + patience
        while True:
            left = deadline - self._clock() if self._missing(rows) else 0.0
            self._hear(min(max(0.0, left), _LIVENESS_S))
            is_over = self._clock() >= deadline or not self.link.is_ready()
            if is_over or not self._missing(rows):
                break
        self._note_wait(rows, start, waited=patience > 0)

    def _note_wait(self, rows: list[DraftSequence], start: float, *, waited: bool) -> None:
        end = self._clock()
        self._tracer.add("wait for drafts", int(start * 1e9), int(end * 1e9), rows=len(rows))
        self.stats.reply_wait_seconds += end - start
        if not self.link.is_ready():
            return
        missing = self._missing(rows)
        if missing and waited:
            is_reading = all(row.is_being_read for row in missing)
            self._deadline.note_missed(end, is_reading=is_reading)
            self.stats.missed_deadlines += not is_reading
        elif not missing and any(row.is_answered and self._is_current(row) for row in rows):
            self._deadline.note_kept()

    def _missing(self, rows: list[DraftSequence]) -> list[DraftSequence]:
        return [row for row in rows if row.awaits_reply and self._is_current(row)]

    def _is_current(self, row: DraftSequence) -> bool:
        return self._sequences.get(row.rid) is row

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
            return self._declined.get(rid, "ending")
        if self._batch_too_large:
            return "batch_size"
        if row.is_answered:
            is_bad = not row.drafts and row.served in DRAFTED_SERVED
            return "bad_reply" if is_bad else None
        if not row.is_synced or not self.link.is_ready():
            return "full" if self._clock() < row.full_until else "drafter_down"
        if not row.has_caught_up or row.is_being_read:
            return "prefill"
        return self._why_untold if row.told_len != len(row.tokens) else "late"

    # What is heard ------------------------------------------------------------------------------

    def _hear(self, timeout_s: float) -> None:
        """Take in what arrives within the time."""
        received = self.link.receive(timeout_s)
        now = self._clock()
        if not received:
            self._looked_at = now
            return
        self._deadline.note_heard(now)
        for message, ids in received:
            self._handle(message, ids, now)
        self._looked_at = now
        if self.link.lives != self._lives:
            self._meet_drafter()
        if self._can_talk():
            self.stats.degraded = False

    def _handle(self, message: ToTarget, ids: list[int], now: float) -> None:
        if isinstance(message, DrafterStatus):
            self.drafter_status = message
        if not isinstance(message, SpeculateReply):
            return
        self._time_reply(message, now)
        start = 0
        for index, rid in enumerate(message.rids):
            end = start + message.num_drafts[index]
            self._handle_row(message, index, rid, ids[start:end])
            start = end

    def _time_reply(self, message: SpeculateReply, now: float) -> None:
        asked = self._asked.get(message.round_id)
        if asked is None:
            return
        asked.num_owed -= sum(served != "reading" for served in message.served)
        if not _TEACHES.isdisjoint(message.served):
            self._deadline.note_reply(
                now - asked.at,
                at_least_s=self._looked_at - asked.at,
                is_last=asked.num_owed <= 0,
            )

    def _handle_row(self, message: SpeculateReply, index: int, rid: str, drafts: list[int]) -> None:
        sequence = self._sequences.get(rid)
        if (
            sequence is None
            or not sequence.is_synced
            or sequence.generation != message.generations[index]
        ):
            self.stats.stale_replies += 1
            return
        served = message.served[index]
        if served == "unknown":
            sequence.is_synced = False
            return
        if served == "full":
            self.link.send(DraftClose(rids=[rid], generations=[sequence.generation]))
            sequence.note_full(self._clock())
            return
        if served in _HOPELESS:
            self.close(rid)
            self.decline(rid, _HOPELESS[served])
            return
        sequence.has_caught_up = served != "prefill"
        base = message.base_committed_lens[index]
        if base != len(sequence.tokens):
            sequence.acked_len = max(sequence.acked_len, min(base, len(sequence.tokens)))
            self.stats.stale_replies += 1
            return
        if served == "reading":
            sequence.acked_len = base
            sequence.is_being_read = True
            return
        if sequence.is_answered and sequence.served != "prefill":
            self.stats.stale_replies += 1
            return
        if len(drafts) > self._num_steps or not are_in_vocabulary(drafts, self._vocab_size):
            self.stats.bad_replies += 1
            self._notices.warn(
                "bad_reply", f"SSD drafter: too many drafts or foreign ids for {rid}"
            )
            drafts = []
        sequence.acked_len = base
        sequence.reply_len = base
        sequence.drafts = drafts
        sequence.served = served
        self.stats.count_rank(message.bonus_ranks[index])
