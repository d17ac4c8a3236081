"""Seeded sampling gives the same tokens with drafts as without, whatever becomes of the drafts."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from harness.checkpoints import KINDS, DrafterKind
from harness.client import Request, generate, generate_all, generate_copies
from harness.draws import FILTERS, NUM_TOKENS, assert_same_draws, seeded
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafted, assert_on_time
from harness.server import OVERLAP, Server, ServerPool
from harness.size import Size


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_give_the_same_tokens_as_without_drafts(
    kind: DrafterKind,
    size: Size,
    pool: ServerPool,
    drafts_off: Reference,
    spec_for: Any,
    figures: dict[str, Any],
) -> None:
    """Red when a token depends on a draft: fresh noise for the bonus, or a filter that lags."""
    server = pool.get(spec_for(kind, settings=OVERLAP if kind == "noisy" else ()))
    counter = RoundCounter(server)
    for name, params in FILTERS.items():
        cases = seeded(server.spec.model, size.num_seeds, params)
        answers = generate_all(server.url, cases, concurrency=4)
        figures[f"{name} rounding"] = assert_same_draws(drafts_off, cases, answers)
    rounds = counter.since()
    figures.update(rounds.summary(), seeds=size.num_seeds)
    assert_on_time(rounds)
    if kind == "self":
        assert rounds.correct_drafts > 0


def test_a_draw_does_not_depend_on_its_batch(
    pool: ServerPool, reference: Reference, drafts_off: Reference, spec_for: Any
) -> None:
    """Red when noise is keyed by the row, or greedy neighbours change how a row is drawn."""
    server = pool.get(spec_for("noisy"))
    cases = seeded(server.spec.model, 6, FILTERS["top-k"])
    cases += seeded(server.spec.model, 2, {"temperature": 0.7})
    greedy = [Request(case.prompt, {"max_new_tokens": NUM_TOKENS}) for case in cases[:2]]
    alone = [generate(server.url, case) for case in cases]
    together = generate_all(server.url, [*greedy, *cases], concurrency=10)
    assert_same(reference, greedy, together[: len(greedy)])
    for answers in (alone, together[len(greedy) :]):
        assert_same_draws(drafts_off, cases, answers)
        assert_drafted("noisy", answers)


def test_copies_of_a_seeded_request_differ_and_repeat(
    pool: ServerPool, drafts_off: Reference, spec_for: Any
) -> None:
    """Red when n=4 copies share one seed, or a copy's seed depends on the drafts."""
    server = pool.get(spec_for("noisy"))
    (case,) = seeded(server.spec.model, 1, {"temperature": 1.0, "n": 4})
    answers = generate_copies(server.url, case)
    assert_drafted("noisy", answers)
    copies = [copy.output_ids for copy in answers]
    assert len({tuple(ids) for ids in copies}) == 4
    assert copies == [copy.output_ids for copy in generate_copies(drafts_off.server.url, case)]
    (alone,) = seeded(server.spec.model, 1, {"temperature": 1.0})
    assert copies[0] == generate(server.url, alone).output_ids


def test_draws_are_draws(pool: ServerPool, spec_for: Any) -> None:
    """Red when requests without a seed repeat themselves, or sampled rows are decoded greedily."""
    server = pool.get(spec_for("self"))
    prompt = load_prompts(server.spec.model, 4)[3].input_ids
    case = Request(prompt, {"max_new_tokens": 8, "temperature": 1.0})
    answers = generate_all(server.url, [case] * 12)
    assert len({tuple(answer.output_ids[1:]) for answer in answers}) > 6


def test_draws_with_a_dead_drafter(
    pool: ServerPool, drafts_off: Reference, spec_for: Any, size: Size
) -> None:
    """Red when plain decoding after the drafter's death draws otherwise than a verify does, or
    copies of a seeded request do."""
    server = pool.take(spec_for("noisy", settings=(("restart_delay_s", 3600),)))
    try:
        server.drafter_process().send_signal(signal.SIGKILL)
        for params in FILTERS.values():
            cases = seeded(server.spec.model, min(20, size.num_seeds), params)
            answers = generate_all(server.url, cases, concurrency=4)
            assert_same_draws(drafts_off, cases, answers)
        (case,) = seeded(server.spec.model, 1, {"temperature": 1.0, "n": 3})
        want, have = (generate_copies(one.url, case) for one in (drafts_off.server, server))
        assert [copy.output_ids for copy in have] == [copy.output_ids for copy in want]
        _assert_no_drafts(server)
    finally:
        server.stop()


def _assert_no_drafts(server: Server) -> None:
    state = server.ssd()
    assert state["drafter_alive"] is False
    assert state["live_sequences"] == 0
