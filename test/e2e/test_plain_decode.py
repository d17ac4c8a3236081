"""Custom logit processors: functions of a row speculate, others decode plainly, and both are right
beside other requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all
from harness.configurations import DRAFTERS
from harness.draws import assert_same_draws, seeded
from harness.processors import serialized
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server, ServerPool


class Processor(msgspec.Struct, frozen=True):
    name: str
    text: str
    params: dict[str, Any]
    speculates: bool
    prompt: tuple[int, ...] = ()
    """Ids behind the prompt's own."""


PROCESSORS = (
    Processor(
        "disallowed", DisallowedTokensLogitsProcessor.to_str(), {"token_ids": [28, 260, 198]}, True
    ),
    Processor(
        "n-grams",
        DeepseekOCRNoRepeatNGramLogitProcessor.to_str(),
        {"ngram_size": 2, "window_size": 40},
        True,
    ),
    Processor("thinking", serialized("ShortThought"), {"thinking_budget": 7}, True, (2,)),
    Processor("declared", serialized("BanRecentTokens"), {"window": 6}, True),
    Processor("stateful", serialized("CountCalls"), {"unused": 0}, False),
)


@pytest.fixture(scope="module", params=DRAFTERS.values(), ids=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> Any:
    """Its kind, and the settings of its server."""
    return request.param


@pytest.fixture
def kind(drafter: Any) -> DrafterKind:
    found: DrafterKind = drafter[0]
    return found


@pytest.fixture
def server(drafter: Any, pool: ServerPool, spec_for: Any) -> Server:
    kind, settings = drafter
    return pool.get(spec_for(kind, settings=settings))


def test_custom_logit_processors(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when a row sees another row's history, or a processor with a state is asked about rows
    that are thrown away, or a neighbour is changed."""
    prompts = load_prompts(server.spec.model, 4)
    cases = [_case(prompt.input_ids, one) for prompt in prompts for one in PROCESSORS]
    cases += [Request(prompt.input_ids, {"max_new_tokens": 40}) for prompt in prompts]
    answers = generate_all(server.url, cases, concurrency=6)
    assert_same(reference, cases, answers)
    for one, answer in zip(PROCESSORS * len(prompts), answers, strict=False):
        if not one.speculates:
            assert answer.num_correct_drafts == 0, one.name
    if kind == "self":
        by_name: dict[str, int] = {}
        for one, answer in zip(PROCESSORS * len(prompts), answers, strict=False):
            by_name[one.name] = by_name.get(one.name, 0) + answer.num_correct_drafts
        assert all(by_name[one.name] > 0 for one in PROCESSORS if one.speculates), by_name
        assert sum(answer.num_correct_drafts for answer in answers[-4:]) > 0


def test_custom_logit_processors_sampled(
    kind: DrafterKind, server: Server, drafts_off: Reference
) -> None:
    """Red when a draw depends on the drafts through a processor."""
    sampled = []
    for one in PROCESSORS:
        for case in seeded(server.spec.model, 2, {"temperature": 0.8, "top_k": 20}):
            params = {**case.params, "custom_params": one.params}
            options = {"custom_logit_processor": one.text}
            sampled.append(Request((*case.prompt, *one.prompt), params, options))  # type: ignore[misc]
    counter = RoundCounter(server)
    answers = generate_all(server.url, sampled, concurrency=6)
    assert_drafting(kind, counter.since(), some_declined=True)
    assert_same_draws(drafts_off, sampled, answers)


def _case(prompt: tuple[int, ...], one: Processor) -> Request:
    return Request(
        (*prompt, *one.prompt),
        {"max_new_tokens": 40, "custom_params": one.params},
        {"custom_logit_processor": one.text},
    )
