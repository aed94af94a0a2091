"""The simulated acl.media refuses pictures, areas and files that its hardware would not take."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.media import (
    BGR,
    GREY,
    NV12,
    RGB,
    Media,
    jpeg,
    photo,
    resize,
)

EXCEPTION = 507018


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"format": 999}, 100027),
        ({"width": 63}, 100000),
        ({"height": 39}, 100000),
        ({"width": 8}, 100000),
        ({"height": 4}, 100000),
        ({"width": 8194, "width_stride": 8208}, 100000),
        ({"width_stride": 72}, 100000),
        ({"width_stride": 48}, 100000),
        ({"width_stride": 16400}, 100000),
        ({"height_stride": 41}, 100000),
        ({"height_stride": 38}, 100000),
        ({"size": 64 * 40 * 3 // 2 - 1}, 100000),
        ({"data": 0}, 100000),
        ({"data": 4096}, 100000),
        ({"height_stride": 80, "size": 64 * 80 * 3 // 2}, 100000),
    ],
)
def test_pictures_the_hardware_cannot_read(media: Media, values: dict[str, int], code: int) -> None:
    """Format, sides, strides, size, memory."""
    source, target = media.empty(64, 40), media.empty(32, 20)
    media.describe(source.desc, **values)
    assert resize(media, source, target) == code
    assert media.acl.get_recent_err_msg()


@pytest.mark.parametrize("pixel_format", [3, 7, 14])
def test_formats_image_processing_does_not_write(media: Media, pixel_format: int) -> None:
    """4:2:2 and pictures with alpha are only read."""
    source, target = media.empty(64, 40), media.empty(32, 20)
    media.describe(target.desc, format=pixel_format, width_stride=128)
    assert resize(media, source, target) == 100027


def test_memory_of_the_runtime_is_no_memory_for_pictures(media: Media) -> None:
    """Only dvpp_malloc's is reached by the hardware; freed memory is not."""
    source, target = media.empty(64, 40), media.empty(32, 20)
    other, _ = media.acl.rt.malloc(target.size, 0)
    media.describe(target.desc, data=other)
    assert resize(media, source, target) == 100000
    assert media.acl.rt.free(other) == 0
    assert media.media.dvpp_free(source.address) == 0
    media.blocks.remove(source.address)
    media.describe(target.desc, data=target.address)
    assert resize(media, source, target) == 100000


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ((640, 40), (20, 20), 0),
        ((672, 40), (20, 20), 100000),
        ((10, 6), (160, 96), 0),
        ((10, 6), (170, 96), 100000),
    ],
)
def test_scales(media: Media, old: tuple[int, int], new: tuple[int, int], code: int) -> None:
    """From 1/32 to 16 times."""
    source, target = media.empty(*old, unit=(32, 2)), media.empty(*new, unit=(32, 2))
    assert resize(media, source, target) == code


@pytest.mark.parametrize(
    "area",
    [
        (0, 64, 0, 19), (0, 31, 0, 40), (1, 32, 0, 19), (0, 30, 0, 19), (0, 31, 1, 19),
        (0, 31, 0, 18), (32, 31, 0, 19), (0, 7, 0, 19), (0, 31, 0, 3),
    ],
)  # fmt: skip
def test_areas(media: Media, area: tuple[int, int, int, int]) -> None:
    """Outside, odd where even is asked for, even where odd is, empty, too small."""
    source, target = media.empty(64, 40), media.empty(32, 20)
    crop = media.media.dvpp_vpc_crop_async
    handle = media.area(0, 31, 0, 19)
    assert media.media.dvpp_set_roi_config(handle, *area) == 0
    assert crop(media.channel, source.desc, target.desc, handle, media.stream) == 100000
    for side, value in zip(("left", "right", "top", "bottom"), (2, 33, 4, 23), strict=True):
        assert getattr(media.media, f"dvpp_set_roi_config_{side}")(handle, value) == 0
    assert crop(media.channel, source.desc, target.desc, handle, media.stream) == 0
    assert media.wait() == 0


def test_areas_of_pastes_begin_at_16(media: Media) -> None:
    """The left of a paste area is a multiple of 16."""
    source, target = media.empty(64, 40), media.empty(64, 40)
    crop = media.area(0, 31, 0, 19)
    for left, code in ((2, 100000), (16, 0)):
        paste = media.area(left, left + 31, 0, 19)
        ret = media.media.dvpp_vpc_crop_and_paste_async(
            media.channel, source.desc, target.desc, crop, paste, media.stream
        )
        assert ret == code
    assert media.wait() == 0


def test_conversions_keep_the_size(media: Media) -> None:
    """So do pyramids, which halve it."""
    source, target = media.empty(64, 40), media.empty(32, 20, RGB)
    convert = media.media.dvpp_vpc_convert_color_async
    assert convert(media.channel, source.desc, target.desc, media.stream) == 100000
    halve = media.media.dvpp_vpc_pyr_down_async
    grey, small = media.empty(64, 40, GREY), media.empty(34, 20, GREY)
    assert halve(media.channel, grey.desc, small.desc, 0, media.stream) == 100000
    assert halve(media.channel, source.desc, small.desc, 0, media.stream) == 100027


def test_batches_are_counted(media: Media) -> None:
    """Numbers, areas, members."""
    acl = media.media
    assert acl.dvpp_create_batch_pic_desc(0) == 0
    assert acl.dvpp_create_batch_pic_desc(257) == 0
    sources, targets = acl.dvpp_create_batch_pic_desc(1), acl.dvpp_create_batch_pic_desc(2)
    assert acl.dvpp_get_pic_desc(sources, 1) == 0
    member = acl.dvpp_get_pic_desc(sources, 0)
    assert acl.dvpp_get_pic_desc(sources, 0) == member
    assert acl.dvpp_destroy_pic_desc(member) == 100000
    media.empty(64, 40, desc=member)
    for index in range(2):
        media.empty(32, 20, desc=acl.dvpp_get_pic_desc(targets, index))
    area = media.area(0, 31, 0, 19)
    crop = acl.dvpp_vpc_batch_crop_async
    for counts, areas in (([1, 1], [area] * 2), ([0], [area]), ([3], [area] * 3), ([2], [area])):
        call = (media.channel, sources, counts, targets, areas, media.stream)
        assert crop(*call) == (0, 100000)
    with pytest.raises(TypeError):
        crop(media.channel, sources, (2,), targets, [area] * 2, media.stream)
    call = (media.channel, sources, [2], targets, [area] * 2, media.stream)
    assert crop(*call) == (targets, 0)
    assert media.wait() == 0
    assert acl.dvpp_destroy_batch_pic_desc(sources) == 0
    assert acl.dvpp_set_pic_desc_width(member, 64) == 100000
    assert crop(*call) == (0, 100000)
    assert acl.dvpp_destroy_batch_pic_desc(targets) == 0


# What shows only when the task runs.


def resize_in_flight(media: Media) -> tuple[Any, Any]:
    """The pictures of a resize that the stream has yet to run."""
    source, target = media.empty(64, 40), media.empty(32, 20)
    ret = media.media.dvpp_vpc_resize_async(
        media.channel, source.desc, target.desc, media.config, media.stream
    )
    assert ret == 0
    return source, target


def test_memory_freed_in_flight(media: Media, machine: Runtime) -> None:
    """The stream reports it once, the description keeps the code, the simulator notes it."""
    source, target = resize_in_flight(media)
    assert media.media.dvpp_free(source.address) == 0
    media.blocks.remove(source.address)
    assert (media.wait(), media.wait()) == (EXCEPTION, 0)
    assert media.media.dvpp_get_pic_desc_ret_code(target.desc) == EXCEPTION
    assert "freed while the media hardware used it" in machine.violations[0]


def test_description_destroyed_in_flight(media: Media, machine: Runtime) -> None:
    """The hardware writes the result into it."""
    _, target = resize_in_flight(media)
    assert media.media.dvpp_destroy_pic_desc(target.desc) == 0
    media.descs.remove(target.desc)
    assert media.wait() == 0
    assert machine.violations == ["a picture description was destroyed while a task used it"]


FILE = jpeg(photo(96, 64))


@pytest.mark.parametrize(
    ("file", "code"),
    [
        (b"no JPEG file at all", 500001),
        (FILE[: len(FILE) // 2], 500001),
        (jpeg(photo(96, 64), progressive=True), 200006),
        (jpeg(photo(128, 64)), 100000),
    ],
    ids=["no file", "half a file", "progressive", "other size"],
)
def test_files_the_decoder_refuses(media: Media, file: bytes, code: int) -> None:
    """The description has the code; the stream fails once and the next file is fine."""
    target = media.empty(96, 64, unit=(128, 16))
    for data, expected, ret_code in ((file, EXCEPTION, code), (FILE, 0, 0)):
        block = media.upload(data)
        ret = media.media.dvpp_jpeg_decode_async(
            media.channel, block, len(data), target.desc, media.stream
        )
        assert ret == 0
        assert media.wait() == expected
        assert media.media.dvpp_get_pic_desc_ret_code(target.desc) == ret_code


def test_decoded_pictures_have_strides_of_their_own(media: Media) -> None:
    """128 by 16; and a file is decoded to its own sampling or to 4:2:0."""
    target, block = media.empty(96, 64), media.upload(FILE)
    decode = media.media.dvpp_jpeg_decode_async
    call = (media.channel, block, len(FILE), target.desc, media.stream)
    assert decode(*call) == 100000
    output = media.empty(96, 64, unit=(128, 16))
    media.describe(output.desc, format=5, size=128 * 64 * 3)
    call = (media.channel, block, len(FILE), output.desc, media.stream)
    assert decode(*call) == 100000  # 4:4:4 needs more memory than there is
    output = media.empty(96, 128, unit=(128, 16))
    media.describe(output.desc, height=64, height_stride=64, format=3)
    call = (media.channel, block, len(FILE), output.desc, media.stream)
    assert decode(*call) == 0
    assert media.wait() == EXCEPTION  # the file is 4:2:0, not 4:2:2
    assert media.media.dvpp_get_pic_desc_ret_code(output.desc) == 100027
    media.describe(output.desc, format=BGR)
    assert decode(*call) == 100027


def test_information_is_about_jpeg_files(media: Media) -> None:
    """In host memory; 4:2:0 or the file's own sampling; not too small."""
    acl, util = media.media, media.acl.util
    text = b"no JPEG file at all"
    head = (util.bytes_to_ptr(text), len(text))
    assert acl.dvpp_jpeg_get_image_info(*head) == (0, 0, 0, 500001)
    assert acl.dvpp_jpeg_get_image_info_v2(*head) == (0, 0, 0, 1000, 500001)
    assert acl.dvpp_jpeg_get_image_info(0, 10) == (0, 0, 0, 100000)
    assert acl.dvpp_png_get_image_info(*head) == (0, 0, 0, 500001)
    block = media.upload(FILE)
    assert acl.dvpp_jpeg_get_image_info(block, len(FILE)) == (0, 0, 0, 107000)
    head = (util.bytes_to_ptr(FILE), len(FILE))
    assert acl.dvpp_jpeg_predict_dec_size(*head, 5) == (0, 100027)
    small = jpeg(photo(24, 64))
    head = (util.bytes_to_ptr(small), len(small))
    assert acl.dvpp_jpeg_predict_dec_size(*head, NV12) == (0, 100000)


def test_pictures_the_encoder_refuses(media: Media) -> None:
    """Formats, strides, room."""
    acl = media.media
    source, config = media.empty(64, 40), acl.dvpp_create_jpege_config()
    predict = acl.dvpp_jpeg_predict_enc_size
    assert predict(source.desc, 0) == (0, 100000)
    media.describe(source.desc, format=RGB)
    assert predict(source.desc, config) == (0, 100027)
    media.describe(source.desc, format=NV12, height=38)
    assert predict(source.desc, config) == (0, 100000)  # 40 rows: neither 38 nor 48
    media.describe(source.desc, height=40)
    assert predict(source.desc, config)[1] == 0
    output, size = media.upload(bytes(64)), struct.pack("<I", 64)
    pointer = media.acl.util.bytes_to_ptr(size)
    encode = acl.dvpp_jpeg_encode_async
    assert encode(media.channel, source.desc, output, 0, config, media.stream) == 100000
    assert encode(media.channel, source.desc, 0, pointer, config, media.stream) == 100000
    assert encode(media.channel, source.desc, output, pointer, config, media.stream) == 0
    assert media.wait() == EXCEPTION  # 64 bytes are no room
    assert struct.unpack("<I", size) == (64,)
    assert acl.dvpp_destroy_jpege_config(config) == 0


def test_reading_other_cards(media: Media) -> None:
    """The hardware reaches the memory of its own card only."""
    own, _ = media.acl.rt.get_context()
    other, _ = media.acl.rt.create_context(1)
    address, ret = media.media.dvpp_malloc(64 * 40 * 3 // 2)
    assert ret == 0
    media.acl.rt.set_context(own)
    source, target = media.empty(64, 40), media.empty(32, 20)
    media.describe(source.desc, data=address)
    assert resize(media, source, target) == 100000
    assert media.media.dvpp_free(address) == 0
    assert media.acl.rt.destroy_context(other) == 0
