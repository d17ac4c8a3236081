"""A server's metrics as Prometheus would read them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import requests

from harness.server import Server

LIMIT_S = 10.0


def samples(server: Server, name: str) -> dict[str, float]:
    """Values of the metric `sglang:<name>` by the text of its labels."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    found = re.findall(rf"^sglang:{name}(?:\{{(.*)\}})? (\S+)$", text, re.M)
    return {labels: float(value) for labels, value in found}


def assert_soon_shows(server: Server, name: str, values: Sequence[float]) -> None:
    """One sample for each of them, in any order, soon: metrics are brought up to date once a
    second."""
    deadline = time.monotonic() + LIMIT_S
    while sorted((shown := samples(server, name)).values()) != sorted(values):
        assert time.monotonic() < deadline, f"{name} is {shown}, not {values}"
        time.sleep(0.5)
