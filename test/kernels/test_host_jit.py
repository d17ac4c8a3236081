"""What is kept on disk of a compiled kernel: it never fails a start, and it is never stale."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="needs numba, which sglang brings")

from sglang_ssd_kernels import host_jit

RUN_ONCE = """
import logging
import torch
logging.basicConfig(level=logging.INFO)
from sglang_ssd_kernels.rms_norm import rms_norm
out, _ = rms_norm(torch.ones(2, 40), torch.ones(40), 0.0)
assert torch.allclose(out, torch.ones(2, 40))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of what a kernel needs, in a folder that is first on the path."""
    folder = tmp_path / "sglang_ssd_kernels"
    folder.mkdir()
    for source in ("__init__.py", "host_jit.py", "rms_norm.py"):
        shutil.copy(Path(host_jit.__file__).parent / source, folder)
    return folder


def run(package, **variables):
    environment = {name: value for name, value in os.environ.items() if "NUMBA" not in name}
    environment |= {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run(
        [sys.executable, "-c", RUN_ONCE],
        env=environment,
        cwd=package.parent,
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    )


def test_runs_where_nothing_can_be_written(package):
    """An installed package of another user and no home folder: compiled anew, not an error."""
    (package / "__pycache__").write_text("a file where numba wants a folder")
    package.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        done = run(package, HOME="/dev/null", XDG_CACHE_HOME="/dev/null")
    finally:
        package.chmod(stat.S_IRWXU)
    assert "compiled anew at every start" in done.stderr


def test_a_second_start_compiles_nothing_and_a_changed_generator_all(package, tmp_path):
    """Kernels inline what host_jit generates, of which numba sees no change by itself."""

    def kept():
        return set((tmp_path / "kept").rglob("*.nbi"))

    run(package, NUMBA_CACHE_DIR=str(tmp_path / "kept"))
    first = kept()
    assert first
    run(package, NUMBA_CACHE_DIR=str(tmp_path / "kept"))
    assert kept() == first
    with (package / "host_jit.py").open("a") as source:
        source.write("# another version\n")
    run(package, NUMBA_CACHE_DIR=str(tmp_path / "kept"))
    assert len(kept()) == 2 * len(first)
