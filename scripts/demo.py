"""Set up everything, serve the demo model with SSD on, and stop it all on Ctrl-C.

The drafter is the target's own model in bfloat16: that shows the mechanism, not speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from demo_model import ensure_demo_model
from environment import MODELS, ROOT, Progress, enter_environment, fail, interruptible

HOST = "127.0.0.1"
LOG = ROOT / ".cache" / "demo-server.log"
START_LIMIT_S = 600
STOP_LIMIT_S = 30
KV_TOKENS = 32768  # enough for a demo; by default each process takes most of the memory
STAGES = (
    ("loading SGLang", r""),
    ("starting the drafter", r"drafter"),
    ("loading the weights", r"Load weight begin"),
    ("allocating memory", r"Load weight end"),
    ("warming up", r"Uvicorn running|Application startup complete"),
)
"""What the start is doing, by the last of these patterns that its log shows."""


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="./demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any other option goes to the server, for example --ssd-mode sync.",
    )
    parser.add_argument("--port", type=int, default=30000, help="port to serve on (default 30000)")
    parser.add_argument("--setup-only", action="store_true", help="fetch everything, start nothing")
    return parser.parse_known_args()


def check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        fail(f"--port {port} is not a port; it must be between 1 and 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            fail(f"port {port} may not be used by this user; choose one above 1023 with --port.")
        except OSError:
            fail(f"port {port} is in use; stop what listens there or choose another with --port.")


def server_command(model: Path, port: int, extra: list[str]) -> list[str]:
    options = {
        "--model-path": model,
        "--served-model-name": model.name,
        "--host": HOST,
        "--port": port,
        "--dtype": "float32",
        "--max-total-tokens": KV_TOKENS,
        "--speculative-algorithm": "SSD",
        "--speculative-draft-model-path": model,
        "--speculative-num-steps": 4,
        "--ssd-drafter-dtype": "bfloat16",
        "--ssd-reply-deadline-ms": 2000,  # as large as the target, the drafter takes its time
        "--ssd-drafter-max-total-tokens": KV_TOKENS,
    }
    flags = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "sglang_ssd.launch_server", *flags, *extra]


def wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    progress = Progress("server")
    while not _answers(f"{url}/health"):
        log = LOG.read_text(errors="replace")
        if server.poll() is not None:
            fail(start_failure(log))
        if time.monotonic() - progress.started > START_LIMIT_S:
            fail(f"the server was not ready after {START_LIMIT_S} s; its log is {LOG}.")
        stage = [name for name, pattern in STAGES if re.search(pattern, log)][-1]
        progress.show(stage)
        time.sleep(1)
    Progress.close_line()


def start_failure(log: str) -> str:
    """One sentence for a server that ended before it was ready."""
    if "address already in use" in log.lower():
        return "the port was taken while the server started; choose another with --port."
    if "No space left on device" in log:
        return "the server found no disk space left; make room and run ./demo again."
    return f"the server ended before it was ready and said: {_last_word(log)} (all of it in {LOG})"


def _last_word(log: str) -> str:
    """The last error that the server named, or else its last line."""
    errors = [line for line in log.splitlines() if re.match(r"\S*(Error|Exception|error)\b", line)]
    return errors[-1] if errors else (log.strip().splitlines() or ["nothing"])[-1]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


def try_one_request(url: str) -> str:
    """Serve one request as a proof of life; returns what came of it."""
    body = {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 32, "temperature": 0},
    }
    request = urllib.request.Request(
        f"{url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    rounds = answer["meta_info"].get("spec_verify_ct", 0)
    tokens = answer["meta_info"]["completion_tokens"]
    first, *rest = answer["text"].strip().splitlines()
    return f"{tokens} tokens in {rounds} target rounds: The capital of France is {first}" + (
        " [..]" if rest else ""
    )


def ready_message(url: str, model: str) -> str:
    question = [{"role": "user", "content": "Name three colours."}]
    body = {"model": model, "messages": question, "max_tokens": 64, "temperature": 0}  # it rambles
    chat = json.dumps(body)
    return f"""
SSD is serving {model} on {url} (Ctrl-C stops it; log: {LOG}).
Try it from another terminal:

  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{chat}'
  curl {url}/ssd/status    # hits, misses, and how the drafter fares
"""


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and whatever it started; they share one process group of their own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave anything behind
    Progress.close_line()
    print("stopping the server", flush=True)
    server.terminate()  # it ends its own children; a signal to them all looks like a crash to it
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(STOP_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def main() -> None:
    arguments, extra = parse_arguments()
    check_port(arguments.port)
    enter_environment()
    model = ensure_demo_model(MODELS)
    if arguments.setup_only:
        return
    url = f"http://{HOST}:{arguments.port}"
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("wb") as log:
        server = subprocess.Popen(
            server_command(model, arguments.port, extra),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end the whole group
        )
    try:
        wait_until_ready(server, url)
        print(try_one_request(url), flush=True)
        print(ready_message(url, model.name), flush=True)
        server.wait()
        said = _last_word(LOG.read_text(errors="replace"))
        fail(f"the server ended and said: {said} (all of it in {LOG})")
    finally:
        stop(server)


if __name__ == "__main__":
    with interruptible():
        main()
