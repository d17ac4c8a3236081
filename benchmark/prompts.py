"""Prompts of a run: a named data set where it is at hand, else the small file beside this one.

The paper measures on HumanEval, GSM8K, Alpaca and UltraFeedback. A set is taken from --dataset-file
(JSON lines as the set publishes them, plain or .gz) or from the Hugging Face hub; where neither
gives it, the run goes on with prompts.jsonl and says so.
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
Row = Mapping[str, Any]


class DataSet(msgspec.Struct, frozen=True):
    """Where a set is published and what of a row is the user's message."""

    hub_id: str
    config: str | None
    split: str
    message: Callable[[Row], str]


class Prompts(msgspec.Struct, frozen=True):
    messages: list[str]
    source: str  # goes into the result


def _humaneval(row: Row) -> str:
    return f"Complete this Python function.\n```python\n{row['prompt']}```"


def _alpaca(row: Row) -> str:
    return "\n".join(part for part in (row["instruction"], row.get("input")) if part)


def _mt_bench(row: Row) -> str:
    return str((row.get("turns") or row["prompt"])[0])


DATA_SETS = {
    "humaneval": DataSet("openai/openai_humaneval", None, "test", _humaneval),
    "gsm8k": DataSet("openai/gsm8k", "main", "test", lambda row: row["question"]),
    "alpaca": DataSet("tatsu-lab/alpaca", None, "train", _alpaca),
    "ultrafeedback": DataSet(
        "openbmb/UltraFeedback", None, "train", lambda row: row["instruction"]
    ),
    "mt-bench": DataSet("HuggingFaceH4/mt_bench_prompts", None, "train", _mt_bench),
}


def add_prompt_flags(parser: argparse.ArgumentParser, *, num_prompts: int) -> None:
    names = ", ".join(f"{name} ({found.hub_id})" for name, found in DATA_SETS.items())
    parser.add_argument(
        "--dataset",
        choices=["built-in", *DATA_SETS],
        default="built-in",
        help=f"prompts.jsonl of this folder (default), or {names}",
    )
    parser.add_argument(
        "--dataset-file", type=Path, help="rows of --dataset as JSON lines, instead of the hub"
    )
    parser.add_argument("--num-prompts", type=int, default=num_prompts)


def load_prompts(args: argparse.Namespace) -> Prompts:
    """args.num_prompts of the set: the first of the built-in file, else drawn with args.seed."""
    if args.dataset == "built-in":
        return _built_in(args.num_prompts)
    data_set = DATA_SETS[args.dataset]
    try:
        rows, source = _rows(data_set, args.dataset_file)
    except OSError as error:
        reason = str(error).splitlines()[0]
        print(f"{args.dataset} is not at hand ({reason}): the built-in prompts instead.")
        return _built_in(args.num_prompts)
    chosen = random.Random(args.seed).sample(rows, min(args.num_prompts, len(rows)))
    return Prompts([data_set.message(row) for row in chosen], source=f"{args.dataset} ({source})")


def _built_in(num_prompts: int) -> Prompts:
    rows = _read_lines(BUILT_IN)[:num_prompts]
    return Prompts([row["prompt"] for row in rows], source=f"built-in ({BUILT_IN.name})")


def _rows(data_set: DataSet, file: Path | None) -> tuple[list[Row], str]:
    if file is not None:
        return _read_lines(file), file.name
    from datasets import load_dataset

    rows = load_dataset(data_set.hub_id, data_set.config, split=data_set.split)
    return list(rows), data_set.hub_id


def _read_lines(path: Path) -> list[Row]:
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "rt", encoding="utf-8") as lines:
        return [msgspec.json.decode(line) for line in lines if line.strip()]


def chat_tokens(messages: Iterable[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each message as a chat turn; as plain text where there is no chat template."""
    if tokenizer.chat_template is None:
        return [tokenizer(message).input_ids for message in messages]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=False
        )
        for message in messages
    ]
