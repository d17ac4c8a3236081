"""The drafter as a child process: what it is told, why it failed, and that it never outlives us."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from sglang_ssd.config import CONFIG_ENV, SsdConfig, load_config
from sglang_ssd.drafter.__main__ import _bind_cores, _choose_platform, flag_help, parse_settings
from sglang_ssd.drafter.checkpoint import MODEL_FILES, SUPPORTED_ARCHITECTURES
from sglang_ssd.drafter.process import (
    DrafterHandle,
    DrafterSettings,
    make_endpoint,
    process_exists,
    remove_endpoint,
    settings_for_target,
    start_drafter,
    to_argv,
)
from sglang_ssd.platform.affinity import format_cores

ALL = DrafterSettings(
    model_path="/m",
    revision="r1",
    load_format="dummy",
    quantization="fp8",
    trust_remote_code=True,
    endpoint="ipc:///no/such/socket",
    device="cuda",
    dtype="float32",
    max_total_tokens=1000,
    max_sequences=3,
    mem_fraction=0.3,
    context_length=512,
    cores="1-2,5",
    gpu_id=1,
    parent_pid=77,
)


@pytest.mark.parametrize("settings", [ALL, DrafterSettings(model_path="hub/id")])
def test_the_command_line_says_every_setting(settings: DrafterSettings) -> None:
    assert parse_settings(to_argv(settings)) == settings


class Flags:
    """SGLang's, each unlike its default."""

    speculative_draft_model_path: str | None = "/draft"
    speculative_draft_model_revision: str | None = "v2"
    speculative_draft_load_format: str | None = "dummy"
    speculative_draft_model_quantization: str | None = "fp8"
    trust_remote_code = True


def test_settings_come_from_sglangs_draft_flags_and_the_config() -> None:
    """Red when a flag or a setting does not reach the drafter's command line."""
    config = SsdConfig(
        endpoint="ipc:///tmp/x",
        drafter_device="cuda:1",
        drafter_dtype="float32",
        drafter_max_total_tokens=1000,
        drafter_max_sequences=5,
        drafter_mem_fraction=0.3,
        drafter_context_length=512,
    )
    settings = settings_for_target(Flags(), config, cores="3", target_device="cpu")
    assert settings == DrafterSettings(
        model_path="/draft",
        revision="v2",
        load_format="dummy",
        quantization="fp8",
        trust_remote_code=True,
        endpoint="ipc:///tmp/x",
        device="cuda",
        dtype="float32",
        max_total_tokens=1000,
        max_sequences=5,
        mem_fraction=0.3,
        context_length=512,
        cores="3",
        gpu_id=1,
    )
    defaults = msgspec.structs.asdict(DrafterSettings(model_path=""))
    told = msgspec.structs.asdict(settings)
    by_the_starter = {"parent_pid", "secret_key", "peer_keys"}
    assert {name for name in told if told[name] == defaults[name]} == by_the_starter


def test_left_out_they_are_the_drafters_defaults() -> None:
    flags = Flags()
    flags.speculative_draft_model_revision = None
    flags.speculative_draft_load_format = None
    flags.speculative_draft_model_quantization = None
    flags.trust_remote_code = False
    settings = settings_for_target(flags, SsdConfig(), target_device="cpu")
    assert settings == DrafterSettings(model_path="/draft", device="cpu")


def test_a_missing_draft_model_names_the_flag() -> None:
    flags = Flags()
    flags.speculative_draft_model_path = None
    with pytest.raises(ValueError, match="--speculative-draft-model-path"):
        settings_for_target(flags, SsdConfig(), target_device="cpu")


@pytest.mark.parametrize(
    ("asked", "target", "expected"),
    [
        ("auto", "cuda", ("cuda", 3)),
        ("auto", "cpu", ("cpu", 0)),
        ("cpu", "cuda", ("cpu", 0)),
        ("cuda", "cuda", ("cuda", 3)),
        ("cuda:1", "cuda", ("cuda", 1)),
        ("cuda:0", "cpu", ("cuda", 0)),
    ],
)
def test_the_drafter_is_where_it_is_to_be(
    asked: str, target: str, expected: tuple[str, int]
) -> None:
    """Red when the index of --ssd-drafter-device is lost, or auto is not the target's kind, or the
    drafter of a later replica asks SGLang for the cores of another rank than its only one."""
    config = SsdConfig(drafter_device=asked)
    settings = settings_for_target(Flags(), config, gpu_id=3, target_device=target)
    assert (settings.device, settings.gpu_id) == expected


def test_a_drafter_started_by_hand_takes_the_same_device() -> None:
    settings = parse_settings(["--model-path", "/m", "--device", "cuda:1"])
    assert (settings.device, settings.gpu_id) == ("cuda", 1)


@pytest.mark.parametrize("device", ["cuda:", "cuda:x", "cpu:1", "gpu", ""])
def test_a_device_that_is_none_is_refused_by_its_flag(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--model-path", "/m", "--device", device])
    assert f"--device {device!r}: must be auto, cpu, cuda or cuda:N" in capsys.readouterr().err


def test_every_wrong_flag_of_a_drafter_is_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a drafter started by hand takes a value that the launcher would refuse."""
    wrong = {
        "--dtype": "int8",
        "--max-total-tokens": "-5",
        "--max-sequences": "0",
        "--mem-fraction": "nan",
        "--context-length": "long",
        "--cores": "3-1",
        "--gpu-id": "-1",
    }
    argv = [f"{flag}={value}" for flag, value in wrong.items()]
    with pytest.raises(SystemExit):
        parse_settings(["--model-path", "/m", *argv])
    said = capsys.readouterr().err
    for flag, value in wrong.items():
        assert f"{flag} {value!r}: must be " in said
    assert "must be a number between 0 and 1, both excluded" in said


def test_the_models_that_a_drafter_runs_are_in_those_files() -> None:
    """Red when SGLang moves one of them, and no drafter finds its class."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        pytest.skip("needs sglang installed")
    (root,) = spec.submodule_search_locations or []
    texts = [Path(root, "srt", "models", f"{name}.py").read_text() for name in MODEL_FILES]
    for name in SUPPORTED_ARCHITECTURES:
        assert any(f"class {name}(" in text for text in texts), name


def test_cores_that_are_not_here_are_refused_by_their_flag() -> None:
    """Red when a drafter says no more than that an argument was invalid."""
    here = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="--cores '1020-1022': none of them is here"):
        _bind_cores(msgspec.structs.replace(ALL, cores="1020-1022"))
    assert os.sched_getaffinity(0) == here


@pytest.mark.parametrize(("parent_pid", "expected"), [(None, {1}), (7, set(range(4)))])
def test_cores_bound_by_hand_hold_and_those_of_a_target_do_not(
    parent_pid: int | None, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a drafter started under taskset takes every core of the machine."""
    bound = [{1}]
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: bound[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(set(cores)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "1")
    _bind_cores(msgspec.structs.replace(ALL, cores="auto", parent_pid=parent_pid))
    assert bound[-1] == expected


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("ipc:///run/ssd/drafter", {2}),
        ("tcp://127.0.0.1:5555", {2}),
        ("tcp://0.0.0.0:5555", {0, 1, 2}),
    ],
)
def test_beside_targets_a_drafter_takes_the_cores_that_they_leave(
    endpoint: str, expected: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a drafter by hand and its target wait for each other's cores in every layer."""
    bound = [{0, 1, 2}]
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: bound[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(set(cores)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "1")
    settings = msgspec.structs.replace(ALL, cores="auto", parent_pid=None, endpoint=endpoint)
    _bind_cores(settings)
    assert bound[-1] == expected


@pytest.mark.parametrize(
    ("device", "inherited", "expected"),
    [
        ("cpu", None, "ssd_cpu"),
        ("cpu", "other", "other"),
        ("cuda", "ssd_cpu", None),
        ("cuda", "other", "other"),
        ("cuda", None, None),
    ],
)
def test_a_targets_platform_is_for_a_drafter_on_a_cpu(
    device: str, inherited: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", inherited or "")
    if inherited is None:
        monkeypatch.delenv("SGLANG_PLATFORM")
    _choose_platform(device)
    assert os.environ.get("SGLANG_PLATFORM") == expected


def test_every_flag_says_what_it_does_and_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    for field in DrafterSettings.__struct_fields__:
        what, allowed = flag_help(field).split(" Allowed: ")
        assert what.endswith(".")
        assert allowed.endswith(".")
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    assert capsys.readouterr().out.count("Allowed:") == len(DrafterSettings.__struct_fields__)


def test_a_failed_start_says_why_within_seconds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    endpoint = f"ipc://{tmp_path}/drafter"
    settings = DrafterSettings(model_path="/no/such/model", device="cpu", endpoint=endpoint)
    handle = start_drafter(settings, SsdConfig(mode="sync"))
    deadline = time.monotonic() + 60
    while handle.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    reason = handle.exit_reason() or ""
    assert "exit code 1" in reason
    assert "/no/such/model is missing" in reason
    assert "Traceback" not in reason
    handle.stop()
    assert "[drafter]" in capfd.readouterr().err


def test_sockets_of_killed_servers_are_swept_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # its parent takes no note of it
    namespace = os.stat("/proc/self/ns/pid").st_ino
    left = tmp_path / f"sglang-ssd-{namespace}-{dead.pid}-x"
    ours = tmp_path / f"sglang-ssd-{namespace}-{os.getpid()}-x"
    of_a_container = tmp_path / f"sglang-ssd-{namespace + 1}-{dead.pid}-x"
    for folder in (left, ours, of_a_container):
        folder.mkdir()
    remove_endpoint(make_endpoint())
    assert not left.exists()
    assert ours.exists()
    assert of_a_container.exists()


def test_a_log_that_nobody_reads_is_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a drafter ends by what it prints, once the server's own output is closed."""

    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    much = "for number in range(20000): print('line', number)"
    handle = DrafterHandle(
        subprocess.Popen([sys.executable, "-c", much], stdout=subprocess.PIPE, text=True)
    )
    deadline = time.monotonic() + 60
    while handle.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (handle.exit_reason() or "").endswith("line 19999")
    assert "exit code 0" in (handle.exit_reason() or "")


def test_the_log_of_a_killed_drafter_is_no_reason() -> None:
    """Red when whoever looks for a kill is shown what was logged before it instead."""
    said = "print('said long ago', flush=True); import time; time.sleep(60)"
    handle = DrafterHandle(
        subprocess.Popen([sys.executable, "-c", said], stdout=subprocess.PIPE, text=True)
    )
    deadline = time.monotonic() + 60
    while not handle._tail and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(handle.pid, signal.SIGKILL)
    handle.stop()
    assert handle.exit_reason() == f"the drafter process {handle.pid} ended with signal 9"


def test_a_swept_socket_folder_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when no drafter starts again once what cleans temporary files has been there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    endpoint = make_endpoint()
    remove_endpoint(endpoint)
    start_drafter(DrafterSettings(model_path="/none", endpoint=endpoint), SsdConfig()).stop()
    (folder,) = tmp_path.iterdir()
    assert Path(endpoint.removeprefix("ipc://")).parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is the target's as well")
@pytest.mark.parametrize("says_which", [True, False])
def test_a_child_begins_on_its_own_cores(says_which: bool) -> None:
    """Red when it begins on those of the thread that starts it, a busy target's: it may not get
    its first turn there before the target is idle. Also when that thread stays on others."""
    lent = os.sched_getaffinity(0)
    targets, childs = {min(lent)}, {max(lent)}
    cores = format_cores(childs) if says_which else "auto"
    os.sched_setaffinity(0, targets)
    try:
        settings = DrafterSettings(model_path="/none", endpoint="ipc:///none", cores=cores)
        handle = start_drafter(settings, SsdConfig())
        try:
            assert childs <= os.sched_getaffinity(handle.pid)
            assert os.sched_getaffinity(0) == targets
        finally:
            handle.stop()
    finally:
        os.sched_setaffinity(0, lent)


def test_the_config_reaches_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child gets the config that the caller has, whatever the environment said."""
    monkeypatch.setenv(CONFIG_ENV, '{"mode": "off"}')
    seen: dict[str, str] = {}

    class Spy(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, argv: list[str], **kwargs: object) -> None:
            seen.update(kwargs["env"])
            super().__init__(argv, **kwargs)

    monkeypatch.setattr("sglang_ssd.drafter.process.subprocess.Popen", Spy)
    config = SsdConfig(fan_out=[7], backup="none")
    start_drafter(
        DrafterSettings(model_path="/no/such/model", endpoint="ipc:///no/such/socket"), config
    ).stop()
    assert load_config(seen) == config


def test_a_child_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when it lives on and keeps the endpoint from the next one."""
    children: list[subprocess.Popen[str]] = []

    def no_thread(process: subprocess.Popen[str], **kwargs: object) -> None:
        children.append(process)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("sglang_ssd.drafter.process.DrafterHandle", no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        start_drafter(
            DrafterSettings(model_path="/no/such/model", endpoint="ipc:///no/such/socket"),
            SsdConfig(),
        )
    assert children[0].returncode == -signal.SIGKILL


CHILD = """
import os, sys, time
from sglang_ssd.drafter.__main__ import _tie_to_parent
_tie_to_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(120)
"""
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True,
                         start_new_session=True)
print(child.stdout.readline(), flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_the_child_dies_with_a_killed_parent(stopped: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if stopped:
        os.kill(child, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while process_exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_exists(child)
