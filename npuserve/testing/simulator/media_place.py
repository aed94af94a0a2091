"""Pictures in device memory: what the media hardware demands of them, and access to the bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.media_desc import INVALID_PARAM, PicDesc, dvpp_bytes
from npuserve.testing.simulator.pictures import (
    LAYOUTS,
    Area,
    Bytes,
    Layout,
    Picture,
    PixelFormat,
    read,
    write,
)

if TYPE_CHECKING:
    from npuserve.testing.simulator.device import Stream
    from npuserve.testing.simulator.runtime import Runtime

FORMAT_NOT_MATCH = 100027
MEDIA_EXCEPTION = 507018  # AICPU_EXCEPTION: what a synchronisation reports of a failed task

# Pixels a microsecond of each kind of hardware: made up, of the order of data sheets.
_PIXELS_PER_US = 1000
_TASK_US = 50


class Limits(NamedTuple):
    """Sizes in pixels, and what the strides have to be multiples of."""

    least: tuple[int, int]
    most: tuple[int, int]
    stride: tuple[int, int]


VPC_INPUT = Limits((10, 6), (8192, 8192), (16, 2))
VPC_OUTPUT = Limits((10, 6), (4096, 4096), (16, 2))
_STRIDES = ((32, 16384), (6, 16384))
# Beyond 4096 pixels the hardware reads only these.
_LARGE = 4096
_LARGE_FORMATS = {PixelFormat.YUV_400, PixelFormat.NV12, PixelFormat.NV21}


@dataclass(frozen=True)
class Place:
    """A checked picture in device memory.

    Attributes:
        stride: (bytes of a row, rows).
    """

    address: int
    layout: Layout
    width: int
    height: int
    stride: tuple[int, int]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.layout.size(*self.stride)

    @property
    def pixels(self) -> int:
        """Pixels."""
        return self.width * self.height

    def read(self, runtime: Runtime) -> Picture:
        """The picture that is there now."""
        data = in_flight(runtime, self.address, self.size)
        return read(data, self.layout, self.width, self.height, self.stride)

    def write(self, runtime: Runtime, picture: Picture) -> None:
        """Put a picture there."""
        write(in_flight(runtime, self.address, self.size), self.layout, picture, self.stride)


def place_of(
    runtime: Runtime, desc: PicDesc, limits: Limits, formats: Collection[int] = LAYOUTS,
    reach: Callable[[Runtime, int, int], Bytes] = dvpp_bytes,
) -> Place:  # fmt: skip
    """Where a described picture is; `reach` looks the memory up.

    Raises:
        RefusedError: it breaks a rule of the hardware.
    """
    if desc.format not in formats or desc.format not in LAYOUTS:
        raise RefusedError(FORMAT_NOT_MATCH, f"pixel format {desc.format} is not supported here")
    layout = LAYOUTS[PixelFormat(desc.format)]
    stride = (desc.width_stride, desc.height_stride)
    _check_size(desc, layout, limits)
    _check_stride(desc, layout, limits)
    if desc.size < layout.size(*stride):
        raise RefusedError(
            INVALID_PARAM, f"{desc.size} bytes for a picture of {layout.size(*stride)}"
        )
    reach(runtime, desc.data, layout.size(*stride))
    return Place(desc.data, layout, desc.width, desc.height, stride)


def _check_size(desc: PicDesc, layout: Layout, limits: Limits) -> None:
    most_width, most_height = limits.most
    if max(desc.width, desc.height) > _LARGE and desc.format not in _LARGE_FORMATS:
        most_width = most_height = _LARGE
    if not (
        limits.least[0] <= desc.width <= most_width
        and limits.least[1] <= desc.height <= most_height
    ):
        raise RefusedError(
            INVALID_PARAM,
            f"{desc.width}x{desc.height} is not between {limits.least[0]}x{limits.least[1]} and "
            f"{most_width}x{most_height}",
        )
    across, down = layout.even
    if desc.width % across or desc.height % down:
        raise RefusedError(
            INVALID_PARAM, f"{desc.width}x{desc.height} are no multiples of {across}x{down}"
        )


def _check_stride(desc: PicDesc, layout: Layout, limits: Limits) -> None:
    for name, value, least, unit, (low, high) in (
        ("width", desc.width_stride, layout.row_bytes(desc.width), limits.stride[0], _STRIDES[0]),
        ("height", desc.height_stride, desc.height, limits.stride[1], _STRIDES[1]),
    ):
        if value < least or value % unit or not low <= value <= high:
            raise RefusedError(
                INVALID_PARAM,
                f"{name} stride {value}: a multiple of {unit} from {max(least, low)} to {high}",
            )


def check_area(area: Area, place: Place, left_unit: int = 2) -> None:
    """A crop or paste area: inside, left and top even, right and bottom odd, not too small."""
    inside = (
        0 <= area.left < area.right < place.width and 0 <= area.top < area.bottom < place.height
    )
    if not inside:
        raise RefusedError(INVALID_PARAM, f"{area} is not inside of {place.width}x{place.height}")
    if area.left % left_unit or area.top % 2 or not area.right % 2 or not area.bottom % 2:
        raise RefusedError(
            INVALID_PARAM,
            f"{area}: left a multiple of {left_unit}, top even, right and bottom odd",
        )
    if area.width < VPC_OUTPUT.least[0] or area.height < VPC_OUTPUT.least[1]:
        raise RefusedError(INVALID_PARAM, f"{area} is smaller than 10x6")


def check_scale(old: tuple[int, int], new: tuple[int, int]) -> None:
    """Both directions from 1/32 to 16 times."""
    for before, after in zip(old, new, strict=True):
        if not before <= 32 * after or not after <= 16 * before:
            raise RefusedError(INVALID_PARAM, f"from {before} to {after}: 1/32 to 16 times")


def in_flight(runtime: Runtime, address: int, size: int) -> Bytes:
    """Memory of a task that runs now; whoever freed it before broke a rule."""
    try:
        view: Bytes = runtime.bytes_at(address, size)
    except RefusedError as error:
        text = f"memory was freed while the media hardware used it: {error}"
        runtime.violations.append(text)
        raise RefusedError(MEDIA_EXCEPTION, text) from error
    return view


def check_alive(runtime: Runtime, results: list[PicDesc]) -> None:
    """Note descriptions that were destroyed before the hardware wrote their results."""
    if any(result.is_destroyed for result in results):
        runtime.violations.append("a picture description was destroyed while a task used it")


def submit(
    runtime: Runtime, stream: Stream, engine: str, name: str, pixels: int,
    work: Callable[[], None], results: list[PicDesc],
) -> None:  # fmt: skip
    """Queue a task. If it fails, its results carry the code and the stream reports it once."""

    def run() -> None:
        check_alive(runtime, results)
        for result in results:
            result.ret_code = 0
        try:
            work()
        except RefusedError as error:
            for result in results:
                result.ret_code = error.code
            stream.complaint = RefusedError(MEDIA_EXCEPTION, f"{name} failed: {error}")

    stream.queue(runtime.clock.now_ns(), engine, name, duration_ns(pixels), run)


def duration_ns(pixels: int) -> int:
    """Modelled time of a task."""
    return 1000 * (_TASK_US + pixels // _PIXELS_PER_US)
