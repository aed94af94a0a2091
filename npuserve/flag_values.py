"""How the text of a command-line flag becomes the value of a setting. Pure.

Every function takes text (or all texts of a repeatable flag) and raises ValueError with the
words tritonserver uses. Source: server src/command_line_parser.cc.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESTRICTED_API_GROUPS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)

TRACE_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")

_FLAGS_OFF = re.compile(r"\(\?([ims]*-[ims]+)\)")

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_INTEGER = re.compile(r"[+-]?\d+")
_TRUE = frozenset({"true", "on", "1"})
_FALSE = frozenset({"false", "off", "0"})


@dataclass(frozen=True)
class RateLimitResource:
    """`--rate-limit-resource`: how much of a resource there is; device None means every one."""

    name: str
    count: int
    device: int | None = None


@dataclass(frozen=True)
class TraceOptions:
    """What all `--trace-config` flags say together.

    Attributes:
        mode: "triton" or "opentelemetry".
        level: any of TRACE_LEVELS.
        rate: every rate-th request is traced.
        count: traces left to take; -1 for no end.
        file: file of the triton mode.
        log_frequency: traces a file of the triton mode holds; 0 for all in one.
        opentelemetry: settings of the other mode as given, in order; `resource` may repeat.
    """

    mode: str = "triton"
    level: tuple[str, ...] = ("OFF",)
    rate: int = 1000
    count: int = -1
    file: str = ""
    log_frequency: int = 0
    opentelemetry: tuple[tuple[str, str], ...] = ()


def header_pattern(text: str) -> re.Pattern[str]:
    """The pattern that chooses the headers to forward; it ignores case unless it says `(?-i)`.

    Raises:
        ValueError: it is no regular expression.
    """
    # RE2, which Triton searches with, switches flags off for all that follows; `re` does so for a
    # group only.
    switch = _FLAGS_OFF.match(text)
    if switch is not None:
        text = f"(?{switch[1]}:{text[switch.end() :]})"
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        raise ValueError(str(error)) from error


def parse_bool(text: str) -> bool:
    """`true`, `on`, `1` or `false`, `off`, `0` in any case."""
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"invalid value for bool option: {text}")


def parse_int(text: str, maximum: int = _INT32_MAX) -> int:
    """A decimal integer that fits the C type Triton keeps it in."""
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"Invalid option value. Got {text}")
    value = int(text)
    if not -maximum - 1 <= value <= maximum:
        raise ValueError(f"Provided option value is out of bound. Got {text}")
    return value


def parse_int64(text: str) -> int:
    """An integer of 64 bits, for byte sizes."""
    return parse_int(text, _INT64_MAX)


def parse_float(text: str) -> float:
    """A decimal number."""
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"Invalid option value. Got {text}") from None


def parse_verbosity(text: str) -> int:
    """A log level; some launch scripts say `true` for 1."""
    try:
        return parse_int(text)
    except ValueError:
        return int(parse_bool(text))


def parse_port_range(text: str) -> tuple[int, int]:
    """`<first>-<last>`, both included."""
    first, dash, last = text.partition("-")
    if not dash:
        raise ValueError(
            f"--sagemaker-safe-port-range option format is '<integer>-<integer>'. Got {text}"
        )
    low, high = parse_int(first), parse_int(last)
    if low > high:
        raise ValueError(f"Invalid range. Got {text}")
    return low, high


def parse_scoped_settings(flag: str, owner: str, texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """`<owner>,<key>=<value>` flags as {owner: {key: value}}; the last value of a key wins.

    Args:
        flag: its name, for errors.
        owner: what the part before the comma is called in errors.
        texts: one text for each time the flag was given. Without an owner the setting is
            global and goes below "".
    """
    settings: dict[str, dict[str, str]] = {}
    for text in texts:
        name, key, value = _split_scoped(flag, owner, text)
        settings.setdefault(name, {})[key] = value
    return settings


def _split_scoped(flag: str, owner: str, text: str) -> tuple[str, str, str]:
    head, equals, value = text.partition("=")
    name, comma, key = head.partition(",")
    if not comma:
        name, key = "", head
    if not equals or not key or (comma and not name):
        raise ValueError(f"--{flag} option format is '<{owner}>,<setting>=<value>'. Got {text}")
    return name, key, value


def parse_backend_config(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """`--backend-config`: {backend: {key: value}}, "" for all backends."""
    return parse_scoped_settings("backend-config", "backend name", texts)


def parse_cache_config(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """`--cache-config`: {cache: {key: value}}; a cache must be named."""
    settings = parse_scoped_settings("cache-config", "cache name", texts)
    if "" in settings:
        raise ValueError(
            f"--cache-config option format is '<cache name>,<setting>=<value>'. Got {texts[-1]}"
        )
    return settings


def parse_host_policy(texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """`--host-policy`: {policy: {"numa-node" | "cpu-cores": value}}."""
    settings = parse_scoped_settings("host-policy", "policy_name", texts)
    if "" in settings:
        raise ValueError(
            f"--host-policy option format is '<policy_name>,<setting>=<value>'. Got {texts[-1]}"
        )
    return settings


def parse_metrics_config(texts: Sequence[str]) -> dict[str, str]:
    """`--metrics-config`: {key: value}."""
    settings: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"--metrics-config option format is <setting>=<value>. Got {text}")
        settings[key] = value
    return settings


def parse_restricted(flag: str, kind: str, texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """`<group>,<group>:<key>=<value>` flags as {group: (header, value)}.

    Args:
        flag: its name, for errors.
        kind: "api" (HTTP) or "protocol" (gRPC), for errors.
        texts: one text for each time the flag was given; a group may be in one of them only.
    """
    restricted: dict[str, tuple[str, str]] = {}
    for text in texts:
        names, colon, setting = text.partition(":")
        key, equals, value = setting.partition("=")
        if not (names and colon and key and equals):
            raise ValueError(
                f"--{flag} option format is '<config name>:<setting>=<value>'. Got {text}"
            )
        for name in names.split(","):
            if name not in RESTRICTED_API_GROUPS:
                raise ValueError(f"unknown restricted {kind} '{name}' ")
            if name in restricted:
                raise ValueError(
                    f"restricted {kind} '{name}' can not be specified in multiple config groups"
                )
            restricted[name] = (key, value)
    return restricted


def parse_restricted_apis(texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """`--http-restricted-api`; see `parse_restricted`."""
    return parse_restricted("http-restricted-api", "api", texts)


def parse_restricted_protocols(texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """`--grpc-restricted-protocol`; see `parse_restricted`."""
    return parse_restricted("grpc-restricted-protocol", "protocol", texts)


def parse_rate_limit_resources(texts: Sequence[str]) -> tuple[RateLimitResource, ...]:
    """`--rate-limit-resource`: `<name>:<count>[:<device>]`."""
    return tuple(_parse_rate_limit_resource(text) for text in texts)


def _parse_rate_limit_resource(text: str) -> RateLimitResource:
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts):
        raise ValueError(
            "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or "
            f"'<resource_name>:<count>'. Got {text}"
        )
    device = parse_int(parts[2]) if len(parts) == 3 else None
    return RateLimitResource(parts[0], parse_int(parts[1]), device)


def parse_device_fractions(texts: Sequence[str]) -> dict[int, float]:
    """`--model-load-gpu-limit`: {card: fraction of its memory}."""
    return {
        parse_int(device): parse_float(value)
        for device, value in _split_devices("model-load-gpu-limit", "<device_id>:<fraction>", texts)
    }


def parse_device_bytes(texts: Sequence[str]) -> dict[int, int]:
    """`--cuda-memory-pool-byte-size` and the like: {card: bytes}."""
    return {
        parse_int(device): parse_int64(value)
        for device, value in _split_devices(
            "cuda-memory-pool-byte-size", "<GPU device ID>:<pool byte size>", texts
        )
    }


def _split_devices(flag: str, form: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        device, colon, value = text.partition(":")
        if not colon:
            raise ValueError(f"--{flag} option format is '{form}'. Got {text}")
        pairs.append((device, value))
    return pairs


def parse_trace_config(texts: Sequence[str]) -> TraceOptions:
    """`--trace-config`: `<mode>,<key>=<value>`, or `<key>=<value>` for both modes."""
    common: dict[str, str] = {}
    triton: dict[str, str] = {}
    opentelemetry: list[tuple[str, str]] = []
    levels: list[str] = []
    for text in texts:
        mode, key, value = _split_scoped("trace-config", "mode", text)
        if mode == "opentelemetry":
            opentelemetry.append((key, value))
        elif mode == "triton":
            triton[key] = value
        elif mode:
            raise ValueError(_bad_trace_mode(mode))
        elif key == "level":
            levels.append(_trace_level(value))
        else:
            common[key] = value
    return _trace_options(common, triton, tuple(levels), tuple(opentelemetry))


def _trace_options(
    common: Mapping[str, str],
    triton: Mapping[str, str],
    levels: tuple[str, ...],
    opentelemetry: tuple[tuple[str, str], ...],
) -> TraceOptions:
    mode = common.get("mode", "triton").lower()
    if mode not in ("triton", "opentelemetry"):
        raise ValueError(_bad_trace_mode(mode))
    for scope, known, given in (
        ("", ("count", "level", "mode", "rate"), common),
        ("triton,", ("file", "log-frequency"), triton),
    ):
        for key in given.keys() - set(known):
            # Differs from Triton: it ignores what it does not know.
            raise ValueError(
                f"unknown trace setting '{scope}{key}'; known here: {', '.join(known)}"
            )
    # OFF next to another level says nothing.
    level = tuple(name for name in dict.fromkeys(levels) if name != "OFF") or ("OFF",)
    return TraceOptions(
        mode=mode,
        level=level,
        rate=parse_int(common.get("rate", "1000")),
        count=parse_int(common.get("count", "-1")),
        file=triton.get("file", ""),
        log_frequency=parse_int(triton.get("log-frequency", "0")),
        opentelemetry=opentelemetry,
    )


def _bad_trace_mode(mode: str) -> str:
    return (
        f"invalid value for trace mode option: {mode}. "
        'Available options are "triton" and "opentelemetry"'
    )


def _trace_level(text: str) -> str:
    upper = text.upper()
    if upper in ("MIN", "MAX"):  # the names before 2.2x
        return "TIMESTAMPS"
    if upper not in TRACE_LEVELS:
        raise ValueError(f"invalid value for trace level option: {text}")
    return upper
