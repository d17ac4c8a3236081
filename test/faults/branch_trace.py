"""Branch coverage of a few functions, from the interpreter's own bytecode: no package needed.

A branch is a conditional jump with two ways on. `FunctionBranches` records, while functions of a
module run under it, which ways were taken.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable
from types import CodeType, FrameType, FunctionType
from typing import Any

Way = tuple[str, int, str]
"""Function, line, and which way: "jumps" or "goes on"."""


class FunctionBranches:
    """Use as a context manager around calls; slow, for a sample."""

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self._branches = {one.__code__: _conditional_jumps(one.__code__) for one in functions}
        self._last: dict[FrameType, int] = {}
        self._taken: set[Way] = set()

    def __enter__(self) -> FunctionBranches:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)
        self._last.clear()

    @property
    def taken(self) -> set[Way]:
        return self._taken & self.all

    @property
    def all(self) -> set[Way]:
        return {
            (code.co_name, line, way)
            for code, jumps in self._branches.items()
            for line, _, _ in jumps.values()
            for way in ("jumps", "goes on")
        }

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in self._branches:
            return None
        frame.f_trace_opcodes = True
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            jumps = self._branches[frame.f_code]
            before = self._last.get(frame)
            if before is not None:
                line, target, following = jumps[before]
                if frame.f_lasti in (target, following):
                    way = "jumps" if frame.f_lasti == target else "goes on"
                    self._taken.add((frame.f_code.co_name, line, way))
            if frame.f_lasti in jumps:
                self._last[frame] = frame.f_lasti
            else:
                self._last.pop(frame, None)
        return self._on_opcode


def _conditional_jumps(code: CodeType) -> dict[int, tuple[int, int, int]]:
    """Offset of each conditional jump: its line, its target, and the instruction behind it.

    The check whether a caught exception is of the type that is named has one way only here.
    """
    instructions = list(dis.get_instructions(code))
    jumps, line = {}, code.co_firstlineno
    for index, one in enumerate(instructions[:-1]):
        line = one.starts_line or line
        checks_exception = instructions[index - 1].opname == "CHECK_EXC_MATCH"
        if "JUMP" in one.opname and "IF" in one.opname and not checks_exception:
            jumps[one.offset] = (line, int(one.argval), instructions[index + 1].offset)
    return jumps
