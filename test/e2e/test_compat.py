"""What we hook and override is what the installed SGLang has."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

import sglang_ssd
from sglang_ssd import compat, plugin
from sglang_ssd.config import ALGORITHM, SettingsError
from sglang_ssd.platform import cpu
from sglang_ssd.target import algorithm

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
TESTED = Requirement(PYPROJECT["project"]["dependencies"][0])

HOOKS_PROGRAM = """
import json, os
os.environ["SGLANG_PLATFORM"] = "ssd_cpu"
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
ours = {
    target: target in HookRegistry._patched
    for target, hooks in HookRegistry._hooks.items()
    if any(source is not None and source.plugin_name == "ssd" for _, _, source in hooks)
}
print("RESULT" + json.dumps(ours))
"""


def test_this_sglang_is_supported() -> None:
    """Red when SGLang changes a function that we hook or override."""
    assert compat.reasons() == []


def test_every_hook_is_checked_and_applied() -> None:
    """Red when a hook is added that compat does not know, or SGLang could not apply one."""
    run = subprocess.run(
        [sys.executable, "-c", HOOKS_PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=os.environ,
    )
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    applied = json.loads(line.removeprefix("RESULT"))
    assert set(applied) == set(compat.HOOKED)
    assert all(applied.values()), applied


def test_every_override_is_checked() -> None:
    """Red when a class of ours overrides a method of SGLang's that compat does not know."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(sglang_ssd.__path__, "sglang_ssd.")
        if not info.name.endswith("__main__")
    ]
    overridden = {
        path
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__
        for path in replaced_by(kind)
    }
    assert overridden
    assert overridden <= set(compat.OVERRIDDEN)


def replaced_by(kind: type) -> set[str]:
    """Where SGLang defines the methods that this class overrides."""
    found = set()
    for name, member in vars(kind).items():
        owners = [
            base
            for base in kind.__mro__[1:]
            if base.__module__.startswith("sglang.") and name in vars(base)
        ]
        if inspect.isfunction(member) and owners and not name.startswith("__"):
            found.add(f"{owners[0].__module__}.{owners[0].__qualname__}.{name}")
    return found


def test_changed_functions_are_named() -> None:
    """Red when a start is refused without what SGLang has changed."""
    utils = "sglang.srt.utils.numa_utils"
    expected: dict[str, tuple[str, ...]] = {
        f"{utils}.init_threads_binding": ("cores",),
        "sglang.srt.no_such_module.function": (),
        f"{utils}.no_such_function": (),
    }
    assert compat.signature_reasons(expected) == [
        f"sglang's {utils}.init_threads_binding takes ('numa_index', 'world_size'); "
        "expected ('cores',)",
        "sglang has no sglang.srt.no_such_module.function: "
        "module 'sglang.srt' has no attribute 'no_such_module'",
        f"sglang has no {utils}.no_such_function: "
        f"module '{utils}' has no attribute 'no_such_function'",
    ]


@pytest.mark.parametrize("failing", [(plugin, "_register_hooks"), (cpu, "register_attention")])
def test_a_plugin_without_its_hooks_is_refused(
    failing: tuple[ModuleType, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when SSD serves although its hooks are missing: SGLang only logs what a plugin raises,
    and a scheduler process validates no arguments again."""

    def fail() -> None:
        raise ImportError("no module named torch_that_is_broken")

    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(algorithm, "register", lambda: None)
    monkeypatch.setattr(algorithm, "_start_reasons", [])
    monkeypatch.setattr(cpu, "register_attention", lambda: None)
    monkeypatch.setattr(*failing, fail)
    with pytest.raises(ImportError):
        plugin.register()
    server_args = ServerArgs(model_path="none")
    with pytest.raises(SettingsError, match="hooks: ImportError: no module named torch_that_is"):
        algorithm.validate_server_args(server_args)
    with pytest.raises(SettingsError, match="hooks: ImportError"):
        algorithm._worker_class(server_args)


def test_another_version_registers_and_is_refused_before_anything_loads(monkeypatch) -> None:
    """Red when SSD serves a version that was not tested, or is an unknown algorithm there."""
    monkeypatch.setattr(compat.metadata, "version", lambda name: "0.4.0")
    load_plugins()
    assert SpeculativeAlgorithm.from_string(ALGORITHM).is_some()
    with pytest.raises(SettingsError) as refused:
        algorithm.validate_server_args(ServerArgs(model_path="none"))
    assert str(refused.value) == (
        "--speculative-algorithm SSD cannot start:\n"
        f"  sglang 0.4.0: this sglang-ssd is tested with sglang{TESTED.specifier}"
    )
