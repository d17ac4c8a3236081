"""Servers of a comparison: started, paused while another is measured, stopped, whatever happens.

SGLang's scheduler polls when it is idle, so of several servers that are up all but one are stopped
with SIGSTOP, drafter included. How many may be up is a question of memory: each holds its weights.
A pool starts servers on demand and ends the one that was used longest ago to make room.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

HOST = "127.0.0.1"
START_LIMIT_S = 900
STOP_LIMIT_S = 20
LOG_TAIL_LINES = 25


class ServerSpec(msgspec.Struct, frozen=True):
    """One row of the comparison."""

    name: str
    flags: tuple[str, ...]  # of sglang_ssd.launch_server
    traced: bool


class Server:
    """A running server and all that it started."""

    def __init__(self, spec: ServerSpec, folder: Path) -> None:
        self.spec = spec
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._num_starts = 0
        self.url = ""

    @property
    def trace_files(self) -> list[Path]:
        """One for each time it was started."""
        return sorted(self._folder.glob(f"{self._slug()}.*.trace"))

    def start(self) -> None:
        """Returns when it answers; raises RuntimeError with the end of its log if it does not."""
        self._num_starts += 1
        base = self._folder / f"{self._slug()}.{self._num_starts}"
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        flags = [*self.spec.flags, "--host", HOST, "--port", str(port)]
        if self.spec.traced:
            flags += ["--ssd-trace", f"{base}.trace"]
        environment = dict(os.environ)
        environment.pop("OMP_NUM_THREADS", None)  # the cores of a server say how many threads
        log = Path(f"{base}.log")
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_ssd.launch_server", *flags],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._wait_until_ready(log)

    def get_json(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as reply:
            return msgspec.json.decode(reply.read())

    def pause(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def stop(self) -> None:
        """End it and whatever of its own is left; harmless when it is gone."""
        if self._process is None:
            return
        tree = self._tree()
        self.resume()
        self._process.terminate()
        _, alive = psutil.wait_procs(tree, timeout=STOP_LIMIT_S)
        for process in alive:
            process.kill()
        self._process.wait()
        self._process = None

    def _slug(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.spec.name.lower())

    def _tree(self) -> list[psutil.Process]:
        assert self._process is not None, "start it first"
        try:
            main = psutil.Process(self._process.pid)
            return [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def _wait_until_ready(self, log: Path) -> None:
        assert self._process is not None, "started just now"
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        raise RuntimeError(f"server {self.spec.name} did not come up; its log ends with\n{tail}")


class ServerPool:
    """At most num_up servers, all paused but the one in use."""

    def __init__(self, folder: Path, *, num_up: int, announce: Callable[[str], None]) -> None:
        self._folder = folder
        self._num_up = num_up
        self._announce = announce
        self._servers: dict[str, Server] = {}
        self._up: OrderedDict[str, Server] = OrderedDict()  # least recently used first

    @contextmanager
    def use(self, spec: ServerSpec) -> Iterator[Server]:
        """The server, running alone; paused again afterwards."""
        server = self._servers.setdefault(spec.name, Server(spec, self._folder))
        if spec.name in self._up:
            server.resume()
        else:
            while len(self._up) >= self._num_up:
                self._up.popitem(last=False)[1].stop()
            self._announce(f"{spec.name}: starting")
            self._up[spec.name] = server
            server.start()
        self._up.move_to_end(spec.name)
        yield server
        server.pause()

    def trace_files(self, name: str) -> list[Path]:
        return self._servers[name].trace_files

    def stop_all(self) -> None:
        while self._up:
            self._up.popitem()[1].stop()


def free_port() -> int:
    """One below those that the system gives to connections: still free when SGLang binds it."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise RuntimeError("no free port in 20000..29999")
