"""Image processing, JPEG and PNG of the simulated acl.media: the pixels, against other means."""

from __future__ import annotations

import importlib
import io
import struct
from collections.abc import Iterator
from math import floor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.media import (
    BGR,
    GREY,
    NV12,
    NV21,
    RGB,
    Bytes,
    Media,
    align,
    jpeg,
    noise,
    photo,
)


@pytest.fixture
def media(media: Media, machine: Runtime) -> Iterator[Media]:
    """A channel; nothing wrong was noted at the end."""
    yield media
    assert machine.violations == []


def nv12(width: int, height: int) -> tuple[bytes, Bytes, Bytes]:
    """Random content of a picture without padding, its luma and its chroma."""
    luma, chroma = noise(height, width), noise(height // 2 + 1, width)[1:]
    return luma.tobytes() + chroma.tobytes(), luma, chroma.reshape(height // 2, width // 2, 2)


def bilinear(plane: Bytes, width: int, height: int, centre: float) -> Bytes:
    """Scaled one sample after the other, by the formula of a textbook."""
    rows, columns = plane.shape[:2]
    result = np.zeros((height, width, *plane.shape[2:]), np.uint8)
    for y in range(height):
        for x in range(width):
            v = min(max((y + centre) * rows / height - centre, 0), rows - 1)
            u = min(max((x + centre) * columns / width - centre, 0), columns - 1)
            top, left = floor(v), floor(u)
            bottom, right = min(top + 1, rows - 1), min(left + 1, columns - 1)
            a, b = v - top, u - left
            value = (
                (1 - a) * (1 - b) * plane[top, left].astype(float)
                + (1 - a) * b * plane[top, right]
                + a * (1 - b) * plane[bottom, left]
                + a * b * plane[bottom, right]
            )
            result[y, x] = np.rint(value)
    return result


@pytest.mark.parametrize(("interpolation", "centre"), [(0, 0.5), (1, 0.5), (3, 0.0)])
@pytest.mark.parametrize("size", [(48, 20), (96, 60)])
def test_bilinear_resize(
    media: Media, interpolation: int, centre: float, size: tuple[int, int]
) -> None:
    """Luma and chroma each, down and up."""
    data, luma, chroma = nv12(64, 40)
    source, target = media.picture(data, 64, 40), media.empty(*size)
    assert media.media.dvpp_set_resize_config_interpolation(media.config, interpolation) == 0
    assert media.media.dvpp_get_resize_config_interpolation(media.config) == interpolation
    ret = media.media.dvpp_vpc_resize_async(
        media.channel, source.desc, target.desc, media.config, media.stream
    )
    assert (ret, media.wait()) == (0, 0)
    width, height = size
    seen = media.planes(target, width, height)
    expected = (
        bilinear(luma, width, height, centre),
        bilinear(chroma, width // 2, height // 2, centre),
    )
    for ours, theirs in zip(seen, expected, strict=True):
        assert np.abs(ours.astype(int) - theirs).max() <= 1  # float32 against float64


@pytest.mark.parametrize("interpolation", [2, 4])
def test_nearest_resize_repeats_samples(media: Media, interpolation: int) -> None:
    """Twice as large: every sample twice in both directions."""
    data, luma, chroma = nv12(64, 40)
    source, target = media.picture(data, 64, 40), media.empty(128, 80)
    media.media.dvpp_set_resize_config_interpolation(media.config, interpolation)
    ret = media.media.dvpp_vpc_resize_async(
        media.channel, source.desc, target.desc, media.config, media.stream
    )
    assert (ret, media.wait()) == (0, 0)
    seen_luma, seen_chroma = media.planes(target, 128, 80)
    np.testing.assert_array_equal(seen_luma, luma.repeat(2, 0).repeat(2, 1))
    np.testing.assert_array_equal(seen_chroma, chroma.repeat(2, 0).repeat(2, 1))


def test_padding_is_neither_read_nor_written(media: Media) -> None:
    """A picture of 36 columns in rows of 48 bytes."""
    luma, chroma = noise(20, 48), noise(10, 48)
    source = media.picture(luma.tobytes() + chroma.tobytes(), 36, 20)
    target = media.empty(36, 20)
    ret = media.media.dvpp_vpc_resize_async(
        media.channel, source.desc, target.desc, media.config, media.stream
    )
    assert (ret, media.wait()) == (0, 0)
    data = media.download(target.address, target.size).reshape(30, 48)
    np.testing.assert_array_equal(data[:, :36], np.concatenate([luma, chroma])[:, :36])
    assert (data[:, 36:] == 0x11).all()


def test_crop(media: Media) -> None:
    """The part as it is when the output is as large."""
    data, luma, chroma = nv12(64, 40)
    source, target = media.picture(data, 64, 40), media.empty(32, 20)
    ret = media.media.dvpp_vpc_crop_async(
        media.channel, source.desc, target.desc, media.area(10, 41, 6, 25), media.stream
    )
    assert (ret, media.wait()) == (0, 0)
    seen_luma, seen_chroma = media.planes(target, 32, 20)
    np.testing.assert_array_equal(seen_luma, luma[6:26, 10:42])
    np.testing.assert_array_equal(seen_chroma, chroma[3:13, 5:21])


def test_crop_and_paste_leaves_the_rest(media: Media) -> None:
    """Only the paste area changes."""
    data, luma, chroma = nv12(64, 40)
    source, target = media.picture(data, 64, 40), media.empty(80, 60)
    ret = media.media.dvpp_vpc_crop_and_paste_async(
        media.channel, source.desc, target.desc,
        media.area(0, 31, 0, 19), media.area(32, 63, 10, 29), media.stream,
    )  # fmt: skip
    assert (ret, media.wait()) == (0, 0)
    expected_luma, expected_chroma = np.full((60, 80), 0x11), np.full((30, 40, 2), 0x11)
    expected_luma[10:30, 32:64] = luma[:20, :32]
    expected_chroma[5:15, 16:32] = chroma[:10, :16]
    seen_luma, seen_chroma = media.planes(target, 80, 60)
    np.testing.assert_array_equal(seen_luma, expected_luma)
    np.testing.assert_array_equal(seen_chroma, expected_chroma)


def test_crop_resize_and_paste(media: Media) -> None:
    """The part scaled by nearest neighbours to the paste area."""
    data, luma, _ = nv12(64, 40)
    source, target = media.picture(data, 64, 40), media.empty(64, 40)
    media.media.dvpp_set_resize_config_interpolation(media.config, 2)
    ret = media.media.dvpp_vpc_crop_resize_paste_async(
        media.channel, source.desc, target.desc,
        media.area(0, 15, 0, 9), media.area(0, 31, 0, 19), media.config, media.stream,
    )  # fmt: skip
    assert (ret, media.wait()) == (0, 0)
    seen, _ = media.planes(target, 32, 20)
    np.testing.assert_array_equal(seen, luma[:10, :16].repeat(2, 0).repeat(2, 1))
    target = media.empty(32, 20)
    ret = media.media.dvpp_vpc_crop_resize_async(
        media.channel, source.desc, target.desc, media.area(0, 15, 0, 9), media.config,
        media.stream,
    )  # fmt: skip
    assert (ret, media.wait()) == (0, 0)
    np.testing.assert_array_equal(media.planes(target, 32, 20)[0], seen)


@pytest.mark.parametrize(("pixel_format", "order"), [(RGB, [0, 1, 2]), (BGR, [2, 1, 0])])
def test_colours_are_those_of_jpeg(media: Media, pixel_format: int, order: list[int]) -> None:
    """NV12 to RGB as Pillow converts YCbCr, for chroma repeated over four pixels."""
    data, luma, chroma = nv12(64, 40)
    source, target = media.picture(data, 64, 40), media.empty(64, 40, pixel_format)
    ret = media.media.dvpp_vpc_convert_color_async(
        media.channel, source.desc, target.desc, media.stream
    )
    assert (ret, media.wait()) == (0, 0)
    full = np.concatenate([luma[..., None], chroma.repeat(2, 0).repeat(2, 1)], 2)
    expected = np.asarray(Image.frombytes("YCbCr", (64, 40), full.tobytes()).convert("RGB"))
    seen = media.pixels(target, 64, 40)[..., order]
    assert np.abs(seen.astype(int) - expected).max() <= 1


def test_rgb_to_yuv(media: Media) -> None:
    """The other way: luma of each pixel, chroma as the mean of four."""
    pixels = photo(64, 40)
    source = media.picture(pixels.tobytes(), 64, 40, RGB)
    target = media.empty(64, 40, NV21)
    ret = media.media.dvpp_vpc_convert_color_async(
        media.channel, source.desc, target.desc, media.stream
    )
    assert (ret, media.wait()) == (0, 0)
    expected = np.asarray(Image.fromarray(pixels).convert("YCbCr")).astype(float)
    luma, chroma = media.planes(target, 64, 40)
    assert np.abs(luma - expected[..., 0]).max() <= 1
    means = expected[..., [2, 1]].reshape(20, 2, 32, 2, 2).mean(axis=(1, 3))  # V before U
    assert np.abs(chroma - means).max() <= 1


@pytest.mark.parametrize(
    ("matrix", "yuv"),
    [(0, (76, 85, 255)), (1, (81, 90, 240)), (2, (54, 99, 255)), (3, (63, 102, 240))],
)
def test_colour_matrices(media: Media, matrix: int, yuv: tuple[int, int, int]) -> None:
    """Pure red in BT.601 and BT.709, full and narrow range, and its way back."""
    channel = media.channel
    assert media.media.dvpp_set_channel_desc_param(channel, 0, matrix) == (channel, 0)
    assert media.media.dvpp_get_channel_desc_param(channel, 0) == (4, matrix, 0)
    red = np.tile(np.array([255, 0, 0], np.uint8), (40, 64, 1))
    source, target = media.picture(red.tobytes(), 64, 40, RGB), media.empty(64, 40)
    for one, other in ((source, target), (target, source)):
        ret = media.media.dvpp_vpc_convert_color_async(channel, one.desc, other.desc, media.stream)
        assert (ret, media.wait()) == (0, 0)
    luma, chroma = media.planes(target, 64, 40)
    seen = [int(luma[0, 0]), *map(int, chroma[0, 0])]
    assert np.abs(np.array(seen) - yuv).max() <= 1
    assert np.abs(media.pixels(source, 64, 40).astype(int) - red).max() <= 2


PACKED = [(7, "yuyv"), (8, "uyvy"), (9, "yvyu"), (10, "vyuy")]


@pytest.mark.parametrize(("pixel_format", "order"), PACKED)
def test_packed_input(media: Media, pixel_format: int, order: str) -> None:
    """Two pixels share U and V; 4:2:2 to 4:2:0 is a mean of two rows."""
    data = noise(40, 128)
    groups = data.reshape(40, 32, 4)
    source = media.picture(data.tobytes(), 64, 40, pixel_format, stride=(128, 40))
    target = media.empty(64, 40)
    ret = media.media.dvpp_vpc_convert_color_async(
        media.channel, source.desc, target.desc, media.stream
    )
    assert (ret, media.wait()) == (0, 0)
    luma, chroma = media.planes(target, 64, 40)
    first, second = (i for i, name in enumerate(order) if name == "y")
    np.testing.assert_array_equal(luma[:, ::2], groups[..., first])
    np.testing.assert_array_equal(luma[:, 1::2], groups[..., second])
    both = groups[..., [order.index("u"), order.index("v")]].astype(float)
    assert np.abs(chroma - both.reshape(20, 2, 32, 2).mean(axis=1)).max() <= 0.5


def test_pyramid(media: Media) -> None:
    """Half as large by the kernel 1 4 6 4 1 in both directions, edges mirrored."""
    pixels = noise(40, 64)
    source = media.picture(pixels.tobytes(), 64, 40, GREY)
    target = media.empty(32, 20, GREY)
    ret = media.media.dvpp_vpc_pyr_down_async(
        media.channel, source.desc, target.desc, 0, media.stream
    )
    assert (ret, media.wait()) == (0, 0)
    line = np.array([1, 4, 6, 4, 1]) / 16
    kernel = np.outer(line, line)
    padded = np.pad(pixels.astype(float), 2, mode="reflect")
    expected = [
        [(padded[2 * y : 2 * y + 5, 2 * x : 2 * x + 5] * kernel).sum() for x in range(32)]
        for y in range(20)
    ]
    seen = media.download(target.address, 32 * 20).reshape(20, 32)
    assert np.abs(seen - np.array(expected)).max() <= 0.51


# Batches.


def test_batches(media: Media) -> None:
    """Two pictures, one and two parts; each kind of batch call."""
    acl = media.media
    sources, targets = acl.dvpp_create_batch_pic_desc(2), acl.dvpp_create_batch_pic_desc(3)
    contents = []
    for index in range(2):
        data = noise(61, 64)[index:].tobytes()[: 64 * 60]
        desc = acl.dvpp_get_pic_desc(sources, index)
        media.picture(data, 64, 40, desc=desc)
        contents.append(np.frombuffer(data, np.uint8)[: 64 * 40].reshape(40, 64))
    outputs = [
        media.empty(32, 10, desc=acl.dvpp_get_pic_desc(targets, index)) for index in range(3)
    ]
    areas = [media.area(0, 31, 0, 9), media.area(16, 47, 10, 19), media.area(2, 33, 4, 13)]
    parts = [contents[0][:10, :32], contents[1][10:20, 16:48], contents[1][4:14, 2:34]]
    where = [media.area(0, 31, 0, 9)] * 3
    border = acl.dvpp_create_border_config()
    for side in ("top", "bottom"):
        assert getattr(acl, f"dvpp_set_border_config_{side}")(border, 0) == 0
    batch = (media.channel, sources, [1, 2], targets, areas)
    for call, tail, result in (
        ("batch_crop", (), (targets, 0)),
        ("batch_crop_resize", (media.config,), 0),
        ("batch_crop_and_paste", (where,), (targets, 0)),
        ("batch_crop_resize_paste", (where, media.config), 0),
        ("batch_crop_resize_make_border", ([border] * 3, media.config), 0),
    ):
        for output in outputs:
            assert media.acl.rt.memset(output.address, output.size, 0, output.size) == 0
        assert getattr(acl, f"dvpp_vpc_{call}_async")(*batch, *tail, media.stream) == result
        assert media.wait() == 0
        for index, (output, part) in enumerate(zip(outputs, parts, strict=True)):
            desc = acl.dvpp_get_pic_desc(targets, index)
            assert acl.dvpp_get_pic_desc_ret_code(desc) == 0
            np.testing.assert_array_equal(media.planes(output, 32, 10)[0], part)
    assert acl.dvpp_destroy_border_config(border) == 0
    assert acl.dvpp_destroy_batch_pic_desc(sources) == 0
    assert acl.dvpp_destroy_batch_pic_desc(targets) == 0


@pytest.mark.parametrize(
    ("kind", "mode"), [(0, "constant"), (1, "edge"), (2, "symmetric"), (3, "reflect")]
)
def test_borders(media: Media, kind: int, mode: Any) -> None:
    """A grey picture with four columns to the left and two rows below."""
    acl = media.media
    pixels = noise(20, 32)
    sources, targets = acl.dvpp_create_batch_pic_desc(1), acl.dvpp_create_batch_pic_desc(1)
    media.picture(pixels.tobytes(), 32, 20, GREY, desc=acl.dvpp_get_pic_desc(sources, 0))
    target = media.empty(36, 22, GREY, desc=acl.dvpp_get_pic_desc(targets, 0))
    border = acl.dvpp_create_border_config()
    assert acl.dvpp_set_border_config_border_type(border, kind) == 0
    assert acl.dvpp_set_border_config_left(border, 4) == 0
    assert acl.dvpp_set_border_config_bottom(border, 2) == 0
    assert acl.dvpp_set_border_config_value(border, 0, 77.0) == 0
    assert acl.dvpp_get_border_config_value(border, 0) == 77.0
    ret = acl.dvpp_vpc_batch_crop_resize_make_border_async(
        media.channel, sources, [1], targets, [media.area(0, 31, 0, 19)], [border],
        media.config, media.stream,
    )  # fmt: skip
    assert (ret, media.wait()) == (0, 0)
    data = media.download(target.address, target.row * 22).reshape(22, target.row)[:, :36]
    options = {"constant_values": 77} if mode == "constant" else {}
    np.testing.assert_array_equal(data, np.pad(pixels, ((0, 2), (4, 0)), mode=mode, **options))
    alone = media.empty(36, 22, GREY)
    source = acl.dvpp_get_pic_desc(sources, 0)
    make_border = acl.dvpp_vpc_make_border_async
    assert make_border(media.channel, source, alone.desc, border, media.stream) == 0
    assert media.wait() == 0
    again = media.download(alone.address, alone.row * 22).reshape(22, alone.row)[:, :36]
    np.testing.assert_array_equal(again, data)
    assert acl.dvpp_set_border_config_top(border, 2) == 0
    assert make_border(media.channel, source, alone.desc, border, media.stream) == 100000
    for handle in (sources, targets):
        assert acl.dvpp_destroy_batch_pic_desc(handle) == 0
    assert acl.dvpp_destroy_border_config(border) == 0


# JPEG.


def decoded(media: Media, file: bytes, size: tuple[int, int], pixel_format: int = NV12) -> Any:
    """Decode a file; the picture it is now."""
    target = media.empty(*size, pixel_format, unit=(128, 16))
    ret = media.media.dvpp_jpeg_decode_async(
        media.channel, media.upload(file), len(file), target.desc, media.stream
    )
    assert (ret, media.wait()) == (0, 0), media.acl.get_recent_err_msg()
    return target


def ycbcr(file: bytes) -> np.ndarray[Any, Any]:
    """What Pillow reads, in the colours of the file."""
    image = Image.open(io.BytesIO(file))
    image.draft("YCbCr", image.size)
    assert image.mode == "YCbCr"
    return np.asarray(image).astype(float)


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4"])
def test_jpeg_decode(media: Media, subsampling: str) -> None:
    """Luma as Pillow reads it, chroma the mean of four."""
    file = jpeg(photo(96, 64), subsampling=subsampling)
    target = decoded(media, file, (96, 64))
    luma, chroma = media.planes(target, 96, 64)
    expected = ycbcr(file)
    np.testing.assert_array_equal(luma, expected[..., 0])
    means = expected[..., 1:].reshape(32, 2, 48, 2, 2).mean(axis=(1, 3))
    assert np.abs(chroma - means).max() <= 0.5
    assert media.media.dvpp_get_pic_desc_ret_code(target.desc) == 0


def test_jpeg_of_odd_size(media: Media) -> None:
    """The picture is rounded up to even sides."""
    file = jpeg(photo(97, 65))
    target = decoded(media, file, (97, 65))
    luma, _ = media.planes(target, 98, 66)
    expected = ycbcr(file)[..., 0]
    np.testing.assert_array_equal(luma[:65, :97], expected)
    np.testing.assert_array_equal(luma[:65, 97], expected[:, 96])


def test_grey_jpeg(media: Media) -> None:
    """Chroma of a grey file is 128."""
    file = jpeg(photo(96, 64)[..., 0])
    luma, chroma = media.planes(decoded(media, file, (96, 64)), 96, 64)
    np.testing.assert_array_equal(luma, np.asarray(Image.open(io.BytesIO(file))))
    assert (chroma == 128).all()


def test_rotated_jpeg(media: Media) -> None:
    """EXIF orientation 6: sides are exchanged in the information and in the picture."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = jpeg(photo(96, 64), exif=exif)
    pointer = media.acl.util.bytes_to_ptr(file)
    assert media.media.dvpp_jpeg_get_image_info(pointer, len(file)) == (64, 96, 3, 0)
    luma, _ = media.planes(decoded(media, file, (64, 96)), 64, 96)
    np.testing.assert_array_equal(luma, np.rot90(ycbcr(file)[..., 0], -1))


@pytest.mark.parametrize(
    ("subsampling", "jpeg_format", "own", "size"),
    [
        ("4:4:4", 0, 5, 128 * 64 * 3),
        ("4:2:2", 1, 3, 128 * 64 * 2),
        ("4:2:0", 2, 1, 128 * 64 * 3 // 2),
    ],
)
def test_jpeg_information(
    media: Media, subsampling: str, jpeg_format: int, own: int, size: int
) -> None:
    """Of a file in host memory, without decoding it."""
    acl = media.media
    file = jpeg(photo(96, 64), subsampling=subsampling)
    head = (media.acl.util.bytes_to_ptr(file), len(file))
    assert acl.dvpp_jpeg_get_image_info(*head) == (96, 64, 3, 0)
    assert acl.dvpp_jpeg_get_image_info_v2(*head) == (96, 64, 3, jpeg_format, 0)
    assert acl.dvpp_jpeg_predict_dec_size(*head, NV12) == (128 * 64 * 3 // 2, 0)
    assert acl.dvpp_jpeg_predict_dec_size(*head, own) == (size, 0)
    assert acl.dvpp_jpeg_predict_dec_size(*head, 10000) == (size, 0)


def test_strides_of_other_chips() -> None:
    """310P aligns rows of decoded pictures to 64 bytes."""
    with simulate(soc_name="Ascend310P3", time="modelled"):
        acl: Any = importlib.import_module("acl")
        assert acl.init() == 0
        assert acl.rt.set_device(0) == 0
        media = Media(acl)
        file = jpeg(photo(96, 64)[:, :60])
        pointer = acl.util.bytes_to_ptr(file)
        size, ret = acl.media.dvpp_jpeg_predict_dec_size(pointer, len(file), NV12)
        assert (size, ret) == (64 * 64 * 3 // 2, 0)
        target = media.empty(60, 64, unit=(64, 16))
        block = media.upload(file)
        ret = acl.media.dvpp_jpeg_decode_async(
            media.channel, block, len(file), target.desc, media.stream
        )
        assert (ret, media.wait()) == (0, 0)
        media.close()


def encoded(media: Media, source: Any, level: int) -> bytes:
    """Encode a picture; the file."""
    acl = media.media
    config = acl.dvpp_create_jpege_config()
    assert acl.dvpp_set_jpege_config_level(config, level) == 0
    assert acl.dvpp_get_jpege_config_level(config) == level
    room, ret = acl.dvpp_jpeg_predict_enc_size(source.desc, config)
    assert (room, ret) == (2 << 20, 0)
    address, ret = acl.dvpp_malloc(room)
    assert ret == 0
    size = struct.pack("<I", room)
    ret = acl.dvpp_jpeg_encode_async(
        media.channel, source.desc, address, media.acl.util.bytes_to_ptr(size), config,
        media.stream,
    )  # fmt: skip
    assert (ret, media.wait()) == (0, 0)
    (length,) = struct.unpack("<I", size)
    file = media.download(address, length).tobytes()
    assert acl.dvpp_free(address) == 0
    assert acl.dvpp_destroy_jpege_config(config) == 0
    return file


def test_jpeg_encode(media: Media) -> None:
    """Pillow reads what went in; the level is the quality, and 0 as good as 100."""
    source = decoded(media, jpeg(photo(96, 64)), (96, 64))
    luma, chroma = media.planes(source, 96, 64)
    files = {level: encoded(media, source, level) for level in (0, 10, 100)}
    assert len(files[10]) < len(files[100]) == len(files[0])
    seen = ycbcr(files[100])
    assert seen.shape == (64, 96, 3)
    assert np.abs(seen[..., 0] - luma).max() <= 3
    means = seen[..., 1:].reshape(32, 2, 48, 2, 2).mean(axis=(1, 3))
    assert np.abs(means - chroma).mean() <= 3


def test_png_decode(media: Media) -> None:
    """RGB of a PNG file, exactly."""
    pixels, output = photo(96, 64), io.BytesIO()
    Image.fromarray(pixels).save(output, "PNG")
    file = output.getvalue()
    pointer = media.acl.util.bytes_to_ptr(file)
    assert media.media.dvpp_png_get_image_info(pointer, len(file)) == (96, 64, 3, 0)
    size, ret = media.media.dvpp_png_predict_dec_size(pointer, len(file), RGB)
    assert (size, ret) == (align(96 * 3, 128) * 64, 0)
    target = media.empty(96, 64, RGB, unit=(128, 16))
    ret = media.media.dvpp_png_decode_async(
        media.channel, media.upload(file), len(file), target.desc, media.stream
    )
    assert (ret, media.wait()) == (0, 0)
    np.testing.assert_array_equal(media.pixels(target, 96, 64), pixels)


def test_hardware_takes_time_of_its_own(media: Media, machine: Runtime) -> None:
    """A decoder and image processing are engines beside the AI cores."""
    file = jpeg(photo(96, 64))
    target, block = media.empty(96, 64, unit=(128, 16)), media.upload(file)
    for _ in range(2):
        media.media.dvpp_jpeg_decode_async(
            media.channel, block, len(file), target.desc, media.stream
        )
    assert media.acl.rt.stream_query(media.stream) == (1, 0)
    assert media.wait() == 0
    first, second = (span for span in machine.spans() if span.engine == "JPEG decoder")
    assert first.end_ns - first.start_ns >= 50_000
    assert second.start_ns == first.end_ns
