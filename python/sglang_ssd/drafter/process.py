"""The drafter process as its starter sees it: what it is told, how it is started, watched and
stopped.

The target's TP rank 0 calls start_drafter before its own weights load and goes on at once; whether
the drafter is ready is learnt from the Hello/Welcome handshake alone. Everything the process is
told is on its command line (so that `ps` shows it and a hand-started one is the same) and in
SGLANG_SSD_CONFIG.

The drafter never outlives its parent: it asks the kernel for SIGKILL at the parent's death (the
call must come from a thread that lives as long as the server) and watches the parent's pid as
well.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Annotated, Protocol

import msgspec
import psutil

from sglang_ssd.config import (
    ALLOWED_TEXTS,
    CONFIG_ENV,
    Count,
    Dtype,
    PositiveInt,
    Share,
    SsdConfig,
    allowed_values,
    as_flag,
    dump_config,
    help_text,
)
from sglang_ssd.drafter.checkpoint import check_local
from sglang_ssd.platform.affinity import parse_cores
from sglang_ssd.wire.endpoints import (
    ALLOWED_ENDPOINTS,
    IPC,
    SOCKET_DIR_PREFIX,
    pid_namespace,
    unique_ipc_endpoint,
)

logger = logging.getLogger(__name__)

FAILURE = "the drafter failed"
"""Begins the log record that says why the process ends."""

_LOG_TAIL_LINES = 60
_REASON_LINES = 8


def _like(name: str) -> msgspec.Meta:
    """Described as the setting of SsdConfig that says the same."""
    return _help(help_text(name), allowed=allowed_values(name))


def _help(text: str, *, allowed: str) -> msgspec.Meta:
    return msgspec.Meta(description=text, extra={"allowed": allowed})


class DrafterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One drafter process. Fields are its command-line flags (--model-path, ...), same names."""

    model_path: Annotated[
        str, _help("The draft model.", allowed="a folder, or a name at the Hugging Face hub")
    ]
    revision: Annotated[
        str | None,
        _help(
            "Branch, tag or commit of a model at the hub. Left out: its main branch.",
            allowed="a text, or left out",
        ),
    ] = None
    load_format: Annotated[
        str,
        _help(
            "Format of the weights. dummy: random ones, none are read.",
            allowed="what SGLang's --load-format takes",
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        _help(
            "How weights are quantized. Left out: as the checkpoint says.",
            allowed="what SGLang's --quantization takes, or left out",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, _help("Run model code that comes with the checkpoint.", allowed="given, or left out")
    ] = False

    endpoint: Annotated[
        str,
        _help("Where to listen; targets name it as --ssd-endpoint.", allowed=ALLOWED_ENDPOINTS),
    ] = ""
    secret_key: Annotated[
        str | None,
        _help(
            "Our CURVE key, for targets on other machines; with --peer-keys only.",
            allowed="a .key_secret file of python -m sglang_ssd.keys, or left out",
        ),
    ] = None
    peer_keys: Annotated[
        str | None,
        _help(
            "The CURVE keys of the targets that may connect; with --secret-key only.",
            allowed="a folder of .key files of python -m sglang_ssd.keys, or left out",
        ),
    ] = None
    device: Annotated[
        str,
        _help(
            "Where the model runs. auto: cuda if there is one.",
            allowed=ALLOWED_TEXTS["drafter_device"],
        ),
    ] = "auto"
    dtype: Annotated[Dtype, _like("drafter_dtype")] = "auto"
    max_total_tokens: Annotated[PositiveInt | None, _like("drafter_max_total_tokens")] = None
    max_sequences: Annotated[PositiveInt | None, _like("drafter_max_sequences")] = None
    mem_fraction: Annotated[Share, _like("drafter_mem_fraction")] = 0.8
    context_length: Annotated[PositiveInt | None, _like("drafter_context_length")] = None
    cores: Annotated[
        str,
        _help(
            "CPU cores to run on. auto: those that a target on this machine leaves by default (the "
            "last third), if the endpoint is on this machine and nothing has bound this process; "
            "or else every core that it is lent.",
            allowed="auto, or core numbers such as 0-2,5",
        ),
    ] = "auto"
    gpu_id: Annotated[
        Count,
        _help(
            "The device's index, as --device cuda:N says too.",
            allowed="a whole number of at least 0",
        ),
    ] = 0
    parent_pid: Annotated[
        PositiveInt | None,
        _help(
            "Exit when this process is gone. Left out: one started by hand serves until told to "
            "stop.",
            allowed="a process id, or left out",
        ),
    ] = None


class DraftFlags(Protocol):
    """The fields of SGLang's ServerArgs that speak of the draft model."""

    speculative_draft_model_path: str | None
    speculative_draft_model_revision: str | None
    speculative_draft_load_format: str | None
    speculative_draft_model_quantization: str | None
    trust_remote_code: bool


def settings_for_target(
    flags: DraftFlags,
    config: SsdConfig,
    *,
    target_device: str,
    cores: str = "auto",
    gpu_id: int = 0,
) -> DrafterSettings:
    """Settings of the drafter that serves a target started with these flags.

    target_device and gpu_id are the target's; the drafter shares them unless it is told of others.
    """
    if flags.speculative_draft_model_path is None:
        raise ValueError("--speculative-draft-model-path: got none, SSD needs a draft model")
    device = target_device if config.drafter_device == "auto" else config.drafter_device
    device, gpu_id = split_device(device, gpu_id=gpu_id)
    return DrafterSettings(
        model_path=flags.speculative_draft_model_path,
        revision=flags.speculative_draft_model_revision,
        load_format=flags.speculative_draft_load_format or "auto",
        quantization=flags.speculative_draft_model_quantization,
        trust_remote_code=flags.trust_remote_code,
        endpoint=config.endpoint or "",
        device=device,
        dtype=config.drafter_dtype,
        max_total_tokens=config.drafter_max_total_tokens,
        max_sequences=config.drafter_max_sequences,
        mem_fraction=config.drafter_mem_fraction,
        context_length=config.drafter_context_length,
        cores=cores,
        gpu_id=gpu_id,
    )


def split_device(device: str, *, gpu_id: int) -> tuple[str, int]:
    """Kind and index of "cuda:N", which SGLang takes apart from each other; gpu_id without an N.

    A CPU is 0, for SGLang counts cores by it: a target of several replicas or ranks has others.
    ValueError if it is no device.
    """
    kind, colon, index = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (colon and (kind != "cuda" or not index.isdecimal())):
        allowed = ALLOWED_TEXTS["drafter_device"]
        raise ValueError(f"device {device!r}: must be {allowed}")
    if kind == "cpu":
        return kind, 0
    return kind, int(index) if index else gpu_id


def check_model(settings: DrafterSettings) -> None:
    """ValueError if the checkpoint is on this machine and can be seen not to be servable."""
    model_dir = Path(settings.model_path)
    # Otherwise a hub id. os.path, because Path raises for a name that no file can have.
    if model_dir.is_absolute() or os.path.isdir(model_dir):
        check_local(model_dir, load_format=settings.load_format)


def to_argv(settings: DrafterSettings) -> list[str]:
    """The command line that says the same; absent flags stand for the defaults."""
    argv: list[str] = []
    for name, value in msgspec.structs.asdict(settings).items():
        flag = as_flag(name)
        if value is True:
            argv.append(flag)
        elif value not in (None, False, ""):
            argv += [flag, str(value)]
    return argv


class DrafterHandle:
    """A running drafter child: its log, its life."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process
        self._tail: deque[str] = deque(maxlen=_LOG_TAIL_LINES)
        assert process.stdout is not None, "the child's output is piped"
        self._reader = threading.Thread(
            target=self._relay_log, args=(process.stdout,), name="drafter-log", daemon=True
        )
        self._reader.start()

    def alive(self) -> bool:
        return self._process.poll() is None

    def exit_reason(self) -> str | None:
        """None while it lives; afterwards how it ended and what it said of it, or else the last
        lines that it logged, which tell nothing of a SIGKILL."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(timeout=1.0)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        ended = f"the drafter process {self.pid} ended with {how}"
        lines = list(self._tail)
        said = [index for index, line in enumerate(lines) if FAILURE in line]
        if code == -signal.SIGKILL and not said:
            return ended
        lines = lines[said[-1] :] if said else lines[-_REASON_LINES:]
        return f"{ended}: " + "\n".join(lines)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End it, politely, then not; harmless when it is gone already."""
        if self.alive():
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                    self._process.wait(timeout_s)

    def _relay_log(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._tail.append(line.rstrip("\n"))
                # Nobody may read ours any more; the drafter's must be read on, or it would end.
                with suppress(OSError, ValueError):
                    sys.stderr.write(f"[drafter] {line}")
                    sys.stderr.flush()


def make_endpoint() -> str:
    """A fresh ipc:// endpoint in a directory that only this user may enter."""
    sweep_socket_dirs()
    return unique_ipc_endpoint()


def remove_endpoint(endpoint: str) -> None:
    """Remove what make_endpoint made."""
    shutil.rmtree(Path(endpoint.removeprefix(IPC)).parent, ignore_errors=True)


def start_drafter(settings: DrafterSettings, config: SsdConfig) -> DrafterHandle:
    """Start it and return at once; call from a thread that lives as long as the server."""
    _restore_folder(settings.endpoint)
    told = msgspec.structs.replace(settings, parent_pid=os.getpid())
    with _on_cores(settings.cores):
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang_ssd.drafter", *to_argv(told)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_child_environment(config),
            # Ctrl-C in a terminal is for the server, which ends the drafter.
            start_new_session=True,
        )
    logger.info("SSD drafter %d starts: %s", process.pid, told)
    try:
        return DrafterHandle(process)
    except RuntimeError:  # no thread for its log
        process.kill()
        process.wait()
        raise


def cores_of_child(cores: str) -> Collection[int]:
    """Of a drafter that a target starts: all of the machine, unless it is told which."""
    return range(os.cpu_count() or 1) if cores == "auto" else parse_cores(cores)


@contextmanager
def _on_cores(cores: str) -> Iterator[None]:
    """What this thread starts begins on the drafter's cores, not on the target's own.

    On those it waits for its first turn; under Linux 6.18, which schedules sessions as groups, for
    as long as the target was busy.
    """
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # none of them is here: the drafter says so
        os.sched_setaffinity(0, cores_of_child(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _restore_folder(endpoint: str) -> None:
    """Of the socket: under a server of many days, what cleans temporary files may take it away."""
    folder = Path(endpoint.removeprefix(IPC)).parent
    if folder.name.startswith(SOCKET_DIR_PREFIX):
        folder.mkdir(mode=0o700, exist_ok=True)


def _child_environment(config: SsdConfig) -> dict[str, str]:
    """Ours, without what binds the target's ranks to its cores and devices of its own."""
    env = dict(os.environ)
    env[CONFIG_ENV] = dump_config(config)
    env["PYTHONUNBUFFERED"] = "1"
    for name in (
        "SGLANG_CPU_OMP_THREADS_BIND",
        "OMP_NUM_THREADS",
        "KMP_AFFINITY",
        "GOMP_CPU_AFFINITY",
    ):
        env.pop(name, None)
    return env


def sweep_socket_dirs() -> None:
    """Remove socket directories of servers that were killed and could not do it themselves.

    Only of our PID namespace, where their process ids mean something: what an ended container
    leaves in a folder that it shared stays there.
    """
    ours = f"{SOCKET_DIR_PREFIX}{pid_namespace()}-"
    for path in Path(tempfile.gettempdir()).glob(f"{ours}[0-9]*-*"):
        pid = path.name.removeprefix(ours).split("-", 1)[0]
        if pid.isdecimal() and not process_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)  # refuses what is another user's


def process_exists(pid: int) -> bool:
    """False also for one that has ended and waits for its parent to take note."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
