"""examples/ocr and the models it uses, on a real picture."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http
from PIL import Image
from tritonclient.utils import InferenceServerException

from npuserve.testing.serve import RunningServer
from tests.examples.conftest import EXAMPLES, load_program, session

picture = load_program("ocr/picture.py")
steps = load_program("model_repository/ocr/1/ocr_steps.py")
read_picture = load_program("ocr/read_picture.py")
draw_boxes = load_program("ocr/draw_boxes.py")

OUTPUTS = {
    "ocr_detection": "sigmoid_0.tmp_0",
    "ocr_direction": "save_infer_model/scale_0.tmp_1",
    "ocr_recognition": "softmax_11.tmp_0",
}


@pytest.fixture
def client(example_server: RunningServer) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(example_server.http_url) as http:
        yield http


def model_input(model: str) -> np.ndarray:
    """What the pipeline feeds the model for the example picture."""
    drawn = picture.draw_picture()
    if model == "ocr_detection":
        return steps.detection_input(drawn)
    crops = [drawn.crop((40, 40, 420, 85)), drawn.crop((40, 110, 390, 155))]
    make = steps.direction_input if model == "ocr_direction" else steps.recognition_input
    return make(crops)


@pytest.mark.parametrize("model", OUTPUTS)
def test_answers_equal_the_file_run_directly(example_server: RunningServer, model: str) -> None:
    """To 1e-5, also when two clients' requests share a batch."""
    array = model_input(model)
    direct = session(f"model_repository/{model}/1/model.onnx").run(None, {"x": array})[0]

    def ask(_: int) -> np.ndarray:
        with tritonclient.http.InferenceServerClient(example_server.http_url) as http:
            return read_picture.infer(http, model, array, OUTPUTS[model])

    with ThreadPoolExecutor(2) as pool:
        for answer in pool.map(ask, range(4)):
            np.testing.assert_allclose(answer, direct, rtol=0, atol=1e-5)


def test_the_client_prints_the_text(example_server: RunningServer) -> None:
    """Started as the README says, it prints what the picture says."""
    command = [sys.executable, str(EXAMPLES / "ocr/read_picture.py")]
    command += ["--url", example_server.http_url]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = [line.split("  ", 1)[1] for line in run.stdout.splitlines()]
    assert printed == picture.LINES


def test_a_picture_upside_down_is_read(client: tritonclient.http.InferenceServerClient) -> None:
    """The direction model turns the lines."""
    lines = read_picture.read_picture(client, picture.draw_picture(upside_down=True))
    assert [line.text.replace(" ", "") for line in lines] == [
        text.replace(" ", "") for text in reversed(picture.LINES)
    ]


def test_the_pipeline_in_the_server_reads_the_same(
    client: tritonclient.http.InferenceServerClient,
) -> None:
    """One request with the encoded picture gives the texts and boxes of the client's pipeline."""
    encoded = draw_boxes.encoded_picture(None)
    texts, scores, boxes = draw_boxes.read_lines(client, encoded)
    lines = read_picture.read_picture(client, picture.draw_picture())
    assert texts == [line.text for line in lines] == picture.LINES
    assert boxes.tolist() == [[list(corner) for corner in line.corners()] for line in lines]
    assert (scores > 0.9).all()


def test_boxes_hold_the_text(client: tritonclient.http.InferenceServerClient) -> None:
    """Every dark pixel lies in a box, and every box holds some."""
    drawn = picture.draw_picture()
    _, _, boxes = draw_boxes.read_lines(client, draw_boxes.encoded_picture(None))
    dark = np.asarray(drawn.convert("L")) < 100
    for box in boxes.astype(int):
        (left, top), (right, bottom) = box[0], box[2]
        assert dark[top:bottom, left:right].any()
        dark[top:bottom, left:right] = False
    assert dark.mean() < 1e-3


def test_the_boxes_are_drawn(example_server: RunningServer, tmp_path: Path) -> None:
    """The second client writes a picture with frames and prints the lines."""
    target = tmp_path / "boxes.png"
    command = [sys.executable, str(EXAMPLES / "ocr/draw_boxes.py"), "--output", str(target)]
    command += ["--url", example_server.http_url]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert all(text in run.stdout for text in picture.LINES)
    assert Image.open(target).getpixel((41, 45)) == (220, 30, 30)


def test_several_pictures_at_once(example_server: RunningServer) -> None:
    """Their lines share batches and come back to their own picture."""
    words = ["alpha 111", "bravo 222", "charlie 333", "delta 444"]

    def ask(word: str) -> list[str]:
        buffer = io.BytesIO()
        picture.draw_picture([word]).save(buffer, "JPEG", quality=95)
        with tritonclient.http.InferenceServerClient(example_server.http_url) as http:
            texts: list[str] = draw_boxes.read_lines(http, buffer.getvalue())[0]
            return texts

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, words)) == [[word] for word in words]


def test_an_empty_picture_has_no_lines(client: tritonclient.http.InferenceServerClient) -> None:
    """Outputs of zero lines, no error."""
    buffer = io.BytesIO()
    Image.new("RGB", (200, 100), "white").save(buffer, "PNG")
    texts, scores, boxes = draw_boxes.read_lines(client, buffer.getvalue())
    assert texts == []
    assert scores.shape == (0,)
    assert boxes.shape == (0, 4, 2)


def test_what_is_no_picture_is_refused(client: tritonclient.http.InferenceServerClient) -> None:
    """The error names the input, and the next request is served."""
    with pytest.raises(InferenceServerException, match="'image' is no picture") as caught:
        draw_boxes.read_lines(client, b"hello")
    assert caught.value.status() == "400"
    assert draw_boxes.read_lines(client, draw_boxes.encoded_picture(None))[0] == picture.LINES
