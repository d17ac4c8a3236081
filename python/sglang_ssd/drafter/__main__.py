"""`python -m sglang_ssd.drafter`: bind, load the draft model, serve until told to stop.

The tie to the parent, cores, thread count and platform must precede torch and SGLang, so what
imports those is imported inside functions here.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import logging
import math
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sglang_ssd.config import (
    CPU_PLATFORM,
    PLATFORM_ENV,
    SsdConfig,
    as_flag,
    help_text,
    load_config,
    shown_default,
)
from sglang_ssd.drafter.checkpoint import MODEL_FILES
from sglang_ssd.drafter.process import (
    FAILURE,
    DrafterSettings,
    check_model,
    cores_of_child,
    process_exists,
    split_device,
)
from sglang_ssd.platform.affinity import format_cores, parse_cores, split_cores
from sglang_ssd.wire.endpoints import is_here

if TYPE_CHECKING:
    from sglang_ssd.drafter.loop import DraftLoop
    from sglang_ssd.wire.transport import DrafterTransport

logger = logging.getLogger("sglang_ssd.drafter")

_DEFAULT_MAX_SEQUENCES = 64
_IDLE_WAIT_S = 1.0
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 after SIGTERM or SIGINT, 1 after a failure, whose last log line says why."""
    settings = parse_settings(argv)
    _tie_to_parent(settings.parent_pid)
    logging.basicConfig(format="[%(asctime)s] %(name)s %(levelname)s %(message)s")
    logging.getLogger("sglang_ssd").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _exit_quietly)
    signal.signal(signal.SIGINT, _exit_quietly)
    serving = False
    try:
        _bind_cores(settings)
        with closing(_bind(settings)) as transport:
            loop = _load(settings, load_config(), transport)
            logger.info("ready at %s (%s)", settings.endpoint, settings.model_path)
            serving = True
            while True:
                loop.step(_IDLE_WAIT_S)
    except Exception as error:
        # Of a refused setting or checkpoint the text says all there is.
        refused = isinstance(error, ValueError) and not serving
        logger.error("%s: %s", FAILURE, error, exc_info=not refused)
        return 1


def _bind(settings: DrafterSettings) -> DrafterTransport:
    from sglang_ssd.wire.curve import KeyFiles
    from sglang_ssd.wire.transport import DrafterSocket

    check_wire(settings)
    if settings.secret_key is None or settings.peer_keys is None:
        return DrafterSocket(settings.endpoint)
    return DrafterSocket(
        settings.endpoint, KeyFiles(secret=settings.secret_key, peers=settings.peer_keys)
    )


def check_wire(settings: DrafterSettings) -> None:
    """ValueError names the flag of ours by which nobody could reach us."""
    from sglang_ssd.wire.curve import load_public_keys, load_secret
    from sglang_ssd.wire.endpoints import validate_endpoint

    if (settings.secret_key is None) != (settings.peer_keys is None):
        raise ValueError("--secret-key and --peer-keys: give both, or neither")
    has_keys = settings.secret_key is not None
    checks: dict[str, tuple[str | None, Callable[[str], object]]] = {
        "--endpoint": (settings.endpoint, partial(validate_endpoint, has_keys=has_keys)),
        "--secret-key": (settings.secret_key, load_secret),
        "--peer-keys": (settings.peer_keys, load_public_keys),
    }
    for flag, (value, check) in checks.items():
        try:
            if value is not None:
                check(value)
        except ValueError as error:
            raise ValueError(f"{flag} {error}") from error


def _load(settings: DrafterSettings, config: SsdConfig, transport: DrafterTransport) -> DraftLoop:
    """The loop with its model; the platform is chosen before anything of SGLang is imported."""
    check_model(settings)
    device = _choose_device(settings.device)
    _choose_platform(device)
    _import_few_models()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_ssd.drafter.loop import DraftLoop
    from sglang_ssd.drafter.model_step import warm_up
    from sglang_ssd.drafter.runner import SglangModelStep, load_tokens
    from sglang_ssd.trace import Tracer

    max_sequences = settings.max_sequences
    if max_sequences is None:
        max_sequences = _DEFAULT_MAX_SEQUENCES
    model = SglangModelStep(settings, device=device, max_sequences=max_sequences)
    warm_up(model)
    return DraftLoop(
        model=model,
        transport=transport,
        config=config,
        max_sequences=max_sequences,
        tokens=load_tokens(settings),
        tracer=Tracer(config.trace, "drafter"),
    )


def parse_settings(argv: Sequence[str] | None = None) -> DrafterSettings:
    """Flags are the fields of DrafterSettings."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ssd.drafter",
        description="Serve drafts to SGLang servers started with --ssd-endpoint. Mode, fan-out "
        "with its policy and rates, backup, lease, prefill slice and trace come from "
        "SGLANG_SSD_CONFIG (JSON or the path of a file).",
    )
    fields = msgspec.structs.fields(DrafterSettings)
    for field in fields:
        flag, text = as_flag(field.name), flag_help(field.name)
        if field.default is False:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, required=field.required, default=field.default, help=text)
    given = vars(parser.parse_args(argv))
    reasons = []
    for field in fields:
        try:
            given[field.name] = _converted(field, given[field.name])
        except ValueError as error:
            reasons.append(f"{as_flag(field.name)} {given[field.name]!r}: {error}")
    if reasons:
        parser.error("; ".join(reasons))
    device, gpu_id = split_device(given["device"], gpu_id=given["gpu_id"])
    return DrafterSettings(**{**given, "device": device, "gpu_id": gpu_id})


def _converted(field: msgspec.structs.FieldInfo, value: object) -> object:
    """The value of a flag's text; ValueError with what is allowed."""
    try:
        converted = msgspec.convert(value, type=field.type, strict=False)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError("not a finite number")
        if field.name == "cores" and converted != "auto":
            parse_cores(str(converted))
        if field.name == "device":
            split_device(str(converted), gpu_id=0)
    except ValueError as error:
        raise ValueError(f"must be {_allowed(field)}") from error
    return converted


def flag_help(name: str) -> str:
    """What a flag does, may be, and is if it is left out."""
    fields = {field.name: field for field in msgspec.structs.fields(DrafterSettings)}
    field = fields[name]
    text = f"{help_text(name, DrafterSettings)} Allowed: {_allowed(field)}."
    if field.required or field.default in (None, False, ""):
        return text
    return f"{text} Default: {shown_default(field.default)}."


def _allowed(field: msgspec.structs.FieldInfo) -> str:
    info = msgspec.inspect.type_info(field.type)
    assert isinstance(info, msgspec.inspect.Metadata), f"{field.name} does not say what it may be"
    assert info.extra is not None, f"{field.name} does not say what it may be"
    return str(info.extra["allowed"])


def _tie_to_parent(parent_pid: int | None) -> None:
    """Die with the parent: at once by the kernel where it can, within a second in any case."""
    if parent_pid is None:
        return
    if sys.platform == "linux":
        # SIGKILL, because a stopped process does not act on anything milder.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"the parent {parent_pid} is gone already")
    threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid and process_exists(parent_pid):
        time.sleep(_IDLE_WAIT_S)
    os._exit(1)


def _bind_cores(settings: DrafterSettings) -> None:
    """Take our cores, one thread for each. A target has bound what it starts to its own: that is
    dropped; what a user has bound by hand holds."""
    cores = settings.cores
    if cores == "auto" and settings.parent_pid is None:
        wanted = _cores_beside_a_target(settings.endpoint)
    else:
        wanted = cores_of_child(cores)
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as error:
        raise ValueError(f"--cores {cores!r}: none of them is here: {error}") from error
    lent = sorted(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(len(lent))
    # SGLang binds threads of its own accord; this is the variable that it asks where.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = format_cores(lent)
    logger.info("runs on cores %s", format_cores(lent))


def _cores_beside_a_target(endpoint: str) -> Collection[int]:
    """Two processes that compute on the same cores wait for each other in every layer."""
    lent = tuple(sorted(os.sched_getaffinity(0)))
    is_bound = len(lent) < (os.cpu_count() or 1)
    return lent if is_bound or not is_here(endpoint) else split_cores(SsdConfig(), lent).drafter


def _choose_device(device: str) -> str:
    """auto is of one started by hand: a target says where."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _choose_platform(device: str) -> None:
    """Ours on a CPU; elsewhere none, even if a target on a CPU has started us."""
    if device == "cpu":
        os.environ.setdefault(PLATFORM_ENV, CPU_PLATFORM)
    elif os.environ.get(PLATFORM_ENV) == CPU_PLATFORM:
        del os.environ[PLATFORM_ENV]


def _import_few_models() -> None:
    """SGLang imports every model that it has, for seconds; a drafter runs three of them."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None, "the drafter runs where sglang is installed"
    (root,) = spec.submodule_search_locations or [""]
    files = Path(root, "srt", "models").glob("*.py")
    others = sorted(file.stem for file in files if file.stem not in MODEL_FILES)
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(others))


def _exit_quietly(signum: int, frame: types.FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
