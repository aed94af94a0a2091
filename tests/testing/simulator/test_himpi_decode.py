"""Decoding with the simulated acl.himpi, and every misuse of it."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from npuserve.testing.simulator import himpi_system
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.himpi import (
    BAD_ADDR,
    BUF_EMPTY,
    BUF_FULL,
    FILE,
    H264,
    H265,
    ILLEGAL_PARAM,
    INVALID_CHN_ID,
    JPEG,
    NOT_PERM,
    NOT_SUPPORT,
    PNG,
    PNGD,
    SYS_ERROR,
    UNEXIST,
    UNKNOWN,
    VDEC,
    Himpi,
    decoder,
    end_decoder,
    opened,
    piece,
)
from tests.testing.simulator.media import NV12, RGB, align, jpeg, photo
from tests.testing.simulator.test_media_image import ycbcr


@pytest.fixture
def media(acl: Any, machine: Runtime) -> Iterator[Himpi]:
    """Nothing is left at the end."""
    yield from opened(acl, machine)


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
