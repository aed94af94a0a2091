"""The simulated acl.media refuses each misuse with a code, and no failing call leaves a leak."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from npuserve.testing.simulator import media_desc
from npuserve.testing.simulator.faults import Fault
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.media import (
    BGR,
    GREY,
    NV12,
    RGB,
    CallError,
    Media,
    check_failing_call,
    checked,
    failing_calls,
    jpeg,
    photo,
)
from tests.testing.simulator.test_media_video import H264, HEIGHT, WIDTH, unit
from tests.testing.simulator.test_misuse import in_thread

EXCEPTION = 507018


@pytest.fixture
def media(acl: Any, machine: Runtime) -> Iterator[Media]:
    """A channel; nothing is left at the end."""
    opened = Media(acl)
    yield opened
    opened.close()
    assert machine.leaks() == []


def resize(media: Media, source: Any, target: Any, channel: int = 0) -> int:
    """The code of a resize, which is waited for when it was taken."""
    ret = media.media.dvpp_vpc_resize_async(
        channel or media.channel, source.desc, target.desc, media.config, media.stream
    )
    return int(ret) or media.wait()


# Memory.


def test_memory_is_freed_where_it_is_from(acl: Any) -> None:
    """Neither free takes the other's memory; nothing is freed twice."""
    ours, _ = acl.media.dvpp_malloc(64)
    theirs, _ = acl.rt.malloc(64, 0)
    assert acl.rt.free(ours) == 107000
    assert acl.media.dvpp_free(theirs) == 107000
    assert acl.media.dvpp_free(ours + 8) == 107000
    assert acl.media.dvpp_free(ours) == 0
    assert acl.media.dvpp_free(ours) == 107000
    assert acl.media.dvpp_free(0) == 107000
    assert acl.rt.free(theirs) == 0


def test_memory_that_cannot_be_had(acl: Any) -> None:
    """Nothing, more than there is, without a context, with a size that is no int."""
    assert acl.media.dvpp_malloc(0) == (0, 107000)
    assert acl.media.dvpp_malloc(8 << 20) == (0, 207001)
    assert in_thread(acl.media.dvpp_malloc, 64) == (0, 107002)
    with pytest.raises(TypeError):
        acl.media.dvpp_malloc(np.int64(64))
    with pytest.raises(TypeError):
        acl.media.dvpp_malloc_with_cfg(64, 0, [])
    address, ret = acl.media.dvpp_malloc_with_cfg(64, 0, {})
    assert ret == 0
    assert acl.media.dvpp_free(address) == 0


def test_memory_outlives_nobody(acl: Any, machine: Runtime) -> None:
    """What is not freed is a leak of the call that made it."""
    acl.media.dvpp_malloc(64)
    acl.media.dvpp_create_roi_config(0, 1, 0, 1)
    leaks = "\n".join(machine.leaks())
    assert "64 bytes of device 0" in leaks
    assert "acl.media.dvpp_malloc" in leaks
    assert "ROI configuration of acl.media.dvpp_create_roi_config" in leaks


# Descriptions and channels.

KINDS = ["pic_desc", "stream_desc", "resize_config", "jpege_config", "border_config"]


@pytest.mark.parametrize("kind", KINDS)
def test_descriptions_are_destroyed_once(acl: Any, machine: Runtime, kind: str) -> None:
    """Null is taken, a dead handle and one of another kind are not."""
    create = getattr(acl.media, f"dvpp_create_{kind}")
    destroy = getattr(acl.media, f"dvpp_destroy_{kind}")
    handle = create()
    assert handle
    other = acl.media.dvpp_create_roi_config(0, 1, 0, 1)
    assert destroy(other) == 100000
    assert destroy(0) == 0
    assert destroy(handle) == 0
    assert destroy(handle) == 100000
    assert acl.media.dvpp_destroy_roi_config(other) == 0
    acl.rt.reset_device(0)
    assert machine.leaks() == []


def test_dead_descriptions_have_no_fields(acl: Any) -> None:
    """Setters refuse, getters give nothing."""
    desc = acl.media.dvpp_create_pic_desc()
    acl.media.dvpp_destroy_pic_desc(desc)
    assert acl.media.dvpp_set_pic_desc_width(desc, 64) == 100000
    assert acl.media.dvpp_get_pic_desc_width(desc) == 0
    assert acl.media.dvpp_set_pic_desc_width(0, 64) == 100000
    with pytest.raises(TypeError):
        acl.media.dvpp_set_pic_desc_width(desc, 64.0)
    with pytest.raises(TypeError):
        acl.media.dvpp_set_pic_desc_data(desc, np.int64(64))


@pytest.mark.parametrize(
    ("call", "value"),
    [("resize_config_interpolation", 5), ("jpege_config_level", 101),
     ("border_config_border_type", 4)],
)  # fmt: skip
def test_settings_are_checked_at_once(acl: Any, call: str, value: int) -> None:
    """Values there are none of."""
    kind = "_".join(call.split("_")[:2])
    handle = getattr(acl.media, f"dvpp_create_{kind}")()
    assert getattr(acl.media, f"dvpp_set_{call}")(handle, value) == 100000
    assert getattr(acl.media, f"dvpp_destroy_{kind}")(handle) == 0


def test_channels_open_once_and_close_once(acl: Any) -> None:
    """And are closed before their descriptions go."""
    media = acl.media
    channel = media.dvpp_create_channel_desc()
    assert media.dvpp_destroy_channel(channel) == 100000
    assert media.dvpp_set_channel_desc_mode(channel, 16) == 100000
    assert media.dvpp_set_channel_desc_param(channel, 0, 6) == (0, 100000)
    assert media.dvpp_set_channel_desc_param(channel, 1, 0) == (0, 100000)
    assert media.dvpp_get_channel_desc_param(channel, 1) == (0, 0, 100000)
    assert media.dvpp_create_channel(channel) == 0
    assert media.dvpp_create_channel(channel) == 100000
    assert media.dvpp_set_channel_desc_mode(channel, 1) == 100000
    assert media.dvpp_destroy_channel_desc(channel) == 100000
    assert media.dvpp_destroy_channel(channel) == 0
    assert media.dvpp_destroy_channel_desc(channel) == 0
    assert media.dvpp_create_channel(channel) == 100000
    assert in_thread(media.dvpp_create_channel_desc) == 0


def test_a_channel_is_for_what_its_mode_says(media: Media) -> None:
    """One for image processing decodes nothing; a closed one does nothing."""
    acl = media.media
    channel = acl.dvpp_create_channel_desc()
    source, target = media.empty(64, 40), media.empty(32, 20)
    assert resize(media, source, target, channel) == 100000
    assert acl.dvpp_set_channel_desc_mode(channel, 1) == 0
    assert acl.dvpp_create_channel(channel) == 0
    assert resize(media, source, target, channel) == 0
    file = jpeg(photo(64, 64))
    output, block = media.empty(64, 64, unit=(128, 16)), media.upload(file)
    ret = acl.dvpp_jpeg_decode_async(channel, block, len(file), output.desc, media.stream)
    assert ret == 100000
    assert acl.dvpp_destroy_channel(channel) == 0
    assert acl.dvpp_destroy_channel_desc(channel) == 0


def test_streams_and_channels_belong_to_contexts(media: Media) -> None:
    """A stream of another context, a channel of another card."""
    acl = media.acl
    source, target = media.empty(64, 40), media.empty(32, 20)
    own, _ = acl.rt.get_context()
    same_card, _ = acl.rt.create_context(0)
    assert resize(media, source, target) == 107003
    other_card, _ = acl.rt.create_context(1)
    assert resize(media, source, target) == 100000
    for context in (same_card, other_card):
        assert acl.rt.destroy_context(context) == 0
    assert acl.rt.set_context(own) == 0
    assert resize(media, source, target) == 0


# Pictures.


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


def test_memory_freed_in_flight(media: Media, machine: Runtime) -> None:
    """The stream reports it once, the description keeps the code, the simulator notes it."""
    source, target = media.empty(64, 40), media.empty(32, 20)
    ret = media.media.dvpp_vpc_resize_async(
        media.channel, source.desc, target.desc, media.config, media.stream
    )
    assert ret == 0
    assert media.media.dvpp_free(source.address) == 0
    media.blocks.remove(source.address)
    assert (media.wait(), media.wait()) == (EXCEPTION, 0)
    assert media.media.dvpp_get_pic_desc_ret_code(target.desc) == EXCEPTION
    assert "freed while the media hardware used it" in machine.violations[0]


def test_description_destroyed_in_flight(media: Media, machine: Runtime) -> None:
    """The hardware writes the result into it."""
    source, target = media.empty(64, 40), media.empty(32, 20)
    ret = media.media.dvpp_vpc_resize_async(
        media.channel, source.desc, target.desc, media.config, media.stream
    )
    assert ret == 0
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


# Failures on demand.


def made(handle: int) -> int:
    """A handle that is not null."""
    if not handle:
        raise CallError("null")
    return handle


def pictures(acl: Any) -> None:
    """Decode, scale, cut out, encode, as the samples do, giving everything back if a call fails."""
    media = acl.media
    with ExitStack() as stack:
        undo = stack.callback
        stream = checked(acl.rt.create_stream())
        undo(acl.rt.destroy_stream, stream)
        channel = made(media.dvpp_create_channel_desc())
        undo(media.dvpp_destroy_channel_desc, channel)
        checked(media.dvpp_create_channel(channel))
        undo(media.dvpp_destroy_channel, channel)
        config, level = made(media.dvpp_create_resize_config()), media.dvpp_create_jpege_config()
        undo(media.dvpp_destroy_resize_config, config)
        undo(media.dvpp_destroy_jpege_config, made(level))

        def block(size: int) -> int:
            address: int = checked(media.dvpp_malloc(size))
            undo(media.dvpp_free, address)
            return address

        def picture(width: int, height: int, row: int, rows: int) -> int:
            desc = made(media.dvpp_create_pic_desc())
            undo(media.dvpp_destroy_pic_desc, desc)
            size = row * rows * 3 // 2
            values = (block(size), size, NV12, width, height, row, rows)
            names = ("data", "size", "format", "width", "height", "width_stride", "height_stride")
            for name, value in zip(names, values, strict=True):
                checked(getattr(media, f"dvpp_set_pic_desc_{name}")(desc, value))
            return desc

        pointer = acl.util.bytes_to_ptr(FILE)
        checked(media.dvpp_jpeg_get_image_info(pointer, len(FILE)))
        checked(media.dvpp_jpeg_predict_dec_size(pointer, len(FILE), NV12))
        file, whole, small = block(len(FILE)), picture(96, 64, 128, 64), picture(48, 32, 48, 32)
        checked(acl.rt.memcpy(file, len(FILE), pointer, len(FILE), 1))
        checked(media.dvpp_jpeg_decode_async(channel, file, len(FILE), whole, stream))
        checked(media.dvpp_vpc_resize_async(channel, whole, small, config, stream))
        area = made(media.dvpp_create_roi_config(0, 31, 0, 31))
        undo(media.dvpp_destroy_roi_config, area)
        checked(media.dvpp_vpc_crop_and_paste_async(channel, whole, small, area, area, stream))
        room = checked(media.dvpp_jpeg_predict_enc_size(small, level))
        size = struct.pack("<I", room)
        output = block(room)
        checked(
            media.dvpp_jpeg_encode_async(
                channel, small, output, acl.util.bytes_to_ptr(size), level, stream
            )
        )
        undo(acl.rt.synchronize_stream, stream)
        checked(acl.rt.synchronize_stream(stream))


def video(acl: Any) -> None:
    """Decode a frame and encode one."""
    media, context = acl.media, checked(acl.rt.get_context())
    running = [True]

    def process(_: Any) -> None:
        acl.rt.set_context(context)
        while running[0]:
            acl.rt.process_report(20)

    with ExitStack() as stack:
        undo = stack.callback
        thread, _ = acl.util.start_thread(process, [])
        undo(acl.util.stop_thread, thread)
        undo(running.__setitem__, 0, False)
        data = unit(0)
        blocks = []
        for size in (len(data), WIDTH * HEIGHT * 3 // 2):
            blocks.append(checked(media.dvpp_malloc(size)))
            undo(media.dvpp_free, blocks[-1])
        piece, desc = made(media.dvpp_create_stream_desc()), media.dvpp_create_pic_desc()
        undo(media.dvpp_destroy_stream_desc, piece)
        undo(media.dvpp_destroy_pic_desc, made(desc))
        checked(acl.rt.memcpy(blocks[0], len(data), acl.util.bytes_to_ptr(data), len(data), 1))
        for call, value in (("data", blocks[0]), ("size", len(data))):
            checked(getattr(media, f"dvpp_set_stream_desc_{call}")(piece, value))
        for call, value in (("data", blocks[1]), ("size", WIDTH * HEIGHT * 3 // 2)):
            checked(getattr(media, f"dvpp_set_pic_desc_{call}")(desc, value))
        codes: list[int] = []
        for family, values in (
            ("vdec", {"entype": H264}),
            ("venc", {"entype": H264, "pic_width": WIDTH, "pic_height": HEIGHT,
                      "key_frame_interval": 1}),
        ):  # fmt: skip
            channel = made(getattr(media, f"{family}_create_channel_desc")())
            undo(getattr(media, f"{family}_destroy_channel_desc"), channel)
            described = f"{family}_set_channel_desc_"
            for name, value in (values | {"thread_id": thread}).items():
                checked(getattr(media, described + name)(channel, value))
            checked(getattr(media, described + "callback")(channel, lambda *_: codes.append(0)))
            checked(getattr(media, f"{family}_create_channel")(channel))
            undo(getattr(media, f"{family}_destroy_channel"), channel)
            settings = made(getattr(media, f"{family}_create_frame_config")())
            undo(getattr(media, f"{family}_destroy_frame_config"), settings)
            if family == "vdec":
                checked(media.vdec_send_frame(channel, piece, desc, settings, None))
            else:
                checked(media.venc_send_frame(channel, desc, 0, settings, None))
                checked(media.venc_set_frame_config_eos(settings, 1))
                checked(media.venc_send_frame(channel, 0, 0, settings, None))


PROGRAMS = [
    (program, name)
    for program in (pictures, video)
    for name in failing_calls(program, "set_context", "init")
]


@pytest.mark.parametrize(
    ("program", "call"), PROGRAMS, ids=[f"{p.__name__}-{call}" for p, call in PROGRAMS]
)
def test_a_failing_call_leaves_nothing(program: Callable[[Any], None], call: str) -> None:
    """Each call of a program made to fail: the program ends, and the simulator finds no leak."""
    check_failing_call(program, call)


def test_destroying_can_fail_and_be_repeated(media: Media, machine: Runtime) -> None:
    """A failed destroy destroys nothing."""
    desc = media.media.dvpp_create_pic_desc()
    machine.faults.append(Fault("acl.media.dvpp_destroy_pic_desc", code=500000))
    assert media.media.dvpp_destroy_pic_desc(desc) == 500000
    assert machine.find(desc, media_desc.PicDesc).ret_code == 0
    assert media.media.dvpp_destroy_pic_desc(desc) == 0
