"""Sends a picture to the pipeline `ocr` in the server and draws the boxes it finds.

python examples/ocr/draw_boxes.py [PICTURE] [--output boxes.png] [--url localhost:8000]
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import numpy as np
import tritonclient.http as triton
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parent))

from picture import draw_picture


def read_lines(
    client: triton.InferenceServerClient, encoded: bytes
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Texts, scores [n] and boxes [n, 4, 2] of an encoded picture."""
    tensor = triton.InferInput("image", [len(encoded)], "UINT8")
    tensor.set_data_from_numpy(np.frombuffer(encoded, np.uint8))
    result = client.infer("ocr", [tensor])
    texts = [text.decode() for text in result.as_numpy("text")]
    return texts, result.as_numpy("score"), result.as_numpy("box")


def draw(encoded: bytes, boxes: np.ndarray) -> Image.Image:
    """The picture with a red frame around each line."""
    picture = Image.open(io.BytesIO(encoded)).convert("RGB")
    pen = ImageDraw.Draw(picture)
    for box in boxes:
        pen.polygon([tuple(corner) for corner in box.tolist()], outline=(220, 30, 30), width=2)
    return picture


def encoded_picture(path: str | None) -> bytes:
    """The bytes of the file, or of a picture drawn on the spot."""
    if path:
        return Path(path).read_bytes()
    buffer = io.BytesIO()
    draw_picture().save(buffer, "PNG")
    return buffer.getvalue()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", nargs="?", help="default: one drawn on the spot")
    parser.add_argument("--output", default="boxes.png")
    parser.add_argument("--url", default="localhost:8000")
    arguments = parser.parse_args()
    encoded = encoded_picture(arguments.picture)
    with triton.InferenceServerClient(arguments.url) as client:
        texts, scores, boxes = read_lines(client, encoded)
    for text, score, box in zip(texts, scores, boxes, strict=True):
        left, top = box[0].astype(int)
        print(f"({left:4}, {top:4})  {score:.3f}  {text}")
    draw(encoded, boxes).save(arguments.output)
    print(f"boxes drawn in {arguments.output}")


if __name__ == "__main__":
    main()
