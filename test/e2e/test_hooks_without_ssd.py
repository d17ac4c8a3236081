"""Our hooks are in every SGLang process of the environment; without SSD they change nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_ssd.target import algorithm, hooks, request_hooks, session_hooks


@pytest.fixture(autouse=True)
def plain_server(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(speculative_algorithm=None)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)


def test_copies_of_a_seeded_request_keep_its_seed() -> None:
    """Red when --enable-deterministic-inference gives other tokens where we are installed."""
    request = SimpleNamespace(sampling_params=SamplingParams(n=3, sampling_seed=7))
    shared = request.sampling_params
    request_hooks.seed_parallel_samples(None, request)
    assert request.sampling_params is shared
    assert shared.sampling_seed == 7


def test_what_is_streamed_stays() -> None:
    assert request_hooks.hold_back_half_characters("a\ufffd", "a\ufffd") is None


def test_stops_are_looked_for_as_before() -> None:
    seen: list[tuple[Any, int]] = []
    req = SimpleNamespace(sampling_params=SimpleNamespace(stop_strs=["a"], stop_regex_strs=[]))
    request_hooks.end_where_plain_decode_ends(lambda *given: seen.append(given), req, 3)
    assert seen == [(req, 3)]


def test_request_rows_keep_their_width() -> None:
    assert algorithm.widen_request_rows(9) == 9


def test_the_kv_pool_keeps_its_size_and_requests_their_length() -> None:
    """Red when a drafter's own pool, or a plain server's, is another where we are installed."""
    runner = SimpleNamespace(effective_logical_max_total_num_tokens=64)
    info = (64, 8, 8, 8, 63, 58, 0, "cpu", None, 8, 64, 64)
    assert algorithm.widen_kv_pool(64, None, 100) == 64
    assert algorithm.keep_reserve_from_prompts(info, SimpleNamespace(model_runner=runner)) == info
    clipped = algorithm.keep_reserve_from_answers(
        lambda pool, asked, *, token_capacity: token_capacity - asked, None, 5, token_capacity=64
    )
    assert clipped == 59


def test_no_state_is_shown() -> None:
    state: dict[str, Any] = {}
    hooks.add_ssd_state(None, None, state)
    assert not state


def test_sessions_keep_what_sglang_keeps() -> None:
    """None of their attributes is as much as looked at."""
    session_hooks.forget_behind_the_end(object())
    session_hooks.forget_kv_of_the_last_token(True, object(), object())
