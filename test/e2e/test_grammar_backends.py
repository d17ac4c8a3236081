"""Every grammar backend: what takes tokens back speculates, others decode plainly; all are exact.

xgrammar, the default, has its cases in field_cases/test_fr14_constrained.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from harness.client import Request, generate_all
from harness.grammars import SCHEMA
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import ServerPool, ServerSpec

CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMA},
    {"regex": "( [a-z]+){6,9}"},
    {"regex": r"[0-9]{3}-[a-z]{2,6}!"},
    {"regex": " (yes|no)", "ignore_eos": True},
)


@pytest.mark.parametrize(("backend", "rolls_back"), [("llguidance", True), ("outlines", False)])
def test_grammars_of_a_backend(
    backend: Literal["llguidance", "outlines"],
    rolls_back: bool,
    target: Path,
    pool: ServerPool,
    reference_pool: ServerPool,
    spec_for: Any,
) -> None:
    """Red when a grammar is advanced over drafts that it cannot take back, or a neighbour pays."""
    flags = ("--grammar-backend", backend)
    server = pool.get(spec_for("self", flags=flags))
    plain = ServerSpec(model=str(target), flags=(*flags, "--disable-overlap-schedule"))
    reference = Reference(reference_pool, plain)
    prompts = load_prompts(server.spec.model, 2 * len(CONSTRAINTS))
    cases = [
        Request(
            prompt.input_ids,
            {"max_new_tokens": 40, **(CONSTRAINTS[index // 2] if index % 2 else {})},
        )
        for index, prompt in enumerate(prompts)
    ]
    answers = generate_all(server.url, cases, concurrency=8)
    assert_same(reference, cases, answers)
    constrained = sum(answer.num_correct_drafts for answer in answers[1::2])
    assert (constrained > 0) == rolls_back
    assert sum(answer.num_correct_drafts for answer in answers[::2]) > 0
