"""Constraints of every kind, and whether a text keeps to one."""

from __future__ import annotations

import json
import re
from typing import Any

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
        "required": ["city", "old"],
    }
)
STRUCTURE = {"begin": "<a>", "schema": {"type": "string", "maxLength": 60}, "end": "</a>"}
TAG_AT_ONCE = json.dumps(
    {
        **{"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<a"]},
        "at_least_one": True,
    }
)
"""Of xgrammar alone: the answer begins with the tag."""
TAG_AFTER_TRIGGER = json.dumps(
    {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<"]}
)
"""Of every backend with tags: free text, but for what follows a trigger."""
TRIGGER_BIAS = 60.0
"""On the trigger's token, so that it is said wherever the grammar lets it."""
EXACTLY = "exactly this and nothing else"
CONSTRAINTS: tuple[dict[str, str], ...] = (
    {"json_schema": SCHEMA},
    {"regex": r"(yes|no)"},
    {"ebnf": 'root ::= "the " ("red" | "green") " " ("house" | "boat") "."'},
    {"regex": r"[0-9]{3}-[a-z]{2,6}!"},
    {"json_schema": json.dumps({"type": "string", "const": EXACTLY})},
)
BROKEN: tuple[dict[str, str], ...] = ({"json_schema": "{"}, {"regex": "("}, {"ebnf": "root ::= ("})


def assert_keeps_to(params: dict[str, Any], text: str) -> None:
    """Of a text whose request was not cut by its length."""
    if "regex" in params:
        assert re.fullmatch(params["regex"], text)
    if "ebnf" in params:
        assert re.fullmatch("the (red|green) (house|boat)[.]", text)
    if "json_schema" in params:
        value = json.loads(text)
        assert value == EXACTLY or {"city", "old"} <= set(value)


def without_clock(message: str) -> str:
    """The compiler of grammars puts the time of day into its messages."""
    return re.sub(r"\[[0-9:]{8}\] ", "", message)
