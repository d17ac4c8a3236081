"""What operators and clients do to a running server beside generating.

Answers are those of a server without speculation, and of the server itself where the same request
decodes plainly, with custom_params={"ssd": false}. One server serves all tests of this file, then
one with overlap scheduling.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import requests as http

from harness.checkpoints import make_drafter
from harness.client import (
    Answer,
    Request,
    generate,
    generate_all,
    in_background,
    openai,
    openai_stream,
)
from harness.embeddings import embedding_rows
from harness.idle import assert_drained, drafter_status
from harness.logprobs import assert_close
from harness.openai_client import PLAINLY, TOOL, told_by_chat
from harness.prompts import STORY, encode, load_prompts
from harness.reference import Reference, assert_same, plain_reference
from harness.rounds import RoundCounter
from harness.server import SCHEDULES, Server, ServerPool
from servers import free_port

LEASE_S = 2.0
PARSERS = ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
PENALISED = {"frequency_penalty": 0.5, "presence_penalty": 0.3, "min_new_tokens": 70}


@pytest.fixture(scope="module", params=SCHEDULES.values(), ids=SCHEDULES)
def server(request: pytest.FixtureRequest, pool: ServerPool, spec_for: Any) -> Server:
    settings = (("lease_s", LEASE_S), *request.param)
    return pool.get(spec_for("noisy", flags=PARSERS, settings=settings))


@pytest.fixture(scope="module")
def noisy(target: Path, reference_pool: ServerPool) -> Reference:
    """A server without speculation that was started with other weights."""
    return plain_reference(reference_pool, make_drafter("noisy", target))


@pytest.fixture(scope="module")
def plain_parser(target: Path, reference_pool: ServerPool) -> Reference:
    return plain_reference(reference_pool, target, PARSERS)


def post(server: Server, path: str, body: Any = None, *, ok: bool = True) -> http.Response:
    answer = http.post(f"{server.url}{path}", json=body if body is not None else {}, timeout=120)
    assert answer.ok is ok, f"{path}: {answer.status_code} {answer.text[:500]}"
    return answer


def cases_of(server: Server, num: int, num_tokens: int = 24, **params: Any) -> list[Request]:
    prompts = load_prompts(server.spec.model, num)
    full = {"max_new_tokens": num_tokens, "ignore_eos": True, **params}
    return [Request(prompt.input_ids, full) for prompt in prompts]


def plainly(case: Request) -> Request:
    return msgspec.structs.replace(case, params={**case.params, **PLAINLY})


def ask_as_plain(server: Server, plain: Reference, cases: list[Request]) -> list[Answer]:
    answers = generate_all(server.url, cases)
    assert_as_plain(server, plain, cases, answers)
    return answers


def assert_as_plain(
    server: Server, plain: Reference, cases: list[Request], answers: list[Answer]
) -> None:
    """Equal to those of a server without speculation, and of plain decode on the same server."""
    assert_same(plain, cases, answers)
    for case, answer in zip(cases, answers, strict=True):
        want = generate(server.url, plainly(case))
        assert want.num_correct_drafts == 0
        assert answer.same_as(want), case


def assert_speculates(server: Server, reference: Reference) -> None:
    before = server.ssd()
    answers = ask_as_plain(server, reference, cases_of(server, 2))
    assert sum(answer.num_correct_drafts for answer in answers) > 0
    assert server.ssd()["hits"] > before["hits"]


def test_flush_cache(server: Server, reference: Reference) -> None:
    """Red when a flush leaves sequences with the drafter, or one under way is disturbed."""
    (case,) = cases_of(server, 1, 80)
    future = in_background(server.url, case)
    http.post(f"{server.url}/flush_cache", timeout=60)  # refused while a request runs
    assert_as_plain(server, reference, [case], [future.result().answer])
    assert_drained(server)
    post(server, "/flush_cache")
    assert_speculates(server, reference)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(server: Server, reference: Reference, mode: str) -> None:
    """Red when a request does not survive a pause longer than the drafter's lease, or goes on with
    other counts than those of its output."""
    cases = [*cases_of(server, 1, 80), *cases_of(server, 1, 80, **PENALISED)]
    futures = [in_background(server.url, case) for case in cases]
    post(server, "/pause_generation", {"mode": mode})
    time.sleep(2 * LEASE_S)
    if mode == "retract":
        post(server, "/flush_cache")
    assert not any(future.done() for future in futures)
    post(server, "/continue_generation")
    answers = [future.result().answer for future in futures]
    assert_as_plain(server, reference, cases, answers)
    assert all(answer.num_correct_drafts > 0 for answer in answers)
    assert_speculates(server, reference)


def test_pause_that_aborts(server: Server, reference: Reference) -> None:
    """Red when an aborting pause leaves a sequence with the drafter."""
    (case,) = cases_of(server, 1, 400)
    future = in_background(server.url, case)
    post(server, "/pause_generation", {"mode": "abort"})
    assert future.result().answer.finish["type"] == "abort"
    post(server, "/continue_generation")
    assert_drained(server)
    assert_speculates(server, reference)


def test_abort_all(server: Server, reference: Reference) -> None:
    """Red when abort_all leaves a request running or a sequence open."""
    cases = cases_of(server, 6, 800)
    futures = [in_background(server.url, case) for case in cases]
    post(server, "/abort_request", {"abort_all": True})
    assert {future.result().answer.finish["type"] for future in futures} == {"abort"}
    assert_drained(server)
    assert_speculates(server, reference)


def update_from_disk(server: Server, path: Path | str, **fields: Any) -> None:
    body = {"model_path": str(path), **fields}
    answer = post(server, "/update_weights_from_disk", body).json()
    assert answer["success"], answer


def assert_takes_weights(
    server: Server, reference: Reference, noisy: Reference, update: Callable[[str], None]
) -> None:
    """What a server says is what one says that was started with its weights; then with its own."""
    cases = cases_of(server, 2)
    old = ask_as_plain(server, reference, cases)
    update(noisy.spec.model)
    try:
        new = ask_as_plain(server, noisy, cases)
        assert [a.output_ids for a in new] != [a.output_ids for a in old]
        assert any(a.num_correct_drafts for a in new), "the drafter has these weights too"
    finally:
        update(reference.spec.model)
    ask_as_plain(server, reference, cases)


def test_weights_from_disk(server: Server, reference: Reference, noisy: Reference) -> None:
    """Red when new weights meet an old verify: copies of weights, a cache that is not flushed."""
    assert_takes_weights(server, reference, noisy, partial(update_from_disk, server))


def test_the_same_weights_under_a_held_request(server: Server, reference: Reference) -> None:
    """Red when a request that keeps its KV over an update of weights loses its place, or its
    drafts."""
    (case,) = cases_of(server, 1, 120)
    future = in_background(server.url, case)
    post(server, "/pause_generation", {"mode": "in_place"})
    update_from_disk(server, reference.spec.model, flush_cache=False)
    assert not future.done()
    counter = RoundCounter(server)
    post(server, "/continue_generation")
    answer = future.result().answer
    assert counter.since().correct_drafts > 0
    assert_as_plain(server, reference, [case], [answer])
    assert_speculates(server, reference)


def test_new_weights_under_a_retracted_request(
    server: Server, reference: Reference, noisy: Reference
) -> None:
    """Red when what a request said before an update is lost, or what it says afterwards is not what
    the new weights say of all that; also when the drafts stay away."""
    num_tokens = 120
    (case,) = cases_of(server, 1, num_tokens)
    (old,) = reference.answers([case])
    seen: list[int] = []
    future = in_background(server.url, case, seen)
    post(server, "/pause_generation", {"mode": "retract"})
    try:
        update_from_disk(server, noisy.spec.model)  # flushes what the old ones made
        time.sleep(1)
        num_chunks = len(seen)
        counter = RoundCounter(server)
        post(server, "/continue_generation")
        streamed = future.result()
        said, num_said = streamed.answer.output_ids, streamed.counts[num_chunks - 1]
        assert 0 < num_said < num_tokens == len(said)
        assert said[:num_said] == old.output_ids[:num_said]
        rest = {"max_new_tokens": num_tokens - num_said, "ignore_eos": True}
        behind = Request((*map(int, case.prompt), *said[:num_said]), rest)
        for new in (*noisy.answers([behind]), generate(server.url, plainly(behind))):
            assert said[num_said:] == new.output_ids
        assert counter.since().correct_drafts > 0
    finally:
        post(server, "/continue_generation")
        update_from_disk(server, reference.spec.model)
    assert_speculates(server, reference)


SEND_PROGRAM = """
import sys, requests, torch
how, url, checkpoint, port = sys.argv[1:]
from safetensors.torch import load_file
weights = {name: weight.clone() for name, weight in load_file(checkpoint).items()}

def post(path, **body):
    answer = requests.post(url + path, json=body, timeout=120)
    assert answer.ok, (path, answer.text)

if how == "tensor":
    import torch.multiprocessing
    torch.multiprocessing.set_sharing_strategy("file_system")
    from sglang.srt.utils import MultiprocessingSerializer
    post("/begin_weight_update")
    data = MultiprocessingSerializer.serialize(list(weights.items()), output_str=True)
    post("/update_weights_from_tensor", serialized_named_tensors=[data])
    post("/end_weight_update")
else:
    from concurrent.futures import ThreadPoolExecutor
    from sglang.srt.utils import init_custom_process_group
    threads = ThreadPoolExecutor(1)
    joined = threads.submit(post, "/init_weights_update_group", master_address="127.0.0.1",
        master_port=int(port), rank_offset=1, world_size=2, group_name="test", backend="gloo")
    group = init_custom_process_group(backend="gloo", init_method="tcp://127.0.0.1:" + port,
        world_size=2, rank=0, group_name="test")
    joined.result()
    post("/begin_weight_update")
    sent = threads.submit(post, "/update_weights_from_distributed", names=list(weights),
        dtypes=[str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        shapes=[list(weight.shape) for weight in weights.values()], group_name="test")
    for weight in weights.values():
        torch.distributed.broadcast(weight, src=0, group=group)
    sent.result()
    post("/end_weight_update")
    post("/destroy_weights_update_group", group_name="test")
"""


@pytest.mark.parametrize("how", ["tensor", "distributed"])
def test_weights_from_a_trainer(
    server: Server, reference: Reference, noisy: Reference, how: str
) -> None:
    """Red when the calls that a trainer makes fail for a server without a draft worker, or leave
    a weight as it was."""
    assert_takes_weights(server, reference, noisy, partial(send_weights, server, how))
    assert post(server, "/weights_checker", {"action": "checksum"}).json()["success"]


def send_weights(server: Server, how: str, checkpoint: str) -> None:
    """All weights of a checkpoint, from another process."""
    weights = Path(checkpoint) / "model.safetensors"
    argv = [sys.executable, "-c", SEND_PROGRAM, how, server.url, str(weights), str(free_port())]
    with tempfile.TemporaryFile("w+") as log:
        # No pipe: torch's manager of shared memory outlives its program and would hold it open.
        run = subprocess.run(argv, stdout=log, stderr=log, timeout=300, check=False)
        log.seek(0)
        assert run.returncode == 0, log.read()[-2000:]


@pytest.mark.parametrize(
    "tags",
    [["kv_cache"], ["weights"], ["weights", "kv_cache"], None],
    ids=["kv-cache", "weights", "both", "default"],
)
def test_memory_is_released_and_resumed(
    server: Server, reference: Reference, tags: list[str] | None
) -> None:
    """Red when the drafter keeps sequences of a cache that is gone, or a server that cannot give
    memory back, as none on a CPU can, answers other than SGLang's own: it goes on."""
    (case,) = cases_of(server, 1)
    before = generate(server.url, plainly(case))
    assert_drained(server)
    body = {} if tags is None else {"tags": tags}
    post(server, "/release_memory_occupation", body)
    post(server, "/resume_memory_occupation", body)
    assert generate(server.url, plainly(case)).same_as(before)
    assert_speculates(server, reference)


def test_sessions(server: Server, reference: Reference) -> None:
    """Red when a turn of a session is not drafted for, or its context is not what was said."""
    prompts = [list(p.input_ids[:40]) for p in load_prompts(server.spec.model, 3)]
    said = []
    plain = reference.server
    for one, extra in ((server, {}), (server, PLAINLY), (plain, {})):
        session = post(one, "/open_session", {"capacity_of_str_len": 4000}).json()
        rid = None
        turns = []
        for prompt in prompts:
            body = {
                "input_ids": prompt,
                "session_params": {"id": session, "rid": rid},
                "sampling_params": {"temperature": 0, "max_new_tokens": 24, **extra},
            }
            answer = post(one, "/generate", body).json()
            rid = answer["meta_info"]["id"]
            turns.append((answer["text"], answer["meta_info"]["prompt_tokens"]))
        said.append(turns)
        post(one, "/close_session", {"session_id": session})
    assert said[0] == said[1] == said[2]
    assert said[0][2][1] > 80
    assert_drained(server)


def test_score(server: Server, reference: Reference) -> None:
    """Red when /v1/score opens a sequence or has the drafter read anything, or gives other scores
    than a plain server."""
    body = {
        "model": "any",
        "query": "The capital of France is",
        "items": [" Paris", " Rome", " a banana"],
        "label_token_ids": [260, 28, 30],
        "apply_softmax": True,
    }
    assert_drained(server)
    before, read = server.ssd()["rounds"], drafter_status(server).prefill_tokens
    mine = post(server, "/v1/score", body).json()["scores"]
    plain = post(reference.server, "/v1/score", body).json()["scores"]
    for have, want in zip(mine, plain, strict=True):
        assert have == pytest.approx(want, abs=1e-4)
    assert server.ssd()["rounds"] == before
    assert server.ssd()["live_sequences"] == 0
    assert drafter_status(server).prefill_tokens == read


ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "max_tokens": 96,
}


def chat(server: Server, *, streamed: bool, **body: Any) -> tuple[str, str, str]:
    """Content, reasoning and tool arguments, joined."""
    full = {**ASKED, **body}
    if streamed:
        chunks = openai_stream(server.url, "chat/completions", full)
        parts = [chunk["delta"] for chunk in chunks]
    else:
        parts = [openai(server.url, "chat/completions", full)["choices"][0]["message"]]
    joined = ["", "", ""]
    for part in parts:
        joined[0] += part.get("content") or ""
        joined[1] += part.get("reasoning_content") or ""
        for call in part.get("tool_calls") or ():
            joined[2] += (call["function"].get("name") or "") + call["function"]["arguments"]
    return joined[0], joined[1], joined[2]


WORDS = "( [a-z]{1,7}){3}"
THOUGHT_END = "</think>"
THOUGHT = f"<think>{WORDS}{THOUGHT_END}"
CALL = (
    r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "[A-Z][a-z]{1,9}"\}\}'
    r"\n</tool_call>"
)
FROM_THE_START = {"chat_template_kwargs": {"enable_thinking": False}}
"""A grammar begins behind the thought, unless none is expected; the parser knows a thought by its
marks all the same."""


@pytest.mark.parametrize(
    ("body", "filled"),
    [
        ({"tools": [TOOL], "tool_choice": "required", **FROM_THE_START}, ("arguments",)),
        ({"tools": [TOOL], "tool_choice": "auto", "regex": CALL}, ("arguments",)),
        (
            {"tools": [TOOL], "tool_choice": "auto", "regex": THOUGHT + CALL},
            ("reasoning", "arguments"),
        ),
        ({"separate_reasoning": True, "regex": THOUGHT + WORDS}, ("content", "reasoning")),
        ({"separate_reasoning": False, "regex": THOUGHT + WORDS}, ("content",)),
    ],
    ids=["required-tool", "auto-tool", "reasoned-tool", "reasoning", "no-reasoning"],
)
def test_parsers(
    server: Server, plain_parser: Reference, body: dict[str, Any], filled: tuple[str, ...]
) -> None:
    """Red when several tokens at once break a tool call or the split of reasoning.

    A parser may say other things of a stream than of the whole, so like is compared with like.
    """
    constrained = FROM_THE_START if "regex" in body else {}
    before = server.ssd()["hits"]
    for streamed in (False, True):
        asked = {"streamed": streamed, **body, **constrained}
        want = chat(plain_parser.server, **asked)
        assert chat(server, **asked) == want
        assert chat(server, **asked, **PLAINLY) == want
        parts = dict(zip(("content", "reasoning", "arguments"), want, strict=True))
        assert all(parts[name].strip() for name in filled), parts
        if "arguments" in filled:
            call = 'get_weather{"city": "' if "regex" in body else "get_weather"
            assert parts["arguments"].startswith(call)
        if body.get("separate_reasoning") is False:
            assert THOUGHT_END in parts["content"]
    assert server.ssd()["hits"] > before


STRICT_TOOL = {**TOOL, "function": {**TOOL["function"], "strict": True}}
"""Without strict, SGLang's grammar lets the model add arguments that are a mere string."""
CLIENT_CALLS: dict[str, dict[str, Any]] = {
    "required": {
        "tools": [STRICT_TOOL],
        "tool_choice": "required",
        "extra_body": FROM_THE_START,
    },
    "named": {
        "tools": [STRICT_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "extra_body": FROM_THE_START,
    },
    "auto": {"extra_body": {"regex": CALL, **FROM_THE_START}},
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CLIENT_CALLS)
def test_calls_that_the_openai_client_reads(server: Server, name: str, streamed: bool) -> None:
    """Red when the tool calls in the client's answers, or put together from its pieces, are not
    those of plain decode, or none, or their requests have no drafts."""
    options = {**ASKED, "tools": [TOOL], **CLIENT_CALLS[name]}
    counter = RoundCounter(server)
    have = told_by_chat(server, streamed=streamed, **options)
    assert counter.since().drafted_rows > 0
    plainly = {**options.get("extra_body", {}), **PLAINLY}
    assert have == told_by_chat(server, streamed=streamed, **{**options, "extra_body": plainly})
    if streamed:
        call = have["choices"]["0"]["calls"]["0"]
    else:
        call = have["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "get_weather"
    assert call["arguments"].startswith("{")


def test_score_with_embeddings(server: Server, reference: Reference) -> None:
    """Red when embeddings that a client puts in place of ids are scored unlike on a plain server,
    or unlike the ids whose embeddings they are, or are mirrored as the ids that stand in for them,
    or those of another width reach the scheduler, which they end."""
    query, (placeholder,) = encode(server.spec.model, STORY), encode(server.spec.model, "@")
    items = [encode(server.spec.model, text) for text in (" Paris", " Rome")]
    body = {"query": query, "label_token_ids": [260, 28, 30], "apply_softmax": True}
    rows = [embedding_rows(server.spec.model, ids) for ids in items]
    placed = {
        "items": [[placeholder] * len(ids) for ids in items],
        "embed_override_token_id": placeholder,
        "item_embed_overrides": rows,
    }
    assert_drained(server)
    before, read = server.ssd()["rounds"], drafter_status(server).prefill_tokens
    asked = ((server, placed), (reference.server, placed), (server, {"items": items}))
    mine, *others = (
        post(one, "/v1/score", {**body, **fields}).json()["scores"] for one, fields in asked
    )
    for scores in others:
        assert_close(scores, mine, "scores")
    narrow = {
        **placed,
        "items": placed["items"][:1],
        "item_embed_overrides": [[row[:3] for row in rows[0]]],
    }
    refused = post(server, "/v1/score", {**body, **narrow}, ok=False)
    assert refused.status_code == 400
    assert refused.json()["message"] == (
        f"positional_embed_overrides of shape [{len(rows[0])}, 3]: "
        f"must be a tensor [number, {len(rows[0][0])}]"
    )
    assert server.ssd()["rounds"] == before
    assert drafter_status(server).prefill_tokens == read
    assert_drained(server)
