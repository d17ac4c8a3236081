"""FR-09: whatever ends an answer inside an accepted run cuts ids, text and logprobs there."""

from __future__ import annotations

import re

import pytest

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all, stream
from harness.prompts import STORY, encode, tokenizer_of
from harness.reference import Reference, assert_same
from harness.rounds import assert_drafted
from harness.server import Server

NUM_TOKENS = 24
OFFSETS = range(1, 12)
"""Through two runs of K + 1 tokens at K = 4, and one token further."""


def continuation(reference: Reference, story: tuple[int, ...]) -> list[int]:
    """What the target says after the story when nothing stops it."""
    (answer,) = reference.answers([Request(story, {"max_new_tokens": NUM_TOKENS})])
    return answer.output_ids


def assert_same_cuts(reference: Reference, cases: list[Request], got: list[Answer]) -> None:
    assert_same(reference, cases, got)
    for want, have in zip(reference.answers(cases), got, strict=True):
        assert have.meta_info["completion_tokens"] == want.meta_info["completion_tokens"]
        for key in ("output_token_logprobs", "output_top_logprobs"):
            assert len(have.meta_info.get(key, ())) == len(want.meta_info.get(key, ()))


@pytest.mark.parametrize("stop_kind", ["stop_token_ids", "stop", "stop_regex"])
def test_fr_09(stop_kind: str, kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when only a run's last token or a short tail of the text is searched, or a tail leaks."""
    story = encode(server.spec.model, STORY)
    tokenizer = tokenizer_of(server.spec.model)
    cases = []
    for offset in OFFSETS:
        token = continuation(reference, story)[offset]
        piece = tokenizer.decode([token])
        stop = {"stop_token_ids": [token], "stop": piece, "stop_regex": re.escape(piece)}[stop_kind]
        params = {"max_new_tokens": NUM_TOKENS, stop_kind: stop, "no_stop_trim": offset % 2 == 0}
        logprobs = {"return_logprob": True, "top_logprobs_num": 2} if offset % 3 == 0 else {}
        cases.append(Request(story, params, logprobs))
    answers = generate_all(server.url, cases)
    assert_same_cuts(reference, cases, answers)
    assert_drafted(kind, answers)
    for case in cases[2:9:3]:
        streamed = stream(server.url, case)
        assert_same_cuts(reference, [case], [streamed.answer])
        assert streamed.texts[-1] == streamed.answer.text


def test_fr_09_the_first_of_several(
    kind: DrafterKind, server: Server, reference: Reference
) -> None:
    """Red when a stop that is listed first wins over one that comes first in the same run."""
    story = encode(server.spec.model, STORY)
    said = continuation(reference, story)
    tokenizer = tokenizer_of(server.spec.model)
    cases = []
    for offset in OFFSETS:
        first, later = (tokenizer.decode([said[offset + i]]) for i in (0, 2))
        for stops in (
            {"stop": [later, first]},
            {"stop": [later], "stop_regex": [re.escape(first)]},
            {"stop": [later], "stop_token_ids": [said[offset]]},
        ):
            cases.append(Request(story, {"max_new_tokens": NUM_TOKENS, **stops}))
    answers = generate_all(server.url, cases)
    assert_same_cuts(reference, cases, answers)
    assert_drafted(kind, answers)


def test_fr_09_length_and_stop_in_one_run(
    kind: DrafterKind, server: Server, reference: Reference
) -> None:
    """Red when the length is checked before the stop, or ignore_eos is lost."""
    story = encode(server.spec.model, STORY)
    token = continuation(reference, story)[6]
    stop = {"stop_token_ids": [token]}
    cases = [Request(story, {"max_new_tokens": length, **stop}) for length in (5, 6, 7, 8)]
    cases += [Request(story, {"max_new_tokens": length}) for length in range(3, 13)]
    cases += [Request(story, {"max_new_tokens": 12, "ignore_eos": True, **stop})]
    answers = generate_all(server.url, cases)
    assert_same_cuts(reference, cases, answers)
    assert_drafted(kind, answers)
