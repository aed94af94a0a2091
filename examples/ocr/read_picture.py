"""Prints the text in a picture, calling the three OCR models one after the other.

    python examples/ocr/read_picture.py [PICTURE] [--url localhost:8000]

Needs tritonclient[http], numpy and Pillow; any KServe v2 server with these models will do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import tritonclient.http as triton
from PIL import Image

HERE = Path(__file__).resolve().parent
PIPELINE = HERE.parent / "model_repository/ocr/1"
sys.path[:0] = [str(HERE), str(PIPELINE)]

import ocr_steps  # noqa: E402
from picture import draw_picture  # noqa: E402


def infer(
    client: triton.InferenceServerClient, model: str, array: np.ndarray, output: str
) -> np.ndarray:
    """One output of one model for the input `x`."""
    tensor = triton.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    result = client.infer(model, [tensor], outputs=[triton.InferRequestedOutput(output)])
    return result.as_numpy(output)


def read_picture(
    client: triton.InferenceServerClient, picture: Image.Image
) -> list[ocr_steps.Line]:
    """The lines of text in the picture, top to bottom."""
    image = ocr_steps.detection_input(picture)
    probabilities = infer(client, "ocr_detection", image, "sigmoid_0.tmp_0")
    lines = ocr_steps.find_lines(probabilities[0, 0], picture.size)
    characters = ocr_steps.read_characters(PIPELINE / "characters.txt")
    for line in lines:
        crops = [picture.crop(line.box)]
        directions = infer(
            client,
            "ocr_direction",
            ocr_steps.direction_input(crops),
            "save_infer_model/scale_0.tmp_1",
        )
        crops = ocr_steps.upright(crops, directions)
        classes = infer(
            client, "ocr_recognition", ocr_steps.recognition_input(crops), "softmax_11.tmp_0"
        )
        line.text, line.score = ocr_steps.decode_text(classes[0], characters)
    return [line for line in lines if line.text]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", nargs="?", help="default: one drawn on the spot")
    parser.add_argument("--url", default="localhost:8000")
    arguments = parser.parse_args()
    picture = Image.open(arguments.picture) if arguments.picture else draw_picture()
    with triton.InferenceServerClient(arguments.url) as client:
        for line in read_picture(client, picture.convert("RGB")):
            print(f"{line.score:.3f}  {line.text}")


if __name__ == "__main__":
    main()
