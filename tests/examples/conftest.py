"""Servers of the example repositories, one a module, and the examples' programs as modules."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import onnxruntime
import pytest

from npuserve.testing.serve import RunningServer, ServerProcess, serve, serve_process

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_program(path: str) -> ModuleType:
    """A file below examples/ as a module, its folder importable as if it had been started."""
    file = EXAMPLES / path
    sys.path.insert(0, str(file.parent))
    try:
        name = file.stem
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(file.parent))


def need(path: str) -> Path:
    """A fetched file; without it the test is skipped, but not in CI."""
    file = EXAMPLES / path
    if not file.exists():
        if os.environ.get("CI"):
            pytest.fail(f"examples/{path} is missing: make test fetches it")
        pytest.skip(f"examples/{path} is missing: make models")
    return file


def session(path: str) -> onnxruntime.InferenceSession:
    """A fetched ONNX file, run directly."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(need(path)), options)


@pytest.fixture(scope="module")
def example_server() -> Iterator[RunningServer]:
    """The main example repository, served."""
    need("model_repository/ocr_detection/1/model.onnx")
    with serve(EXAMPLES / "model_repository") as server:
        yield server


@pytest.fixture(scope="module")
def vad_server() -> Iterator[RunningServer]:
    """The VAD repository, served."""
    need("vad/model_repository/vad/1/model.onnx")
    with serve(EXAMPLES / "vad/model_repository") as server:
        yield server


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[RunningServer]:
    """The embedding repository, served."""
    need("embedding/model_repository/minilm_encoder/1/model.onnx")
    with serve(EXAMPLES / "embedding/model_repository") as server:
        yield server


@pytest.fixture(scope="module")
def yolo_server() -> Iterator[ServerProcess]:
    """The NPU repository, served on a simulated card."""
    need("yolo/model_repository/yolo_detector/1/model.om")
    with serve_process(EXAMPLES / "yolo/model_repository", flags=["--npu-simulator=1"]) as server:
        yield server
