"""FR-30: health does not depend on the drafter, whose state is told apart."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

from harness.checkpoints import DrafterKind
from harness.client import Request, generate, generate_all
from harness.drafter_faults import (
    assert_drafts_again,
    assert_healthy,
    assert_serves_on,
    long_requests,
    status,
    wait_until_ready,
)
from harness.metrics import assert_soon_shows
from harness.prompts import ids_of_length
from harness.reference import Reference, assert_same
from harness.server import Server


def test_fr_30(kind: DrafterKind, struck_server: Server, reference: Reference) -> None:
    """Red when a health check waits for a stopped drafter or a long prefill, or a server whose
    drafter is stopped looks as if it drafted, or numbers divide by what no round gave."""
    server = struck_server
    drafter = server.drafter_process()
    drafter.send_signal(signal.SIGSTOP)
    try:
        case = long_requests(server)[0]
        assert_same(reference, [case], [generate(server.url, case)])
        answers = assert_serves_on(server, reference)
        assert [answer.meta_info["spec_accept_rate"] for answer in answers] == [0] * 4
        assert all(1 <= answer.meta_info["spec_accept_length"] < 1.1 for answer in answers)
        assert status(server)["state"] == "degraded"
        assert server.ssd()["degraded"]
        assert_soon_shows(server, "ssd_degraded", [1])
        prompts = [ids_of_length(server.spec.model, length) for length in (1900, 1920)]
        long = [Request(prompt, {"max_new_tokens": 2}) for prompt in prompts]
        with ThreadPoolExecutor(1) as clients:
            prefilling = clients.submit(generate_all, server.url, long)
            time.sleep(0.2)
            assert_healthy(server)
            assert not prefilling.done(), "nothing was read while health was asked"
            assert [len(answer.output_ids) for answer in prefilling.result()] == [2, 2]
    finally:
        drafter.send_signal(signal.SIGCONT)
    wait_until_ready(server)
    assert_drafts_again(kind, server, reference)
    assert_soon_shows(server, "ssd_degraded", [0])
