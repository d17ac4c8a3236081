"""Hidden states: one row per token, the target's own, cut where the answer is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harness.client import Request, generate_all
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import ServerPool, ServerSpec

FLAGS = ("--enable-return-hidden-states",)
MAX_DIFFERENCE = 1e-3
"""Between forwards of one row and of several, in float32; values are of the order of 10."""


def test_hidden_states_of_a_run(
    target: Path, pool: ServerPool, reference_pool: ServerPool, spec_for: Any
) -> None:
    """Red when a run's tokens get the rows of other places, or rows behind a stop leak out, or
    such a request decodes plainly."""
    server = pool.get(spec_for("self", flags=FLAGS))
    plain = ServerSpec(model=str(target), flags=(*FLAGS, "--disable-overlap-schedule"))
    reference = Reference(reference_pool, plain)
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
    answers = generate_all(server.url, cases, concurrency=6)
    assert_same(reference, cases, answers)
    for case, want, have in zip(cases, reference.answers(cases), answers, strict=True):
        assert have.num_correct_drafts > 0, f"{case} was decoded plainly"
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
