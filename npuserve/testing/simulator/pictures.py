"""What the image hardware does to pixels: formats in memory, crop, resize, paste, colour.

Pure: bytes and numbers in, arrays out. A picture is its planes, whatever its format in memory:
luma `[h, w, 1]` and chroma `[h / down, w / across, 2]` (U, V), or one plane `[h, w, 3]` of RGB.

Source: acldvppPixelFormat and the VPC constraints of the media processing reference. How the
hardware rounds is not published; here results are those of the formulas below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class PixelFormat(IntEnum):
    """acldvppPixelFormat, and hi_pixel_format, which has the same numbers."""

    YUV_400 = 0
    NV12 = 1
    NV21 = 2
    YUV_SEMIPLANAR_422 = 3
    YVU_SEMIPLANAR_422 = 4
    YUV_SEMIPLANAR_444 = 5
    YVU_SEMIPLANAR_444 = 6
    YUYV_PACKED_422 = 7
    UYVY_PACKED_422 = 8
    YVYU_PACKED_422 = 9
    VYUY_PACKED_422 = 10
    YUV_PACKED_444 = 11
    RGB_888 = 12
    BGR_888 = 13
    ARGB_8888 = 14
    ABGR_8888 = 15
    RGBA_8888 = 16
    BGRA_8888 = 17
    YUV_SEMIPLANAR_440 = 1000
    YVU_SEMIPLANAR_440 = 1001
    UNKNOWN = 10000


class Sampling(NamedTuple):
    """Pixels that share a chroma sample."""

    across: int
    down: int


@dataclass(frozen=True)
class Layout:
    """How a format lies in memory.

    Attributes:
        order: components of a pixel (of two pixels in packed 4:2:2) in the first plane.
        sampling: of the chroma; None for RGB and grey.
        chroma: order of U and V in a plane of their own; "" when there is none.
    """

    order: str
    sampling: Sampling | None = None
    chroma: str = ""

    @property
    def is_rgb(self) -> bool:
        """Whether the colours are RGB."""
        return "r" in self.order

    @property
    def is_pair(self) -> bool:
        """Whether two pixels make a group, as in packed 4:2:2."""
        return self.order.count("y") == 2

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of the first plane, without padding."""
        return width * len(self.order) // (2 if self.is_pair else 1)

    def size(self, width_stride: int, height_stride: int) -> int:
        """Bytes of a picture."""
        plane = width_stride * height_stride
        if not self.chroma or self.sampling is None:
            return plane
        return plane + 2 * plane // (self.sampling.across * self.sampling.down)

    @property
    def even(self) -> tuple[int, int]:
        """What width and height have to be multiples of."""
        return self.sampling or (1, 1)


_FULL, _HALF, _QUARTER, _TALL = Sampling(1, 1), Sampling(2, 1), Sampling(2, 2), Sampling(1, 2)

LAYOUTS = {
    PixelFormat.YUV_400: Layout("y"),
    PixelFormat.NV12: Layout("y", _QUARTER, "uv"),
    PixelFormat.NV21: Layout("y", _QUARTER, "vu"),
    PixelFormat.YUV_SEMIPLANAR_422: Layout("y", _HALF, "uv"),
    PixelFormat.YVU_SEMIPLANAR_422: Layout("y", _HALF, "vu"),
    PixelFormat.YUV_SEMIPLANAR_444: Layout("y", _FULL, "uv"),
    PixelFormat.YVU_SEMIPLANAR_444: Layout("y", _FULL, "vu"),
    PixelFormat.YUV_SEMIPLANAR_440: Layout("y", _TALL, "uv"),
    PixelFormat.YVU_SEMIPLANAR_440: Layout("y", _TALL, "vu"),
    PixelFormat.YUYV_PACKED_422: Layout("yuyv", _HALF),
    PixelFormat.UYVY_PACKED_422: Layout("uyvy", _HALF),
    PixelFormat.YVYU_PACKED_422: Layout("yvyu", _HALF),
    PixelFormat.VYUY_PACKED_422: Layout("vyuy", _HALF),
    PixelFormat.YUV_PACKED_444: Layout("yuv", _FULL),
    PixelFormat.RGB_888: Layout("rgb"),
    PixelFormat.BGR_888: Layout("bgr"),
    PixelFormat.ARGB_8888: Layout("argb"),
    PixelFormat.ABGR_8888: Layout("abgr"),
    PixelFormat.RGBA_8888: Layout("rgba"),
    PixelFormat.BGRA_8888: Layout("bgra"),
}


def align_up(value: int, unit: int) -> int:
    """The next multiple."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Picture:
    """The planes of a picture; see the module."""

    planes: tuple[Bytes, ...]
    is_rgb: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)."""
        height, width = self.planes[0].shape[:2]
        return width, height

    def sampling_of(self, plane: Bytes) -> Sampling:
        """How much smaller a plane is than the picture."""
        height, width = self.planes[0].shape[:2]
        return Sampling(-(-width // plane.shape[1]), -(-height // plane.shape[0]))


class Area(NamedTuple):
    """A rectangle; right and bottom belong to it."""

    left: int
    right: int
    top: int
    bottom: int

    @property
    def width(self) -> int:
        """Columns."""
        return self.right - self.left + 1

    @property
    def height(self) -> int:
        """Rows."""
        return self.bottom - self.top + 1

    def slices(self, sampling: Sampling) -> tuple[slice, slice]:
        """Rows and columns of a plane."""
        across, down = sampling
        return (
            slice(self.top // down, -(-(self.bottom + 1) // down)),
            slice(self.left // across, -(-(self.right + 1) // across)),
        )


def read(data: Bytes, layout: Layout, width: int, height: int, stride: tuple[int, int]) -> Picture:
    """The picture in memory; `stride` is (bytes of a row, rows)."""
    rows = data[: stride[0] * stride[1]].reshape(stride[1], stride[0])
    pixels = rows[:height, : layout.row_bytes(width)]
    if layout.is_pair:
        groups = pixels.reshape(height, width // 2, 4)
        luma = groups[..., [i for i, name in enumerate(layout.order) if name == "y"]]
        chroma = groups[..., [layout.order.index(name) for name in "uv"]]
        return Picture((luma.reshape(height, width, 1), chroma))
    components = pixels.reshape(height, width, len(layout.order))
    if layout.is_rgb:
        return Picture((components[..., [layout.order.index(name) for name in "rgb"]],), True)
    if len(layout.order) > 1:
        return Picture((components[..., :1], components[..., 1:]))
    if not layout.chroma or layout.sampling is None:
        return Picture((components.copy(),))
    samples = _chroma_plane(data, layout.sampling, stride)[
        : -(-height // layout.sampling.down), : -(-width // layout.sampling.across)
    ]
    chroma = samples[..., [layout.chroma.index(name) for name in "uv"]]
    return Picture((components.copy(), chroma))


def _chroma_plane(data: Bytes, sampling: Sampling, stride: tuple[int, int]) -> Bytes:
    """A view `[rows, columns, 2]` of what follows the luma."""
    start = stride[0] * stride[1]
    rows, columns = stride[1] // sampling.down, stride[0] // sampling.across
    return data[start : start + 2 * rows * columns].reshape(rows, columns, 2)


def write(data: Bytes, layout: Layout, picture: Picture, stride: tuple[int, int]) -> None:
    """Put a picture of the layout's own colours and sampling into memory; padding stays."""
    width, height = picture.size
    rows = data[: stride[0] * stride[1]].reshape(stride[1], stride[0])
    target = rows[:height, : layout.row_bytes(width)]
    first = picture.planes[0]
    if layout.is_pair:
        groups = np.empty((height, width // 2, 4), np.uint8)
        groups[..., [i for i, name in enumerate(layout.order) if name == "y"]] = first.reshape(
            height, width // 2, 2
        )
        groups[..., [layout.order.index(name) for name in "uv"]] = picture.planes[1]
        target[:] = groups.reshape(height, -1)
    elif layout.is_rgb:
        pixels = np.full((height, width, len(layout.order)), 255, np.uint8)
        pixels[..., [layout.order.index(name) for name in "rgb"]] = first
        target[:] = pixels.reshape(height, -1)
    elif len(layout.order) > 1:
        target[:] = np.concatenate(picture.planes, axis=2).reshape(height, -1)
    else:
        target[:] = first[..., 0]
    if layout.chroma and layout.sampling is not None:
        chroma = picture.planes[1][..., ["uv".index(name) for name in layout.chroma]]
        _chroma_plane(data, layout.sampling, stride)[: chroma.shape[0], : chroma.shape[1]] = chroma


# Geometry.


def crop(picture: Picture, area: Area) -> Picture:
    """A part of a picture."""
    planes = tuple(plane[area.slices(picture.sampling_of(plane))] for plane in picture.planes)
    return Picture(planes, picture.is_rgb)


def paste(target: Picture, picture: Picture, area: Area) -> None:
    """Put a picture of the area's size over a part of another one."""
    for below, above in zip(target.planes, picture.planes, strict=True):
        below[area.slices(target.sampling_of(below))] = above


def resize(picture: Picture, width: int, height: int, interpolation: int = 0) -> Picture:
    """Every plane scaled.

    Args:
        picture: is not changed.
        width: of the result.
        height: of the result.
        interpolation: 0 and 1 bilinear around pixel centres, 2 and 4 nearest, 3 bilinear from
            the corner.
    """
    if picture.size == (width, height):
        return picture
    planes = []
    for plane in picture.planes:
        across, down = picture.sampling_of(plane)
        planes.append(_scale(plane, -(-height // down), -(-width // across), interpolation))
    return Picture(tuple(planes), picture.is_rgb)


def _scale(plane: Bytes, height: int, width: int, interpolation: int) -> Bytes:
    if interpolation in (2, 4):
        rows = np.arange(height) * plane.shape[0] // height
        columns = np.arange(width) * plane.shape[1] // width
        nearest: Bytes = plane[rows][:, columns]
        return nearest
    offset = 0.0 if interpolation == 3 else 0.5
    low, high, part = _positions(plane.shape[0], height, offset)
    values = plane.astype(np.float32)
    between = values[low] + (values[high] - values[low]) * part[:, None, None]
    low, high, part = _positions(plane.shape[1], width, offset)
    result = between[:, low] + (between[:, high] - between[:, low]) * part[:, None]
    return _to_bytes(result)


def _positions(old: int, new: int, offset: float) -> tuple[Any, Any, NDArray[np.float32]]:
    """For each new sample the two old ones beside it and how far it is from the first."""
    exact = np.clip((np.arange(new) + offset) * (old / new) - offset, 0, old - 1)
    low = np.floor(exact).astype(np.intp)
    return low, np.minimum(low + 1, old - 1), (exact - low).astype(np.float32)


def _to_bytes(values: NDArray[Any]) -> Bytes:
    rounded: Bytes = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return rounded


def halve(picture: Picture) -> Picture:
    """One step of a Gaussian pyramid, kernel 1 4 6 4 1, edges mirrored."""
    kernel = np.array([1, 4, 6, 4, 1], np.float32) / 16
    planes = []
    for plane in picture.planes:
        padded = np.pad(plane.astype(np.float32), ((2, 2), (2, 2), (0, 0)), mode="reflect")
        rows, columns = plane.shape[:2]
        down = sum(kernel[i] * padded[i : i + rows : 2] for i in range(5))
        across = sum(kernel[i] * np.asarray(down)[:, i : i + columns : 2] for i in range(5))
        planes.append(_to_bytes(np.asarray(across)))
    return Picture(tuple(planes), picture.is_rgb)


class Border(NamedTuple):
    """What to put around a picture; acldvppBorderType."""

    kind: int
    top: int
    bottom: int
    left: int
    right: int
    values: tuple[float, ...]


_BORDER_MODES = {1: "edge", 2: "symmetric", 3: "reflect"}


def surround(picture: Picture, border: Border) -> Picture:
    """A picture with a border: 0 constant, 1 edge repeated, 2 mirrored, 3 mirrored at pixels."""
    planes = []
    channel = 0
    for plane in picture.planes:
        across, down = picture.sampling_of(plane)
        widths = [
            (border.top // down, border.bottom // down),
            (border.left // across, border.right // across),
        ]
        if border.kind:
            mode: Any = _BORDER_MODES[border.kind]
            planes.append(np.pad(plane, [*widths, (0, 0)], mode=mode))
        else:
            values = border.values[channel : channel + plane.shape[2]]
            planes.append(
                np.stack(
                    [
                        np.pad(plane[..., i], widths, constant_values=int(value))
                        for i, value in enumerate(values)
                    ],
                    axis=-1,
                )
            )
        channel += plane.shape[2]
    return Picture(tuple(planes), picture.is_rgb)


# Colour.


@dataclass(frozen=True)
class ColourMatrix:
    """One of acldvppCscMatrix: weights of red and blue in luma; narrow range is 16 to 235."""

    red: float
    blue: float
    narrow: bool

    def to_rgb(self, luma: NDArray[Any], chroma: NDArray[Any]) -> Bytes:
        """RGB `[h, w, 3]` of luma `[h, w, 1]` and chroma of every pixel `[h, w, 2]`."""
        y, c = luma[..., 0].astype(np.float32), chroma.astype(np.float32) - 128
        if self.narrow:
            y, c = (y - 16) * (255 / 219), c * (255 / 224)
        u, v = c[..., 0], c[..., 1]
        red = y + 2 * (1 - self.red) * v
        blue = y + 2 * (1 - self.blue) * u
        green = (y - self.red * red - self.blue * blue) / (1 - self.red - self.blue)
        return _to_bytes(np.stack([red, green, blue], axis=-1))

    def to_yuv(self, rgb: Bytes) -> tuple[Bytes, NDArray[np.float32]]:
        """Luma `[h, w, 1]` and chroma of every pixel `[h, w, 2]`, not rounded yet."""
        red, green, blue = np.moveaxis(rgb.astype(np.float32), -1, 0)
        y = self.red * red + (1 - self.red - self.blue) * green + self.blue * blue
        u, v = (blue - y) / (2 * (1 - self.blue)), (red - y) / (2 * (1 - self.red))
        chroma = np.stack([u, v], axis=-1)
        if self.narrow:
            y, chroma = y * (219 / 255) + 16, chroma * (224 / 255)
        return _to_bytes(y[..., None]), chroma + 128


MATRICES = [
    ColourMatrix(red, blue, narrow)
    for red, blue in ((0.299, 0.114), (0.2126, 0.0722), (0.2627, 0.0593))  # BT.601, 709, 2020
    for narrow in (False, True)
]


def convert(picture: Picture, layout: Layout, matrix: ColourMatrix = MATRICES[0]) -> Picture:
    """The picture in the colours and sampling of a format."""
    if layout.is_rgb:
        if picture.is_rgb:
            return picture
        return Picture((matrix.to_rgb(picture.planes[0], _every_pixel(picture)),), True)
    if not picture.is_rgb and layout.sampling is None:
        return Picture(picture.planes[:1])
    if not picture.is_rgb and len(picture.planes) > 1:
        if picture.sampling_of(picture.planes[1]) == layout.sampling:
            return picture
        luma, chroma = picture.planes[0], _every_pixel(picture).astype(np.float32)
    elif picture.is_rgb:
        luma, chroma = matrix.to_yuv(picture.planes[0])
    else:
        luma = picture.planes[0]
        chroma = np.full((*luma.shape[:2], 2), 128, np.float32)
    if layout.sampling is None:
        return Picture((luma,))
    return Picture((luma, _to_bytes(_mean(chroma, layout.sampling))))


def _every_pixel(picture: Picture) -> Bytes:
    """Chroma repeated for every pixel; grey where there is none."""
    width, height = picture.size
    if len(picture.planes) == 1:
        return np.full((height, width, 2), 128, np.uint8)
    across, down = picture.sampling_of(picture.planes[1])
    return picture.planes[1].repeat(down, axis=0).repeat(across, axis=1)[:height, :width]


def _mean(chroma: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float32]:
    """Means of the samples that are to share one; edges are repeated."""
    across, down = sampling
    height, width = chroma.shape[:2]
    padded = np.pad(chroma, ((0, -height % down), (0, -width % across), (0, 0)), mode="edge")
    blocks = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // across, across, 2)
    means: NDArray[np.float32] = blocks.mean(axis=(1, 3))
    return means
