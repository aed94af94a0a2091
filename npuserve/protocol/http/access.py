"""Restricted APIs and header forwarding. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from npuserve.flag_values import header_pattern

Headers = Iterable[tuple[bytes, bytes]]

# A forwarded header must not pass for one of these (and not for any `triton_…`).
_RESERVED = frozenset(
    {
        "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers",
        "binary_data_output",
    }
)  # fmt: skip


class Restrictions:
    """`--http-restricted-api`: groups of endpoints that need a header.

    Args:
        groups: by name of the group, the header's name and its value.
    """

    def __init__(self, groups: Mapping[str, tuple[str, str]]) -> None:
        self._groups = {
            group: (key, key.lower().encode(), value.encode())
            for group, (key, value) in groups.items()
        }

    def refusal(self, group: str, headers: Headers) -> str | None:
        """The text for a client that may not use an endpoint of this group; None if it may."""
        needed = self._groups.get(group)
        if needed is None:
            return None
        key, name, value = needed
        if any(each.lower() == name and given == value for each, given in headers):
            return None
        return f"This API is restricted, expecting header '{key}'"


class HeaderForwarding:
    """`--http-header-forward-pattern`: headers that become request parameters.

    Args:
        pattern: searched for anywhere in a header's name; "" forwards nothing.

    Attributes:
        active: whether anything may be forwarded.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = header_pattern(pattern) if pattern else None
        self.active = self._pattern is not None

    def parameters(self, headers: Headers) -> dict[str, str]:
        """The forwarded headers, by name as sent.

        Headers with a reserved name are not forwarded.
        """
        if self._pattern is None:
            return {}
        return {
            name: value.decode("latin-1")
            for name, value in ((key.decode("latin-1"), value) for key, value in headers)
            if self._pattern.search(name)
            and name not in _RESERVED
            and not name.startswith("triton_")
        }
