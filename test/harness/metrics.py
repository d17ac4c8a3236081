"""A server's metrics as Prometheus would read them."""

from __future__ import annotations

import re

import requests

from harness.server import Server


def samples(server: Server, name: str) -> dict[str, float]:
    """Values of the metric `sglang:<name>` by the text of its labels."""
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    found = re.findall(rf"^sglang:{name}(?:\{{(.*)\}})? (\S+)$", text, re.M)
    return {labels: float(value) for labels, value in found}
