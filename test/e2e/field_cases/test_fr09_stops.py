"""FR-09: whatever ends an answer inside an accepted run cuts ids, text and logprobs there."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate_all, stream
from harness.prompts import STORY, encode, load_prompts, tokenizer_of
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server

NUM_TOKENS = 24
STOP_KINDS = ("stop_token_ids", "stop", "stop_regex", "across", "regex_across")
OFFSETS = range(1, 12)
"""Through two runs of K + 1 tokens at K = 4, and one token further."""


class Place(msgspec.Struct, frozen=True):
    """A token that the target says for the first time, far enough on to be met at any offset."""

    prompt: tuple[int, ...]
    said: list[int]
    index: int

    def at_offset(self, offset: int) -> tuple[int, ...]:
        """The prompt after which that token comes with so many others before it."""
        return (*self.prompt, *self.said[: self.index - offset])


def continuation(reference: Reference, prompt: tuple[int, ...]) -> list[int]:
    """What the target says after the prompt when nothing stops it."""
    (answer,) = reference.answers([Request(prompt, {"max_new_tokens": NUM_TOKENS})])
    return answer.output_ids


def find_place(reference: Reference, model: str) -> Place:
    """Where the token and the next but one are both new, as ids and as texts.

    A token that was said before would stop the answer there, at another offset than is meant.
    """
    tokenizer = tokenizer_of(model)
    for prompt in load_prompts(model, 8):
        said = continuation(reference, prompt.input_ids)
        for index in range(OFFSETS[-1], len(said) - 2):
            new = all(_is_new(tokenizer, said, place) for place in (index, index + 2))
            if new:
                return Place(prompt.input_ids, said, index)
    raise AssertionError("every prompt's answer repeats itself")


def _is_new(tokenizer: Any, said: list[int], index: int) -> bool:
    piece = tokenizer.decode([said[index]])
    return said[index] not in said[:index] and piece not in tokenizer.decode(said[:index])


def assert_same_cuts(reference: Reference, cases: list[Request], got: list[Answer]) -> None:
    assert_same(reference, cases, got)
    for want, have in zip(reference.answers(cases), got, strict=True):
        assert have.meta_info["completion_tokens"] == want.meta_info["completion_tokens"]
        for key in ("output_token_logprobs", "output_top_logprobs"):
            assert len(have.meta_info.get(key, ())) == len(want.meta_info.get(key, ()))


def stop_of(stop_kind: str, before: str, piece: str, token: int) -> dict[str, Any]:
    across = (before + piece)[1:]
    stops = {
        "stop_token_ids": {"stop_token_ids": [token]},
        "stop": {"stop": piece},
        "stop_regex": {"stop_regex": re.escape(piece)},
        "across": {"stop": across},
        "regex_across": {"stop_regex": re.escape(across)},
    }
    return stops[stop_kind]


@pytest.mark.parametrize("stop_kind", STOP_KINDS)
def test_fr_09(stop_kind: str, kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when only a run's last token or a short tail of the text is searched, or a tail leaks.

    A stop across tokens begins within the one before; either may be the first of its run.
    """
    tokenizer = tokenizer_of(server.spec.model)
    place = find_place(reference, server.spec.model)
    token = place.said[place.index]
    before, piece = (tokenizer.decode([place.said[place.index + i]]) for i in (-1, 0))
    cases = []
    for offset in OFFSETS:
        stop = stop_of(stop_kind, before, piece, token)
        params = {"max_new_tokens": NUM_TOKENS, **stop, "no_stop_trim": offset % 2 == 0}
        logprobs = {"return_logprob": True, "top_logprobs_num": 2} if offset % 3 == 0 else {}
        cases.append(Request(place.at_offset(offset), params, logprobs))
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases)
    assert_drafting(kind, counter.since())
    assert_same_cuts(reference, cases, answers)
    assert lengths_of(answers) == [offset + 1 for offset in OFFSETS]
    with ThreadPoolExecutor(4) as clients:
        streams = list(clients.map(partial(stream, server.url), cases))
    assert_same_cuts(reference, cases, [streamed.answer for streamed in streams])
    assert all(streamed.texts[-1] == streamed.answer.text for streamed in streams)


def lengths_of(answers: list[Answer]) -> list[int]:
    return [answer.meta_info["completion_tokens"] for answer in answers]


@pytest.mark.parametrize("stop_kind", STOP_KINDS)
def test_fr_09_caps_around_a_stop(
    stop_kind: str, kind: DrafterKind, server: Server, reference: Reference
) -> None:
    """Red when a cap before, at or behind a stop ends the answer in its place, or ignore_eos keeps
    other stops than ids from ending one."""
    tokenizer = tokenizer_of(server.spec.model)
    place = find_place(reference, server.spec.model)
    token = place.said[place.index]
    before, piece = (tokenizer.decode([place.said[place.index + i]]) for i in (-1, 0))
    stop = stop_of(stop_kind, before, piece, token)
    cases, lengths = [], []
    for offset in OFFSETS:
        caps = [{"max_new_tokens": offset + more} for more in range(3)]
        uncapped = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        cases += [Request(place.at_offset(offset), {**cap, **stop}) for cap in (*caps, uncapped)]
        end = NUM_TOKENS if stop_kind == "stop_token_ids" else offset + 1
        lengths += [offset, offset + 1, offset + 1, end]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases)
    assert_drafting(kind, counter.since())
    assert_same_cuts(reference, cases, answers)
    assert lengths_of(answers) == lengths


def test_fr_09_the_first_of_several(
    kind: DrafterKind, server: Server, reference: Reference
) -> None:
    """Red when a stop that is listed first wins over one that comes first in the same run."""
    tokenizer = tokenizer_of(server.spec.model)
    place = find_place(reference, server.spec.model)
    token = place.said[place.index]
    first, later = (tokenizer.decode([place.said[place.index + i]]) for i in (0, 2))
    ways: tuple[dict[str, Any], ...] = (
        {"stop": [later, first]},
        {"stop": [later], "stop_regex": [re.escape(first)]},
        {"stop": [later], "stop_token_ids": [token]},
    )
    cases = [
        Request(place.at_offset(offset), {"max_new_tokens": NUM_TOKENS, **stops})
        for offset in OFFSETS
        for stops in ways
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases)
    assert_drafting(kind, counter.since())
    assert_same_cuts(reference, cases, answers)
    assert lengths_of(answers) == [offset + 1 for offset in OFFSETS for _ in ways]


def test_fr_09_length_and_stop_in_one_run(
    kind: DrafterKind, server: Server, reference: Reference
) -> None:
    """Red when the length is checked before the stop, or ignore_eos is lost."""
    story = encode(server.spec.model, STORY)
    said = continuation(reference, story)
    assert said[6] not in said[:6]
    stop = {"stop_token_ids": [said[6]]}
    cases = [Request(story, {"max_new_tokens": length, **stop}) for length in (5, 6, 7, 8)]
    cases += [Request(story, {"max_new_tokens": length}) for length in range(3, 13)]
    cases += [Request(story, {"max_new_tokens": 12, "ignore_eos": True, **stop})]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases)
    assert_drafting(kind, counter.since())
    assert_same_cuts(reference, cases, answers)
    assert lengths_of(answers) == [5, 6, 7, 7, *range(3, 13), 12]
