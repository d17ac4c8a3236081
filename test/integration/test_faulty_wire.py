"""Both ends of a round over a wire with every fault: DraftClient, FakeWire, DraftLoop, toy models.

Whatever the wire does, texts equal plain decoding, afterwards the drafter holds nothing, and every
slot was in one place all along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter import handshake
from sglang_ssd.target.draft_client import DraftClient
from sglang_ssd.target.reply_deadline import ReplyDeadline
from sglang_ssd.wire.fake import FakeTargetEnd, FakeWire, Faults
from sglang_ssd.wire.messages import (
    NO_ROUND,
    SCHEMA_VERSION,
    DraftRule,
    DraftSync,
    Served,
    SpeculateReply,
    VerifyCommit,
    Welcome,
)
from toys.toy_server import HELLO, NUM_STEPS, NUM_TOKENS, PROMPTS, RULES, Server, plain_text


@pytest.fixture
def wire():
    return FakeWire(seed=3, tick_s=0.02)


NO_FAULTS = Faults()
ALL = Faults(drop=0.1, duplicate=0.2, corrupt=0.1, reorder=0.2, delay=6)
FAULTS = {
    "none": NO_FAULTS,
    "drop": Faults(drop=0.3),
    "delay": Faults(delay=12),
    "reorder": Faults(reorder=0.4, delay=4),
    "duplicate": Faults(duplicate=0.7),
    "corrupt": Faults(corrupt=0.3),
    "all": ALL,
}


@pytest.mark.parametrize(("draft_seed", "backup"), [(0, "jit"), (1, "none")])
@pytest.mark.parametrize("name", FAULTS)
def test_texts_equal_plain_decoding_whatever_the_wire_does(wire, name, draft_seed, backup):
    server = Server(wire, draft_seed=draft_seed, backup=backup)
    server.start(FAULTS[name], FAULTS[name])
    rounds = server.run()
    server.expect_plain_texts()
    stats = server.client.stats
    if draft_seed == 0:
        assert rounds < NUM_TOKENS, "drafts of the same weights save rounds even on this wire"
    replies = sum(stats.bonus_rank.values())
    assert replies <= stats.rows + len(PROMPTS), "of each round, and behind the last one"
    if name == "none":
        assert stats.on_time_rows == stats.rows
    if name == "duplicate":
        assert stats.stale_replies > 0


def test_a_good_wire_wastes_no_round(wire):
    """The same weights on both ends: after the prefill every round gives K + 1 tokens."""
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    assert server.run() == -(-(NUM_TOKENS - 1) // (NUM_STEPS + 1))


def test_a_good_wire_decodes_no_row_plainly(wire):
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.run()
    stats = server.client.stats
    assert stats.plain_decode == {}
    assert stats.hits > 0.7 * stats.rows


def test_batches_above_the_limit_decode_plainly_and_renew_their_leases(wire):
    """Two requests at most: four decode plainly, and once two are left they speculate again."""
    server = Server(wire, draft_seed=0, backup="jit", max_batch_size=2)
    server.start(NO_FAULTS, NO_FAULTS)
    sent = server.client._transport.stats.sent
    for _ in range(3):
        server.round()
    stats = server.client.stats
    assert stats.plain_decode == {"batch_size": 4 * 3}
    assert server.client._transport.stats.sent - sent == 1, "one a quarter of a second"
    assert server.loop.status().stale_commits == 0
    for rid in ("c", "d"):
        server.client.close(rid)
        server.texts[rid] = list(plain_text(rid))
    server.round()
    assert stats.plain_decode == {"batch_size": 4 * 3 + 2}, "the drafter hears of them first"
    server.run()
    assert stats.hits > 0
    assert "late" not in stats.plain_decode
    server.expect_plain_texts()


def test_the_drafters_own_numbers_come_beside_its_replies(wire):
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.round()
    server.client.request_status()
    assert server.client.drafter_status is None, "nobody waits for it"
    server.round()
    status = server.client.drafter_status
    assert status is not None
    assert status.live_sequences == len(PROMPTS)
    assert status.branch_steps > 0
    assert status.branch_step_seconds <= status.drafting_seconds
    assert status.resident_bytes > 1 << 20
    server.run()
    server.expect_plain_texts()


def test_declined_requests_count_under_their_cause(wire):
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    for rid, cause in (("a", "opt_out"), ("b", "parameter")):
        server.client.close(rid)
        server.client.decline(rid, cause)
    assert all(server.client.knows(rid) for rid in server.texts)
    server.run()
    server.expect_plain_texts()
    counts = server.client.stats.plain_decode
    assert counts["opt_out"] == counts["parameter"] == NUM_TOKENS - 1
    server.client.close("a")
    assert not server.client.knows("a")


def test_a_request_for_which_there_was_no_room_is_drafted_for_when_there_is(wire):
    """Red when one burst leaves a request without drafts to its end."""
    names = list(PROMPTS)
    cases = {f"r{index}": names[index % len(names)] for index in range(9)}
    server = Server(wire, draft_seed=0, backup="jit", cases=cases)
    server.start(NO_FAULTS, NO_FAULTS)
    for _ in range(2):
        server.round()
    full = server.client.stats.plain_decode["full"]
    assert full > 0
    assert len(list(server.loop.table)) == 8
    for rid in ("r0", "r1"):
        server.client.close(rid)
        del server.texts[rid]
    for _ in range(int(2.1 / wire.tick_s)):
        wire.tick()
    for _ in range(3):
        server.round()
    assert "r8" in {seq.rid for seq in server.loop.table}
    assert server.client.stats.plain_decode["full"] == full
    assert len(list(server.loop.table)) == 7


class AnsweredByHand:
    """A target with one request, "a", whose drafter says what the test says."""

    def __init__(self, wire: FakeWire) -> None:
        self.wire = wire
        self.client = DraftClient(
            wire.target(),
            hello=HELLO,
            deadline=ReplyDeadline(least_s=0.1, most_s=1.0),
            resync_tokens=40,
            clock=wire.clock,
        )
        self.client.look()
        ((self.peer, _, _),) = wire.drafter.receive(0.0)
        welcome = Welcome(SCHEMA_VERSION, 1, HELLO.vocab_size, 64, drafter_id="d")
        wire.drafter.send(self.peer, welcome)
        self.client.look()
        self.client.open(rid="a", tokens=[1, 2, 3], rule=DraftRule())
        self.commit: VerifyCommit | None = None

    def reply(self, served: Served, drafts: list[int]) -> None:
        """To the last commit."""
        arrived = self.wire.drafter.receive(0.0)
        commit = arrived[-1].message if arrived else self.commit
        self.commit = commit
        lens = zip(commit.base_committed_lens, commit.num_tokens, strict=True)
        row = SpeculateReply(
            round_id=commit.round_id,
            rids=commit.rids,
            generations=commit.generations,
            base_committed_lens=[base + num for base, num in lens],
            num_drafts=[len(drafts)],
            served=[served],
            bonus_ranks=[-1],
        )
        self.wire.drafter.send(self.peer, row, [drafts] if drafts else [[]])

    def ticks_waited(self, answer: Callable[[], None]) -> int:
        """Of one round, in whose wait the answer comes, a turn of the drafter at every tick."""
        self.client.commit(rids=["a"], new_tokens=[[4]], num_verified=[0])
        self.wire.pump, before = answer, self.wire.now
        self.drafts = self.client.collect(["a"])
        return self.wire.now - before


def test_nobody_waits_for_a_prompt_that_is_still_read(wire):
    """Red when a round that has nothing to wait for waits for the drafter's slice of a prompt."""
    target = AnsweredByHand(wire)
    assert target.ticks_waited(lambda: target.reply("prefill", [])) == 1
    assert target.ticks_waited(lambda: None) == 0
    target.reply("jit", [5])  # too late for its round
    assert target.ticks_waited(lambda: target.reply("jit", [6])) == 1
    assert target.client.stats.missed_deadlines == 0


@pytest.mark.parametrize("draft_seed", [0, 1], ids=["right", "wrong"])
def test_a_drafter_as_slow_as_its_target_catches_up(wire, draft_seed):
    """Red when a prompt that was read too late for its first round has no drafts ever: the target
    goes on at a token a forward, and waits for no drafts until there are some."""
    settings = {"prefill_slice_tokens": 8}
    server = Server(wire, draft_seed=draft_seed, cases={"long": "c"}, settings=settings, turns=1)
    server.start(NO_FAULTS, NO_FAULTS)
    server.run()
    assert server.client.stats.plain_decode == {"prefill": 2}
    assert server.client.stats.missed_deadlines == 0
    server.expect_plain_texts()


def test_rounds_that_ask_for_nothing_end_no_pause(wire):
    """Red when a few requests without drafts among others make every round wait for a slow
    drafter."""
    target = AnsweredByHand(wire)
    target.client.decline("z", "opt_out")

    def late() -> None:
        if wire.now - asked_at == int(1.2 / wire.tick_s):
            target.reply("jit", [5])

    waits = []
    for _ in range(20):
        asked_at = wire.now
        waits.append(target.ticks_waited(late))
        for _ in range(int(0.3 / wire.tick_s)):
            wire.tick()
            late()
        target.client.collect(["z"])
    assert sum(wait > 0 for wait in waits) <= 4


def test_in_mode_sync_a_prompt_is_waited_for(wire):
    """Red when the baseline's first rounds have no drafts, or when its drafter, which reads for
    longer than a round waits, is taken for one that has stopped."""
    target = AnsweredByHand(wire)
    turns: list[tuple[Served, list[int]]] = [*[("reading", [])] * 8, ("sync", [5])]
    assert target.ticks_waited(lambda: target.reply(*turns.pop(0))) == 9
    assert target.drafts == [[5]]
    assert target.client.deadline_s == 1.0, "that it reads says nothing of how long drafts take"
    for _ in range(2):  # no pause between two waits
        ticks = target.ticks_waited(lambda: target.reply("reading", []))
        assert ticks * wire.tick_s >= 1.0
    assert target.client.state == "ready"
    assert target.client.stats.plain_decode == {"prefill": 2}
    assert target.client.stats.missed_deadlines == 0


def test_mode_sync_drafts_for_others_while_a_prompt_is_read(wire, monkeypatch):
    """Red when the other rows of the baseline go without drafts meanwhile, as when a wait in vain
    for that prompt ends the waits for them."""
    settings = {"mode": "sync", "prefill_slice_tokens": 1}
    server = Server(wire, draft_seed=0, settings=settings)
    others = list(server.texts)
    server.start(NO_FAULTS, NO_FAULTS)
    monkeypatch.setitem(PROMPTS, "long", [token % 61 for token in range(100)])
    monkeypatch.setitem(RULES, "long", DraftRule())
    server.cases["long"] = "long"
    server.begin_again("long")
    stats = server.client.stats
    for num_rounds in range(1, 4):  # 100 slices, about 20 a round
        server.round([*others, "long"])
        assert stats.plain_decode == {"prefill": num_rounds}
        assert stats.served == {"sync": num_rounds * len(others)}
    server.run()
    server.expect_plain_texts()
    assert set(stats.plain_decode) == {"prefill"}
    assert stats.missed_deadlines == 0


def test_a_drafter_that_stops_while_it_reads_costs_one_wait(wire):
    target = AnsweredByHand(wire)
    target.ticks_waited(lambda: target.reply("reading", []))
    assert target.ticks_waited(lambda: None) * wire.tick_s >= 1.0
    assert [target.ticks_waited(lambda: None) for _ in range(3)] == [0, 0, 0]
    assert target.client.state == "degraded"
    assert target.client.stats.plain_decode == {"prefill": 1, "late": 4}


@pytest.mark.parametrize("direction", ["to_drafter", "to_target"])
def test_a_direction_that_dies_and_comes_back(wire, direction):
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.round()
    wire.kill(direction)
    for _ in range(3):
        server.round()
    wire.revive(direction)
    on_time = server.client.stats.on_time_rows
    server.run()
    server.expect_plain_texts()
    assert server.client.stats.on_time_rows > on_time, "speculation resumes"


def test_a_frozen_drafter_costs_drafts_only(wire):
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.round()
    server.drafter_runs = False
    server.round()
    server.round()
    server.drafter_runs = True
    server.run()
    server.expect_plain_texts()


def test_a_stopped_drafter_costs_one_wait(wire):
    """Red when a target waits for a silent drafter again, or floods it while it is."""
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.round()
    server.drafter_runs = False
    for _ in range(6):
        server.round()
    assert server.client.stats.missed_deadlines == 1
    assert server.client.state == "degraded"
    assert len(wire.drafter.receive(0.0)) <= 6, "one commit, then a probe now and then"


@pytest.mark.parametrize("backup", ["jit", "none"])
def test_a_drafter_that_was_started_again_is_told_everything(wire, backup):
    """By hand: nobody tells the target. Red when it keeps talking to a drafter that is gone."""
    server = Server(wire, draft_seed=0, backup=backup)
    server.start(NO_FAULTS, NO_FAULTS)
    server.round()
    server.loop = server.new_drafter()
    on_time = server.client.stats.on_time_rows
    server.run()
    server.expect_plain_texts()
    assert server.client.link.lives == 2
    assert server.client.stats.resyncs == len(PROMPTS)
    assert server.client.stats.missed_deadlines <= 1
    assert server.client.stats.on_time_rows > on_time, "speculation resumes"


class UpgradedWire(FakeWire):
    """Of a drafter that is stopped, upgraded to the next version and started again: then either
    side sees the other's stamp."""

    is_upgraded = False

    def upgrade(self):
        self.is_upgraded = True
        for direction in self.faults:  # what was under way is lost
            self.kill(direction)
            self.revive(direction)

    def post(self, direction, peer, frames):
        if self.is_upgraded:
            stamp = SCHEMA_VERSION + (1 if direction == "to_target" else -1)
            frames = [bytes([stamp]) + frames[0][1:], *frames[1:]]
        super().post(direction, peer, frames)


def test_a_target_decodes_plainly_until_it_speaks_its_drafters_version(monkeypatch, caplog):
    """The drafter is upgraded first, as docs/operations.md tells. Red when a live target waits for
    it, or talks on, round after round, takes anything that it says, does not tell why there are no
    drafts, or does not go on with one of its own version."""
    wire = UpgradedWire(seed=3, tick_s=0.02)
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.round()
    client, stats = server.client, server.client.stats
    drafted = stats.correct_drafts, stats.on_time_rows
    with monkeypatch.context() as upgrade:
        upgrade.setattr(handshake, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
        wire.upgrade()
        server.loop = server.new_drafter()
        with caplog.at_level(logging.WARNING):
            server.run()
        assert client.state == "refused"
        assert client.link.last_error == (
            "the SSD drafter refuses this target: "
            f"schema version {SCHEMA_VERSION}, the drafter speaks {SCHEMA_VERSION + 1}"
        )
        assert client.link.last_error in caplog.messages
        assert (stats.correct_drafts, stats.on_time_rows) == drafted
        assert stats.missed_deadlines == 1
        assert set(stats.plain_decode) == {"late", "drafter_down"}
        late = stats.plain_decode["late"]
        assert late == 2 * len(PROMPTS), "of the rounds that waited, and that asked who is there"
        assert server.loop.status().refused.keys() == {"hello"}, "nothing else was said"
    server.expect_plain_texts()
    wire.is_upgraded, server.loop = False, server.new_drafter()
    server.begin_again(*PROMPTS)
    server.run()
    server.expect_plain_texts()
    assert client.state == "ready"
    assert stats.hits > 0


def test_what_nobody_took_was_never_lost(wire, monkeypatch):
    """Red when a request that is told late counts as one that the drafter had lost."""
    server = Server(wire, draft_seed=0, backup="jit")
    send = FakeTargetEnd.send

    def send_no_requests(end, message, frames=()):
        return not isinstance(message, DraftSync) and send(end, message, frames)

    monkeypatch.setattr(FakeTargetEnd, "send", send_no_requests)
    server.start(NO_FAULTS, NO_FAULTS)
    monkeypatch.undo()
    server.run()
    server.expect_plain_texts()
    assert server.client.stats.on_time_rows > 0
    assert server.client.stats.resyncs == 0


def test_an_idle_target_notices_another_drafter(wire):
    """Red when the first request after an idle spell has to find out."""
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.run()
    server.loop = server.new_drafter()
    for _ in range(600):  # 12 s
        wire.tick()
        server.step_drafter()
        server.client.note_idle()
    assert server.client.link.lives == 2
    assert server.client.state == "ready"
    assert not server.client.stats.degraded, "the gauge says what the state says"
    assert server.client.transport_stats.sent < 20


def test_a_drafter_that_is_back_is_told_in_slices(wire):
    """Prompts of 3, 1, 30 and 4 ids and some more each; 40 ids a round at most."""
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.round()
    server.loop = server.new_drafter()
    told = []
    for _ in range(8):
        server.round()
        told.append(server.client.stats.resyncs)
    assert told[-1] == len(PROMPTS)
    assert [num for num in told if 0 < num < len(PROMPTS)], "not all in one round"


def test_a_request_that_comes_while_the_drafter_is_away_is_drafted_for_later(wire):
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.drafter_runs = False
    server.round()
    server.round()
    server.client.open(rid="late", tokens=[1, 2, 3], rule=DraftRule())
    server.drafter_runs = True
    for _ in range(8):
        server.round()
    assert "late" in {seq.rid for seq in server.loop.table}


def test_a_long_prefill_keeps_what_runs_and_nothing_else(wire):
    """Red when every running request loses its drafts to one long prompt, or one whose close was
    lost stays while its target speaks, or those of a target that is gone."""
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.round()
    ticks = int(1.5 * SsdConfig().lease_s / wire.tick_s)

    def live_after(chunk: Callable[[], None]) -> set[str]:
        for _ in range(ticks):
            wire.tick()
            chunk()
            server.step_drafter()
        return {seq.rid for seq in server.loop.table}

    sent = server.client.transport_stats.sent
    assert live_after(server.client.keep_alive) == set(PROMPTS)
    assert server.client.transport_stats.sent - sent < 7 * SsdConfig().lease_s
    assert server.loop.status().stale_commits == 0
    wire.kill("to_drafter")
    server.client.close("a")
    wire.revive("to_drafter")
    assert live_after(server.client.keep_alive) == set(PROMPTS) - {"a"}
    assert live_after(lambda: None) == set()


def test_every_commit_has_a_number_of_its_own(wire, monkeypatch):
    """Red when the first token of a prompt is taken for the round before it, and its reply's time
    for that of the round."""
    server = Server(wire, draft_seed=0, backup="jit")
    transport, numbers = server.client._transport, []
    send = transport.send

    def note(message, frames=()):
        if isinstance(message, VerifyCommit):
            numbers.append(message.round_id)
        return send(message, frames)

    monkeypatch.setattr(transport, "send", note)
    server.start(NO_FAULTS, NO_FAULTS)
    server.round()
    server.begin_again("a")
    server.round()
    assert len(numbers) == len(set(numbers)) == 4
    assert NO_ROUND not in numbers


@pytest.mark.parametrize(
    ("tokens", "rule"),
    [([1, 61], DraftRule()), ([1, 2], DraftRule(temperature=float("inf")))],
    ids=["ids", "rule"],
)
def test_what_the_drafter_cannot_follow_is_told_once(wire, tokens, rule):
    """Red when the whole prompt is sent again with every round; 61 is in a target's padding."""
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(NO_FAULTS, NO_FAULTS)
    server.client.open(rid="foreign", tokens=tokens, rule=rule)
    server.step_drafter()
    server.client.receive()
    sent = server.client.transport_stats.sent
    for _ in range(3):
        assert server.client.collect(["foreign"]) == [[]]
        server.client.commit(rids=["foreign"], new_tokens=[[3]], num_verified=[0])
        server.step_drafter()
    assert server.client.stats.plain_decode == {"foreign": 3}
    assert server.client.transport_stats.sent == sent


@pytest.mark.parametrize("name", ["none", "drop", "all"])
def test_an_idle_drafter_holds_nothing(wire, name):
    server = Server(wire, draft_seed=0, backup="jit")
    server.start(FAULTS[name], FAULTS[name])
    server.run()
    wire.faults["to_drafter"] = NO_FAULTS
    server.client.note_idle()
    for _ in range(20):
        wire.tick()
        server.step_drafter()
    assert server.loop.table.num_live == 0
    assert server.loop.table.num_free_slots == server.loop.table.total_slots
