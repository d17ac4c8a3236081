"""A drafter that was started by hand, as docs/operations.md tells: no server's child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.server import KV_TOKENS
from sglang_ssd.config import CONFIG_ENV


@contextmanager
def drafter_by_hand(
    model: Path, endpoint: str, *flags: str, settings: Mapping[str, Any] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """One that starts; a server waits for it. settings: SsdConfig fields of its environment."""
    argv = ["--model-path", str(model), "--endpoint", endpoint, "--device", "cpu"]
    argv += ["--dtype", "float32", "--max-total-tokens", str(KV_TOKENS), *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_ssd.drafter", *argv],
        env={**os.environ, CONFIG_ENV: json.dumps(settings or {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
