"""The drafter's round: outcome in, drafts out, and the branches for the outcome after that.

    receive      a commit takes its rows through the speculation cache; rows with enough drafts are
                 answered at once, whatever becomes of the others
    decode       rows that are owed drafts (missed, or hit before the branch was finished): one
                 batched single-token forward per loop step, answered once they have their drafts
    feed         the bonus of rows that are owed no drafts (backup none), and short prompts
    build        num_steps + 1 passes over the tree, batched over all sequences; the first feeds the
                 chain's last draft too, whose logits rank the guesses of position K
    prefill      one slice of the prompts that are waiting

One forward per loop step and the socket is polled in between, so an outcome that arrives in the
middle of a build is seen after the pass in flight: the losers are freed, the winner is finished
alone. Forwards for rows that a target is waiting for come first. With one of them goes what reads a
prompt to its end, and after num_steps + 1 other forwards a part of a long one. While nobody waits,
slices and other forwards take turns, for a branch that is missing costs a row one round's drafts
and a prompt that is not read costs it all of them. What a slice costs is measured (pace.py). No
target waits for a prompt; it hears that drafts come as soon as they do (reading). In mode sync it
waits for a prompt too, and hears so after every slice.
Nothing here blocks for longer than one forward, except an idle drafter, which sleeps in the poll.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import assert_never

import msgspec

from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter.backup import plan_answer
from sglang_ssd.drafter.draft_shaping import is_sound
from sglang_ssd.drafter.drafting import Drafting, grow_chain
from sglang_ssd.drafter.footprint import device_bytes, resident_bytes
from sglang_ssd.drafter.handshake import Abilities, answer_hello, fan_out_for
from sglang_ssd.drafter.model_step import ModelStep
from sglang_ssd.drafter.outbox import Outbox, ReplyRow
from sglang_ssd.drafter.pace import Pace
from sglang_ssd.drafter.request_table import DraftedSequence, Limits, RequestTable
from sglang_ssd.trace import Tracer
from sglang_ssd.wire.frames import ProtocolError, are_in_vocabulary
from sglang_ssd.wire.messages import (
    MAX_RANK,
    NO_ROUND,
    REFUSED_CAUSES,
    DraftClose,
    DrafterStatus,
    DraftSync,
    Hello,
    HelloRequest,
    Served,
    StatusRequest,
    VerifyCommit,
    Welcome,
)
from sglang_ssd.wire.notices import NoticeLog
from sglang_ssd.wire.transport import DrafterTransport, FromTarget

logger = logging.getLogger(__name__)

_MAX_PEERS = 4096  # a few hundred bytes each


class LoopStats(msgspec.Struct):
    """Since start."""

    hits: int = 0
    misses: int = 0
    stale_commits: int = 0


class FeedRow(msgspec.Struct, frozen=True):
    """What one forward feeds of a sequence: its next num_tokens unfed tokens."""

    seq: DraftedSequence
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Nothing is unfed then."""
        return self.num_tokens == self.seq.num_unfed


def _whole(seqs: list[DraftedSequence]) -> list[FeedRow]:
    return [FeedRow(seq, seq.num_unfed) for seq in seqs]


class DraftLoop:
    """Serves targets over one transport with one model; `step` is a whole turn."""

    def __init__(
        self,
        *,
        model: ModelStep,
        transport: DrafterTransport,
        config: SsdConfig,
        max_sequences: int,
        tokens: list[str],
        tracer: Tracer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._transport = transport
        self._clock = clock
        self._abilities = Abilities.of(
            vocab_size=model.vocab_size, context_len=model.context_len, tokens=tokens
        )
        self.table = RequestTable(
            total_slots=model.total_slots,
            max_sequences=max_sequences,
            context_len=model.context_len,
        )
        self._drafting = Drafting(model=model, table=self.table, tracer=tracer, clock=clock)
        self._limits: dict[bytes, Limits] = {}  # per target that was welcomed, last heard last
        self._outbox = Outbox(transport)
        self._pace = Pace()
        self._notices = NoticeLog(logger)
        self._forwards_since_slice = 0
        self._next_expiry = 0.0
        self.stats = LoopStats()

    def step(self, max_wait_s: float) -> bool:
        """One turn. False if there was nothing to do but wait, for at most max_wait_s."""
        self._expire_leases()
        forward = self._next_forward()
        arrived = self._transport.receive(0.0 if forward else self._wait_s(max_wait_s))
        if arrived:
            for one in arrived:
                self._handle(one)
            self._answer_ready()
            forward = self._next_forward()
        if forward is None:
            return False
        forward()
        self._answer_ready()
        return True

    def status(self) -> DrafterStatus:
        drafting = self._drafting.stats
        refused = {**self._transport.stats.refused, **self._notices.counts}
        return DrafterStatus(
            live_sequences=self.table.num_live,
            free_slots=self.table.num_free_slots,
            total_slots=self.table.total_slots,
            branch_steps=drafting.branch_steps,
            jit_steps=drafting.jit_steps,
            prefill_tokens=drafting.prefill_tokens,
            hits=self.stats.hits,
            misses=self.stats.misses,
            stale_commits=self.stats.stale_commits,
            drafting_seconds=drafting.drafting_seconds,
            branch_step_seconds=drafting.branch_step_seconds,
            dropped_replies=self._transport.stats.dropped,
            resident_bytes=resident_bytes(),
            device_bytes=device_bytes(),
            refused={cause: refused[cause] for cause in REFUSED_CAUSES if cause in refused},
        )

    # Messages -----------------------------------------------------------------------------------

    def _handle(self, arrived: FromTarget) -> None:
        peer, message = arrived.peer, arrived.message
        if peer in self._limits:
            self._limits[peer] = self._limits.pop(peer)
        elif isinstance(message, VerifyCommit | DraftSync):
            self._notices.warn("stranger", "asks a target that it has not welcomed to say hello")
            self._transport.send(peer, HelloRequest())
            return
        match message:
            case VerifyCommit():
                self._commit(peer, message, arrived.ids)
            case DraftSync():
                self._open(peer, message, arrived.ids)
            case DraftClose():
                self._close(peer, message)
            case Hello():
                self._welcome(peer, message)
            case StatusRequest():
                self._transport.send(peer, self.status())
            case _:
                assert_never(message)

    def _welcome(self, peer: bytes, hello: Hello) -> None:
        answer = answer_hello(hello, self._abilities, config=self._config)
        if isinstance(answer, Welcome):
            if peer not in self._limits:  # a target says hello until it is answered
                logger.info("serves target %s with %d steps", hello.target_id, hello.num_steps)
                self._forget_silent_peer()
            self._limits[peer] = Limits(
                num_steps=hello.num_steps,
                fan_out=fan_out_for(self._config, hello.num_steps),
                context_len=self._abilities.context_len,
                vocab_size=min(hello.vocab_size, self._abilities.vocab_size),
            )
        else:
            reasons = "; ".join(answer.reasons)
            self._notices.warn("hello", f"refuses target {hello.target_id}: {reasons}")
        self._transport.send(peer, answer)

    def _forget_silent_peer(self) -> None:
        """Bound what is kept of targets that are gone: the longest silent without a sequence.

        One that is not gone is asked to say hello.
        """
        if len(self._limits) >= _MAX_PEERS:
            busy = self.table.peers()
            silent = next((peer for peer in self._limits if peer not in busy), None)
            if silent is not None:
                del self._limits[silent]

    def _open(self, peer: bytes, message: DraftSync, ids: list[int]) -> None:
        older = self.table.find(peer, message.rid)
        if older is not None:
            if older.generation >= message.generation:
                return
            self.table.close(older)
        known_ids = are_in_vocabulary(ids, self._abilities.vocab_size)
        if not known_ids or not is_sound(message.rule, committed_len=message.committed_len):
            self._notices.warn("sync", f"opens no {message.rid}: foreign ids, or no rule to follow")
            self._refuse_sync(peer, message, "foreign")
            return
        sequence = DraftedSequence(
            peer=peer,
            rid=message.rid,
            generation=message.generation,
            rule=message.rule,
            limits=self._limits[peer],
            now=self._clock(),
        )
        self.table.open(sequence, ids)
        if sequence.refused is not None and self.table.find(peer, message.rid) is None:
            self._refuse_sync(peer, message, sequence.refused)  # no commit will be told

    def _close(self, peer: bytes, message: DraftClose) -> None:
        if message.close_all:
            self.table.close_peer(peer)
        for rid, generation in zip(message.rids, message.generations, strict=True):
            seq = self.table.find(peer, rid)
            if seq is not None and seq.generation <= generation:
                self.table.close(seq)

    def _commit(self, peer: bytes, commit: VerifyCommit, ids: list[int]) -> None:
        start = 0
        for index, rid in enumerate(commit.rids):
            end = start + commit.num_tokens[index]
            try:
                self._commit_row(peer, commit, index, ids[start:end])
            except ProtocolError as error:
                self._notices.warn("row", f"drops a sequence: {error}")
                self._forget(peer, rid)
                self._refuse_row(peer, commit, index, "unknown")
            start = end

    def _commit_row(self, peer: bytes, commit: VerifyCommit, index: int, ids: list[int]) -> None:
        generation = commit.generations[index]
        seq = self.table.find(peer, commit.rids[index])
        if seq is None or seq.generation < generation:
            self._forget(peer, commit.rids[index])
            self._refuse_row(peer, commit, index, "unknown")
            return
        if seq.generation > generation:
            self.stats.stale_commits += 1
            return
        seq.last_seen = self._clock()
        if seq.refused is None and ids:
            unseen = self._unseen_tokens(seq, commit.base_committed_lens[index], ids)
            if not unseen:
                self.stats.stale_commits += 1
                return
            self._take(seq, commit.round_id, unseen)
        if seq.refused is not None:
            self._refuse_row(peer, commit, index, seq.refused)

    def _unseen_tokens(self, seq: DraftedSequence, base: int, ids: list[int]) -> list[int]:
        if not are_in_vocabulary(ids, self._abilities.vocab_size):
            raise ProtocolError(
                rid=seq.rid,
                base_committed_len=base,
                expected=f"ids below {self._abilities.vocab_size}",
                got=(min(ids), max(ids)),
            )
        fork = seq.cache.contradicted_at(base, ids)
        if fork is not None:
            self._notices.warn("contradiction", f"rewinds {seq.rid} to {fork} ids")
            self.table.rewind(seq, fork)
        try:
            return seq.cache.unseen_tokens(base, ids)
        except ValueError as error:
            raise ProtocolError(
                rid=seq.rid, base_committed_len=base, expected="ids that continue ours", got=error
            ) from error

    def _take(self, seq: DraftedSequence, round_id: int, new_tokens: list[int]) -> None:
        """The outcome of a round: what is drafted, and what the row will be answered with."""
        taken = self.table.take(seq, new_tokens)
        if taken is None:
            return
        seq.round_id = round_id
        seq.bonus_rank = min(taken.bonus_rank, MAX_RANK)
        was_behind = seq.answer.served == "prefill"
        seq.answer = plan_answer(
            taken.kind,
            mode=self._config.mode,
            backup=self._config.backup,
            num_steps=seq.limits.num_steps,
            num_unfed=seq.num_unfed,
        )
        grow_chain(seq)
        is_owed = len(seq.cache.drafts) < seq.answer.num_drafts
        if was_behind and is_owed and self._config.mode != "sync":
            # Of a drafter as slow as the target, drafts that nobody waits for never come.
            self._add_reply(seq, round_id, drafts=[], served="reading")
        if seq.answer.served != "prefill":
            self.stats.hits += taken.kind != "miss"
            self.stats.misses += taken.kind == "miss"

    def _forget(self, peer: bytes, rid: str) -> None:
        seq = self.table.find(peer, rid)
        if seq is not None:
            self.table.close(seq)

    # Replies ------------------------------------------------------------------------------------

    def _refuse_row(self, peer: bytes, commit: VerifyCommit, index: int, served: Served) -> None:
        row = ReplyRow(
            rid=commit.rids[index],
            generation=commit.generations[index],
            base_committed_len=commit.base_committed_lens[index] + commit.num_tokens[index],
            drafts=[],
            served=served,
        )
        self._outbox.add(peer, commit.round_id, row)

    def _refuse_sync(self, peer: bytes, sync: DraftSync, served: Served) -> None:
        """Or the target would send the whole prompt again with every round."""
        row = ReplyRow(
            rid=sync.rid,
            generation=sync.generation,
            base_committed_len=sync.committed_len,
            drafts=[],
            served=served,
        )
        self._outbox.add(peer, NO_ROUND, row)

    def _answer_ready(self) -> None:
        """Send what has the drafts that it is to be answered with; one message per commit."""
        for seq in self.table:
            if seq.round_id is not None and len(seq.cache.drafts) >= seq.answer.num_drafts:
                drafts = seq.cache.drafts if seq.answer.num_drafts else []
                self._add_reply(seq, seq.round_id, drafts=drafts, served=seq.answer.served)
                seq.round_id = None
        self._outbox.send()

    def _add_reply(
        self, seq: DraftedSequence, round_id: int, *, drafts: list[int], served: Served
    ) -> None:
        row = ReplyRow(
            rid=seq.rid,
            generation=seq.generation,
            base_committed_len=seq.cache.committed_len,
            drafts=drafts,
            served=served,
            bonus_rank=seq.bonus_rank,
        )
        self._outbox.add(seq.peer, round_id, row)

    # Forwards -----------------------------------------------------------------------------------

    def _next_forward(self) -> Callable[[], None] | None:
        """The most urgent forward, or None. The order is the module docstring's."""
        prompts = [seq for seq in self.table if seq.is_far_behind]
        others = [seq for seq in self.table if not seq.is_far_behind]
        owed = [seq for seq in others if seq.round_id is not None]
        behind = [seq for seq in others if seq.round_id is None and seq.wants_feed]
        if owed:
            rows = _whole(owed)
            prefill = self._due_slice([*behind, *prompts], beside=rows)
            return partial(self._feed, rows, prefill, name="decode")
        rows = _whole(behind)
        prefill = self._next_slice(prompts, beside=rows)
        is_turn = self._forwards_since_slice >= 1
        if rows:
            return partial(self._feed, rows, prefill if is_turn else [], name="feed")
        building = [seq for seq in others if seq.wants_branches]
        if building and not (prefill and is_turn):
            return partial(self._build, building)
        return partial(self._feed, [], prefill, name="prefill slice") if prefill else None

    def _due_slice(self, seqs: list[DraftedSequence], *, beside: list[FeedRow]) -> list[FeedRow]:
        """What goes along with a decode: what reads a prompt to its end, now and then a part."""
        passed = self._forwards_since_slice
        prefill = self._next_slice(seqs, beside=beside)
        return [row for row in prefill if row.is_last or passed > row.seq.limits.num_steps]

    def _next_slice(self, seqs: list[DraftedSequence], *, beside: list[FeedRow]) -> list[FeedRow]:
        """The first ones' next tokens, fewer of them while others are served."""
        room = self._config.prefill_slice_tokens
        if len(seqs) < self.table.num_live:
            room = self._pace.slice_tokens(room, beside=sum(row.num_tokens for row in beside))
        rows: list[FeedRow] = []
        for seq in seqs:
            if room > 0:
                rows.append(FeedRow(seq, min(room, seq.num_unfed)))
                room -= rows[-1].num_tokens
        return rows

    def _feed(self, lines: list[FeedRow], prefill: list[FeedRow], *, name: str) -> None:
        """All unfed tokens of some lines and a slice of the prompts, in one forward."""
        rows = [*lines, *prefill]
        counts = [row.num_tokens for row in rows]
        prefill_tokens = sum(row.num_tokens for row in prefill)
        goes_along = bool(lines) and all(row.is_last for row in prefill)
        seconds = self._drafting.feed_lines(
            [row.seq for row in rows], counts, name=name, prefill_tokens=prefill_tokens
        )
        self._forwards_since_slice = self._forwards_since_slice + 1 if goes_along else 0
        self._drafting.stats.jit_steps += name == "decode"
        self._drafting.stats.prefill_tokens += prefill_tokens
        if not prefill:
            self._pace.note_forward(seconds)
            return
        self._pace.note_slice(num_tokens=sum(counts), seconds=seconds)
        for seq in self.table:
            if seq.round_id is not None and seq.is_far_behind:
                self._add_reply(seq, seq.round_id, drafts=[], served="reading")

    def _build(self, seqs: list[DraftedSequence]) -> None:
        for seq in seqs:
            if not seq.cache.has_tree:
                seq.cache.start_branches(seq.limits.fan_out)
        self._pace.note_forward(self._drafting.step_branches(seqs))
        self._forwards_since_slice += 1

    # Time ---------------------------------------------------------------------------------------

    def _wait_s(self, max_wait_s: float) -> float:
        if self.table.is_empty():
            return max_wait_s
        return min(max_wait_s, max(0.0, self._next_expiry - self._clock()))

    def _expire_leases(self) -> None:
        now = self._clock()
        if now >= self._next_expiry:
            self._next_expiry = now + self._config.lease_s / 4
            self.table.expire(before=now - self._config.lease_s)
