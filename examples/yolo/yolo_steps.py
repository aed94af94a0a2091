"""What happens before and after the detector; NumPy only.

Shared by the models of both variants, so that they cannot drift apart.
"""

import numpy as np

SIZE = 320  # the detector's input is SIZE x SIZE
CLASSES = ("red", "green", "blue")
SCORE_THRESHOLD = 0.5
IOU_THRESHOLD = 0.3
MAX_BOXES = 20
GREY = 114


def letterbox(image):
    """Fit a picture into the detector's square.

    Args:
        image: uint8 [height, width, 3], RGB.

    Returns:
        float32 [3, SIZE, SIZE] in 0 … 1, and float32 [3]: scale, left and top margin.
    """
    height, width = image.shape[:2]
    scale = SIZE / max(height, width)
    new_height, new_width = max(1, round(height * scale)), max(1, round(width * scale))
    rows = np.minimum((np.arange(new_height) / scale).astype(np.int64), height - 1)
    columns = np.minimum((np.arange(new_width) / scale).astype(np.int64), width - 1)
    top, left = (SIZE - new_height) // 2, (SIZE - new_width) // 2
    square = np.full((SIZE, SIZE, 3), GREY, np.uint8)
    square[top : top + new_height, left : left + new_width] = image[rows[:, None], columns]
    tensor = np.ascontiguousarray(square.transpose(2, 0, 1), np.float32) / np.float32(255)
    return tensor, np.array([scale, left, top], np.float32)


def find_boxes(predictions, placement):
    """Boxes of one picture.

    Args:
        predictions: float32 [4 + classes, anchors]: centre x, centre y, width, height, scores.
        placement: as `letterbox` returned it.

    Returns:
        float32 [MAX_BOXES, 6]: left, top, right, bottom in pixels of the picture, score, class;
        rows of -1 fill it up.
    """
    x, y, width, height = predictions[:4]
    scores = predictions[4:]
    kind = scores.argmax(axis=0)
    score = scores.max(axis=0)
    corners = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)
    kept = suppress(corners, score, kind)[:MAX_BOXES]
    scale, left, top = placement
    margins = np.array([left, top, left, top], np.float32)
    boxes = np.full((MAX_BOXES, 6), -1, np.float32)
    boxes[: len(kept), :4] = (corners[kept] - margins) / scale
    boxes[: len(kept), 4] = score[kept]
    boxes[: len(kept), 5] = kind[kept]
    return boxes


def suppress(corners, score, kind):
    """Indices of the boxes that stay, best first: non-maximum suppression within each class."""
    order = [index for index in np.argsort(-score, kind="stable") if score[index] > SCORE_THRESHOLD]
    kept = []
    for index in order:
        if all(
            kind[index] != kind[other] or overlap(corners[index], corners[other]) <= IOU_THRESHOLD
            for other in kept
        ):
            kept.append(index)
    return kept


def overlap(one, other):
    """Intersection over union of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return shared / (areas - shared)
