"""Penalties and processors of a verify against SGLang's own penalizers and processors, no server.

SGLang gets one token at a time; a verify gets the whole run at once and must give the same rows.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import dill
import msgspec
import pytest
import torch
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.constrained.outlines_backend import OutlinesGrammar
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

import bench_host
import bench_penalties
from harness.processors import serialized
from sglang_ssd.target import refusals
from sglang_ssd.target.draft_rule import draft_rule
from sglang_ssd.target.plain_decode import can_roll_back, is_row_function, needs_plain_decode
from sglang_ssd.target.refusals import SHOWN_CHARS, refusal_reasons
from sglang_ssd.target.row_transforms import RowTransforms
from sglang_ssd.wire.messages import MAX_RULE_TOKENS, DraftRule

VOCAB = 300
PARAMS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.3, "presence_penalty": -0.7},
    {"repetition_penalty": 1.3, "frequency_penalty": 2.0},
    {"min_new_tokens": 9, "stop_token_ids": [7, 8, VOCAB]},
    {"presence_penalty": 1.0, "repetition_penalty": 0.8, "min_new_tokens": 6},
]
OUTPUTS = [[3], [5, 5, 9, 260], [], [1, 2, 3, 4, 5, 6, 7], [8, 8, 8, 8]]
ASKED_FOR = (
    *("custom_logit_processor", "beam_group", "grammar"),
    *("return_logprob", "return_sampling_mask", "return_hidden_states"),
)
"""Attributes of a request that are None or false unless a client asks."""
DRAFTS: list[list[int]] = [[4, 4], [5, 9, 5, 1], [2, 2, 2, 2], [9, 9, 9, 9], []]


class Tokenizer:
    eos_token_id = 0
    additional_stop_token_ids = {11}


class Request:
    """The fields of SGLang's Req that are read."""

    def __init__(self, params: dict[str, Any], output: Sequence[int]) -> None:
        self.sampling_params = SamplingParams(**params)
        self.origin_input_ids = array("q", [1, 2, 3])
        self.output_ids = array("q", output)
        self.tokenizer = Tokenizer()
        self.eos_token_ids = {12}
        self.custom_logit_processor: str | None = None
        self.grammar: Any = None
        self.input_embeds: Any = None
        self.positional_embed_overrides: Any = None


class Batch:
    device = "cpu"

    def __init__(self, reqs: list[Request]) -> None:
        self.reqs = reqs
        self.sampling_info: Any = None


def penalizers(batch: Batch) -> penaltylib.BatchedPenalizerOrchestrator:
    return penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=VOCAB,
        batch=batch,
        penalizers={
            penaltylib.BatchedFrequencyPenalizer,
            penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer,
            penaltylib.BatchedRepetitionPenalizer,
        },
    )


def sampling_info(batch: Batch, orchestrator: Any, **fields: Any) -> SamplingBatchInfo:
    size = len(batch.reqs)
    info = SamplingBatchInfo(
        temperatures=torch.ones(size, 1),
        top_ps=torch.ones(size),
        top_ks=torch.ones(size, dtype=torch.int32),
        min_ps=torch.zeros(size),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCAB,
        device="cpu",
        penalizer_orchestrator=orchestrator,
        **fields,
    )
    return info.copy_for_forward()


def one_at_a_time(index: int, logits: torch.Tensor) -> torch.Tensor:
    """Rows [W, V] of one request as a server without speculation processes them."""
    req = Request(PARAMS[index], ())
    batch = Batch([req])
    orchestrator = penalizers(batch)
    rows = []
    tokens = [*OUTPUTS[index], *DRAFTS[index]]
    for place in range(len(tokens) + 1):
        if place >= len(OUTPUTS[index]):
            row = logits[place - len(OUTPUTS[index])][None].clone()
            sampling_info(batch, orchestrator).apply_logits_bias(row)
            rows.append(row[0])
        if place < len(tokens) and orchestrator.is_required:
            orchestrator.cumulate_output_tokens(torch.tensor([tokens[place]]))
    return torch.stack(rows)


def all_logits() -> torch.Tensor:  # [B, W, V]
    return 3 * torch.randn(len(PARAMS), 5, VOCAB, generator=torch.Generator().manual_seed(1))


def test_verify_rows_equal_sglangs_penalizers() -> None:
    """Red when SGLang changes what a penalty does, or a row counts the wrong tokens."""
    reqs = [Request(*one) for one in zip(PARAMS, OUTPUTS, strict=True)]
    transforms = RowTransforms()
    transforms.start(reqs)
    rows = all_logits()
    transforms.penalise(rows, reqs, DRAFTS)
    for index, before in enumerate(all_logits()):
        expected = one_at_a_time(index, before)
        assert torch.equal(rows[index, : len(expected)], expected), PARAMS[index]
        assert torch.equal(rows[index, len(expected) :], before[len(expected) :])


def test_a_resumed_prefill_is_penalised_by_the_whole_output() -> None:
    """Red when a retracted request's next token forgets the output that it keeps."""
    reqs = [Request(*one) for one in zip(PARAMS, OUTPUTS, strict=True)]
    batch = Batch(reqs)
    batch.sampling_info = sampling_info(batch, penalizers(batch))
    transforms = RowTransforms()
    transforms.start(reqs)
    transforms.penalise_prefill(batch)
    rows = all_logits()[:, 0].clone()
    batch.sampling_info.apply_logits_bias(rows)
    for index, before in enumerate(all_logits()):
        assert torch.equal(rows[index], one_at_a_time(index, before)[0]), PARAMS[index]


def test_a_history_grows_by_whole_runs_and_dies_with_its_request() -> None:
    """Red when histories leak, or a request without penalties costs one."""
    reqs = [Request(PARAMS[1], [4]), Request({}, [4])]
    transforms = RowTransforms()
    transforms.start(reqs)
    assert transforms.applies_to(reqs)
    assert not transforms.applies_to(reqs[1:])
    transforms.extend(reqs, [[5, 6], [7]])
    assert transforms._outputs[reqs[0]].tokens.tolist() == [4, 5, 6]
    reqs[0].output_ids.append(5)
    transforms.start(reqs)
    assert transforms._outputs[reqs[0]].tokens.tolist() == [4, 5]
    del reqs[0]
    assert not transforms.applies_to(reqs)
    assert not transforms._outputs


def test_a_history_is_what_sglang_keeps_of_a_retracted_request() -> None:
    """Red when SGLang keeps the round that is under way when it retracts a request, as it may be
    under overlap: the history begins again with the output, which has none of that round."""
    reqs = [running_request(is_retracted=is_retracted) for is_retracted in (False, True)]
    transforms = RowTransforms()
    transforms.start(reqs)
    transforms.extend(reqs, [[5, 6], [5, 6]])
    processor, batch = MagicMock(enable_overlap=True), MagicMock(reqs=reqs)
    processor._normalize_decode_outputs.return_value = [[5, 6], [5, 6]], None
    processor.metrics_reporter.num_generated_tokens = 0
    processor.metrics_reporter.forward_ct_decode = 0
    result = MagicMock()
    result.get_num_generated_tokens.return_value = 4
    batch.spec_algorithm.is_none.return_value = False
    with get_context().override_server_args():
        SchedulerBatchResultProcessor.process_batch_result_decode(processor, batch, result)
    assert [req.output_ids.tolist() for req in reqs] == [[4, 5, 6], [4]]
    transforms.start(reqs[1:])
    histories = [transforms._outputs[req].tokens for req in reqs]
    assert histories == [req.output_ids for req in reqs]


def running_request(*, is_retracted: bool) -> Any:
    """What else SGLang reads when a round has ended."""
    req = MagicMock(is_retracted=is_retracted, **dict.fromkeys(ASKED_FOR))
    req.output_ids = array("q", [4])
    req.sampling_params = SamplingParams(**PARAMS[1])
    req.finished.return_value = False
    return req


@pytest.mark.parametrize("declared", [True, False])
def test_each_row_sees_its_own_history(declared: bool) -> None:
    """Red when a processor is asked about rows that it may not see, or with other output."""
    name = "BanRecentTokens" if declared else "CountCalls"
    req, other = Request({}, [4, 5]), Request({}, [9])
    req.custom_logit_processor = serialized(name)
    processor = CustomLogitProcessor.from_str(req.custom_logit_processor)
    own = {"window": 2, "calls": 3, "__req__": weakref.proxy(req)}
    transforms = RowTransforms()
    transforms.start([other, req])
    transforms.extend([other, req], [[1], [6]])
    reqs, drafts = [other, req], [[1, 2], [7, 8] if declared else []]
    info = dataclasses.replace(
        sampling_info(Batch(reqs), penalizers(Batch(reqs))),
        has_custom_logit_processor=True,
        custom_params=[None, own],
        custom_logit_processor={1: ProcessorEntry(processor, [1], torch.tensor([1]))},
    )
    rows = torch.zeros(2, 4, VOCAB)
    transforms.apply_processors(rows, info, reqs, drafts)
    assert not rows[0].any()
    assert not rows[1, 1 + len(drafts[1]) :].any()
    assert req.output_ids.tolist() == [4, 5]
    if declared:
        banned = [torch.isinf(row).nonzero()[:, 0].tolist() for row in rows[1, :3]]
        assert banned == [[5, 6], [6, 7], [7, 8]]
        assert [int(row.argmax()) for row in rows[1, :3]] == [263, 264, 260]
    else:
        assert own["calls"] == 4
        assert int(rows[1, 0].argmax()) == 264


def test_which_processors_are_functions_of_the_row() -> None:
    """Red when a class is trusted that did not say so, or SGLang's own are not."""

    class Overrides(DisallowedTokensLogitsProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            return logits

    trusted = ["BanRecentTokens", "ShortThought"]
    assert all(is_row_function(CustomLogitProcessor.from_str(serialized(one))) for one in trusted)
    assert is_row_function(DeepseekOCRNoRepeatNGramLogitProcessor())
    assert not is_row_function(Overrides())
    assert not is_row_function(CustomLogitProcessor.from_str(serialized("CountCalls")))


def test_embeddings_in_place_of_ids_need_plain_decode() -> None:
    """Red when a drafter is asked to go on from ids that only stand in for embeddings."""
    assert not needs_plain_decode(Request({}, []))
    for name, value in {
        "input_embeds": [[0.5] * 4],
        "positional_embed_overrides": PositionalEmbeds(torch.zeros(1, 4), [0]),
    }.items():
        req = Request({}, [])
        setattr(req, name, value)
        assert needs_plain_decode(req), name


def test_which_grammars_roll_back() -> None:
    """Red when a backend without rollback would be advanced over drafts, or a wrapper hides one."""
    outlines = OutlinesGrammar(guide=None, jump_forward_map=None)
    for kind in (XGrammarGrammar, GuidanceGrammar):
        assert can_roll_back(kind.__new__(kind))
    assert not can_roll_back(outlines)
    assert not can_roll_back(ReasonerGrammarObject(outlines, [5]))
    assert can_roll_back(ReasonerGrammarObject(None, [5]))


def run_benchmark(name: str, *flags: str) -> tuple[int, dict[str, Any]]:
    """Its exit code, and what its last line says."""
    script = Path(__file__).resolve().parents[2] / "benchmark" / f"{name}.py"
    run = subprocess.run(
        [sys.executable, script, *flags], capture_output=True, text=True, timeout=1500, check=False
    )
    last = (run.stdout.splitlines() or [""])[-1]
    assert last.startswith("{"), run.stdout[-2000:] + run.stderr[-2000:]
    record: dict[str, Any] = json.loads(last)
    return run.returncode, record


def test_host_benchmark_runs() -> None:
    """Red when the worker's round changes and the benchmark of its host time is left behind."""
    small = ("--rounds", "3", "--vocab-size", "2000", "--output-len", "20")
    code, record = run_benchmark("bench_host", *small, "--most-added", "100")
    assert code == 0, record
    assert set(record["arms"]) == {"without", "plain", "penalised", "reported", "exported"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_plain_requests_pay_next_to_nothing(figures: dict[str, Any]) -> None:
    """Red when a round of plain greedy requests pays more than 3% for what penalties need, and for
    requests that end where plain decode ends them.

    CPU time of one thread, paired over 500 rounds in one run: what else runs does not count.
    """
    code, record = run_benchmark("bench_host")
    assert code == 0, record
    assert record["flags"]["rounds"] == 500
    figures.update({arm: round(one["added"], 4) for arm, one in record["arms"].items()})


@pytest.mark.parametrize(("added", "says"), [(0.03, []), (0.031, ["3.1%"])])
def test_host_benchmark_judges(added: float, says: list[str]) -> None:
    """Red when the benchmark passes whatever it finds."""
    results = {"plain": {"added": added}, "penalised": {"added": 0.5}}
    found = bench_host.failures_of(results, 0.03)
    assert found == [f"plain rounds take {say} longer, allowed are 3.0%" for say in says]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_penalties_benchmark_runs(target: Path) -> None:
    """Red when a flag or a field of the server is renamed and the benchmark is left behind, or
    what it measures as drafted is not.

    The target as its own drafter costs too much to pay, so either verdict will do.
    """
    models = ("--target", str(target), "--draft", str(target), "--dtype", "float32")
    code, record = run_benchmark("bench_penalties", *models, "--new-tokens", "24", "--repeats", "1")
    assert [one["setting"] for one in record["results"]] == list(bench_penalties.SETTINGS)
    assert code == bool(record["failures"])
    for one in record["results"]:
        assert set(one) == set(bench_penalties.Result.__struct_fields__)
        assert one["drafts_tokens_per_s"] > 0
        assert one["plain_tokens_per_s"] > 0
    assert record["results"][0]["accept_length"] > 1


def test_penalties_benchmark_judges() -> None:
    """Red when the benchmark passes where drafts do not pay for penalised requests."""
    ratios = dict(zip(bench_penalties.SETTINGS, (0.8, 1.0, 1.01, 0.99, 2.0), strict=True))
    results = [
        bench_penalties.Result(name, 1.0, 1.0, ratio, 2.0, 1.0) for name, ratio in ratios.items()
    ]
    assert bench_penalties.failures_of(results) == [
        "frequency_penalty 0.5: 1.00 times the speed of plain decode",
        "repetition_penalty 1.1: 0.99 times the speed of plain decode",
    ]


def test_refusals_name_the_parameter_and_its_value() -> None:
    """Red when a value that means "off" is refused, or a refusal says nothing."""
    off = {"return_sampling_mask": None, "sampling_params": {"beam_width": 1}}
    assert refusal_reasons(off, vocab_size=9) == []
    assert refusal_reasons({"sampling_params": None}, vocab_size=9) == []
    asked = {"return_sampling_mask": True, "sampling_params": {"beam_width": 3}}
    assert refusal_reasons(asked, vocab_size=9) == [
        "return_sampling_mask True: not served with --speculative-algorithm SSD",
        "beam_width 3: not served with --speculative-algorithm SSD",
    ]
    for name in ("BanRecentTokens", "CountCalls"):
        assert refusal_reasons({"custom_logit_processor": serialized(name)}, vocab_size=9) == []
    assert refusal_reasons({"custom_logit_processor": ""}, vocab_size=9) == []
    stops = {"stop_token_ids": [0, 9, 10, -1]}
    assert refusal_reasons({"sampling_params": stops}, vocab_size=9) == []
    early = {"sampling_params": {**stops, "min_new_tokens": 2}}
    assert refusal_reasons(early, vocab_size=9) == [
        "stop_token_ids [10, -1]: must be 0 to 8 where min_new_tokens is given"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{}", "KeyError: 'callable'"),
        (
            '{"callable": "zz"}',
            "ValueError: non-hexadecimal number found in fromhex() arg at position 0",
        ),
        (json.dumps({"callable": dill.dumps(dict).hex()}), "it is a dict"),
    ],
    ids=["no-callable", "no-hex", "no-processor"],
)
def test_a_processor_that_is_none_is_refused(text: str, problem: str) -> None:
    """Red when a text reaches the scheduler that ends it."""
    shown = text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + ".."
    assert refusal_reasons({"custom_logit_processor": text}, vocab_size=9) == [
        f"custom_logit_processor {shown!r}: must be the text of CustomLogitProcessor.to_str() "
        f"({problem})"
    ]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_text_is_unpickled_only_where_processors_are_asked_for(
    is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a client's pickle is read by a server without --enable-custom-logit-processor."""
    read: list[str] = []
    features = SimpleNamespace(enable_custom_logit_processor=is_enabled)
    monkeypatch.setattr(refusals, "get_exec", lambda: SimpleNamespace(features=features))
    monkeypatch.setattr(refusals, "is_ssd", lambda: True)
    monkeypatch.setattr(CustomLogitProcessor, "from_str", lambda text: read.append(text) or len)
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=9))
    request = SimpleNamespace(custom_logit_processor="a pickle", sampling_params=None)
    refusals.refuse_unserved_parameters(manager, request)
    assert read == (["a pickle"] if is_enabled else [])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (PositionalEmbeds(torch.zeros(2, 4), [0, 1]), None),
        (PositionalEmbeds(torch.zeros(1, 5), [0]), "of shape [1, 5]: must be a tensor [number, 4]"),
        (PositionalEmbeds(torch.zeros(1), [0]), "of shape [1]: must be a tensor [number, 4]"),
        (PositionalEmbeds(7, [0]), "7: must be a tensor [number, 4]"),
        ({"positions": [0]}, "{'positions': [0]}: must be a PositionalEmbeds"),
    ],
    ids=["right", "another-width", "no-width", "no-tensor", "as-json"],
)
def test_embeddings_that_do_not_fit_are_refused(
    overrides: Any, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when embeddings reach the scheduler that end it."""
    features = SimpleNamespace(enable_custom_logit_processor=False)
    monkeypatch.setattr(refusals, "get_exec", lambda: SimpleNamespace(features=features))
    monkeypatch.setattr(refusals, "is_ssd", lambda: True)
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=9, hidden_size=4))
    request = SimpleNamespace(positional_embed_overrides=overrides)
    if says is None:
        refusals.refuse_unserved_parameters(manager, request, "a", [1, 2])
        return
    with pytest.raises(ValueError, match=f"^{re.escape('positional_embed_overrides ' + says)}$"):
        refusals.refuse_unserved_parameters(manager, request, "a", [1, 2])


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_pickle_are_refused(seed: int) -> None:
    """Red when the reading of garbage raises what is not expected of it."""
    whole = bytes.fromhex(json.loads(serialized("BanRecentTokens"))["callable"])
    cut = whole[: random.Random(seed).randrange(len(whole))]
    text = json.dumps({"callable": cut.hex()})
    assert len(refusal_reasons({"custom_logit_processor": text}, vocab_size=9)) == 1


def test_the_drafter_is_told_what_fits() -> None:
    """Red when a long bias is refused by the drafter, or the strongest entries are left out."""
    bias = {str(token): float(token % 50) for token in range(2000)}
    req = Request({"temperature": 0.0, "logit_bias": bias, "min_new_tokens": 3}, [])
    rule = draft_rule(req, seed=5)  # type: ignore[arg-type]
    assert len(rule.bias_tokens) == MAX_RULE_TOKENS
    assert min(rule.bias_values) > 35
    assert (rule.temperature, rule.seed, rule.prompt_len) == (0.0, 0, 3)
    assert rule.stop_tokens == [0, 11, 12]
    sampled = draft_rule(Request({"temperature": 0.5}, []), seed=5)  # type: ignore[arg-type]
    assert (sampled.temperature, sampled.seed, sampled.stop_tokens) == (0.5, 5, [])


@pytest.mark.parametrize(("asked", "told"), [(0, 0), (2.5, 3), (2**40, 2**31 - 1)])
def test_a_least_length_of_any_size_is_told(asked: float, told: int) -> None:
    """Red when the drafter cannot read a rule whose min_new_tokens SGLang takes."""
    req = Request({"temperature": 0.0, "min_new_tokens": asked}, [])
    rule = draft_rule(req, seed=5)  # type: ignore[arg-type]
    assert rule.min_new_tokens == told
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=DraftRule) == rule
