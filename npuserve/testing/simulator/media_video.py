"""`acl.media.*`: channels that decode (VDEC) and encode (VENC) video.

Frames go in by `send_frame` and come back by a callback, which the thread named in the channel
description makes inside of `acl.rt.process_report`. What streams look like here: `video_stream.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from npuserve.testing.simulator import video_stream
from npuserve.testing.simulator.binding import Pending, bare, entry
from npuserve.testing.simulator.device import VDEC, VENC, Stream
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.image_files import decode_jpeg, encode_jpeg
from npuserve.testing.simulator.media_desc import (
    INVALID_PARAM,
    PicDesc,
    StreamDesc,
    dvpp_bytes,
    fields,
    lifetime,
)
from npuserve.testing.simulator.media_place import Place, check_alive, duration_ns, in_flight
from npuserve.testing.simulator.pictures import (
    LAYOUTS,
    MATRICES,
    Picture,
    PixelFormat,
    align_up,
    convert,
    read,
)
from npuserve.testing.simulator.rt_stream import Report, queue_report, subscribe, unsubscribe

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

_REPORT_TIMEOUT = 507012
_INTERNAL = 500000
# How long a real thread may take to process the reports that a call waits for.
_PATIENCE_S = 10.0

_ENCODINGS = range(4)  # H.265 main, H.264 baseline, main, high
_CHANNELS = range(32)
_NV = (PixelFormat.NV12, PixelFormat.NV21)
_DECODED = (*_NV, PixelFormat.RGB_888, PixelFormat.BGR_888)
_LEAST, _MOST = 128, 4096
_STRIDE = (16, 2)
_INTERVALS = range(1, 65536)


@dataclass(eq=False)
class VideoChannel:
    """What both kinds of channel descriptions have; `stream` while the channel is open."""

    thread_id: int = 0
    callback: Callable[..., Any] | None = None
    entype: int = 0
    stream: Stream | None = None
    reports: list[Report] = field(default_factory=list)


@dataclass(eq=False)
class DecoderChannel(VideoChannel):
    """Description of a channel that decodes."""

    channel_id: int = 0
    out_pic_format: int = PixelFormat.NV12
    out_pic_width: int = 0
    out_pic_height: int = 0
    ref_frame_num: int = 0
    out_mode: int = 0
    bit_depth: int = 0
    matrix: int = 0


@dataclass(eq=False)
class EncoderChannel(VideoChannel):
    """Description of a channel that encodes; its frames share one buffer on the card."""

    pic_format: int = PixelFormat.NV12
    pic_width: int = 0
    pic_height: int = 0
    key_frame_interval: int = 0
    buf_addr: int = 0
    buf_size: int = 0
    max_bit_rate: int = 0
    rc_mode: int = 0
    src_rate: int = 0
    max_ip_prop: int = 0
    own_buffer: int = 0


@dataclass(eq=False)
class DecoderFrame:
    """Settings of a frame; there are none."""


@dataclass(eq=False)
class EncoderFrame:
    """Settings of a frame."""

    force_i_frame: int = 0
    eos: int = 0


Channel = TypeVar("Channel", bound=VideoChannel)

_FIELDS = {"thread_id": "k", "entype": "i"}
fields(
    "vdec_channel_desc",
    DecoderChannel,
    _FIELDS
    | dict.fromkeys(
        (
            "channel_id", "out_pic_format", "out_pic_width", "out_pic_height", "ref_frame_num",
            "out_mode", "bit_depth",
        ),
        "i",
    ),
)  # fmt: skip
fields(
    "venc_channel_desc",
    EncoderChannel,
    _FIELDS
    | {"buf_addr": "k"}
    | dict.fromkeys(
        (
            "pic_format", "pic_width", "pic_height", "key_frame_interval", "buf_size",
            "max_bit_rate", "rc_mode", "src_rate",
        ),
        "i",
    ),
)  # fmt: skip
fields("venc_frame_config", EncoderFrame, {"force_i_frame": "B", "eos": "B"})
lifetime("vdec_frame_config", DecoderFrame, "frame configuration", on_device=False)
lifetime("venc_frame_config", EncoderFrame, "frame configuration", on_device=False)


# Channels.


def _register_desc(family: str, kind: type[VideoChannel]) -> None:
    """Register what both families have: descriptions, callbacks."""
    created = f"acl.media.{family}_create_channel_desc"

    def create(runtime: Runtime) -> int:
        runtime.require_context()
        return runtime.register(kind(), "video channel description", created)

    def destroy(runtime: Runtime, handle: int) -> None:
        if handle:
            if runtime.find(handle, kind).stream is not None:
                raise RefusedError(INVALID_PARAM, "the channel is not destroyed")
            runtime.drop(handle, kind)

    def set_callback(runtime: Runtime, handle: int, function: Any) -> None:
        if not callable(function):
            raise TypeError("parameter must be callable")
        runtime.find(handle, kind).callback = function

    def get_callback(runtime: Runtime, handle: int) -> Callable[..., Any]:
        return _callback(runtime.find(handle, kind))

    bare(created)(create)
    entry(f"acl.media.{family}_destroy_channel_desc", "k")(destroy)
    entry(f"acl.media.{family}_set_channel_desc_callback", "ko")(set_callback)
    bare(f"acl.media.{family}_get_channel_desc_callback", "k", failed=None)(get_callback)


_register_desc("vdec", DecoderChannel)
_register_desc("venc", EncoderChannel)


def _callback(channel: VideoChannel) -> Callable[..., Any]:
    if channel.callback is None:
        raise RuntimeError("did not set callback, failed")
    return channel.callback


def _check_new(channel: VideoChannel) -> None:
    if channel.stream is not None:
        raise RefusedError(INVALID_PARAM, "the channel is there already")
    if channel.callback is None or not channel.thread_id:
        raise RefusedError(INVALID_PARAM, "callback and thread have to be set first")
    if channel.entype not in _ENCODINGS:
        raise RefusedError(INVALID_PARAM, f"encoding {channel.entype} is unknown")


def _open(runtime: Runtime, channel: VideoChannel, call: str) -> None:
    """Give a channel its stream, whose reports the thread of the description processes."""
    context = runtime.current
    stream = Stream(0, context)
    stream.handle = runtime.register(stream, "stream", call)
    context.streams[stream.handle] = stream
    subscribe(channel.thread_id, stream)
    channel.stream = stream


def _close(runtime: Runtime, channel: VideoChannel) -> None:
    stream = _stream(channel)
    channel.stream = None
    unsubscribe(stream, runtime.streams())
    runtime.drop(stream.handle, Stream)
    del stream.context.streams[stream.handle]


def _stream(channel: VideoChannel) -> Stream:
    if channel.stream is None:
        raise RefusedError(INVALID_PARAM, "the channel was not created")
    return channel.stream


def _opened(runtime: Runtime, handle: int, kind: type[Channel]) -> tuple[Channel, Stream]:
    channel = runtime.find(handle, kind)
    runtime.require_context()
    return channel, _stream(channel)


def _wait_for_reports(channel: VideoChannel) -> None:
    """Let the callback thread take everything that is on its way."""
    if channel.reports and threading.get_ident() == channel.thread_id:
        raise RefusedError(_REPORT_TIMEOUT, "the callback thread waits for its own reports")
    for report in channel.reports:
        if not report.made.wait(_PATIENCE_S):
            raise RefusedError(_REPORT_TIMEOUT, "nobody processes the reports of the channel")


def _finish(runtime: Runtime, channel: VideoChannel, last: Callable[[], None]) -> Pending:
    """Wait for the reports, then do the last thing."""

    def then() -> None:
        _wait_for_reports(channel)
        with runtime.lock:
            last()

    _stream(channel)
    return Pending(then=then)


def _launch(
    runtime: Runtime, channel: VideoChannel, engine: str, pixels: int,
    deliver: Callable[[], None],
) -> None:  # fmt: skip
    """Queue the work on a frame, and the report of it."""
    stream, now = _stream(channel), runtime.clock.now_ns()
    stream.queue(now, engine, "frame", duration_ns(pixels), lambda: None)
    channel.reports = [report for report in channel.reports if not report.made.is_set()]
    channel.reports.append(queue_report(stream, now, deliver))


# Decoding.


@entry("acl.media.vdec_create_channel", "k")
def vdec_create_channel(runtime: Runtime, handle: int) -> None:
    """Open a channel; its number is unique in the process."""
    channel = runtime.find(handle, DecoderChannel)
    runtime.require_context()
    _check_new(channel)
    if channel.out_pic_format not in _DECODED:
        raise RefusedError(INVALID_PARAM, f"output format {channel.out_pic_format}")
    if channel.channel_id not in _CHANNELS:
        raise RefusedError(INVALID_PARAM, f"channel {channel.channel_id} is not 0 to 31")
    if any(
        isinstance(other, DecoderChannel)
        and other.stream is not None
        and other.channel_id == channel.channel_id
        for other in runtime.objects.values()
    ):
        raise RefusedError(_INTERNAL, f"channel {channel.channel_id} is in use")
    _open(runtime, channel, "acl.media.vdec_create_channel")


@entry("acl.media.vdec_destroy_channel", "k")
def vdec_destroy_channel(runtime: Runtime, handle: int) -> Pending:
    """Wait until all frames are decoded and reported, and close."""
    channel, _ = _opened(runtime, handle, DecoderChannel)
    return _finish(runtime, channel, lambda: _close(runtime, channel))


@entry("acl.media.vdec_send_frame", "kkkko")
def vdec_send_frame(
    runtime: Runtime, handle: int, source: int, target: int, config: int, data: Any
) -> Pending | None:
    """Decode a piece of a stream that holds one picture; it has been read when this returns."""
    channel = runtime.find(handle, DecoderChannel)
    _callback(channel)
    piece = runtime.find(source, StreamDesc)
    if config:
        runtime.find(config, DecoderFrame)
    if piece.eos:
        return _finish(runtime, channel, lambda: None)
    result = runtime.find(target, PicDesc)
    dvpp_bytes(runtime, result.data, result.size)
    _decode(runtime, channel, piece, source, (target, result), data)
    return None


@entry("acl.media.vdec_send_skipped_frame", "kkko")
def vdec_send_skipped_frame(
    runtime: Runtime, handle: int, source: int, config: int, data: Any
) -> Pending | None:
    """Decode a picture that nobody wants to see; its callback has no picture."""
    channel = runtime.find(handle, DecoderChannel)
    _callback(channel)
    piece = runtime.find(source, StreamDesc)
    if config:
        runtime.find(config, DecoderFrame)
    if piece.eos:
        return _finish(runtime, channel, lambda: None)
    _decode(runtime, channel, piece, source, None, data)
    return None


def _decode(
    runtime: Runtime, channel: DecoderChannel, piece: StreamDesc, source: int,
    target: tuple[int, PicDesc] | None, data: Any,
) -> None:  # fmt: skip
    runtime.require_context()
    content = dvpp_bytes(runtime, piece.data, piece.size).tobytes()
    encoding, pixel_format = channel.entype, PixelFormat(channel.out_pic_format)
    function, matrix = _callback(channel), MATRICES[channel.matrix]

    def show(result: PicDesc) -> None:
        frames = video_stream.pictures(content, encoding)
        if len(frames) != 1:
            raise RefusedError(INVALID_PARAM, f"{len(frames)} pictures in one frame")
        picture = decode_jpeg(np.frombuffer(frames[0], np.uint8))
        width, height = picture.size
        layout = LAYOUTS[pixel_format]
        stride = (align_up(layout.row_bytes(width), _STRIDE[0]), align_up(height, _STRIDE[1]))
        place = Place(result.data, layout, width, height, stride)
        if result.size < place.size:
            raise RefusedError(INVALID_PARAM, f"{result.size} bytes for a picture of {place.size}")
        place.write(runtime, convert(picture, layout, matrix))
        result.format, result.width, result.height = pixel_format, width, height
        result.width_stride, result.height_stride = stride

    def deliver() -> None:
        if target is not None:
            with runtime.lock:
                check_alive(runtime, [target[1]])
                target[1].ret_code = 0
                try:
                    show(target[1])
                except RefusedError as error:
                    target[1].ret_code = error.code
                    runtime.remember_error(error)
        function(source, target[0] if target else 0, data)

    _launch(runtime, channel, VDEC, target[1].size if target else len(content), deliver)


@entry("acl.media.vdec_set_channel_desc_param", "kik", failure=(0,))
def vdec_set_channel_desc_param(runtime: Runtime, handle: int, parameter: int, value: int) -> int:
    """Choose a colour matrix."""
    channel = runtime.find(handle, DecoderChannel)
    if parameter or not 0 <= value < len(MATRICES):
        raise RefusedError(INVALID_PARAM, f"parameter {parameter} = {value}")
    channel.matrix = value
    return handle


@entry("acl.media.vdec_get_channel_desc_param", "ki", failure=(0, 0))
def vdec_get_channel_desc_param(runtime: Runtime, handle: int, parameter: int) -> tuple[int, int]:
    """Bytes of a parameter, and its value."""
    channel = runtime.find(handle, DecoderChannel)
    if parameter:
        raise RefusedError(INVALID_PARAM, f"parameter {parameter} is unknown")
    return 4, channel.matrix


# Encoding.


@entry("acl.media.venc_create_channel", "k")
def venc_create_channel(runtime: Runtime, handle: int) -> None:
    """Open a channel."""
    channel = runtime.find(handle, EncoderChannel)
    card = runtime.current.card
    _check_new(channel)
    if channel.pic_format not in _NV:
        raise RefusedError(INVALID_PARAM, f"input format {channel.pic_format}: NV12 or NV21")
    for side in (channel.pic_width, channel.pic_height):
        if not _LEAST <= side <= _MOST or side % 2:
            raise RefusedError(INVALID_PARAM, f"{side} is not even from {_LEAST} to {_MOST}")
    if channel.key_frame_interval not in _INTERVALS:
        raise RefusedError(INVALID_PARAM, f"key frame interval {channel.key_frame_interval}")
    size = channel.buf_size or 2 * channel.pic_width * channel.pic_height + (64 << 10)
    if channel.buf_addr:
        dvpp_bytes(runtime, channel.buf_addr, size)
    else:
        call = "acl.media.venc_create_channel"
        channel.own_buffer = card.memory.allocate(size, call, dvpp=True)
        channel.buf_addr = channel.own_buffer
    channel.buf_size = size
    _open(runtime, channel, "acl.media.venc_create_channel")


@entry("acl.media.venc_destroy_channel", "k")
def venc_destroy_channel(runtime: Runtime, handle: int) -> Pending:
    """Wait until all frames are encoded and reported, and close."""
    channel, stream = _opened(runtime, handle, EncoderChannel)

    def last() -> None:
        if channel.own_buffer:
            stream.context.card.memory.free(channel.own_buffer, dvpp=True)
            channel.own_buffer = channel.buf_addr = 0
        _close(runtime, channel)

    return _finish(runtime, channel, last)


@entry("acl.media.venc_send_frame", "kkkko")
def venc_send_frame(
    runtime: Runtime, handle: int, source: int, reserved: int, config: int, data: Any
) -> Pending | None:
    """Encode a picture, which has been read when this returns; with eos wait for all of them."""
    channel = runtime.find(handle, EncoderChannel)
    function = _callback(channel)
    settings = runtime.find(config, EncoderFrame)
    if settings.eos:
        return _finish(runtime, channel, lambda: None)
    runtime.require_context()
    if reserved:
        raise RefusedError(INVALID_PARAM, "the output is the system's: pass 0")
    picture = _frame(runtime, channel, runtime.find(source, PicDesc))
    encoding = channel.entype

    def deliver() -> None:
        with runtime.lock:
            result = StreamDesc(channel.buf_addr, format=encoding)
            call = "acl.media.venc_send_frame"
            target = runtime.register(result, "stream description", call)
            unit = video_stream.access_unit(encode_jpeg(picture, 95), encoding)
            if len(unit) > channel.buf_size:
                result.ret_code = INVALID_PARAM
            else:
                memory = in_flight(runtime, channel.buf_addr, len(unit))
                memory[:] = np.frombuffer(unit, np.uint8)
                result.size = len(unit)
        try:
            function(source, target, data)
        finally:
            with runtime.lock:
                if target in runtime.objects:
                    runtime.drop(target, StreamDesc)
                else:
                    runtime.violations.append(
                        "a callback destroyed the encoder's own stream description"
                    )

    _launch(runtime, channel, VENC, channel.pic_width * channel.pic_height, deliver)
    return None


def _frame(runtime: Runtime, channel: EncoderChannel, desc: PicDesc) -> Picture:
    """The input picture; size and format are those of the channel."""
    layout = LAYOUTS[PixelFormat(channel.pic_format)]
    stride = (align_up(channel.pic_width, _STRIDE[0]), align_up(channel.pic_height, _STRIDE[1]))
    needed = layout.size(*stride)
    if desc.size < needed:
        raise RefusedError(INVALID_PARAM, f"{desc.size} bytes for a picture of {needed}")
    data = dvpp_bytes(runtime, desc.data, needed)
    return read(data, layout, channel.pic_width, channel.pic_height, stride)


# aclvencChannelDescParamType in order.
_PARAMETERS = (
    "thread_id", "callback", "pic_format", "entype", "pic_width", "pic_height",
    "key_frame_interval", "buf_addr", "buf_size", "rc_mode", "src_rate", "max_bit_rate",
    "max_ip_prop",
)  # fmt: skip


def _parameter(index: int) -> str:
    if not 0 <= index < len(_PARAMETERS):
        raise RefusedError(INVALID_PARAM, f"parameter {index} is unknown")
    return _PARAMETERS[index]


@entry("acl.media.venc_set_channel_desc_param", "kio")
def venc_set_channel_desc_param(runtime: Runtime, handle: int, index: int, value: Any) -> None:
    """Any setting by its number."""
    channel = runtime.find(handle, EncoderChannel)
    name = _parameter(index)
    if not callable(value) if name == "callback" else not isinstance(value, int):
        raise TypeError(f"acl.media.venc_set_channel_desc_param args parse failed: {value!r}")
    setattr(channel, name, value)


@entry("acl.media.venc_get_channel_desc_param", "ki", failure=(0,))
def venc_get_channel_desc_param(runtime: Runtime, handle: int, index: int) -> tuple[Any]:
    """Any setting by its number."""
    channel = runtime.find(handle, EncoderChannel)
    name = _parameter(index)
    return (_callback(channel) if name == "callback" else getattr(channel, name),)
