"""The simulated acl.himpi: programs written as the documentation's are, and every misuse."""

from __future__ import annotations

import importlib
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from PIL import Image

from npuserve.testing.simulator import himpi_system, simulate, video_stream
from npuserve.testing.simulator.faults import Fault
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.media import BGR, GREY, NV12, RGB, Bytes, align, jpeg, noise, photo
from tests.testing.simulator.test_media_image import bilinear, nv12, ycbcr
from tests.testing.simulator.test_media_misuse import CallError, checked
from tests.testing.simulator.test_misuse import in_thread

JPEG, H264, H265, PNG, UNKNOWN = 26, 96, 265, 268, 10000
VDEC, VPC, VENC, SYS, PNGD = 0xA0058000, 0xA0078000, 0xA0088000, 0xA0028000, 0xA0408000
INVALID_CHN_ID, ILLEGAL_PARAM, EXIST, UNEXIST, NOT_SUPPORT, NOT_PERM = 2, 3, 4, 5, 8, 9
NO_MEM, BUF_EMPTY, BUF_FULL, NOT_READY, BAD_ADDR, TIMEOUT, SYS_ERROR = 12, 14, 15, 16, 17, 20, 21


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


@pytest.fixture
def media(acl: Any, machine: Runtime) -> Iterator[Himpi]:
    """Nothing is left at the end."""
    opened = Himpi(acl)
    yield opened
    opened.close()
    assert machine.leaks() == []


@pytest.fixture
def vpc(media: Himpi) -> Iterator[Himpi]:
    """With channel 0 for image processing."""
    attributes = {"attr": 0, "pic_width": 0, "pic_height": 0}
    assert media.himpi.vpc_create_chn(0, attributes) == 0
    yield media
    assert media.himpi.vpc_destroy_chn(0) == 0


def region(target: dict[str, int], left: int, top: int, width: int, height: int) -> dict[str, Any]:
    """Part of a picture, with an output."""
    crop = {"left_offset": left, "top_offset": top, "crop_width": width, "crop_height": height}
    return {"dest_pic_info": target, "crop_region": crop}


def resizing(width: int, height: int, interpolation: int = 0) -> dict[str, Any]:
    """How to scale a part."""
    return {
        "resize_info": {
            "resize_width": width, "resize_height": height, "interpolation": interpolation
        }
    }  # fmt: skip


# Image processing.


def test_resize(vpc: Himpi) -> None:
    """As the formula of a textbook."""
    data, luma, _ = nv12(64, 40)
    source, target = vpc.picture(data, 64, 40), vpc.empty(48, 20)
    vpc.vpc("resize", source, target, 0, 0, 0)
    assert np.abs(vpc.luma(target).astype(int) - bilinear(luma, 48, 20, 0.5)).max() <= 1
    again = vpc.empty(48, 20)
    vpc.vpc("resize", source, again, 0.75, 0.5, 0)
    np.testing.assert_array_equal(vpc.content(again), vpc.content(target))


def test_crop(vpc: Himpi) -> None:
    """Two parts in one task."""
    data, luma, _ = nv12(64, 40)
    source = vpc.picture(data, 64, 40)
    targets = [vpc.empty(32, 20), vpc.empty(48, 10)]
    parts = [region(targets[0], 10, 6, 32, 20), region(targets[1], 16, 30, 48, 10)]
    vpc.vpc("crop", source, parts, 2)
    np.testing.assert_array_equal(vpc.luma(targets[0]), luma[6:26, 10:42])
    np.testing.assert_array_equal(vpc.luma(targets[1]), luma[30:, 16:])


@pytest.mark.parametrize("call", ["crop_resize", "crop_resize_paste"])
def test_parts_are_scaled_and_pasted(vpc: Himpi, call: str) -> None:
    """Twice as large by nearest neighbours; the rest of the output stays."""
    data, luma, _ = nv12(64, 40)
    source, target = vpc.picture(data, 64, 40), vpc.empty(80, 60)
    offset = {"dest_left_offset": 16, "dest_top_offset": 4} if call.endswith("paste") else {}
    part = region(target, 2, 4, 16, 10) | resizing(32, 20, 2) | offset
    vpc.vpc(call, source, [part], 1)
    left, top = (16, 4) if offset else (0, 0)
    expected = np.full((60, 80), 0x11)
    expected[top : top + 20, left : left + 32] = luma[4:14, 2:18].repeat(2, 0).repeat(2, 1)
    np.testing.assert_array_equal(vpc.luma(target), expected)


def test_borders(vpc: Himpi) -> None:
    """Around a whole picture, and around a part."""
    pixels = noise(20, 32, 3)
    source = vpc.picture(pixels.tobytes(), 32, 20, RGB)
    target, other = vpc.empty(48, 24, RGB), vpc.empty(48, 24, RGB)
    around = {"top": 4, "bottom": 0, "left": 6, "right": 10, "border_type": 0,
              "scalar_value": {"val": [9.0, 8.0, 7.0, 0.0]}}  # fmt: skip
    vpc.vpc("copy_make_border", source, target, around)
    expected = np.tile(np.array([9, 8, 7], np.uint8), (24, 48, 1))
    expected[4:, 6:38] = pixels
    np.testing.assert_array_equal(vpc.content(target).reshape(24, 48, 3), expected)
    part = region(other, 0, 0, 32, 20) | resizing(32, 20) | {
        "dest_left_offset": 6, "dest_top_offset": 4, "border_type": 1,
    }  # fmt: skip
    vpc.vpc("crop_resize_make_border", source, [part], 1)
    edge = np.pad(pixels, ((4, 0), (6, 10), (0, 0)), mode="edge")
    np.testing.assert_array_equal(vpc.content(other).reshape(24, 48, 3), edge)


def test_batches(vpc: Himpi) -> None:
    """Two pictures, one and two parts."""
    contents = [noise(60, 64), noise(61, 64)[1:]]
    sources = [vpc.picture(content.tobytes(), 64, 40) for content in contents]
    targets = [vpc.empty(32, 10) for _ in range(3)]
    parts = [
        region(target, left, 4, 32, 10) | resizing(32, 10)
        for target, left in zip(targets, (0, 8, 32), strict=True)
    ]
    for call in ("batch_crop_resize_paste", "batch_crop_resize_make_border"):
        vpc.vpc(call, sources, 2, parts, [1, 2])
        for target, content, left in zip(
            targets, (contents[0], contents[1], contents[1]), (0, 8, 32), strict=True
        ):
            np.testing.assert_array_equal(vpc.luma(target), content[4:14, left : left + 32])


def test_colours(vpc: Himpi) -> None:
    """RGB to NV12 as Pillow does, and back."""
    pixels = photo(64, 40)
    source, target = vpc.picture(pixels.tobytes(), 64, 40, RGB), vpc.empty(64, 40)
    vpc.vpc("convert_color_to_yuv420", source, target)
    expected = np.asarray(Image.fromarray(pixels).convert("YCbCr"))[..., 0]
    assert np.abs(vpc.luma(target).astype(int) - expected).max() <= 1
    back = vpc.empty(64, 40, BGR)
    vpc.vpc("convert_color", target, back)
    seen = vpc.content(back).reshape(40, 64, 3)[..., ::-1]
    assert np.abs(seen.astype(int) - pixels).mean() < 6  # chroma of four pixels is one


def test_pyramid(vpc: Himpi) -> None:
    """Two levels of a flat picture are flat; of noise they are smoother."""
    pixels = noise(80, 128)
    source = vpc.picture(pixels.tobytes(), 128, 80, GREY)
    targets = [vpc.empty(64, 40, GREY), vpc.empty(32, 20, GREY)]
    vpc.vpc("pyrdown", source, targets, 2, None, 0, {})
    deviations = [float(pixels.std()), *(float(vpc.luma(target).std()) for target in targets)]
    assert deviations == sorted(deviations, reverse=True)
    assert abs(float(vpc.luma(targets[1]).mean()) - float(pixels.mean())) < 3


def test_tasks_take_time_and_are_told_once(vpc: Himpi) -> None:
    """Not done, done, gone."""
    source, target = vpc.empty(64, 40), vpc.empty(32, 20)
    task, ret = vpc.himpi.vpc_resize(0, source, target, 0, 0, 0, 0)
    assert ret == 0
    assert vpc.himpi.vpc_get_process_result(0, task, 0) == VPC + TIMEOUT
    assert vpc.himpi.vpc_get_process_result(0, task, 1000) == 0
    assert vpc.himpi.vpc_get_process_result(0, task, 1000) == VPC + ILLEGAL_PARAM


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"picture_format": 999}, ILLEGAL_PARAM),
        ({"picture_width": 63}, ILLEGAL_PARAM),
        ({"picture_width": 8}, ILLEGAL_PARAM),
        ({"picture_width_stride": 60}, ILLEGAL_PARAM),
        ({"picture_height_stride": 39}, ILLEGAL_PARAM),
        ({"picture_buffer_size": 100}, ILLEGAL_PARAM),
        ({"picture_address": 0}, BAD_ADDR),
        ({"picture_address": 4096}, BAD_ADDR),
    ],
)
def test_pictures_that_are_refused(vpc: Himpi, values: dict[str, int], reason: int) -> None:
    """As inputs and as outputs."""
    good, bad = vpc.empty(64, 40), vpc.empty(64, 40) | values
    vpc.vpc("resize", bad, good, 0, 0, 0, expect=VPC + reason)
    vpc.vpc("resize", good, bad, 0, 0, 0, expect=VPC + reason)


def test_arguments_that_are_refused(vpc: Himpi) -> None:
    """Interpolation, factors, parts, sizes, counts."""
    source, target = vpc.empty(64, 40), vpc.empty(32, 20)
    illegal = VPC + ILLEGAL_PARAM
    vpc.vpc("resize", source, target, 0, 0, 5, expect=illegal)
    vpc.vpc("resize", source, target, 0.9, 0, 0, expect=illegal)
    for left, top, width, height in (
        (33, 0, 32, 20), (0, 0, 8, 20), (0, 0, 32, 4), (1, 0, 32, 20), (0, 22, 32, 20),
        (0, 0, 30, 20),
    ):  # fmt: skip
        part = region(target, left, top, width, height)
        vpc.vpc("crop", source, [part], 1, expect=illegal)
    with pytest.raises(TypeError):
        vpc.himpi.vpc_crop(0, source, [region(target, 0, 0, 32, 20)], 2, -1)
    with pytest.raises(TypeError):
        vpc.himpi.vpc_resize(0, [source], target, 0, 0, 0, -1)
    part = region(target, 0, 0, 32, 20) | resizing(34, 20)
    vpc.vpc("crop_resize", source, [part], 1, expect=illegal)
    vpc.vpc("convert_color", source, target, expect=illegal)
    border = {"left": 2, "border_type": 0}
    vpc.vpc("copy_make_border", source, target, border, expect=illegal)
    same = vpc.empty(64, 40)
    vpc.vpc("copy_make_border", source, same, {"border_type": 4}, expect=illegal)
    grey, half = vpc.empty(64, 40, GREY), vpc.empty(32, 20, GREY)
    vpc.vpc("pyrdown", grey, [half], 2, None, 0, {}, expect=illegal)
    kernel = [[1] * 5] * 5
    vpc.vpc("pyrdown", grey, [half], 1, kernel, 25, {}, expect=VPC + NOT_SUPPORT)


def test_numbers_that_are_none(vpc: Himpi, machine: Runtime) -> None:
    """The binding takes a NumPy integer for 0 without a word; the simulator tells."""
    source, target = vpc.empty(64, 40), vpc.empty(32, 20)
    wrong: dict[str, Any] = source | {"picture_width": np.int64(64)}
    vpc.vpc("resize", wrong, target, 0, 0, 0, expect=VPC + ILLEGAL_PARAM)
    assert "acl.himpi.vpc_resize ignores 'picture_width'" in machine.violations[0]


def test_memory_freed_in_flight(vpc: Himpi, machine: Runtime) -> None:
    """The result tells, and the simulator."""
    source, target = vpc.empty(64, 40), vpc.empty(32, 20)
    task, _ = vpc.himpi.vpc_resize(0, source, target, 0, 0, 0, -1)
    assert vpc.himpi.dvpp_free(source["picture_address"]) == 0
    vpc.blocks.remove(source["picture_address"])
    assert vpc.himpi.vpc_get_process_result(0, task, -1) == VPC + SYS_ERROR
    assert "freed while" in machine.violations[0]


# The system, channels, memory.


def test_the_system_comes_first(acl: Any) -> None:
    """And a context."""
    assert in_thread(acl.himpi.sys_init) == 107002
    assert acl.himpi.vpc_create_chn(0, {}) == VPC + NOT_READY
    assert acl.himpi.vdec_create_chn(0, {}) == VDEC + NOT_READY
    assert acl.himpi.venc_create_chn(0, {}) == VENC + NOT_READY
    assert acl.himpi.pngd_create_chn(0, {}) == PNGD + NOT_READY
    assert acl.himpi.sys_create_epoll(1) == (0, SYS + NOT_READY)
    assert acl.himpi.sys_init() == 0
    assert acl.himpi.sys_init() == 0
    assert acl.himpi.sys_exit() == 0
    assert acl.himpi.vpc_create_chn(0, {}) == VPC + NOT_READY
    assert acl.himpi.dvpp_get_version()[-1] == 0


def test_channels_are_numbered(media: Himpi, machine: Runtime) -> None:
    """Once each, within a range, on their card; forgotten ones are leaks."""
    create, destroy = media.himpi.vpc_create_chn, media.himpi.vpc_destroy_chn
    assert create(3, {}) == 0
    assert create(3, {}) == VPC + EXIST
    assert create(512, {}) == VPC + INVALID_CHN_ID
    assert destroy(4) == VPC + UNEXIST
    assert destroy(-1) == VPC + INVALID_CHN_ID
    assert media.himpi.vpc_sys_create_chn({}) == (0, 0)
    assert any("channel 3 of acl.himpi.vpc_create_chn" in line for line in machine.leaks())
    own, _ = media.acl.rt.get_context()
    other, _ = media.acl.rt.create_context(1)
    assert destroy(3) == VPC + UNEXIST
    assert media.acl.rt.destroy_context(other) == 0
    assert media.acl.rt.set_context(own) == 0
    assert destroy(3) == 0
    assert destroy(3) == VPC + UNEXIST
    assert destroy(0) == 0
    with pytest.raises(TypeError):
        create(1, [])


def test_memory(media: Himpi) -> None:
    """Sizes, devices, double free, memory of others."""
    malloc, free = media.himpi.dvpp_malloc, media.himpi.dvpp_free
    assert malloc(0, 0) == (0, SYS + ILLEGAL_PARAM)
    assert malloc(1, 64) == (0, SYS + ILLEGAL_PARAM)
    assert malloc(0, 8 << 20) == (0, SYS + NO_MEM)
    address, ret = malloc(0, 64)
    assert ret == 0
    assert media.acl.rt.free(address) == 107000
    assert free(address) == 0
    assert free(address) == SYS + ILLEGAL_PARAM
    theirs, _ = media.acl.rt.malloc(64, 0)
    assert free(theirs) == SYS + ILLEGAL_PARAM
    assert media.acl.rt.free(theirs) == 0


@pytest.mark.parametrize(("soc", "expected"), [("Ascend910B3", 0), ("Ascend310P3", 0xA0078011)])
def test_whose_memory_is_reached(soc: str, expected: int) -> None:
    """910B takes memory of acl.rt.malloc, 310P does not."""
    with simulate(soc_name=soc, time="modelled") as machine:
        acl: Any = importlib.import_module("acl")
        assert (acl.init(), acl.rt.set_device(0)) == (0, 0)
        media = Himpi(acl)
        assert media.himpi.vpc_create_chn(0, {}) == 0
        source, target = media.empty(64, 40), media.empty(32, 20)
        other, _ = acl.rt.malloc(source["picture_buffer_size"], 0)
        media.vpc("resize", source | {"picture_address": other}, target, 0, 0, 0, expect=expected)
        assert acl.rt.free(other) == 0
        assert media.himpi.vpc_destroy_chn(0) == 0
        media.close()
        assert machine.leaks() == []


# Decoding.


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


def output(media: Himpi, file: bytes, pixel_format: int = UNKNOWN) -> dict[str, int]:
    """hi_vdec_pic_info for what a file needs."""
    pointer = media.acl.util.bytes_to_ptr(file)
    information, ret = media.himpi.dvpp_get_image_info(JPEG, piece(pointer, file))
    assert ret == 0
    names = ("width", "height", "width_stride", "height_stride")
    address = media.upload(bytes(information["img_buf_size"]))
    return {name: information[name] for name in names} | {
        "pixel_format": pixel_format, "buffer_size": information["img_buf_size"],
        "vir_addr": address,
    }  # fmt: skip


def end_decoder(media: Himpi) -> None:
    """Stop and destroy channel 0."""
    assert media.himpi.vdec_destroy_chn(0) == VDEC + NOT_PERM
    assert media.himpi.vdec_stop_recv_stream(0) == 0
    assert media.himpi.vdec_destroy_chn(0) == 0


FILE = jpeg(photo(96, 64))


def test_jpeg_decode(media: Himpi) -> None:
    """Luma as Pillow reads it; structures as the binding makes them."""
    decoder(media)
    parameters, ret = media.himpi.vdec_get_chn_param(0)
    assert (parameters["pic_param"]["pixel_format"], ret) == (UNKNOWN, 0)
    parameters["pic_param"]["pixel_format"] = NV12
    assert media.himpi.vdec_set_chn_param(0, parameters) == 0
    wanted, address = output(media, FILE), media.upload(FILE)
    assert media.himpi.vdec_send_stream(0, piece(address, FILE), wanted, -1) == 0
    frame, supplement, stream, ret = media.himpi.vdec_get_frame(0, -1)
    assert ret == 0
    picture = frame["v_frame"]
    assert (picture["frame_flag"], picture["pts"], stream["addr"]) == (0, 40, address)
    assert supplement["type"] == JPEG
    row, rows = picture["width_stride"][0], picture["height_stride"][0]
    luma = media.download(picture["virt_addr"][0], row * rows).reshape(rows, row)
    np.testing.assert_array_equal(luma[:64, :96], ycbcr(FILE)[..., 0])
    assert media.himpi.vdec_release_frame(0, frame) == 0
    assert media.himpi.vdec_release_frame(0, frame) == VDEC + ILLEGAL_PARAM
    status, ret = media.himpi.vdec_query_status(0)
    assert (status["dec_stream_frames"], status["left_decoded_frames"], ret) == (1, 0, 0)
    assert media.himpi.vdec_get_chn_attr(0)[0]["frame_buf_cnt"] == 9
    end_decoder(media)


def test_odd_pictures_are_rounded_down(media: Himpi) -> None:
    """97x65 is decoded to 96x64."""
    decoder(media)
    file = jpeg(photo(97, 65), subsampling="4:4:4")
    wanted = output(media, file, NV12)
    assert (wanted["width"], wanted["height"]) == (96, 64)
    media.himpi.vdec_send_stream(0, piece(media.upload(file), file), wanted, -1)
    frame, _, _, ret = media.himpi.vdec_get_frame(0, -1)
    assert (frame["v_frame"]["frame_flag"], frame["v_frame"]["width"], ret) == (0, 96, 0)
    end_decoder(media)


def test_sizes_of_formats(media: Himpi) -> None:
    """What a file takes in a format, and what video takes."""
    pointer = media.acl.util.bytes_to_ptr(FILE)
    information, ret = media.himpi.vdec_get_jpegd_output_info(piece(pointer, FILE), RGB)
    assert ret == 0
    assert information["width_stride"] == align(96 * 3, 128)
    assert information["img_buf_size"] == align(96 * 3, 128) * 64
    attributes = {"width": 1920, "height": 1080}
    assert media.himpi.vdec_get_pic_buf_size(H264, attributes) == 1920 * 1088 * 3 // 2
    assert media.himpi.vdec_get_tmv_buf_size(H264, 1920, 1080) == 64 * 120 * 68
    assert media.himpi.vdec_get_tmv_buf_size(H265, 1920, 1080) == 16 * 120 * 68
    bad = media.acl.util.bytes_to_ptr(b"no JPEG file")
    assert media.himpi.dvpp_get_image_info(JPEG, piece(bad, b"no JPEG file"))[1] != 0
    result = media.himpi.dvpp_get_image_info(H264, piece(pointer, FILE))
    assert result == ({}, VDEC + NOT_SUPPORT)


@pytest.mark.parametrize(
    "file",
    [b"no JPEG file at all", FILE[:700], jpeg(photo(96, 64), progressive=True),
     jpeg(photo(64, 96))],
    ids=["no file", "half a file", "progressive", "other size"],
)  # fmt: skip
def test_files_that_cannot_be_decoded(media: Himpi, file: bytes) -> None:
    """The frame comes with its flag set; the next one is fine."""
    decoder(media)
    for data, flag in ((file, 1), (FILE, 0)):
        wanted = output(media, FILE, NV12)
        assert media.himpi.vdec_send_stream(0, piece(media.upload(data), data), wanted, -1) == 0
        frame, _, _, ret = media.himpi.vdec_get_frame(0, -1)
        assert (frame["v_frame"]["frame_flag"], ret) == (flag, 0)
    end_decoder(media)


def test_decoders_that_cannot_be(media: Himpi) -> None:
    """Types, modes, sizes, no room for pictures."""
    good = {"type": JPEG, "frame_buf_cnt": 1}
    for values in (
        {"type": PNG}, {"mode": 1}, {"frame_buf_cnt": 0},
        {"type": H264, "pic_width": 64, "pic_height": 128},
    ):  # fmt: skip
        assert media.himpi.vdec_create_chn(0, good | values) == VDEC + ILLEGAL_PARAM
    assert media.himpi.vdec_create_chn(256, good) == VDEC + INVALID_CHN_ID


def test_streams_that_are_refused(media: Himpi) -> None:
    """Not started, no data, no memory, no room, nothing there."""
    decoder(media, frame_buf_cnt=1)
    himpi, wanted, address = media.himpi, output(media, FILE, NV12), media.upload(FILE)
    send = himpi.vdec_send_stream
    assert himpi.vdec_get_frame(0, 0)[-1] == VDEC + BUF_EMPTY
    assert himpi.vdec_stop_recv_stream(0) == 0
    assert send(0, piece(address, FILE), wanted, 0) == VDEC + NOT_PERM
    assert himpi.vdec_start_recv_stream(0) == 0
    assert himpi.vdec_reset_chn(0) == VDEC + NOT_PERM
    assert send(0, piece(address, FILE, len=0), wanted, 0) == VDEC + ILLEGAL_PARAM
    assert send(0, piece(4096, FILE), wanted, 0) == VDEC + BAD_ADDR
    assert send(0, piece(address, FILE), wanted | {"vir_addr": 0}, 0) == VDEC + BAD_ADDR
    bad = wanted | {"pixel_format": 77}
    assert send(0, piece(address, FILE), bad, 0) == VDEC + ILLEGAL_PARAM
    assert send(1, piece(address, FILE), wanted, 0) == VDEC + UNEXIST
    assert send(0, piece(address, FILE), wanted, 0) == 0
    assert send(0, piece(address, FILE), wanted, 0) == VDEC + BUF_FULL
    assert himpi.vdec_get_frame(0, 0)[-1] == VDEC + BUF_EMPTY  # still being decoded
    assert himpi.vdec_get_frame(0, 100)[-1] == 0
    assert himpi.vdec_set_chn_param(0, {"type": H264}) == VDEC + ILLEGAL_PARAM
    other = {"type": JPEG, "pic_param": {"pixel_format": 77}}
    assert himpi.vdec_set_chn_param(0, other) == VDEC + ILLEGAL_PARAM
    assert send(0, piece(address, FILE), wanted, 0) == 0
    assert himpi.vdec_stop_recv_stream(0) == 0
    assert himpi.vdec_reset_chn(0) == 0
    assert himpi.vdec_get_frame(0, 0)[-1] == VDEC + BUF_EMPTY
    assert himpi.vdec_destroy_chn(0) == 0


def test_a_getter_waits_for_what_another_thread_sends(media: Himpi) -> None:
    """`get_frame` without a limit is awake when a stream comes."""
    decoder(media)
    context, _ = media.acl.rt.get_context()
    frames: list[Any] = []
    ready = threading.Event()

    def get() -> None:
        media.acl.rt.set_context(context)
        ready.set()
        frames.append(media.himpi.vdec_get_frame(0, -1))

    thread = threading.Thread(target=get)
    thread.start()
    assert ready.wait(5)
    wanted = output(media, FILE, NV12)
    assert media.himpi.vdec_send_stream(0, piece(media.upload(FILE), FILE), wanted, -1) == 0
    thread.join(5)
    assert frames[0][-1] == 0
    end_decoder(media)


def test_nothing_is_ever_sent(media: Himpi, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait without limit does not hang a test."""
    decoder(media)
    monkeypatch.setattr(himpi_system, "_PATIENCE_S", 0.01)
    assert media.himpi.vdec_get_frame(0, -1)[-1] == VDEC + BUF_EMPTY
    end_decoder(media)


def png_stream(media: Himpi, file: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """hi_img_stream and hi_pic_info of a file."""
    stream = {"type": PNG, "addr": media.acl.util.bytes_to_ptr(file), "len": len(file)}
    information, ret = media.himpi.png_get_image_info(stream)
    assert ret == 0
    wanted = {
        "picture_address": media.upload(bytes(information["img_buf_size"])),
        "picture_buffer_size": information["img_buf_size"],
        "picture_width": information["width"], "picture_height": information["height"],
        "picture_width_stride": information["width_stride"],
        "picture_height_stride": information["height_stride"], "picture_format": UNKNOWN,
    }  # fmt: skip
    return stream | {"addr": media.upload(file)}, wanted


def png(mode: str) -> bytes:
    """A file."""
    buffer = io.BytesIO()
    Image.fromarray(photo(96, 64)).convert(mode).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_png_decode(media: Himpi, mode: str) -> None:
    """Exactly."""
    himpi = media.himpi
    assert himpi.pngd_create_chn(0, {"stream_que_cnt": 1}) == 0
    stream, wanted = png_stream(media, png(mode))
    assert himpi.pngd_send_stream(0, stream, wanted, 0) == 0
    picture, _, ret = himpi.pngd_get_image_data(0, -1)
    assert ret == 0
    data = media.content(picture).reshape(-1, wanted["picture_width_stride"])
    seen = data[:64, : 96 * len(mode)].reshape(64, 96, len(mode))
    np.testing.assert_array_equal(seen[..., :3], photo(96, 64))
    assert (seen[..., 3:] == 255).all()
    assert himpi.pngd_destroy_chn(0) == 0


def test_png_files_that_are_refused(media: Himpi) -> None:
    """Another type, no memory; a broken file fails when it is fetched."""
    himpi = media.himpi
    assert himpi.pngd_create_chn(0, {}) == 0
    stream, wanted = png_stream(media, png("RGB"))
    assert himpi.pngd_send_stream(0, stream | {"type": JPEG}, wanted, 0) == PNGD + ILLEGAL_PARAM
    assert himpi.pngd_send_stream(0, stream | {"addr": 64}, wanted, 0) == PNGD + BAD_ADDR
    assert himpi.pngd_send_stream(0, stream | {"len": 60}, wanted, 0) == 0
    assert himpi.pngd_get_image_data(0, -1) == ({}, {}, PNGD + SYS_ERROR)
    assert himpi.pngd_get_image_data(0, 0) == ({}, {}, PNGD + BUF_EMPTY)
    assert himpi.pngd_destroy_chn(0) == 0


# Encoding.


def encoder(media: Himpi, kind: int, width: int = 128, height: int = 128, **values: int) -> int:
    """The code of making channel 0."""
    attributes = {
        "type": kind, "profile": 0, "max_pic_width": width, "pic_width": width,
        "max_pic_height": height, "pic_height": height, "buf_size": 1 << 20, "is_by_frame": 1,
    }  # fmt: skip
    return int(media.himpi.venc_create_chn(0, {"venc_attr": attributes | values}))


def frame_of(address: int, **values: Any) -> dict[str, Any]:
    """hi_video_frame_info."""
    picture = {
        "width": 128, "height": 128, "field": 4, "pixel_format": NV12, "video_format": 0,
        "width_stride": [128, 0, 0], "height_stride": [0, 0, 0], "virt_addr": [address, 0, 0],
        "pts": 7,
    }  # fmt: skip
    return {"v_frame": picture | values, "pool_id": 0, "mod_id": 8}


def planes_of(file: bytes) -> bytes:
    """NV12 of a JPEG file."""
    pixels = ycbcr(file).astype(np.uint8)
    return pixels[..., 0].tobytes() + pixels[::2, ::2, 1:].tobytes()


PICTURE = jpeg(photo(128, 128))


def fetched(media: Himpi) -> tuple[bytes, dict[str, Any]]:
    """The next stream of channel 0 through an epoll, as the documentation does it."""
    himpi = media.himpi
    descriptor = himpi.venc_get_fd(0)
    epoll, ret = himpi.sys_create_epoll(10)
    assert ret == 0
    event = {"data": descriptor, "events": 1}
    assert himpi.sys_ctl_epoll(epoll, 1, descriptor, event) == 0
    events, count, ret = himpi.sys_wait_epoll(epoll, 3, 1000)
    assert (len(events), count, ret) == (3, 1, 0)
    assert events[0] == event
    status, ret = himpi.venc_query_status(0)
    assert (status["cur_packs"], ret) == (1, 0)
    stream, ret = himpi.venc_get_stream(0, {"pack_cnt": status["cur_packs"]}, 1000)
    assert ret == 0
    pack = stream["pack"][0]
    assert pack["pts"] == 7
    assert himpi.sys_ctl_epoll(epoll, 3, descriptor, event) == 0
    assert himpi.venc_close_fd(0) == 0
    assert himpi.sys_close_epoll(epoll) == 0
    return media.download(pack["addr"], pack["len"]).tobytes(), stream


def test_jpeg_encode(media: Himpi) -> None:
    """Pillow reads what went in; `qfactor` is the quality."""
    himpi = media.himpi
    assert encoder(media, JPEG) == 0
    sizes = []
    address = media.upload(planes_of(PICTURE))
    assert himpi.venc_start_chn(0, {"recv_pic_num": -1}) == 0
    for quality in (100, 10):
        parameters, ret = himpi.venc_get_jpeg_param(0)
        parameters["qfactor"] = quality
        assert (himpi.venc_set_jpeg_param(0, parameters), ret) == (0, 0)
        assert himpi.venc_send_frame(0, frame_of(address), 0) == 0
        data, stream = fetched(media)
        sizes.append(len(data))
        difference = np.abs(ycbcr(data)[..., 0] - ycbcr(PICTURE)[..., 0]).mean()
        assert difference < (2 if quality == 100 else 12)
        assert himpi.venc_release_stream(0, stream) == 0
        assert himpi.venc_release_stream(0, stream) == VENC + ILLEGAL_PARAM
    assert sizes[1] < sizes[0]
    assert himpi.venc_set_jpeg_param(0, {"qfactor": 0}) == VENC + ILLEGAL_PARAM
    assert himpi.venc_request_idr(0, 1) == VENC + NOT_SUPPORT
    assert himpi.venc_destroy_chn(0) == VENC + NOT_PERM
    assert himpi.venc_stop_chn(0) == 0
    assert himpi.venc_destroy_chn(0) == 0


@pytest.mark.parametrize("kind", [H264, H265])
def test_video_there_and_back(media: Himpi, kind: int) -> None:
    """What the encoder makes is what the decoder shows; a stream never released is freed."""
    himpi = media.himpi
    assert encoder(media, kind) == 0
    assert himpi.venc_start_chn(0, {"recv_pic_num": -1}) == 0
    address = media.upload(planes_of(PICTURE))
    assert himpi.venc_send_frame(0, frame_of(address), 0) == 0
    assert himpi.venc_request_idr(0, 1) == 0
    data, _ = fetched(media)
    assert himpi.venc_stop_chn(0) == 0
    assert himpi.venc_destroy_chn(0) == 0
    decoder(media, kind)
    parameters, _ = himpi.vdec_get_chn_param(0)
    parameters["video_param"]["out_order"] = 1
    assert himpi.vdec_set_chn_param(0, parameters) == 0
    assert himpi.vdec_get_chn_param(0)[0]["video_param"]["out_order"] == 1
    size = 128 * 128 * 3 // 2
    wanted = {"pixel_format": NV12, "vir_addr": media.upload(bytes(size)), "buffer_size": size}
    assert himpi.vdec_send_stream(0, piece(media.upload(data), data), wanted, 0) == 0
    frame, _, _, ret = himpi.vdec_get_frame(0, 1000)
    assert (ret, frame["v_frame"]["frame_flag"]) == (0, 0)
    luma = media.download(wanted["vir_addr"], 128 * 128).reshape(128, 128)
    assert np.abs(luma - ycbcr(PICTURE)[..., 0]).mean() < 2
    real = bytes.fromhex("00000001 6742c01e 00000001 65888040")
    two = video_stream.access_unit(PICTURE, 1) * 2
    for bad in (real, two):
        assert himpi.vdec_send_stream(0, piece(media.upload(bad), bad), wanted, 0) == 0
        frame, _, _, ret = himpi.vdec_get_frame(0, 1000)
        assert (ret, frame["v_frame"]["frame_flag"]) == (0, 1)
    assert himpi.vdec_send_stream(0, piece(0, b"", end_of_stream=1), {}, 0) == 0
    end_decoder(media)


def test_encoders_that_cannot_be(media: Himpi) -> None:
    """Types, sizes, no buffer."""
    illegal = VENC + ILLEGAL_PARAM
    assert encoder(media, PNG) == illegal
    assert encoder(media, H264, 64, 128) == illegal
    assert encoder(media, JPEG, 33, 64) == illegal
    assert encoder(media, JPEG, max_pic_width=64) == illegal
    assert encoder(media, JPEG, buf_size=0) == illegal
    with pytest.raises(TypeError):
        media.himpi.venc_create_chn(0, None)


def test_pictures_the_encoder_refuses(media: Himpi) -> None:
    """Not started, other sizes, formats, strides, memory; too many, too large."""
    himpi = media.himpi
    assert encoder(media, H264, buf_size=100) == 0
    assert himpi.venc_get_jpeg_param(0) == ({}, VENC + NOT_SUPPORT)
    address = media.upload(planes_of(PICTURE))
    send = himpi.venc_send_frame
    assert send(0, frame_of(address), 0) == VENC + NOT_PERM
    assert himpi.venc_start_chn(0, {}) == 0
    for values in (
        {"width": 126}, {"pixel_format": 7}, {"width_stride": [120]}, {"height_stride": [96]},
    ):  # fmt: skip
        assert send(0, frame_of(address, **values), 0) == VENC + ILLEGAL_PARAM
    assert send(0, frame_of(0), 0) == VENC + BAD_ADDR
    assert himpi.venc_get_stream(0, {"pack_cnt": 0}, 0) == ({}, VENC + ILLEGAL_PARAM)
    assert himpi.venc_get_stream(0, {"pack_cnt": 1}, 0) == ({}, VENC + BUF_EMPTY)
    for _ in range(8):
        assert send(0, frame_of(address), 0) == 0
    assert send(0, frame_of(address), 0) == VENC + BUF_FULL
    assert himpi.venc_get_stream(0, {"pack_cnt": 1}, -1) == ({}, VENC + BUF_FULL)
    assert himpi.venc_stop_chn(0) == 0
    assert himpi.venc_destroy_chn(0) == 0


def test_settings_of_the_encoders(media: Himpi) -> None:
    """Kept by kind."""
    himpi = media.himpi
    settings, ret = himpi.venc_get_mod_param({"mod_type": 4})
    assert (settings["jpeg_mod_param"]["one_stream_buf"], ret) == (0, 0)
    settings["jpeg_mod_param"]["one_stream_buf"] = 1
    assert himpi.venc_set_mod_param(settings) == 0
    assert himpi.venc_get_mod_param({"mod_type": 4})[0] == settings
    assert himpi.venc_get_mod_param({"mod_type": 9}) == ({}, VENC + ILLEGAL_PARAM)


def test_epolls(media: Himpi) -> None:
    """Nothing to wait for, wrong descriptors, twice, closed."""
    himpi = media.himpi
    assert himpi.sys_create_epoll(0) == (0, SYS + ILLEGAL_PARAM)
    epoll, _ = himpi.sys_create_epoll(1)
    event = {"events": 1, "data": 5}
    assert himpi.sys_ctl_epoll(epoll, 1, 12345, event) == SYS + ILLEGAL_PARAM
    assert encoder(media, JPEG) == 0
    descriptor = himpi.venc_get_fd(0)
    assert himpi.sys_ctl_epoll(epoll, 3, descriptor, event) == SYS + UNEXIST
    assert himpi.sys_ctl_epoll(epoll, 9, descriptor, event) == SYS + ILLEGAL_PARAM
    assert himpi.sys_ctl_epoll(epoll, 1, descriptor, event) == 0
    assert himpi.sys_ctl_epoll(epoll, 1, descriptor, event) == SYS + EXIST
    assert himpi.sys_ctl_epoll(epoll, 2, descriptor, event | {"data": 6}) == 0
    assert himpi.sys_wait_epoll(epoll, 1, 10) == ([{"events": 0, "data": 0}], 0, 0)
    assert himpi.sys_close_epoll(epoll) == 0
    assert himpi.sys_close_epoll(epoll) == SYS + UNEXIST
    assert himpi.sys_wait_epoll(epoll, 1, 10) == ([], 0, SYS + UNEXIST)
    assert himpi.venc_destroy_chn(0) == 0


# Failures on demand.


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


def failing_calls(run: Callable[[Any], None]) -> list[str]:
    """The calls of a program, once each, without those that undo."""
    with simulate(time="modelled") as machine:
        acl: Any = importlib.import_module("acl")
        assert (acl.init(), acl.rt.set_device(0)) == (0, 0)
        machine.log.clear()
        run(acl)
        assert acl.rt.reset_device(0) == 0
        assert machine.leaks() == []
        assert machine.violations == []
        names = dict.fromkeys(machine.log)
    undoing = ("destroy", "free", "stop", "exit", "reset_device", "util")
    return [name for name in names if not any(word in name for word in undoing)]


@pytest.mark.parametrize("call", failing_calls(program))
def test_a_failing_call_leaves_nothing(call: str) -> None:
    """Each call made to fail: the program ends, nothing leaks, and it works the next time."""
    with simulate(time="modelled") as machine:
        acl: Any = importlib.import_module("acl")
        assert (acl.init(), acl.rt.set_device(0)) == (0, 0)
        machine.faults.append(Fault(call, code=500000))
        with pytest.raises(CallError):
            program(acl)
        program(acl)
        assert acl.rt.reset_device(0) == 0
        assert machine.leaks() == []
