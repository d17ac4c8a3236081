"""What every benchmark leaves: a table, and as last line one JSON object that can be traced back.

The JSON names the commit, the versions, the machine, all flags and the seed. A path of a local
checkpoint is cut to its last part: where files lie on a machine is nobody's business.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]
_PACKAGES = ("sglang", "torch", "transformers", "pyzmq", "msgspec")
_BUSY_LOAD = 0.5


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A Markdown table, aligned, so that it can be read here and pasted into a page."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(f"| {' | '.join(padded)} |")


def finish(benchmark: str, args: argparse.Namespace, results: dict[str, object]) -> None:
    """Print the JSON line, and write it to --out if there is one."""
    record = {
        "benchmark": benchmark,
        **provenance(),
        "flags": {name: _plain(value) for name, value in vars(args).items() if name != "out"},
        **msgspec.to_builtins(results, str_keys=True),
    }
    line = msgspec.json.encode(_rounded(record)).decode()
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_bytes(msgspec.json.format(line.encode()) + b"\n")
    print(line)


def add_out_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, help="also write the JSON here, e.g. benchmark/results/NAME.json"
    )


def provenance() -> dict[str, object]:
    """Commit, versions and machine."""
    return {
        "git_sha": _git_sha(),
        "versions": {"python": platform.python_version(), **_versions()},
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": _gpu_name(),
        "load_at_end": round(os.getloadavg()[0], 2),
    }


def cpu_name() -> str:
    """Model and the vector extensions that decide how fast bf16 and fp32 products are."""
    model, flags = platform.processor(), ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() == "flags":
            flags = value
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return f"{model} ({', '.join(flag for flag in known if flag in flags.split())})"


def warn_if_busy() -> None:
    """Timings beside other work mean little: say so before, not after."""
    load = os.getloadavg()[0]
    if load > _BUSY_LOAD:
        print(f"The machine is not quiet (load {load:.1f}): what follows is indicative only.")


def _gpu_name() -> str | None:
    import torch  # slow to import: a spawned process of bench_wire has no use for it

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _git_sha() -> str | None:
    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", ROOT, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", "python", "kernels")
        return git("rev-parse", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None  # a copy without its repository


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _rounded(value: object) -> object:
    """Four digits behind the point are more than any of these measurements carries."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return value.name
    if isinstance(value, str) and value.startswith(("/", "./", "../", "~")):
        return Path(value).name
    return value
