"""The prompts of test/data/prompts.jsonl as token ids."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

FILE = Path(__file__).resolve().parents[1] / "data" / "prompts.jsonl"


class Prompt(msgspec.Struct, frozen=True):
    name: str
    text: str | None
    input_ids: tuple[int, ...]


def load_prompts(model: str, num_prompts: int) -> list[Prompt]:
    """The first num_prompts of the file, whose order mixes the kinds."""
    return list(_all_prompts(model)[:num_prompts])


@cache
def tokenizer_of(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@cache
def _all_prompts(model: str) -> tuple[Prompt, ...]:
    lines = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return tuple(
        Prompt(
            name=line["name"],
            text=line.get("text"),
            input_ids=tuple(line.get("input_ids") or tokenizer_of(model).encode(line["text"])),
        )
        for line in lines
    )
