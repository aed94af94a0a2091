"""How a call of the simulated `acl` behaves before and after its own work.

As in the published binding: positional arguments only, integers of the formats `k`/`K` must be
real `int`s, text must be `str`, a failure never raises but shows in the return value, whose last
element is the code.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.runtime import Runtime, current

_ALL_ONES = (1 << 64) - 1
# Lowest and highest value of the C formats for small integers, None where nothing is checked.
_INTEGERS = {"i": None, "b": (0, 255), "h": (-(1 << 15), (1 << 15) - 1), "B": None}

Function = TypeVar("Function", bound=Callable[..., Any])


class Entry:
    """One function of the module.

    Args:
        name: such as "acl.rt.malloc".
        formats: one letter an argument: k (pointer, handle or size: real int), i (index or id:
            anything with __index__), b, h, B (the same within a byte, within 16 signed bits, cut to
            a byte), f (a number), s (str), l (list of real int), o (any object); those after "|"
            may be left out.
        failure: values that precede the code when the call fails. None: the function returns a
            value without a code.
        bare: what a function without a code returns when it fails.
        hold: keep the GIL while waiting.
        can_fail: whether a fault may strike; not where the C function returns nothing.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, formats: str,
        failure: tuple[Any, ...] | None, bare: Any, hold: bool, can_fail: bool,
    ) -> None:  # fmt: skip
        self.function = function
        self.name = name
        required, _, optional = formats.partition("|")
        self.required = len(required)
        self.letters = required + optional
        self.failure = failure
        self.bare = bare
        self.hold = hold
        self.can_fail = can_fail

    def __call__(self, *args: Any) -> Any:
        """Behave as the binding does; see the module."""
        runtime = current()
        runtime.clock.enter()
        try:
            return self._run(runtime, args)
        finally:
            runtime.clock.leave()

    def _run(self, runtime: Runtime, args: tuple[Any, ...]) -> Any:
        arguments = self._parse(args)
        try:
            runtime.check_process()
            with runtime.lock:
                runtime.strike(self.name, self.can_fail)
                pending = self._work(runtime, arguments)
            if pending.until_ns:
                runtime.clock.wait_until(pending.until_ns, self.hold)
            if pending.then is not None:
                pending.then()
            if pending.failure is not None:
                raise pending.failure
        except RefusedError as error:
            runtime.remember_error(error)
            if self.failure is None:
                return self.bare
            return (*self.failure, error.code) if self.failure else error.code
        if self.failure is None:
            return pending.result
        return (*pending.result, 0) if self.failure else 0

    def _work(self, runtime: Runtime, arguments: list[Any]) -> Pending:
        result = self.function(runtime, *arguments)
        if isinstance(result, Pending):
            return result
        if self.failure is not None and not isinstance(result, tuple):
            result = (result,)
        return Pending(result=result)

    def _parse(self, args: tuple[Any, ...]) -> list[Any]:
        letters = self.letters
        if not self.required <= len(args) <= len(letters):
            raise TypeError(f"{self.name} args parse failed: {len(args)} arguments")
        return [self._convert(letter, value) for letter, value in zip(letters, args, strict=False)]

    def _convert(self, letter: str, value: Any) -> Any:
        if letter == "k":
            if not isinstance(value, int):
                raise TypeError(f"{self.name} args parse failed: int expected, got {value!r}")
            return value & _ALL_ONES
        if letter in _INTEGERS:
            if isinstance(value, float) or not hasattr(value, "__index__"):
                raise TypeError(f"{self.name} args parse failed: int expected, got {value!r}")
            number = value.__index__()
            low, high = _INTEGERS[letter] or (number, number)
            if not low <= number <= high:
                raise TypeError(f"{self.name} args parse failed: {value!r} is out of range")
            return number & 0xFF if letter == "B" else number
        if letter == "f":
            if isinstance(value, str) or not hasattr(value, "__float__"):
                raise TypeError(f"{self.name} args parse failed: float expected, got {value!r}")
            return float(value)
        if letter == "s" and not isinstance(value, str):
            raise TypeError(f"{self.name} args parse failed: str expected, got {value!r}")
        if letter == "l" and not (
            isinstance(value, list) and all(isinstance(item, int) for item in value)
        ):
            raise TypeError(f"{self.name} args parse failed: list of int expected, got {value!r}")
        return value


class Pending:
    """A result the caller gets after some (modelled) time.

    Args:
        until_ns: when.
        failure: what to report then.
        result: as a function without waiting returns it.
        then: called after the wait, without the simulator's lock; may wait for other threads and
            raise RefusedError.
    """

    def __init__(
        self, until_ns: int = 0, failure: RefusedError | None = None, result: Any = (),
        then: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.until_ns = until_ns
        self.failure = failure
        self.result = result
        self.then = then


ENTRIES: dict[str, Entry] = {}


def entry(
    name: str, formats: str = "", failure: tuple[Any, ...] | None = (), bare: Any = None,
    hold: bool = False, can_fail: bool = True,
) -> Callable[[Function], Function]:  # fmt: skip
    """Register a function of the simulator under its name in `acl`; see `Entry`."""

    def decorate(function: Function) -> Function:
        ENTRIES[name] = Entry(function, name, formats, failure, bare, hold, can_fail)
        return function

    return decorate


def bare(
    name: str, formats: str = "", failed: Any = 0, can_fail: bool = True
) -> Callable[[Function], Function]:
    """Register a function that returns a value without a code."""
    return entry(name, formats, failure=None, bare=failed, can_fail=can_fail)


def build_module(module: ModuleType) -> None:
    """Put every registered function into `acl` and its submodules."""
    for name, function in ENTRIES.items():
        *path, last = name.split(".")[1:]
        target = module
        for part in path:
            if not hasattr(target, part):
                setattr(target, part, ModuleType(f"acl.{part}"))
            target = getattr(target, part)
        setattr(target, last, function)
