"""Greedy output in every pair of settings: a pairwise table of server configurations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from harness.client import Answer, Request, generate_all, stream
from harness.configurations import TABLE, Row, spec_of
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import MIN_ON_TIME, RoundCounter
from harness.server import Server, ServerPool

NUM_PROMPTS = 8
NUM_TOKENS = 48
NUM_ALWAYS = 2
"""So many rows run for every commit; the others are marked slow."""


def test_table_covers_every_pair() -> None:
    """Red when a row is changed and a pair of settings is no longer run together."""
    rows = [msgspec.structs.astuple(row) for row in TABLE]
    columns = [set(values) for values in zip(*rows, strict=True)]
    for first in range(len(columns)):
        for second in range(first):
            met = {(row[first], row[second]) for row in rows}
            assert len(met) == len(columns[first]) * len(columns[second]), (first, second)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=row.name,
            marks=[] if index < NUM_ALWAYS else [pytest.mark.slow],
        )
        for index, row in enumerate(TABLE)
    ],
)
def test_greedy_output_in_every_configuration(
    row: Row,
    pool: ServerPool,
    reference: Reference,
    spec_for: Any,
    figures: dict[str, Any],
) -> None:
    """Red when one setting breaks identity in the company of another."""
    server = pool.get(spec_of(row, spec_for))
    requests = [
        Request(prompt.input_ids, {"max_new_tokens": NUM_TOKENS})
        for prompt in load_prompts(server.spec.model, NUM_PROMPTS)
    ]
    counter = RoundCounter(server)
    found = 0
    for answers in _one_by_one_streamed_and_batched(server, requests):
        found = max(found, len(assert_same(reference, requests[: len(answers)], answers)))
    rounds = counter.since()
    figures.update(rounds.summary(), rounding=found)
    assert rounds.on_time_rate >= MIN_ON_TIME


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
