"""AIPP, the image preprocessing in front of a model: its settings, their wire form, the arithmetic.

Static AIPP has its settings in the model file, dynamic AIPP gets them before an execution, in an
input of their own: the structure `kAippDynamicPara` of the ATC user guide. Order of the steps:
crop, swaps, colour space conversion, mean and variance, padding. The last two settings are half
precision numbers in both.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMATS = {1: "YUV420SP_U8", 2: "XRGB8888_U8", 3: "RGB888_U8", 4: "YUV400_U8"}
NUMBERS = {name: number for number, name in FORMATS.items()}
_STORED_CHANNELS = {"YUV420SP_U8": 1, "XRGB8888_U8": 4, "RGB888_U8": 3, "YUV400_U8": 1}

_HEAD = struct.Struct("<B4b3x2i9h6x6B2x16x")
_IMAGE = struct.Struct("<4b4x12i4h8H16x")
_NO_CSC = (256, 0, 0, 0, 256, 0, 0, 0, 256)
# What atc fills in: YUV becomes BGR, anything else YUV.
_YUV_TO_BGR = (298, 516, 0, 298, -100, -208, 298, 0, 409)
_RGB_TO_YUV = (66, 129, 25, -38, -74, 112, 112, -94, -18)
_BIAS = (16, 128, 128)


@dataclass(frozen=True)
class ImageParams:
    """What may differ from image to image of a batch.

    Attributes:
        crop: x, y, width, height; None for all of the image.
        padding: top, bottom, left, right.
    """

    crop: tuple[int, int, int, int] | None = None
    padding: tuple[int, int, int, int] | None = None
    mean: tuple[int, ...] = (0, 0, 0, 0)
    minimum: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    var_reci: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class AippParams:
    """All settings.

    Attributes:
        width, height: of the source image; 0 in static AIPP for the model's own size.
        csc: matrix of the colour space conversion, None for none.
    """

    input_format: str
    width: int = 0
    height: int = 0
    csc: tuple[int, ...] | None = None
    output_bias: tuple[int, ...] = (0, 0, 0)
    input_bias: tuple[int, ...] = (0, 0, 0)
    rbuv_swap: bool = False
    ax_swap: bool = False
    images: list[ImageParams] = field(default_factory=lambda: [ImageParams()])

    def output_size(self, index: int) -> tuple[int, int]:
        """Height and width of image `index` behind AIPP."""
        params = self.images[index]
        height, width = self.height, self.width
        if params.crop is not None:
            width, height = params.crop[2:]
        if params.padding is not None:
            top, bottom, left, right = params.padding
            height, width = height + top + bottom, width + left + right
        return height, width

    @property
    def image_bytes(self) -> int:
        """Bytes of one source image."""
        return int(np.prod(self.image_dims(self.height, self.width)))

    def image_dims(self, height: int, width: int) -> list[int]:
        """Height, width and channels as stored; -1 stays -1."""
        if self.input_format == "YUV420SP_U8":
            height = height * 3 // 2 if height > 0 else -1
        return [height, width, _STORED_CHANNELS[self.input_format]]

    def encode(self) -> bytes:
        """The structure for the parameter input."""
        csc = self.csc or (0,) * 9
        head = _HEAD.pack(
            NUMBERS[self.input_format], self.csc is not None, self.rbuv_swap, self.ax_swap,
            len(self.images), self.width, self.height, *csc, *self.output_bias, *self.input_bias,
        )  # fmt: skip
        return head + b"".join(_encode_image(params) for params in self.images)


def encoded_bytes(batch: int) -> int:
    """Size of the structure."""
    return _HEAD.size + batch * _IMAGE.size


def _encode_image(params: ImageParams) -> bytes:
    halves = np.array((*params.minimum, *params.var_reci), np.float16).view(np.uint16).tolist()
    return _IMAGE.pack(
        params.crop is not None, 0, params.padding is not None, 0,
        *(params.crop or (0, 0, 0, 0)), 0, 0, 0, 0, *(params.padding or (0, 0, 0, 0)),
        *params.mean, *halves,
    )  # fmt: skip


def decode(content: bytes) -> AippParams:
    """The settings in a structure.

    Raises:
        ValueError: there are none, or damaged ones.
    """
    (
        number, csc, rbuv, ax, count, width, height, *rest,
    ) = _HEAD.unpack_from(content)  # fmt: skip
    if (
        number not in FORMATS
        or not {csc, rbuv, ax} <= {0, 1}
        or encoded_bytes(count) > len(content)
    ):
        raise ValueError("the parameters of dynamic AIPP were never set")
    images = [
        _decode_image(_IMAGE.unpack_from(content, _HEAD.size + index * _IMAGE.size))
        for index in range(count)
    ]
    return AippParams(
        FORMATS[number], width, height, tuple(rest[:9]) if csc else None, tuple(rest[9:12]),
        tuple(rest[12:15]), bool(rbuv), bool(ax), images,
    )  # fmt: skip


def _decode_image(values: Sequence[int]) -> ImageParams:
    halves = np.array(values[20:28], np.uint16).view(np.float16).astype(float).tolist()
    return ImageParams(
        (values[4], values[5], values[6], values[7]) if values[0] else None,
        (values[12], values[13], values[14], values[15]) if values[2] else None,
        tuple(values[16:20]), tuple(halves[:4]), tuple(halves[4:]),
    )  # fmt: skip


# The configuration file of atc.


def parse(text: str) -> list[dict[str, str]]:
    """Every `aipp_op { key: value … }` of the file."""
    blocks = re.findall(r"aipp_op\s*\{([^}]*)\}", text)
    pairs = re.compile(r"(\w+)\s*:\s*\"?([\w.+-]+)\"?")
    return [dict(pairs.findall(re.sub(r"#.*", "", block))) for block in blocks]


def from_config(config: Mapping[str, str]) -> AippParams:
    """The settings of static AIPP.

    Raises:
        KeyError: no or an unknown input_format.
        ValueError: a setting is no number.
    """
    if config.get("input_format") not in NUMBERS:
        raise KeyError("input_format")

    def is_on(key: str) -> bool:
        return config.get(key) == "true"

    def numbers(*keys: str, default: str = "0") -> list[float]:
        return [float(config.get(key, default)) for key in keys]

    def integers(*keys: str) -> list[int]:
        return [int(config.get(key, 0)) for key in keys]

    channels = range(4)
    crop = integers("load_start_pos_w", "load_start_pos_h", "crop_size_w", "crop_size_h")
    padding = integers(*(f"{s}_padding_size" for s in ("top", "bottom", "left", "right")))
    image = ImageParams(
        (crop[0], crop[1], crop[2], crop[3]) if is_on("crop") else None,
        (padding[0], padding[1], padding[2], padding[3]) if is_on("padding") else None,
        tuple(int(value) for value in numbers(*(f"mean_chn_{c}" for c in channels))),
        tuple(numbers(*(f"min_chn_{c}" for c in channels))),
        tuple(numbers(*(f"var_reci_chn_{c}" for c in channels), default="1")),
    )
    default = _YUV_TO_BGR if config["input_format"] == "YUV420SP_U8" else _RGB_TO_YUV
    matrix = [
        int(config.get(f"matrix_r{row}c{column}", default[3 * row + column]))
        for row in range(3)
        for column in range(3)
    ]
    width, height = integers("src_image_size_w", "src_image_size_h")
    return AippParams(
        config["input_format"], width, height,
        csc=tuple(matrix) if is_on("csc_switch") else None,
        output_bias=tuple(int(config.get(f"output_bias_{c}", _BIAS[c])) for c in range(3)),
        input_bias=tuple(int(config.get(f"input_bias_{c}", _BIAS[c])) for c in range(3)),
        rbuv_swap=is_on("rbuv_swap_switch"), ax_swap=is_on("ax_swap_switch"), images=[image],
    )  # fmt: skip


# Arithmetic.


def preprocess(data: NDArray[np.uint8], params: AippParams, channels: int) -> NDArray[np.float32]:
    """Images as stored, one after the other, to FP32 of layout NCHW.

    Args:
        data: uint8, as many images as `params.images` (or any number for one entry there).
        channels: of the model.

    Raises:
        ValueError: the images do not have what the settings say.
    """
    pixels = _channels(data, params)
    entries = params.images * len(pixels) if len(params.images) == 1 else params.images
    results = [
        _one(image, params, entry, channels)
        for image, entry in zip(pixels, entries[: len(pixels)], strict=True)
    ]
    return np.ascontiguousarray(np.stack(results))


def _channels(data: NDArray[np.uint8], params: AippParams) -> NDArray[np.uint8]:
    """[n, height, width, channel]."""
    height, width = params.height, params.width
    images = data.reshape(-1, *params.image_dims(height, width))
    if params.input_format != "YUV420SP_U8":
        return images
    luma = images[:, :height]
    chroma = images[:, height:].reshape(-1, height // 2, width // 2, 2)
    return np.concatenate([luma, chroma.repeat(2, axis=1).repeat(2, axis=2)], axis=-1)


def _one(
    image: NDArray[np.uint8], params: AippParams, entry: ImageParams, channels: int
) -> NDArray[np.float32]:
    if entry.crop is not None:
        x, y, width, height = entry.crop
        image = image[y : y + height, x : x + width]
    if params.ax_swap:
        image = np.roll(image, 1, axis=-1)  # RGBX to XRGB
    if image.shape[-1] == 4 and channels == 3:
        image = image[..., 1:]
    if params.rbuv_swap:
        order = [0, 2, 1] if params.input_format == "YUV420SP_U8" else [2, 1, 0]
        image = image[..., order]
    values = image.astype(np.int32)
    if params.csc is not None:
        # The input bias is for YUV that becomes RGB, the output bias for the other way.
        is_yuv = params.input_format == "YUV420SP_U8"
        matrix = np.array(params.csc, np.int32).reshape(3, 3)
        before = np.array(params.input_bias) if is_yuv else 0
        after = 0 if is_yuv else np.array(params.output_bias)
        values = np.clip(((values - before) @ matrix.T >> 8) + after, 0, 255)
    count = values.shape[-1]
    mean = np.array(entry.mean[:count], np.float32)
    low = np.array(entry.minimum[:count], np.float16).astype(np.float32)
    scale = np.array(entry.var_reci[:count], np.float16).astype(np.float32)
    normal = (values.astype(np.float32) - mean - low) * scale
    if entry.padding is not None:
        top, bottom, left, right = entry.padding
        normal = np.pad(normal, ((top, bottom), (left, right), (0, 0)))
    return normal.transpose(2, 0, 1)


def sized(params: AippParams, image_dims: Sequence[int]) -> AippParams:
    """Static settings with the size of the image that came, `[n, rows, width, channels]`."""
    rows, width = image_dims[1:3]
    height = rows * 2 // 3 if params.input_format == "YUV420SP_U8" else rows
    return replace(params, height=height, width=width)


def describe(params: AippParams) -> dict[str, Any]:
    """What `get_first_aipp_info` tells of static AIPP."""
    (image,) = params.images
    crop, padding = image.crop or (0, 0, 0, 0), image.padding or (0, 0, 0, 0)
    csc = params.csc or _NO_CSC
    matrix = {f"matrixR{row}C{column}": csc[3 * row + column]
              for row in range(3) for column in range(3)}  # fmt: skip
    channels = {
        f"{name}Chn{channel}": values[channel]
        for name, values in (
            ("mean", image.mean), ("min", image.minimum), ("varReci", image.var_reci),
        )
        for channel in range(4)
    }  # fmt: skip
    biases = {
        f"{name}Bias{index}": values[index]
        for name, values in (("output", params.output_bias), ("input", params.input_bias))
        for index in range(3)
    }
    return {
        "inputFormat": NUMBERS[params.input_format], "srcImageSizeW": params.width,
        "srcImageSizeH": params.height, "cscSwitch": int(params.csc is not None),
        "rbuvSwapSwitch": int(params.rbuv_swap), "axSwapSwitch": int(params.ax_swap),
        "cropSwitch": int(image.crop is not None), "loadStartPosW": crop[0],
        "loadStartPosH": crop[1], "cropSizeW": crop[2], "cropSizeH": crop[3],
        "paddingSwitch": int(image.padding is not None), "topPaddingSize": padding[0],
        "bottomPaddingSize": padding[1], "leftPaddingSize": padding[2],
        "rightPaddingSize": padding[3], **matrix, **channels, **biases,
        "shapeCount": 1, "outDims": [],
    }  # fmt: skip
