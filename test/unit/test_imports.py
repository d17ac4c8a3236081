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
}
MAY_IMPORT_SGLANG = (
    "plugin.py",
    "compat.py",
    "launch_server.py",
    "platform",
    "target",
    "models",
    "drafter/process.py",
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


@pytest.mark.parametrize("part", PARTS)
def test_core_and_wire_import_only_what_they_may(part):
    own_parts, outside = PARTS[part]
    for path in sources(PACKAGE / part):
        modules = imported_modules(path)
        foreign = roots(modules) - set(sys.stdlib_module_names) - outside - {"sglang_ssd"}
        assert not foreign, f"{path} imports {foreign}"
        ours = {m.split(".")[1] for m in modules if m.startswith("sglang_ssd.")}
        assert ours <= own_parts, f"{path} imports {ours - own_parts}"


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


def test_kernels_import_nothing_of_the_package():
    for path in sources(KERNELS):
        assert not roots(imported_modules(path)) & {"sglang_ssd", "sglang"}, path
