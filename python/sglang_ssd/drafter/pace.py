"""How long a prefill slice may be while rounds are being served.

A round in flight waits for the forward that runs when its outcome arrives, so a forward with a
slice may take twice what the others take on the average: many tokens on a GPU, few on a CPU core.
Both are measured.
"""

from __future__ import annotations

_MEMORY = 0.9  # of one forward to the next
_FORWARDS_PER_SLICE = 2.0
_LEAST_TOKENS = 8


class Pace:
    """Running means: seconds of a token in forwards with a slice, and of any other forward."""

    def __init__(self) -> None:
        self._slice_s = 0.0  # fading sums: a forward of few tokens counts for little
        self._slice_tokens = 0.0
        self._forward_s = 0.0

    def note_slice(self, *, num_tokens: int, seconds: float) -> None:
        self._slice_s = _MEMORY * self._slice_s + seconds
        self._slice_tokens = _MEMORY * self._slice_tokens + num_tokens

    def note_forward(self, seconds: float) -> None:
        if self._forward_s:
            seconds = _MEMORY * self._forward_s + (1 - _MEMORY) * seconds
        self._forward_s = seconds

    def slice_tokens(self, most: int, *, beside: int = 0) -> int:
        """What fits beside others' tokens into a forward of `most`; a few in any case.

        Once both costs are known, no more than what takes as long as allowed.
        """
        fitting = most
        if self._slice_s and self._forward_s:
            allowed_s = _FORWARDS_PER_SLICE * self._forward_s
            fitting = min(most, int(allowed_s * self._slice_tokens / self._slice_s))
        return max(min(most, _LEAST_TOKENS), fitting - beside)
