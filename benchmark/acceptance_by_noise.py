r"""Acceptance and hit rate with and without shared noise, on the target's own samples.

    python benchmark/acceptance_by_noise.py --target HuggingFaceTB/SmolLM2-135M-Instruct \
        --draft-noise 0.1
    python benchmark/acceptance_by_noise.py --target Qwen/Qwen2.5-Coder-1.5B-Instruct \
        --draft Qwen/Qwen2.5-Coder-0.5B-Instruct --dtype bfloat16

The target answers prompts; at every position of its answers both models' logits are recorded. Then,
on the same positions:
standard: draft d ~ q accepted with min(1, p(d) / q(d)), bonus from norm(max(p - q, 0)) after a
rejection and from p after all accepted, guesses by q. Exact expectations.
shared noise: target and drafter choose by argmax of log p + g and log q + g with the same noise g,
guesses by log q + g: the repository's own functions, over --draws seeds.
The draft is another model, or the target with noise on its weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from prompts import add_prompt_flags, chat_tokens, load_prompts
from report import add_out_flag, finish, print_table
from sglang_ssd.core.shared_noise import coupled_sample, rank_candidates
from sglang_ssd.wire.messages import DraftRule


class Positions(msgspec.Struct, frozen=True):
    """What was recorded at one temperature."""

    target_logits: torch.Tensor  # [R, V] float32
    draft_logits: torch.Tensor  # [R, V] float32
    positions: list[int]  # [R] of the last context token


class Answer(msgspec.Struct, frozen=True):
    tokens: list[int]  # prompt and answer
    logits: torch.Tensor  # [answer, V] float32, what each token of the answer was chosen from


class Rates(msgspec.Struct, frozen=True):
    """Shares over all positions; hit rates by fan-out."""

    temperature: float
    method: str
    acceptance: float
    hit_after_rejection: dict[int, float]
    hit_after_all_accepted: dict[int, float]
    num_positions: int


def load_model(path: str, dtype: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.eval()


def add_weight_noise(model: Any, scale: float, seed: int) -> None:
    """Gaussian noise of `scale` standard deviations of each weight matrix."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            noise = torch.randn(parameter.shape, generator=generator) * parameter.float().std()
            parameter.data += (noise * scale).to(parameter.dtype)


@torch.inference_mode()
def record(
    target: Any,
    draft: Any,
    prompts: Sequence[list[int]],
    *,
    temperature: float,
    num_tokens: int,
    seed: int,
) -> Positions:
    """The target's own answers, sampled with shared noise, and both models' logits along them."""
    answers = sample_answers(
        target, prompts, temperature=temperature, num_tokens=num_tokens, seed=seed
    )
    draft_rows: list[torch.Tensor] = []
    positions: list[int] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        start, end = len(prompt) - 1, len(answer.tokens) - 1
        draft_logits = draft(input_ids=torch.tensor([answer.tokens[:-1]])).logits[0, start:end]
        draft_rows.append(draft_logits.float())
        positions += range(start, end)
    target_logits = torch.cat([answer.logits for answer in answers])
    draft_logits = torch.cat(draft_rows)
    vocab_size = min(target_logits.shape[1], draft_logits.shape[1])  # tails may be padded
    return Positions(
        target_logits=target_logits[:, :vocab_size],
        draft_logits=draft_logits[:, :vocab_size],
        positions=positions,
    )


def sample_answers(
    target: Any,
    prompts: Sequence[list[int]],
    *,
    temperature: float,
    num_tokens: int,
    seed: int,
) -> list[Answer]:
    """One answer a prompt, all in one left-padded batch; prompt i has the seed `seed` + i."""
    longest = max(map(len, prompts))
    fed = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    places = (mask.cumsum(dim=1) - 1).clamp(min=0)
    tokens = [list(prompt) for prompt in prompts]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    ends = _end_tokens(target)
    cache = None
    for _ in tqdm(range(num_tokens), desc=f"T={temperature:g}: the target answers", leave=False):
        output = target(
            input_ids=fed,
            attention_mask=mask,
            position_ids=places,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        for index, logits in enumerate(output.logits[:, -1].float()):
            if rows[index] and tokens[index][-1] in ends:
                continue
            rows[index].append(logits)
            position = len(tokens[index]) - 1
            tokens[index].append(
                choose(logits[None], temperature, seed=seed + index, position=position)
            )
        fed = torch.tensor([[answer[-1]] for answer in tokens])
        mask = torch.cat([mask, torch.ones_like(fed)], dim=1)
        places = places[:, -1:] + 1
    return [Answer(answer, torch.stack(row)) for answer, row in zip(tokens, rows, strict=True)]


def _end_tokens(target: Any) -> set[int]:
    ends = target.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends])


def choose(logits: torch.Tensor, temperature: float, *, seed: int, position: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    seeds, positions = torch.tensor([seed]), torch.tensor([position])
    return int(coupled_sample(logprobs, seeds=seeds, positions=positions))


def standard_rates(recorded: Positions, temperature: float, fan_outs: Sequence[int]) -> Rates:
    """Ratio test with independent noise, in expectation over all draws."""
    accepted = torch.zeros((), dtype=torch.float64)
    after_rejection = torch.zeros(len(fan_outs), dtype=torch.float64)
    after_accepted = torch.zeros(len(fan_outs), dtype=torch.float64)
    rows = zip(recorded.target_logits, recorded.draft_logits, strict=True)
    for target_logits, draft_logits in rows:
        p = torch.softmax(target_logits.double() / temperature, dim=-1)
        q = torch.softmax(draft_logits.double() / temperature, dim=-1)
        accepted += torch.minimum(p, q).sum()
        best = q.topk(max(fan_outs) + 1).indices
        after_rejection += hits_after_rejection(p, q, best)[torch.tensor(fan_outs) - 1]
        after_accepted += p[best].cumsum(0)[torch.tensor(fan_outs) - 1]
    num_positions = len(recorded.positions)
    num_rejected = num_positions - float(accepted)
    return Rates(
        temperature=temperature,
        method="standard",
        acceptance=float(accepted) / num_positions,
        hit_after_rejection=_by_fan_out(fan_outs, after_rejection / max(num_rejected, 1e-12)),
        hit_after_all_accepted=_by_fan_out(fan_outs, after_accepted / num_positions),
        num_positions=num_positions,
    )


def hits_after_rejection(
    p: torch.Tensor,  # [V]
    q: torch.Tensor,  # [V]
    best: torch.Tensor,  # [F + 1] tokens, best q first
) -> torch.Tensor:  # [F]
    """P(draft rejected, bonus among the f best tokens without the draft) for f = 1 .. F.

    Draft d is rejected with probability max(q - p, 0)[d]; the bonus then has law max(p - q, 0) / Z
    with Z = 1 - sum(min(p, q)), whatever d was. A rejected d frees a place for the next best.
    """
    rejected = (q - p).clamp(min=0)
    residual = (p - q).clamp(min=0)
    total = residual.sum()
    if total == 0:
        return torch.zeros(len(best) - 1, dtype=torch.float64)
    mass = residual[best].cumsum(0) / total  # of the f best; a rejected draft has none
    inside = rejected[best].cumsum(0)[:-1]  # the draft is one of the f best
    return inside * mass[1:] + (rejected.sum() - inside) * mass[:-1]


def shared_rates(
    recorded: Positions, temperature: float, fan_outs: Sequence[int], *, draws: int
) -> Rates:
    """Equal noise on both sides; greedy (temperature 0) is the case without any."""
    draws = draws if temperature > 0 else 1
    widest = max(fan_outs)
    num_accepted = 0
    rejected_ranks: list[int] = []
    ranks: list[int] = []
    seeds = torch.arange(1, draws + 1)
    rules = [DraftRule(temperature=temperature, seed=int(seed)) for seed in seeds]
    progress = tqdm(recorded.positions, desc=f"T={temperature:g}: {draws} draws", leave=False)
    for row, position in enumerate(progress):
        at = torch.full((draws,), position)
        drawn = draw(recorded.target_logits[row], temperature, seeds=seeds, positions=at)
        ranked = torch.from_numpy(
            rank_candidates(
                recorded.draft_logits[row].expand(draws, -1), rules, at.tolist(), widest + 1
            )
        )
        found = ranked == drawn[:, None]
        rank = torch.where(found.any(dim=1), found.int().argmax(dim=1), widest + 1)
        num_accepted += int((rank == 0).sum())
        ranks += rank.tolist()
        rejected_ranks += (rank[rank > 0] - 1).tolist()  # the draft itself is no guess
    return Rates(
        temperature=temperature,
        method="shared noise" if temperature else "greedy",
        acceptance=num_accepted / len(ranks),
        hit_after_rejection=_rank_shares(rejected_ranks, fan_outs),
        hit_after_all_accepted=_rank_shares(ranks, fan_outs),
        num_positions=len(recorded.positions),
    )


def draw(
    logits: torch.Tensor,  # [V]
    temperature: float,
    *,
    seeds: torch.Tensor,  # [draws]
    positions: torch.Tensor,  # [draws]
) -> torch.Tensor:  # [draws]
    """The target's token for every seed."""
    if temperature == 0:
        return logits.argmax()[None]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return coupled_sample(logprobs.expand(len(seeds), -1), seeds=seeds, positions=positions)


def _rank_shares(ranks: Sequence[int], fan_outs: Sequence[int]) -> dict[int, float]:
    return {f: sum(rank < f for rank in ranks) / max(len(ranks), 1) for f in fan_outs}


def _by_fan_out(fan_outs: Sequence[int], values: torch.Tensor) -> dict[int, float]:
    return dict(zip(fan_outs, values.tolist(), strict=True))


def print_rates(rates: Sequence[Rates], fan_outs: Sequence[int]) -> None:
    names = " / ".join(map(str, fan_outs))
    print_table(
        [
            "T",
            "method",
            "acceptance",
            f"hit after a rejection, F={names}",
            f"hit after all accepted, F={names}",
            "positions",
        ],
        [
            [
                f"{one.temperature:g}",
                one.method,
                f"{one.acceptance:.3f}",
                " ".join(f"{value:.2f}" for value in one.hit_after_rejection.values()),
                " ".join(f"{value:.2f}" for value in one.hit_after_all_accepted.values()),
                one.num_positions,
            ]
            for one in rates
        ],
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="hub id or folder")
    drafts = parser.add_mutually_exclusive_group(required=True)
    drafts.add_argument("--draft", help="hub id or folder")
    drafts.add_argument(
        "--draft-noise",
        type=float,
        help="draft with the target's weights plus Gaussian noise of this share of each matrix's "
        "standard deviation",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--fan-outs", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--new-tokens", type=int, default=110, help="per prompt (default 110)")
    parser.add_argument("--draws", type=int, default=60, help="seeds a position (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    add_prompt_flags(parser, num_prompts=5)
    add_out_flag(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    prompts = load_prompts(args)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = load_model(args.target, args.dtype)
    draft = load_model(args.draft or args.target, args.dtype)
    if args.draft_noise is not None:
        add_weight_noise(draft, args.draft_noise, args.seed)
    rates: list[Rates] = []
    for temperature in args.temperatures:
        recorded = record(
            target,
            draft,
            chat_tokens(prompts.messages, tokenizer),
            temperature=temperature,
            num_tokens=args.new_tokens,
            seed=args.seed,
        )
        if temperature > 0:
            rates.append(standard_rates(recorded, temperature, args.fan_outs))
        rates.append(shared_rates(recorded, temperature, args.fan_outs, draws=args.draws))
    print_rates(rates, args.fan_outs)
    finish("acceptance_by_noise", args, {"prompts": prompts.source, "rates": rates})


if __name__ == "__main__":
    main()
