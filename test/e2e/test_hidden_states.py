"""Hidden states: one row per token, the target's own, cut where the answer is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all, stream
from harness.configurations import DRAFTERS
from harness.prompts import load_prompts
from harness.reference import assert_same, plain_reference
from harness.rounds import RoundCounter, assert_drafted
from harness.server import ServerPool

FLAGS = ("--enable-return-hidden-states",)
MAX_DIFFERENCE = 1e-3
"""Between forwards of one row and of several, in float32; values are of the order of 10."""


@pytest.mark.parametrize(("kind", "settings"), DRAFTERS.values(), ids=DRAFTERS)
def test_hidden_states_of_a_run(
    kind: DrafterKind,
    settings: Any,
    target: Path,
    pool: ServerPool,
    reference_pool: ServerPool,
    spec_for: Any,
) -> None:
    """Red when a run's tokens get the rows of other places, or rows behind a stop leak out, whole
    or streamed, or such a request decodes plainly."""
    server = pool.get(spec_for(kind, flags=FLAGS, settings=settings))
    reference = plain_reference(reference_pool, target, FLAGS)
    prompts = load_prompts(server.spec.model, 3)
    (free,) = reference.answers([Request(prompts[0].input_ids, {"max_new_tokens": 12})])
    stop = {"stop_token_ids": [free.output_ids[7]]}
    wanted = {"return_hidden_states": True}
    cases = [
        *(Request(one.input_ids, {"max_new_tokens": 24}, wanted) for one in prompts),
        Request(prompts[0].input_ids, {"max_new_tokens": 24, **stop}, wanted),
        Request(prompts[1].input_ids, {"max_new_tokens": 24}, {"return_hidden_states": "last"}),
        Request(prompts[2].input_ids, {"max_new_tokens": 24}),
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=6)
    streamed = [stream(server.url, case).answer for case in cases]
    rounds = counter.since()
    assert rounds.drafted_rows > 0
    assert "parameter" not in rounds.plain_decode
    for got in (answers, streamed):
        assert_drafted(kind, got)
        if kind == "self":
            assert all(answer.num_correct_drafts > 0 for answer in got)
        assert_same(reference, cases, got)
        for case, want, have in zip(cases, reference.answers(cases), got, strict=True):
            assert_same_rows(case, want, have)


def assert_same_rows(case: Request, want: Answer, have: Answer) -> None:
    expected = [_rows(one) for one in want.meta_info.get("hidden_states", [])]
    got = [_rows(one) for one in have.meta_info.get("hidden_states", [])]
    # A prefill gives the rows that no cache had, so their number may differ.
    assert [rows[-1].shape for rows in got] == [rows[-1].shape for rows in expected]
    if case.options.get("return_hidden_states") is True:
        assert len(got) == len(have.output_ids)
    for a, b in zip(expected, got, strict=True):
        assert float((a[-1:] - b[-1:]).abs().max()) < MAX_DIFFERENCE


def _rows(value: Any) -> torch.Tensor:
    """A prompt's rows, or one token's."""
    rows = torch.tensor(value)
    return rows if rows.dim() == 2 else rows.reshape(1, -1)
