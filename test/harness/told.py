"""What an answer of any endpoint tells of its request: all of it but what is another every time.

Names that a server makes up, times, and what it tells of its drafts are left out; what is left must
be the same of a server with speculation and of one without.
"""

from __future__ import annotations

import re
from typing import Any

OF_ONE_TIME = re.compile(
    r"(^|_)id$"
    r"|^(created|created_at|completed_at)$|_(ts|time|latency|throughput)$"
    r"|^spec_"
)
"""Keys of names, of times and of drafts."""
OF_THE_CACHE = ("cached_tokens", "cached_tokens_details")
"""Keys that differ between servers which were asked other things before."""


def told(said: Any, *, but: tuple[str, ...] = ()) -> Any:
    """But: further keys that are left out. An object of nothing else counts as left out too."""
    if isinstance(said, list):
        return [told(one, but=but) for one in said]
    if not isinstance(said, dict):
        return said
    kept = {
        key: told(value, but=but)
        for key, value in said.items()
        if not OF_ONE_TIME.search(key) and key not in but
    }
    return {key: value for key, value in kept.items() if value != {}}
