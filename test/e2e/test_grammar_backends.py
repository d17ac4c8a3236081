"""Every grammar backend: what takes tokens back speculates, others decode plainly; all are exact.

xgrammar, the default, has its cases in field_cases/test_fr14_constrained.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all
from harness.grammars import SCHEMA, TAG_AFTER_TRIGGER, TRIGGER_BIAS
from harness.prompts import encode, load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import ServerPool, ServerSpec

CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json_schema": SCHEMA},
    {"regex": "( [a-z]+){6,9}"},
    {"regex": r"[0-9]{3}-[a-z]{2,6}!"},
    {"regex": " (yes|no)", "ignore_eos": True},
)

OF_LLGUIDANCE: tuple[dict[str, Any], ...] = (
    {"ebnf": 'root ::= "the " ("red" | "green") " " ("house" | "boat") ("." | " " [a-z]+ ".")'},
    {"ebnf": 'root ::= (" " [a-z]+)+'},
    {"structural_tag": TAG_AFTER_TRIGGER},
)
"""Kinds that outlines does not have."""


@pytest.mark.parametrize(
    ("backend", "rolls_back", "kind"),
    [("llguidance", True, "self"), ("llguidance", True, "random"), ("outlines", False, "self")],
)
def test_grammars_of_a_backend(
    backend: Literal["llguidance", "outlines"],
    rolls_back: bool,
    kind: DrafterKind,
    target: Path,
    pool: ServerPool,
    reference_pool: ServerPool,
    spec_for: Any,
) -> None:
    """Red when a grammar is advanced over drafts that it cannot take back, or does not take back
    those that were wrong, or a neighbour pays."""
    flags = ("--grammar-backend", backend)
    server = pool.get(spec_for(kind, flags=flags))
    plain = ServerSpec(model=str(target), flags=(*flags, "--disable-overlap-schedule"))
    reference = Reference(reference_pool, plain)
    constraints = [*CONSTRAINTS]
    if backend == "llguidance":
        constraints += [with_trigger(server.spec.model, one) for one in OF_LLGUIDANCE]
    prompts = load_prompts(server.spec.model, 2 * len(constraints))
    cases = [
        Request(
            prompt.input_ids,
            {"max_new_tokens": 40, **(constraints[index // 2] if index % 2 else {})},
        )
        for index, prompt in enumerate(prompts)
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=8)
    assert_drafting(kind, counter.since(), some_declined=not rolls_back)
    assert_same(reference, cases, answers)
    for case, answer in zip(cases, answers, strict=True):
        assert "structural_tag" not in case.params or answer.text.startswith("<a>")
    if kind == "self":
        constrained = sum(answer.num_correct_drafts for answer in answers[1::2])
        assert (constrained > 0) == rolls_back
        assert sum(answer.num_correct_drafts for answer in answers[::2]) > 0


def with_trigger(model: str, constraint: dict[str, Any]) -> dict[str, Any]:
    """A tag's constraint with a bias for its trigger; of the others, themselves."""
    if "structural_tag" not in constraint:
        return constraint
    (trigger,) = encode(model, "<")
    return {**constraint, "logit_bias": {str(trigger): TRIGGER_BIAS}}
