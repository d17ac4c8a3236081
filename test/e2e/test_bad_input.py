"""What is refused before any weights load, naming the flag, its value and what is allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.checkpoints import make_multimodal

RESOLVE_PROGRAM = """
import json, os, sys, traceback
os.environ["SGLANG_PLATFORM"] = "ssd_cpu"
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args

def refusal(case):
    os.environ.pop("SGLANG_SSD_CONFIG", None)
    if case["config"] is not None:
        os.environ["SGLANG_SSD_CONFIG"] = case["config"]
    try:
        prepare_server_args(case["argv"]).resolve_once()
    except SystemExit as error:
        return f"exit {error.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None

for case in json.load(sys.stdin):
    print("RESULT" + json.dumps(refusal(case)), flush=True)
"""
"""Resolves the arguments of many servers in one process: importing SGLang takes longest."""


class Case(msgspec.Struct, frozen=True):
    name: str
    flags: tuple[str, ...] = ()
    config: Any = None
    """SGLANG_SSD_CONFIG: a dict becomes JSON, a string is taken as it is."""
    says: tuple[str, ...] = ()


CASES = (
    Case("good"),
    Case(
        "no-steps", ("--speculative-num-steps", "0"), says=("--speculative-num-steps 0", "1 to 16")
    ),
    Case("many-steps", ("--speculative-num-steps", "17"), says=("17", "1 to 16")),
    Case("wide", ("--speculative-num-draft-tokens", "9"), says=("num-draft-tokens 9", "5")),
    Case("fan-out-length", config={"fan_out": [3, 2]}, says=("--ssd-fan-out", "3,2", "5")),
    Case("fan-out-negative", config={"fan_out": [1, 2, -1, 2, 1]}, says=("--ssd-fan-out", "-1")),
    Case("fan-out-zero", config={"fan_out": [0]}, says=("--ssd-fan-out", "0")),
    Case("unknown-key", config={"fanout": 3}, says=("fanout",)),
    Case("bad-json", config='{"mode": ', says=("SGLANG_SSD_CONFIG",)),
    Case("missing-file", config="/nowhere/ssd.json", says=("/nowhere/ssd.json",)),
    Case("deadline", config={"reply_deadline_ms": 0}, says=("reply_deadline_ms", "0")),
    Case("deadline-text", config={"reply_deadline_ms": "soon"}, says=("reply_deadline_ms",)),
    Case("start-timeout", config={"start_timeout_s": -1}, says=("start_timeout_s",)),
    Case("mode", config={"mode": "fast"}, says=("mode", "fast")),
    Case("rate", config={"acceptance_rate": 1.5}, says=("acceptance_rate",)),
    Case(
        "far-endpoint", config={"endpoint": "tcp://10.0.0.1:5555"}, says=("10.0.0.1", "127.0.0.1")
    ),
    Case("cores", config={"target_cores": "0-9999"}, says=("target-cores", "9999")),
    Case("page-size", ("--page-size", "16"), says=("page-size 16", "1")),
    Case("pipeline", ("--pp-size", "2"), says=("pp-size", "2")),
    Case(
        "dp-attention",
        ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"),
        says=("attn-dp-size 2", "1"),
    ),
    Case("multimodal", ("--model-path", "MULTIMODAL"), says=("model-path", "text only")),
    Case("mixed-chunk", ("--enable-mixed-chunk",), says=("mixed-chunk",)),
    Case("lora", ("--enable-lora", "--lora-paths", "a=/nowhere"), says=("lora",)),
    Case("disaggregation", ("--disaggregation-mode", "prefill"), says=("disaggregation",)),
    Case("foreign-flag", ("--speculative-ngram-capacity", "5"), says=("ngram-capacity", "5")),
    Case(
        "all-at-once",
        ("--speculative-num-steps", "40", "--page-size", "8"),
        {"fan_out": [-2]},
        says=("num-steps 40", "page-size 8", "fan-out"),
    ),
)


def argv_of(case: Case, target: Path) -> list[str]:
    argv = ["--model-path", str(target), "--device", "cpu", "--dtype", "float32"]
    argv += ["--speculative-algorithm", "SSD", "--speculative-draft-model-path", str(target)]
    argv += case.flags
    return [str(make_multimodal(target)) if word == "MULTIMODAL" else word for word in argv]


@pytest.fixture(scope="module")
def refusals(target: Path) -> dict[str, str | None]:
    cases = []
    for case in CASES:
        config = case.config
        if config is not None and not isinstance(config, str):
            config = json.dumps(config)
        cases.append({"argv": argv_of(case, target), "config": config})
    run = subprocess.run(
        [sys.executable, "-c", RESOLVE_PROGRAM],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == len(CASES), run.stderr[-3000:]
    answers = [json.loads(line.removeprefix("RESULT")) for line in lines]
    return dict(zip([case.name for case in CASES], answers, strict=True))


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_refused_with_flag_value_and_what_is_allowed(
    case: Case, refusals: dict[str, str | None]
) -> None:
    """Red when a setting that cannot be served is accepted, or the message does not help."""
    refusal = refusals[case.name]
    assert refusal is not None, "accepted"
    said = refusal.replace("_", "-")
    for words in case.says:
        assert words.replace("_", "-") in said, refusal


def test_good_settings_pass(refusals: dict[str, str | None]) -> None:
    """Red when the cases above fail for another reason than their own."""
    assert refusals["good"] is None


def launch(flags: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_ssd.launch_server", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **env},
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--ssd-reply-deadline-ms", "-5"], ["--ssd-reply-deadline-ms", "-5"]),
        (["--ssd-fan-out", "three"], ["--ssd-fan-out", "three"]),
        (["--ssd-mode", "fast"], ["--ssd-mode", "fast", "async", "sync", "off"]),
    ],
)
def test_launcher_refuses_its_own_flags(target: Path, flags: list[str], says: list[str]) -> None:
    """Red when a bad --ssd-* flag is swallowed or shows a traceback instead of what is allowed."""
    run = launch([*argv_of(Case(""), target), *flags])
    assert run.returncode not in (0, None)
    for words in says:
        assert words in run.stderr
    assert "Traceback" not in run.stderr


def test_launcher_refuses_a_foreign_platform(target: Path) -> None:
    """Red when SGLang would silently drop our plugin because another platform is selected."""
    run = launch(argv_of(Case(""), target), SGLANG_PLATFORM="someone_else")
    assert run.returncode != 0
    assert "SGLANG_PLATFORM" in run.stderr
    assert "someone_else" in run.stderr
    assert "Traceback" not in run.stderr


def test_launcher_help_states_defaults_and_ranges() -> None:
    """Red when a config field has no flag, or its help no default."""
    from sglang_ssd.config import SsdConfig

    run = launch(["--help"])
    assert run.returncode == 0
    for field in msgspec.structs.fields(SsdConfig):
        assert "--ssd-" + field.name.replace("_", "-") in run.stdout
    assert "--speculative-num-steps" in run.stdout
    assert "--model-path" in run.stdout
