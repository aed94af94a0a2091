"""What the core makes of a request's model and version, and says of one it refuses."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from npuserve.errors import InvalidArgumentError, NotFoundError
from npuserve.server.core import InferenceServer
from tests.server.models import infer, serve


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", -1), ("1", 1), ("01", 1), ("+1", 1), (" 1", 1), ("\t\n1", 1), ("1 ", 1), ("1.0", 1),
        ("1abc", 1), ("1\0", 1), ("1_0", 1), ("1,2", 1), ("0x1", 0), ("0", 0), ("00", 0), ("-0", 0),
        ("0" * 100_000 + "1", 1), ("123456789012345678", 123456789012345678),
        ("9223372036854775807", 2**63 - 1),
    ],
)  # fmt: skip
def test_a_version_is_read_as_triton_reads_it(text: str, version: int) -> None:
    """As C reads a number: what follows the digits does not matter."""
    assert InferenceServer.parse_version(text) == version


@pytest.mark.parametrize(
    "text",
    [
        "abc", " ", "+", "-", "--1", "+-1", "\u0663", "\u00a01", "9223372036854775808",
        "9" * 100_000, "-9223372036854775809",
    ],
)  # fmt: skip
def test_what_is_no_number_is_no_version(text: str) -> None:
    """Nor is one that 64 bits do not hold."""
    with pytest.raises(InvalidArgumentError, match="failed to get model version from specified"):
        InferenceServer.parse_version(text)


@pytest.mark.parametrize("text", ["-1", "-2", " -1x", "-9223372036854775808"])
def test_a_negative_version_is_refused(text: str) -> None:
    """The text names it."""
    with pytest.raises(InvalidArgumentError, match=f"invalid model version specified '{text}' ,"):
        InferenceServer.parse_version(text)


async def test_refusals_are_verbose_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With Triton's text, for whoever looks for a client's fault with `--log-verbose=1`."""
    async with serve(tmp_path) as server:
        with (
            caplog.at_level(logging.DEBUG, "npuserve.server.core"),
            pytest.raises(NotFoundError) as caught,
        ):
            await infer(server, "nowhere", id="7")
    assert caplog.messages == [f"[request id: 7] Infer failed: {caught.value}"]
    assert caplog.records[0].levelno == logging.DEBUG
