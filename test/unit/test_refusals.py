"""harness/refusals.py has every refusal of the product, and each is shown by the test it names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from harness.refusals import SETTINGS, TABLE, Refusal
from sglang_ssd.config import SettingsError, SsdConfig, build_config, flag_name

ROOT = Path(__file__).parents[2]
PRODUCT = ROOT / "python" / "sglang_ssd"
TESTS = ROOT / "test"

ERRORS = {"ValueError", "SettingsError", "CheckpointError", "RuntimeError", "SystemExit"}
OTHER_ERRORS = {"ProtocolError", "_cannot_start"}
"""Of messages, and the one that joins the reasons of a start."""
SAYS_WHY = re.compile(
    r"reasons?$|refusal$|^unsupported_|^_vocabulary_sizes$|^first_difference$|^failure_text$"
    r"|^_cannot_start$"
)
"""Functions whose texts are reasons, and names that hold some."""
HOLDERS = {"reasons", "reason", "found", "error", "last_error", "_verdict"}
HOLDERS |= {"NO_DRAFTER", "_NO_FAILURE"}
CALLS = {"_answer", "refuse_to_start", "exit"}
ALLOWS = re.compile(r"\bmust (be|have)\b|\bnot (served|supported)\b")
"""Says so itself, wherever it stands."""
WORDS = re.compile(r"[A-Za-z]{2}")


def name_of(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def fixed_parts(node: ast.AST) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=values):
            return [str(one.value) for one in values if isinstance(one, ast.Constant)]
    return []


def as_written(node: ast.AST) -> str:
    """A text with {the source of what is put there}."""
    if isinstance(node, ast.JoinedStr):
        return "".join(as_written(one) for one in node.values)
    if isinstance(node, ast.FormattedValue):
        how = "" if node.conversion == -1 else f"!{chr(node.conversion)}"
        return f"{{{ast.unparse(node.value)}{how}}}"
    assert isinstance(node, ast.Constant)
    return str(node.value)


def texts_of(node: ast.AST) -> Iterator[str]:
    """The messages in an expression or a function, docstrings and single words left out."""
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(node, ast.Expr) and isinstance(child, ast.Constant)
        parts = fixed_parts(child)
        if isinstance(child, ast.JoinedStr) or any(" " in part for part in parts):
            if not is_docstring and WORDS.search(" ".join(parts)):
                yield as_written(child)
        elif not isinstance(child, ast.Constant):
            yield from texts_of(child)


def refusals_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=error)) if name_of(error) in ERRORS:
                yield from texts_of(node)
            case ast.Call(func=ast.Attribute(attr="append", value=to)) if name_of(to) in HOLDERS:
                yield from texts_of(node)
            case ast.Call(func=ast.Attribute(attr="error", value=ast.Name(id="parser"))):
                yield from texts_of(node)
            case ast.Call(func=called) if name_of(called) in CALLS:
                yield from texts_of(node)
            case ast.Call(func=ast.Name(id="print"), keywords=[ast.keyword(arg="file")]):
                yield from texts_of(node)
            case ast.Assign(targets=[to]) | ast.AnnAssign(target=to) | ast.AugAssign(target=to):
                if name_of(to) in HOLDERS:
                    yield from texts_of(node)
            case ast.FunctionDef(name=name) if SAYS_WHY.search(name):
                yield from texts_of(node)
            case ast.Tuple() | ast.Dict() | ast.List() | ast.Return():
                yield from (text for text in texts_of(node) if ALLOWS.search(text))


def product_files() -> list[Path]:
    return sorted(PRODUCT.rglob("*.py"))


def test_the_table_has_every_refusal_and_no_other() -> None:
    """Red when a start, a request or a reload is refused in words that no row has."""
    refused = {
        (str(path.relative_to(PRODUCT)), text)
        for path in product_files()
        for text in refusals_of(ast.parse(path.read_text()))
    }
    assert {(row.where, row.says) for row in TABLE} == refused


def test_no_refusal_is_raised_or_answered_in_another_way() -> None:
    """Red when an error of another class, or a status of another place, escapes the table."""
    raised, answered = set(), []
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Raise(exc=ast.Call(func=error)):
                    raised.add(name_of(error))
                case ast.keyword(arg="status_code"):
                    answered.append(path.name)
    assert raised == ERRORS | OTHER_ERRORS
    assert answered == ["http_routes.py"], "but for _answer"


@cache
def texts_of_test(file: str) -> tuple[set[str], str]:
    """Its functions, and all its texts with those of the table whose rows it tries."""
    tree = ast.parse((TESTS / file).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    texts = [part for node in ast.walk(tree) for part in fixed_parts(node)]
    if "support_rows" in (TESTS / file).read_text():
        texts.append((ROOT / "docs" / "support.md").read_text())
    return names, "\n".join(texts)


@pytest.mark.parametrize(
    "row", [row for row in TABLE if row.kind != "nobody"], ids=lambda row: row.says[:60]
)
def test_the_named_test_shows_it(row: Refusal) -> None:
    """Red when a test is renamed, loses the case, or asks for other words."""
    file, name = row.shown.split("::")
    names, texts = texts_of_test(file)
    assert name in names
    assert row.case in texts
    parts = re.split(r"\{(?:[^{}]|\{[^{}]*\})*\}", row.says)
    for part in parts:
        assert part.strip(" :;(),\n") in texts, part


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_wrong_setting_is_told_what_it_may_be(setting: str) -> None:
    """Red when a flag is refused with other words than here, for whatever it is given."""
    with pytest.raises(SettingsError) as refused:
        build_config({setting: {}})
    assert str(refused.value) == (
        f"Wrong SSD settings:\n  {flag_name(setting)} {{}}: must be {SETTINGS[setting]}"
    )


def test_every_setting_is_tried() -> None:
    """Red when a setting is new."""
    assert list(SETTINGS) == [field.name for field in msgspec.structs.fields(SsdConfig)]
