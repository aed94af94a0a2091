"""What README and docs show is run: commands, programs, configurations and flags."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from npuserve import cli
from npuserve.model_repository.pbtxt import parse_config
from npuserve.testing.serve import RunningServer, ServerProcess, serve
from tests.backends.npu_models import affine
from tests.examples.conftest import need

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"(?P<before>[^\n]*)\n*^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
FILE_NAME = re.compile(r"`repo/([^`]+)`")


class Block(NamedTuple):
    """A fenced block: its page and line, its language, the line before it and its text."""

    place: str
    language: str
    before: str
    text: str


def blocks(language: str) -> list[Block]:
    """Every block of a language; those of the Chinese pages are those of the English ones."""
    found = []
    for page in PAGES:
        if page.name.endswith(".zh-CN.md"):
            continue
        content = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(content):
            if match["language"] == language:
                line = content.count("\n", 0, match.start("text"))
                place = f"{page.relative_to(ROOT)}:{line}"
                found.append(Block(place, language, match["before"], match["text"]))
    return found


def commands(program: str) -> list[Any]:
    """Every command line of the bash blocks that starts with this program."""
    return [
        pytest.param(words, id=f"{block.place} {' '.join(words)[:60]}")
        for block in blocks("bash")
        for words in command_lines(block.text)
        if words[0].removeprefix(".venv/bin/") == program
    ]


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each command; it may go on over lines by a backslash or an open quote."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # the quote is closed on a later line
            pending += "\n"
            continue
        pending = ""
        if words:
            yield words


def block_params(language: str, model_py: bool = False) -> list[Any]:
    """The blocks of a language as parameters; model files or other programs."""
    return [
        pytest.param(block, id=block.place)
        for block in blocks(language)
        if ("triton_python_backend_utils" in block.text) == model_py
        and "npuserve.backends.base" not in block.text
    ]


@pytest.fixture(scope="module")
def servers(
    example_server: RunningServer,
    vad_server: RunningServer,
    embedding_server: RunningServer,
    yolo_server: ServerProcess,
) -> dict[str, str]:
    """Address for the client of each example."""
    return {
        "ocr": example_server.http_url,
        "vad": vad_server.grpc_url,
        "embedding": embedding_server.http_url,
        "yolo": yolo_server.http_url,
    }


@pytest.fixture(scope="module")
def documented_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The example repository, and beside it one of the files that the pages show."""
    need("model_repository/ocr_detection/1/model.onnx")
    files = {name: text for page in pages_with_files() for name, text in page.values[0].items()}
    shown = write_repository(tmp_path_factory.mktemp("shown"), files)
    with serve(ROOT / "examples/model_repository", shown) as server:
        yield server


@pytest.mark.parametrize("words", [p for p in commands("python") if "-m" not in p.values[0]])
def test_example_commands_run(words: list[str], servers: dict[str, str], tmp_path: Path) -> None:
    """A `python examples/…` line ends well and prints something."""
    example = Path(words[1]).parts[1]
    command = [sys.executable, str(ROOT / words[1]), *words[2:], "--url", servers[example]]
    if example == "embedding":
        command += ["--seconds", "0.1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout


@pytest.mark.parametrize("words", [p for p in commands("python") if "-m" in p.values[0]])
def test_simulator_commands_run(words: list[str], tmp_path: Path) -> None:
    """A `python -m npuserve.testing.simulator …` line ends well, with the files it names there."""
    affine(tmp_path, ["n", 4])
    (tmp_path / "1" / "model.onnx").rename(tmp_path / "model.onnx")
    (tmp_path / "program.py").write_text("import acl; assert not acl.init() + acl.finalize()")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words[1:]]
    run = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("words", commands("curl"))
def test_curl_commands_succeed(words: list[str], documented_server: RunningServer) -> None:
    """A `curl` line gets a 2xx from the example repository or the models of the pages."""
    ports = {
        "8000": documented_server.http_port,
        "8002": documented_server.metrics_port,
    }
    command = [
        re.sub(r"localhost:(800[02])", lambda m: f"127.0.0.1:{ports[m[1]]}", word) for word in words
    ]
    run = subprocess.run([*command, "--fail"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("words", commands("npuserve"))
def test_flags_exist(words: list[str]) -> None:
    """An `npuserve` line is a valid command line."""
    cli.parse(words[1:], {})


@pytest.mark.parametrize("words", commands("make"))
def test_make_targets_exist(words: list[str]) -> None:
    """A `make` line names a target of the Makefile."""
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert {word for word in words[1:] if "=" not in word} <= set(targets)


@pytest.mark.parametrize("words", commands("pip"))
def test_extras_exist(words: list[str]) -> None:
    """A `pip install '.[…]'` or `'npuserve[…]'` line names extras of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for word in words:
        match = re.fullmatch(r"(?:npuserve|\.)\[([\w,-]+)\]", word)
        if match:
            assert set(match[1].split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize("block", block_params("python"))
def test_programs_run(block: Block, documented_server: RunningServer, monkeypatch: Any) -> None:
    """A python block runs against the example repository and the models of the pages."""
    monkeypatch.chdir(ROOT)
    text = block.text.replace("localhost:8000", documented_server.http_url)
    text = text.replace("localhost:8001", documented_server.grpc_url)
    exec(compile(text, block.place, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", block_params("protobuf"))
def test_configurations_parse(block: Block) -> None:
    """A block of config.pbtxt is accepted by the parser."""
    parse_config(block.text, block.place)


def pages_with_files() -> Iterator[Any]:
    """Pages whose blocks are files of a model repository, announced by their path."""
    for page in PAGES:
        files = {}
        for match in FENCE.finditer(page.read_text(encoding="utf-8")):
            name = FILE_NAME.search(match["before"])
            if name:
                files[name[1]] = match["text"]
        if files:
            yield pytest.param(files, id=str(page.relative_to(ROOT)))


def write_repository(path: Path, files: dict[str, str]) -> Path:
    """A model repository of these files."""
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    for model in {Path(name).parts[0] for name in files}:
        (path / model / "1").mkdir(exist_ok=True)
    return path


@pytest.mark.parametrize("files", list(pages_with_files()))
def test_repositories_are_served(files: dict[str, str], tmp_path: Path) -> None:
    """The files of a page make a repository whose models all load."""
    with serve(write_repository(tmp_path, files), allow_grpc=False, allow_metrics=False):
        pass


def test_links_lead_somewhere() -> None:
    """Every relative link of every page names a file that is there, and a heading in it."""
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
        for name, anchor in links:
            target = page.parent / name if name else page
            assert target.exists(), f"{page.relative_to(ROOT)} links to {name}"
            assert not anchor or anchor in anchors(target), f"{page.relative_to(ROOT)}: #{anchor}"


def anchors(page: Path) -> set[str]:
    """What a link to a heading may say after `#`: its words as GitHub joins them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.M)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_named_tests_exist() -> None:
    """Every test that a page names as proof is there."""
    for page in PAGES:
        for name in re.findall(r"`(tests/[^`]+)`", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.relative_to(ROOT)} names {name}"


def test_options_are_documented() -> None:
    """docs/reference/options.md is what the declarations make of it."""
    page = (ROOT / "docs/reference/options.md").read_text(encoding="utf-8")
    render = runpy.run_path(str(ROOT / "docs/generate_options.py"))["render"]
    assert page == render(), "run: make docs"
