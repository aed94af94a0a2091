"""examples/yolo: both variants on the simulator, against the detector run directly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import onnxruntime
import pytest
import tritonclient.http

from npuserve.testing.serve import RunningServer, serve
from npuserve.testing.simulator import simulate
from tests.examples.conftest import EXAMPLES, load_program

yolo_steps = load_program("yolo/yolo_steps.py")
build_model = load_program("yolo/build_model.py")
detect = load_program("yolo/detect.py")

MODELS = ("yolo", "yolo_ais_bench")


@pytest.fixture(scope="module")
def yolo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The example repository on two simulated cards, its model made by the example's script."""
    reports = tmp_path_factory.mktemp("reports")
    subprocess.run(
        [sys.executable, str(EXAMPLES / "yolo/build_model.py")], check=True, capture_output=True
    )
    with simulate(cards=2, report_dir=str(reports)) as machine:
        with serve(EXAMPLES / "yolo/model_repository") as server:
            yield server
        assert machine.leaks() == []
    assert [path.read_text() for path in reports.iterdir()] == []


@pytest.fixture
def client(yolo_server: RunningServer) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(yolo_server.http_url) as http_client:
        yield http_client


def boxes_directly(picture: np.ndarray) -> np.ndarray:
    """The same steps around the ONNX model in onnxruntime."""
    session = onnxruntime.InferenceSession(build_model.detector().SerializeToString())
    square, placement = yolo_steps.letterbox(picture)
    (predictions,) = session.run(None, {"images": square[np.newaxis]})
    boxes: np.ndarray = yolo_steps.find_boxes(predictions[0], placement)
    return boxes


@pytest.mark.parametrize("model", MODELS)
def test_the_squares_are_found(client: tritonclient.http.InferenceServerClient, model: str) -> None:
    """Each square once, where it was drawn, with its colour."""
    (boxes,) = detect.detect(client, model, [detect.draw_picture()])
    found = {
        (yolo_steps.CLASSES[int(kind)], round(left), round(top))
        for left, top, right, bottom, score, kind in boxes
        if score > 0
    }
    assert found == set(detect.SQUARES)


@pytest.mark.parametrize("model", MODELS)
def test_boxes_equal_the_model_run_directly(
    client: tritonclient.http.InferenceServerClient, model: str
) -> None:
    """For a batch of three pictures, which the gears pad to four."""
    random = np.random.default_rng(0)
    pictures = []
    for _ in range(3):
        picture = np.full((240, 320, 3), 60, np.uint8)
        for colour in detect.COLOURS.values():
            left, top = random.integers(0, 8) * 32, random.integers(0, 5) * 32
            picture[top : top + 64, left : left + 64] = colour
        pictures.append(picture)
    for boxes, picture in zip(detect.detect(client, model, pictures), pictures, strict=True):
        np.testing.assert_allclose(boxes, boxes_directly(picture), atol=1e-4)


def test_both_variants_find_the_same_boxes(
    client: tritonclient.http.InferenceServerClient,
) -> None:
    """To the last bit: it is the same model on the same machine."""
    picture = np.random.default_rng(1).integers(0, 255, (200, 320, 3), np.uint8)
    picture[40:120, 64:160] = (0, 0, 255)
    one, other = (detect.detect(client, model, [picture]) for model in MODELS)
    np.testing.assert_array_equal(one, other)


def test_the_program_prints_boxes(yolo_server: RunningServer) -> None:
    """As in its docstring."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "yolo/detect.py"), "--url", yolo_server.http_url],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout.count("green") == 2


def test_overlapping_boxes_of_one_class_are_suppressed() -> None:
    """The better one stays; another class is not touched."""
    corners = np.array([[0, 0, 10, 10], [1, 1, 11, 11], [0, 0, 10, 10]], np.float32)
    kept = yolo_steps.suppress(corners, np.array([0.6, 0.9, 0.8]), np.array([0, 0, 1]))
    assert list(map(int, kept)) == [1, 2]
