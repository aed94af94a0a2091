"""No failing call of a program on the simulated acl.media leaves anything behind."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from npuserve.testing.simulator import media_desc
from npuserve.testing.simulator.faults import Fault
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.media import (
    NV12,
    CallError,
    Media,
    check_failing_call,
    checked,
    failing_calls,
    jpeg,
    photo,
)
from tests.testing.simulator.test_media_video import H264, HEIGHT, WIDTH, unit

FILE = jpeg(photo(96, 64))


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
