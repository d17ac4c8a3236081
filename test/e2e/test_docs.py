"""Every command of the user guide and the operations page is run, in order, as it stands there.

What stands for something of the reader's own (TARGET, a port, a folder) is put in, and amounts are
made small. A command that serves is waited for, and stopped when another one takes its place.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests as http

from harness.checkpoints import make_drafter
from servers import free_port

pytestmark = pytest.mark.timeout(7200)
"""A page starts several servers, each of which may take READY_S."""

ROOT = Path(__file__).parents[2]
PAGES = ("user_guide.md", "operations.md")
"""Whose commands are run."""
SIZES = " --context-length 2048 --max-total-tokens 4096"
READY_S = 900.0
RUN_S = 3000.0
"""Of a block of commands; one has those of test/faults, which start three servers one by one."""


def commands_of(page: str) -> list[str]:
    """The blocks marked sh: a command each, or several lines of them."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    return [block.strip() for block in blocks]


class Reader:
    """Someone who types the commands of a page into a terminal."""

    def __init__(self, target: Path, folder: Path) -> None:
        self._folder = folder
        self._port = str(free_port())
        self._serving: dict[str, subprocess.Popen[bytes]] = {}
        sockets = folder / "run"
        sockets.mkdir()
        self._names = {
            "TARGET": str(target),
            "DRAFTER_HOST": "127.0.0.1",
            "DRAFT": str(target),
            "/models/other-draft": str(make_drafter("noisy", target)),
            "30000": self._port,
            ":7000": f":{free_port()}",
            "/run/ssd": str(sockets),
            "python -m": f"{sys.executable} -m",
            "python test": f"{sys.executable} {ROOT}/test",
            "python benchmark": f"{sys.executable} {ROOT}/benchmark",
            "--out times.json": "--repeats 2 --widths 1 5 --rows 3 15 --out times.json",
            "--frames 100000": "--frames 3000",
            "--faults 200": "--faults 7",
            "chaos.py --model MODEL": f"chaos.py --faults 2 --model {target}",
            "soak.py --model MODEL": f"soak.py --minutes 0.3 --model {target}",
        }

    def type(self, command: str) -> None:
        for name, value in self._names.items():
            command = command.replace(name, value)
        if "sglang_ssd.launch_server" in command:
            port = "" if "--port" in command else f" --port {self._port}"
            self._serve("server", command + port + SIZES)
        elif "sglang_ssd.drafter" in command:
            self._serve("drafter", command)
        else:
            if "test/faults" in command:  # they start servers of their own, and judge times
                self.stop()
            self._run(command)
        if "sglang_ssd.keys" in command:  # "copy to the two machines"
            for side in ("drafter", "target"):
                shutil.copytree(self._folder / "keys" / side, self._folder / side)

    def stop(self) -> None:
        for role in list(self._serving):
            self._stop(role)

    def _run(self, command: str) -> None:
        run = subprocess.run(
            ["bash", "-ec", command],
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
        assert run.stdout, command
        assert not re.search(r'"error"\s*:\s*\{', run.stdout), run.stdout

    def _serve(self, role: str, command: str) -> None:
        """A drafter of one's own comes before the server that names it."""
        self._stop("server")
        self._stop(role)
        log = self._folder / f"{role}.log"
        with log.open("wb") as out:
            self._serving[role] = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                cwd=self._folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_S
        while not self._is_ready(role, log):
            assert self._serving[role].poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)

    def _is_ready(self, role: str, log: Path) -> bool:
        if role == "drafter":
            return "ready at" in log.read_text(errors="replace")
        try:
            return http.get(f"http://127.0.0.1:{self._port}/health", timeout=5).ok
        except http.RequestException:
            return False

    def _stop(self, role: str) -> None:
        process = self._serving.pop(role, None)
        if process is not None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_run(page: str, target: Path, tmp_path: Path) -> None:
    """Red when a command of the docs fails, or a server of it does not come up."""
    reader = Reader(target, tmp_path)
    try:
        if page == "operations.md":  # its reader has a server
            reader.type(commands_of("user_guide.md")[0])
        for command in commands_of(page):
            reader.type(command)
    finally:
        reader.stop()


def test_amounts_are_made_small() -> None:
    """Red when a command of hours is written another way and would be run as it stands."""
    for page in PAGES:
        for command in commands_of(page):
            assert command.count("soak.py") == command.count("soak.py --model MODEL"), command
            assert command.count("/chaos.py") == command.count("/chaos.py --model MODEL"), command
            assert command.count("fuzz_wire.py") == command.count("--frames 100000"), command
            assert command.count("bench_round.py") == command.count("--out times.json"), command


def test_commands_stand_where_they_are_run() -> None:
    """Red when a page has a command in a line of text, or in a block that nobody runs."""
    for path in (ROOT / "docs").glob("*.md"):
        text = path.read_text()
        assert path.name in PAGES or "```sh" not in text, path.name
        outside = re.sub(r"```.*?```", "", text, flags=re.S)
        commands = re.findall(r"`((?:SGLANG_[^`\n]*)?(?:python|curl) [^`\n]*)`", outside)
        assert not commands, f"{path.name}: {commands}"
