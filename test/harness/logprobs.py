"""Whether two servers tell the same logprobs, in whichever form SGLang puts them."""

from __future__ import annotations

import base64
from array import array
from typing import Any

from harness.client import Answer

MAX_DIFFERENCE = 1e-4
"""Between a forward of one row and of several, in float32."""
TYPE_CODES = {"int32": "i", "float32": "f"}
"""Of the arrays that come as base64; each names its dtype in a key of its own."""


def assert_same_logprobs(want: Answer, have: Answer, *, side: str = "") -> None:
    """The same keys, the same tokens in the same places, and values as near as that.

    side: "input" or "output" alone; left out, both.
    """
    expected, got = (_logprobs_of(answer.meta_info, side) for answer in (want, have))
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert_close(value, got[name], name)


def assert_close(want: Any, have: Any, where: str) -> None:
    """Of nested lists and objects; what is no float is equal."""
    if isinstance(want, dict):
        assert isinstance(have, dict), where
        assert set(have) == set(want), where
        for key, value in want.items():
            assert_close(value, have[key], f"{where}.{key}")
    elif isinstance(want, list | tuple):
        assert isinstance(have, list | tuple), where
        assert len(have) == len(want), where
        for index, (a, b) in enumerate(zip(want, have, strict=True)):
            assert_close(a, b, f"{where}[{index}]")
    elif isinstance(want, float) and isinstance(have, float):
        assert have == want or abs(have - want) < MAX_DIFFERENCE, f"{where}: {have}, not {want}"
    else:
        assert have == want, f"{where}: {have}, not {want}"


def _logprobs_of(meta_info: dict[str, Any], side: str) -> dict[str, Any]:
    """What a client reads out of the fields about logprobs."""
    found = {
        name: value
        for name, value in meta_info.items()
        if "logprobs" in name and name.startswith(side)
    }
    for name, dtype in list(found.items()):
        if name.endswith("_b64_dtype"):
            values = array(TYPE_CODES[dtype], base64.b64decode(found[name.removesuffix("_dtype")]))
            found[name.removesuffix("_dtype")] = values.tolist()
    return found
