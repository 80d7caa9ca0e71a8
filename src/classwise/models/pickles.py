"""A look at a pickle before it is read: how much it unfolds to, without building anything.

A pickle of a hundred bytes can name one tuple twice in the next, and so on: hashing or printing what comes of it takes
longer than anybody waits. The look counts, opcode by opcode, how many values each value on the stack stands for.
"""

from __future__ import annotations

import pickletools
from pathlib import Path
from typing import Any, BinaryIO

from classwise.core.errors import InputError

MOST = 10_000_000
"""Values that one value of a pickle may stand for; a state dict with its optimizer has some ten thousands."""


def check_unfolding(path: Path, stream: BinaryIO) -> None:
    """Read a pickle of a file up to its end, and refuse what stands for too much; what is no pickle raises anything."""
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            taken = opcode.stack_before
            depth = len(stack) - len(taken)
            if pickletools.stackslice in taken:  # everything above the last mark, and what is said to lie below it
                depth = marks.pop() - taken.index(pickletools.markobject)
            if depth < 0:
                raise ValueError("takes more from its stack than there is")
            size = 1 + sum(stack[depth:])
            if size > MOST:
                raise InputError(f"{path} is refused: it is a pickle that unfolds without end")
            stack[depth:] = [size] * len(opcode.stack_after)
