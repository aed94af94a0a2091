"""`acl.himpi.venc_*`: encoding JPEG and video.

Pictures go in by `send_frame`; streams are fetched by `get_stream` and lie in memory of the channel
until `release_stream`. What video streams look like here: `video_stream.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.testing.simulator import video_stream
from npuserve.testing.simulator.binding import Pending, entry
from npuserve.testing.simulator.device import JPEGE, VENC
from npuserve.testing.simulator.himpi_decode import H264, H265, JPEG
from npuserve.testing.simulator.himpi_system import (
    MediaChannel,
    MediaTask,
    Module,
    Reason,
    add_channel,
    check_new,
    find_channel,
    numbers,
    reach,
    refusal,
    refusing,
    remove_channel,
    require_system,
    start_task,
    take_first,
    watching,
)
from npuserve.testing.simulator.image_files import encode_jpeg
from npuserve.testing.simulator.media_desc import PicDesc
from npuserve.testing.simulator.media_place import Limits, Place, place_of
from npuserve.testing.simulator.pictures import PixelFormat

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

_LIMIT = 256
_SIDES = {JPEG: range(32, 8193), H264: range(128, 4097), H265: range(128, 4097)}
_YUV420 = {PixelFormat.NV12, PixelFormat.NV21}
_PACKED = {
    PixelFormat.YUYV_PACKED_422, PixelFormat.UYVY_PACKED_422, PixelFormat.YVYU_PACKED_422,
    PixelFormat.VYUY_PACKED_422,
}  # fmt: skip
_QUALITIES = range(1, 101)
_VIDEO_QUALITY = 95
_MOST_WAITING = 8
_reach = reach(Module.VENC)


@dataclass(eq=False)
class EncoderChannel(MediaChannel):
    """A channel that encodes to one kind of stream."""

    attributes: dict[str, int] = field(default_factory=dict)
    jpeg: dict[str, Any] = field(default_factory=dict)
    lent: dict[int, int] = field(default_factory=dict)  # address of a stream → its bytes
    fetched: int = 0

    @property
    def kind(self) -> int:
        """hi_payload_type."""
        return self.attributes["type"]


_find = partial(find_channel, kind=EncoderChannel, module=Module.VENC, limit=_LIMIT)
watching("venc", EncoderChannel, Module.VENC, _LIMIT)

_ATTRIBUTES = (
    "type", "max_pic_width", "max_pic_height", "buf_size", "profile", "is_by_frame", "pic_width",
    "pic_height",
)  # fmt: skip


@entry("acl.himpi.venc_create_chn", "io")
def venc_create_chn(runtime: Runtime, number: int, attributes: Any) -> None:
    """Open the channel of a number."""
    call = "acl.himpi.venc_create_chn"
    if not isinstance(attributes, dict):
        raise TypeError(f"{call} args parse failed: dict expected, got {attributes!r}")
    values = numbers(runtime, call, attributes.get("venc_attr"), *_ATTRIBUTES)
    numbers(runtime, call, attributes.get("rc_attr"), "rc_mode")
    stream = check_new(runtime, EncoderChannel, Module.VENC, number, _LIMIT)
    sides = (values["pic_width"], values["pic_height"])
    allowed = _SIDES.get(values["type"], range(0))
    if not all(side in allowed and side % 2 == 0 for side in sides):
        text = f"type {values['type']} with pictures of {sides[0]}x{sides[1]}"
        raise refusal(Module.VENC, Reason.ILLEGAL_PARAM, text)
    if sides[0] > values["max_pic_width"] or sides[1] > values["max_pic_height"]:
        raise refusal(Module.VENC, Reason.ILLEGAL_PARAM, "larger than max_pic_width, …height")
    if not values["buf_size"]:
        raise refusal(Module.VENC, Reason.ILLEGAL_PARAM, "buf_size is 0")
    tables = {name: [0] * 64 for name in ("y_qt", "cb_qt", "cr_qt")}
    jpeg = {"qfactor": 100, **tables, "mcu_per_ecs": 0, "ecs_output_en": 0}
    add_channel(runtime, EncoderChannel(number, stream, attributes=values, jpeg=jpeg), call)


@entry("acl.himpi.venc_destroy_chn", "i")
def venc_destroy_chn(runtime: Runtime, number: int) -> Pending:
    """Close a channel that was stopped, and free what it still has."""
    channel = _find(runtime, number=number)
    if channel.is_started:
        raise refusal(Module.VENC, Reason.NOT_PERM, "venc_stop_chn comes first")
    pending = remove_channel(runtime, channel)
    for address in channel.lent:
        channel.stream.context.card.memory.free(address, dvpp=True)
    return pending


@entry("acl.himpi.venc_start_chn", "io")
def venc_start_chn(runtime: Runtime, number: int, parameters: Any) -> None:
    """Take pictures from now on."""
    numbers(runtime, "acl.himpi.venc_start_chn", parameters, "recv_pic_num")
    _find(runtime, number=number).is_started = True


@entry("acl.himpi.venc_stop_chn", "i")
def venc_stop_chn(runtime: Runtime, number: int) -> None:
    """Take none any more."""
    _find(runtime, number=number).is_started = False


@entry("acl.himpi.venc_request_idr", "ii")
def venc_request_idr(runtime: Runtime, number: int, at_once: int) -> None:
    """Every picture is a key frame here."""
    channel = _find(runtime, number=number)
    if channel.kind == JPEG:
        raise refusal(Module.VENC, Reason.NOT_SUPPORT, "JPEG has no key frames")


@entry("acl.himpi.venc_get_jpeg_param", "i", failure=({},))
def venc_get_jpeg_param(runtime: Runtime, number: int) -> dict[str, Any]:
    """Settings of a JPEG channel, as `venc_set_jpeg_param` takes them."""
    channel = _find(runtime, number=number)
    _require_jpeg(channel)
    return dict(channel.jpeg)


@entry("acl.himpi.venc_set_jpeg_param", "io")
def venc_set_jpeg_param(runtime: Runtime, number: int, parameters: Any) -> None:
    """Change settings; the quality is `qfactor`, the tables are taken and not used."""
    call = "acl.himpi.venc_set_jpeg_param"
    quality = numbers(runtime, call, parameters, "qfactor")["qfactor"]
    channel = _find(runtime, number=number)
    _require_jpeg(channel)
    if quality not in _QUALITIES:
        raise refusal(Module.VENC, Reason.ILLEGAL_PARAM, f"qfactor {quality} is not 1 to 100")
    channel.jpeg |= {name: parameters[name] for name in channel.jpeg if name in parameters}


def _require_jpeg(channel: EncoderChannel) -> None:
    if channel.kind != JPEG:
        text = f"channel {channel.number} is not one for JPEG"
        raise refusal(Module.VENC, Reason.NOT_SUPPORT, text)


# Settings of the module: kept and given back.

_COMMON = ("one_stream_buf", "mini_buf_mode")
_VIDEO = (*_COMMON, "low_power_mode", "vb_src", "qp_hist_en", "max_user_data_len")
_MODULES = {
    1: ("venc_mod_param", ("buf_cache", "frame_buf_recycle")),
    2: ("h264_mod_param", _VIDEO),
    3: ("h265_mod_param", _VIDEO),
    4: ("jpeg_mod_param", (*_COMMON, "clear_stream_buf", "dering_mode")),
}


def _settings(runtime: Runtime, kind: int) -> dict[str, int]:
    if kind not in _MODULES:
        raise refusal(Module.VENC, Reason.ILLEGAL_PARAM, f"mod_type {kind}")
    found: dict[str, int] = runtime.encoder_settings.setdefault(
        kind, dict.fromkeys(_MODULES[kind][1], 0)
    )
    return found


@entry("acl.himpi.venc_get_mod_param", "o", failure=({},))
def venc_get_mod_param(runtime: Runtime, parameters: Any) -> dict[str, Any]:
    """Settings of all channels of a kind."""
    require_system(runtime, Module.VENC)
    call = "acl.himpi.venc_get_mod_param"
    kind = numbers(runtime, call, parameters, "mod_type")["mod_type"]
    settings = dict(_settings(runtime, kind))
    return {"mod_type": kind, _MODULES[kind][0]: settings}


@entry("acl.himpi.venc_set_mod_param", "o")
def venc_set_mod_param(runtime: Runtime, parameters: Any) -> None:
    """Change them."""
    require_system(runtime, Module.VENC)
    call = "acl.himpi.venc_set_mod_param"
    kind = numbers(runtime, call, parameters, "mod_type")["mod_type"]
    settings = _settings(runtime, kind)
    name, fields = _MODULES[kind]
    settings |= numbers(runtime, call, parameters.get(name), *fields)


# Encoding.


@entry("acl.himpi.venc_send_frame", "ioi")
def venc_send_frame(runtime: Runtime, number: int, frame: Any, wait_ms: int) -> None:
    """Encode a picture."""
    call = "acl.himpi.venc_send_frame"
    if not isinstance(frame, dict):
        raise TypeError(f"{call} args parse failed: dict expected, got {frame!r}")
    numbers(runtime, call, frame, "pool_id", "mod_id")
    channel = _find(runtime, number=number)
    place, pts = _picture(runtime, call, channel, frame.get("v_frame"))
    if not channel.is_started:
        raise refusal(Module.VENC, Reason.NOT_PERM, "venc_start_chn comes first")
    if len(channel.tasks) >= _MOST_WAITING:
        raise refusal(Module.VENC, Reason.BUF_FULL, f"{len(channel.tasks)} streams wait")
    encoded: dict[str, Any] = {"pts": pts}

    def work() -> None:
        picture = place.read(runtime)
        if channel.kind == JPEG:
            encoded["data"] = encode_jpeg(picture, channel.jpeg["qfactor"])
        else:
            file = encode_jpeg(picture, _VIDEO_QUALITY)
            encoded["data"] = video_stream.access_unit(file, 0 if channel.kind == H265 else 1)

    engine = JPEGE if channel.kind == JPEG else VENC
    start_task(runtime, channel, engine, "encode", place.pixels, work, encoded)


def _picture(runtime: Runtime, call: str, channel: EncoderChannel, value: Any) -> tuple[Place, int]:
    """Where the picture of a frame is, and its time."""
    width, height, pixel_format, pts = numbers(
        runtime, call, value, "width", "height", "pixel_format", "pts"
    ).values()
    frame = value or {}
    address, row, rows = (
        (frame.get(name) or [0])[0] for name in ("virt_addr", "width_stride", "height_stride")
    )
    sides = (channel.attributes["pic_width"], channel.attributes["pic_height"])
    if (width, height) != sides:
        text = f"{width}x{height} for a channel of {sides[0]}x{sides[1]}"
        raise refusal(Module.VENC, Reason.ILLEGAL_PARAM, text)
    desc = PicDesc(address, 1 << 32, pixel_format, width, height, row, rows or height)
    formats = _YUV420 | _PACKED if channel.kind == JPEG else _YUV420
    limits = Limits((32, 32), (8192, 8192), (16, 1))
    with refusing(Module.VENC):
        return place_of(runtime, desc, limits, formats, _reach), pts


@entry("acl.himpi.venc_query_status", "i", failure=({},))
def venc_query_status(runtime: Runtime, number: int) -> dict[str, Any]:
    """How far a channel is; `cur_packs` is what `venc_get_stream` wants to know."""
    channel = _find(runtime, number=number)
    now = runtime.clock.now_ns()
    over = sum(each.task is not None and each.task.end_ns <= now for each in channel.tasks)
    information = (
        "ref_type", "pic_bytes", "pic_cnt", "start_qp", "mean_qp", "is_p_skip", "residual_bits",
        "head_bits", "madi_val", "madp_val", "sse_sum", "sse_lcu_cnt",
    )  # fmt: skip
    left = len(channel.tasks) - over
    return {
        "left_pics": left, "left_stream_bytes": 0, "left_stream_frames": over,
        "cur_packs": min(over, 1), "left_recv_pics": 0, "left_enc_pics": left,
        "is_jpeg_snap_end": 0, "release_pic_pts": 0,
        "stream_info": dict.fromkeys(information, 0) | {"psnr_val": 0.0},
    }  # fmt: skip


@entry("acl.himpi.venc_get_stream", "ioi", failure=({},))
def venc_get_stream(runtime: Runtime, number: int, stream: Any, wait_ms: int) -> Pending:
    """The next stream, of one pack."""
    call = "acl.himpi.venc_get_stream"
    packs = numbers(runtime, call, stream, "pack_cnt")["pack_cnt"]
    channel = _find(runtime, number=number)
    if packs < 1:
        raise refusal(Module.VENC, Reason.ILLEGAL_PARAM, "pack_cnt is 0: ask venc_query_status")

    def result(first: MediaTask) -> tuple[Any, ...]:
        if first.failure is not None:
            raise refusal(Module.VENC, Reason.SYS_ERROR, str(first.failure))
        data = np.frombuffer(first.data["data"], np.uint8)
        if sum(channel.lent.values()) + data.size > channel.attributes["buf_size"]:
            text = f"{data.size} bytes do not fit: release streams, or make buf_size larger"
            raise refusal(Module.VENC, Reason.BUF_FULL, text)
        memory = channel.stream.context.card.memory
        address = memory.allocate(data.size, "acl.himpi.venc_get_stream", dvpp=True)
        runtime.bytes_at(address, data.size)[:] = data
        channel.lent[address] = data.size
        channel.fetched += 1
        pack = {
            "phys_addr": address, "input_addr": 0, "addr": address, "len": data.size,
            "pts": first.data["pts"], "is_frame_end": 1, "offset": 0, "data_num": 0,
        }  # fmt: skip
        return ({"pack_cnt": 1, "seq": channel.fetched - 1, "pack": [pack]},)

    return take_first(runtime, channel, Module.VENC, wait_ms, result)


@entry("acl.himpi.venc_release_stream", "io")
def venc_release_stream(runtime: Runtime, number: int, stream: Any) -> None:
    """Give the memory of a stream back."""
    if not isinstance(stream, dict):
        raise TypeError("acl.himpi.venc_release_stream args parse failed: dict expected")
    channel = _find(runtime, number=number)
    addresses = [pack["addr"] for pack in stream.get("pack", [])]
    if not addresses or any(address not in channel.lent for address in addresses):
        text = "no such stream was fetched, or it was released"
        raise refusal(Module.VENC, Reason.ILLEGAL_PARAM, text)
    for address in addresses:
        channel.stream.context.card.memory.free(address, dvpp=True)
        del channel.lent[address]
