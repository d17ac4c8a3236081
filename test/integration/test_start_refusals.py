"""Each refusal of a start that no command line of the server shows, whole and by equality.

What the server's own flags and settings are refused with is in test/e2e/test_bad_input.py, and a
checkpoint and a vocabulary that stop a real server in test_faults.py and field_cases/test_fr37*.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_ssd.config import SsdConfig
from sglang_ssd.drafter.__main__ import _bind_cores, check_wire, parse_settings
from sglang_ssd.drafter.checkpoint import SUPPORTED_ARCHITECTURES, check_local
from sglang_ssd.drafter.handshake import Abilities, answer_hello
from sglang_ssd.drafter.process import DrafterSettings
from sglang_ssd.keys import make_keys
from sglang_ssd.target.handshake import Tokenizer, _wait_for_welcome, connect
from sglang_ssd.trace import Tracer
from sglang_ssd.wire.messages import SCHEMA_VERSION, Hello, Refusal
from sglang_ssd.wire.token_map import digest_blocks

SETTINGS = DrafterSettings(model_path="/m", endpoint="ipc:///run/drafter")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_size": 12,
    "max_position_embeddings": 64,
}
CLASSES = ", ".join(SUPPORTED_ARCHITECTURES)


def refusal_of(start: Callable[[], object]) -> str:
    """All that the error says."""
    try:
        start()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


# The files of a wire that leaves the machine ----------------------------------------------------


def with_keys(folder: Path, **changes: str | None) -> None:
    """A drafter with those keys in place of its own."""
    keys = {
        "secret_key": str(folder / "drafter/drafter.key_secret"),
        "peer_keys": str(folder / "drafter/targets"),
    }
    check_wire(msgspec.structs.replace(SETTINGS, **{**keys, **changes}))


def readable_by_others(folder: Path) -> None:
    (folder / "drafter/drafter.key_secret").chmod(0o644)
    with_keys(folder)


def public_for_secret(folder: Path) -> None:
    public = folder / "target/drafter.key"
    public.chmod(0o600)
    with_keys(folder, secret_key=str(public))


def no_peers(folder: Path) -> None:
    (folder / "empty").mkdir()
    with_keys(folder, peer_keys=str(folder / "empty"))


WIRE: dict[str, tuple[Callable[[Path], None], str]] = {
    "one key": (
        lambda folder: with_keys(folder, peer_keys=None),
        "--secret-key and --peer-keys: give both, or neither",
    ),
    "missing secret": (
        lambda folder: with_keys(folder, secret_key="/nowhere/key"),
        "--secret-key /nowhere/key: [Errno 2] No such file or directory: '/nowhere/key'",
    ),
    "readable by others": (
        readable_by_others,
        "--secret-key {folder}/drafter/drafter.key_secret: mode 644; "
        "must be readable by its owner alone (chmod 600)",
    ),
    "public for secret": (
        public_for_secret,
        "--secret-key {folder}/target/drafter.key: holds no secret key; must be a .key_secret file",
    ),
    "peers in no folder": (
        lambda folder: with_keys(folder, peer_keys="/nowhere"),
        "--peer-keys /nowhere: must be a folder with the targets' .key files",
    ),
    "no peers": (no_peers, "--peer-keys {folder}/empty: holds no .key file"),
    "far without keys": (
        lambda folder: check_wire(msgspec.structs.replace(SETTINGS, endpoint="tcp://0.0.0.0:7000")),
        "--endpoint 'tcp://0.0.0.0:7000': host 0.0.0.0 is not the loopback interface, and there "
        "are no keys; must be ipc:///PATH of a socket, tcp://127.0.0.1:PORT or, with both keys, "
        "tcp://HOST:PORT",
    ),
}


@pytest.mark.parametrize(("check", "says"), WIRE.values(), ids=WIRE)
def test_a_drafters_wire(check: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    """Red when nobody could reach a drafter and its last line does not say which flag it is."""
    make_keys(tmp_path / "keys")
    said = refusal_of(lambda: check(tmp_path / "keys"))
    assert said == says.format(folder=tmp_path / "keys")


def test_a_secret_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a secret is taken that another user could exchange."""
    make_keys(tmp_path / "keys")
    own_stat = Path.stat

    def others_stat(path: Path, **kwargs: Any) -> os.stat_result:
        fields = list(own_stat(path, **kwargs))
        fields[stat.ST_UID] = os.geteuid() + 77
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", others_stat)
    assert refusal_of(lambda: with_keys(tmp_path / "keys")) == (
        f"--secret-key {tmp_path}/keys/drafter/drafter.key_secret: "
        f"belongs to user {os.geteuid() + 77}; must be ours"
    )


# A drafter's flags ------------------------------------------------------------------------------


def test_a_drafters_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Red when a wrong flag hides another, or is not told what it may be."""
    positive = "must be a whole number above 0, or left out"
    wrong = {
        "--device": ("gpu", "must be auto, cpu, cuda or cuda:N"),
        "--dtype": ("int8", "must be one of auto, bfloat16, float16, float32"),
        "--max-total-tokens": ("-5", positive),
        "--max-sequences": ("0", positive),
        "--mem-fraction": ("nan", "must be a number between 0 and 1, both excluded"),
        "--context-length": ("long", positive),
        "--cores": ("3-1", "must be auto, or core numbers such as 0-2,5"),
        "--gpu-id": ("-1", "must be a whole number of at least 0"),
        "--parent-pid": ("0", "must be a process id, or left out"),
    }
    argv = [f"{flag}={value}" for flag, (value, _) in wrong.items()]
    with pytest.raises(SystemExit) as ended:
        parse_settings(["--model-path", "/m", *argv])
    assert ended.value.code == 2
    reasons = "; ".join(f"{flag} {value!r}: {says}" for flag, (value, says) in wrong.items())
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"python -m sglang_ssd.drafter: error: {reasons}"


def test_a_drafters_cores() -> None:
    here = os.sched_getaffinity(0)
    said = refusal_of(lambda: _bind_cores(msgspec.structs.replace(SETTINGS, cores="1020-1022")))
    assert os.sched_getaffinity(0) == here
    assert said == "--cores '1020-1022': none of them is here: [Errno 22] Invalid argument"


# A drafter's checkpoint -------------------------------------------------------------------------


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_bytes(msgspec.json.encode({**CONFIG, **changes}))


def write_cut(folder: Path) -> None:
    write_config(folder)
    header = b'{"w":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}'
    size = len(header).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(size + header + bytes(60))


def write_cut_header(folder: Path) -> None:
    write_config(folder)
    (folder / "model.safetensors").write_bytes((900).to_bytes(8, "little") + b"{}")


def write_shards(folder: Path) -> None:
    write_config(folder)
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (shutil.rmtree, "draft model: {folder} is missing"),
    "no config": (lambda folder: None, "draft model: {folder}/config.json is missing"),
    "broken config": (
        lambda folder: (folder / "config.json").write_text("{"),
        "draft model: {folder}/config.json is not as it should be: Input data was truncated",
    ),
    "a size of nothing": (
        lambda folder: write_config(folder, num_hidden_layers=0),
        "draft model: {folder}/config.json is not as it should be: "
        "Expected `int` >= 1 - at `$.num_hidden_layers`",
    ),
    "other class": (
        lambda folder: write_config(folder, architectures=["MixtralForCausalLM"]),
        f"draft model: class MixtralForCausalLM is not supported; allowed are {CLASSES}",
    ),
    "no class": (
        lambda folder: write_config(folder, architectures=[]),
        f"draft model: class none named is not supported; allowed are {CLASSES}",
    ),
    "sliding window": (
        lambda folder: write_config(folder, use_sliding_window=True),
        "draft model: LlamaForCausalLM with use_sliding_window is not supported; "
        "allowed is plain attention",
    ),
    "no weights": (
        write_config,
        "draft model: no weights in {folder} (model.safetensors is missing)",
    ),
    "a shard too few": (write_shards, "draft model: {folder}/model-1.safetensors is missing"),
    "cut": (write_cut, "draft model: {folder}/model.safetensors is truncated: 124 of 128 bytes"),
    "cut in its header": (
        write_cut_header,
        "draft model: {folder}/model.safetensors is truncated: 10 bytes, its header is cut",
    ),
}


@pytest.mark.parametrize(("write", "says"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_drafters_checkpoint(write: Callable[[Path], Any], says: str, tmp_path: Path) -> None:
    """Red when a checkpoint is refused without the file and what is wrong with it."""
    folder = tmp_path / "draft"
    folder.mkdir()
    write(folder)
    said = refusal_of(lambda: check_local(folder, load_format="auto"))
    assert said == says.format(folder=folder)


# Target and drafter meet ------------------------------------------------------------------------

TOKENS = ["a", "b", "c"]
HELLO = Hello(SCHEMA_VERSION, "t", 4, 3, digest_blocks(TOKENS), False)
HELLOS: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"schema_version": 99}, f"schema version 99, the drafter speaks {SCHEMA_VERSION}"),
    "steps": ({"num_steps": 17}, "num_steps 17, allowed are 1..16"),
    "no steps": ({"num_steps": 0}, "num_steps 0, allowed are 1..16"),
    "size": (
        {"vocab_size": 4},
        "vocabulary size 3 of the drafter, 4 of the target "
        "(--ssd-allow-padded-vocab accepts vocabularies that differ in padding only)",
    ),
    "tokens": (
        {"token_map_blocks": digest_blocks(["a", "c", "b"])},
        "the drafter's tokenizer maps ids to other tokens than the target's",
    ),
}


@pytest.mark.parametrize(("changes", "says"), HELLOS.values(), ids=HELLOS)
def test_a_target_that_a_drafter_cannot_serve(changes: dict[str, Any], says: str) -> None:
    """Red when a target is refused for more, or less, than what is wrong with it."""
    abilities = Abilities.of(vocab_size=3, context_len=64, tokens=TOKENS)
    answer = answer_hello(msgspec.structs.replace(HELLO, **changes), abilities, config=SsdConfig())
    assert isinstance(answer, Refusal)
    assert answer.reasons == [says]


class Client:
    """One that hears nothing, or a refusal."""

    def __init__(self, state: str) -> None:
        self.state = state
        self.link = self
        self.last_error = "the SSD drafter refuses this target: why"

    def look(self, timeout_s: float) -> None: ...


class FailedDrafter:
    def has_failed(self) -> bool:
        return True

    def failure(self) -> str:
        return "exit code 1: why"


STARTS: dict[str, tuple[Client, FailedDrafter | None, str]] = {
    "late": (
        Client("starting"),
        None,
        "the SSD drafter was not ready within --ssd-start-timeout-s 0.05; "
        "raise it for a large draft model, or see the drafter's log above",
    ),
    "refused": (Client("refused"), None, "the SSD drafter refuses this target: why"),
    "ended": (
        Client("starting"),
        FailedDrafter(),
        "the SSD drafter did not start: exit code 1: why",
    ),
}


@pytest.mark.parametrize(("client", "drafter", "says"), STARTS.values(), ids=STARTS)
def test_a_drafter_that_does_not_come(
    client: Client, drafter: FailedDrafter | None, says: str
) -> None:
    """Red when a server that gives up its start does not say what it waited for."""
    with pytest.raises(RuntimeError) as refused:
        _wait_for_welcome(client, drafter, 0.05)  # type: ignore[arg-type]
    assert str(refused.value) == says


class AnyTokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(TOKENS)}


@pytest.mark.parametrize("tokenizer", [None, AnyTokenizer()], ids=["without", "with"])
def test_a_target_without_a_tokenizer(
    tokenizer: Tokenizer | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Red when a server skips the comparison of vocabularies and does not say so, or why."""
    with pytest.raises(RuntimeError, match="was not ready"):
        connect(
            drafter=None,
            config=SsdConfig(endpoint=f"ipc://{tmp_path}/nobody", start_timeout_s=0.05),
            vocab_size=3,
            context_len=64,
            tokenizer=tokenizer,
            num_steps=4,
            tracer=Tracer(None, "target"),
        )
    says = (
        "token-to-id maps are not compared, the target has no tokenizer (--skip-tokenizer-init): "
        "of a drafter whose ids mean other tokens, only another vocabulary size is noticed"
    )
    assert caplog.messages.count(says) == (tokenizer is None)
