"""The same output in every pair of settings, in --ssd-mode sync and at the default deadline."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all, stream
from harness.configurations import TABLE, Row, spec_of
from harness.draws import FILTERS, assert_same_draws, seeded
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, Rounds, assert_on_time
from harness.server import Server, ServerPool
from sglang_ssd.config import SsdConfig

NUM_PROMPTS = 8
NUM_TOKENS = 48
NUM_SEEDS = 8
"""For each filter, without overlap; with overlap there are more in test_sampled_identity."""


def greedy_requests(server: Server) -> list[Request]:
    prompts = load_prompts(server.spec.model, NUM_PROMPTS)
    return [Request(prompt.input_ids, {"max_new_tokens": NUM_TOKENS}) for prompt in prompts]


def test_table_covers_every_pair() -> None:
    """Red when a row is changed and a pair of settings is no longer run together."""
    rows = [msgspec.structs.astuple(row) for row in TABLE]
    columns = [set(values) for values in zip(*rows, strict=True)]
    for first in range(len(columns)):
        for second in range(first):
            met = {(row[first], row[second]) for row in rows}
            assert len(met) == len(columns[first]) * len(columns[second]), (first, second)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in TABLE])
def test_greedy_output_in_every_configuration(
    row: Row,
    pool: ServerPool,
    reference: Reference,
    drafts_off: Reference,
    spec_for: Any,
    figures: dict[str, Any],
) -> None:
    """Red when one setting breaks identity in the company of another."""
    server = pool.get(spec_of(row, spec_for))
    requests = greedy_requests(server)
    counter = RoundCounter(server)
    found = 0
    for answers in _one_by_one_streamed_and_batched(server, requests):
        found = max(found, len(assert_same(reference, requests[: len(answers)], answers)))
    rounds = counter.since()
    figures.update(rounds.summary(), rounding=found)
    _assert_drafted(row, rounds)
    if not row.overlap:
        for params in FILTERS.values():
            draws = seeded(server.spec.model, NUM_SEEDS, params)
            assert_same_draws(drafts_off, draws, generate_all(server.url, draws))


def _assert_drafted(row: Row, rounds: Rounds) -> None:
    """Under backup none only hits have drafts: some, unless the drafter is always wrong."""
    if row.backup == "jit":
        assert_on_time(rounds)
        return
    assert_on_time(rounds, min_drafted=0.0)
    assert rounds.drafted_rows > 0 or row.drafter == "random", rounds


def _one_by_one_streamed_and_batched(server: Server, requests: list[Request]) -> list[list[Answer]]:
    """The batch first, so that what follows finds its prompts in the prefix cache."""
    batched = generate_all(server.url, requests, concurrency=4)
    streamed = [stream(server.url, request) for request in requests[:2]]
    assert all(s.texts[-1] == s.answer.text for s in streamed)
    assert all(
        answer.meta_info["cached_tokens"] > 0
        for answer, request in zip([s.answer for s in streamed], requests, strict=False)
        if len(request.prompt) > 2
    )
    return [batched, [s.answer for s in streamed]]


@pytest.mark.parametrize("kind", ["self", "noisy"])
def test_ordinary_speculative_decoding(
    kind: DrafterKind,
    pool: ServerPool,
    reference: Reference,
    drafts_off: Reference,
    spec_for: Any,
    figures: dict[str, Any],
) -> None:
    """Red when --ssd-mode sync drafts behind the wrong prefix, drops replies or caches outcomes."""
    server = pool.get(spec_for(kind, settings=(("mode", "sync"),)))
    counter = RoundCounter(server)
    greedy = greedy_requests(server)
    found = assert_same(reference, greedy, generate_all(server.url, greedy))
    long_answers = counter.since()
    assert_on_time(long_answers)
    if kind == "self":
        assert long_answers.accept_length("sync") >= 0.95 * (server.spec.num_steps + 1)
    for params in FILTERS.values():
        draws = seeded(server.spec.model, 12, params)
        assert_same_draws(drafts_off, draws, generate_all(server.url, draws))
    rounds = counter.since()
    figures.update(rounds.summary(), rounding=len(found))
    assert set(rounds.served) == {"sync"}
    assert_on_time(rounds)
    assert rounds.correct_drafts > 0
    if kind == "self":
        assert rounds.accept_length("sync") >= 0.9 * (server.spec.num_steps + 1)


def test_greedy_output_at_the_default_deadline(
    pool: ServerPool, reference: Reference, spec_for: Any, figures: dict[str, Any]
) -> None:
    """Red when drafts that come too late for their round are taken for another's: here some do."""
    defaults = SsdConfig()
    names = ("reply_deadline_ms", "reply_deadline_min_ms")
    settings = tuple((name, getattr(defaults, name)) for name in names)
    server = pool.get(spec_for("noisy", settings=settings))
    counter = RoundCounter(server)
    requests = greedy_requests(server)
    assert_same(reference, requests, generate_all(server.url, requests))
    rounds = counter.since()
    figures.update(rounds.summary())
    assert rounds.correct_drafts > 0
