"""What the tests of acl.himpi share: its codes, the system, channels with their structures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.media import BGR, GREY, NV12, RGB, Bytes, jpeg, photo

JPEG, H264, H265, PNG, UNKNOWN = 26, 96, 265, 268, 10000
VDEC, VPC, VENC, SYS, PNGD = 0xA0058000, 0xA0078000, 0xA0088000, 0xA0028000, 0xA0408000
INVALID_CHN_ID, ILLEGAL_PARAM, EXIST, UNEXIST, NOT_SUPPORT, NOT_PERM = 2, 3, 4, 5, 8, 9
NO_MEM, BUF_EMPTY, BUF_FULL, NOT_READY, BAD_ADDR, TIMEOUT, SYS_ERROR = 12, 14, 15, 16, 17, 20, 21

FILE = jpeg(photo(96, 64))


class Himpi:
    """The media system, and short ways to put bytes on the card."""

    def __init__(self, acl: Any) -> None:
        self.acl, self.himpi = acl, acl.himpi
        assert self.himpi.sys_init() == 0
        self.blocks: list[int] = []

    def upload(self, data: bytes) -> int:
        """A block with this content."""
        address, ret = self.himpi.dvpp_malloc(0, len(data))
        assert ret == 0
        self.blocks.append(address)
        pointer = self.acl.util.bytes_to_ptr(data)
        assert self.acl.rt.memcpy(address, len(data), pointer, len(data), 1) == 0
        return int(address)

    def download(self, address: int, size: int) -> Bytes:
        """Content of device memory."""
        data = bytes(size)
        pointer = self.acl.util.bytes_to_ptr(data)
        assert self.acl.rt.memcpy(pointer, size, address, size, 2) == 0
        return np.frombuffer(data, np.uint8)

    def picture(
        self, data: bytes, width: int, height: int, pixel_format: int = NV12
    ) -> dict[str, int]:
        """A picture without padding."""
        row = width * 3 if pixel_format in (RGB, BGR) else width
        return {
            "picture_address": self.upload(data), "picture_buffer_size": len(data),
            "picture_width": width, "picture_height": height, "picture_width_stride": row,
            "picture_height_stride": height, "picture_format": pixel_format,
        }  # fmt: skip

    def empty(self, width: int, height: int, pixel_format: int = NV12) -> dict[str, int]:
        """The same of bytes 0x11."""
        sixths = {GREY: 2, NV12: 3, RGB: 6, BGR: 6}[pixel_format]
        return self.picture(b"\x11" * (width * height * sixths // 2), width, height, pixel_format)

    def content(self, picture: dict[str, int]) -> Bytes:
        """All bytes of a picture."""
        return self.download(picture["picture_address"], picture["picture_buffer_size"])

    def luma(self, picture: dict[str, int]) -> Bytes:
        """Luma of a picture."""
        width, height = picture["picture_width"], picture["picture_height"]
        return self.content(picture)[: width * height].reshape(height, width)

    def vpc(self, call: str, *arguments: Any, expect: int = 0) -> None:
        """One image processing task on channel 0, awaited."""
        task, ret = getattr(self.himpi, f"vpc_{call}")(0, *arguments, -1)
        assert ret == expect, self.acl.get_recent_err_msg()
        if not ret:
            assert self.himpi.vpc_get_process_result(0, task, -1) == 0

    def close(self) -> None:
        """Give everything back."""
        for block in self.blocks:
            assert self.himpi.dvpp_free(block) == 0
        assert self.himpi.sys_exit() == 0
        assert self.acl.rt.reset_device(0) == 0


def opened(acl: Any, machine: Runtime) -> Iterator[Himpi]:
    """The system for one test: nothing is left at the end."""
    himpi = Himpi(acl)
    yield himpi
    himpi.close()
    assert machine.leaks() == []


def decoder(media: Himpi, kind: int = JPEG, **values: int) -> None:
    """Channel 0, started."""
    attributes: dict[str, Any] = {
        "type": kind, "mode": 0, "pic_width": 1920, "pic_height": 1080,
        "stream_buf_size": 1920 * 1080, "frame_buf_size": 0, "frame_buf_cnt": 9,
    }  # fmt: skip
    assert media.himpi.vdec_create_chn(0, attributes | values) == 0
    assert media.himpi.vdec_start_recv_stream(0) == 0


def piece(address: int, data: bytes, **values: int) -> dict[str, int]:
    """hi_vdec_stream."""
    stream = {"end_of_frame": 1, "end_of_stream": 0, "need_display": 1, "pts": 40}
    return stream | {"len": len(data), "addr": address} | values


def end_decoder(media: Himpi) -> None:
    """Stop and destroy channel 0."""
    assert media.himpi.vdec_destroy_chn(0) == VDEC + NOT_PERM
    assert media.himpi.vdec_stop_recv_stream(0) == 0
    assert media.himpi.vdec_destroy_chn(0) == 0


def frame_of(address: int, **values: Any) -> dict[str, Any]:
    """hi_video_frame_info."""
    picture = {
        "width": 128, "height": 128, "field": 4, "pixel_format": NV12, "video_format": 0,
        "width_stride": [128, 0, 0], "height_stride": [0, 0, 0], "virt_addr": [address, 0, 0],
        "pts": 7,
    }  # fmt: skip
    return {"v_frame": picture | values, "pool_id": 0, "mod_id": 8}
