"""Every request feature that speculation honours, with a drafter whose drafts are all right.

The same-weights drafter commits K+1 tokens a round, so a feature that looks at one token a round,
or at the last one, shows. Each case is compared with the server without speculation, and must have
had drafts accepted, or it would compare plain decoding with itself.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests as http

from harness.checkpoints import DrafterKind
from harness.client import (
    Answer,
    Request,
    generate,
    generate_all,
    generate_copies,
    start_and_leave,
    stream,
)
from harness.prompts import load_prompts, tokenizer_of
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter
from harness.server import Server, ServerPool
from harness.size import Size

NUM_STEPS = 4
STORY = "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who"
CHAT = "<|im_start|>user\nSay yes or no: is water wet?<|im_end|>\n<|im_start|>assistant\n"
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
        "required": ["city", "old"],
    }
)
EBNF = 'root ::= "the " ("red" | "green") " " ("house" | "boat") "."'


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


@pytest.fixture
def continuation(reference: Reference, story_ids: tuple[int, ...]) -> list[int]:
    """What the target says after the story when nothing stops it."""
    (answer,) = reference.answers([Request(story_ids, {"max_new_tokens": 32})])
    return answer.output_ids


def test_stop_token_at_every_offset_of_a_run(
    server: Server, reference: Reference, story_ids: tuple[int, ...], continuation: list[int]
) -> None:
    """Red when a stop token inside an accepted run is missed, or tokens behind it leak."""
    cases = [
        Request(story_ids, {"max_new_tokens": 24, "stop_token_ids": [continuation[offset]]})
        for offset in range(1, 2 * NUM_STEPS + 4)
    ]
    check(server, reference, cases)


@pytest.mark.parametrize("stop_kind", ["stop", "stop_regex"])
def test_stop_text_at_every_offset_of_a_run(
    server: Server,
    reference: Reference,
    story_ids: tuple[int, ...],
    continuation: list[int],
    stop_kind: str,
) -> None:
    """Red when only the last token or a short tail of the text is searched after a round."""
    tokenizer = tokenizer_of(server.spec.model)
    cases = []
    for offset in range(1, 2 * NUM_STEPS + 4):
        piece = tokenizer.decode(continuation[offset : offset + 1])
        stop = re.escape(piece) if stop_kind == "stop_regex" else piece
        keep = {"no_stop_trim": offset % 2 == 0}
        cases.append(Request(story_ids, {"max_new_tokens": 24, stop_kind: stop, **keep}))
    check(server, reference, cases)


def test_length_and_stop_in_the_same_run(
    server: Server, reference: Reference, story_ids: tuple[int, ...], continuation: list[int]
) -> None:
    """Red when the length is checked before the stop, or the first tokens count differently."""
    cases = [Request(story_ids, {"max_new_tokens": length}) for length in range(12)]
    stop = {"stop_token_ids": [continuation[6]]}
    cases += [Request(story_ids, {"max_new_tokens": length, **stop}) for length in (5, 6, 7, 8)]
    first = {"stop_token_ids": [continuation[0]]}
    cases += [Request(story_ids, {"max_new_tokens": length, **first}) for length in (1, 2, 3)]
    check(server, reference, cases)


def test_one_token_requests_never_reach_the_drafter(
    server: Server, story_ids: tuple[int, ...]
) -> None:
    """Red when scoring or health checks open a sequence on the drafter."""
    counter = RoundCounter(server)
    generate_all(server.url, [Request(story_ids, {"max_new_tokens": length}) for length in (0, 1)])
    assert server.healthy()
    assert counter.since().rounds == 0
    assert server.ssd()["live_sequences"] == 0


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


def test_logit_bias_reaches_every_row(
    server: Server, reference: Reference, continuation: list[int], story_ids: tuple[int, ...]
) -> None:
    """Red when a banned token that was drafted is accepted, or a neighbour is biased too."""
    banned = sorted(set(continuation), key=continuation.count)[-5:]
    bias = {str(token): -100.0 for token in banned}
    wanted = {str(continuation[3]): 4.0}
    cases = [
        Request(story_ids, {"max_new_tokens": 40, "logit_bias": bias}),
        Request(story_ids, {"max_new_tokens": 40}),
        Request(story_ids, {"max_new_tokens": 40, "logit_bias": wanted}),
        Request(story_ids[:-1], {"max_new_tokens": 40, "logit_bias": bias}),
    ]
    answers = generate_all(server.url, cases)
    assert_same(reference, cases, answers)
    assert not set(banned) & {*answers[0].output_ids, *answers[3].output_ids}
    assert answers[1].num_correct_drafts > 0
    assert answers[2].num_correct_drafts > 0


LOGPROB_KEYS = ("input_token_logprobs", "output_token_logprobs")
RANKED_KEYS = ("output_top_logprobs", "output_token_ids_logprobs", "input_top_logprobs")


def test_logprobs_are_the_targets(
    server: Server, reference: Reference, story_ids: tuple[int, ...], continuation: list[int]
) -> None:
    """Red when a run's tokens get the logprobs of another row, or none, or too many."""
    options: dict[str, Any] = {
        "return_logprob": True,
        "top_logprobs_num": 3,
        "token_ids_logprob": [11, 42, 300],
    }
    stop = {"stop_token_ids": [continuation[7]]}
    cases = [
        Request(story_ids, {"max_new_tokens": 20}, options),
        Request(story_ids, {"max_new_tokens": 20}),
        Request(story_ids[:-2], {"max_new_tokens": 20}, {**options, "logprob_start_len": 0}),
        Request(story_ids, {"max_new_tokens": 20, **stop}, options),
    ]
    answers = check(server, reference, cases)
    for want, have in zip(reference.answers(cases), answers, strict=True):
        for key in LOGPROB_KEYS:
            _assert_close(want.meta_info.get(key), have.meta_info.get(key))
        for key in RANKED_KEYS:
            expected, got = want.meta_info.get(key) or [], have.meta_info.get(key) or []
            assert len(expected) == len(got), key
            for a, b in zip(expected, got, strict=True):
                _assert_close(a, b)
    assert len(answers[0].meta_info["output_token_logprobs"]) == 20
    assert "output_token_logprobs" not in answers[1].meta_info


def _assert_close(expected: list[Any] | None, got: list[Any] | None) -> None:
    """Lists of (logprob, token, text) with equal tokens and logprobs within 1e-3."""
    assert (expected is None) == (got is None)
    for a, b in zip(expected or [], got or [], strict=True):
        assert a[1] == b[1]
        assert a[0] == b[0] or abs(a[0] - b[0]) < 1e-3


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


def test_streams_of_many_bytes_a_character(server: Server, reference: Reference) -> None:
    """Red when a character that spans two tokens, or two rounds, comes out garbled."""
    names = {"emoji", "cjk", "mixed"}
    prompts = [p for p in load_prompts(server.spec.model, 40) if p.name in names]
    cases = [Request(prompt.input_ids, {"max_new_tokens": 40}) for prompt in prompts]
    streams = [stream(server.url, case) for case in cases]
    assert_same(reference, cases, [streamed.answer for streamed in streams])
    for streamed in streams:
        for text in streamed.texts[:-1]:
            assert streamed.answer.text.startswith(text)


def test_prefix_hits(server: Server, reference: Reference, story_ids: tuple[int, ...]) -> None:
    """Red when a prompt whose prefix is cached gives the drafter another prompt than the target."""
    case = Request((*story_ids, 28, 339, 436), {"max_new_tokens": 24})
    check(server, reference, [case])
    (again,) = check(server, reference, [case])
    assert again.meta_info["cached_tokens"] > 0
    longer = Request((*case.prompt, *again.output_ids[:9]), {"max_new_tokens": 16})  # type: ignore[misc]
    check(server, reference, [longer])


def test_meta_info_numbers_are_true(server: Server, story_ids: tuple[int, ...], size: Size) -> None:
    """Red when the accept lengths that SGLang is told are not those of the rounds."""
    prompts = load_prompts(server.spec.model, size.num_prompts)
    cases = [Request(p.input_ids, {"max_new_tokens": 24, "ignore_eos": True}) for p in prompts]
    answers = generate_all(server.url, cases)
    for meta in [answer.meta_info for answer in answers]:
        rounds, correct = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        histogram = meta["spec_correct_drafts_histogram"]
        assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / rounds)
        assert meta["spec_num_proposed_drafts"] == rounds * NUM_STEPS
        assert meta["spec_accept_rate"] == pytest.approx(correct / (rounds * NUM_STEPS))
        assert meta["spec_accept_rate"] <= 1
        assert sum(histogram) == rounds
        assert sum(k * count for k, count in enumerate(histogram)) == correct
        # The prefill's token, then k + 1 a round; the last round may be cut by the length.
        assert 0 <= 1 + rounds + correct - meta["completion_tokens"] <= NUM_STEPS
    info = http.get(f"{server.url}/server_info", timeout=30).json()["internal_states"][0]
    assert 1.0 <= info["avg_spec_accept_length"] <= NUM_STEPS + 1


def test_clients_that_go_away(
    size: Size, server: Server, reference: Reference, story_ids: tuple[int, ...]
) -> None:
    """Red when an aborted request, running, prefilling or queued, leaves anything behind."""
    long = Request(story_ids, {"max_new_tokens": 1500, "ignore_eos": True})
    queued = 0.5 / size.num_disconnects
    with ThreadPoolExecutor(size.num_disconnects) as clients:
        for index in range(size.num_disconnects):
            clients.submit(start_and_leave, server.url, long, after_s=index * queued)
    with ThreadPoolExecutor(2) as clients:
        named = Request(story_ids, long.params, {"rid": "to-be-aborted"})
        running = clients.submit(generate, server.url, named)
        time.sleep(1.0)
        http.post(f"{server.url}/abort_request", json={"rid": "to-be-aborted"}, timeout=30)
        assert running.result().finish["type"] == "abort"
    _wait_until_drained(server)
    (after,) = check(server, reference, [Request(story_ids, {"max_new_tokens": 32})])
    assert after.meta_info["spec_accept_length"] >= NUM_STEPS


def _wait_until_drained(server: Server) -> None:
    deadline = time.monotonic() + 30
    while server.ssd()["live_sequences"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.ssd()["live_sequences"] == 0


@pytest.mark.parametrize("kind", ["self", "random"])
def test_grammars_beside_plain_requests(
    kind: DrafterKind, size: Size, pool: ServerPool, reference: Reference, spec_for: Any
) -> None:
    """Red when the grammar's state and the accepted run get out of step, or leak to a neighbour."""
    server = pool.get(spec_for(kind, num_steps=NUM_STEPS))
    constraints = [
        {"json_schema": SCHEMA},
        {"regex": r"(yes|no)"},
        {"ebnf": EBNF},
        {"regex": r"[0-9]{3}-[a-z]{2,6}!"},
        {"json_schema": json.dumps({"type": "string", "const": "exactly this and nothing else"})},
    ]
    prompts = load_prompts(server.spec.model, size.num_constrained)
    cases = [
        Request(
            prompt.input_ids,
            {"max_new_tokens": 40, **(constraints[index // 2 % 5] if index % 2 else {})},
        )
        for index, prompt in enumerate(prompts)
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=6)
    assert_same(reference, cases, answers)
    for case, answer in zip(cases, answers, strict=True):
        if "regex" in case.params:
            assert re.fullmatch(case.params["regex"], answer.text)
        if "json_schema" in case.params and answer.finish["type"] == "stop":
            json.loads(answer.text)
    # The drafter knows no grammar: one that forces odd spellings may have no correct draft.
    constrained = [
        a.num_correct_drafts for c, a in zip(cases, answers, strict=True) if len(c.params) > 1
    ]
    assert kind != "self" or sum(constrained) > 0
    assert counter.since().on_time_rows > 0
