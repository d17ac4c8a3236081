"""Each refusal of a start, a request or a reload stands in a test that asks for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "python" / "sglang_ssd"
ERRORS = {"ValueError", "SettingsError", "CheckpointError", "RuntimeError"}
SAYS_WHY = re.compile(r"reasons$|refusal$|^unsupported_|^_vocabulary_sizes$|^first_difference$")
OF_NOBODY = {
    "compat.py:  is installed without a requirement on sglang": "a broken build of ours",
    "drafter/__main__.py: not a finite number": "becomes what the flag may be",
    "drafter/process.py: --speculative-draft-model-path: got none, SSD needs a draft model": (
        "refused before, in other words"
    ),
}
"""Texts that no user meets, and why."""


def texts_of(node: ast.AST) -> Iterator[str]:
    """The fixed parts of the messages in an expression or a function, docstrings left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            if " " in child.value and not isinstance(node, ast.Expr):
                yield child.value
        elif not isinstance(child, ast.FormattedValue):
            yield from texts_of(child)


def refusals_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name))) if name in ERRORS:
                yield from texts_of(node)
            case ast.Call(func=ast.Name(id="_answer")):
                yield from texts_of(node)
            case ast.FunctionDef(name=name) if SAYS_WHY.search(name):
                yield from texts_of(node)


def asked_for() -> str:
    """Every text of the tests and of the table whose rows they try."""
    found = [(ROOT / "docs" / "support.md").read_text()]
    for path in sorted((ROOT / "test").rglob("*.py")):
        if path != Path(__file__):
            nodes = ast.walk(ast.parse(path.read_text()))
            found += [str(one.value) for one in nodes if isinstance(one, ast.Constant)]
    return "\n".join(found)


def test_every_refusal_is_asked_for() -> None:
    """Red when a start, a request or a reload is refused with words that no test has."""
    asked = asked_for()
    refused = {
        f"{path.relative_to(PRODUCT)}: {text}": text
        for path in sorted(PRODUCT.rglob("*.py"))
        if path.name != "speculation_cache.py"  # its errors are of the wire, as ProtocolErrors
        for text in refusals_of(ast.parse(path.read_text()))
    }
    assert {name for name, text in refused.items() if text not in asked} == set(OF_NOBODY)
