"""What operators and clients do to a running server beside generating.

The reference is the server itself without speculation: the same request with
custom_params={"ssd": false} decodes plainly. One server serves all tests of this file.
"""

from __future__ import annotations

import subprocess
import sys
import time
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
from harness.idle import assert_drained, drafter_status
from harness.prompts import load_prompts
from harness.reference import Reference
from harness.rounds import RoundCounter
from harness.server import Server, ServerPool
from servers import free_port

OPT_OUT = {"custom_params": {"ssd": False}}
LEASE_S = 2.0
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def server(pool: ServerPool, spec_for: Any) -> Server:
    flags = ("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3")
    return pool.get(spec_for("noisy", flags=flags, settings=(("lease_s", LEASE_S),)))


def post(server: Server, path: str, body: Any = None, *, ok: bool = True) -> http.Response:
    answer = http.post(f"{server.url}{path}", json=body if body is not None else {}, timeout=120)
    assert answer.ok is ok, f"{path}: {answer.status_code} {answer.text[:500]}"
    return answer


def cases_of(server: Server, num: int, num_tokens: int = 24, **params: Any) -> list[Request]:
    prompts = load_prompts(server.spec.model, num)
    full = {"max_new_tokens": num_tokens, "ignore_eos": True, **params}
    return [Request(prompt.input_ids, full) for prompt in prompts]


def plainly(case: Request) -> Request:
    return msgspec.structs.replace(case, params={**case.params, **OPT_OUT})


def assert_as_plain(server: Server, cases: list[Request]) -> list[Answer]:
    """Speculating answers, equal to those of plain decode on the same server."""
    answers = generate_all(server.url, cases)
    for case, answer in zip(cases, answers, strict=True):
        want = generate(server.url, plainly(case))
        assert want.num_correct_drafts == 0
        assert answer.same_as(want), case
    return answers


def assert_speculates(server: Server) -> None:
    before = server.ssd()
    answers = assert_as_plain(server, cases_of(server, 2))
    assert sum(answer.num_correct_drafts for answer in answers) > 0
    assert server.ssd()["hits"] > before["hits"]


def test_flush_cache(server: Server) -> None:
    """Red when a flush leaves sequences with the drafter, or one under way is disturbed."""
    (case,) = cases_of(server, 1, 80)
    future = in_background(server.url, case)
    http.post(f"{server.url}/flush_cache", timeout=60)  # refused while a request runs
    assert future.result().answer.same_as(generate(server.url, plainly(case)))
    assert_drained(server)
    post(server, "/flush_cache")
    assert_speculates(server)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(server: Server, mode: str) -> None:
    """Red when a request does not survive a pause longer than the drafter's lease."""
    (case,) = cases_of(server, 1, 60)
    future = in_background(server.url, case)
    post(server, "/pause_generation", {"mode": mode})
    time.sleep(2 * LEASE_S)
    if mode == "retract":
        post(server, "/flush_cache")
    assert not future.done()
    post(server, "/continue_generation")
    answer = future.result().answer
    assert answer.same_as(generate(server.url, plainly(case)))
    assert answer.num_correct_drafts > 0
    assert_speculates(server)


def test_pause_that_aborts(server: Server) -> None:
    """Red when an aborting pause leaves a sequence with the drafter."""
    (case,) = cases_of(server, 1, 400)
    future = in_background(server.url, case)
    post(server, "/pause_generation", {"mode": "abort"})
    assert future.result().answer.finish["type"] == "abort"
    post(server, "/continue_generation")
    assert_drained(server)
    assert_speculates(server)


def test_abort_all(server: Server) -> None:
    """Red when abort_all leaves a request running or a sequence open."""
    cases = cases_of(server, 6, 800)
    futures = [in_background(server.url, case) for case in cases]
    post(server, "/abort_request", {"abort_all": True})
    assert {future.result().answer.finish["type"] for future in futures} == {"abort"}
    assert_drained(server)
    assert_speculates(server)


def update_from_disk(server: Server, path: Path | str, **fields: Any) -> None:
    body = {"model_path": str(path), **fields}
    answer = post(server, "/update_weights_from_disk", body).json()
    assert answer["success"], answer


def test_weights_from_disk(server: Server, target: Path) -> None:
    """Red when new weights meet an old verify: copies of weights, a cache that is not flushed."""
    cases = cases_of(server, 2)
    old = assert_as_plain(server, cases)
    update_from_disk(server, make_drafter("noisy", target))
    new = assert_as_plain(server, cases)
    assert [a.output_ids for a in new] != [a.output_ids for a in old]
    assert any(a.num_correct_drafts for a in new), "the drafter has these weights too"
    update_from_disk(server, target)
    again = assert_as_plain(server, cases)
    assert [a.output_ids for a in again] == [a.output_ids for a in old]


def test_the_same_weights_under_a_held_request(server: Server, target: Path) -> None:
    """Red when a request that keeps its KV over an update of weights loses its place, or its
    drafts."""
    (case,) = cases_of(server, 1, 120)
    future = in_background(server.url, case)
    post(server, "/pause_generation", {"mode": "in_place"})
    update_from_disk(server, target, flush_cache=False)
    assert not future.done()
    counter = RoundCounter(server)
    post(server, "/continue_generation")
    answer = future.result().answer
    assert counter.since().correct_drafts > 0
    assert answer.same_as(generate(server.url, plainly(case)))
    assert_speculates(server)


def test_new_weights_under_a_retracted_request(server: Server, target: Path) -> None:
    """Red when what a request said before an update is lost, or what it says afterwards is not what
    the new weights say of all that; also when the drafts stay away."""
    num_tokens = 120
    (case,) = cases_of(server, 1, num_tokens)
    old = generate(server.url, plainly(case))
    seen: list[int] = []
    future = in_background(server.url, case, seen)
    post(server, "/pause_generation", {"mode": "retract"})
    try:
        update_from_disk(server, make_drafter("noisy", target))  # flushes what the old ones made
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
        assert said[num_said:] == generate(server.url, plainly(behind)).output_ids
        assert counter.since().correct_drafts > 0
    finally:
        post(server, "/continue_generation")
        update_from_disk(server, target)
    assert_speculates(server)


SEND_PROGRAM = """
import sys, requests, torch
how, url, weights, scale, port = sys.argv[1:]
from safetensors.torch import load_file
name = "model.norm.weight"
weight = load_file(weights)[name].float() * float(scale)

def post(path, **body):
    answer = requests.post(url + path, json=body, timeout=120)
    assert answer.ok, (path, answer.text)

if how == "tensor":
    import torch.multiprocessing
    torch.multiprocessing.set_sharing_strategy("file_system")
    from sglang.srt.utils import MultiprocessingSerializer
    post("/begin_weight_update")
    data = MultiprocessingSerializer.serialize([(name, weight)], output_str=True)
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
    sent = threads.submit(post, "/update_weights_from_distributed", names=[name],
        dtypes=["float32"], shapes=[list(weight.shape)], group_name="test")
    torch.distributed.broadcast(weight, src=0, group=group)
    sent.result()
    post("/end_weight_update")
    post("/destroy_weights_update_group", group_name="test")
"""


@pytest.mark.parametrize("how", ["tensor", "distributed"])
def test_weights_from_a_trainer(server: Server, target: Path, how: str) -> None:
    """Red when the calls that a trainer makes fail for a server without a draft worker."""
    cases = cases_of(server, 2)
    old = assert_as_plain(server, cases)
    for scale in ("0.5", "1"):
        run = subprocess.run(
            [
                *(sys.executable, "-c", SEND_PROGRAM, how, server.url),
                *(str(target / "model.safetensors"), scale, str(free_port())),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-2000:]
        answers = assert_as_plain(server, cases)
    assert [a.output_ids for a in answers] == [a.output_ids for a in old]
    assert post(server, "/weights_checker", {"action": "checksum"}).json()["success"]


@pytest.mark.parametrize(
    "tags",
    [["kv_cache"], ["weights"], ["weights", "kv_cache"], None],
    ids=["kv-cache", "weights", "both", "default"],
)
def test_memory_is_released_and_resumed(server: Server, tags: list[str] | None) -> None:
    """Red when the drafter keeps sequences of a cache that is gone, or a server that cannot give
    memory back, as none on a CPU can, answers other than SGLang's own: it goes on."""
    (case,) = cases_of(server, 1)
    before = generate(server.url, plainly(case))
    assert_drained(server)
    body = {} if tags is None else {"tags": tags}
    post(server, "/release_memory_occupation", body)
    post(server, "/resume_memory_occupation", body)
    assert generate(server.url, plainly(case)).same_as(before)
    assert_speculates(server)


def test_sessions(server: Server) -> None:
    """Red when a turn of a session is not drafted for, or its context is not what was said."""
    prompts = [list(p.input_ids[:40]) for p in load_prompts(server.spec.model, 3)]
    said = []
    for extra in ({}, OPT_OUT):
        session = post(server, "/open_session", {"capacity_of_str_len": 4000}).json()
        rid = None
        turns = []
        for prompt in prompts:
            body = {
                "input_ids": prompt,
                "session_params": {"id": session, "rid": rid},
                "sampling_params": {"temperature": 0, "max_new_tokens": 24, **extra},
            }
            answer = post(server, "/generate", body).json()
            rid = answer["meta_info"]["id"]
            turns.append((answer["text"], answer["meta_info"]["prompt_tokens"]))
        said.append(turns)
        post(server, "/close_session", {"session_id": session})
    assert said[0] == said[1]
    assert said[0][2][1] > 80
    assert_drained(server)


def chat(server: Server, *, streamed: bool, **body: Any) -> tuple[str, str, str]:
    """Content, reasoning and tool arguments, joined."""
    question = {"role": "user", "content": "What is the weather in Paris?"}
    full = {"max_tokens": 96, "messages": [question], **body}
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
        ({"tools": [TOOL], "tool_choice": "required"}, ("arguments",)),
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
def test_parsers(server: Server, body: dict[str, Any], filled: tuple[str, ...]) -> None:
    """Red when several tokens at once break a tool call or the split of reasoning.

    A parser may say other things of a stream than of the whole, so like is compared with like.
    """
    constrained = FROM_THE_START if "regex" in body else {}
    before = server.ssd()["hits"]
    for streamed in (False, True):
        want = chat(server, streamed=streamed, **body, **constrained, **OPT_OUT)
        assert chat(server, streamed=streamed, **body, **constrained) == want
        parts = dict(zip(("content", "reasoning", "arguments"), want, strict=True))
        assert all(parts[name].strip() for name in filled), parts
        if "arguments" in filled:
            call = 'get_weather{"city": "' if "regex" in body else "get_weather"
            assert parts["arguments"].startswith(call)
        if body.get("separate_reasoning") is False:
            assert THOUGHT_END in parts["content"]
    assert server.ssd()["hits"] > before


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
