"""What is refused before any weights load, naming the flag, its value and what is allowed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from harness.checkpoints import make_multimodal, make_recurrent
from harness.support import STATES, SupportRow, support_rows
from sglang_ssd.config import SsdConfig, flag_name
from sglang_ssd.platform.affinity import format_cores

RESOLVE_PROGRAM = """
import json, os, sys, traceback
os.environ["SGLANG_PLATFORM"] = "ssd_cpu"
from sglang.srt.plugins import load_plugins
load_plugins()
from unittest import mock
import msgspec
from sglang.srt.server_args import prepare_server_args
from sglang_ssd.platform import cpu
from sglang_ssd.target import algorithm

def refusal(case):
    os.environ.pop("SGLANG_SSD_CONFIG", None)
    if case["config"] is not None:
        os.environ["SGLANG_SSD_CONFIG"] = case["config"]
    try:
        args = prepare_server_args(case["argv"])
        if case["platform"] != "here":
            return flag_reasons(args, case["platform"])
        args.resolve_once()
    except SystemExit as error:
        return f"exit {error.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None

def flag_reasons(args, platform):
    args._raw_input = msgspec.structs.asdict(args)
    with mock.patch.object(cpu, "is_selected", lambda: platform == "CPU"):
        reasons = algorithm._value_reasons(args) + algorithm._foreign_flag_reasons(args)
    return "; ".join(reasons) or None

for case in json.load(sys.stdin):
    print("RESULT" + json.dumps(refusal(case)), flush=True)
"""
"""Resolves the arguments of many servers in one process: importing SGLang takes longest.

What is of another platform than this one cannot be resolved here; its flags are judged as given.
"""


class Case(msgspec.Struct, frozen=True):
    """A start that is refused, and the whole of what it says, line by line.

    Words in {braces} stand for what depends on the machine.
    """

    name: str
    flags: tuple[str, ...] = ()
    config: Any = None
    """SGLANG_SSD_CONFIG: a dict becomes JSON, a string is taken as it is."""
    says: tuple[str, ...] = ()


def refused(name: str, *flags: str, says: str, config: Any = None) -> Case:
    return Case(name, flags, config, tuple(says.split("\n")))


def refused_config(name: str, config: Any, says: str) -> Case:
    return Case(name, (), config, (says,))


CASES = (
    Case("good"),
    refused(
        *("no-steps", "--speculative-num-steps", "0"),
        says="--speculative-num-steps 0: must be 1 to 16",
    ),
    refused(
        *("many-steps", "--speculative-num-steps", "17"),
        says="--speculative-num-steps 17: must be 1 to 16",
    ),
    refused(
        *("wide", "--speculative-num-draft-tokens", "9"),
        says="--speculative-num-draft-tokens 9: must be 5 (--speculative-num-steps + 1) "
        "or left out",
    ),
    refused(
        *("topk", "--speculative-eagle-topk", "2"),
        says="--speculative-eagle-topk 2: must be 1 or left out",
    ),
    Case(
        "no-drafter",
        ("--speculative-draft-model-path", "NONE"),
        says=(
            "--speculative-draft-model-path: missing; name a draft model with the target's "
            "vocabulary, or --ssd-endpoint of a running drafter, or --ssd-mode off",
        ),
    ),
    refused_config(
        "fan-out-length",
        {"fan_out": [3, 2]},
        "--ssd-fan-out 3,2: 2 numbers; allowed is one, or 5 of them (--speculative-num-steps + 1)",
    ),
    refused_config(
        "fan-out-negative",
        {"fan_out": [1, 2, -1, 2, 1]},
        "--ssd-fan-out 1,2,-1,2,1: must be a list, each a whole number of at least 0",
    ),
    refused_config(
        "fan-out-zero",
        {"fan_out": [0]},
        "--ssd-fan-out 0: all zero; one at least must be positive",
    ),
    refused_config(
        "unknown-key", {"fanout": 3}, "--ssd-fanout: no such setting; there are {settings}"
    ),
    refused_config(
        "bad-json",
        '{"mode": ',
        "SGLANG_SSD_CONFIG must be a JSON object or the path of one: Input data was truncated",
    ),
    refused_config(
        "missing-file",
        "/nowhere/ssd.json",
        "SGLANG_SSD_CONFIG must be a JSON object or the path of one: [Errno 2] No such file or "
        "directory: '/nowhere/ssd.json'",
    ),
    refused_config(
        "deadline",
        {"reply_deadline_ms": 0},
        "--ssd-reply-deadline-ms 0: must be a number above 0",
    ),
    refused_config(
        "deadline-text",
        {"reply_deadline_ms": "soon"},
        "--ssd-reply-deadline-ms 'soon': must be a number above 0",
    ),
    refused_config(
        "start-timeout",
        {"start_timeout_s": -1},
        "--ssd-start-timeout-s -1: must be a number above 0",
    ),
    refused_config("mode", {"mode": "fast"}, "--ssd-mode 'fast': must be one of async, off, sync"),
    refused_config(
        "rate",
        {"acceptance_rate": 1.5},
        "--ssd-acceptance-rate 1.5: must be a number between 0 and 1, both excluded",
    ),
    refused_config(
        "batch-size",
        {"max_batch_size": 0},
        "--ssd-max-batch-size 0: must be a whole number above 0, or left out",
    ),
    refused_config(
        "far-endpoint",
        {"endpoint": "tcp://10.0.0.1:5555"},
        "--ssd-endpoint 'tcp://10.0.0.1:5555': must be ipc:///PATH of a socket, "
        "tcp://127.0.0.1:PORT or, with both keys, tcp://HOST:PORT, or left out "
        "(host 10.0.0.1 is not the loopback interface, and there are no keys)",
    ),
    refused_config(
        "relative-endpoint",
        {"endpoint": "ipc://run/drafter"},
        "--ssd-endpoint 'ipc://run/drafter': must be ipc:///PATH of a socket, "
        "tcp://127.0.0.1:PORT or, with both keys, tcp://HOST:PORT, or left out "
        "(not an absolute path)",
    ),
    Case(
        "one-key",
        config={"endpoint": "ipc:///run/drafter", "secret_key": "/nowhere/key_secret"},
        says=(
            "--ssd-secret-key: needs --ssd-peer-keys as well",
            "--ssd-secret-key /nowhere/key_secret: [Errno 2] No such file or directory: "
            "'/nowhere/key_secret'",
        ),
    ),
    refused_config(
        "restart-delay",
        {"restart_delay_s": -1},
        "--ssd-restart-delay-s -1: must be a number above 0",
    ),
    refused_config(
        "cores",
        {"target_cores": "0-9999"},
        "--ssd-target-cores '0-9999': no core {missing_cores} here; this process may use "
        "{lent_cores}",
    ),
    refused_config(
        "drafter-cores",
        {"drafter_cores": "0-9999"},
        "--ssd-drafter-cores '0-9999': no core {missing_cores} here; this process may use "
        "{lent_cores}",
    ),
    Case(
        "other-key",
        config={"endpoint": "ipc:///run/drafter", "peer_keys": "/nowhere/drafter.key"},
        says=(
            "--ssd-peer-keys: needs --ssd-secret-key as well",
            "--ssd-peer-keys /nowhere/drafter.key: Invalid certificate file: /nowhere/drafter.key",
        ),
    ),
    Case(
        "keys-without-endpoint",
        config={"secret_key": "/nowhere/key_secret", "peer_keys": "/nowhere/drafter.key"},
        says=(
            "--ssd-secret-key: needs --ssd-endpoint as well",
            "--ssd-secret-key /nowhere/key_secret: [Errno 2] No such file or directory: "
            "'/nowhere/key_secret'",
            "--ssd-peer-keys /nowhere/drafter.key: Invalid certificate file: /nowhere/drafter.key",
        ),
    ),
    refused_config(
        "device",
        {"drafter_device": "gpu"},
        "--ssd-drafter-device 'gpu': must be auto, cpu, cuda or cuda:N",
    ),
    refused_config(
        "trace",
        {"trace": "/nowhere/trace.json"},
        "--ssd-trace '/nowhere/trace.json': must be a file in an existing folder, or left out",
    ),
    refused(
        *("attention-context", "--tp-size", "2", "--attn-cp-size", "2"),
        says="--attn-cp-size 2: must be 1",
    ),
    refused(
        *("decode-context", "--tp-size", "2", "--dcp-size", "2"),
        says="--dcp-size 2: must be 1",
    ),
    refused(
        *("lora-paths", "--lora-paths", "a=/nowhere/lora"),
        says="--lora-paths ['a=/nowhere/lora']: must be left out",
    ),
    Case(
        "all-at-once",
        ("--speculative-num-steps", "40", "--page-size", "8"),
        {"fan_out": [-2]},
        says=(
            "--speculative-num-steps 40: must be 1 to 16",
            "--page-size 8: must be 1",
            "--ssd-fan-out -2: must be a list, each a whole number of at least 0",
        ),
    ),
)


SUPPORT = [row for row in support_rows() if any(word.startswith("--") for word in row.flags)]
ON_THIS_PLATFORM = [row for row in SUPPORT if row.state != "unchecked"]
UNCHECKED = {"needs a GPU": "GPU", "needs a second machine": "CPU"}
"""The platform whose rules the flags of such a row are judged by."""


def argv_of(flags: Sequence[str], target: Path) -> list[str]:
    argv = ["--model-path", str(target), "--device", "cpu", "--dtype", "float32"]
    argv += ["--speculative-algorithm", "SSD"]
    if "NONE" not in flags:
        argv += ["--speculative-draft-model-path", str(target), *flags]
    return [with_path(word, target) for word in argv]


def with_path(text: str, target: Path) -> str:
    """The checkpoints that docs/support.md names in capitals."""
    made = {"MULTIMODAL": make_multimodal, "RECURRENT": make_recurrent}
    for name, make in made.items():
        if name in text:
            text = text.replace(name, str(make(target)))
    return text


def our_message(*lines: str) -> str:
    return "SettingsError: --speculative-algorithm SSD cannot start:\n  " + "\n  ".join(lines)


def machine_words() -> dict[str, str]:
    lent = sorted(os.sched_getaffinity(0))
    return {
        "settings": ", ".join(map(flag_name, SsdConfig.__struct_fields__)),
        "missing_cores": format_cores(set(range(10000)) - set(lent)),
        "lent_cores": format_cores(lent),
    }


def message_of(case: Case) -> str:
    words = machine_words()
    return our_message(*(line.format(**words) for line in case.says))


@pytest.fixture(scope="module")
def refusals(target: Path) -> dict[str, str | None]:
    """By name of the case, or feature of the row; None for what was accepted."""
    asked = {}
    for case in CASES:
        config = case.config
        if config is not None and not isinstance(config, str):
            config = json.dumps(config)
        asked[case.name] = {"argv": argv_of(case.flags, target), "config": config}
    for row in SUPPORT:
        asked[row.feature] = {"argv": argv_of(row.flags, target), "config": None}
    platforms = {row.feature: UNCHECKED[row.shown] for row in SUPPORT if row.state == "unchecked"}
    for name, question in asked.items():
        question["platform"] = platforms.get(name, "here")
    run = subprocess.run(
        [sys.executable, "-c", RESOLVE_PROGRAM],
        input=json.dumps(list(asked.values())),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == len(asked), run.stderr[-3000:]
    answers = [json.loads(line.removeprefix("RESULT")) for line in lines]
    return dict(zip(asked, answers, strict=True))


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_refused_with_flag_value_and_what_is_allowed(
    case: Case, refusals: dict[str, str | None]
) -> None:
    """Red when a setting that cannot be served is accepted, or the message changes."""
    assert refusals[case.name] == message_of(case)


def test_good_settings_pass(refusals: dict[str, str | None]) -> None:
    """Red when the cases above fail for another reason than their own."""
    assert refusals["good"] is None


@pytest.mark.parametrize("row", ON_THIS_PLATFORM, ids=lambda row: row.feature)
def test_every_row_of_the_support_table(
    row: SupportRow, target: Path, refusals: dict[str, str | None]
) -> None:
    """Red when docs/support.md says other than what happens at start."""
    said = refusals[row.feature]
    if row.state == "supported":
        assert said is None
        return
    message = with_path(row.shown, target)
    expected = our_message(message) if row.state == "refused" else f"ValueError: {message}"
    assert said == expected


def test_every_value_that_is_not_served_is_tried() -> None:
    """Red when a setting of SGLang is refused from now on, and nothing here asks for it."""
    from sglang_ssd.target.algorithm import ALLOWED_ON_CPU, ALLOWED_VALUES

    said = [line for case in CASES for line in case.says]
    said += [row.shown for row in SUPPORT if row.state == "refused"]
    tried = {line.split(" ")[0] for line in said}
    for field in (*ALLOWED_VALUES, *ALLOWED_ON_CPU):
        assert "--" + field.replace("_", "-") in tried


def test_on_a_gpu_what_would_answer_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a GPU's default attention or its graphs get a verify that they misread."""
    from sglang_ssd.platform import cpu
    from sglang_ssd.target import algorithm

    monkeypatch.setattr(cpu, "is_selected", lambda: False)
    fields = {field: allowed for field, (allowed, _) in algorithm.ALLOWED_VALUES.items()}

    def reasons(attention_backend: str | None, disable_decode_cuda_graph: bool) -> list[str]:
        args = SimpleNamespace(
            **fields,
            attention_backend=attention_backend,
            disable_decode_cuda_graph=disable_decode_cuda_graph,
        )
        return algorithm._value_reasons(args)  # type: ignore[arg-type]

    assert reasons("triton", True) == []
    assert reasons(None, False) == [
        "--attention-backend None: must be triton on a GPU",
        "--disable-decode-cuda-graph False: must be given on a GPU",
    ]


@pytest.mark.parametrize(
    "row", [row for row in SUPPORT if row.state == "unchecked"], ids=lambda row: row.feature
)
def test_unchecked_rows_are_not_refused_elsewhere(
    row: SupportRow, refusals: dict[str, str | None]
) -> None:
    """Red when flags are called unchecked that we refuse where they are for, or lack what is needed
    there."""
    assert refusals[row.feature] is None


def sources_of(test: Path) -> str:
    """A test with what it takes from the harness, and the fixtures beside it."""
    text = test.read_text()
    harness = Path(__file__).parents[1] / "harness"
    parts = [harness / f"{name}.py" for name in re.findall(r"^from harness\.(\w+)", text, re.M)]
    return "\n".join([text, *(path.read_text() for path in (*parts, test.parent / "conftest.py"))])


def test_supported_rows_name_a_test_that_uses_them() -> None:
    """Red when a row's test is renamed, or no longer asks for what the row says."""
    for row in support_rows():
        assert row.state in STATES
        if row.state == "supported":
            text = sources_of(Path(__file__).parent / row.shown)
            for word in row.flags:
                assert word.isdecimal() or f'"{word}"' in text, f"{row.feature}: {word}"
            for word, value in pairwise(row.flags):
                given = rf'"{word}", ("{value}"|str\()'
                assert not value.isdecimal() or re.search(given, text), f"{row.feature}: {value}"


def launch(flags: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_ssd.launch_server", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **env},
    )


def test_launcher_refuses_its_own_flags_with_everything_else(target: Path) -> None:
    """Red when a bad --ssd-* flag is swallowed, hides another, or shows a traceback."""
    wrong = ["--ssd-reply-deadline-ms", "-5", "--ssd-fan-out", "three", "--ssd-mode", "fast"]
    run = launch([*argv_of((), target), *wrong, "--speculative-num-steps", "40"])
    assert run.returncode not in (0, None)
    assert run.stderr[run.stderr.index("sglang-ssd: ") :].splitlines() == [
        "sglang-ssd: --speculative-algorithm SSD cannot start:",
        "  --speculative-num-steps 40: must be 1 to 16",
        "  --ssd-mode 'fast': must be one of async, off, sync",
        "  --ssd-fan-out three: must be a list, each a whole number of at least 0",
        "  --ssd-reply-deadline-ms '-5': must be a number above 0",
    ]


@pytest.mark.slow  # every one imports SGLang anew
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--ssd-backup", "none", "--ssd-lease-s", "2"],
            "--ssd-backup, --ssd-lease-s: mean something only with --speculative-algorithm SSD "
            "(given: None)",
        ),
        (
            ["--ssd-target-cores", "0-9999"],
            "--ssd-target-cores '0-9999': no core {missing_cores} here; this process may use "
            "{lent_cores}",
        ),
    ],
)
def test_launcher_without_the_algorithm_refuses_what_only_it_reads(
    target: Path, flags: list[str], says: str
) -> None:
    """Red when a plain server takes an --ssd-* flag that does nothing there."""
    run = launch(["--model-path", str(target), *flags])
    assert run.returncode not in (0, None)
    assert run.stderr.splitlines()[-1] == f"sglang-ssd: {says.format(**machine_words())}"


def test_launcher_refuses_a_foreign_platform(target: Path) -> None:
    """Red when SGLang would silently drop our plugin because another platform is selected."""
    (row,) = [row for row in support_rows() if row.flags == ("SGLANG_PLATFORM=someone_else",)]
    run = launch(argv_of((), target), SGLANG_PLATFORM="someone_else")
    assert run.returncode != 0
    assert run.stderr.splitlines()[-1] == f"sglang-ssd: {row.shown}"
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_launcher_help_states_defaults_and_ranges() -> None:
    """Red when a config field has no flag, or its help no default."""
    run = launch(["--help"])
    assert run.returncode == 0
    for field in msgspec.structs.fields(SsdConfig):
        assert "--ssd-" + field.name.replace("_", "-") in run.stdout
    assert "--speculative-num-steps" in run.stdout
    assert "--model-path" in run.stdout
