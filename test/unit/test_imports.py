"""Imports point one way: core <- wire <- drafter, target <- plugin, launch_server."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "sglang_ssd"
KERNELS = ROOT / "kernels" / "sglang_ssd_kernels"

# What each part may import of the project, and of the outside beyond the standard library.
PARTS = {
    "core": ({"core"}, {"torch", "numpy", "msgspec", "sglang_ssd_kernels"}),
    "wire": ({"core", "wire"}, {"msgspec", "zmq"}),
    "platform": ({"platform", "config"}, {"torch", "msgspec", "sglang", "sglang_ssd_kernels"}),
    "drafter": (
        {"core", "wire", "platform", "config", "trace", "drafter"},
        {"torch", "numpy", "msgspec", "psutil", "sglang"},
    ),
    "target": (
        {"core", "wire", "platform", "config", "trace", "compat", "drafter", "target"},
        {"torch", "msgspec", "sglang", "fastapi", "prometheus_client"},
    ),
}
FILES = {
    "config.py": {"core", "wire"},
    "trace.py": set(),
    "compat.py": set(),
    "keys.py": set(),
}
"""What these may import of the project."""
KERNELS_MAY_IMPORT = {"sglang_ssd_kernels", "torch", "numpy", "numba", "llvmlite"}
MAY_IMPORT_SGLANG = (
    "launch_server.py",
    "platform",
    "target",
    "drafter/runner.py",
    "drafter/__main__.py",
)


def imported_modules(path: Path) -> set[str]:
    """Every module named by an import anywhere in the file, also inside functions."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.add(node.module or "")
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def sources(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def roots(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


def parts_of_ours(modules: set[str]) -> set[str]:
    return {module.split(".")[1] for module in modules if module.startswith("sglang_ssd.")}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_it_may(part):
    own_parts, outside = PARTS[part]
    for path in sources(PACKAGE / part):
        modules = imported_modules(path)
        foreign = roots(modules) - set(sys.stdlib_module_names) - outside - {"sglang_ssd"}
        assert not foreign, f"{path} imports {foreign}"
        ours = parts_of_ours(modules)
        assert ours <= own_parts, f"{path} imports {ours - own_parts}"


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_what_it_may(name):
    assert parts_of_ours(imported_modules(PACKAGE / name)) <= FILES[name]


def test_every_part_and_file_has_a_rule():
    entries = {"__init__.py", "plugin.py", "launch_server.py"}
    assert {path.name for path in PACKAGE.glob("*.py")} == {*FILES, *entries}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} <= set(PARTS)


@pytest.mark.parametrize(("part", "other"), [("drafter", "target"), ("target", "drafter")])
def test_drafter_and_target_do_not_know_each_other(part, other):
    """Except for starting the drafter: hooks use drafter/process.py, which is made for that."""
    for path in sources(PACKAGE / part):
        named = {m for m in imported_modules(path) if m.startswith(f"sglang_ssd.{other}")}
        named = {m for m in named if not m.startswith("sglang_ssd.drafter.process")}
        assert not named, f"{path} imports {named}"


def test_sglang_is_imported_only_where_it_is_wrapped():
    for path in sources(PACKAGE):
        name = path.relative_to(PACKAGE).as_posix()
        if name in MAY_IMPORT_SGLANG or name.split("/")[0] in MAY_IMPORT_SGLANG:
            continue
        assert "sglang" not in roots(imported_modules(path)), f"{name} imports sglang"


def test_nothing_imports_the_entry_points():
    entries = {"sglang_ssd.plugin", "sglang_ssd.launch_server"}
    for part in ("core", "wire", "drafter", "target", "platform"):
        for path in sources(PACKAGE / part):
            assert not imported_modules(path) & entries, f"{path} imports an entry point"


def test_kernels_import_only_what_they_may():
    for path in sources(KERNELS):
        foreign = roots(imported_modules(path)) - set(sys.stdlib_module_names) - KERNELS_MAY_IMPORT
        assert not foreign, f"{path} imports {foreign}"
