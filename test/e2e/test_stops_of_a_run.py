"""A run of several tokens ends its request where plain decode, token by token, would end it."""

from __future__ import annotations

from array import array
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils import hf_transformers_utils

from sglang_ssd.config import ALGORITHM
from sglang_ssd.target import request_hooks

TEXT = "I'm going to Paris.\nShe said no."
STOPS: tuple[dict[str, Any], ...] = (
    {"stop": ["\n", "."]},
    {"stop": ["no", "going"]},
    {"stop": ["said"], "stop_regex": ["[.]"]},
    {"stop": ["She"], "eos_at": 3},
    {"stop": ["Paris"], "eos_at": 6},
    {"stop": ["nothing like it"], "max_new_tokens": 6},
    *(
        {**stop, "max_new_tokens": length}
        for stop in (
            {"stop": ["Paris"]},
            {"stop": ["to Par"]},
            {"stop_regex": ["P[a-z]+s"]},
            {"stop_regex": ["t[a-z] P"]},
        )
        for length in (4, 5, 6)
    ),
)
"""The last ones have their stop in the fifth token, and the cap around it."""


get_tokenizer = cache(hf_transformers_utils.get_tokenizer)


@pytest.fixture
def speculating(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(speculative_algorithm=ALGORITHM)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)


def ended(model: str, stops: dict[str, Any], run_len: int, update: Any) -> tuple[Any, ...]:
    """How and where a request ends whose tokens arrive in runs of that length."""
    tokenizer = get_tokenizer(model)
    given = dict(stops)
    eos_at = given.pop("eos_at", None)
    tokens = tokenizer.encode(TEXT)
    if eos_at is not None:
        tokens[eos_at] = tokenizer.eos_token_id
    params = SamplingParams(**{"max_new_tokens": 40, **given})
    params.normalize(tokenizer)
    req = Req("r", "", array("q", [1]), params, vocab_size=len(tokenizer))
    req.tokenizer = tokenizer
    for start in range(0, len(tokens), run_len):
        run = tokens[start : start + run_len]
        req.output_ids.extend(run)
        update(req, len(run))
        if req.finished():
            break
    reason = req.finished_reason and req.finished_reason.to_json()
    return reason, list(req.output_ids_through_stop)


@pytest.mark.parametrize("run_len", [2, 3, 5, 9, 17])
@pytest.mark.parametrize("stops", STOPS, ids=lambda stops: "-".join(stops))
def test_runs_end_as_single_tokens_do(
    stops: dict[str, Any], run_len: int, target: Path, speculating: None
) -> None:
    """Red when the order of the stops, not their place, says which one ends a run."""

    def by_runs(req: Any, num: int) -> None:
        request_hooks.end_where_plain_decode_ends(update, req, num)

    update = getattr(Req.update_finish_state, "__wrapped__", Req.update_finish_state)
    model = str(target)
    assert ended(model, stops, run_len, by_runs) == ended(model, stops, 1, update)


def test_sglang_alone_ends_elsewhere(target: Path) -> None:
    """Red when SGLang has mended it: then the hook can go."""
    update = getattr(Req.update_finish_state, "__wrapped__", Req.update_finish_state)
    model, stops = str(target), STOPS[0]
    assert ended(model, stops, 17, update) != ended(model, stops, 1, update)


class CountingGrammar:
    """At its end after so many tokens, as a regex with one way to match it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens
        self.finished = False

    def accept_token(self, token: int) -> None:
        self.num_left -= 1

    def is_terminated(self) -> bool:
        return self.num_left <= 0


def constrained_request(num_tokens: int) -> Req:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    params.normalize(None)
    req = Req("r", "", array("q", [1]), params, vocab_size=100)
    req.grammar = CountingGrammar(num_tokens)  # type: ignore[assignment]
    return req


@pytest.mark.parametrize("run_len", [1, 2, 3, 5])
@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_a_grammar_ends_a_run_where_plain_decode_ends(
    num_tokens: int, run_len: int, speculating: None
) -> None:
    """Red when a request that ignores EOS ends with its grammar, not a token later as SGLang's, or
    with another token than the one behind it."""
    update = getattr(Req.update_finish_state, "__wrapped__", Req.update_finish_state)
    processor, tokens = SchedulerBatchResultProcessor, list(range(30))
    accept = getattr(
        processor._accept_grammar_tokens, "__wrapped__", processor._accept_grammar_tokens
    )
    plain = constrained_request(num_tokens)
    while not plain.finished():
        token = tokens[len(plain.output_ids)]
        plain.output_ids.append(token)
        update(plain, 1)
        accept(None, plain, token)
    by_runs = constrained_request(num_tokens)
    for start in range(0, 20, run_len):  # the target goes on behind its whole run
        run = tokens[start : start + run_len]
        kept = request_hooks.keep_the_token_behind_a_grammars_end(accept, None, by_runs, run)
        by_runs.output_ids.extend(kept)
        request_hooks.end_where_plain_decode_ends(update, by_runs, len(kept))
        if by_runs.finished():
            break
    assert by_runs.output_ids == plain.output_ids == array("q", tokens[: num_tokens + 1])
    assert by_runs.finished_reason.to_json() == plain.finished_reason.to_json()


def test_a_prefill_ends_a_request_whose_grammar_had_ended(speculating: None) -> None:
    """Red when a request that was retracted at its grammar's end goes on by a token too many."""
    update = getattr(Req.update_finish_state, "__wrapped__", Req.update_finish_state)
    req = constrained_request(num_tokens=1)
    kept = request_hooks.keep_the_token_behind_a_grammars_end(
        getattr(
            SchedulerBatchResultProcessor._accept_grammar_tokens,
            "__wrapped__",
            SchedulerBatchResultProcessor._accept_grammar_tokens,
        ),
        None,
        req,
        [5],
    )
    req.output_ids.extend(kept)
    request_hooks.end_where_plain_decode_ends(update, req, 1)
    assert not req.finished()
    req.output_ids.append(6)  # of the prefill; the grammar takes it later
    request_hooks.end_where_plain_decode_ends(update, req, 1)
    assert req.finished_reason.to_json() == {"type": "stop", "matched": 6}


@pytest.mark.parametrize("run_len", [1, 2, 5])
def test_thinking_is_counted_as_far_as_it_is_told(run_len: int, speculating: None) -> None:
    """Red when tokens behind the end count: more of thinking than there are of the answer."""
    update = getattr(Req.update_finish_state, "__wrapped__", Req.update_finish_state)
    params = SamplingParams(max_new_tokens=7, ignore_eos=True)
    params.normalize(None)
    req = Req("r", "", array("q", [1]), params, vocab_size=100)
    while not req.finished():
        req.output_ids.extend([3] * run_len)
        req.reasoning_tokens += run_len
        request_hooks.end_where_plain_decode_ends(update, req, run_len)
    assert req.reasoning_tokens == len(req.output_ids_through_stop) == 7
