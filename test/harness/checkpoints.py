"""The target's checkpoint and the drafters derived from it, each written once.

self: the target itself, so that every draft is right. random: the same architecture with two layers
of random weights, so that nearly none is. noisy: the target with Gaussian noise on its weights, so
that both happen all the time.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

MODEL_ENV = "SSD_TEST_MODEL"
"""Environment variable that names the target's checkpoint; without it the demo model is taken."""
CACHE_ENV = "SSD_TEST_CACHE"
"""Environment variable for the folder of derived checkpoints (default .cache/drafters)."""

ROOT = Path(__file__).resolve().parents[2]
NOISE_SCALE = 0.08
"""Noise over each matrix's own deviation; chosen so that about 70% of drafts are right."""

DrafterKind = Literal["self", "random", "noisy"]
KINDS: tuple[DrafterKind, ...] = ("self", "random", "noisy")

Change = Literal["swapped", "family", "padded", "missing", "truncated"]
"""swapped: ids 1500 and 1501 trade their tokens. family: fewer ids, and from 1000 on each has
the next one's token. padded: NUM_PAD_ROWS more ids than tokens, which the head prefers to most
others. missing, truncated: the weights."""

FREQUENT_TOKENS = 260
"""A byte-pair tokenizer's first merges follow its single bytes. Padding has twice their rows, so
twice their logits."""
NUM_PAD_ROWS = 64
TRUNCATED_BYTES = 1 << 20
"""What is left of truncated weights: their header and a little more."""


def find_target() -> Path | None:
    named = os.environ.get(MODEL_ENV)
    if named:
        return Path(named)
    return find_model("smollm2-135m")


def find_model(name: str) -> Path | None:
    """The checkpoint of that name in the folder of models, if it is there."""
    models = Path(os.environ.get("SGLANG_SSD_MODELS") or ROOT / ".cache" / "models")
    return models / name if (models / name / "config.json").exists() else None


def make_drafter(kind: DrafterKind, target: Path) -> Path:
    """Folder of that drafter for this target."""
    if kind == "self":
        return target
    if kind == "random":
        return _written_once(f"{target.name}-random", lambda path: _write_random(target, path))
    name = f"{target.name}-noisy-{NOISE_SCALE:g}"
    return _written_once(name, lambda path: _write_noisy(target, path))


def make_broken(drafter: Path, change: Change) -> Path:
    """That drafter, changed so that no server may accept it unasked."""
    name = f"{drafter.name}-broken-{change}"
    return _written_once(name, lambda path: _write_broken(drafter, path, change))


def make_short_context(target: Path, context: int) -> Path:
    """The target as a drafter whose context is shorter."""

    def write(path: Path) -> None:
        _copy_all(target, path)
        _change_config(path, max_position_embeddings=context)

    return _written_once(f"{target.name}-context-{context}", write)


def make_recurrent(target: Path) -> Path:
    """A target with Mamba layers, as far as its config tells; it has no weights."""

    def write(path: Path) -> None:
        _copy_small(target, path)
        given = json.loads((path / "config.json").read_text())
        config = {
            "architectures": ["FalconMambaForCausalLM"],
            "model_type": "falcon_mamba",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": given["vocab_size"],
        }
        (path / "config.json").write_text(json.dumps(config, indent=2))

    return _written_once(f"{target.name}-recurrent", write)


def make_multimodal(target: Path) -> Path:
    """A target that sees images, as far as its config tells; it has no weights."""

    def write(path: Path) -> None:
        _copy_small(target, path)
        text = json.loads((path / "config.json").read_text())
        vision = {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        }
        config = {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": text,
            "vision_config": vision,
            "vocab_size": text["vocab_size"],
        }
        (path / "config.json").write_text(json.dumps(config, indent=2))

    return _written_once(f"{target.name}-multimodal", write)


def _written_once(name: str, write: Callable[[Path], None]) -> Path:
    cache = Path(os.environ.get(CACHE_ENV) or ROOT / ".cache" / "drafters")
    folder = cache / name
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=cache))
    write(work)
    try:
        work.rename(folder)
    except OSError:  # another run was first
        shutil.rmtree(work)
    return folder


def _write_random(target: Path, path: Path) -> None:
    _copy_small(target, path)
    _change_config(path, num_hidden_layers=2)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: _random_like(name, weight, generator)
        for name, weight in load_file(target / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < 2
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _random_like(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if weight.dim() == 1:
        return torch.ones_like(weight)
    return torch.randn(weight.shape, generator=generator).to(weight.dtype) * 0.05


def _write_noisy(target: Path, path: Path) -> None:
    _copy_small(target, path)
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: weight
        if weight.dim() == 1
        else weight
        + torch.randn(weight.shape, generator=generator).to(weight.dtype)
        * (NOISE_SCALE * weight.std())
        for name, weight in load_file(target / "model.safetensors").items()
    }
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _write_broken(drafter: Path, path: Path, change: Change) -> None:
    _copy_small(drafter, path)
    weights = drafter / "model.safetensors"
    if change == "swapped":
        shutil.copy(weights, path)
        _change_ids(path / "tokenizer.json", {1500: 1501, 1501: 1500})
    elif change == "family":
        size = _write_vocabulary(weights, path, lambda table: table[:-NUM_PAD_ROWS].contiguous())
        end = size + NUM_PAD_ROWS
        _change_ids(path / "tokenizer.json", {1000: end - 1} | _one_less(1001, end))
    elif change == "padded":
        rows = slice(FREQUENT_TOKENS, FREQUENT_TOKENS + NUM_PAD_ROWS)
        _write_vocabulary(weights, path, lambda table: torch.cat([table, 2 * table[rows]]))
    elif change == "truncated":
        with weights.open("rb") as source:
            (path / weights.name).write_bytes(source.read(TRUNCATED_BYTES))


def _write_vocabulary(
    weights: Path, path: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> int:
    """Write weights with another embedding, which is the head as well; returns its rows."""
    tensors = load_file(weights)
    table = change(tensors["model.embed_tokens.weight"])
    tensors["model.embed_tokens.weight"] = table
    save_file(tensors, path / weights.name, metadata={"format": "pt"})
    _change_config(path, vocab_size=len(table))
    return len(table)


def _one_less(start: int, end: int) -> dict[int, int]:
    return {index: index - 1 for index in range(start, end)}


def _change_ids(tokenizer: Path, new_ids: dict[int, int]) -> None:
    content = json.loads(tokenizer.read_text())
    vocab: dict[str, int] = content["model"]["vocab"]
    content["model"]["vocab"] = {t: new_ids.get(index, index) for t, index in vocab.items()}
    tokenizer.write_text(json.dumps(content))


def _copy_small(target: Path, path: Path) -> None:
    for file in target.iterdir():
        if file.suffix in {".json", ".jinja", ".txt", ".model"}:
            shutil.copy(file, path)


def _copy_all(target: Path, path: Path) -> None:
    _copy_small(target, path)
    for file in target.glob("*.safetensors"):
        shutil.copy(file, path)


def _change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}, indent=2))
