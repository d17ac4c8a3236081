"""What a server holds when nothing runs: neither side may keep anything of an ended request."""

from __future__ import annotations

import time

from harness.server import Server
from sglang_ssd.wire.messages import DrafterStatus, StatusRequest
from sglang_ssd.wire.transport import TargetSocket

LIMIT_S = 30.0
CLOSED_WITHIN_S = 2.0
LEAVING_S = 2.0
"""SGLang waits so long before it aborts the request of a client that has gone."""


def drafter_status(server: Server) -> DrafterStatus:
    """What the drafter itself says, over a connection of our own."""
    transport = TargetSocket(server.drafter_endpoint(), server.drafter_keys())
    try:
        for _ in range(50):
            transport.send(StatusRequest())
            for message, _ in transport.receive(0.2):
                if isinstance(message, DrafterStatus):
                    return message
    finally:
        transport.close()
    raise AssertionError("the drafter does not answer a status request")


def assert_drained(server: Server) -> None:
    """Soon no sequence is open, as the target knows and as the drafter does, and no slot taken.

    An idle scheduler checks its own pools and ends itself if tokens leaked.
    """
    deadline = time.monotonic() + LIMIT_S
    while not _is_drained(server) and time.monotonic() < deadline:
        time.sleep(0.2)
    status = drafter_status(server)
    held = server.ssd()["live_sequences"], status.live_sequences
    assert held == (0, 0), f"target and drafter hold {held} sequences"
    lost = status.total_slots - status.free_slots
    assert lost == 0, f"the drafter has lost {lost} slots"
    assert server.healthy()


def assert_only_running(server: Server, num: int, *, limit_s: float = CLOSED_WITHIN_S) -> None:
    """Within that time both sides hold exactly as many sequences as requests still run, and go on.

    An idle target closes every sequence that it left open; while another request runs, each way
    for a request to end must close its own.
    """
    deadline = time.monotonic() + limit_s
    while (held := _num_held(server)) != (num, num) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert held == (num, num), f"target and drafter hold {held} sequences; {num} requests run"
    time.sleep(0.5)
    assert _num_held(server) == (num, num), "another request began meanwhile"


def _num_held(server: Server) -> tuple[int, int]:
    """Sequences of the target and of the drafter."""
    return server.ssd()["live_sequences"], drafter_status(server).live_sequences


def _is_drained(server: Server) -> bool:
    return _num_held(server) == (0, 0)
