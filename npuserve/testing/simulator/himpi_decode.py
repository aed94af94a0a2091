"""`acl.himpi.vdec_*` and `pngd_*`: decoding JPEG, PNG and video.

Streams go in by `send_stream` and pictures are fetched by `get_frame`; input and output memory is
the program's until then. What video streams look like here: `video_stream.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.testing.simulator import video_stream
from npuserve.testing.simulator.binding import Pending, bare, entry
from npuserve.testing.simulator.device import JPEGD, PNGD, VDEC
from npuserve.testing.simulator.faults import RefusedError
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
from npuserve.testing.simulator.image_files import (
    decode_jpeg,
    decode_png,
    jpeg_info,
    png_info,
)
from npuserve.testing.simulator.media_jpeg import SAME_SAMPLING, strides
from npuserve.testing.simulator.media_place import Place, in_flight
from npuserve.testing.simulator.pictures import (
    LAYOUTS,
    Area,
    Bytes,
    Layout,
    Picture,
    PixelFormat,
    align_up,
    convert,
    crop,
)

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

JPEG, H264, H265, PNG = 26, 96, 265, 268  # hi_payload_type
_LIMIT = 256
_VIDEO_STRIDE = (16, 2)
_VIDEO_SIDES = range(128, 8193)
_DECODED = {
    PixelFormat.NV12, PixelFormat.NV21, PixelFormat.RGB_888, PixelFormat.BGR_888,
}  # fmt: skip
_reach = reach(Module.VDEC)


@dataclass(eq=False)
class DecoderChannel(MediaChannel):
    """A channel that decodes one kind of stream."""

    attributes: dict[str, int] = field(default_factory=dict)
    pixel_format: int = PixelFormat.UNKNOWN
    parameters: dict[str, Any] = field(default_factory=dict)
    lent: set[int] = field(default_factory=set)  # addresses of pictures that were fetched
    decoded: int = 0

    @property
    def kind(self) -> int:
        """hi_payload_type."""
        return self.attributes["type"]


_find = partial(find_channel, kind=DecoderChannel, module=Module.VDEC, limit=_LIMIT)
watching("vdec", DecoderChannel, Module.VDEC, _LIMIT)

_ATTRIBUTES = (
    "type", "mode", "pic_width", "pic_height", "stream_buf_size", "frame_buf_size",
    "frame_buf_cnt",
)  # fmt: skip
_VIDEO_ATTRIBUTES = ("ref_frame_num", "temporal_mvp_en", "tmv_buf_size")
_VIDEO_PARAMETERS = (
    "composite_dec_en", "slice_input_en", "err_threshold", "dec_mode", "out_order",
    "compress_mode", "video_format", "quick_mark_mode",
)  # fmt: skip


@entry("acl.himpi.vdec_create_chn", "io")
def vdec_create_chn(runtime: Runtime, number: int, attributes: Any) -> None:
    """Open the channel of a number."""
    call = "acl.himpi.vdec_create_chn"
    values = numbers(runtime, call, attributes, *_ATTRIBUTES)
    more = (attributes or {}).get("video_attr")
    values |= numbers(runtime, call, more, *_VIDEO_ATTRIBUTES)
    stream = check_new(runtime, DecoderChannel, Module.VDEC, number, _LIMIT)
    sides = (values["pic_width"], values["pic_height"])
    if values["type"] not in (JPEG, H264, H265) or values["mode"]:
        text = f"type {values['type']}, mode {values['mode']}: JPEG, H.264 or H.265 by frames"
        raise refusal(Module.VDEC, Reason.ILLEGAL_PARAM, text)
    if values["type"] != JPEG and not all(side in _VIDEO_SIDES for side in sides):
        raise refusal(Module.VDEC, Reason.ILLEGAL_PARAM, f"{sides} is not 128 to 8192")
    if values["frame_buf_cnt"] < 1:
        raise refusal(Module.VDEC, Reason.ILLEGAL_PARAM, "frame_buf_cnt is 0")
    channel = DecoderChannel(number, stream, attributes=values)
    channel.parameters = {"display_frame_num": 0} | dict.fromkeys(_VIDEO_PARAMETERS, 0)
    add_channel(runtime, channel, call)


@entry("acl.himpi.vdec_destroy_chn", "i")
def vdec_destroy_chn(runtime: Runtime, number: int) -> Pending:
    """Close a channel that was stopped."""
    channel = _find(runtime, number=number)
    if channel.is_started:
        raise refusal(Module.VDEC, Reason.NOT_PERM, "vdec_stop_recv_stream comes first")
    return remove_channel(runtime, channel)


@entry("acl.himpi.vdec_get_chn_attr", "i", failure=({},))
def vdec_get_chn_attr(runtime: Runtime, number: int) -> dict[str, Any]:
    """What the channel was made with."""
    values = _find(runtime, number=number).attributes
    video = {name: values[name] for name in _VIDEO_ATTRIBUTES}
    return {name: values[name] for name in _ATTRIBUTES} | {"video_attr": video}


@entry("acl.himpi.vdec_get_chn_param", "i", failure=({},))
def vdec_get_chn_param(runtime: Runtime, number: int) -> dict[str, Any]:
    """Settings of a channel, as `vdec_set_chn_param` takes them."""
    channel = _find(runtime, number=number)
    found: dict[str, Any] = {
        "type": channel.kind,
        "display_frame_num": channel.parameters["display_frame_num"],
    }
    if channel.kind == JPEG:
        found["pic_param"] = {"pixel_format": channel.pixel_format, "alpha": 255}
    else:
        found["video_param"] = {name: channel.parameters[name] for name in _VIDEO_PARAMETERS}
    return found


@entry("acl.himpi.vdec_set_chn_param", "io")
def vdec_set_chn_param(runtime: Runtime, number: int, parameters: Any) -> None:
    """Change settings; the type has to be that of the channel."""
    call = "acl.himpi.vdec_set_chn_param"
    values = numbers(runtime, call, parameters, "type", "display_frame_num")
    channel = _find(runtime, number=number)
    if values["type"] != channel.kind:
        text = f"type {values['type']} for a channel of {channel.kind}"
        raise refusal(Module.VDEC, Reason.ILLEGAL_PARAM, text)
    if channel.kind == JPEG:
        picture = numbers(runtime, call, parameters.get("pic_param"), "pixel_format", "alpha")
        known = {*LAYOUTS, PixelFormat.UNKNOWN}
        if picture["pixel_format"] not in known:
            text = f"pixel format {picture['pixel_format']}"
            raise refusal(Module.VDEC, Reason.ILLEGAL_PARAM, text)
        channel.pixel_format = picture["pixel_format"]
    else:
        video = numbers(runtime, call, parameters.get("video_param"), *_VIDEO_PARAMETERS)
        channel.parameters.update(video)
    channel.parameters["display_frame_num"] = values["display_frame_num"]


@entry("acl.himpi.vdec_start_recv_stream", "i")
def vdec_start_recv_stream(runtime: Runtime, number: int) -> None:
    """Take streams from now on."""
    _find(runtime, number=number).is_started = True


@entry("acl.himpi.vdec_stop_recv_stream", "i")
def vdec_stop_recv_stream(runtime: Runtime, number: int) -> None:
    """Take none any more."""
    _find(runtime, number=number).is_started = False


@entry("acl.himpi.vdec_reset_chn", "i")
def vdec_reset_chn(runtime: Runtime, number: int) -> None:
    """Forget what was sent to a channel that was stopped."""
    channel = _find(runtime, number=number)
    if channel.is_started:
        raise refusal(Module.VDEC, Reason.NOT_PERM, "vdec_stop_recv_stream comes first")
    channel.stream.advance(None)
    channel.tasks.clear()


@entry("acl.himpi.vdec_query_status", "i", failure=({},))
def vdec_query_status(runtime: Runtime, number: int) -> dict[str, Any]:
    """How far a channel is."""
    channel = _find(runtime, number=number)
    now = runtime.clock.now_ns()
    over = sum(each.task is not None and each.task.end_ns <= now for each in channel.tasks)
    errors = (
        "set_pic_size_err", "set_protocol_num_err", "set_ref_num_err", "set_pic_buf_size_err",
        "format_err", "stream_unsupport", "pack_err", "stream_size_over", "stream_not_release",
    )  # fmt: skip
    return {
        "type": channel.kind, "left_stream_bytes": 0,
        "left_stream_frames": len(channel.tasks) - over, "left_decoded_frames": over,
        "is_started": int(channel.is_started), "recv_stream_frames": channel.sent,
        "dec_stream_frames": channel.decoded, "dec_err": dict.fromkeys(errors, 0),
        "width": channel.attributes["pic_width"], "height": channel.attributes["pic_height"],
        "latest_frame_pts": 0,
    }  # fmt: skip


# Sizes.


@bare("acl.himpi.vdec_get_pic_buf_size", "io")
def vdec_get_pic_buf_size(runtime: Runtime, kind: int, attributes: Any) -> int:
    """Bytes of a picture of 4:2:0."""
    call = "acl.himpi.vdec_get_pic_buf_size"
    width, height = numbers(runtime, call, attributes, "width", "height").values()
    return align_up(width, 64) * align_up(height, 16) * 3 // 2 if kind != PNG else 0


@bare("acl.himpi.vdec_get_tmv_buf_size", "iii")
def vdec_get_tmv_buf_size(runtime: Runtime, kind: int, width: int, height: int) -> int:
    """Bytes of the motion vectors of a picture."""
    if kind == H264:
        return align_up(64 * (align_up(width, 16) // 16) * (align_up(height, 16) // 16), 128)
    if kind == H265:
        return align_up(16 * (align_up(width, 64) // 16) * (align_up(height, 64) // 16), 128)
    return 0


_STREAM = (
    "end_of_frame", "end_of_stream", "need_display", "pts", "private_data", "len", "addr",
)  # fmt: skip


def _file(runtime: Runtime, module: Module, address: int, size: int) -> Bytes:
    """A file in host memory."""
    if not address or not size:
        raise refusal(module, Reason.ILLEGAL_PARAM, "no data")
    with refusing(module):
        view: Bytes = runtime.host.view(address, size)
        return view


def _information(
    runtime: Runtime, module: Module, data: Bytes, pixel_format: int, is_jpeg: bool
) -> dict[str, Any]:
    """hi_img_info; sides of a JPEG picture are rounded down to even ones."""
    with refusing(module):
        info = jpeg_info(data) if is_jpeg else png_info(data)
    width, height = info.width, info.height
    if is_jpeg:
        width, height = width // 2 * 2, height // 2 * 2
        formats = SAME_SAMPLING.get(info.sampling, ())
    else:
        formats = (PixelFormat.RGBA_8888 if info.components == 4 else PixelFormat.RGB_888,)
    if pixel_format == PixelFormat.UNKNOWN and formats:
        pixel_format = formats[0]
    if pixel_format not in LAYOUTS:
        raise refusal(module, Reason.NOT_SUPPORT, f"pixel format {pixel_format}")
    layout = LAYOUTS[PixelFormat(pixel_format)]
    across, down = strides(runtime)
    row, rows = align_up(layout.row_bytes(width), across), align_up(height, down)
    return {
        "width": width, "height": height, "width_stride": row, "height_stride": rows,
        "img_buf_size": layout.size(row, rows), "pixel_format": int(pixel_format),
        "reserved": [0, 0, 0, 0],
    }  # fmt: skip


@entry("acl.himpi.dvpp_get_image_info", "io", failure=({},))
def dvpp_get_image_info(runtime: Runtime, kind: int, stream: Any) -> dict[str, Any]:
    """What it takes to decode a JPEG file in host memory to its own sampling."""
    require_system(runtime, Module.VDEC)
    found = numbers(runtime, "acl.himpi.dvpp_get_image_info", stream, *_STREAM)
    if kind != JPEG:
        raise refusal(Module.VDEC, Reason.NOT_SUPPORT, f"type {kind} is not JPEG")
    data = _file(runtime, Module.VDEC, found["addr"], found["len"])
    return _information(runtime, Module.VDEC, data, PixelFormat.UNKNOWN, True)


@entry("acl.himpi.vdec_get_jpegd_output_info", "oi", failure=({},))
def vdec_get_jpegd_output_info(runtime: Runtime, stream: Any, pixel_format: int) -> dict[str, Any]:
    """The same for a format."""
    require_system(runtime, Module.VDEC)
    found = numbers(runtime, "acl.himpi.vdec_get_jpegd_output_info", stream, *_STREAM)
    data = _file(runtime, Module.VDEC, found["addr"], found["len"])
    return _information(runtime, Module.VDEC, data, pixel_format, True)


# Decoding.

_OUTPUT = (
    "width", "height", "width_stride", "height_stride", "pixel_format", "vir_addr", "buffer_size",
)  # fmt: skip


@entry("acl.himpi.vdec_send_stream", "iooi")
def vdec_send_stream(runtime: Runtime, number: int, stream: Any, output: Any, wait_ms: int) -> None:
    """Decode a piece that holds one picture."""
    call = "acl.himpi.vdec_send_stream"
    piece = numbers(runtime, call, stream, *_STREAM)
    wanted = numbers(runtime, call, output, *_OUTPUT)
    channel = _find(runtime, number=number)
    if not channel.is_started:
        raise refusal(Module.VDEC, Reason.NOT_PERM, "vdec_start_recv_stream comes first")
    if piece["end_of_stream"]:
        return
    if len(channel.tasks) >= channel.attributes["frame_buf_cnt"]:
        text = f"{len(channel.tasks)} pictures wait to be fetched"
        raise refusal(Module.VDEC, Reason.BUF_FULL, text)
    if not piece["len"]:
        raise refusal(Module.VDEC, Reason.ILLEGAL_PARAM, "a stream of 0 bytes")
    _reach(runtime, piece["addr"], piece["len"])
    _reach(runtime, wanted["vir_addr"], max(wanted["buffer_size"], 1))
    _check_output(channel, wanted)
    frame = {"stream": piece, "output": wanted}

    def work() -> None:
        data = in_flight(runtime, piece["addr"], piece["len"])
        picture, pixel_format = _decoded(channel, data.tobytes(), wanted)
        _store(runtime, picture, pixel_format, wanted)
        channel.decoded += 1

    engine = JPEGD if channel.kind == JPEG else VDEC
    pixels = channel.attributes["pic_width"] * channel.attributes["pic_height"]
    start_task(runtime, channel, engine, "decode", pixels, work, frame)


def _check_output(channel: DecoderChannel, wanted: dict[str, int]) -> None:
    known = {*LAYOUTS, PixelFormat.UNKNOWN} if channel.kind == JPEG else _DECODED
    if wanted["pixel_format"] not in known:
        text = f"pixel format {wanted['pixel_format']}"
        raise refusal(Module.VDEC, Reason.ILLEGAL_PARAM, text)


def _decoded(
    channel: DecoderChannel, data: bytes, wanted: dict[str, int]
) -> tuple[Picture, PixelFormat]:
    """The picture in a piece, in the format asked for."""
    if channel.kind == JPEG:
        whole = np.frombuffer(data, np.uint8)
        info = jpeg_info(whole)
        asked = [
            PixelFormat(each)
            for each in (wanted["pixel_format"], channel.pixel_format)
            if each != PixelFormat.UNKNOWN
        ]
        own = SAME_SAMPLING.get(info.sampling, ())
        if not asked and not own:
            raise RefusedError(100027, "the sampling of the file is not supported")
        return decode_jpeg(whole), asked[0] if asked else own[0]
    frames = video_stream.pictures(data, 0 if channel.kind == H265 else 1)
    if len(frames) != 1:
        raise RefusedError(100000, f"{len(frames)} pictures in one frame")
    picture = decode_jpeg(np.frombuffer(frames[0], np.uint8))
    return picture, PixelFormat(wanted["pixel_format"])


def _store(
    runtime: Runtime, picture: Picture, pixel_format: PixelFormat, wanted: dict[str, int]
) -> None:
    """Put a picture where the program wants it, sides rounded down to even ones."""
    layout = LAYOUTS[pixel_format]
    width, height = (side // 2 * 2 for side in picture.size)
    if (wanted["width"] // 2 * 2, wanted["height"] // 2 * 2) not in ((0, 0), (width, height)):
        text = f"the picture is {width}x{height}, not {wanted['width']}x{wanted['height']}"
        raise RefusedError(100000, text)
    row = wanted["width_stride"] or align_up(layout.row_bytes(width), _VIDEO_STRIDE[0])
    rows = wanted["height_stride"] or align_up(height, _VIDEO_STRIDE[1])
    if row < layout.row_bytes(width) or row % 16 or rows < height or rows % 2:
        raise RefusedError(100000, f"strides {row} and {rows} for {width}x{height}")
    if wanted["buffer_size"] < layout.size(row, rows):
        text = f"{wanted['buffer_size']} bytes for a picture of {layout.size(row, rows)}"
        raise RefusedError(100000, text)
    even = crop(convert(picture, layout), Area(0, width - 1, 0, height - 1))
    place = Place(wanted["vir_addr"], layout, width, height, (row, rows))
    place.write(runtime, even)
    wanted |= {"width": width, "height": height, "width_stride": row, "height_stride": rows}
    wanted["pixel_format"] = int(pixel_format)


_NO_FRAME: tuple[Any, ...] = ({}, {}, {})


@entry("acl.himpi.vdec_get_frame", "ii", failure=_NO_FRAME)
def vdec_get_frame(runtime: Runtime, number: int, wait_ms: int) -> Pending:
    """The next picture: frame, supplement and the stream it came from."""
    channel = _find(runtime, number=number)

    def result(first: MediaTask) -> tuple[Any, ...]:
        frame = first.data
        channel.lent.add(frame["output"]["vir_addr"])
        if first.failure is not None:
            runtime.remember_error(first.failure)
        info = _frame_info(frame, failed=first.failure is not None)
        video = {"frame_type": 0, "err_rate": 0, "poc": 0}
        supplement = {"type": channel.kind, "video_supplement_info": video}
        return info, supplement, dict(frame["stream"])

    return take_first(runtime, channel, Module.VDEC, wait_ms, result)


def _frame_info(frame: dict[str, dict[str, int]], failed: bool) -> dict[str, Any]:
    output = frame["output"]
    zeros = {name: [0, 0, 0] for name in ("header_stride", "header_phys_addr", "header_virt_addr")}
    address = output["vir_addr"]
    picture = {
        "width": output["width"], "height": output["height"], "field": 0,
        "pixel_format": output["pixel_format"], "video_format": 0, "compress_mode": 0,
        "dynamic_range": 0, "color_gamut": 0,
        "width_stride": [output["width_stride"]] * 2 + [0],
        "height_stride": [output["height_stride"]] * 2 + [0],
        "phys_addr": [address, 0, 0], "virt_addr": [address, 0, 0], "time_ref": 0,
        "pts": frame["stream"]["pts"], "user_data": [0] * 8, "frame_flag": int(failed),
        "supplement": {},
    }  # fmt: skip
    return {"v_frame": zeros | picture, "pool_id": 0, "mod_id": int(Module.VDEC)}


@entry("acl.himpi.vdec_release_frame", "io")
def vdec_release_frame(runtime: Runtime, number: int, frame: Any) -> None:
    """Give a picture that was fetched back to the channel."""
    if not isinstance(frame, dict):
        raise TypeError("acl.himpi.vdec_release_frame args parse failed: dict expected")
    channel = _find(runtime, number=number)
    address = (frame.get("v_frame") or {}).get("virt_addr", [0])[0]
    if address not in channel.lent:
        text = f"no picture at {address:#x} was fetched, or it was released"
        raise refusal(Module.VDEC, Reason.ILLEGAL_PARAM, text)
    channel.lent.remove(address)


# PNG.


@dataclass(eq=False)
class PngChannel(MediaChannel):
    """A channel that decodes PNG files."""


_find_png = partial(find_channel, kind=PngChannel, module=Module.PNGD, limit=_LIMIT // 2)
_reach_png = reach(Module.PNGD)
_IMAGE = ("type", "addr", "len", "pts")
_PICTURE = (
    "picture_address", "picture_buffer_size", "picture_width", "picture_height",
    "picture_width_stride", "picture_height_stride", "picture_format",
)  # fmt: skip


@entry("acl.himpi.pngd_create_chn", "io")
def pngd_create_chn(runtime: Runtime, number: int, attributes: Any) -> None:
    """Open the channel of a number."""
    call = "acl.himpi.pngd_create_chn"
    numbers(runtime, call, attributes, "stream_que_cnt")
    stream = check_new(runtime, PngChannel, Module.PNGD, number, _LIMIT // 2)
    add_channel(runtime, PngChannel(number, stream), call)


@entry("acl.himpi.pngd_destroy_chn", "i")
def pngd_destroy_chn(runtime: Runtime, number: int) -> Pending:
    """Close a channel."""
    return remove_channel(runtime, _find_png(runtime, number=number))


@entry("acl.himpi.png_get_image_info", "o", failure=({},))
def png_get_image_info(runtime: Runtime, stream: Any) -> dict[str, Any]:
    """What it takes to decode a file in host memory."""
    require_system(runtime, Module.PNGD)
    found = numbers(runtime, "acl.himpi.png_get_image_info", stream, *_IMAGE)
    data = _file(runtime, Module.PNGD, found["addr"], found["len"])
    return _information(runtime, Module.PNGD, data, PixelFormat.UNKNOWN, False)


@entry("acl.himpi.pngd_send_stream", "iooi")
def pngd_send_stream(runtime: Runtime, number: int, stream: Any, output: Any, wait_ms: int) -> None:
    """Decode a file."""
    call = "acl.himpi.pngd_send_stream"
    file = numbers(runtime, call, stream, *_IMAGE)
    wanted = numbers(runtime, call, output, *_PICTURE)
    channel = _find_png(runtime, number=number)
    if file["type"] != PNG or not file["len"]:
        raise refusal(Module.PNGD, Reason.ILLEGAL_PARAM, f"type {file['type']} is not PNG")
    _reach_png(runtime, file["addr"], file["len"])
    _reach_png(runtime, wanted["picture_address"], max(wanted["picture_buffer_size"], 1))

    def work() -> None:
        data = in_flight(runtime, file["addr"], file["len"])
        asked = wanted["picture_format"]
        if asked == PixelFormat.UNKNOWN:
            four = png_info(data).components == 4
            asked = PixelFormat.RGBA_8888 if four else PixelFormat.RGB_888
        if asked not in (PixelFormat.RGB_888, PixelFormat.RGBA_8888):
            raise RefusedError(100027, f"pixel format {asked}: RGB or RGBA")
        wanted["picture_format"] = int(asked)
        _store_png(runtime, data, LAYOUTS[PixelFormat(asked)], wanted)

    pixels = wanted["picture_width"] * wanted["picture_height"]
    frame = {"stream": file | {"reserved": [0] * 4}, "output": wanted}
    start_task(runtime, channel, PNGD, "decode", pixels, work, frame)


def _store_png(runtime: Runtime, data: Bytes, layout: Layout, wanted: dict[str, int]) -> None:
    pixels = decode_png(data, alpha=len(layout.order) == 4)
    height, width = pixels.shape[:2]
    row, rows = wanted["picture_width_stride"], wanted["picture_height_stride"]
    if (width, height) != (wanted["picture_width"], wanted["picture_height"]):
        raise RefusedError(100000, f"the file is {width}x{height}")
    if row < layout.row_bytes(width) or rows < height:
        raise RefusedError(100000, f"strides {row} and {rows} for {width}x{height}")
    size = layout.size(row, rows)
    if wanted["picture_buffer_size"] < size:
        raise RefusedError(100000, f"{wanted['picture_buffer_size']} bytes for {size}")
    view = in_flight(runtime, wanted["picture_address"], size).reshape(rows, row)
    view[:height, : layout.row_bytes(width)] = pixels.reshape(height, -1)


@entry("acl.himpi.pngd_get_image_data", "ii", failure=({}, {}))
def pngd_get_image_data(runtime: Runtime, number: int, wait_ms: int) -> Pending:
    """The next picture, and the file it came from."""
    channel = _find_png(runtime, number=number)

    def result(first: MediaTask) -> tuple[Any, ...]:
        if first.failure is not None:
            raise refusal(Module.PNGD, Reason.SYS_ERROR, str(first.failure))
        return dict(first.data["output"]), dict(first.data["stream"])

    return take_first(runtime, channel, Module.PNGD, wait_ms, result)
