"""FR-08: requests of one prompt at different temperatures are each drawn by their own.

The law of the draws, chi-square over many of them, is test_sampling_law.py's; this is that no draw
depends on its neighbours' temperatures, nor on what the drafter takes the temperature to be.
"""

from __future__ import annotations

from typing import Any

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all
from harness.draws import assert_same_draws
from harness.processors import serialized
from harness.prompts import STORY, encode
from harness.reference import Reference
from harness.rounds import RoundCounter, assert_drafted, assert_drafting
from harness.server import Server

TEMPERATURES = (0.2, 1.5, 1.3)
NUM_SEEDS = 4
NUM_TOKENS = 24


def seeded(prompt: tuple[int, ...], **params: Any) -> list[Request]:
    seeds = range(800, 800 + NUM_SEEDS)
    full = {"max_new_tokens": NUM_TOKENS, **params}
    return [Request(prompt, {**full, "sampling_seed": seed}) for seed in seeds]


def test_fr_08(kind: DrafterKind, server: Server, drafts_off: Reference) -> None:
    """Red when rows of one prompt share a temperature, a cached outcome or a draft."""
    story = encode(server.spec.model, STORY)
    by_temperature = [seeded(story, temperature=one) for one in TEMPERATURES]
    cases = [case for row in zip(*by_temperature, strict=True) for case in row]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=len(cases))
    assert_drafting(kind, counter.since())
    assert_same_draws(drafts_off, cases, answers)
    assert_drafted(kind, answers[:: len(TEMPERATURES)])
    assert len({tuple(answer.output_ids) for answer in answers}) > len(TEMPERATURES)


def test_fr_08_another_temperature_than_the_drafter_knows(
    kind: DrafterKind, server: Server, drafts_off: Reference
) -> None:
    """Red when a draft drawn at a lower temperature is accepted for being drawn.

    A processor, of which the drafter hears nothing, makes a temperature of 1 into one of 1.3.
    """
    story = encode(server.spec.model, STORY)
    flatter = {"custom_logit_processor": serialized("Flatter")}
    params = {"temperature": 1.0, "custom_params": {"factor": 1.3}}
    cases = [Request(case.prompt, case.params, flatter) for case in seeded(story, **params)]
    cases += seeded(story, temperature=0.2)
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=len(cases))
    assert_drafting(kind, counter.since())
    assert_same_draws(drafts_off, cases, answers)
    assert_drafted(kind, answers[:NUM_SEEDS])
    plainly = drafts_off.answers(seeded(story, temperature=1.0))
    assert [a.output_ids for a in answers[:NUM_SEEDS]] != [a.output_ids for a in plainly]
