"""`acl.media.*`: JPEG and PNG files."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from npuserve.testing.simulator.binding import entry
from npuserve.testing.simulator.device import JPEGD, JPEGE, PNGD
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.image_files import (
    ImageInfo,
    decode_jpeg,
    decode_png,
    encode_jpeg,
    jpeg_info,
    png_info,
)
from npuserve.testing.simulator.media_desc import (
    INVALID_PARAM,
    JpegeConfig,
    PicDesc,
    dvpp_bytes,
)
from npuserve.testing.simulator.media_image import (
    MODE_JPEGD,
    MODE_JPEGE,
    MODE_PNGD,
    open_channel,
)
from npuserve.testing.simulator.media_place import (
    FORMAT_NOT_MATCH,
    Limits,
    Place,
    in_flight,
    place_of,
    submit,
)
from npuserve.testing.simulator.pictures import (
    LAYOUTS,
    Bytes,
    Picture,
    PixelFormat,
    Sampling,
    align_up,
    convert,
)

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

_LEAST, _MOST = (32, 32), (8192, 8192)
_NV = {PixelFormat.NV12, PixelFormat.NV21}
# Formats a file of a certain sampling can be decoded to besides NV12 and NV21.
SAME_SAMPLING = {
    Sampling(1, 1): (PixelFormat.YUV_SEMIPLANAR_444, PixelFormat.YVU_SEMIPLANAR_444),
    Sampling(2, 1): (PixelFormat.YUV_SEMIPLANAR_422, PixelFormat.YVU_SEMIPLANAR_422),
    Sampling(2, 2): (PixelFormat.NV12, PixelFormat.NV21),
    Sampling(1, 2): (PixelFormat.YUV_SEMIPLANAR_440, PixelFormat.YVU_SEMIPLANAR_440),
    None: (PixelFormat.YUV_400,),
}
_ENCODED = _NV | {
    PixelFormat.YUYV_PACKED_422, PixelFormat.UYVY_PACKED_422,
    PixelFormat.YVYU_PACKED_422, PixelFormat.VYUY_PACKED_422,
}  # fmt: skip
_ENCODER_INPUT = Limits(_LEAST, _MOST, (16, 1))
_RGB = {PixelFormat.RGB_888, PixelFormat.RGBA_8888}

# Sizes that predict_enc_size adds and rounds to.
_HEADER, _START, _UNIT = 640, 128, 2 << 20


def strides(runtime: Runtime) -> tuple[int, int]:
    """What the strides of a decoded picture are multiples of."""
    return (64, 16) if "310P" in runtime.options.soc_name else (128, 16)


def _check_limits(info: ImageInfo) -> None:
    if not (_LEAST[0] <= info.width <= _MOST[0] and _LEAST[1] <= info.height <= _MOST[1]):
        raise RefusedError(INVALID_PARAM, f"{info.width}x{info.height} is not 32x32 to 8192x8192")


def _host_file(runtime: Runtime, address: int, size: int) -> Bytes:
    if not address or not size:
        raise RefusedError(INVALID_PARAM, "no data")
    view: Bytes = runtime.host.view(address, size)
    return view


@entry("acl.media.dvpp_jpeg_get_image_info", "ki", failure=(0, 0, 0))
def jpeg_get_image_info(runtime: Runtime, address: int, size: int) -> tuple[int, int, int]:
    """Width, height and components of a file in host memory."""
    info = jpeg_info(_host_file(runtime, address, size))
    return info.width, info.height, info.components


@entry("acl.media.dvpp_jpeg_get_image_info_v2", "ki", failure=(0, 0, 0, 1000))
def jpeg_get_image_info_v2(runtime: Runtime, address: int, size: int) -> tuple[int, ...]:
    """The same and the format."""
    info = jpeg_info(_host_file(runtime, address, size))
    return info.width, info.height, info.components, info.jpeg_format


@entry("acl.media.dvpp_jpeg_predict_dec_size", "kii", failure=(0,))
def jpeg_predict_dec_size(runtime: Runtime, address: int, size: int, pixel_format: int) -> int:
    """Bytes to decode a file in host memory."""
    info = jpeg_info(_host_file(runtime, address, size))
    formats = SAME_SAMPLING.get(info.sampling, ())
    if pixel_format == PixelFormat.UNKNOWN and formats:
        pixel_format = formats[0]  # that of the file
    if pixel_format not in _NV and pixel_format not in formats:
        raise RefusedError(FORMAT_NOT_MATCH, f"format {pixel_format} does not fit the file")
    _check_limits(info)
    across, down = strides(runtime)
    layout = LAYOUTS[PixelFormat(pixel_format)]
    return layout.size(align_up(info.width, across), align_up(info.height, down))


@entry("acl.media.dvpp_jpeg_decode_async", "kkikk")
def jpeg_decode(
    runtime: Runtime, channel: int, address: int, size: int, target: int, stream: int
) -> None:
    """Decode a file in device memory."""
    open_channel(runtime, channel, MODE_JPEGD)
    result = runtime.find(target, PicDesc)
    limits = Limits(_LEAST, _MOST, strides(runtime))
    place = _rounded(runtime, result, limits)
    dvpp_bytes(runtime, address, size)
    name = f"decode {size} bytes"

    def work() -> None:
        data = in_flight(runtime, address, size)
        info = jpeg_info(data)
        if result.format not in _NV and result.format not in SAME_SAMPLING.get(info.sampling, ()):
            raise RefusedError(FORMAT_NOT_MATCH, f"format {result.format} does not fit the file")
        _check_limits(info)
        if (align_up(info.width, 2), align_up(info.height, 2)) != (place.width, place.height):
            raise RefusedError(
                INVALID_PARAM,
                f"the file is {info.width}x{info.height}, not {place.width}x{place.height}",
            )
        place.write(runtime, convert(_even(decode_jpeg(data)), place.layout))

    submit(runtime, runtime.stream(stream), JPEGD, name, place.pixels, work, [result])


def _rounded(runtime: Runtime, desc: PicDesc, limits: Limits) -> Place:
    """Where a picture goes whose sides may be odd in the description: the hardware rounds up."""
    even = PicDesc(
        desc.data, desc.size, desc.format, align_up(desc.width, 2), align_up(desc.height, 2),
        desc.width_stride, desc.height_stride,
    )  # fmt: skip
    return place_of(runtime, even, limits, _NV.union(*SAME_SAMPLING.values()))


def _even(picture: Picture) -> Picture:
    """A picture with its last column and row repeated where sides are odd."""
    width, height = picture.size
    padding = ((0, height % 2), (0, width % 2), (0, 0))
    return Picture(tuple(np.pad(plane, padding, mode="edge") for plane in picture.planes))


@entry("acl.media.dvpp_jpeg_predict_enc_size", "kk", failure=(0,))
def jpeg_predict_enc_size(runtime: Runtime, source: int, config: int) -> int:
    """Bytes to encode a picture."""
    desc = runtime.find(source, PicDesc)
    runtime.find(config, JpegeConfig)
    return align_up(_encoder_input(runtime, desc).size + _HEADER + _START, _UNIT)


def _encoder_input(runtime: Runtime, desc: PicDesc) -> Place:
    place = place_of(runtime, desc, _ENCODER_INPUT, _ENCODED)
    rows = place.stride[1]
    if rows != place.height and rows % 16:
        raise RefusedError(
            INVALID_PARAM, f"height stride {rows}: {place.height} or a multiple of 16 beyond"
        )
    return place


@entry("acl.media.dvpp_jpeg_encode_async", "kkkkkk")
def jpeg_encode(
    runtime: Runtime, channel: int, source: int, address: int, size_address: int, config: int,
    stream: int,
) -> None:  # fmt: skip
    """Encode a picture; `size_address` (host) holds the room for it, later the file's size."""
    open_channel(runtime, channel, MODE_JPEGE)
    desc = runtime.find(source, PicDesc)
    place = _encoder_input(runtime, desc)
    level = runtime.find(config, JpegeConfig).level
    if not size_address:
        raise RefusedError(INVALID_PARAM, "the address of the size is null")
    (room,) = struct.unpack("<I", runtime.host.view(size_address, 4).tobytes())
    dvpp_bytes(runtime, address, room)

    def work() -> None:
        data = np.frombuffer(encode_jpeg(place.read(runtime), level), np.uint8)
        if data.size > room:
            raise RefusedError(INVALID_PARAM, f"{data.size} bytes of JPEG into {room}")
        in_flight(runtime, address, data.size)[:] = data
        size = np.frombuffer(struct.pack("<I", data.size), np.uint8)
        runtime.host.view(size_address, 4)[:] = size

    submit(runtime, runtime.stream(stream), JPEGE, "encode", place.pixels, work, [desc])


# PNG.


@entry("acl.media.dvpp_png_get_image_info", "ki", failure=(0, 0, 0))
def png_get_image_info(runtime: Runtime, address: int, size: int) -> tuple[int, int, int]:
    """Width, height and components of a file in host memory."""
    info = png_info(_host_file(runtime, address, size))
    return info.width, info.height, info.components


@entry("acl.media.dvpp_png_predict_dec_size", "kii", failure=(0,))
def png_predict_dec_size(runtime: Runtime, address: int, size: int, pixel_format: int) -> int:
    """Bytes to decode a file in host memory."""
    info = png_info(_host_file(runtime, address, size))
    if pixel_format not in _RGB:
        raise RefusedError(FORMAT_NOT_MATCH, f"format {pixel_format}: RGB or RGBA")
    layout = LAYOUTS[PixelFormat(pixel_format)]
    return layout.size(align_up(layout.row_bytes(info.width), 128), align_up(info.height, 16))


@entry("acl.media.dvpp_png_decode_async", "kkikk")
def png_decode(
    runtime: Runtime, channel: int, address: int, size: int, target: int, stream: int
) -> None:
    """Decode a file in device memory."""
    open_channel(runtime, channel, MODE_PNGD)
    result = runtime.find(target, PicDesc)
    place = place_of(runtime, result, Limits(_LEAST, (4096, 4096), (128, 16)), _RGB)
    dvpp_bytes(runtime, address, size)

    def work() -> None:
        data = in_flight(runtime, address, size)
        pixels = decode_png(data, alpha=len(place.layout.order) == 4)
        if pixels.shape[:2] != (place.height, place.width):
            raise RefusedError(INVALID_PARAM, f"the file is {pixels.shape[1]}x{pixels.shape[0]}")
        _, rows = place.stride
        view = in_flight(runtime, place.address, place.size).reshape(rows, -1)
        view[: place.height, : place.layout.row_bytes(place.width)] = pixels.reshape(
            place.height, -1
        )

    name = f"decode {size} bytes"
    submit(runtime, runtime.stream(stream), PNGD, name, place.pixels, work, [result])
