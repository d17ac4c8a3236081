"""What each outcome leaves valid, what is fed, and what the row is answered with."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from sglang_ssd.config import SsdConfig
from sglang_ssd.core.speculation_cache import SpeculationCache
from toys.drafter_checks import (
    FLOAT64,
    RecordingModel,
    assert_kv_is_fresh,
    assert_replies_continue,
    continuation,
    largest_branch_difference_when_idle,
)
from toys.outcomes import EVENTS, Event, force, guess
from toys.toy_draft_model import ToyDraftModel
from toys.toy_target import ToyTarget
from toys.tree import guesses

PROMPT = [5, 9, 2, 33, 17, 4]


def served_target(backup: str, *, warm_rounds: int = 2) -> tuple[ToyTarget, RecordingModel]:
    """A target with one request whose chain and tree are complete."""
    model = RecordingModel(ToyDraftModel(seed=3))
    config = SsdConfig(fan_out=[2], backup=backup)
    target = ToyTarget(config=config, num_steps=4, draft_model=model)
    target.open("r", PROMPT)
    target.run_until_idle()
    for _ in range(warm_rounds):
        target.round()
    return target, model


@pytest.mark.parametrize("backup", ["jit", "none"])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_kv_feeds_and_answer_after_every_outcome(event: Event, backup: str) -> None:
    target, model = served_target(backup)
    request = target.requests["r"]
    model.calls.clear()
    model.branch_logits.clear()
    jit_steps = target.loop.status().jit_steps
    taken = force(target, request, event)
    assert taken.kind == event.kind
    assert len(taken.unfed_tokens) == event.num_unfed

    while not target.replies:
        target.step()
    (reply,) = target.replies
    assert_replies_continue(target, target.replies)
    difference, checked = largest_branch_difference_when_idle(target, model)
    extends = [count for kind, count in model.calls if kind == "extend"]
    passes = [count for kind, count in model.calls if kind == "branch"]
    decodes = target.loop.status().jit_steps - jit_steps
    merged, at_once = [9, 10, 10, 10, 2], [10] * 4
    if event.kind != "miss":
        assert reply.served == event.kind
        missing = 4 - len(taken.drafts)
        assert decodes == missing
        assert extends == [1] * missing
        assert passes == (merged if missing or event.num_unfed else at_once)
    elif backup == "jit":
        assert reply.served == "jit"
        assert decodes == 4
        assert extends == [event.num_unfed, 1, 1, 1]
        assert passes == merged
    else:
        assert reply.served == "none"
        assert decodes == 0
        assert extends == [event.num_unfed]
        assert passes == at_once
    assert difference < FLOAT64
    assert checked == sum(passes), "every row of every pass"
    assert len(reply.drafts) == (0 if reply.served == "none" else 4)
    assert_kv_is_fresh(target)


@pytest.mark.parametrize("backup", ["jit", "none"])
def test_all_branches_stand_at_position_0_while_there_is_no_chain(backup: str) -> None:
    """After prefill, and after a miss under backup none, N guesses of the next token alone."""
    target, _ = served_target(backup, warm_rounds=0)
    (seq,) = target.loop.table
    assert [one.position for one in guesses(seq.cache)] == [0] * 10
    guessed = [one.line[0] for one in guesses(seq.cache)]
    force(target, target.requests["r"], _only("miss at 0", guessed))
    target.run_until_idle()
    expected = [0] * 10 if backup == "none" else [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [one.position for one in guesses(seq.cache)] == expected


def _only(name: str, guessed: list[int]) -> Event:
    token = min(set(range(60)) - set(guessed))
    return Event(name=name, ids=lambda cache: [token], kind="miss", num_unfed=1)


class Winner(msgspec.Struct, frozen=True):
    """An ending of a round, and how many of its 4 drafts are ready after some passes."""

    name: str
    ids: Callable[[SpeculationCache], list[int]]
    num_ready: Callable[[int], int]


WINNERS = [
    Winner(
        "beside the chain",
        ids=lambda cache: [*cache.drafts[:1], guess(cache, 1, 1)[0]],
        num_ready=lambda passes: min(4, passes),
    ),
    Winner(
        "after the last draft",
        ids=lambda cache: [*cache.drafts, guess(cache, 4, 1)[0]],
        num_ready=lambda passes: passes - 1,
    ),
    Winner(
        "on the chain",
        ids=lambda cache: cache.drafts[:2],
        num_ready=lambda passes: min(4, 2 + passes),
    ),
]


@pytest.mark.parametrize("passes", range(1, 6))
@pytest.mark.parametrize("winner", WINNERS, ids=lambda winner: winner.name)
def test_an_outcome_in_the_middle_of_a_build_finishes_the_winner_alone(
    winner: Winner, passes: int
) -> None:
    """Losers are freed; only single-token forwards follow, as many as drafts are missing."""
    target, model = served_target("jit")
    request = target.requests["r"]
    target.verify(request)
    target.commit([request])
    target.step()  # answers and makes the first pass
    target.take_replies()
    for _ in range(passes - 1):
        target.step()
    (seq,) = target.loop.table
    steps = {one.position: len(one.slots) for one in guesses(seq.cache)}
    assert steps == {**dict.fromkeys(range(4), min(4, passes)), 4: passes - 1}
    request.tokens += winner.ids(seq.cache)
    model.calls.clear()
    jit_steps = target.loop.status().jit_steps
    target.commit([request])
    while not target.replies:
        target.step()
    (reply,) = target.replies
    ready = winner.num_ready(passes)
    assert (reply.served == "jit") == (ready == 0)
    assert len(reply.drafts) == 4
    assert_replies_continue(target, [reply])
    assert target.loop.status().jit_steps - jit_steps == 4 - ready
    assert model.calls[: 4 - ready] == [("extend", 1)] * (4 - ready)
    target.run_until_idle()
    assert_kv_is_fresh(target)


def test_two_outcomes_at_once_are_walked_in_order_and_answered_once() -> None:
    """The second meets a chain whose tree was not started: its bonus is a miss, no mistake."""
    target, model = served_target("jit")
    request = target.requests["r"]
    chain = target.loop.table.find(b"target", "r").cache
    for _ in range(2):
        target.verify(request)
        target.commit([request])
        request.acked = len(request.tokens)
        request.drafts = continuation(model, request.tokens, request.rule, 4)
    model.calls.clear()
    while not target.replies:
        target.step()
    (reply,) = target.replies
    assert reply.served == "jit"
    assert reply.base == len(request.tokens) == chain.committed_len
    assert reply.drafts == request.drafts
    target.run_until_idle()
    assert_kv_is_fresh(target)


def test_a_hit_is_answered_before_another_row_is_drafted() -> None:
    """One row's miss costs another row's hit nothing: not the drafts, not the time."""
    model = ToyDraftModel(seed=3)
    target = ToyTarget(config=SsdConfig(fan_out=[2]), num_steps=4, draft_model=model)
    for rid in ("hits", "misses"):
        target.open(rid, PROMPT if rid == "hits" else PROMPT[::-1])
    target.run_until_idle()
    target.round()
    target.round()
    hitting, missing = target.requests["hits"], target.requests["misses"]
    target.verify(hitting)
    seq = target.loop.table.find(b"target", "misses")
    guessed = {one.line[0] for one in guesses(seq.cache)} | set(seq.cache.drafts)
    missing.tokens.append(min(set(range(60)) - guessed))
    model.calls.clear()
    target.commit([missing, hitting])
    for arrived in target.transport.receive(0.0):
        target.loop._handle(arrived)
    target.loop._answer_ready()
    (sent,) = target.transport.outbox
    assert sent[1].rids == ["hits"]
    assert sent[1].served == ["hit"]
    assert model.calls == []
    target.step()
    while len(target.replies) < 2:
        target.step()
    assert [reply.served for reply in target.replies] == ["hit", "jit"]
    assert [call for call in model.calls if call[0] == "branch"] == []
