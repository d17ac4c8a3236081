"""A drafter that dies, freezes or never comes up costs speed and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests as http

from harness.checkpoints import make_broken, make_short_context
from harness.client import Request, generate_all, stream
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.rounds import RoundCounter
from harness.server import Server, ServerPool, ServerSpec
from servers import free_port
from sglang_ssd.keys import make_keys

DEADLINE_S = 2.0
SETTINGS = (("reply_deadline_ms", 1000 * DEADLINE_S),)
NUM_TOKENS = 60


def _requests(server: Server, num: int = 2) -> list[Request]:
    prompts = load_prompts(server.spec.model, 8)
    chosen = [prompts[1], prompts[3], prompts[0], prompts[6]][:num]
    params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    return [Request(prompt.input_ids, params) for prompt in chosen]


def _slowest_step(server: Server, case: Request) -> float:
    """The longest gap of a stream with nothing wrong: what one step may take here and now."""
    return stream(server.url, case).longest_gap


@pytest.mark.parametrize("blow", [signal.SIGSTOP, signal.SIGKILL], ids=lambda blow: blow.name)
def test_a_drafter_that_is_struck_in_mid_stream(
    blow: signal.Signals,
    pool: ServerPool,
    reference: Reference,
    spec_for: Any,
    figures: dict[str, Any],
) -> None:
    """Red when a wait has no deadline, output changes, or health depends on the drafter."""
    server = pool.take(spec_for("self", settings=SETTINGS))
    try:
        cases = _requests(server)
        step = _slowest_step(server, cases[0])
        drafter = server.drafter_process()
        start = time.monotonic()

        def strike(num_chunks: int) -> None:
            if num_chunks == 4:
                drafter.send_signal(blow)

        with ThreadPoolExecutor(2) as clients:
            other = clients.submit(stream, server.url, cases[1])
            struck = stream(server.url, cases[0], on_chunk=strike)
            answers = [struck.answer, other.result().answer]
        assert_same(reference, cases, answers)
        gap = max(struck.longest_gap, other.result().longest_gap)
        figures.update(longest_gap_s=round(gap, 3), step_s=round(step, 3), deadline_s=DEADLINE_S)
        # A step is slower beside the other stream; a second wait would add 2 s.
        assert gap <= DEADLINE_S + 2 * step + 0.1
        _assert_serves_on(server, reference)
        minutes = (time.monotonic() - start) / 60
        told = server.log_text().count("affected requests decode plainly meanwhile")
        assert 1 <= told <= 1 + minutes, "once, and again if it lasts"
        if blow is signal.SIGSTOP:
            assert status(server)["state"] == "degraded"
            drafter.send_signal(signal.SIGCONT)
        wait_until_ready(server)
        assert status(server)["replicas"][0]["restarts"] == (blow is signal.SIGKILL)
        assert (status(server)["replicas"][0]["drafter_pid"] == drafter.pid) == (
            blow is signal.SIGSTOP
        )
        _assert_drafts_again(server, reference)
    finally:
        server.stop()


def status(server: Server) -> dict[str, Any]:
    overview: dict[str, Any] = http.get(f"{server.url}/ssd/status", timeout=30).json()
    return overview


def wait_until_ready(server: Server, limit_s: float = 300.0) -> None:
    deadline = time.monotonic() + limit_s
    while (state := status(server))["state"] != "ready":
        assert time.monotonic() < deadline, state
        time.sleep(0.2)


def reload(server: Server, **body: str) -> http.Response:
    return http.post(f"{server.url}/ssd/reload_drafter", json=body, timeout=600)


def test_the_drafter_is_exchanged_under_load(
    target: Path, pool: ServerPool, reference: Reference, spec_for: Any
) -> None:
    """Red when a request notices more than speed, or a model that cannot serve takes the place."""
    server = pool.take(spec_for("noisy", settings=(("start_timeout_s", 600),)))
    try:
        first = status(server)["replicas"][0]
        missing = reload(server, model_path="/no/such/model")
        assert missing.status_code == 400
        assert "/no/such/model is missing" in missing.json()["error"]["message"]
        wrong = reload(server, model_path=str(make_broken(target, "vocabulary")))
        assert wrong.status_code == 400
        assert "1500" in wrong.json()["error"]["message"]
        assert reload(server, modelpath="x").status_code == 400
        wait_until_ready(server)
        assert status(server)["replicas"][0]["drafter_model"] == first["drafter_model"]
        cases = _requests(server, 4)
        with ThreadPoolExecutor(1) as clients:
            under_load = clients.submit(generate_all, server.url, cases)
            done = reload(server, model_path=str(target))
            assert done.status_code == 200, done.text
            assert_same(reference, cases, under_load.result())
        (replica,) = done.json()["replicas"]
        assert replica["drafter_model"] == str(target)
        assert replica["drafter_pid"] != first["drafter_pid"]
        _assert_drafts_again(server, reference)
    finally:
        server.stop()


def _assert_serves_on(server: Server, reference: Reference) -> None:
    for path in ("health", "health_generate"):
        start = time.monotonic()
        assert http.get(f"{server.url}/{path}", timeout=10).status_code == 200
        assert time.monotonic() - start < 2
    cases = _requests(server, 4)
    with ThreadPoolExecutor(1) as clients:
        under_load = clients.submit(generate_all, server.url, cases)
        time.sleep(0.3)
        assert http.get(f"{server.url}/health", timeout=10).status_code == 200
        assert_same(reference, cases, under_load.result())


def _assert_drafts_again(server: Server, reference: Reference) -> None:
    """Within some batches; how soon depends on what else the machine does."""
    cases = _requests(server, 4)
    for _ in range(10):
        counter = RoundCounter(server)
        assert_same(reference, cases, generate_all(server.url, cases))
        if counter.since().on_time_rate > 0.9:
            break
    else:
        pytest.fail(f"still without drafts: {counter.since()}")
    assert not server.ssd()["degraded"]


def test_a_short_deadline_costs_drafts_only(
    pool: ServerPool, reference: Reference, spec_for: Any, figures: dict[str, Any]
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
    assert counter.since().late_rows > 0


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
    assert server.ssd()["served"].get("context", 0) >= 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("vocabulary", "1500"),
        ("missing", "safetensors"),
        ("truncated", "model.safetensors"),
    ],
)
def test_a_drafter_that_cannot_serve_stops_the_start(
    change: Any, reason: str, target: Path, pool: ServerPool
) -> None:
    """Red when a wrong or broken draft checkpoint is noticed late, or without its reason."""
    drafter = make_broken(target, change)
    server = pool.start(ServerSpec(model=str(target), drafter=str(drafter)))
    try:
        assert server.wait(limit_s=240) != 0
    except subprocess.TimeoutExpired:
        pytest.fail(f"still starting:\n{server.log_tail()}")
    finally:
        server.stop(signal.SIGKILL)
    assert "the SSD drafter" in server.log_text()
    assert reason in server.log_text()


def test_a_drafter_that_never_comes_up(target: Path, pool: ServerPool) -> None:
    """Red when a server waits for a drafter without end, or does not say for what it waited."""
    settings = (("endpoint", "ipc:///tmp/sglang-ssd-nobody-listens-here"), ("start_timeout_s", 3))
    server = pool.start(ServerSpec(model=str(target), drafter=str(target), settings=settings))
    try:
        assert server.wait(limit_s=240) != 0
    finally:
        server.stop(signal.SIGKILL)
    assert "--ssd-start-timeout-s 3" in server.log_text()


@pytest.fixture
def key_folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@contextmanager
def drafter_by_hand(model: Path, port: int, key_folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    keys = key_folder / "drafter"
    argv = ["--model-path", str(model), "--endpoint", f"tcp://0.0.0.0:{port}"]
    argv += ["--secret-key", str(keys / "drafter.key_secret")]
    argv += ["--peer-keys", str(keys / "targets"), "--device", "cpu", "--dtype", "float32"]
    argv += ["--max-total-tokens", "12288"]
    process = subprocess.Popen([sys.executable, "-m", "sglang_ssd.drafter", *argv])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_drafter_by_hand_behind_keys_may_go_and_come_back(
    target: Path, pool: ServerPool, reference: Reference, key_folder: Path
) -> None:
    """Red when a target needs a restart to find its drafter again, or talks without keys."""
    port = free_port()
    settings = {
        "endpoint": f"tcp://127.0.0.1:{port}",
        "secret_key": str(key_folder / "target/target.key_secret"),
        "peer_keys": str(key_folder / "target/drafter.key"),
    }
    spec = ServerSpec(model=str(target), drafter=str(target), settings=tuple(settings.items()))
    server = pool.start(spec)
    try:
        with drafter_by_hand(target, port, key_folder):
            server.wait_until_ready()
            _assert_drafts_again(server, reference)
        cases = _requests(server, 2)
        assert_same(reference, cases, generate_all(server.url, cases))
        assert status(server)["state"] == "dead"
        refused = reload(server)
        assert refused.status_code == 400
        assert "was not started by this server" in refused.json()["error"]["message"]
        with drafter_by_hand(target, port, key_folder):
            wait_until_ready(server)
            assert status(server)["replicas"][0]["restarts"] == 1
            _assert_drafts_again(server, reference)
    finally:
        server.stop()
