"""Encoding with the simulated acl.himpi, waiting for streams, and every misuse of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from npuserve.testing.simulator import video_stream
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.himpi import (
    BAD_ADDR,
    BUF_EMPTY,
    BUF_FULL,
    EXIST,
    H264,
    H265,
    ILLEGAL_PARAM,
    JPEG,
    NOT_PERM,
    NOT_SUPPORT,
    PNG,
    SYS,
    UNEXIST,
    VENC,
    Himpi,
    decoder,
    end_decoder,
    frame_of,
    opened,
    piece,
)
from tests.testing.simulator.media import NV12, jpeg, photo
from tests.testing.simulator.test_media_image import ycbcr


@pytest.fixture
def media(acl: Any, machine: Runtime) -> Iterator[Himpi]:
    """Nothing is left at the end."""
    yield from opened(acl, machine)


def encoder(media: Himpi, kind: int, width: int = 128, height: int = 128, **values: int) -> int:
    """The code of making channel 0."""
    attributes = {
        "type": kind, "profile": 0, "max_pic_width": width, "pic_width": width,
        "max_pic_height": height, "pic_height": height, "buf_size": 1 << 20, "is_by_frame": 1,
    }  # fmt: skip
    return int(media.himpi.venc_create_chn(0, {"venc_attr": attributes | values}))


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
