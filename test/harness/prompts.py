"""The prompts of test/data/prompts.jsonl as token ids."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

FILE = Path(__file__).resolve().parents[1] / "data" / "prompts.jsonl"

STORY = "Once upon a time, in a village at the foot of a mountain, there lived a clockmaker who"
"""Goes on for long."""
CHAT = "<|im_start|>user\nSay yes or no: is water wet?<|im_end|>\n<|im_start|>assistant\n"
"""Is answered briefly."""
SPELLED = {
    "emoji": "Repeat: \U0001f600\U0001f680\U0001f389 \U0001f600\U0001f680\U0001f389 \U0001f600",
    "cjk": "\u91cd\u590d\uff1a\u4f60\u597d\u4e16\u754c\u3002"
    "\u4f60\u597d\u4e16\u754c\u3002\u4f60\u597d",
    "quotes": 'She said: "It\u2019s \u201cfine\u201d", he said: "It\u2019s \u201cfine\u201d"',
}
"""Repetitive texts whose characters span tokens."""


class Prompt(msgspec.Struct, frozen=True):
    name: str
    text: str | None
    input_ids: tuple[int, ...]


def load_prompts(model: str, num_prompts: int) -> list[Prompt]:
    """The first num_prompts of the file, whose order mixes the kinds."""
    prompts = _all_prompts(model)
    if num_prompts > len(prompts):
        raise ValueError(f"{num_prompts} prompts: {FILE.name} has {len(prompts)}")
    return list(prompts[:num_prompts])


def cycle_prompts(model: str, num_prompts: int) -> list[Prompt]:
    """So many, the file from its start again where it has no more."""
    prompts = _all_prompts(model)
    return [prompts[index % len(prompts)] for index in range(num_prompts)]


@cache
def tokenizer_of(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def encode(model: str, text: str) -> tuple[int, ...]:
    return tuple(tokenizer_of(model).encode(text))


def ids_of_length(model: str, length: int) -> tuple[int, ...]:
    """So many tokens of all the prompts in a row; other lengths are other texts."""
    ids = [token for prompt in _all_prompts(model) for token in prompt.input_ids]
    ids *= 1 + length // len(ids)
    start = length % 50
    return tuple([*ids, *ids][start : start + length])


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
