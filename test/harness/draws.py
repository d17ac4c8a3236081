"""Seeded requests, and whether two servers drew the same tokens for them.

A difference counts as rounding by the rule for greedy output, with noise added to the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from harness.client import Answer, Request, generate
from harness.prompts import cycle_prompts
from harness.reference import MAX_ROUNDING_GAP, PROMPTS_PER_ROUNDING, Reference
from harness.server import Server
from sglang_ssd.core.shared_noise import gumbel_noise

FILTERS: dict[str, dict[str, Any]] = {
    "top-k": {"temperature": 1.0, "top_k": 8},
    "top-p-min-p": {"temperature": 1.3, "top_p": 0.9, "min_p": 0.02},
}
NUM_TOKENS = 16


def seeded(model: str, num_seeds: int, params: dict[str, Any]) -> list[Request]:
    return [
        Request(
            prompt.input_ids,
            {"max_new_tokens": NUM_TOKENS, "sampling_seed": 1000 + seed, **params},
        )
        for seed, prompt in enumerate(cycle_prompts(model, num_seeds))
    ]


def without_drafts(cases: Sequence[Request]) -> list[Request]:
    """The same, asked of a server with SSD so that it decodes them plainly."""
    return [
        msgspec.structs.replace(case, params={**case.params, "custom_params": {"ssd": False}})
        for case in cases
    ]


def assert_same_draws(
    drafts_off: Reference, cases: Sequence[Request], got: Sequence[Answer]
) -> int:
    """Assert equality with the server that has no drafter; returns how many differ by rounding."""
    expected = drafts_off.answers(cases)
    different = [
        (case, want, have)
        for case, want, have in zip(cases, expected, got, strict=True)
        if (want.output_ids, want.text) != (have.output_ids, have.text)
    ]
    for case, want, have in different:
        gap = draw_gap(drafts_off.server, case, want, have)
        assert gap <= MAX_ROUNDING_GAP, f"{case} differs by {gap}: {want} {have}"
    assert len(different) <= len(cases) // PROMPTS_PER_ROUNDING, f"too many: {different}"
    return len(different)


def draw_gap(server: Server, case: Request, want: Answer, have: Answer) -> float:
    """Between the scores of the first tokens that differ; inf if one answer is cut short."""
    pairs = list(zip(want.output_ids, have.output_ids, strict=False))
    position = next(i for i, (a, b) in enumerate([*pairs, (-1, -2)]) if a != b)
    if position == len(pairs):
        return float("inf")
    return perturbed_gap(
        server,
        prefix=[*case.prompt, *want.output_ids[:position]],  # type: ignore[list-item]
        seed=case.params["sampling_seed"],
        temperature=case.params["temperature"],
        tokens=pairs[position],
    )


def perturbed_gap(
    server: Server, *, prefix: Sequence[int], seed: int, temperature: float, tokens: tuple[int, int]
) -> float:
    """|score(a) - score(b)| of two candidates for the token after prefix, score = log p + noise.

    The server says it of a prefill, with the unfiltered distribution at temperature 1.
    """
    request = Request(
        prompt=tuple(prefix),
        params={"max_new_tokens": 1},
        options={"return_logprob": True, "token_ids_logprob": list(tokens)},
    )
    meta = generate(server.url, request).meta_info
    values = {token: logprob for logprob, token, *_ in meta["output_token_ids_logprobs"][0]}
    logprobs = torch.tensor([values[token] for token in tokens], dtype=torch.float64)
    noise = gumbel_noise(
        torch.tensor([seed]), torch.tensor([len(prefix) - 1]), torch.tensor([list(tokens)])
    )[0]
    scores = logprobs / temperature + noise
    return float((scores[0] - scores[1]).abs())
