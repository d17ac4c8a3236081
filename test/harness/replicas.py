"""The data-parallel replicas of a server, each looked at as if it were a server of its own."""

from __future__ import annotations

from typing import Any

import psutil

from harness.drafter_faults import status
from harness.server import Server

NUM_REPLICAS = 2
FLAGS = (
    *("--dp-size", str(NUM_REPLICAS)),
    *("--load-balance-method", "round_robin"),  # of so many requests each has one
    *("--max-total-tokens", "4096"),
)


class Replica:
    """One of them, with a drafter of its own."""

    def __init__(self, server: Server, dp_rank: int) -> None:
        self.spec, self.url = server.spec, server.url
        self._server = server
        self._dp_rank = dp_rank

    def drafter_process(self) -> psutil.Process:
        """The one that serves it now; fails while there is none."""
        pid = self.ssd()["drafter_pid"]
        (process,) = [p for p in self._server.drafter_processes() if p.pid == pid]
        return process

    def ssd(self) -> dict[str, Any]:
        """The drafter's state and counters as /ssd/status shows them."""
        state: dict[str, Any] = status(self._server)["replicas"][self._dp_rank]
        assert state["dp_rank"] == self._dp_rank
        return state


def replicas_of(server: Server) -> list[Replica]:
    return [Replica(server, dp_rank) for dp_rank in range(NUM_REPLICAS)]
