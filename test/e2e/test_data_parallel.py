"""Plain data parallelism: every replica has a drafter, an endpoint and cores of its own, and loses
no more than its own drafts with it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests as http

from harness.checkpoints import DrafterKind
from harness.client import Request, generate_all, in_background
from harness.drafter_faults import (
    assert_drafts_again,
    long_requests,
    reload,
    status,
    wait_until_ready,
)
from harness.metrics import assert_soon_shows
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.replicas import FLAGS, NUM_REPLICAS, Replica, replicas_of
from harness.rounds import RoundCounter
from harness.server import Server, ServerPool, endpoint_of
from sglang_ssd.config import SsdConfig
from sglang_ssd.platform.affinity import parse_cores, share_of, split_cores
from timeline import DRAFTER, TARGET, read_trace

pytestmark = pytest.mark.timeout(1800)
"""Two targets and two drafters share the cores, also while drafters are started again."""

RESTART_DELAY_S = 15.0
"""So long at least the other replica is seen to draft while one has no drafter."""
LASTING = {"max_new_tokens": 200, "ignore_eos": True}
"""Of requests that outlast a drafter."""


@pytest.fixture(scope="module")
def server(
    pool: ServerPool, spec_for: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The last test leaves it with other drafters than its spec names."""
    spec = spec_for(
        "noisy",
        flags=(*FLAGS, "--enable-metrics"),
        settings=(
            ("drafter_max_total_tokens", 8192),
            ("restart_delay_s", RESTART_DELAY_S),
            ("start_timeout_s", 600),
            ("trace", str(tmp_path_factory.mktemp("trace") / "trace.json")),
        ),
    )
    found = pool.take(spec)
    yield found
    found.stop()


def test_each_replica_drafts_with_its_own_drafter(server: Server, reference: Reference) -> None:
    """Red when replicas share a drafter or an endpoint, only one of them speculates, or a state
    does not say whose it is."""
    assert len(status(server)["replicas"]) == NUM_REPLICAS
    replicas = replicas_of(server)
    drafters = [replica.drafter_process() for replica in replicas]
    assert {p.pid for p in drafters} == {p.pid for p in server.drafter_processes()}
    assert len({endpoint_of(drafter) for drafter in drafters}) == NUM_REPLICAS
    cases = [
        Request(prompt.input_ids, {"max_new_tokens": 32, "ignore_eos": True})
        for prompt in load_prompts(server.spec.model, 8)
    ]
    before = [replica.ssd() for replica in replicas]
    assert_same(reference, cases, generate_all(server.url, cases))
    for replica, old in zip(replicas, before, strict=True):
        new = replica.ssd()
        assert new["rows"] > old["rows"]
        assert new["hits"] > old["hits"]
        assert new["live_sequences"] == 0
    shown = http.get(f"{server.url}/server_info", timeout=60).json()["internal_states"]
    assert {state["ssd"]["dp_rank"]: state["ssd"]["drafter_pid"] for state in shown} == {
        rank: drafter.pid for rank, drafter in enumerate(drafters)
    }


def test_each_replica_has_a_timeline_of_its_own(server: Server) -> None:
    """Red when replicas write to one file, which each of them begins anew."""
    generate_all(server.url, long_requests(server, 4))
    trace = Path(dict(server.spec.settings)["trace"])
    files = [trace.with_name(f"trace.dp{rank}.json") for rank in range(NUM_REPLICAS)]
    assert sorted(trace.parent.iterdir()) == files
    for file in files:
        assert {span.process for span in read_trace(file)} == {TARGET, DRAFTER}


def test_cores_are_divided(server: Server) -> None:
    """Red when every replica takes all of the target's or the drafter's cores.

    On two cores there is nothing to divide: both replicas have the one core of their side. How
    more are divided is also shown by test/unit/test_affinity.py.
    """
    log = server.log_text()
    target_cores = re.findall(
        r"^(?!\[drafter\]).*SSD: rank \d of \d on cores (\S+) with", log, re.M
    )
    drafter_cores = re.findall(r"\[drafter\] .* runs on cores (\S+)", log)
    split = split_cores(SsdConfig(), tuple(sorted(os.sched_getaffinity(0))))
    for side, shown in ((split.target, target_cores), (split.drafter, drafter_cores)):
        shares = [share_of(side, index=i, num_shares=NUM_REPLICAS) for i in range(NUM_REPLICAS)]
        assert sorted(map(parse_cores, shown)) == sorted(shares)


def test_metrics_tell_replicas_apart(server: Server) -> None:
    """Red when the counts of one replica overwrite the other's."""
    text = http.get(f"{server.url}/metrics", timeout=60).text
    ranks = set(re.findall(r'sglang:ssd_degraded\{[^}]*dp_rank="(\d)"', text))
    assert ranks == {str(rank) for rank in range(NUM_REPLICAS)}


def test_a_killed_drafter_costs_its_own_replica_alone(server: Server, reference: Reference) -> None:
    """Red when the end of one replica's drafter costs another its drafts, is told of another or of
    all of them, or nobody starts that drafter again."""
    replicas = replicas_of(server)
    before = [replica.ssd() for replica in replicas]
    prompts = load_prompts(server.spec.model, NUM_REPLICAS)
    cases = [Request(prompt.input_ids, LASTING) for prompt in prompts]
    running = [in_background(server.url, case) for case in cases]
    assert [replica.ssd()["live_sequences"] for replica in replicas] == [1, 1]
    drafter = replicas[0].drafter_process()
    drafter.kill()
    drafter.wait(60)
    counters = [RoundCounter(replica) for replica in replicas]
    assert [replica.ssd()["state"] for replica in replicas] == ["restarting", "ready"]
    assert status(server)["state"] == "restarting"
    assert_same(reference, cases, [one.result().answer for one in running])
    wait_until_ready(server)
    lost, kept = (counter.since() for counter in counters)
    assert lost.plain_decode.get("drafter_down", 0) > 0
    assert "drafter_down" not in kept.plain_decode
    assert kept.correct_drafts > 0
    assert_first_restarted(replicas, before, killed=drafter.pid)
    shown = [replica.ssd()["restarts"] for replica in replicas]
    assert_soon_shows(server, "ssd_drafter_restarts_total", shown)
    for replica in replicas:
        assert_drafts_again("noisy", replica, reference)


def assert_first_restarted(
    replicas: list[Replica], before: list[dict[str, Any]], *, killed: int
) -> None:
    """That drafter was the first replica's; the other is told of as before."""
    first, *others = (replica.ssd() for replica in replicas)
    assert first["restarts"] == before[0]["restarts"] + 1
    assert replicas[0].drafter_process().pid != killed
    assert f"process {killed} ended with signal 9" in first["last_error"]
    for name in ("restarts", "drafter_pid", "last_error"):
        assert [one[name] for one in others] == [one[name] for one in before[1:]], name


def test_every_replica_exchanges_its_drafter(
    server: Server, target: Path, reference: Reference
) -> None:
    """Red when a reload reaches one replica alone or is answered before the others serve, when the
    present model is not that of each, or a reason that all have is told for each."""
    replicas = replicas_of(server)
    before = [replica.ssd() for replica in replicas]
    missing = reload(server, model_path="/no/such/model")
    assert missing.status_code == 400
    reason = "dp_rank 0, 1: draft model: /no/such/model is missing"
    assert missing.json() == {"error": {"message": reason}}
    cases = long_requests(server, 4)
    pids = {replica.ssd()["drafter_pid"] for replica in replicas}
    assert pids == {state["drafter_pid"] for state in before}
    present = before[0]["drafter_model"]
    exchanges: tuple[tuple[dict[str, str], DrafterKind, str], ...] = (
        ({}, "noisy", present),
        ({"model_path": str(target)}, "self", str(target)),
    )
    for body, kind, model in exchanges:
        with ThreadPoolExecutor(1) as clients:
            under_load = clients.submit(generate_all, server.url, cases)
            done = reload(server, **body)
            assert done.status_code == 200, done.text
            assert_same(reference, cases, under_load.result())
        told = done.json()["replicas"]
        assert [state["drafter_model"] for state in told] == [model] * NUM_REPLICAS
        assert [state["reload"]["state"] for state in told] == ["done"] * NUM_REPLICAS
        exchanged = {state["drafter_pid"] for state in told}
        assert exchanged == {replica.drafter_process().pid for replica in replicas}
        assert not exchanged & pids
        pids = exchanged
        for replica in replicas:
            assert_drafts_again(kind, replica, reference)
