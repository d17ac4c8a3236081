"""A real server as a child process: started one of three ways, watched, stopped, and counted out.

A server is described by a `ServerSpec`, which is also its key: equal specs are the same server.
The processes of a server (its workers and the drafter) are remembered while it lives, so that a
test can prove that none is left. Only processes that were started here are ever signalled.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import requests

from servers import free_port
from sglang_ssd.wire.curve import KeyFiles

READY_LIMIT_S = 600.0
STOP_LIMIT_S = 60.0

Entry = Literal["launcher", "sglang serve", "sglang.launch_server"]

KV_TOKENS = 12288
"""Of the target and of the drafter: three servers at a time fit in 16 GB."""

OVERLAP: tuple[tuple[str, Any], ...] = (("overlap", True),)
"""Settings of a server with overlap scheduling, which SSD leaves out by default."""
SCHEDULES = {"no-overlap": (), "overlap": OVERLAP}
"""Settings by name, of tests that hold under both."""

COMMON_FLAGS = (
    *("--device", "cpu"),
    *("--dtype", "float32"),
    *("--host", "127.0.0.1"),
    *("--context-length", "2048"),
    *("--max-total-tokens", str(KV_TOKENS)),
    *("--max-running-requests", "16"),
    *("--mem-fraction-static", "0.9"),  # the pools are bounded above; other servers run beside
    *("--random-seed", "7"),
    *("--decode-log-interval", "8"),  # SGLang's accept length is of whole intervals
    "--enable-custom-logit-processor",
    "--sleep-on-idle",  # several servers share the cores
)


class ServerSpec(msgspec.Struct, frozen=True):
    model: str
    drafter: str | None = None
    """None: no speculation."""
    entry: Entry = "launcher"
    num_steps: int = 4
    flags: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    """SsdConfig fields: --ssd-* flags of the launcher, the environment of the others."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables beside those of this process."""


def all_settings(spec: ServerSpec) -> dict[str, Any]:
    """SsdConfig fields of a server with speculation.

    Equality of tokens proves something in fp32 only, and while drafts are in time: a deadline that
    a busy machine keeps.
    """
    return {
        "drafter_dtype": "float32",
        "drafter_max_total_tokens": KV_TOKENS,
        "reply_deadline_ms": 5000,
        "reply_deadline_min_ms": 5000,
        **dict(spec.settings),
    }


def command(spec: ServerSpec, port: int) -> list[str]:
    module = {
        "launcher": ["-m", "sglang_ssd.launch_server"],
        "sglang.launch_server": ["-m", "sglang.launch_server"],
        "sglang serve": ["-c", "from sglang.cli.main import main; main()", "serve"],
    }[spec.entry]
    argv = [sys.executable, *module, "--model-path", spec.model, "--port", str(port)]
    argv += [*COMMON_FLAGS, *spec.flags]
    if spec.drafter is None:
        return argv
    argv += ["--speculative-algorithm", "SSD", "--speculative-num-steps", str(spec.num_steps)]
    argv += ["--speculative-draft-model-path", spec.drafter]
    if spec.entry == "launcher":
        for name, value in all_settings(spec).items():
            argv += setting_flag(name, value)
    return argv


def setting_flag(name: str, value: Any) -> list[str]:
    flag = "--ssd-" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, list | tuple):
        return [flag, ",".join(str(item) for item in value)]
    return [flag, str(value)]


def environment(spec: ServerSpec) -> dict[str, str]:
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.pop("SGLANG_SSD_CONFIG", None)
    env.update(spec.env)
    if spec.entry != "launcher":
        env["SGLANG_PLATFORM"] = "ssd_cpu"
        if spec.drafter is not None:
            env["SGLANG_SSD_CONFIG"] = json.dumps(all_settings(spec))
    return env


class Server:
    """One started server. Use `start`, then the url; `stop` proves that nothing of it is left."""

    def __init__(self, spec: ServerSpec, *, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_seconds = 0.0
        self._family: dict[int, psutil.Process] = {}
        _let_children_be_interrupted()
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command(spec, self.port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(spec),
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._process

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, limit_s: float = READY_LIMIT_S) -> Server:
        start = time.monotonic()
        while not self.healthy():
            self.family()
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.describe()} ended at start:\n{self.log_tail()}")
            if time.monotonic() - start > limit_s:
                self.stop(signal.SIGKILL)
                raise RuntimeError(
                    f"{self.describe()} not ready in {limit_s} s:\n{self.log_tail()}"
                )
            time.sleep(0.3)
        self.start_seconds = time.monotonic() - start
        self.family()
        return self

    def healthy(self, timeout_s: float = 5.0) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=timeout_s).status_code == 200
        except requests.RequestException:
            return False

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, limit_s: float) -> int:
        """Exit code of a server that is to end by itself; TimeoutExpired if it does not."""
        deadline = time.monotonic() + limit_s
        while self._process.poll() is None and time.monotonic() < deadline:
            self.family()
            time.sleep(0.2)
        return self._process.wait(max(0.1, deadline - time.monotonic()))

    def family(self) -> list[psutil.Process]:
        """Every process of this server that still lives, the drafter among them."""
        try:
            root = psutil.Process(self.pid)
            found = [root, *root.children(recursive=True)] if self._process.poll() is None else []
        except psutil.NoSuchProcess:
            found = []
        for process in found:
            self._family.setdefault(process.pid, process)
        return [process for process in self._family.values() if _lives(process)]

    def drafter_processes(self) -> list[psutil.Process]:
        """Those that it started: one for each replica, none if it names an endpoint."""
        return [p for p in self.family() if "sglang_ssd.drafter" in _command_of(p)]

    def drafter_process(self) -> psutil.Process:
        (process,) = self.drafter_processes()
        return process

    def drafter_endpoint(self) -> str:
        named: str | None = dict(self.spec.settings).get("endpoint")
        return named if named is not None else endpoint_of(self.drafter_process())

    def drafter_keys(self) -> KeyFiles | None:
        """Those with which it connects to a drafter that it names by endpoint."""
        named = dict(self.spec.settings)
        if "secret_key" not in named:
            return None
        return KeyFiles(secret=named["secret_key"], peers=named["peer_keys"])

    def stop(self, how: signal.Signals = signal.SIGTERM, limit_s: float = STOP_LIMIT_S) -> int:
        """Send one signal and wait until all processes of the server are gone.

        SIGINT goes to its whole process group, as a terminal's Ctrl-C does, any other signal to
        the server's own process. Raises with their names if some are left; those are killed first,
        so that a failing test leaves nothing behind.
        """
        self.family()
        if self._process.poll() is None:
            send = os.killpg if how is signal.SIGINT else os.kill
            send(self.pid, how)
        deadline = time.monotonic() + limit_s
        while (self._process.poll() is None or self.family()) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [f"{p.pid} {' '.join(_command_of(p))[:120]}" for p in self.family()]
        for process in self.family():
            process.kill()
        code = self._process.wait(10)
        if left:
            raise RuntimeError(f"{self.describe()}: left after {how.name}: {left}")
        return code

    def ssd(self) -> dict[str, Any]:
        """The drafter's state and counters as /server_info shows them."""
        info = requests.get(f"{self.url}/server_info", timeout=30).json()
        state: dict[str, Any] = info["internal_states"][0]["ssd"]
        return state

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, num_lines: int = 40) -> str:
        lines = self.log_text().splitlines()[-num_lines:]
        return "\n".join(line[:300] for line in lines)

    def describe(self) -> str:
        return f"server {self.pid} ({self.spec.entry}, log {self.log_path})"


def endpoint_of(drafter: psutil.Process) -> str:
    argv = drafter.cmdline()
    return argv[argv.index("--endpoint") + 1]


def _let_children_be_interrupted() -> None:
    """A shell's background job ignores SIGINT, and what it starts inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return ["?"]


class ServerPool:
    """The servers of a test session: each spec is started once, and few live at the same time."""

    def __init__(self, log_dir: Path, *, max_live: int = 1) -> None:
        self._log_dir = log_dir
        self._max_live = max_live
        self._live: dict[ServerSpec, Server] = {}
        self._num_started = 0

    def get(self, spec: ServerSpec) -> Server:
        """The running server of this spec, or a new one; the longest unused one makes room."""
        server = self._live.pop(spec, None)
        if server is None or not server.alive():
            while len(self._live) >= self._max_live:
                self._live.pop(next(iter(self._live))).stop()
            server = self.start(spec)
            self._live[spec] = server  # before it is ready, so that stop_all ends it in any case
            server.wait_until_ready()
        self._live[spec] = server
        return server

    def take(self, spec: ServerSpec) -> Server:
        """Like get, but the caller owns it from now on and stops it."""
        server = self.get(spec)
        del self._live[spec]
        return server

    def start(self, spec: ServerSpec) -> Server:
        """A server of the caller's own, perhaps not ready yet."""
        self._num_started += 1
        return Server(spec, log_path=self._log_dir / f"server-{self._num_started}.log")

    def stop_all(self) -> None:
        while self._live:
            self._live.pop(next(iter(self._live))).stop()
