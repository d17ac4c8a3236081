"""Set up everything, serve the demo model with SSD on, and stop it all on Ctrl-C.

The drafter is the target's own model in bfloat16: that shows the mechanism, not speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
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
MEMORY_FILE = Path("/proc/meminfo")
NEEDED_MEMORY_GB = 5.5  # of server, target and drafter, each with its KV
START_LIMIT_S = 600
STOP_LIMIT_S = 30
KV_TOKENS = 16384  # enough for a demo; by default each process takes most of the memory
STAGES = (
    ("loading SGLang", r""),
    ("starting the drafter", r"drafter"),
    ("loading the weights", r"Load weight begin"),
    ("waiting for the drafter", r"Load weight end"),
    ("allocating memory", r"SSD drafter ready"),
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
    # These two are the server's, but whoever asks it something has to know them.
    parser.add_argument("--api-key", help="key that the server asks for")
    parser.add_argument("--served-model-name", help="name of the model in requests")
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


def check_memory() -> None:
    """Before the start, for SGLang only says that it cannot place its cache, minutes later."""
    free = free_memory_gb()
    if free is not None and free < NEEDED_MEMORY_GB:
        fail(
            f"too little memory: the demo needs {NEEDED_MEMORY_GB} GB and {free:.1f} GB are free; "
            "stop something else and run it again."
        )


def free_memory_gb() -> float | None:
    """What a program can still have; None where the system does not tell."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMORY_FILE.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 / 1e9 if found else None
    return None


def log_of(port: int) -> Path:
    return ROOT / ".cache" / f"demo-server-{port}.log"


def server_command(model: Path, arguments: argparse.Namespace, extra: list[str]) -> list[str]:
    options = {
        "--model-path": model,
        "--served-model-name": arguments.served_model_name or model.name,
        "--host": HOST,
        "--port": arguments.port,
        "--dtype": "float32",
        "--max-total-tokens": KV_TOKENS,
        "--speculative-algorithm": "SSD",
        "--speculative-draft-model-path": model,
        "--speculative-num-steps": 4,
        "--ssd-drafter-dtype": "bfloat16",
        "--ssd-reply-deadline-ms": 2000,  # as large as the target, the drafter takes its time
        "--ssd-drafter-max-total-tokens": KV_TOKENS,
    }
    if arguments.api_key:
        options["--api-key"] = arguments.api_key
    flags = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "sglang_ssd.launch_server", *flags, *extra]


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log_file: Path) -> None:
    progress = Progress("server")
    while not _answers(f"{url}/health"):
        log = log_file.read_text(errors="replace")
        if server.poll() is not None:
            fail(start_failure(log, log_file))
        if time.monotonic() - progress.started > START_LIMIT_S:
            fail(f"the server was not ready after {START_LIMIT_S} s; its log is {log_file}.")
        stage = [name for name, pattern in STAGES if re.search(pattern, log)][-1]
        progress.show(stage)
        time.sleep(1)
    Progress.close_line()


def start_failure(log: str, log_file: Path) -> str:
    """One sentence for a server that ended before it was ready."""
    if "address already in use" in log.lower():
        return "the port was taken while the server started; choose another with --port."
    if "No space left on device" in log:
        return "the server found no disk space left; make room and run ./demo again."
    if "memory for the KV cache" in log:
        return "the server found too little memory; stop something else and run ./demo again."
    said = _last_word(log)
    return f"the server ended before it was ready and said: {said} (all of it in {log_file})"


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


def try_one_request(url: str, api_key: str | None) -> str:
    """Serve one request as a proof of life; returns what came of it."""
    body = {
        "text": "The capital of France is",
        "sampling_params": {"max_new_tokens": 32, "temperature": 0},
    }
    request = urllib.request.Request(
        f"{url}/generate",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **_key_header(api_key)},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.load(reply)
    except (urllib.error.URLError, OSError) as error:
        fail(f"the server is ready, but its first request failed: {error}")
    rounds = answer["meta_info"].get("spec_verify_ct", 0)
    tokens = answer["meta_info"]["completion_tokens"]
    first, *rest = answer["text"].strip().splitlines() or ["nothing"]
    return f"{tokens} tokens in {rounds} target rounds: The capital of France is {first}" + (
        " [..]" if rest else ""
    )


def _key_header(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def ready_message(url: str, model: str, api_key: str | None, log_file: Path) -> str:
    question = [{"role": "user", "content": "Name three colours."}]
    body = {"model": model, "messages": question, "max_tokens": 64, "temperature": 0}  # it rambles
    chat = json.dumps(body)
    key = "".join(f" -H {shlex.quote(f'{k}: {v}')}" for k, v in _key_header(api_key).items())
    return f"""
SSD is serving {model} on {url} (Ctrl-C stops it; log: {log_file}).
Try it from another terminal:

  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\
    -d {shlex.quote(chat)}
  curl {url}/ssd/status{key}    # hits, misses, and how the drafter fares
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
    if not arguments.setup_only:
        check_memory()
    enter_environment()
    model = ensure_demo_model(MODELS)
    if arguments.setup_only:
        print("everything is here; ./demo starts the server", flush=True)
        return
    url, log_file = f"http://{HOST}:{arguments.port}", log_of(arguments.port)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log:
        server = subprocess.Popen(
            server_command(model, arguments, extra),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end the whole group
        )
    try:
        wait_until_ready(server, url, log_file)
        print(try_one_request(url, arguments.api_key), flush=True)
        name = arguments.served_model_name or model.name
        print(ready_message(url, name, arguments.api_key, log_file), flush=True)
        server.wait()
        said = _last_word(log_file.read_text(errors="replace"))
        fail(f"the server ended and said: {said} (all of it in {log_file})")
    finally:
        stop(server)


if __name__ == "__main__":
    with interruptible():
        main()
