"""FR-22: a request whose client has gone, or that is aborted, is soon gone on both sides."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests as http

from harness.checkpoints import DrafterKind
from harness.client import Request, generate, generate_all, start_and_leave
from harness.idle import assert_drained
from harness.prompts import STORY, encode, ids_of_length
from harness.reference import Reference, assert_same
from harness.server import Server
from harness.size import Size

LONG = {"max_new_tokens": 1500, "ignore_eos": True}
MOST_RUNNING = 16
ORDINARY = re.compile(r"(Prefill|Decode) batch|SSD rounds|HTTP/1.1\"? 200")
"""Lines of a server at work: SGLang's and ours of batches, one for each HTTP request."""


def other_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.strip() and not ORDINARY.search(line)]


def test_fr_22(
    kind: DrafterKind, size: Size, server: Server, reference: Reference, figures: dict[str, Any]
) -> None:
    """Red when a running, prefilling or queued request that nobody wants leaves anything behind,
    or slows what comes after."""
    story = encode(server.spec.model, STORY)
    after = [Request(story, {"max_new_tokens": 32}), Request(story[:-1], {"max_new_tokens": 32})]
    before = generate_all(server.url, after)
    logged = len(server.log_text())
    num_clients = max(MOST_RUNNING + 8, size.num_disconnects)
    chance = random.Random(22)
    with ThreadPoolExecutor(num_clients) as clients:
        for index in range(num_clients):
            prompt = ids_of_length(server.spec.model, 400 + index) if index % 4 == 3 else story
            case = Request(prompt, LONG)
            clients.submit(start_and_leave, server.url, case, after_s=chance.uniform(0, 0.5))
    assert_drained(server)
    lines = other_lines(server.log_text()[logged:])
    assert len(lines) <= num_clients, lines[:10]
    answers = generate_all(server.url, after)
    assert_same(reference, after, answers)
    lengths = [answer.meta_info["spec_accept_length"] for answer in (*before, *answers)]
    figures["accept_lengths"] = lengths
    assert sum(lengths[2:]) >= 0.7 * sum(lengths[:2])
    assert kind != "self" or min(lengths[2:]) >= server.spec.num_steps


def test_fr_22_abort_request(server: Server, reference: Reference) -> None:
    """Red when /abort_request answers 200 and does nothing, or hits another request."""
    story = encode(server.spec.model, STORY)
    named = [Request(story, LONG, {"rid": f"fr-22-{index}"}) for index in range(3)]
    plain = Request(story, {"max_new_tokens": 40})
    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(generate, server.url, case) for case in named]
        time.sleep(1.0)
        beside = clients.submit(generate, server.url, plain)
        for rid in ("fr-22-0", "nobody"):
            http.post(f"{server.url}/abort_request", json={"rid": rid}, timeout=30)
        assert running[0].result().finish["type"] == "abort"
        assert_same(reference, [plain], [beside.result()])
        assert not running[1].done()
        http.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=30)
        assert {one.result().finish["type"] for one in running} == {"abort"}
    assert_drained(server)
