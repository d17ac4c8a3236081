r"""Predict AR, SD and SSD from measured forward times and acceptance, and the best K and F.

    python benchmark/simulate.py --times results/round.json --acceptance 0.9 \
        --hit-after-rejection 0.75 --hit-after-all-accepted 0.93
    python benchmark/simulate.py --times results/round.json --rates results/acceptance.json

Times are what bench_round.py leaves, rates what acceptance_by_noise.py leaves; for one request at a
time. Drafts are accepted independently with one probability. The drafter's loop is modelled as it
is: K + 1 passes under a verify, of which the guesses after the last draft miss the first; the pass
in flight is waited for, a hit that is not finished is finished alone, a miss is drafted by K single
steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from report import add_out_flag, finish, print_table


class Times(msgspec.Struct, frozen=True):
    """Milliseconds per forward at one batch size."""

    verify: dict[int, float]  # by width
    branch_step: dict[int, float]  # a pass, by rows of one request
    decode: float  # one token of the drafter
    host: float  # of a round: all that is neither verify nor waiting

    def verify_at(self, width: int) -> float:
        return _interpolate(self.verify, width)

    def branch_step_at(self, rows: int) -> float:
        return _interpolate(self.branch_step, rows)


class Rates(msgspec.Struct, frozen=True):
    """Per token and per outcome; hit rates by fan-out."""

    acceptance: float
    hit_after_rejection: dict[int, float]
    hit_after_all_accepted: dict[int, float]


class Prediction(msgspec.Struct, frozen=True):
    mode: str
    num_steps: int
    fan_out: int
    tokens: float  # of a round
    hit_rate: float
    round_ms: float

    @property
    def ms_per_token(self) -> float:
        return self.round_ms / self.tokens


def expected_tokens(acceptance: float, num_steps: int) -> float:
    """Tokens of a round, the bonus included."""
    return sum(acceptance**drafts for drafts in range(num_steps + 1))


def predict_ar(times: Times) -> Prediction:
    round_ms = times.verify_at(1) + times.host
    return Prediction("AR", 0, 0, tokens=1.0, hit_rate=0.0, round_ms=round_ms)


def predict_sd(times: Times, rates: Rates, num_steps: int) -> Prediction:
    return Prediction(
        "SD",
        num_steps,
        0,
        tokens=expected_tokens(rates.acceptance, num_steps),
        hit_rate=0.0,
        round_ms=num_steps * times.decode + times.verify_at(num_steps + 1) + times.host,
    )


def predict_ssd(times: Times, rates: Rates, num_steps: int, fan_out: int) -> Prediction:
    """Whatever a round follows, its whole verify is left to build in."""
    all_accepted = rates.acceptance**num_steps
    hits_inside = (1 - all_accepted) * rates.hit_after_rejection[fan_out]
    hits_at_end = all_accepted * rates.hit_after_all_accepted[fan_out]
    misses = 1 - hits_inside - hits_at_end
    under_verify = times.verify_at(num_steps + 1) + times.host
    costs = [times.branch_step_at(rows) for rows in pass_rows(num_steps, fan_out)]
    passes, in_flight = passes_in(under_verify, costs)
    missing_inside = max(0, num_steps - passes)
    missing_at_end = num_steps - max(0, passes - 1)
    missing = hits_inside * missing_inside + hits_at_end * missing_at_end + misses * num_steps
    return Prediction(
        "SSD",
        num_steps,
        fan_out,
        tokens=expected_tokens(rates.acceptance, num_steps),
        hit_rate=hits_inside + hits_at_end,
        round_ms=under_verify + in_flight + missing * times.decode,
    )


def pass_rows(num_steps: int, fan_out: int) -> list[int]:
    """Rows of each pass over a tree with fan_out guesses at every position: N * K + 1 in all."""
    inside = fan_out * num_steps
    between = [inside + fan_out] * (num_steps - 1)
    return [inside + 1, *between, fan_out]


def passes_in(building: float, costs: Sequence[float]) -> tuple[int, float]:
    """Passes begun within `building` ms, and what the one in flight takes beyond it."""
    elapsed = 0.0
    for passes, cost in enumerate(costs):
        if elapsed >= building:
            return passes, elapsed - building
        elapsed += cost
    return len(costs), max(0.0, elapsed - building)


def predict_all(
    times: Times, rates: Rates, steps: Sequence[int], fan_outs: Sequence[int]
) -> list[Prediction]:
    return [
        predict_ar(times),
        *(predict_sd(times, rates, num_steps) for num_steps in steps),
        *(predict_ssd(times, rates, num_steps, fan) for num_steps in steps for fan in fan_outs),
    ]


def best(predictions: Sequence[Prediction], mode: str) -> Prediction:
    return min((one for one in predictions if one.mode == mode), key=lambda p: p.ms_per_token)


def print_predictions(predictions: Sequence[Prediction]) -> dict[str, object]:
    """The table, and what the JSON says of it: best settings and ratios."""
    chosen = {mode: best(predictions, mode) for mode in ("AR", "SD", "SSD")}
    print_table(
        ["mode", "K", "F", "tokens/round", "hit rate", "round ms", "ms/token", "x AR", "best"],
        [
            [
                one.mode,
                one.num_steps or "",
                one.fan_out or "",
                f"{one.tokens:.2f}",
                f"{one.hit_rate:.2f}" if one.fan_out else "",
                f"{one.round_ms:.1f}",
                f"{one.ms_per_token:.1f}",
                f"{chosen['AR'].ms_per_token / one.ms_per_token:.2f}",
                "*" if one is chosen[one.mode] else "",
            ]
            for one in predictions
        ],
    )
    ssd = chosen["SSD"].ms_per_token
    return {
        "best": chosen,
        "predicted_ssd_over_ar": chosen["AR"].ms_per_token / ssd,
        "predicted_ssd_over_sd": chosen["SD"].ms_per_token / ssd,
    }


def _interpolate(measured: Mapping[int, float], size: int) -> float:
    """Linear between measured sizes and beyond the last two."""
    sizes = sorted(measured)
    if size > sizes[-1] and len(sizes) > 1:
        low, high = sizes[-2:]
        slope = (measured[high] - measured[low]) / (high - low)
        return measured[high] + max(0.0, slope) * (size - high)
    return float(np.interp(size, sizes, [measured[one] for one in sizes]))


def _read_rates(path: Path, temperature: float) -> Rates:
    """The drafter's own way of drafting at this temperature: greedy or shared noise."""
    for record in msgspec.json.decode(path.read_bytes())["rates"]:
        if record["temperature"] == temperature and record["method"] != "standard":
            return msgspec.convert(record, Rates, strict=False)
    raise SystemExit(f"{path.name} has nothing for temperature {temperature:g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=Path, required=True, help="JSON of bench_round.py")
    parser.add_argument("--rates", type=Path, help="JSON of acceptance_by_noise.py")
    parser.add_argument("--temperature", type=float, default=0.0, help="of --rates (default 0)")
    parser.add_argument("--acceptance", type=float, help="instead of --rates")
    parser.add_argument("--hit-after-rejection", type=float, default=0.75)
    parser.add_argument("--hit-after-all-accepted", type=float, default=0.93)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--fan-outs", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    add_out_flag(parser)
    args = parser.parse_args()
    if (args.rates is None) == (args.acceptance is None):
        parser.error("give one of --rates and --acceptance")

    times = msgspec.convert(
        msgspec.json.decode(args.times.read_bytes())["times"], Times, strict=False
    )
    fan_outs = args.fan_outs
    if args.rates is not None:
        rates = _read_rates(args.rates, args.temperature)
        fan_outs = [fan for fan in fan_outs if fan in rates.hit_after_rejection]
    else:
        fan_outs = fan_outs[:1]  # one hit rate says nothing about others
        rates = Rates(
            acceptance=args.acceptance,
            hit_after_rejection={fan_outs[0]: args.hit_after_rejection},
            hit_after_all_accepted={fan_outs[0]: args.hit_after_all_accepted},
        )
    predictions = predict_all(times, rates, args.steps, fan_outs)
    finish("simulate", args, print_predictions(predictions))


if __name__ == "__main__":
    main()
