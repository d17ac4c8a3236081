"""Features of requests beside the field cases, with a drafter whose drafts are all right.

The same-weights drafter commits K+1 tokens a round, so a feature that looks at one token a round,
or at the last one, shows. Each case is compared with the server without speculation, and must have
had drafts accepted, or it would compare plain decoding with itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.client import Answer, Request, generate_all, generate_copies, stream
from harness.prompts import CHAT, STORY, tokenizer_of
from harness.reference import Reference, assert_same
from harness.server import Server, ServerPool

NUM_STEPS = 4


@pytest.fixture
def server(pool: ServerPool, spec_for: Any) -> Server:
    return pool.get(spec_for("self", num_steps=NUM_STEPS))


def check(
    server: Server, reference: Reference, cases: list[Request], *, concurrency: int = 4
) -> list[Answer]:
    """All answers equal the reference's, and drafts were accepted where there was room for them.

    A short answer may end before the drafter has prefilled its prompt; not all of them do.
    """
    answers = generate_all(server.url, cases, concurrency=concurrency)
    assert_same(reference, cases, answers)
    for request, answer in zip(cases, answers, strict=True):
        if len(answer.output_ids) > 4 * (NUM_STEPS + 1):
            assert answer.num_correct_drafts > 0, f"{request} was decoded plainly"
    assert sum(answer.num_correct_drafts for answer in answers) > 0, "all were decoded plainly"
    return answers


@pytest.fixture
def story_ids(server: Server) -> tuple[int, ...]:
    return tuple(tokenizer_of(server.spec.model).encode(STORY))


def test_end_of_text_inside_a_run(server: Server, reference: Reference) -> None:
    """Red when tokens are committed behind the end of the text, or ignore_eos stops there."""
    prompt = tuple(tokenizer_of(server.spec.model).encode(CHAT))
    ends, goes_on = check(
        server,
        reference,
        [
            Request(prompt, {"max_new_tokens": 64}),
            Request(prompt, {"max_new_tokens": 64, "ignore_eos": True}),
        ],
    )
    assert ends.finish["type"] == "stop"
    assert len(goes_on.output_ids) == 64


def test_copies_and_streams(
    server: Server, reference: Reference, story_ids: tuple[int, ...]
) -> None:
    """Red when several tokens in one chunk lose text, or the copies of n=2 share drafter state."""
    case = Request(story_ids, {"max_new_tokens": 30})
    (expected,) = reference.answers([case])
    copies = generate_copies(server.url, Request(story_ids, {"max_new_tokens": 30, "n": 2}))
    assert [copy.output_ids for copy in copies] == [expected.output_ids] * 2
    assert all(copy.num_correct_drafts > 0 for copy in copies)
    for interval in (1, 3):
        options = {"stream_interval": interval}
        streamed = stream(server.url, Request(story_ids, {"max_new_tokens": 30, **options}))
        assert streamed.answer.output_ids == expected.output_ids
        assert streamed.texts[-1] == expected.text
        for shorter, longer in zip(streamed.texts, streamed.texts[1:], strict=False):
            assert longer.startswith(shorter)


def test_prefix_hits(server: Server, reference: Reference, story_ids: tuple[int, ...]) -> None:
    """Red when a prompt whose prefix is cached gives the drafter another prompt than the target."""
    case = Request((*story_ids, 28, 339, 436), {"max_new_tokens": 24})
    check(server, reference, [case])
    (again,) = check(server, reference, [case])
    assert again.meta_info["cached_tokens"] > 0
    longer = Request((*case.prompt, *again.output_ids[:9]), {"max_new_tokens": 16})  # type: ignore[misc]
    check(server, reference, [longer])
