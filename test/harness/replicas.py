"""The data-parallel replicas of a server, each looked at as if it were a server of its own."""

from __future__ import annotations

from typing import Any

import psutil

from harness.drafter_faults import status
from harness.server import Server, endpoint_of

NUM_REPLICAS = 2
FLAGS = (
    *("--dp-size", str(NUM_REPLICAS)),
    *("--load-balance-method", "round_robin"),  # of so many requests each has one
    *("--max-total-tokens", "4096"),
)


class Replica:
    """One of them, with a drafter of its own.

    The states of replicas come in the order in which they answer, and say which is whose by the
    drafter's pid alone; a drafter that is started again has the endpoint of the one before.
    """

    def __init__(self, server: Server, drafter: psutil.Process) -> None:
        self.spec, self.url = server.spec, server.url
        self.endpoint = endpoint_of(drafter)
        self._server = server
        self._pids = {drafter.pid}

    def drafter_process(self) -> psutil.Process:
        (process,) = self._drafters()
        return process

    def ssd(self) -> dict[str, Any]:
        """The drafter's state and counters as /ssd/status shows them."""
        states: list[dict[str, Any]] = status(self._server)["replicas"]
        self._pids |= {process.pid for process in self._drafters()}
        (state,) = [state for state in states if state["drafter_pid"] in self._pids]
        return state

    def _drafters(self) -> list[psutil.Process]:
        """One, or none while another is on its way."""
        return [p for p in self._server.drafter_processes() if endpoint_of(p) == self.endpoint]


def replicas_of(server: Server) -> list[Replica]:
    return [Replica(server, drafter) for drafter in server.drafter_processes()]
