"""SGLang's own serving benchmark, run against a server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.server import Server


def bench_serving(
    server: Server, folder: Path, *, num_prompts: int, num_tokens: int
) -> tuple[float, dict[str, Any]]:
    """The accept length that it printed, and all that it wrote down."""
    result = folder / "bench.jsonl"
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
    command += ["--base-url", server.url, "--model", server.spec.model]
    command += ["--dataset-name", "random-ids", "--num-prompts", str(num_prompts)]
    command += ["--max-concurrency", "4", "--random-range-ratio", "1"]
    command += ["--random-input-len", "32", "--random-output-len", str(num_tokens)]
    command += ["--output-details", "--output-file", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    printed = re.search(r"Accept length:\s+([\d.]+)", run.stdout)
    assert printed, run.stdout[-2000:]
    written: dict[str, Any] = json.loads(result.read_text().splitlines()[-1])
    return float(printed[1]), written
