"""SGLang's own serving benchmark, run against a server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from harness.server import Server

Backend = Literal["sglang", "sglang-oai", "sglang-oai-chat"]
"""/generate, /v1/completions and /v1/chat/completions."""


def flags_for(texts: Sequence[str], folder: Path, *, num_tokens: int) -> tuple[str, ...]:
    """That have these prompts asked, in place of random ids."""
    path = folder / "prompts.jsonl"
    turns = ([{"content": text}, {"content": "its answer, unread"}] for text in texts)
    path.write_text("\n".join(json.dumps({"conversations": both}) for both in turns))
    dataset = ("--dataset-name", "custom", "--dataset-path", str(path))
    return (*dataset, "--sharegpt-output-len", str(num_tokens))


def bench_serving(
    server: Server,
    folder: Path,
    *,
    num_prompts: int,
    num_tokens: int,
    backend: Backend = "sglang",
    streamed: bool = True,
    flags: Sequence[str] = (),
) -> tuple[float, dict[str, Any]]:
    """The accept length that it printed, and all that it wrote down; flags win over ours."""
    result = folder / "bench.jsonl"
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", backend]
    command += ["--base-url", server.url, "--model", server.spec.model]
    command += ["--dataset-name", "random-ids", "--num-prompts", str(num_prompts)]
    command += ["--max-concurrency", "4", "--random-range-ratio", "1"]
    command += ["--random-input-len", "32", "--random-output-len", str(num_tokens)]
    command += [*flags] if streamed else ["--disable-stream", *flags]
    command += ["--output-details", "--output-file", str(result)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    printed = re.search(r"Accept length:\s+([\d.]+)", run.stdout)
    assert printed, run.stdout[-2000:]
    written: dict[str, Any] = json.loads(result.read_text().splitlines()[-1])
    return float(printed[1]), written
