"""How long a prefill slice may be while rounds are being served.

A round in flight waits for the forward that runs when its outcome arrives, so a forward with a
slice may take twice what the others take on the average: many tokens on a GPU, few on a CPU core.
Both are measured.
"""

from __future__ import annotations

_MEMORY = 0.9  # weight of the past in the running means
_FORWARDS_PER_SLICE = 2.0
_LEAST_TOKENS = 8


class Pace:
    """Running means: seconds of a token in forwards with a slice, and of any other forward."""

    def __init__(self) -> None:
        self._token_s = 0.0
        self._forward_s = 0.0

    def note_slice(self, *, num_tokens: int, seconds: float) -> None:
        self._token_s = _mean(self._token_s, seconds / num_tokens)

    def note_forward(self, seconds: float) -> None:
        self._forward_s = _mean(self._forward_s, seconds)

    def slice_tokens(self, most: int, *, beside: int = 0) -> int:
        """What fits beside others' tokens into a forward of `most`; a few in any case.

        Once both costs are known, no more than what takes as long as allowed.
        """
        fitting = most
        if self._token_s and self._forward_s:
            fitting = min(most, int(_FORWARDS_PER_SLICE * self._forward_s / self._token_s))
        return max(min(most, _LEAST_TOKENS), fitting - beside)


def _mean(past: float, new: float) -> float:
    return _MEMORY * past + (1 - _MEMORY) * new if past else new
