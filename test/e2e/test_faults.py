"""A drafter that is exchanged, late, short of context or broken costs speed and nothing else.

One that is stopped, killed or absent is in field_cases/test_fr27_faults.py, one that was started by
hand behind keys in test_keyed_drafter.py.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import TRUNCATED_BYTES, Change, make_broken, make_short_context
from harness.client import Request, generate_all
from harness.drafter_faults import (
    assert_drafts_again,
    assert_ends_at_start,
    long_requests,
    reload,
    status,
    wait_until_ready,
)
from harness.draws import FILTERS, assert_same_draws, seeded
from harness.idle import assert_drained
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter
from harness.server import ServerPool, ServerSpec


def test_the_drafter_is_exchanged_under_load(
    target: Path, pool: ServerPool, reference: Reference, spec_for: Any
) -> None:
    """Red when a request notices more than speed, or a model that cannot serve takes the place."""
    server = pool.take(spec_for("noisy", settings=(("start_timeout_s", 600),)))
    try:
        first = status(server)["replicas"][0]
        missing = reload(server, model_path="/no/such/model")
        assert missing.status_code == 400
        reason = "draft model: /no/such/model is missing"
        assert missing.json() == {"error": {"message": reason}}
        wrong = reload(server, model_path=str(make_broken(target, "swapped")))
        assert wrong.status_code == 400
        assert "1500" in wrong.json()["error"]["message"]
        wait_until_ready(server)
        assert status(server)["replicas"][0]["drafter_model"] == first["drafter_model"]
        cases = long_requests(server, 4)
        with ThreadPoolExecutor(1) as clients:
            under_load = clients.submit(generate_all, server.url, cases)
            done = reload(server, model_path=str(target))
            assert done.status_code == 200, done.text
            assert_same(reference, cases, under_load.result())
        (replica,) = done.json()["replicas"]
        assert replica["drafter_model"] == str(target)
        assert replica["drafter_pid"] != first["drafter_pid"]
        assert_drafts_again("self", server, reference)
    finally:
        server.stop()


def test_a_short_deadline_costs_drafts_only(
    pool: ServerPool,
    reference: Reference,
    drafts_off: Reference,
    spec_for: Any,
    figures: dict[str, Any],
) -> None:
    """Red when a late reply is taken for the round after the one it was drafted for."""
    spec = spec_for("noisy", settings=(("reply_deadline_ms", 5),))
    server = pool.get(spec)
    cases = [
        Request(prompt.input_ids, {"max_new_tokens": 32})
        for prompt in load_prompts(server.spec.model, 8)
    ]
    counter = RoundCounter(server)
    assert_same(reference, cases, generate_all(server.url, cases))
    figures.update(counter.since().summary())
    assert counter.since().plain_decode["late"] > 0
    for params in FILTERS.values():
        counter = RoundCounter(server)
        draws = seeded(server.spec.model, 12, params)
        assert_same_draws(drafts_off, draws, generate_all(server.url, draws))
        assert counter.since().plain_decode["late"] > 0


def test_past_the_drafters_context(
    target: Path, pool: ServerPool, reference: Reference, spec_for: Any
) -> None:
    """Red when the drafter drafts beyond its context, or refuses a target with a longer one."""
    short = make_short_context(target, 96)
    spec = ServerSpec(model=str(target), drafter=str(short))
    server = pool.get(spec)
    assert "shorter than the target's" in server.log_text()
    cases = [
        Request(prompt.input_ids, {"max_new_tokens": 80, "ignore_eos": True})
        for prompt in load_prompts(server.spec.model, 4)
    ]
    answers = generate_all(server.url, cases)
    assert_same(reference, cases, answers)
    assert all(answer.num_correct_drafts > 0 for answer in answers)
    assert server.ssd()["plain_decode"]["context"] > 0


def test_more_requests_than_the_drafter_has_room_for(
    pool: ServerPool, reference: Reference, spec_for: Any
) -> None:
    """Red when a full drafter refuses a server, or drafts for one request with another's place."""
    server = pool.get(spec_for("noisy", settings=(("drafter_max_sequences", 1),)))
    cases = long_requests(server, 4)
    counter = RoundCounter(server)
    assert_same(reference, cases, generate_all(server.url, cases))
    rounds = counter.since()
    assert rounds.plain_decode["full"] > 0
    assert rounds.correct_drafts > 0
    assert_drained(server)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("missing", "draft model: no weights in {broken} (model.safetensors is missing)"),
        (
            "truncated",
            "draft model: {broken}/model.safetensors is truncated: {left} of {whole} bytes",
        ),
    ],
)
def test_a_drafter_that_cannot_serve_stops_the_start(
    change: Change, reason: str, target: Path, pool: ServerPool
) -> None:
    """Red when a broken draft checkpoint is noticed late, or without its reason and its file."""
    broken = make_broken(target, change)
    whole = (target / "model.safetensors").stat().st_size
    says = reason.format(broken=broken, left=TRUNCATED_BYTES, whole=whole)
    spec = ServerSpec(model=str(target), drafter=str(broken))
    assert_ends_at_start(pool, spec, "the SSD drafter did not start: ", says)
