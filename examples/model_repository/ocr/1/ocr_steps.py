"""The steps of PP-OCR around its three models, in numpy and Pillow.

Used by the pipeline in the server (model.py) and by a client that calls the models one by one
(examples/ocr/read_picture.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

DETECTION_MAX_SIDE = 960
DETECTION_MULTIPLE = 32
PIXEL_THRESHOLD = 0.3  # a pixel is text from here on
BOX_THRESHOLD = 0.5  # mean of a line's pixels
UNCLIP_RATIO = 1.6  # the model marks the core of a line only; boxes grow by this much
MIN_BOX_SIDE = 3  # pixels

LINE_HEIGHT = 48
DIRECTION_WIDTH = 192
DIRECTION_THRESHOLD = 0.9
RECOGNITION_MIN_WIDTH = 320
RECOGNITION_MULTIPLE = 32


@dataclass
class Line:
    """A line of text in a picture; the box is left, top, right, bottom in pixels."""

    box: tuple[int, int, int, int]
    text: str = ""
    score: float = 0.0

    def corners(self) -> list[tuple[int, int]]:
        """Clockwise from the upper left."""
        left, top, right, bottom = self.box
        return [(left, top), (right, top), (right, bottom), (left, bottom)]


def detection_input(picture: Image.Image) -> np.ndarray:
    """The picture as [1, 3, height, width] for the detector, sides multiples of 32."""
    scale = min(1.0, DETECTION_MAX_SIDE / max(picture.size))
    width, height = (_to_multiple(side * scale) for side in picture.size)
    return _normalised(picture.resize((width, height), Image.Resampling.BILINEAR))[np.newaxis]


def find_lines(probabilities: np.ndarray, size: tuple[int, int]) -> list[Line]:
    """Boxes around the lines of text, top to bottom.

    Args:
        probabilities: [height, width] as the detector gives them.
        size: width and height of the picture.
    """
    height, width = probabilities.shape
    lines = []
    for left, top, right, bottom in _components(probabilities > PIXEL_THRESHOLD):
        if min(right - left, bottom - top) < MIN_BOX_SIDE:
            continue
        if probabilities[top:bottom, left:right].mean() < BOX_THRESHOLD:
            continue
        w, h = right - left, bottom - top
        grow = w * h * UNCLIP_RATIO / (2 * (w + h))
        scale_x, scale_y = size[0] / width, size[1] / height
        box = (
            max(0, round((left - grow) * scale_x)),
            max(0, round((top - grow) * scale_y)),
            min(size[0], round((right + grow) * scale_x)),
            min(size[1], round((bottom + grow) * scale_y)),
        )
        lines.append(Line(box))
    return sorted(lines, key=lambda line: (line.box[1], line.box[0]))


def direction_input(crops: list[Image.Image]) -> np.ndarray:
    """The lines as [n, 3, 48, 192] for the direction model."""
    return np.stack([_line_image(crop, DIRECTION_WIDTH) for crop in crops])


def upright(crops: list[Image.Image], probabilities: np.ndarray) -> list[Image.Image]:
    """Turn round the lines that the model finds upside down; probabilities are [n, 2]."""
    return [
        crop.transpose(Image.Transpose.ROTATE_180) if row[1] > DIRECTION_THRESHOLD else crop
        for crop, row in zip(crops, probabilities)
    ]


def recognition_input(crops: list[Image.Image]) -> np.ndarray:
    """The lines as [n, 3, 48, width] for the recogniser, all as wide as the widest."""
    widest = max(crop.width / crop.height for crop in crops) * LINE_HEIGHT
    width = max(RECOGNITION_MIN_WIDTH, _to_multiple(widest, RECOGNITION_MULTIPLE))
    return np.stack([_line_image(crop, width) for crop in crops])


def read_characters(path: Path) -> list[str]:
    """The recogniser's classes: blank, the characters of its dictionary, space."""
    return ["", *path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), " "]


def decode_text(probabilities: np.ndarray, characters: list[str]) -> tuple[str, float]:
    """Text and mean confidence of one line: repeats and blanks fall away (CTC).

    Args:
        probabilities: [steps, classes].
    """
    classes = probabilities.argmax(axis=1)
    kept = (classes != 0) & np.insert(classes[1:] != classes[:-1], 0, True)
    if not kept.any():
        return "", 0.0
    text = "".join(characters[index] for index in classes[kept])
    return text, float(probabilities.max(axis=1)[kept].mean())


def _to_multiple(side: float, multiple: int = DETECTION_MULTIPLE) -> int:
    return max(multiple, round(side / multiple) * multiple)


def _normalised(picture: Image.Image) -> np.ndarray:
    """[3, height, width], blue first, -1 to 1."""
    pixels = np.asarray(picture.convert("RGB"), np.float32)[:, :, ::-1]
    return np.ascontiguousarray((pixels / 127.5 - 1).transpose(2, 0, 1))


def _line_image(crop: Image.Image, width: int) -> np.ndarray:
    """The line at the models' height, filled up with zeros on the right."""
    own = min(width, max(1, round(LINE_HEIGHT * crop.width / crop.height)))
    image = np.zeros((3, LINE_HEIGHT, width), np.float32)
    image[:, :, :own] = _normalised(crop.resize((own, LINE_HEIGHT), Image.Resampling.BILINEAR))
    return image


def _components(mask: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Bounding boxes (left, top, right, bottom) of the connected areas of a mask.

    Works on the runs of each row, a few thousand, not on the pixels.
    """
    parents: list[int] = []
    boxes: list[tuple[int, int, int, int]] = []

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    above: list[tuple[int, int, int]] = []  # start, stop, component of the runs one row up
    for y, row in enumerate(np.pad(mask, ((0, 0), (1, 1)))):
        edges = np.flatnonzero(row[1:] != row[:-1])
        runs = []
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist()):
            component = len(parents)
            parents.append(component)
            boxes.append((start, y, stop, y + 1))
            for other_start, other_stop, other in above:
                if other_start < stop and start < other_stop:
                    one, two = root(component), root(other)
                    if one != two:
                        parents[one] = two
                        boxes[two] = _union(boxes[one], boxes[two])
            runs.append((start, stop, component))
        above = runs
    return [boxes[index] for index in range(len(parents)) if parents[index] == index]


def _union(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    return min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])
