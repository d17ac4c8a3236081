"""FR-17: a grammar that the drafter does not know costs drafts, which the numbers show."""

from __future__ import annotations

from typing import Any

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all
from harness.grammars import SCHEMA
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import assert_drafted
from harness.server import Server


def accept_length(answers: list[Answer]) -> float:
    num_rounds = sum(answer.meta_info["spec_verify_ct"] for answer in answers)
    return 1 + sum(answer.num_correct_drafts for answer in answers) / num_rounds


def most_correct(answers: list[Answer]) -> int:
    """Drafts of the best round."""
    histograms = [answer.meta_info["spec_correct_drafts_histogram"] for answer in answers]
    return max(num for one in histograms for num, count in enumerate(one) if count)


def test_fr_17(
    kind: DrafterKind, server: Server, reference: Reference, figures: dict[str, Any]
) -> None:
    """Red when drafts end with the first token under a schema, or the numbers hide that."""
    prompts = load_prompts(server.spec.model, 4)
    lengths = {}
    for name, constraint in {"free": {}, "schema": {"json_schema": SCHEMA}}.items():
        cases = [Request(p.input_ids, {"max_new_tokens": 32, **constraint}) for p in prompts]
        answers = generate_all(server.url, cases)
        assert_same(reference, cases, answers)
        lengths[name] = accept_length(answers)
        if kind == "self":
            assert_drafted(kind, answers)
            assert most_correct(answers) > 1, "drafts end with the first token"
    figures.update(lengths)
    if kind == "self":
        assert lengths["free"] > 2
