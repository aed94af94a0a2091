"""Failures on demand: make the n-th call, or the n-th call of one function, return a code."""

from __future__ import annotations

from dataclasses import dataclass


class RefusedError(Exception):
    """A call the runtime refuses.

    Attributes:
        code: the return code.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Fault:
    """One planned failure.

    Attributes:
        call: function such as "acl.rt.malloc"; "" for any.
        skip: matching calls to let through before.
        code: return code to give.
        count: matching calls that fail.
    """

    call: str = ""
    skip: int = 0
    code: int = 500000
    count: int = 1

    def strikes(self, call: str) -> bool:
        """Whether this call fails; counts it."""
        if self.count <= 0 or (self.call and self.call != call):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.count -= 1
        return True


def parse(text: str) -> list[Fault]:
    """Faults from `call:skip:code` entries, separated by commas; call may be `*`."""
    faults: list[Fault] = []
    for entry in filter(None, text.split(",")):
        call, skip, code = entry.split(":")
        faults.append(Fault("" if call == "*" else call, int(skip), int(code)))
    return faults
