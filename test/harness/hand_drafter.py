"""A drafter that was started by hand, as docs/operations.md tells: no server's child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from harness.server import KV_TOKENS
from sglang_ssd.config import CONFIG_ENV, SsdConfig
from sglang_ssd.platform.affinity import format_cores, split_cores
from sglang_ssd.wire.endpoints import is_here


@contextmanager
def drafter_by_hand(
    model: Path,
    endpoint: str,
    *flags: str,
    settings: Mapping[str, Any] | None = None,
    log: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """One that starts, on the cores that targets leave: on this machine of its own accord.

    settings: SsdConfig fields of its environment. log: where it logs to, unless beside the test.
    """
    argv = ["--model-path", str(model), "--endpoint", endpoint, "--device", "cpu"]
    argv += ["--dtype", "float32", "--max-total-tokens", str(KV_TOKENS), *flags]
    if not is_here(endpoint):
        cores = split_cores(SsdConfig(), tuple(sorted(os.sched_getaffinity(0)))).drafter
        argv += ["--cores", format_cores(cores)]
    with nullcontext() if log is None else log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_ssd.drafter", *argv],
            env={**os.environ, CONFIG_ENV: json.dumps(settings or {})},
            stderr=stderr,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
