"""The README's demo command as a newcomer runs it, and the example clients against a server."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import environment
import psutil
import pytest

pytestmark = pytest.mark.slow  # the demo starts a server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo_port() -> Iterator[int]:
    """A running ./demo; at the end Ctrl-C must leave none of its processes."""
    if not environment._stamp_matches(environment.VENV / "bin" / "python"):
        pytest.skip("this environment was not made by ./run-tests, so ./demo would make another")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with _demo(port) as demo:
        _wait_for_curl(demo)
        processes = psutil.Process(demo.pid).children(recursive=True)
        assert len(processes) >= 3, "server, scheduler and drafter at least"
        yield port
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
        assert [process for process in processes if process.is_running()] == []


@contextmanager
def _demo(port: int) -> Iterator[subprocess.Popen[str]]:
    command = [str(ROOT / "demo"), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        try:
            yield demo
        finally:
            demo.terminate()


def _wait_for_curl(demo: subprocess.Popen[str]) -> None:
    assert demo.stdout is not None, "the demo was started with a pipe"
    for line in demo.stdout:
        if "curl http" in line:
            return
    pytest.fail(f"./demo ended with {demo.wait()} before its ready line")


def test_the_demo_speculates(demo_port: int) -> None:
    body = {
        "text": "One, two, three, four,",
        "sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{demo_port}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        meta = json.load(reply)["meta_info"]
    assert meta["completion_tokens"] == 48
    assert meta["spec_verify_ct"] < 48, "no draft was right, with the target's own weights"


@pytest.mark.parametrize("name", ["openai_chat.py", "sgl_frontend.py"])
def test_the_examples_run(demo_port: int, name: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / name)]
    command += ["--url", f"http://127.0.0.1:{demo_port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if name == "openai_chat.py":
        whole, streamed = done.stdout.split("\n\nstreamed:\n")
        assert whole.split("whole:\n")[1].strip() == streamed.strip() != ""
    else:
        assert done.stdout.rstrip().endswith(("chosen: sleep", "chosen: walking"))
