"""A program of acl.himpi in which each call fails once."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from tests.testing.simulator.himpi import FILE, JPEG, frame_of, piece
from tests.testing.simulator.media import NV12, check_failing_call, checked, failing_calls


def program(acl: Any) -> None:
    """Decode a file, scale it, encode it, giving everything back if a call fails."""
    himpi = acl.himpi
    with ExitStack() as stack:
        undo = stack.callback
        checked(himpi.sys_init())
        undo(himpi.sys_exit)

        def block(size: int) -> int:
            address: int = checked(himpi.dvpp_malloc(0, size))
            undo(himpi.dvpp_free, address)
            return address

        attributes = {"type": JPEG, "frame_buf_cnt": 1}
        checked(himpi.vdec_create_chn(0, attributes))
        undo(himpi.vdec_destroy_chn, 0)
        checked(himpi.vpc_create_chn(0, {}))
        undo(himpi.vpc_destroy_chn, 0)
        sides = {"pic_width": 48, "pic_height": 32, "max_pic_width": 48, "max_pic_height": 32}
        checked(himpi.venc_create_chn(0, {"venc_attr": {"type": JPEG, "buf_size": 9999} | sides}))
        undo(himpi.venc_destroy_chn, 0)
        pointer = acl.util.bytes_to_ptr(FILE)
        information = checked(himpi.dvpp_get_image_info(JPEG, piece(pointer, FILE)))
        file, whole = block(len(FILE)), block(information["img_buf_size"])
        checked(acl.rt.memcpy(file, len(FILE), pointer, len(FILE), 1))
        names = ("width", "height", "width_stride", "height_stride")
        wanted = {name: information[name] for name in names} | {"pixel_format": NV12}
        wanted |= {"vir_addr": whole, "buffer_size": information["img_buf_size"]}
        checked(himpi.vdec_start_recv_stream(0))
        undo(himpi.vdec_stop_recv_stream, 0)
        checked(himpi.vdec_send_stream(0, piece(file, FILE), wanted, -1))
        frame, _, _ = checked(himpi.vdec_get_frame(0, -1))
        checked(himpi.vdec_release_frame(0, frame))
        small = block(48 * 32 * 3 // 2)
        size = information["img_buf_size"]
        source = {
            "picture_address": whole, "picture_buffer_size": size, "picture_width": 96,
            "picture_height": 64, "picture_width_stride": 128, "picture_height_stride": 64,
            "picture_format": NV12,
        }  # fmt: skip
        target = {
            "picture_address": small, "picture_buffer_size": 48 * 32 * 3 // 2,
            "picture_width": 48, "picture_height": 32, "picture_width_stride": 48,
            "picture_height_stride": 32, "picture_format": NV12,
        }  # fmt: skip
        task = checked(himpi.vpc_resize(0, source, target, 0, 0, 0, -1))
        checked(himpi.vpc_get_process_result(0, task, -1))
        checked(himpi.venc_start_chn(0, {}))
        undo(himpi.venc_stop_chn, 0)
        picture = frame_of(small, width=48, height=32, width_stride=[48])
        checked(himpi.venc_send_frame(0, picture, 0))
        stream = checked(himpi.venc_get_stream(0, {"pack_cnt": 1}, -1))
        checked(himpi.venc_release_stream(0, stream))


@pytest.mark.parametrize("call", failing_calls(program, "stop", "exit"))
def test_a_failing_call_leaves_nothing(call: str) -> None:
    """Each call made to fail: the program ends, nothing leaks, and it works the next time."""
    check_failing_call(program, call)
