"""FR-48: an algorithm from outside has all that SGLang asks of one, and changes nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import requests as http
import sglang.srt
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from harness.reference import Reference
from harness.server import Server
from sglang_ssd.target.algorithm import SsdAlgorithm

CALL = re.compile(r"\bspec_algo(?:rithm)?\.([a-z]\w+)\(")
OF_THE_ENUM = {"from_string", "register"}
OF_BUILTINS = {"get_platform_worker_cls"}
"""Asked by the built-in create_worker only."""
OURS = {
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
}
ASKED_FOR = {"chunked_prefill_size", "disable_overlap_schedule", "enable_metrics"}
OF_EACH_SERVER = {"port", "nccl_port", "launch_command", "startup_time"}


def called_on_algorithms() -> set[str]:
    (folder,) = sglang.srt.__path__
    sources = Path(folder).rglob("*.py")
    return {name for path in sources for name in CALL.findall(path.read_text())} - OF_THE_ENUM


def test_fr_48_predicates() -> None:
    """Red when SGLang asks algorithms something that ours cannot answer."""
    asked = called_on_algorithms()
    assert {"is_eagle", "is_none", "create_worker"} <= asked, "the call sites look otherwise now"
    assert not {name for name in asked if not callable(getattr(SsdAlgorithm, name, None))}


def test_fr_48_signatures() -> None:
    """Red when a method of SGLang's algorithms takes other arguments than ours."""
    for name, theirs in vars(SpeculativeAlgorithm).items():
        if inspect.isfunction(theirs) and not name.startswith("_") and name not in OF_BUILTINS:
            wanted, has = (
                list(inspect.signature(one).parameters)
                for one in (theirs, getattr(SsdAlgorithm, name))
            )
            assert has == wanted, name


def test_fr_48_server_args(server: Server, reference: Reference) -> None:
    """Red when the plugin, or a drafter's own arguments, leak into the target's."""
    args, plain = (
        http.get(f"{one.url}/server_info", timeout=30).json() for one in (server, reference.server)
    )
    for one in (args, plain):
        del one["cuda_graph_config"]["prefill"]  # it follows the chunk
    known = set(plain) & set(args) - {"internal_states"}
    changed = {name for name in known if args[name] != plain[name]}
    assert changed - OF_EACH_SERVER <= OURS | ASKED_FOR
    assert OURS - {"speculative_eagle_topk"} <= changed
    assert args["model_path"] == server.spec.model
    assert args["speculative_algorithm"] == "SSD"
