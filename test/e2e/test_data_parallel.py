"""Plain data parallelism: every replica has a drafter, an endpoint and cores of its own."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import requests as http

from harness.client import Request, generate_all
from harness.prompts import load_prompts
from harness.reference import Reference, assert_same
from harness.server import Server, ServerPool
from sglang_ssd.config import SsdConfig
from sglang_ssd.platform.affinity import parse_cores, share_of, split_cores

NUM_REPLICAS = 2


@pytest.fixture(scope="module")
def server(pool: ServerPool, spec_for: Any) -> Server:
    flags = ("--dp-size", str(NUM_REPLICAS), "--load-balance-method", "round_robin")
    spec = spec_for(
        "noisy",
        flags=(*flags, "--max-total-tokens", "4096", "--enable-metrics"),
        settings=(("drafter_max_total_tokens", 8192),),
    )
    return pool.get(spec)


def replicas(server: Server) -> list[dict[str, Any]]:
    info = http.get(f"{server.url}/server_info", timeout=60).json()
    return [state["ssd"] for state in info["internal_states"]]


def test_each_replica_drafts_with_its_own_drafter(server: Server, reference: Reference) -> None:
    """Red when replicas share a drafter or an endpoint, or only one of them speculates."""
    drafters = [p for p in server.family() if "sglang_ssd.drafter" in p.cmdline()]
    assert len(drafters) == NUM_REPLICAS
    argvs = [p.cmdline() for p in drafters]
    assert len({argv[argv.index("--endpoint") + 1] for argv in argvs}) == NUM_REPLICAS
    cases = [
        Request(prompt.input_ids, {"max_new_tokens": 32, "ignore_eos": True})
        for prompt in load_prompts(server.spec.model, 8)
    ]
    before = replicas(server)
    assert_same(reference, cases, generate_all(server.url, cases))
    after = replicas(server)
    assert len(after) == NUM_REPLICAS
    assert {state["drafter_pid"] for state in after} == {p.pid for p in drafters}
    for old, new in zip(before, after, strict=True):
        assert new["rows"] > old["rows"]
        assert new["hits"] > old["hits"]
        assert new["live_sequences"] == 0


def test_cores_are_divided(server: Server) -> None:
    """Red when every replica takes all of the target's or the drafter's cores.

    On two cores there is nothing to divide: both replicas have the one core of their side. How
    more are divided is also shown by test/unit/test_affinity.py.
    """
    log = server.log_text()
    target_cores = re.findall(r"SSD: rank \d of \d on cores (\S+) with", log)
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
