"""Run the acceptance list at full size on this machine and write its figures down.

    python benchmark/acceptance.py                      everything, hours
    python benchmark/acceptance.py --only identity law  some items
    python benchmark/acceptance.py --quick              everything at the size of every commit

Writes benchmark/results/<date>-cpu-acceptance.json after every item, and the same as Markdown. An
item that passed with the same sources is not run again, so an interrupted run goes on where it
stopped. The items are the end-to-end tests themselves, at another size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"

ITEMS: dict[str, tuple[str, ...]] = {
    "model-free": ("test/unit", "test/integration", "test/kernels"),
    "parts": (
        "test/e2e/test_compat.py",
        "test/e2e/test_cpu_layers.py",
        "test/e2e/test_cpu_platform.py",
        "test/e2e/test_drafter_model.py",
        "test/e2e/test_hooks_without_ssd.py",
        "test/e2e/test_openings.py",
        "test/e2e/test_row_transforms.py",
        "test/e2e/test_verify.py",
        "test/e2e/test_weight_export.py",
    ),
    "bad-input": ("test/e2e/test_bad_input.py", "test/e2e/test_bad_requests.py"),
    "identity": ("test/e2e/test_greedy_identity.py",),
    "configurations": ("test/e2e/test_configurations.py",),
    "features": ("test/e2e/test_features.py", "test/e2e/test_plain_decode.py"),
    "sampling": (
        "test/e2e/test_sampling_table.py",
        "test/e2e/test_hidden_states.py",
        "test/e2e/test_grammar_backends.py",
    ),
    "field-cases": ("test/e2e/test_stops_of_a_run.py", "test/e2e/field_cases"),
    "clients": (
        "test/e2e/test_clients.py",
        "test/e2e/test_entry_points.py",
        "test/e2e/test_sglang_kits.py",
    ),
    "faults": (
        "test/e2e/test_faults.py",
        "test/e2e/test_keyed_drafter.py",
        "test/e2e/test_resync.py",
    ),
    "chaos": ("test/e2e/test_chaos.py", "test/e2e/test_soak.py"),
    "life-cycle": ("test/e2e/test_life_cycle.py",),
    "operation": (
        "test/e2e/test_commands.py",
        "test/e2e/test_data_parallel.py",
        "test/e2e/test_shared_drafter.py",
        "test/e2e/test_docs.py",
        "test/e2e/test_limits.py",
        "test/e2e/test_observability.py",
        "test/e2e/test_operator.py",
        "test/e2e/test_reload_answer.py",
        "test/e2e/test_sessions.py",
        "test/e2e/test_trace.py",
    ),
    "sampled-identity": ("test/e2e/test_sampled_identity.py",),
    "law": ("test/e2e/test_sampling_law.py",),
    "tensor-parallel": ("test/e2e/test_tensor_parallel.py",),
}
"""What each item runs, together every test that needs no GPU; tests marked slow included."""

PACKAGES = ("sglang", "torch", "transformers", "xgrammar")
MAX_SECONDS_PER_TEST = 4 * 3600

Record = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ITEMS, default=list(ITEMS), metavar="ITEM")
    parser.add_argument("--quick", action="store_true", help="the size that runs for every commit")
    parser.add_argument("--again", action="store_true", help="run items that passed already, too")
    parser.add_argument("--date", default=date.today().isoformat(), help="names the result files")
    return parser.parse_args()


def run_item(name: str, size: str) -> Record:
    """Run one item's tests; what passed, what failed and why, and the figures they reported."""
    with tempfile.TemporaryDirectory() as folder:
        figures, report = Path(folder) / "figures.json", Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *ITEMS[name], "-m", "slow or not slow"]
        command += [f"--timeout={MAX_SECONDS_PER_TEST}", f"--junitxml={report}"]
        env = {**os.environ, "SSD_E2E_SIZE": size, "SSD_E2E_FIGURES": str(figures)}
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        return {
            **read_report(report, code),
            "figures": json.loads(figures.read_text()) if figures.exists() else {},
            "size": size,
            "seconds": round(time.monotonic() - start),
            "commit": git("describe", "--always", "--dirty", "--abbrev=12"),
            "sources": sources(),
        }


def is_passed(record: Record) -> bool:
    return not record["failures"] and record["sources"] == sources()


def read_report(report: Path, exit_code: int) -> Record:
    if not report.exists():
        return {"passed": 0, "skipped": 0, "failures": {"pytest": "ended without a report"}}
    cases = list(ElementTree.parse(report).iter("testcase"))
    failures = {
        str(case.get("name")): str(problem.get("message"))[:600]
        for case in cases
        for problem in case
        if problem.tag in {"failure", "error"}
    }
    explained = exit_code == pytest.ExitCode.TESTS_FAILED and failures
    if exit_code != pytest.ExitCode.OK and not explained:
        failures["pytest"] = f"did not run to its end: exit code {exit_code}"
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - skipped - len(failures.keys() - {"pytest"}),
        "skipped": skipped,
        "failures": failures,
    }


def sources() -> str:
    """Names what is committed of the product and its tests; results may be committed in between."""
    return git("rev-parse", "HEAD:python", "HEAD:kernels", "HEAD:test").replace("\n", " ")


def git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def machine() -> Record:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
    }


def to_markdown(results: Record) -> str:
    about = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    lines = ["# Acceptance on CPU", "", about, ""]
    lines += ["| item | size | passed | failed | skipped | seconds | commit |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for name, record in results["items"].items():
        cells = (record["size"], record["passed"], len(record["failures"]), record["skipped"])
        tail = (record["seconds"], record["commit"])
        lines.append("| " + " | ".join(str(cell) for cell in (name, *cells, *tail)) + " |")
    for name, record in results["items"].items():
        lines += _item_lines(name, record)
    return "\n".join(lines) + "\n"


def _item_lines(name: str, record: Record) -> list[str]:
    reported = {test: values for test, values in record["figures"].items() if values}
    if not reported and not record["failures"]:
        return []
    lines = ["", f"## {name}", "", f"`python benchmark/acceptance.py --only {name}`"]
    if reported:
        columns = list(dict.fromkeys(key for values in reported.values() for key in values))
        lines += ["", "| test | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
        for test, values in reported.items():
            cells = [_cell(values.get(column, "")) for column in columns]
            lines.append(f"| {test} | " + " | ".join(cells) + " |")
    for test, reason in record["failures"].items():
        lines += ["", f"Failed: {test}: {reason}"]
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_cell(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    return str(value)


def main() -> None:
    arguments = parse_arguments()
    size = "ci" if arguments.quick else "full"
    stem = f"{arguments.date}-cpu-acceptance{'-quick' if arguments.quick else ''}"
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{stem}.json"
    results: Record = json.loads(path.read_text()) if path.exists() else {"items": {}}
    results["machine"] = machine()
    for name in arguments.only:
        before = results["items"].get(name)
        if not arguments.again and before and is_passed(before):
            print(f"{name}: passed at {before['commit']}, not run again")
            continue
        results["items"][name] = run_item(name, size)
        path.write_text(json.dumps(results, indent=2) + "\n")
        path.with_suffix(".md").write_text(to_markdown(results))
    failed = [name for name in arguments.only if results["items"][name]["failures"]]
    print(f"figures in {path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
