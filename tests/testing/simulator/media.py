"""What the tests of simulated media hardware share: pictures, memory, channels, failing calls."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.faults import Fault

NV12, NV21, GREY, RGB, BGR = 1, 2, 0, 12, 13
H2D, D2H = 1, 2

Bytes = NDArray[np.uint8]


def align(value: int, unit: int) -> int:
    """The next multiple."""
    return (value + unit - 1) // unit * unit


def photo(width: int, height: int) -> Bytes:
    """A smooth RGB picture with an edge in it, `[h, w, 3]`."""
    rows, columns = np.mgrid[:height, :width]
    pixels = np.stack([rows * 255 // height, columns * 255 // width, 255 - rows // 2 % 256], -1)
    pixels[height // 4 : height // 2, width // 4 : width // 2] = (220, 40, 90)
    return pixels.astype(np.uint8)


def jpeg(pixels: Bytes, **options: Any) -> bytes:
    """A JPEG file."""
    output = io.BytesIO()
    Image.fromarray(pixels).save(output, "JPEG", quality=95, **options)
    return output.getvalue()


def noise(*shape: int) -> Bytes:
    """Random bytes, always the same."""
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


class Media:
    """A channel and a stream, and short ways to put pictures on the card."""

    def __init__(self, acl: Any) -> None:
        self.acl, self.media = acl, acl.media
        self.stream, ret = acl.rt.create_stream()
        assert ret == 0
        self.channel = self.media.dvpp_create_channel_desc()
        assert self.media.dvpp_set_channel_desc_mode(self.channel, 15) == 0
        assert self.media.dvpp_create_channel(self.channel) == 0
        self.config = self.media.dvpp_create_resize_config()
        self.blocks: list[int] = []
        self.descs: list[int] = []
        self.areas: list[int] = []

    def upload(self, data: bytes) -> int:
        """A block of dvpp_malloc with this content."""
        address, ret = self.media.dvpp_malloc(len(data))
        assert ret == 0
        self.blocks.append(address)
        pointer = self.acl.util.bytes_to_ptr(data)
        assert self.acl.rt.memcpy(address, len(data), pointer, len(data), H2D) == 0
        return int(address)

    def download(self, address: int, size: int) -> Bytes:
        """Content of device memory."""
        data = bytes(size)
        pointer = self.acl.util.bytes_to_ptr(data)
        assert self.acl.rt.memcpy(pointer, size, address, size, D2H) == 0
        return np.frombuffer(data, np.uint8)

    def describe(self, desc: int, **values: int) -> int:
        """Set fields of a picture description."""
        for name, value in values.items():
            assert getattr(self.media, f"dvpp_set_pic_desc_{name}")(desc, value) == 0
        return desc

    def picture(
        self, data: bytes, width: int, height: int, pixel_format: int = NV12, desc: int = 0,
        stride: tuple[int, int] | None = None,
    ) -> SimpleNamespace:  # fmt: skip
        """A described picture with this content; its row is of bytes, a multiple of 16."""
        if not desc:
            desc = self.media.dvpp_create_pic_desc()
            self.descs.append(desc)
        per_pixel = 3 if pixel_format in (RGB, BGR) else 1
        row, rows = stride or (align(width * per_pixel, 16), align(height, 2))
        address = self.upload(data)
        self.describe(
            desc, data=address, size=len(data), format=pixel_format, width=width, height=height,
            width_stride=row, height_stride=rows,
        )  # fmt: skip
        return SimpleNamespace(desc=desc, address=address, size=len(data), row=row, rows=rows)

    def empty(
        self, width: int, height: int, pixel_format: int = NV12, desc: int = 0,
        unit: tuple[int, int] = (16, 2),
    ) -> SimpleNamespace:  # fmt: skip
        """A described picture to be filled, of bytes 0x11."""
        per_pixel = 3 if pixel_format in (RGB, BGR) else 1
        stride = (align(width * per_pixel, unit[0]), align(height, unit[1]))
        size = stride[0] * stride[1] * (3 if pixel_format in (NV12, NV21) else 2) // 2
        return self.picture(b"\x11" * size, width, height, pixel_format, desc, stride)

    def area(self, left: int, right: int, top: int, bottom: int) -> int:
        """An ROI configuration."""
        handle = self.media.dvpp_create_roi_config(left, right, top, bottom)
        self.areas.append(handle)
        return int(handle)

    def wait(self) -> int:
        """Synchronise the stream."""
        return int(self.acl.rt.synchronize_stream(self.stream))

    def planes(self, picture: SimpleNamespace, width: int, height: int) -> tuple[Bytes, Bytes]:
        """Luma `[h, w]` and chroma `[h/2, w/2, 2]` of an NV12 picture."""
        data = self.download(picture.address, picture.size)
        luma = data[: picture.row * picture.rows].reshape(picture.rows, picture.row)
        chroma = data[picture.row * picture.rows :].reshape(-1, picture.row // 2, 2)
        return luma[:height, :width], chroma[: (height + 1) // 2, : (width + 1) // 2]

    def pixels(self, picture: SimpleNamespace, width: int, height: int) -> Bytes:
        """`[h, w, 3]` of a packed picture."""
        data = self.download(picture.address, picture.row * picture.rows)
        return data.reshape(picture.rows, -1)[:height, : 3 * width].reshape(height, width, 3)

    def close(self) -> None:
        """Give everything back."""
        media = self.media
        for desc in self.descs:
            assert media.dvpp_destroy_pic_desc(desc) == 0
        for area in self.areas:
            assert media.dvpp_destroy_roi_config(area) == 0
        for block in self.blocks:
            assert media.dvpp_free(block) == 0
        assert media.dvpp_destroy_resize_config(self.config) == 0
        assert media.dvpp_destroy_channel(self.channel) == 0
        assert media.dvpp_destroy_channel_desc(self.channel) == 0
        assert self.acl.rt.destroy_stream(self.stream) == 0
        assert self.acl.rt.reset_device(0) == 0


def resize(media: Media, source: Any, target: Any, channel: int = 0) -> int:
    """The code of a resize, which is waited for when it was taken."""
    ret = media.media.dvpp_vpc_resize_async(
        channel or media.channel, source.desc, target.desc, media.config, media.stream
    )
    return int(ret) or media.wait()


class CallError(Exception):
    """A call of the program failed."""


def checked(result: Any) -> Any:
    """The values of a call; CallError unless its code is 0 (bare values: unless it is null)."""
    values = result if isinstance(result, tuple) else (result,)
    if values[-1]:
        raise CallError(result)
    return values[0] if len(values) < 3 else values[:-1]


def failing_calls(program: Callable[[Any], None], *undoing: str) -> list[str]:
    """The calls a program makes on its way there, once each, without those that undo."""
    with simulate(time="modelled") as machine:
        acl: Any = importlib.import_module("acl")
        assert (acl.init(), acl.rt.set_device(0)) == (0, 0)
        machine.log.clear()
        program(acl)
        assert acl.rt.reset_device(0) == 0
        assert machine.leaks() == []
        assert machine.violations == []
        names = dict.fromkeys(machine.log)
    left_out = ("destroy", "free", "reset_device", "util", *undoing)
    return [name for name in names if not any(word in name for word in left_out)]


def check_failing_call(program: Callable[[Any], None], call: str) -> None:
    """A call is made to fail: the program ends, nothing leaks, and it works the next time."""
    with simulate(time="modelled") as machine:
        acl: Any = importlib.import_module("acl")
        assert (acl.init(), acl.rt.set_device(0)) == (0, 0)
        machine.faults.append(Fault(call, code=500000))
        with pytest.raises(CallError):
            program(acl)
        assert acl.rt.reset_device(0) == 0
        assert machine.leaks() == []
        machine.faults.clear()
        assert acl.rt.set_device(0) == 0
        program(acl)
        assert acl.rt.reset_device(0) == 0
        assert machine.leaks() == []
