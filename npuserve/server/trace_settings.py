"""Trace settings: what can be set, how the protocol writes it, and the sampling they ask for.

Pure. Source of names, limits and texts: Triton server src/http_server.cc, HandleTrace;
src/tracer.cc.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

LEVELS = ("TIMESTAMPS", "TENSORS")

_MAX_INT32 = (1 << 31) - 1
_MAX_UINT32 = (1 << 32) - 1
# Differs from Triton: it reads " 1", "1.5" and "0x10" as far as they are decimal, and wraps -1.
_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")

# A setting as the protocol has it: `trace_level` is a list, the others are texts.
SettingValue = str | list[str]


@dataclass(frozen=True)
class TraceSettings:
    """What can be set for all models or one.

    Attributes:
        levels: of LEVELS; empty is off.
        rate: every rate-th request is traced.
        count: traces left to take; -1 for no end.
        log_frequency: traces a file holds; 0 for all in one.
    """

    levels: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    log_frequency: int = 0


class Sampler:
    """Counts requests and decides, by the settings of all models or of one.

    Attributes:
        settings: current ones; `count` runs down.
        open: requests that were chosen and whose traces have not been exported.
    """

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.open = 0
        self._seen = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether all traces that were asked for have been exported."""
        return not self.settings.count and not self.open

    def sample(self) -> bool:
        """Whether the request that came now is traced."""
        settings = self.settings
        if not settings.levels or not settings.count:
            return False
        self._seen += 1
        if self._seen % settings.rate:
            return False
        if settings.count > 0:
            self.settings = replace(settings, count=settings.count - 1)
        self.open += 1
        return True


def known_levels(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Levels without OFF; the deprecated MIN and MAX mean TIMESTAMPS."""
    renamed = ("TIMESTAMPS" if text in ("MIN", "MAX") else text for text in texts)
    return tuple(dict.fromkeys(text for text in renamed if text != "OFF"))


def _parse_level(key: str, value: SettingValue) -> tuple[str, ...]:
    del key
    texts = [value] if isinstance(value, str) else value
    if "OFF" in texts and len(texts) > 1:
        raise InvalidArgumentError("Expect only one trace level 'OFF' is specified")
    # Unknown levels are ignored, as Triton does; here it does not know the deprecated ones either.
    return tuple(dict.fromkeys(text for text in texts if text in LEVELS))


def _parse_unsigned(key: str, value: SettingValue) -> int:
    number, text = _parse_integer(key, value)
    # Differs from Triton: it refuses what its int does not hold, with this very text.
    if not 0 <= number <= _MAX_UINT32:
        raise InvalidArgumentError(
            f"Unable to parse '{key}', value is out of range [ 0, {_MAX_UINT32} ], got: {text}"
        )
    return number


def _parse_count(key: str, value: SettingValue) -> int:
    number, text = _parse_integer(key, value)
    if number < -1:
        raise InvalidArgumentError(f"Unable to parse '{key}'. Expecting value >= -1, got:{text}")
    if number > _MAX_INT32:
        raise InvalidArgumentError(
            f"Unable to parse '{key}', value is out of range [ -1, {_MAX_INT32} ], got: {text}"
        )
    return number


def _parse_integer(key: str, value: SettingValue) -> tuple[int, str]:
    """The number and its text; Python's `int` alone takes too much and has limits of its own."""
    text = _scalar(key, value)
    if not _INTEGER.fullmatch(text):
        raise InvalidArgumentError(f"Unable to parse '{key}', got: {text}")
    return int(text), text


def _scalar(key: str, value: SettingValue) -> str:
    if isinstance(value, str):
        return value
    if len(value) != 1:
        raise InvalidArgumentError(f"expect only 1 value for '{key}'")
    return value[0]


# Differs from Triton: a value that cannot be read is the client's fault and answered 400, not 500.
# Name in the protocol → field of TraceSettings and how its value is read.
SETTINGS: dict[str, tuple[str, Callable[[str, SettingValue], Any]]] = {
    "trace_level": ("levels", _parse_level),
    "trace_rate": ("rate", _parse_unsigned),
    "trace_count": ("count", _parse_count),
    "log_frequency": ("log_frequency", _parse_unsigned),
}
