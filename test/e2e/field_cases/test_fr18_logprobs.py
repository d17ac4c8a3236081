"""FR-18: every output token has the logprobs that the target gives it after the same prefix."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.checkpoints import DrafterKind
from harness.client import Answer, Request, generate, generate_all, openai, stream
from harness.draws import seeded
from harness.logprobs import assert_close, assert_same_logprobs
from harness.prompts import STORY, encode
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter, assert_drafting
from harness.server import Server, ServerPool

ALL: dict[str, Any] = {
    "return_logprob": True,
    "top_logprobs_num": 3,
    "token_ids_logprob": [11, 42, 300],
}


def test_fr_18(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when a run's tokens get the logprobs of another row, or none, or too many, or a
    neighbour that did not ask gets them."""
    story = encode(server.spec.model, STORY)
    (free,) = reference.answers([Request(story, {"max_new_tokens": 20})])
    stop = {"stop_token_ids": [free.output_ids[7]]}
    bias = {"logit_bias": {str(free.output_ids[2]): -5.0}}
    cases = [
        Request(story, {"max_new_tokens": 20}, ALL),
        Request(story, {"max_new_tokens": 20}),
        Request(story[:-2], {"max_new_tokens": 20}, {**ALL, "logprob_start_len": 0}),
        Request(story, {"max_new_tokens": 20, **stop}, ALL),
        Request(story, {"max_new_tokens": 20, **bias}, ALL),
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases, concurrency=5)
    assert_drafting(kind, counter.since())
    assert_same(reference, cases, answers)
    for want, have in zip(reference.answers(cases), answers, strict=True):
        assert_same_logprobs(want, have)
    assert len(answers[0].meta_info["output_token_logprobs"]) == 20
    assert answers[2].meta_info["input_token_ids_logprobs"]
    assert "output_token_logprobs" not in answers[1].meta_info
    streamed = stream(server.url, cases[3]).answer
    assert_same_logprobs(reference.answers([cases[3]])[0], streamed)


def test_fr_18_sampled(
    kind: DrafterKind, server: Server, drafts_off: Reference, reference: Reference
) -> None:
    """Red when the logprobs of drawn tokens are of the filtered distribution, of another row, or
    of another temperature than those that the plain server gives to each of them.

    That server draws other tokens, so it is asked for each place, with the tokens before it as its
    prompt.
    """
    cases = [
        msgspec.structs.replace(case, options=ALL)
        for case in seeded(server.spec.model, 4, {"temperature": 0.7, "top_p": 0.9})
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases)
    assert_drafting(kind, counter.since())
    for want, have in zip(drafts_off.answers(cases), answers, strict=True):
        assert have.output_ids == want.output_ids
        assert_same_logprobs(want, have)
    for case, answer in zip(cases[:2], answers, strict=False):
        told = [entry[:2] for entry in answer.meta_info["output_token_logprobs"]]
        assert_close(place_by_place(reference, case, answer), told, "output_token_logprobs")


def place_by_place(reference: Reference, case: Request, answer: Answer) -> list[list[Any]]:
    """Logprob and id of each token of the answer at the case's temperature, as a forward of its own
    gives them to it."""
    params = {"temperature": case.params["temperature"], "max_new_tokens": 1}
    places = [
        Request(
            (*case.prompt, *answer.output_ids[:index]),  # type: ignore[arg-type]
            params,
            {"return_logprob": True, "token_ids_logprob": [token]},
        )
        for index, token in enumerate(answer.output_ids)
    ]
    found = generate_all(reference.server.url, places)
    return [one.meta_info["output_token_ids_logprobs"][0][0][:2] for one in found]


def test_fr_18_original(
    kind: DrafterKind, pool: ServerPool, spec_for: Any, reference: Reference
) -> None:
    """Red when SGLANG_RETURN_ORIGINAL_LOGPROB no longer reaches a verify: the logprobs of drawn
    tokens are then those of the temperature, not those that the plain server gives to the text."""
    server = pool.get(spec_for(kind, env=(("SGLANG_RETURN_ORIGINAL_LOGPROB", "1"),)))
    cases = [
        msgspec.structs.replace(case, options={"return_logprob": True})
        for case in seeded(server.spec.model, 4, {"temperature": 0.7, "top_p": 0.9})
    ]
    counter = RoundCounter(server)
    answers = generate_all(server.url, cases)
    assert_drafting(kind, counter.since())
    for case, answer in zip(cases, answers, strict=True):
        whole = Request(
            (*case.prompt, *answer.output_ids),  # type: ignore[arg-type]
            {"max_new_tokens": 1},
            {"return_logprob": True, "logprob_start_len": 0},
        )
        read = generate(reference.server.url, whole).meta_info["input_token_logprobs"]
        assert_close(
            [entry[:2] for entry in read[-len(answer.output_ids) :]],
            [entry[:2] for entry in answer.meta_info["output_token_logprobs"]],
            "output_token_logprobs",
        )


def test_fr_18_ruled(kind: DrafterKind, serial_server: Server, reference: Reference) -> None:
    """Red when a row's logprobs are of before its penalties or its grammar's mask, or of those of
    another row."""
    story = encode(serial_server.spec.model, STORY)
    rules: tuple[dict[str, Any], ...] = (
        {"frequency_penalty": 0.6, "presence_penalty": 0.3},
        {"repetition_penalty": 1.2},
        {"regex": "( [a-z]+){9,}"},
    )
    cases = [Request(story, {"max_new_tokens": 24, **rule}, ALL) for rule in rules]
    counter = RoundCounter(serial_server)
    answers = generate_all(serial_server.url, cases)
    assert_drafting(kind, counter.since())
    assert_same(reference, cases, answers)
    for want, have in zip(reference.answers(cases), answers, strict=True):
        assert len(have.meta_info["output_token_logprobs"]) == len(have.output_ids)
        if want.output_ids == have.output_ids:
            assert_same_logprobs(want, have)


def test_fr_18_openai(kind: DrafterKind, server: Server, reference: Reference) -> None:
    """Red when `logprobs: 0` gives none, or an answer's tokens, their logprobs or those of the
    likeliest others are not the target's, token by token."""
    counter = RoundCounter(server)
    question = {"messages": [{"role": "user", "content": STORY}]}
    asked = (
        *(("completions", {"prompt": STORY, "logprobs": number}) for number in (0, 2)),
        *(
            ("chat/completions", {**question, "logprobs": True, "top_logprobs": number})
            for number in (0, 3)
        ),
    )
    for path, body in asked:
        want, have = (
            openai(one.url, path, {"max_tokens": 16, **body})["choices"][0]
            for one in (reference.server, server)
        )
        assert have["logprobs"], body
        assert_close(want, have, f"{path} {body}")
    assert_drafting(kind, counter.since())
