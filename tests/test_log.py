"""Line formats, switches and tables of the log."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from npuserve import log
from npuserve.errors import InvalidArgumentError, UnsupportedError
from npuserve.options import ServerOptions
from npuserve.text_table import render_table

logger = logging.getLogger("npuserve.test")


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """A file that takes the log while logging is put back to normal afterwards."""
    root, package = logging.getLogger(), logging.getLogger("npuserve")
    levels, handlers = (root.level, package.level), list(root.handlers)
    yield tmp_path / "server.log"
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
            if isinstance(handler, logging.StreamHandler) and handler.stream is not sys.stderr:
                handler.stream.close()
    root.setLevel(levels[0])
    package.setLevel(levels[1])


def configured(log_file: Path, **options: Any) -> log.LogSettings:
    return log.configure(ServerOptions(log_file=str(log_file), **options))


def test_the_default_format_is_triton_s(log_file: Path) -> None:
    """Level letter, UTC time with microseconds, process, place, JSON text."""
    configured(log_file)
    logger.warning('say "%s"\n\u6a21', "hi")
    line = log_file.read_text(encoding="utf-8")
    pattern = r'W\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ test_log\.py:\d+\] "say \\"hi\\"\\n\u6a21"\n'
    assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize(
    ("value", "message"), [("0", 'say "hi"\nhi'), ("false", r'"say \"hi\"\nhi"')]
)
def test_messages_as_they_are(
    log_file: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    """With Triton's variable at 0 there is no JSON text; no other value counts."""
    monkeypatch.setenv("TRITON_SERVER_ESCAPE_LOG_MESSAGES", value)
    configured(log_file)
    logger.warning('say "%s"\nhi', "hi")
    assert log_file.read_text(encoding="utf-8").partition("] ")[2] == message + "\n"


def test_the_iso8601_format_is_triton_s(log_file: Path) -> None:
    """Time first, then the letter."""
    configured(log_file, log_format="ISO8601")
    logger.error("x")
    line = log_file.read_text(encoding="utf-8")
    pattern = r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ E \d+ test_log\.py:\d+\] "x"\n'
    assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "IWE"),
        ({"log_info": False}, "WE"),
        ({"log_warning": False}, "IE"),
        ({"log_error": False}, "IW"),
        ({"log_verbose": 1, "log_info": False}, "VWE"),
    ],
)
def test_levels_are_switches_of_their_own(
    log_file: Path, options: dict[str, bool], expected: str
) -> None:
    """Warnings may be off while info is on; verbose messages do not need info."""
    configured(log_file, **options)
    logger.debug("V")
    logger.info("I")
    logger.warning("W")
    logger.error("E")
    assert "".join(re.findall(r'"(\w)"', log_file.read_text())) == expected


def test_settings_change_at_run_time(log_file: Path) -> None:
    """The object a server holds governs the log."""
    configured(log_file)
    settings = log.LogSettings.from_options(ServerOptions())
    logger.debug("a")
    settings.update({"log_verbose_level": 1, "log_info": False, "log_error": None, "x": 1})
    logger.debug("b")
    logger.info("c")
    settings.update({"log_verbose_level": 0, "log_info": True})
    logger.debug("d")
    logger.info("e")
    assert re.findall(r'"(\w)"', log_file.read_text()) == ["b", "e"]


def test_settings_read_back_under_their_protocol_names() -> None:
    """In the order Triton shows them."""
    settings = log.LogSettings()
    settings.update({"log_format": "ISO8601", "log_verbose_level": 3})
    assert list(settings.get().items()) == [
        ("log_file", ""),
        ("log_info", True),
        ("log_warning", True),
        ("log_error", True),
        ("log_verbose_level", 3),
        ("log_format", "ISO8601"),
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"log_format": "xml"}, "invalid argument for log_format, got: xml"),
        ({"log_info": 1}, "expect boolean for 'log_info'"),
        ({"log_verbose_level": True}, "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": -1}, "invalid argument for log_verbose_level, got: -1"),
        ({"log_format": 1}, "expect string for 'log_format'"),
    ],
)
def test_a_refused_change_changes_nothing(changes: dict[str, object], text: str) -> None:
    """Also of the settings that came with it."""
    settings = log.LogSettings()
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        settings.update({"log_warning": False, **changes})
    assert settings.get()["log_warning"] is True


def test_clients_cannot_choose_the_file() -> None:
    """The server would write where they say."""
    with pytest.raises(UnsupportedError, match="log file location can not be updated"):
        log.LogSettings().update({"log_file": "/etc/x"})


def test_a_log_file_that_cannot_be_opened_ends_the_start(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(InvalidArgumentError, match="cannot open log file"):
        log.configure(ServerOptions(log_file=str(tmp_path / "no" / "dir")))


def test_tracebacks_follow_their_line(log_file: Path) -> None:
    """They stay readable."""
    configured(log_file)
    try:
        raise ValueError("boom")
    except ValueError:
        logger.exception("failed")
    lines = log_file.read_text().splitlines()
    assert lines[0].endswith('"failed"')
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom"


def test_text_is_utf_8_whatever_the_locale_says() -> None:
    """Models print any language in containers without a locale."""
    script = (
        "import logging, sys; from npuserve import log; from npuserve.options import *\n"
        "log.configure(ServerOptions()); logging.getLogger().info('\\u6a21'); print('\\u578b')"
    )
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environ)
    assert "\u6a21" in done.stderr.decode()
    assert done.stdout.decode() == "\u578b\n"


def test_table() -> None:
    """Columns are as wide as their longest line; a cell may have several."""
    assert render_table(("Model", "Status"), [("m", "READY"), ("n", "bad:\n  why")]) == (
        "+-------+--------+\n"
        "| Model | Status |\n"
        "+-------+--------+\n"
        "| m     | READY  |\n"
        "| n     | bad:   |\n"
        "|       |   why  |\n"
        "+-------+--------+\n"
    )
