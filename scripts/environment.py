"""The environment that ./demo and ./run-tests share: made once, continued after an interruption.

Runs before anything is installed, so it uses the standard library alone.
Invariant: the stamp is written last. While it is missing or differs, pip is run again and takes up
what is already there; when it matches, nothing is started.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("SGLANG_SSD_VENV") or ROOT / ".venv").absolute()
MODELS = Path(os.environ.get("SGLANG_SSD_MODELS") or ROOT / ".cache" / "models").absolute()

# Measured on x86-64 Linux with the versions in constraints.txt.
INSTALLED_GB = 11.5
DOWNLOAD_GB = 4.5

SERVER_MODULES = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler")

NETWORK_SIGNS = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Max retries exceeded",
    "Connection refused",
    "Could not fetch URL",
)
DISK_SIGNS = ("No space left on device", "Errno 28", "Disk quota exceeded")


def fail(sentence: str) -> NoReturn:
    """End the command with one sentence and no traceback."""
    Progress.close_line()
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(1)


class Progress:
    """One status line: rewritten in place on a terminal, elsewhere printed every few seconds."""

    QUIET_S = 15.0
    on_terminal = sys.stdout.isatty()
    _line_is_open = False

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.started = time.monotonic()
        self._printed_at = float("-inf")
        self._printed = ""

    def show(self, detail: str, *, at_once: bool = False) -> None:
        now = time.monotonic()
        line = f"[{now - self.started:4.0f} s] {self.stage}: {detail}"
        if self.on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", flush=True)
            Progress._line_is_open = True
        elif at_once or now - self._printed_at >= self.QUIET_S:
            print(line, flush=True)
            self._printed_at = now

    @classmethod
    def close_line(cls) -> None:
        if cls._line_is_open:
            print(flush=True)
            cls._line_is_open = False


def enter_environment() -> None:
    """Make or complete the environment, then run this same command with its python."""
    python = VENV / "bin" / "python"
    # Images of containers set it; every process would then compile all of SGLang again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if not _stamp_matches(python):
        with _one_at_a_time():
            if not _stamp_matches(python):  # another command may have finished it meanwhile
                _install(python)
    if Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])


def _install(python: Path) -> None:
    _check_space(python)
    _make_venv(python)
    (VENV / "stamp").unlink(missing_ok=True)
    if _pip_version(python) < (25, 2):  # the first that resumes broken downloads by itself
        run_pip(python, ["install", "--upgrade", "pip>=25.2"], stage="pip")
    project = f"{ROOT}[test,bench]"
    constraints = str(ROOT / "constraints.txt")
    _drop_half_installed()
    # Compiling all modules would double the time; those that a server imports are compiled here,
    # once, rather than by its four processes at the same time.
    arguments = ["install", "--no-compile", "-c", constraints, "-e", project]
    run_pip(python, arguments, stage="environment")
    _import_once(python)
    _write_stamp(python)


def _import_once(python: Path) -> None:
    progress = Progress("environment")
    process = subprocess.Popen(
        [str(python), "-W", "ignore", "-c", f"import {', '.join(SERVER_MODULES)}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    with _ended_with_us(process):
        while True:
            progress.show("importing SGLang for the first time")
            try:
                _, said = process.communicate(timeout=2)
                break
            except subprocess.TimeoutExpired:
                continue
    if process.returncode != 0:
        reason = (said.strip().splitlines() or ["no reason given"])[-1]
        fail(f"SGLang is installed in {VENV} but cannot be imported: {reason}")
    progress.show("done", at_once=True)
    Progress.close_line()


def _make_venv(python: Path) -> None:
    if _suits(python):
        return
    if VENV.exists() and any(VENV.iterdir()) and not (VENV / "pyvenv.cfg").exists():
        fail(
            f"{VENV} has files in it that are no Python environment; "
            "set SGLANG_SSD_VENV to another folder."
        )
    Progress("environment").show(
        f"making {VENV} with Python {sys.version.split()[0]}", at_once=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True
    )
    if done.returncode != 0:
        fail(failure_sentence(done.stdout + done.stderr, what=f"making the environment in {VENV}"))


def _drop_half_installed() -> None:
    """Make pip install again what an interruption left half unpacked: RECORD is written last."""
    for metadata in VENV.glob("lib/python*/site-packages/*.dist-info"):
        if not (metadata / "RECORD").exists():
            shutil.rmtree(metadata)


def _suits(python: Path) -> bool:
    """Whether the environment there is whole enough to go on with."""
    check = "import sys, pip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))"
    try:
        return subprocess.run([python, "-c", check], capture_output=True).returncode == 0
    except OSError:
        return False


def _wanted_stamp(python: Path) -> str:
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    version = subprocess.run([python, "-V"], capture_output=True, text=True).stdout.strip()
    return f"{digest.hexdigest()} {version} {ROOT}\n"


def _stamp_matches(python: Path) -> bool:
    stamp = VENV / "stamp"
    return stamp.exists() and python.exists() and stamp.read_text() == _wanted_stamp(python)


def _write_stamp(python: Path) -> None:
    partial = VENV / "stamp.partial"
    partial.write_text(_wanted_stamp(python))
    partial.replace(VENV / "stamp")


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one command set up while a second one waits for it."""
    VENV.parent.mkdir(parents=True, exist_ok=True)
    with (VENV.parent / f"{VENV.name}.lock").open("w") as lock:
        progress = Progress("environment")
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress.show("waiting for another command that is setting up")
                time.sleep(1)
        yield


# --- disk space ---


def _check_space(python: Path) -> None:
    """Refuse before the first download if the disk cannot hold it."""
    missing = max(0.05, 1 - _size_gb(VENV) / INSTALLED_GB)
    wanted = [(VENV, (INSTALLED_GB + DOWNLOAD_GB) * missing), (_pip_cache(), DOWNLOAD_GB * missing)]
    for sentence in space_refusals(wanted):
        fail(sentence)


def space_refusals(wanted_gb: list[tuple[Path, float]]) -> list[str]:
    """One sentence per disk that is too small for all that goes onto it."""
    by_disk: dict[int, list[tuple[Path, float]]] = {}
    for folder, amount in wanted_gb:
        standing = _existing(folder)
        by_disk.setdefault(standing.stat().st_dev, []).append((folder, amount))
    refusals = []
    for entries in by_disk.values():
        folder, need = entries[0][0], sum(amount for _, amount in entries)
        free = free_gb(folder)
        if free < need:
            refusals.append(
                f"no disk space: {need:.1f} GB are needed in {folder} (downloads included) and "
                f"{free:.1f} GB are free; make room, or set SGLANG_SSD_VENV and SGLANG_SSD_MODELS "
                "to folders on a larger disk."
            )
    return refusals


def free_gb(folder: Path) -> float:
    return shutil.disk_usage(_existing(folder)).free / 1e9


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _size_gb(folder: Path) -> float:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total / 1e9


def _pip_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PIP_CACHE_DIR") or Path(base) / "pip")


# --- pip, with progress and with its failures in one sentence ---


def run_pip(python: Path, arguments: list[str], *, stage: str, work: Path = VENV) -> None:
    """Run pip to its end, with its log in `work`; on failure end the command with the reason."""
    scratch = work / "tmp"  # /tmp may be small, and what an interruption left there would stay
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    if _pip_version(python) >= (24, 1):  # older ones have no progress for a pipe
        command += ["--progress-bar", "raw"]
    output: list[str] = []
    with (work / "pip.log").open("a") as log:
        pip = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"},
        )
        with _ended_with_us(pip):
            for line in _lines_with_progress(pip, stage=stage, work=work):
                log.write(line)
                output.append(line)
    shutil.rmtree(scratch, ignore_errors=True)
    if pip.returncode != 0:
        what = f"installing with pip (stage: {stage})"
        fail(failure_sentence("".join(output), what=what, work=work))


def _pip_version(python: Path) -> tuple[int, ...]:
    command = [python, "-c", "import pip; print(pip.__version__)"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _lines_with_progress(
    process: subprocess.Popen[str], *, stage: str, work: Path
) -> Iterator[str]:
    """Yield the lines of the process while keeping the status line alive."""
    assert process.stdout is not None, "the process was started with a pipe"
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    progress, step, free_before, written = Progress(stage), "starting", free_gb(work), 0.0
    while True:
        try:
            line = lines.get(timeout=2)
        except queue.Empty:
            written = max(written, free_before - free_gb(work))
            progress.show(f"{step} ({written:.1f} GB written)")
            continue
        if line is None:
            break
        yield line
        new_step = describe_pip_line(line, step)
        if new_step != step:
            step = new_step
            progress.show(step, at_once=_is_large(step))
    process.wait()
    progress.show("done" if process.returncode == 0 else "failed", at_once=True)
    Progress.close_line()


def describe_pip_line(line: str, step: str) -> str:
    """What to show after this line of pip's output; `step` is what is shown now."""
    if found := re.match(r"Progress (\d+) of (\d+)", line):
        done, total = (int(number) / 1e6 for number in found.groups())
        return f"{step.split(':')[0]}: {done:.0f} of {total:.0f} MB" if total >= 20 else step
    if found := re.match(r"\s*Downloading ([A-Za-z0-9_.]+?)-\d\S* \(([^)]+)\)", line):
        return f"downloading {found[1]} ({found[2]})"
    if found := re.match(r"Collecting ([A-Za-z0-9_.-]+)", line):
        return f"resolving {found[1]}"
    if line.startswith("Installing collected packages:"):
        return f"unpacking {line.count(',') + 1} packages"
    if line.strip().startswith(("Installing build dependencies", "Building", "Preparing")):
        return "preparing the build of this project"
    return step


def _is_large(step: str) -> bool:
    """Steps long enough to deserve a line of their own where lines cannot be rewritten."""
    size = re.fullmatch(r"downloading \S+ \(([\d.]+) MB\)", step)
    return step.startswith("unpacking") or (size is not None and float(size[1]) >= 50)


def failure_sentence(output: str, *, what: str, work: Path = VENV) -> str:
    """The one sentence for a failed step, from what it printed."""
    if any(sign in output for sign in DISK_SIGNS):
        return (
            f"no disk space was left while {what} ({free_gb(work):.1f} GB free in {work}); "
            "make room and run the same command again, it goes on where it stopped."
        )
    if any(sign in output for sign in NETWORK_SIGNS):
        return (
            f"no network: the package index could not be reached while {what}; "
            "check the connection (or proxy) and run the same command again."
        )
    last = [line.strip() for line in output.splitlines() if line.strip()][-3:]
    return f"{what} failed (all output: {work / 'pip.log'}): {' | '.join(last)}"


@contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever ends this command ends its child too."""
    try:
        yield
    except BaseException:
        process.terminate()
        process.wait()
        raise


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the command with a sentence and a shell's exit code for the signal."""

    def stop(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        Progress.close_line()
        print("stopped; the same command goes on from here.", file=sys.stderr, flush=True)
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        raise SystemExit(128 + number) from None
