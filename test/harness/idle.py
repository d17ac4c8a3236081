"""What a server holds when nothing runs: neither side may keep anything of an ended request."""

from __future__ import annotations

import time

from harness.server import Server
from sglang_ssd.wire.messages import DrafterStatus, StatusRequest
from sglang_ssd.wire.transport import TargetSocket

LIMIT_S = 30.0


def drafter_status(server: Server) -> DrafterStatus:
    """What the drafter itself says, over a connection of our own."""
    transport = TargetSocket(server.drafter_endpoint())
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
    assert server.ssd()["live_sequences"] == 0
    assert status.live_sequences == 0
    assert status.free_slots == status.total_slots
    assert server.healthy()


def _is_drained(server: Server) -> bool:
    return not server.ssd()["live_sequences"] and not drafter_status(server).live_sequences
