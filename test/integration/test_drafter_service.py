"""The drafter among several requests and messages of every kind: order, fairness, refusals,
repairs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
import torch

from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter import loop
from sglang_ssd.drafter.model_step import ExtendRow
from sglang_ssd.wire.messages import (
    DraftClose,
    DraftRule,
    DraftSync,
    HelloRequest,
    StatusRequest,
    ToDrafter,
    VerifyCommit,
    Welcome,
)
from toys.drafter_checks import assert_kv_is_fresh, assert_replies_continue
from toys.toy_draft_model import ToyDraftModel
from toys.toy_target import GREEDY, SAMPLED, Reply, ToyTarget
from toys.tree import guesses

PROMPT = [5, 9, 2, 33, 17, 4]
LONG = [i % 61 for i in range(7, 307)]


def target_of(num_steps: int = 4, **settings: object) -> ToyTarget:
    config = msgspec.convert({"fan_out": [2], **settings}, SsdConfig)
    return ToyTarget(config=config, num_steps=num_steps, draft_model=ToyDraftModel(seed=3))


def only_reply(target: ToyTarget) -> Reply:
    for _ in range(50):
        if target.replies:
            break
        target.step()
    (reply,) = target.replies
    target.replies = []
    return reply


# Mode sync --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_sync_drafts_with_k_forwards_and_does_nothing_else(rule: DraftRule) -> None:
    """The baseline must not pay for anything that only SSD needs, nor miss anything that SD has."""
    target = target_of(mode="sync")
    for rid in ("a", "b"):
        target.open(rid, PROMPT, rule)
    target.run_until_idle()
    for _ in range(4):
        target.model.calls.clear()
        target.round()
        assert [kind for kind, _ in target.model.calls] == ["extend"] * 4
        assert [count for _, count in target.model.calls][1:] == [2, 2, 2]
    for request in target.requests.values():
        assert request.served == ["sync"] * 4
        assert request.accept_lens == [1, 5, 5, 5]
    assert_kv_is_fresh(target)


def test_sync_answers_a_prompt_that_is_being_read_with_drafts() -> None:
    """Red when the baseline loses the first rounds of a request to the reading of its prompt, for
    SD has its drafts from the first round; or when others wait for that prompt."""
    target = target_of(mode="sync", prefill_slice_tokens=50)
    target.open("live", PROMPT)
    target.run_until_idle()
    target.round()
    long = target.open("long", LONG)
    target.verify(target.requests["live"])
    long.tokens.append(3)
    target.commit([target.requests["live"], long])
    target.model.calls.clear()
    target.run_until_idle()
    forwards = [count for _, count in target.model.calls]
    assert len(forwards) <= 4 + len(LONG) // 50 + 4 + 1, "K forwards for each, and the slices"
    replies = [(reply.rid, reply.served, len(reply.drafts)) for reply in target.replies]
    assert replies.index(("live", "sync", 4)) <= 1, "a slice may have been due first"
    assert replies.count(("long", "reading", 0)) == len(replies) - 2 >= 3
    assert replies[-1] == ("long", "sync", 4)
    assert target.loop.status().misses == 3, "of both rows and of the round before, as the target"
    assert_replies_continue(target, target.replies)
    assert_kv_is_fresh(target)


# Prefill ----------------------------------------------------------------------------------------


def test_a_prompt_is_prefilled_in_slices_while_others_are_served() -> None:
    """Neither starves: rounds go on at full hit rate, and slices and branch steps take turns."""
    target = target_of(prefill_slice_tokens=20)
    target.open("live", PROMPT)
    target.run_until_idle()
    target.round()
    target.open("long", LONG)
    live = target.requests["live"]
    rounds = 0
    target.model.calls.clear()
    long = None
    while long is None or long.is_far_behind:
        target.verify(live)
        target.commit([live])
        reply = only_reply(target)
        assert reply.served == "hit"
        live.acked, live.drafts = reply.base, reply.drafts
        for _ in range(6):
            target.step()
        long = target.loop.table.find(b"target", "long")
        rounds += 1
    slices = [count for kind, count in target.model.calls if kind == "extend" and count > 1]
    assert max(slices) <= 20
    assert rounds <= len(LONG) / (3 * 20) + 2
    assert target.loop.status().prefill_tokens >= len(LONG) - 20


@pytest.mark.parametrize(
    ("second", "counts"),
    [
        (20, [1 + 40, 1 + 20, 1, 1]),
        (40, [1 + 40, 1 + 40, 1, 1]),
        (300, [1 + 40, 1 + 40, 1, 1]),
    ],
)
def test_prompts_are_read_beside_the_decodes_of_others(second: int, counts: list[int]) -> None:
    """Red when a short prompt waits for the decodes of others, or costs them a forward of its own
    (short answers are over before such a prompt has drafts), or a long one slows each of them."""
    target = target_of(prefill_slice_tokens=1 + 40)
    live = target.open("live", PROMPT)
    target.run_until_idle()
    cache = target.loop.table.find(b"target", "live").cache
    live.tokens.append(min(set(range(60)) - {one.line[0] for one in guesses(cache)}))
    target.open("first", LONG[:40])
    target.commit([live])
    target.model.calls.clear()
    target.step()
    target.open("second", LONG[:second])
    reply = only_reply(target)
    assert (reply.rid, reply.served, len(reply.drafts)) == ("live", "jit", 4)
    assert target.model.calls == [("extend", count) for count in counts]
    assert target.loop.status().jit_steps == 4
    assert_kv_is_fresh(target)


def test_a_commit_during_prefill_is_answered_at_once_without_drafts() -> None:
    target = target_of(prefill_slice_tokens=20)
    request = target.open("long", LONG)
    target.step()
    request.tokens.append(3)
    target.commit([request])
    target.model.calls.clear()
    target.step()
    assert only_reply(target).served == "prefill"
    target.run_until_idle()
    target.take_replies()
    request.acked = len(request.tokens)
    assert [reply.served for reply in target.round()] == ["hit"], "the branches after the prompt"
    assert_kv_is_fresh(target)


@pytest.mark.parametrize("backup", ["jit", "none"])
def test_a_target_that_waits_no_more_hears_at_once_that_its_prompt_is_read(backup: str) -> None:
    """Red when it hears so by drafts alone: by then it has gone on to other tokens."""
    target = target_of(backup=backup)
    request = target.open("long", LONG)
    request.tokens.append(3)
    target.commit([request])
    assert only_reply(target).served == "prefill"
    target.run_until_idle()
    request.tokens.append(3)
    target.commit([request])
    expected = {"jit": ("reading", "jit"), "none": ("none",)}[backup]
    for served in expected:
        reply = only_reply(target)
        assert (reply.served, reply.base) == (served, len(request.tokens))
        assert len(reply.drafts) == (4 if served == "jit" else 0)


def test_short_prompts_share_one_forward() -> None:
    target = target_of()
    for i in range(4):
        target.open(f"r{i}", PROMPT[: i + 1])
    target.step()
    assert target.model.calls == [("extend", 1 + 2 + 3 + 4)]


# Several targets --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("vocab_size", [1, 40])
def test_a_target_of_fewer_tokens_takes_none_from_another(rule: DraftRule, vocab_size: int) -> None:
    """Red when rows are ranked among the tokens of a target that happens to be beside them, or
    among more than their own."""
    target = target_of()
    narrow = msgspec.structs.replace(
        target.greeting(), vocab_size=vocab_size, allow_padded_vocab=True
    )
    target.send(narrow, peer=b"narrow")
    request = target.open("r", PROMPT, rule)
    ids = [0] * 3
    target.send(
        DraftSync(rid="n", generation=1, committed_len=len(ids), rule=rule), ids, peer=b"narrow"
    )
    target.run_until_idle()
    narrow_drafts = []
    for _ in range(8):
        target.send(commit(len(ids), [0], rid="n"), [0], peer=b"narrow")
        ids.append(0)
        target.verify(request)
        target.commit([request])
        target.run_until_idle()
        narrow_drafts += [token for one in target.replies if one.rid == "n" for token in one.drafts]
        target.take_replies()
    assert request.served == ["hit"] * 8
    assert request.accept_lens == [1] + [5] * 7
    assert max(request.tokens[len(PROMPT) :]) >= 40, "or nothing could be taken"
    assert narrow_drafts
    assert max(narrow_drafts) < vocab_size


def test_a_prompt_is_read_though_another_target_contradicts_itself_forever() -> None:
    """Red when a sequence that is rewound again and again stays the first to be read."""
    target = target_of(prefill_slice_tokens=64)
    target.hello(peer=b"other")
    long = DraftSync(rid="x", generation=1, committed_len=380, rule=GREEDY)
    target.send(long, [1] * 380, peer=b"other")
    target.step()
    target.open("r", LONG)
    for turn in range(15):
        ids = [2 + turn] * 379
        target.send(commit(1, ids, rid="x"), ids, peer=b"other")
        target.step()
    assert target.loop.table.find(b"target", "r").num_unfed == 0
    assert target.loop.status().refused == {"contradiction": 15}


def test_only_the_longest_silent_target_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when newcomers make the drafter forget a target that it serves or has just heard of,
    which then takes it for a new one, or when it keeps all that ever said hello."""
    monkeypatch.setattr(loop, "_MAX_PEERS", 4)
    target = target_of()
    target.open("r", PROMPT)
    peers = [b"a", b"b", b"c"]
    for peer in peers:
        target.hello(peer=peer)
    target.send(StatusRequest(), peer=b"a")
    target.hello(peer=b"newcomer")
    for peer in [*peers, b"target"]:
        target.send(commit(6, []), peer=peer)
    target.loop.step(0.0)
    strangers = [peer for peer, said, _ in target.transport.outbox if said == HelloRequest()]
    assert strangers == [b"b"]


# Messages that repeat, arrive late or make no sense ---------------------------------------------


def test_duplicate_and_overtaken_commits_are_counted_and_change_nothing() -> None:
    target = target_of()
    request = target.open("r", PROMPT)
    target.run_until_idle()
    target.verify(request)
    target.commit([request])
    first = target.transport.inbox[-1]
    target.transport.inbox.append(first)
    target.run_until_idle()
    assert len(target.take_replies()) == 1
    before = target.loop.status()
    target.transport.inbox.append(first)
    target.run_until_idle()
    assert target.replies == []
    assert target.loop.status().stale_commits == before.stale_commits + 1 == 2
    assert target.loop.status().branch_steps == before.branch_steps


def test_a_lost_commit_is_repaired_by_the_next_one() -> None:
    target = target_of()
    request = target.open("r", PROMPT)
    target.run_until_idle()
    target.round()
    target.verify(request)
    target.commit([request])
    target.transport.inbox.clear()
    target.verify(request)
    target.commit([request])
    reply = only_reply(target)
    assert reply.base == len(request.tokens)
    assert_replies_continue(target, [reply])
    target.run_until_idle()
    assert_kv_is_fresh(target)


def commit(base: int, ids: Sequence[int], generation: int = 1, rid: str = "r") -> VerifyCommit:
    return VerifyCommit(
        round_id=77,
        rids=[rid],
        generations=[generation],
        base_committed_lens=[base],
        num_verified_drafts=[0],
        num_tokens=[len(ids)],
    )


@pytest.mark.parametrize(
    ("base", "ids"),
    [(20, [1]), (6, [61]), (6, [-1])],
    ids=["gap", "beyond the vocabulary", "negative"],
)
def test_a_row_that_cannot_be_right_loses_its_sequence_only(base: int, ids: list[int]) -> None:
    target = target_of()
    target.open("r", PROMPT)
    target.open("other", PROMPT)
    target.run_until_idle()
    target.send(commit(base, ids), ids)
    reply = only_reply(target)
    assert (reply.rid, reply.served) == ("r", "unknown")
    assert target.loop.status().refused == {"row": 1}
    assert [seq.rid for seq in target.loop.table] == ["other"]


def test_a_commit_that_contradicts_rewinds_to_the_longest_match() -> None:
    """Red when the sequence is lost, or keeps KV or branches of ids that never were."""
    target = target_of()
    request = target.open("r", PROMPT)
    target.run_until_idle()
    for _ in range(2):
        target.round()
    other = (request.tokens[-2] + 1) % 61
    request.tokens = [*request.tokens[:-2], other, 3]
    request.acked, request.drafts = len(PROMPT) - 1, []
    target.commit([request])
    reply = only_reply(target)
    assert reply.base == len(request.tokens)
    assert_replies_continue(target, [reply])
    target.run_until_idle()
    assert_kv_is_fresh(target)
    assert target.loop.status().refused == {"contradiction": 1}
    target.take_replies()
    assert target.round()[0].served != "unknown"


def test_unknown_and_newer_openings_are_unknown_and_older_ones_are_ignored() -> None:
    target = target_of()
    request = target.open("r", PROMPT)
    request.generation = 5
    target.transport.inbox.clear()
    target.sync(request)
    target.run_until_idle()
    target.send(commit(6, [1], generation=4), [1])
    target.run_until_idle()
    assert target.replies == []
    assert target.loop.table.num_live == 1
    target.send(DraftClose(rids=["r"], generations=[4]))
    target.run_until_idle()
    assert target.loop.table.num_live == 1
    target.send(commit(6, [1], generation=6), [1])
    assert only_reply(target).served == "unknown"
    assert target.loop.table.num_live == 0, "the older opening is over"
    target.send(commit(6, [1], rid="never"), [1])
    assert only_reply(target).served == "unknown"


def test_an_older_sync_does_not_replace_a_newer_one() -> None:
    target = target_of()
    request = target.open("r", PROMPT)
    older = target.transport.inbox[-1]
    request.generation += 1
    request.tokens.append(8)
    target.sync(request)
    target.run_until_idle()
    target.transport.inbox.append(older)
    target.run_until_idle()
    (seq,) = target.loop.table
    assert seq.generation == 2
    assert seq.cache.committed_len == len(PROMPT) + 1


def test_a_target_that_said_no_hello_gets_nothing() -> None:
    target = target_of()
    sync = DraftSync(rid="r", generation=1, committed_len=2, rule=GREEDY)
    target.send(sync, [1, 2], peer=b"stranger")
    target.send(commit(2, [1]), [1], peer=b"stranger")
    target.loop.step(0.0)
    assert target.loop.table.is_empty()
    assert target.transport.outbox == [(b"stranger", HelloRequest(), [])] * 2
    assert target.loop.status().refused == {"stranger": 2}


def test_what_is_refused_is_counted_always_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Red when a peer is refused and the drafter's own numbers, or its log, know nothing of it."""
    target = target_of()
    target.transport.stats.refused["key"] = 7  # as a transport counts them
    for number in range(3):
        target.num_steps = 99
        target.hello(peer=b"deep")
        target.open(f"r{number}", PROMPT, DraftRule(repetition_penalty=0.0))
        target.send(commit(2, [1]), [1], peer=b"stranger")
        target.step()
    assert target.loop.status().refused == {"key": 7, "hello": 3, "stranger": 3, "sync": 3}
    assert [record.message for record in caplog.records] == [
        "refuses target toy: num_steps 99, allowed are 1..16",
        "opens no r0: foreign ids, or no rule to follow",
        "asks a target that it has not welcomed to say hello",
    ]


def test_what_is_kept_of_targets_that_are_gone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when every target that ever said hello stays known; one in service must."""
    monkeypatch.setattr(loop, "_MAX_PEERS", 100)
    target = target_of()
    target.open("r", PROMPT)
    for number in range(300):
        target.hello(peer=b"%d" % number)
    assert len(target.loop._limits) == 100
    target.run_until_idle()
    assert [reply.served for reply in target.round()] != ["unknown"]


@pytest.mark.parametrize(
    "rule",
    [
        DraftRule(temperature=1.0, seed=2**63),
        DraftRule(temperature=float("nan")),
        DraftRule(temperature=float("inf")),
        DraftRule(temperature=1.0, top_p=float("nan")),
        DraftRule(frequency_penalty=float("nan")),
        DraftRule(presence_penalty=float("inf")),
        DraftRule(repetition_penalty=0.0),
        DraftRule(repetition_penalty=1e-300),
        DraftRule(repetition_penalty=1e300),
        DraftRule(temperature=1e39),
        DraftRule(prompt_len=len(PROMPT) + 1),
        DraftRule(bias_tokens=[1, 2], bias_values=[0.5]),
        DraftRule(bias_tokens=[1], bias_values=[float("-inf")]),
        DraftRule(bias_tokens=[1, 1], bias_values=[0.5, 0.5]),
        DraftRule(stop_tokens=[-1], min_new_tokens=3),
    ],
)
def test_a_rule_that_cannot_be_followed_opens_nothing(rule: DraftRule) -> None:
    """Red when a number that float32 cannot hold, or any other, ends the drafter."""
    target = target_of()
    target.open("r", PROMPT, rule)
    target.run_until_idle()
    assert target.loop.table.is_empty()
    assert target.loop.status().refused == {"sync": 1}
    assert [(reply.rid, reply.served) for reply in target.replies] == [("r", "foreign")]


def test_two_targets_may_use_the_same_name_and_different_depths() -> None:
    target = target_of()
    target.open("r", PROMPT)
    target.num_steps = 2
    target.hello(peer=b"second")
    sync = DraftSync(rid="r", generation=9, committed_len=3, rule=GREEDY)
    target.send(sync, PROMPT[:3], peer=b"second")
    target.run_until_idle()
    steps = {seq.peer: {len(one.slots) for one in guesses(seq.cache)} for seq in target.loop.table}
    assert steps == {b"target": {4}, b"second": {2}}
    target.send(DraftClose(rids=[], generations=[], close_all=True), peer=b"second")
    target.step()
    assert [seq.peer for seq in target.loop.table] == [b"target"]


# Bounds and time --------------------------------------------------------------------------------


def test_a_full_pool_refuses_the_row_and_serves_the_others() -> None:
    model = ToyDraftModel(seed=3, total_slots=80)
    target = ToyTarget(config=SsdConfig(fan_out=[2]), num_steps=4, draft_model=model)
    target.open("a", PROMPT)
    target.open("b", PROMPT)
    target.run_until_idle()
    replies = {reply.rid: reply for reply in target.round()}
    assert replies["a"].served == "hit"
    assert replies["b"].served == "full"
    target.close("a")
    target.close("b")
    target.open("c", PROMPT)
    target.run_until_idle()
    assert [reply.served for reply in target.round()] == ["hit"]


def test_a_name_that_finds_no_room_hears_why_at_once() -> None:
    """Red when its target sends the whole prompt again with every round."""
    target = ToyTarget(config=SsdConfig(fan_out=[2]), num_steps=4, max_sequences=1)
    for number in range(10):
        target.open(f"r{number}", PROMPT)
    target.open("long", [1] * 399)
    target.run_until_idle()
    told = [(reply.rid, reply.served) for reply in target.replies]
    assert told == [("r9", "full"), ("long", "context")]


def test_a_row_without_ids_renews_the_lease_alone() -> None:
    target = target_of(lease_s=10.0)
    target.open("r", PROMPT)
    target.open("silent", PROMPT)
    target.run_until_idle()
    for now in (4.0, 8.0, 12.0, 16.0):
        target.now = now
        target.send(commit(len(PROMPT), []))
        target.run_until_idle()
    assert [seq.rid for seq in target.loop.table] == ["r"]
    assert target.replies == []
    assert target.loop.status().stale_commits == 0


def test_past_the_drafters_context_rows_go_on_without_drafts() -> None:
    model = ToyDraftModel(seed=3, context_len=40)
    target = ToyTarget(config=SsdConfig(fan_out=[2]), num_steps=4, draft_model=model)
    request = target.open("r", PROMPT)
    target.run_until_idle()
    for _ in range(12):
        target.round()
    assert request.served[0] == "hit"
    assert request.served[-1] == "context"
    assert target.loop.table.num_free_slots == target.loop.table.total_slots


def test_a_silent_sequence_ends_with_its_lease() -> None:
    target = target_of(lease_s=10.0)
    target.open("r", PROMPT)
    target.run_until_idle()
    target.now = 9.0
    target.step()
    assert target.loop.table.num_live == 1
    target.now = 13.0
    target.step()
    assert target.loop.table.num_live == 0


def test_an_idle_drafter_waits_in_the_poll() -> None:
    """Never zero while there is nothing to do, and no longer than the next lease."""
    target = target_of(lease_s=8.0)
    target.transport.waits.clear()
    target.loop.step(1.0)
    assert target.transport.waits == [1.0]
    target.open("r", PROMPT)
    target.run_until_idle()
    target.transport.waits.clear()
    for _ in range(3):
        target.loop.step(60.0)
    assert all(0 < wait <= 2.0 for wait in target.transport.waits)


def test_status_counts() -> None:
    target = target_of()
    extend = target.model.extend

    def slow_extend(rows: Sequence[ExtendRow]) -> torch.Tensor:
        target.now += 0.25
        return extend(rows)

    target.model.extend = slow_extend
    target.open("r", PROMPT)
    target.run_until_idle()
    target.round()
    target.send(StatusRequest())
    target.loop.step(0.0)
    ((peer, status, _),) = target.transport.outbox
    assert peer == b"target"
    assert status.live_sequences == 1
    assert (status.hits, status.misses) == (1, 0)
    assert status.branch_steps == 4 + 5  # after the prompt there is no chain to feed
    assert status.total_slots == 3000
    assert 0 < status.free_slots < 3000
    assert status.drafting_seconds == 0.25, "the prompt's forward; branch steps took no time"


# Late writes ------------------------------------------------------------------------------------


class ClosingModel(ToyDraftModel):
    """Closes the request, and opens another in its row, while a forward is under way."""

    target: ToyTarget | None = None

    def extend(self, rows: Sequence[ExtendRow]) -> torch.Tensor:
        logits = super().extend(rows)
        if self.target is not None:
            target, self.target = self.target, None
            target.loop.table.close_peer(b"target")
            target.open("new", PROMPT[::-1])
            for arrived in target.transport.receive(0.0):
                target.loop._handle(arrived)
        return logits


def test_a_forward_that_ends_after_its_row_was_reused_writes_nothing() -> None:
    model = ClosingModel(seed=3)
    target = ToyTarget(
        config=SsdConfig(fan_out=[2]), num_steps=4, draft_model=model, max_sequences=1
    )
    target.open("old", PROMPT)
    model.target = target
    target.step()
    (seq,) = target.loop.table
    assert seq.rid == "new"
    assert seq.cache.trunk_len == 0
    target.run_until_idle()
    assert_kv_is_fresh(target)


def test_every_hello_is_answered_and_sequences_stay() -> None:
    """A target repeats its Hello until it has an answer."""
    target = target_of()
    target.open("r", PROMPT)
    target.run_until_idle()
    target.send(target.greeting())
    target.loop.step(0.0)
    assert [type(message) for _, message, _ in target.transport.outbox] == [Welcome]
    assert target.loop.table.num_live == 1


# Nonsense ---------------------------------------------------------------------------------------


def test_a_babbling_target_neither_stops_the_loop_nor_leaks_a_slot() -> None:
    """Well-formed messages of random content, with a served request in their midst."""
    rng = random.Random(5)
    target = target_of(prefill_slice_tokens=20)
    honest = target.open("honest", PROMPT)
    target.run_until_idle()
    for _ in range(150):
        target.send(*_nonsense(rng), peer=rng.choice([b"target", b"target", b"stranger"]))
        target.step()
        target.replies = [reply for reply in target.replies if reply.rid == "honest"]
    target.replies = []
    honest.drafts = []
    assert [reply.served for reply in target.round() if reply.rid == "honest"] != ["unknown"]
    assert_kv_is_fresh(target)


def _nonsense(rng: random.Random) -> tuple[ToDrafter, list[int]]:
    rids = [rng.choice("abc") for _ in range(rng.randrange(4))]
    generations = [rng.randrange(-1, 3) for _ in rids]
    ids = [rng.choice([-1, 0, 1, 2, 60, 61, 2**31 - 1]) for _ in range(rng.randrange(8))]
    match rng.randrange(4):
        case 0:
            sync_ids = [abs(token) % 61 for token in ids] or [1]
            rule = DraftRule(
                temperature=rng.choice([0.0, 1e-30, 1.0, 1e30]), top_k=rng.randrange(9)
            )
            sync = DraftSync(
                rid=rng.choice("abc"),
                generation=rng.randrange(3),
                committed_len=len(sync_ids),
                rule=rule,
            )
            return sync, sync_ids
        case 1:
            return DraftClose(rids=rids, generations=generations), []
        case 2:
            return StatusRequest(), []
        case _:
            lens = [rng.randrange(4) for _ in rids]
            commits = VerifyCommit(
                round_id=rng.randrange(9),
                rids=rids,
                generations=generations,
                base_committed_lens=[rng.randrange(1, 9) for _ in rids],
                num_verified_drafts=[rng.randrange(6) for _ in rids],
                num_tokens=lens,
            )
            return commits, [rng.randrange(-1, 62) for _ in range(sum(lens))]
