"""Draw a few rounds of a trace as PNG: what the target does, below it what the drafter does.

    python benchmark/plot.py TRACE --out docs/round_timeline.png

TRACE is a file that a server started with `--ssd-trace TRACE` has written. Printed, and written on
the picture: the share of the drafting time of all rounds that lies under a verify.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from timeline import (
    ACCEPT,
    BRANCH_STEP,
    DECODE,
    DRAFTER,
    DRAFTING,
    FEED,
    PREFILL_SLICE,
    TARGET,
    VERIFY,
    WAIT,
    Round,
    Span,
    drafting_under_verify,
    find_rounds,
    read_trace,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    VERIFY: "#2b6cb0",
    ACCEPT: "#163a5f",
    WAIT: "#e4572e",
    BRANCH_STEP: "#3a9d5d",
    DECODE: "#f2a541",
    FEED: "#8ac6a0",
    PREFILL_SLICE: "#b8bfc8",
}
LEGEND = {
    VERIFY: "verify (target forward)",
    WAIT: "wait for drafts",
    BRANCH_STEP: "branch step",
    FEED: "feed the bonus",
    DECODE: "draft that is waited for",
}
LANES = {TARGET: 1.0, DRAFTER: 0.0}
HEIGHT = 0.62
LABEL_SHARE = 0.12  # of the window's width that a label in a box needs
VERIFY_SHADE = "#e8f0f9"
INK = "#222b36"
FAINT = "#6b7683"


class Summary(msgspec.Struct, frozen=True):
    """What the picture says in numbers, over all rounds of the trace."""

    num_rounds: int
    drafting_under_verify: float
    verify_ms: float
    round_ms: float
    wait_ms: float


def summarize(spans: Sequence[Span], rounds: Sequence[Round]) -> Summary:
    """Medians; the wait is a mean, for most rounds wait for nothing and a miss waits long."""
    return Summary(
        num_rounds=len(rounds),
        drafting_under_verify=drafting_under_verify(spans, rounds),
        verify_ms=statistics.median(one.verify for one in rounds),
        round_ms=statistics.median(one.duration for one in rounds),
        wait_ms=statistics.fmean(one.wait for one in rounds),
    )


def choose_window(rounds: Sequence[Round], num_shown: int, first: int | None) -> list[Round]:
    """num_shown rounds that follow each other: from `first`, or those of most typical length."""
    runs = [
        index
        for index in range(len(rounds) - num_shown + 1)
        if all(rounds[at].end == rounds[at + 1].start for at in range(index, index + num_shown - 1))
    ]
    if not runs:
        raise ValueError(f"no {num_shown} rounds in a row: the trace has {len(rounds)}")
    if first is None:
        middle = statistics.median(one.duration for one in rounds) * num_shown
        first = min(
            runs, key=lambda at: abs(rounds[at + num_shown - 1].end - rounds[at].start - middle)
        )
    elif first not in runs:
        raise ValueError(f"round {first} does not begin {num_shown} rounds in a row")
    return list(rounds[first : first + num_shown])


def draw(spans: Sequence[Span], shown: Sequence[Round], summary: Summary) -> Figure:
    """The window with a little of what comes before and after it."""
    from matplotlib import pyplot as plt
    from matplotlib import rc_context

    start, end = shown[0].start, shown[-1].end
    margin = (end - start) * 0.015
    end += statistics.fmean(one.verify for one in shown) * 0.25
    with rc_context({"font.family": "DejaVu Sans", "font.size": 11, "text.color": INK}):
        figure, axes = plt.subplots(figsize=(11, 3.7), dpi=160)
        seen = [span for span in spans if span.end > start - margin and span.start < end]
        for span in seen:
            _draw_span(axes, span, start, room=(end - start) * LABEL_SHARE)
        _draw_rounds(axes, shown, start)
        _dress(axes, window=(-margin, end - start))
        _write_title(figure, summary)
        _write_legend(axes, {span.name for span in seen})
        figure.subplots_adjust(left=0.085, right=0.985, top=0.83, bottom=0.28)
    return figure


def _draw_span(axes: Axes, span: Span, origin: float, *, room: float) -> None:
    lane = LANES.get(span.process)
    if lane is None or span.name not in COLORS:
        return
    left, width = span.start - origin, span.duration
    if span.name == VERIFY:
        axes.axvspan(left, left + width, ymax=0.8, color=VERIFY_SHADE, linewidth=0, zorder=0)
    axes.broken_barh(
        [(left, width)],
        (lane - HEIGHT / 2, HEIGHT),
        facecolor=COLORS[span.name],
        edgecolor="white",
        linewidth=0.8 if span.name in DRAFTING else 0.0,
        zorder=2,
    )
    if span.name == VERIFY and width > room:
        axes.text(
            left + width / 2,
            lane,
            f"verify {span.args['width']} tokens",
            ha="center",
            va="center",
            color="white",
            fontsize=10.5,
            zorder=3,
            clip_on=True,
        )


def _draw_rounds(axes: Axes, shown: Sequence[Round], origin: float) -> None:
    for one in shown:
        axes.annotate(
            "",
            xy=(one.start - origin, 1.5),
            xytext=(one.end - origin, 1.5),
            arrowprops={"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "color": FAINT, "lw": 0.9},
        )
        axes.text(
            (one.start + one.end) / 2 - origin,
            1.56,
            f"round {one.duration:.0f} ms",
            ha="center",
            va="bottom",
            fontsize=10,
            color=FAINT,
        )


def _dress(axes: Axes, *, window: tuple[float, float]) -> None:
    axes.set_xlim(*window)
    axes.set_ylim(-0.5, 1.8)
    axes.set_yticks(list(LANES.values()), list(LANES))
    axes.tick_params(axis="y", length=0, labelsize=12, labelcolor=INK)
    axes.tick_params(axis="x", color=FAINT, labelcolor=FAINT)
    axes.set_xlabel("ms", color=FAINT)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _write_title(figure: Figure, summary: Summary) -> None:
    figure.text(
        0.012,
        0.93,
        f"{summary.drafting_under_verify:.0%} of the drafting time lies under a verify",
        fontsize=15,
        fontweight="bold",
    )
    figure.text(
        0.012,
        0.86,
        f"{summary.num_rounds} rounds: verify {summary.verify_ms:.0f} ms, "
        f"round {summary.round_ms:.0f} ms (medians), "
        f"wait for drafts {summary.wait_ms:.1f} ms (mean)",
        fontsize=11,
        color=FAINT,
    )


def _write_legend(axes: Axes, names: set[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=COLORS[name], label=label) for name, label in LEGEND.items() if name in names
    ]
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.47, -0.25),
        ncols=len(handles),
        frameon=False,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.8,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="file written by --ssd-trace")
    parser.add_argument("--out", type=Path, default=Path("docs/round_timeline.png"))
    parser.add_argument("--rounds", type=int, default=4, help="rounds shown (default 4)")
    parser.add_argument("--first", type=int, help="index of the first one; default: typical ones")
    args = parser.parse_args()

    spans = read_trace(args.trace)
    rounds = find_rounds(spans)
    try:
        shown = choose_window(rounds, args.rounds, args.first)
    except ValueError as error:
        parser.error(str(error))
    summary = summarize(spans, rounds)
    figure = draw(spans, shown, summary)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out)
    print(f"{args.out}: {len(shown)} of {summary.num_rounds} rounds")
    print(msgspec.json.encode(summary).decode())


if __name__ == "__main__":
    main()
