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


def find_target() -> Path | None:
    named = os.environ.get(MODEL_ENV)
    if named:
        return Path(named)
    models = Path(os.environ.get("SGLANG_SSD_MODELS") or ROOT / ".cache" / "models")
    demo = models / "smollm2-135m"
    return demo if (demo / "config.json").exists() else None


def make_drafter(kind: DrafterKind, target: Path) -> Path:
    """Folder of that drafter for this target."""
    if kind == "self":
        return target
    if kind == "random":
        return _written_once(f"{target.name}-random", lambda path: _write_random(target, path))
    name = f"{target.name}-noisy-{NOISE_SCALE:g}"
    return _written_once(name, lambda path: _write_noisy(target, path))


def make_broken(target: Path, change: Literal["vocabulary", "missing", "truncated"]) -> Path:
    """A drafter that no server may accept."""
    name = f"{target.name}-broken-{change}"
    return _written_once(name, lambda path: _write_broken(target, path, change))


def make_short_context(target: Path, context: int) -> Path:
    """The target as a drafter whose context is shorter."""

    def write(path: Path) -> None:
        _copy_all(target, path)
        _change_config(path, max_position_embeddings=context)

    return _written_once(f"{target.name}-context-{context}", write)


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


def _write_broken(target: Path, path: Path, change: str) -> None:
    _copy_small(target, path)
    weights = target / "model.safetensors"
    if change == "vocabulary":
        shutil.copy(weights, path)
        _swap_two_tokens(path / "tokenizer.json")
    elif change == "truncated":
        with weights.open("rb") as source:
            (path / weights.name).write_bytes(source.read(1 << 20))


def _swap_two_tokens(tokenizer: Path) -> None:
    """Ids 1500 and 1501 trade their tokens."""
    content = json.loads(tokenizer.read_text())
    vocab: dict[str, int] = content["model"]["vocab"]
    first, second = (next(t for t, i in vocab.items() if i == wanted) for wanted in (1500, 1501))
    vocab[first], vocab[second] = vocab[second], vocab[first]
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
