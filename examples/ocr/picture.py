"""A picture with text to try the OCR examples on, drawn with Pillow.

python examples/ocr/picture.py picture.png
"""

from __future__ import annotations

import sys

from PIL import Image, ImageDraw, ImageFont

LINES = [
    "Ascend inference server",
    "Invoice No. 2026-0417",
    "Total amount: 1,284.50",
    "Thank you for your visit!",
]


def draw_picture(lines: list[str] = LINES, upside_down: bool = False) -> Image.Image:
    """Black text on a light background, one line below the other."""
    picture = Image.new("RGB", (640, 60 + 70 * len(lines)), (245, 245, 240))
    pen = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=34)
    for index, line in enumerate(lines):
        pen.text((40, 40 + 70 * index), line, fill=(20, 20, 30), font=font)
    return picture.transpose(Image.Transpose.ROTATE_180) if upside_down else picture


if __name__ == "__main__":
    draw_picture().save(sys.argv[1] if len(sys.argv) > 1 else "picture.png")
