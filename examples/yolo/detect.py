"""Finds coloured squares in a picture, by both variants of the example.

    npuserve --model-repository examples/yolo/model_repository --npu-simulator=1
    python examples/yolo/detect.py [--url localhost:8000] [picture.png]

`yolo` is an ensemble: letterbox (Python) → detector (OM) → non-maximum suppression (Python).
`yolo_ais_bench` does all three in one model.py through ais_bench.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import tritonclient.http as triton

sys.path.append(str(Path(__file__).parent))
from yolo_steps import CLASSES

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
# Left and top of squares of 128 pixels in a picture of 640 x 480.
SQUARES = (("red", 64, 48), ("blue", 320, 112), ("green", 448, 304))


def draw_picture():
    """A grey picture with three squares: uint8 [480, 640, 3]."""
    picture = np.full((480, 640, 3), 90, np.uint8)
    for colour, left, top in SQUARES:
        picture[top : top + 128, left : left + 128] = COLOURS[colour]
    return picture


def detect(client, model, pictures):
    """Boxes of pictures of one size: float32 [pictures, MAX_BOXES, 6]."""
    batch = np.stack(pictures)
    tensor = triton.InferInput("image", list(batch.shape), "UINT8")
    tensor.set_data_from_numpy(batch)
    return client.infer(model, [tensor]).as_numpy("boxes")


def describe(boxes):
    """One line for each box."""
    return [
        f"{CLASSES[int(kind)]:5} {score:.2f}  "
        f"({left:.0f}, {top:.0f}) to ({right:.0f}, {bottom:.0f})"
        for left, top, right, bottom, score, kind in boxes
        if score > 0
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("picture", nargs="?", help="any picture file; without one it is drawn")
    arguments = parser.parse_args()
    if arguments.picture:
        from PIL import Image

        picture = np.asarray(Image.open(arguments.picture).convert("RGB"))
    else:
        picture = draw_picture()
    client = triton.InferenceServerClient(arguments.url)
    for model in ("yolo", "yolo_ais_bench"):
        print(model)
        for line in describe(detect(client, model, [picture])[0]):
            print(f"  {line}")


if __name__ == "__main__":
    main()
