"""What is wrong with a draft checkpoint is said before it is loaded, with the name of the file."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ssd.drafter.checkpoint import (
    CheckpointError,
    check_config,
    check_local,
    check_weights,
)
from sglang_ssd.drafter.footprint import cpu_kv_slots
from sglang_ssd.drafter.process import DrafterSettings, check_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
}


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def write_weights(file: Path, *, size: int = 64, missing: int = 0) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]},
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(size)
    file.write_bytes(data[: len(data) - missing])


class Sizes:
    """What of SGLang's ModelConfig is read; 30 layers of 3 heads of 64."""

    num_attention_layers = 30
    head_dim = 64

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def get_total_num_kv_heads(self) -> int:
        return 3


def test_a_cpus_kv_takes_one_gib_whatever_the_data_type() -> None:
    """Red when a draft of half precision gets half of the slots, as --help does not say."""
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        assert cpu_kv_slots(Sizes(dtype)) == (1 << 30) // (2 * 30 * 3 * 64 * size)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model.safetensors"]
)
def test_what_never_ends_is_not_read(tmp_path: Path, name: str) -> None:
    """Red when the name of a model to reload stops the scheduler that looks at its files."""
    write_config(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError) as refusal:
        check_local(tmp_path, load_format="auto")
    assert str(refusal.value) == f"draft model: {tmp_path / name} is no regular file"


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Gemma2ForCausalLM"])
def test_other_classes_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, architectures=[name])
    with pytest.raises(CheckpointError, match=rf"{name}.*Qwen3ForCausalLM"):
        check_config(tmp_path)


def test_sliding_window_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, use_sliding_window=True)
    with pytest.raises(CheckpointError, match="use_sliding_window"):
        check_config(tmp_path)


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        check_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        check_config(tmp_path)


def test_whole_weights_pass(tmp_path: Path) -> None:
    write_weights(tmp_path / "model.safetensors")
    check_weights(tmp_path, load_format="auto")


@pytest.mark.parametrize("missing", [1, 60, 100, 150, 190])
def test_a_cut_file_is_named_wherever_it_is_cut(tmp_path: Path, missing: int) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, missing=missing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (truncated|no)"):
        check_weights(tmp_path, load_format="auto")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_weights(tmp_path / "model-1.safetensors")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is missing"):
        check_weights(tmp_path, load_format="auto")


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        check_weights(tmp_path, load_format="auto")
    check_weights(tmp_path, load_format="dummy")


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """A folder in a file's place, because nothing is unreadable to root."""
    write_config(tmp_path)
    write_weights(tmp_path / "model.safetensors")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        check_local(tmp_path, load_format="auto")


def test_a_name_that_no_file_can_have_is_refused_or_left_to_the_loader() -> None:
    long = "x" * 300
    with pytest.raises(CheckpointError, match=long):
        check_model(DrafterSettings(model_path=f"/{long}"))
    check_model(DrafterSettings(model_path=long))


@pytest.mark.parametrize("field", ["num_attention_heads", "num_hidden_layers", "head_dim"])
def test_a_size_of_nothing_is_refused(tmp_path: Path, field: str) -> None:
    """Red when the sizes are divided by before they are looked at."""
    write_config(tmp_path, **{field: 0})
    with pytest.raises(CheckpointError, match=rf"config\.json.*{field}"):
        check_local(tmp_path, load_format="dummy")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["{", '{"x": ' + "[" * 9999 + "]" * 9999 + "}"])
def test_a_broken_json_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    write_config(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        check_local(tmp_path, load_format="auto")
