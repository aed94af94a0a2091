"""Video channels of the simulated acl.media, and the stand-in streams they use."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from npuserve.testing.simulator import media_video, video_stream
from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.media import NV12, Media, jpeg, noise, photo

H265, H264 = 0, 2
WIDTH, HEIGHT = 160, 128
SIZE = WIDTH * HEIGHT * 3 // 2


class Video(Media):
    """A channel for video whose callbacks a thread makes, as in the samples."""

    def __init__(self, acl: Any) -> None:
        super().__init__(acl)
        self.seen: list[tuple[int, int, Any]] = []
        self.on_report: Callable[[int, int, Any], object] = lambda *_: None
        self.running = True
        context, _ = acl.rt.get_context()
        self.thread, ret = acl.util.start_thread(self._process, [context])
        assert ret == 0
        self.video = 0

    def _process(self, arguments: list[int]) -> None:
        self.acl.rt.set_context(arguments[0])
        while self.running:
            self.acl.rt.process_report(20)

    def callback(self, source: int, target: int, data: Any) -> None:
        """Of the channel."""
        self.seen.append((source, target, data))
        self.on_report(source, target, data)

    def describe_channel(self, family: str, **values: int) -> int:
        """A channel description with thread and callback."""
        media = self.media
        self.video = getattr(media, f"{family}_create_channel_desc")()
        values = {"thread_id": self.thread, "entype": H264} | values
        for name, value in values.items():
            assert getattr(media, f"{family}_set_channel_desc_{name}")(self.video, value) == 0
            assert getattr(media, f"{family}_get_channel_desc_{name}")(self.video) == value
        set_callback = getattr(media, f"{family}_set_channel_desc_callback")
        assert set_callback(self.video, self.callback) == 0
        return self.video

    def decoder(self, **values: int) -> int:
        """An open channel that decodes."""
        channel = self.describe_channel("vdec", **{"channel_id": 3} | values)
        assert self.media.vdec_create_channel(channel) == 0
        return channel

    def encoder(self, **values: int) -> int:
        """An open channel that encodes."""
        sides = {"pic_width": WIDTH, "pic_height": HEIGHT, "key_frame_interval": 16}
        channel = self.describe_channel("venc", **sides | {"pic_format": NV12} | values)
        assert self.media.venc_create_channel(channel) == 0
        return channel

    def send(self, channel: int, unit: bytes, target: int, data: Any = None) -> int:
        """Send a piece of a stream."""
        piece = self.media.dvpp_create_stream_desc()
        assert self.media.dvpp_set_stream_desc_data(piece, self.upload(unit)) == 0
        assert self.media.dvpp_set_stream_desc_size(piece, len(unit)) == 0
        ret = int(self.media.vdec_send_frame(channel, piece, target, 0, data))
        if ret:
            assert self.media.dvpp_destroy_stream_desc(piece) == 0
        return ret

    def end(self, family: str, code: int = 0) -> None:
        """Destroy the channel and its description, end the thread."""
        assert getattr(self.media, f"{family}_destroy_channel")(self.video) == code
        self.stop()
        if not code:
            assert getattr(self.media, f"{family}_destroy_channel_desc")(self.video) == 0

    def stop(self) -> None:
        """End the thread."""
        if self.running:
            self.running = False
            assert self.acl.util.stop_thread(self.thread) == 0

    def close(self) -> None:
        """Give everything back."""
        self.stop()
        for source, _, _ in self.seen:
            if source not in self.descs:
                assert self.media.dvpp_destroy_stream_desc(source) == 0
        super().close()


@pytest.fixture
def video(acl: Any, machine: Runtime) -> Iterator[Video]:
    """Nothing is left at the end."""
    opened = Video(acl)
    yield opened
    opened.close()
    assert machine.leaks() == []


def unit(index: int, encoding: int = H264) -> bytes:
    """An access unit with a picture that tells its number."""
    return video_stream.access_unit(jpeg(np.roll(photo(WIDTH, HEIGHT), 9 * index, 1)), encoding)


def test_frames_come_back_by_callback(video: Video, machine: Runtime) -> None:
    """In order, with the pictures, the descriptions and the data of the caller."""
    channel = video.decoder()
    outputs = [video.empty(WIDTH, HEIGHT) for _ in range(3)]
    for index, output in enumerate(outputs):
        assert video.send(channel, unit(index), output.desc, ["frame", index]) == 0
    video.end("vdec")
    assert [data for _, _, data in video.seen] == [["frame", index] for index in range(3)]
    assert [target for _, target, _ in video.seen] == [output.desc for output in outputs]
    for index, output in enumerate(outputs):
        image = Image.open(io.BytesIO(jpeg(np.roll(photo(WIDTH, HEIGHT), 9 * index, 1))))
        image.draft("YCbCr", image.size)
        luma, _ = video.planes(output, WIDTH, HEIGHT)
        np.testing.assert_array_equal(luma, np.asarray(image)[..., 0])
        for name, value in (("width", WIDTH), ("height_stride", HEIGHT), ("ret_code", 0)):
            assert getattr(video.media, f"dvpp_get_pic_desc_{name}")(output.desc) == value
    assert machine.violations == []
    assert sum(span.engine == "video decoder" for span in machine.spans()) == 3


def test_the_stream_is_read_when_the_call_returns(video: Video) -> None:
    """A buffer can be used for the next frame at once, as the samples do."""
    channel = video.decoder(entype=H265)
    outputs = [video.empty(WIDTH, HEIGHT) for _ in range(2)]
    address = video.upload(bytes(64 << 10))
    for index, output in enumerate(outputs):
        data = unit(index, H265)
        pointer = video.acl.util.bytes_to_ptr(data)
        assert video.acl.rt.memcpy(address, len(data), pointer, len(data), 1) == 0
        piece = video.media.dvpp_create_stream_desc()
        video.media.dvpp_set_stream_desc_data(piece, address)
        video.media.dvpp_set_stream_desc_size(piece, len(data))
        assert video.media.vdec_send_frame(channel, piece, output.desc, 0, None) == 0
    video.end("vdec")
    first, second = (video.planes(output, WIDTH, HEIGHT)[0] for output in outputs)
    assert np.abs(np.roll(first, 9, 1).astype(int) - second)[:, 16:].mean() < 4


def test_end_of_stream_waits_for_all_frames(video: Video) -> None:
    """A description with eos has no picture and no callback."""
    channel = video.decoder()
    for index in range(4):
        assert video.send(channel, unit(index), video.empty(WIDTH, HEIGHT).desc) == 0
    end = video.media.dvpp_create_stream_desc()
    assert video.media.dvpp_set_stream_desc_eos(end, 1) == 0
    assert video.media.vdec_send_frame(channel, end, 0, 0, None) == 0
    assert len(video.seen) == 4
    assert video.media.dvpp_destroy_stream_desc(end) == 0
    video.end("vdec")


def test_skipped_frames_have_no_picture(video: Video) -> None:
    """The callback gets null."""
    channel = video.decoder()
    piece = video.media.dvpp_create_stream_desc()
    data = unit(0)
    video.media.dvpp_set_stream_desc_data(piece, video.upload(data))
    video.media.dvpp_set_stream_desc_size(piece, len(data))
    assert video.media.vdec_send_skipped_frame(channel, piece, 0, "skipped") == 0
    video.end("vdec")
    assert video.seen == [(piece, 0, "skipped")]


def test_encoded_frames_can_be_decoded(video: Video) -> None:
    """The encoder's stream goes through the decoder, and is about the same picture."""
    pixels = [jpeg(np.roll(photo(WIDTH, HEIGHT), 9 * index, 1)) for index in range(2)]
    planes, units = [], []
    channel = video.encoder()

    def keep(_: int, target: int, __: Any) -> None:
        address = video.media.dvpp_get_stream_desc_data(target)
        size = video.media.dvpp_get_stream_desc_size(target)
        assert video.media.dvpp_get_stream_desc_ret_code(target) == 0
        units.append(video.download(address, size).tobytes())

    video.on_report = keep
    settings = video.media.venc_create_frame_config()
    assert video.media.venc_set_frame_config_force_i_frame(settings, 1) == 0
    assert video.media.venc_get_frame_config_force_i_frame(settings) == 1
    for file in pixels:
        image = Image.open(io.BytesIO(file))
        image.draft("YCbCr", image.size)
        full = np.asarray(image)
        planes.append(full[..., 0])
        source = video.picture(full[..., 0].tobytes() + full[::2, ::2, 1:].tobytes(), WIDTH, HEIGHT)
        assert video.media.venc_send_frame(channel, source.desc, 0, settings, None) == 0
    assert video.media.venc_set_frame_config_eos(settings, 1) == 0
    assert video.media.venc_send_frame(channel, 0, 0, settings, None) == 0
    assert len(units) == 2
    assert video.media.venc_destroy_frame_config(settings) == 0
    assert video.media.venc_destroy_channel(channel) == 0
    assert video.media.venc_destroy_channel_desc(channel) == 0
    video.seen.clear()
    video.on_report = lambda *_: None
    decoder = video.decoder()
    for data, plane in zip(units, planes, strict=True):
        output = video.empty(WIDTH, HEIGHT)
        assert video.send(decoder, data, output.desc) == 0
        assert video.media.vdec_send_frame(decoder, _end(video), 0, 0, None) == 0
        luma, _ = video.planes(output, WIDTH, HEIGHT)
        assert np.abs(luma.astype(int) - plane).mean() < 2
    video.end("vdec")


def _end(video: Video) -> int:
    piece = video.media.dvpp_create_stream_desc()
    video.media.dvpp_set_stream_desc_eos(piece, 1)
    video.seen.append((piece, 0, None))
    return int(piece)


# What the decoder cannot show.


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (bytes.fromhex("00000001 6742c01e 00000001 68ce3c80 00000001 65888040"), 200006),
        (video_stream.access_unit(b"\xff\xd8 broken", H264), 500001),
        (unit(0, H265), 200006),
        (unit(0) + unit(1), 100000),
        (b"no stream", 200006),
    ],
    ids=["real H.264", "broken picture", "other encoding", "two pictures", "no start code"],
)
def test_frames_that_cannot_be_decoded(video: Video, data: bytes, code: int) -> None:
    """The callback comes, with the code in the description; the next frame is fine."""
    channel = video.decoder()
    bad, good = video.empty(WIDTH, HEIGHT), video.empty(WIDTH, HEIGHT)
    assert video.send(channel, data, bad.desc) == 0
    assert video.send(channel, unit(0), good.desc) == 0
    video.end("vdec")
    codes = [video.media.dvpp_get_pic_desc_ret_code(picture.desc) for picture in (bad, good)]
    assert codes == [code, 0]


def test_a_picture_needs_room(video: Video) -> None:
    """An output for a smaller picture stays as it was."""
    channel = video.decoder()
    output = video.empty(WIDTH, HEIGHT // 2)
    assert video.send(channel, unit(0), output.desc) == 0
    video.end("vdec")
    assert video.media.dvpp_get_pic_desc_ret_code(output.desc) == 100000
    assert (video.download(output.address, output.size) == 0x11).all()


# Misuse.


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"channel_id": 32}, 100000),
        ({"entype": 4}, 100000),
        ({"out_pic_format": 7}, 100000),
        ({"thread_id": 0}, 100000),
    ],
)
def test_decoders_that_cannot_be(video: Video, values: dict[str, int], code: int) -> None:
    """Channel number, encoding, format, thread."""
    channel = video.describe_channel("vdec", **values)
    assert video.media.vdec_create_channel(channel) == code
    assert video.media.vdec_destroy_channel(channel) == 100000
    assert video.media.vdec_destroy_channel_desc(channel) == 0


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"pic_width": 64}, 100000),
        ({"pic_height": 129}, 100000),
        ({"key_frame_interval": 0}, 100000),
        ({"pic_format": 12}, 100000),
        ({"entype": 9}, 100000),
        ({"buf_addr": 4096}, 100000),
    ],
)
def test_encoders_that_cannot_be(video: Video, values: dict[str, int], code: int) -> None:
    """Sizes, interval, format, encoding, a buffer that is none."""
    sides = {"pic_width": WIDTH, "pic_height": HEIGHT, "key_frame_interval": 16}
    channel = video.describe_channel("venc", **sides | values)
    assert video.media.venc_create_channel(channel) == code
    assert video.media.venc_destroy_channel_desc(channel) == 0


def test_channels_are_opened_and_closed_once(video: Video) -> None:
    """Twice, by number, and a description of an open channel."""
    channel = video.decoder()
    media = video.media
    assert media.vdec_create_channel(channel) == 100000
    assert media.vdec_destroy_channel_desc(channel) == 100000
    other = video.describe_channel("vdec", channel_id=3)
    assert media.vdec_create_channel(other) == 500000
    assert media.vdec_destroy_channel_desc(other) == 0
    assert media.vdec_destroy_channel_desc(other) == 100000
    assert media.vdec_destroy_channel(channel) == 0
    assert media.vdec_destroy_channel(channel) == 100000
    video.video = channel
    assert media.vdec_create_channel(channel) == 0
    video.end("vdec")


def test_frames_that_are_refused(video: Video) -> None:
    """Before there is a channel, without a callback, with wrong handles and memory."""
    media = video.media
    bare = media.vdec_create_channel_desc()
    with pytest.raises(RuntimeError, match="did not set callback"):
        media.vdec_send_frame(bare, 0, 0, 0, None)
    with pytest.raises(RuntimeError, match="did not set callback"):
        media.vdec_get_channel_desc_callback(bare)
    with pytest.raises(TypeError, match="callable"):
        media.vdec_set_channel_desc_callback(bare, 3)
    assert media.vdec_destroy_channel_desc(bare) == 0
    channel = video.describe_channel("vdec", channel_id=3)
    output = video.empty(WIDTH, HEIGHT)
    assert video.send(channel, unit(0), output.desc) == 100000
    assert media.vdec_create_channel(channel) == 0
    assert media.vdec_get_channel_desc_callback(channel) == video.callback
    assert media.vdec_send_frame(channel, 0, output.desc, 0, None) == 100000
    assert video.send(channel, unit(0), 0) == 100000
    assert media.vdec_send_frame(channel, output.desc, output.desc, 0, None) == 100000
    host, _ = video.acl.rt.malloc(SIZE, 0)
    video.describe(output.desc, data=host)
    assert video.send(channel, unit(0), output.desc) == 100000  # not memory of dvpp_malloc
    assert video.acl.rt.free(host) == 0
    video.end("vdec")
    assert video.seen == []


def test_pictures_the_encoder_refuses(video: Video) -> None:
    """Too small, without settings, with an output of the caller."""
    channel = video.encoder()
    settings = video.media.venc_create_frame_config()
    source = video.picture(noise(SIZE).tobytes(), WIDTH, HEIGHT)
    send = video.media.venc_send_frame
    assert send(channel, source.desc, 0, 0, None) == 100000
    assert send(channel, source.desc, 4096, settings, None) == 100000
    assert send(channel, 0, 0, settings, None) == 100000
    video.describe(source.desc, size=SIZE - 1)
    assert send(channel, source.desc, 0, settings, None) == 100000
    assert video.media.venc_destroy_frame_config(settings) == 0
    video.end("venc")


def test_settings_by_number(video: Video) -> None:
    """The encoder's description takes and tells all of them in one call each."""
    channel = video.describe_channel("venc")
    media = video.media
    assert media.venc_set_channel_desc_param(channel, 4, 320) == 0
    assert media.venc_get_channel_desc_pic_width(channel) == 320
    assert media.venc_get_channel_desc_param(channel, 4) == (320, 0)
    assert media.venc_get_channel_desc_param(channel, 1) == (video.callback, 0)
    assert media.venc_get_channel_desc_param(channel, 99) == (0, 100000)
    with pytest.raises(TypeError):
        media.venc_set_channel_desc_param(channel, 4, "320")
    assert media.venc_destroy_channel_desc(channel) == 0


def test_nobody_processes_reports(
    video: Video, machine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a channel does not wait for ever for a thread that has gone."""
    channel = video.decoder()
    video.stop()
    monkeypatch.setattr(media_video, "_PATIENCE_S", 0.01)
    output = video.empty(WIDTH, HEIGHT)
    assert video.send(channel, unit(0), output.desc) == 0
    assert video.media.vdec_destroy_channel(channel) == 507012
    assert any("vdec_create_channel" in line for line in machine.leaks())
    # The test does what the thread should have done, so that the channel can be closed.
    for report in machine.find(channel, media_video.DecoderChannel).reports:
        report.function(*report.arguments)
        report.made.set()
    assert video.media.vdec_destroy_channel(channel) == 0
    assert video.media.vdec_destroy_channel_desc(channel) == 0


def test_a_callback_cannot_close_its_channel(video: Video) -> None:
    """It would wait for itself."""
    channel = video.decoder()
    codes: list[int] = []
    done = threading.Event()

    def close(*_: Any) -> None:
        codes.append(video.media.vdec_destroy_channel(channel))
        done.set()

    video.on_report = close
    assert video.send(channel, unit(0), video.empty(WIDTH, HEIGHT).desc) == 0
    assert done.wait(5)
    assert codes == [507012]
    video.end("vdec")


def test_the_output_of_the_encoder_is_not_the_callers(video: Video, machine: Runtime) -> None:
    """Destroying it in the callback would free it twice."""
    channel = video.encoder()
    video.on_report = lambda _, target, __: video.media.dvpp_destroy_stream_desc(target)
    settings = video.media.venc_create_frame_config()
    source = video.picture(noise(SIZE).tobytes(), WIDTH, HEIGHT)
    assert video.media.venc_send_frame(channel, source.desc, 0, settings, None) == 0
    assert video.media.venc_destroy_frame_config(settings) == 0
    video.end("venc")
    assert machine.violations == ["a callback destroyed the encoder's own stream description"]


def test_a_destroyed_output_is_noticed(video: Video, machine: Runtime) -> None:
    """The hardware writes its results into the description."""
    channel = video.decoder()
    blocked = threading.Event()
    video.on_report = lambda *_: blocked.wait(5)
    outputs = [video.empty(WIDTH, HEIGHT) for _ in range(2)]
    for index, output in enumerate(outputs):
        assert video.send(channel, unit(index), output.desc) == 0
    assert video.media.dvpp_destroy_pic_desc(outputs[1].desc) == 0
    video.descs.remove(outputs[1].desc)
    blocked.set()
    video.end("vdec")
    assert machine.violations == ["a picture description was destroyed while a task used it"]


# Stand-in streams.


@given(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 4, 255]), max_size=600), st.sampled_from([0, 1]))
def test_streams_carry_any_bytes(values: list[int], encoding: int) -> None:
    """What goes in comes out, and start codes are only where access units begin."""
    content = bytes(values) + b"\xd9"
    stream = video_stream.access_unit(content, encoding) * 2
    assert video_stream.pictures(stream, encoding) == [content, content]
    assert stream.count(b"\x00\x00\x01") == 2
