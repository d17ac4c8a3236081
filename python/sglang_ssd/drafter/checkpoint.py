"""Says what is wrong with a local draft checkpoint before anything of it is loaded.

Reads config.json, the index and the safetensors headers only. A hub id is resolved by the loader.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Plain multi-head or grouped-query attention at page size 1; anything else is refused by name."""
MODEL_FILES = ("llama", "qwen2", "qwen3")
"""Where SGLang has them, in sglang.srt.models."""

_HEADER_LIMIT = 100 << 20
_WEIGHTLESS_FORMATS = ("dummy",)
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.gguf")

T = TypeVar("T")
_Size = Annotated[int, msgspec.Meta(gt=0)]


class CheckpointError(ValueError):
    """The draft model cannot be served; the text names the file or class."""


class _Config(msgspec.Struct):
    architectures: list[str]
    num_hidden_layers: _Size
    num_attention_heads: _Size
    hidden_size: _Size
    max_position_embeddings: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    use_sliding_window: bool = False


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def check_local(model_dir: Path, *, load_format: str) -> None:
    """CheckpointError unless a supported model is there, whole and readable."""
    try:
        if not model_dir.is_dir():
            raise CheckpointError(f"draft model: {model_dir} is missing")
        check_config(model_dir)
        check_weights(model_dir, load_format=load_format)
    except OSError as error:  # names the file
        raise CheckpointError(f"draft model: {error}") from error


def check_config(model_dir: Path) -> None:
    """CheckpointError for a missing config, impossible sizes or another architecture."""
    path = model_dir / "config.json"
    _check_file(path)
    config = _decode(path.read_bytes(), _Config, path)
    check_architecture(config.architectures)
    if config.use_sliding_window:
        raise CheckpointError(
            f"draft model: {config.architectures[0]} with use_sliding_window is not supported; "
            "allowed is plain attention"
        )


def check_architecture(architectures: list[str]) -> None:
    """CheckpointError naming the class unless the drafter knows its attention."""
    name = architectures[0] if architectures else "none named"
    if name not in SUPPORTED_ARCHITECTURES:
        allowed = ", ".join(SUPPORTED_ARCHITECTURES)
        raise CheckpointError(f"draft model: class {name} is not supported; allowed are {allowed}")


def check_weights(model_dir: Path, *, load_format: str) -> None:
    """CheckpointError naming the first weight file that is missing or cut short."""
    if load_format in _WEIGHTLESS_FORMATS:
        return
    index = model_dir / "model.safetensors.index.json"
    if index.exists():
        _check_file(index)
        names = set(_decode(index.read_bytes(), _Index, index).weight_map.values())
        files = [model_dir / name for name in sorted(names)]
    else:
        files = sorted(model_dir.glob("*.safetensors"))
    if not files and not any(True for kind in _OTHER_WEIGHTS for _ in model_dir.glob(kind)):
        raise CheckpointError(
            f"draft model: no weights in {model_dir} (model.safetensors is missing)"
        )
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """8 bytes of header length, a JSON header, then the tensors that it places."""
    _check_file(file)
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_len = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT
        header = stream.read(header_len) if header_len < _HEADER_LIMIT else b""
    if len(header) < min(header_len, _HEADER_LIMIT):
        raise CheckpointError(f"draft model: {file} is truncated: {size} bytes, its header is cut")
    fields = _decode(header, dict[str, msgspec.Raw], file)
    fields.pop("__metadata__", None)
    ends = [_decode(raw, _Tensor, file).data_offsets[1] for raw in fields.values()]
    expected = 8 + header_len + max(ends, default=0)
    if size < expected:
        raise CheckpointError(f"draft model: {file} is truncated: {size} of {expected} bytes")


def _check_file(path: Path) -> None:
    """What is no regular file, such as a pipe, may be read for ever."""
    if not path.exists():
        raise CheckpointError(f"draft model: {path} is missing")
    if not path.is_file():
        raise CheckpointError(f"draft model: {path} is no regular file")


def _decode(data: bytes | msgspec.Raw, kind: type[T], file: Path) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"draft model: {file} is not as it should be: {error}") from error
