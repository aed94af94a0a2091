"""`acl.media.*`: channels for pictures, and image processing (VPC)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.testing.simulator.binding import bare, entry
from npuserve.testing.simulator.device import VPC
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.media_desc import (
    INVALID_PARAM,
    BatchPicDesc,
    BorderConfig,
    PicDesc,
    ResizeConfig,
    RoiConfig,
)
from npuserve.testing.simulator.media_place import (
    VPC_INPUT,
    VPC_OUTPUT,
    Limits,
    Place,
    check_area,
    check_scale,
    place_of,
    submit,
)
from npuserve.testing.simulator.pictures import (
    MATRICES,
    Area,
    Border,
    ColourMatrix,
    PixelFormat,
    convert,
    crop,
    halve,
    paste,
    resize,
    surround,
)

if TYPE_CHECKING:
    from npuserve.testing.simulator.device import Context
    from npuserve.testing.simulator.runtime import Runtime

# What a channel is for, dvpp_set_channel_desc_mode.
MODE_VPC, MODE_JPEGD, MODE_JPEGE, MODE_PNGD = 1, 2, 4, 8
_ALL_MODES = 15

_CSC_MATRIX = 0  # acldvppChannelDescParamType
_PASTE_UNIT = 16
_MAX_AREAS = 256
_OUTPUTS = {
    PixelFormat.YUV_400, PixelFormat.NV12, PixelFormat.NV21,
    PixelFormat.RGB_888, PixelFormat.BGR_888,
}  # fmt: skip
_COLOUR_OUTPUTS = _OUTPUTS | {
    PixelFormat.ARGB_8888, PixelFormat.ABGR_8888, PixelFormat.RGBA_8888, PixelFormat.BGRA_8888,
}  # fmt: skip
_PYRAMID_INPUT = Limits((20, 12), (2048, 2048), (16, 2))
_PYRAMID_OUTPUT = Limits((10, 6), (1024, 1024), (16, 2))

# Channels.


@dataclass(eq=False)
class ImageChannel:
    """A channel description; `context` is that of the channel once there is one."""

    mode: int = MODE_VPC | MODE_JPEGD | MODE_JPEGE
    matrix: int = 0
    context: Context | None = None


@bare("acl.media.dvpp_create_channel_desc")
def create_channel_desc(runtime: Runtime) -> int:
    """Describe a channel."""
    runtime.require_context()
    call = "acl.media.dvpp_create_channel_desc"
    return runtime.register(ImageChannel(), "channel description", call)


@entry("acl.media.dvpp_destroy_channel_desc", "k")
def destroy_channel_desc(runtime: Runtime, handle: int) -> None:
    """Destroy a description whose channel is destroyed."""
    if not handle:
        return
    if runtime.find(handle, ImageChannel).context is not None:
        raise RefusedError(INVALID_PARAM, "the channel is not destroyed")
    runtime.drop(handle, ImageChannel)


@entry("acl.media.dvpp_create_channel", "k")
def create_channel(runtime: Runtime, handle: int) -> None:
    """Open a channel."""
    channel = runtime.find(handle, ImageChannel)
    if channel.context is not None:
        raise RefusedError(INVALID_PARAM, "the channel is there already")
    channel.context = runtime.current


@entry("acl.media.dvpp_destroy_channel", "k")
def destroy_channel(runtime: Runtime, handle: int) -> None:
    """Close a channel."""
    open_channel(runtime, handle).context = None


@entry("acl.media.dvpp_set_channel_desc_mode", "ki")
def set_channel_desc_mode(runtime: Runtime, handle: int, mode: int) -> None:
    """Say what a channel will be used for."""
    channel = runtime.find(handle, ImageChannel)
    if not 0 < mode <= _ALL_MODES:
        raise RefusedError(INVALID_PARAM, f"channel mode {mode}: bits of {_ALL_MODES}")
    if channel.context is not None:
        raise RefusedError(INVALID_PARAM, "the channel is there already")
    channel.mode = mode


@bare("acl.media.dvpp_get_channel_desc_channel_id", "k")
def get_channel_desc_channel_id(runtime: Runtime, handle: int) -> int:
    """Number of the channel."""
    open_channel(runtime, handle)
    return handle & 0xFFFF


@entry("acl.media.dvpp_set_channel_desc_param", "kik", failure=(0,))
def set_channel_desc_param(runtime: Runtime, handle: int, parameter: int, value: int) -> int:
    """Choose a colour matrix."""
    channel = runtime.find(handle, ImageChannel)
    if parameter != _CSC_MATRIX or not 0 <= value < len(MATRICES):
        raise RefusedError(INVALID_PARAM, f"parameter {parameter} = {value}")
    channel.matrix = value
    return handle


@entry("acl.media.dvpp_get_channel_desc_param", "ki", failure=(0, 0))
def get_channel_desc_param(runtime: Runtime, handle: int, parameter: int) -> tuple[int, int]:
    """Bytes of a parameter, and its value."""
    channel = runtime.find(handle, ImageChannel)
    if parameter != _CSC_MATRIX:
        raise RefusedError(INVALID_PARAM, f"parameter {parameter} is unknown")
    return 4, channel.matrix


def open_channel(runtime: Runtime, handle: int, mode: int = 0) -> ImageChannel:
    """A channel that is open in the current context, for one kind of work."""
    channel = runtime.find(handle, ImageChannel)
    if channel.context is None:
        raise RefusedError(INVALID_PARAM, "the channel was not created")
    if channel.context.card is not runtime.current.card:
        raise RefusedError(INVALID_PARAM, "the channel belongs to another device")
    if mode & ~channel.mode:
        raise RefusedError(INVALID_PARAM, f"mode {channel.mode} of the channel lacks {mode}")
    return channel


# Image processing.


@dataclass(frozen=True)
class Job:
    """One picture made of a part of another."""

    source: Place
    target: Place
    result: PicDesc | None = None
    area: Area | None = None
    where: Area | None = None
    border: Border | None = None
    interpolation: int = 0

    def check(self) -> None:
        """Refuse areas and scales that the hardware does not know."""
        if self.area is not None:
            check_area(self.area, self.source)
        if self.where is not None:
            check_area(self.where, self.target, _PASTE_UNIT)
        if self.border is not None and min(self.inner_size) <= 0:
            raise RefusedError(INVALID_PARAM, f"the border leaves {self.inner_size}")
        whole = (self.source.width, self.source.height)
        check_scale((self.area.width, self.area.height) if self.area else whole, self.inner_size)

    @property
    def inner_size(self) -> tuple[int, int]:
        """Size to scale to."""
        if self.where is not None:
            return self.where.width, self.where.height
        width, height = self.target.width, self.target.height
        if self.border is not None:
            width -= self.border.left + self.border.right
            height -= self.border.top + self.border.bottom
        return width, height

    def run(self, runtime: Runtime, matrix: ColourMatrix) -> None:
        """Read, cut out, scale, convert, put there."""
        picture = self.source.read(runtime)
        if self.area is not None:
            picture = crop(picture, self.area)
        picture = resize(picture, *self.inner_size, self.interpolation)
        picture = convert(picture, self.target.layout, matrix)
        if self.border is not None:
            picture = surround(picture, self.border)
        if self.where is not None:
            whole = self.target.read(runtime)
            paste(whole, picture, self.where)
            picture = whole
        self.target.write(runtime, picture)


def _process(
    runtime: Runtime, channel_handle: int, name: str, jobs: list[Job], stream: int
) -> None:
    channel = open_channel(runtime, channel_handle, MODE_VPC)
    for job in jobs:
        job.check()
    matrix = MATRICES[channel.matrix]

    def work() -> None:
        for job in jobs:
            job.run(runtime, matrix)

    pixels = sum(job.source.pixels + job.target.pixels for job in jobs)
    results = [job.result for job in jobs if job.result is not None]
    submit(runtime, runtime.stream(stream), VPC, name, pixels, work, results)


def _interpolation(runtime: Runtime, handle: int) -> int:
    return runtime.find(handle, ResizeConfig).interpolation


def _area(runtime: Runtime, handle: int) -> Area:
    return runtime.find(handle, RoiConfig).area


def _border(runtime: Runtime, handle: int) -> Border:
    found = runtime.find(handle, BorderConfig)
    sides = (found.top, found.bottom, found.left, found.right)
    return Border(found.border_type, *sides, tuple(found.values))


def _pair(runtime: Runtime, source: int, target: int) -> tuple[Place, Place, PicDesc]:
    result = runtime.find(target, PicDesc)
    return (
        place_of(runtime, runtime.find(source, PicDesc), VPC_INPUT),
        place_of(runtime, result, VPC_OUTPUT, _OUTPUTS),
        result,
    )


@entry("acl.media.dvpp_vpc_resize_async", "kkkkk")
def vpc_resize(
    runtime: Runtime, channel: int, source: int, target: int, config: int, stream: int
) -> None:
    """Scale a picture to the size of the other one."""
    job = Job(*_pair(runtime, source, target), interpolation=_interpolation(runtime, config))
    _process(runtime, channel, "resize", [job], stream)


@entry("acl.media.dvpp_vpc_crop_async", "kkkkk")
def vpc_crop(
    runtime: Runtime, channel: int, source: int, target: int, area: int, stream: int
) -> None:
    """Cut out a part, and scale it."""
    job = Job(*_pair(runtime, source, target), area=_area(runtime, area))
    _process(runtime, channel, "crop", [job], stream)


@entry("acl.media.dvpp_vpc_crop_resize_async", "kkkkkk")
def vpc_crop_resize(
    runtime: Runtime, channel: int, source: int, target: int, area: int, config: int, stream: int
) -> None:
    """The same with a choice of interpolation."""
    job = Job(
        *_pair(runtime, source, target),
        area=_area(runtime, area),
        interpolation=_interpolation(runtime, config),
    )
    _process(runtime, channel, "crop, resize", [job], stream)


@entry("acl.media.dvpp_vpc_crop_and_paste_async", "kkkkkk")
def vpc_crop_and_paste(
    runtime: Runtime, channel: int, source: int, target: int, area: int, where: int, stream: int
) -> None:
    """Cut out a part, scale it and put it over a part of the other picture."""
    job = Job(
        *_pair(runtime, source, target), area=_area(runtime, area), where=_area(runtime, where)
    )
    _process(runtime, channel, "crop, paste", [job], stream)


@entry("acl.media.dvpp_vpc_crop_resize_paste_async", "kkkkkkk")
def vpc_crop_resize_paste(
    runtime: Runtime, channel: int, source: int, target: int, area: int, where: int, config: int,
    stream: int,
) -> None:  # fmt: skip
    """The same with a choice of interpolation."""
    job = Job(
        *_pair(runtime, source, target),
        area=_area(runtime, area),
        where=_area(runtime, where),
        interpolation=_interpolation(runtime, config),
    )
    _process(runtime, channel, "crop, resize, paste", [job], stream)


@entry("acl.media.dvpp_vpc_convert_color_async", "kkkk")
def vpc_convert_color(
    runtime: Runtime, channel: int, source: int, target: int, stream: int
) -> None:
    """The same picture in another format."""
    result = runtime.find(target, PicDesc)
    from_place = place_of(runtime, runtime.find(source, PicDesc), VPC_INPUT)
    to_place = place_of(runtime, result, VPC_OUTPUT, _COLOUR_OUTPUTS)
    if (from_place.width, from_place.height) != (to_place.width, to_place.height):
        raise RefusedError(INVALID_PARAM, "conversion of colours does not change the size")
    _process(runtime, channel, "convert", [Job(from_place, to_place, result)], stream)


@entry("acl.media.dvpp_vpc_make_border_async", "kkkkk")
def vpc_make_border(
    runtime: Runtime, channel: int, source: int, target: int, border: int, stream: int
) -> None:
    """The same picture with a border."""
    job = Job(*_pair(runtime, source, target), border=_border(runtime, border))
    if job.inner_size != (job.source.width, job.source.height):
        raise RefusedError(INVALID_PARAM, f"the border leaves {job.inner_size}")
    _process(runtime, channel, "border", [job], stream)


@entry("acl.media.dvpp_vpc_pyr_down_async", "kkkkk")
def vpc_pyr_down(
    runtime: Runtime, channel_handle: int, source: int, target: int, reserved: int, stream: int
) -> None:
    """Halve a grey picture as a pyramid does."""
    open_channel(runtime, channel_handle, MODE_VPC)
    result, grey = runtime.find(target, PicDesc), {PixelFormat.YUV_400}
    from_place = place_of(runtime, runtime.find(source, PicDesc), _PYRAMID_INPUT, grey)
    to_place = place_of(runtime, result, _PYRAMID_OUTPUT, grey)
    if (from_place.width, from_place.height) != (2 * to_place.width, 2 * to_place.height):
        raise RefusedError(INVALID_PARAM, "the output is not half as large as the input")

    def work() -> None:
        to_place.write(runtime, halve(from_place.read(runtime)))

    pixels = from_place.pixels
    submit(runtime, runtime.stream(stream), VPC, "pyramid", pixels, work, [result])


# Batches.


def _batch(
    runtime: Runtime, sources: int, counts: list[int], targets: int, areas: list[int],
    others: list[int] | None = None,
) -> Iterator[tuple[Place, Place, PicDesc, Area, int]]:  # fmt: skip
    """For each area (source, target, description of the target, area, paired handle or 0)."""
    source_batch = runtime.find(sources, BatchPicDesc).pictures
    target_batch = runtime.find(targets, BatchPicDesc).pictures
    if not 0 < len(counts) <= len(source_batch):
        raise RefusedError(INVALID_PARAM, f"{len(counts)} numbers for {len(source_batch)} pictures")
    if min(counts) < 1 or not sum(counts) <= min(_MAX_AREAS, len(target_batch)):
        raise RefusedError(INVALID_PARAM, f"{counts} areas for {len(target_batch)} pictures")
    if len(areas) < sum(counts) or (others is not None and len(others) < sum(counts)):
        raise RefusedError(INVALID_PARAM, f"{len(areas)} areas for {sum(counts)}")
    index = 0
    for picture, count in zip(source_batch, counts, strict=False):
        source = place_of(runtime, picture, VPC_INPUT)
        for _ in range(count):
            result = target_batch[index]
            target = place_of(runtime, result, VPC_OUTPUT, _OUTPUTS)
            other = 0 if others is None else others[index]
            yield source, target, result, _area(runtime, areas[index]), other
            index += 1


@entry("acl.media.dvpp_vpc_batch_crop_async", "kklklk", failure=(0,))
def vpc_batch_crop(
    runtime: Runtime, channel: int, sources: int, counts: list[int], targets: int,
    areas: list[int], stream: int,
) -> int:  # fmt: skip
    """Cut out several parts of several pictures, and scale them."""
    jobs = [
        Job(source, target, result, area)
        for source, target, result, area, _ in _batch(runtime, sources, counts, targets, areas)
    ]
    _process(runtime, channel, "batch crop", jobs, stream)
    return targets


@entry("acl.media.dvpp_vpc_batch_crop_resize_async", "kklklkk")
def vpc_batch_crop_resize(
    runtime: Runtime, channel: int, sources: int, counts: list[int], targets: int,
    areas: list[int], config: int, stream: int,
) -> None:  # fmt: skip
    """The same with a choice of interpolation."""
    how = _interpolation(runtime, config)
    jobs = [
        Job(source, target, result, area, interpolation=how)
        for source, target, result, area, _ in _batch(runtime, sources, counts, targets, areas)
    ]
    _process(runtime, channel, "batch crop, resize", jobs, stream)


@entry("acl.media.dvpp_vpc_batch_crop_and_paste_async", "kklkllk", failure=(0,))
def vpc_batch_crop_and_paste(
    runtime: Runtime, channel: int, sources: int, counts: list[int], targets: int,
    areas: list[int], where: list[int], stream: int,
) -> int:  # fmt: skip
    """Cut out several parts and put each over a part of a picture of its own."""
    jobs = [
        Job(source, target, result, area, _area(runtime, other))
        for source, target, result, area, other in _batch(
            runtime, sources, counts, targets, areas, where
        )
    ]
    _process(runtime, channel, "batch crop, paste", jobs, stream)
    return targets


@entry("acl.media.dvpp_vpc_batch_crop_resize_paste_async", "kklkllkk")
def vpc_batch_crop_resize_paste(
    runtime: Runtime, channel: int, sources: int, counts: list[int], targets: int,
    areas: list[int], where: list[int], config: int, stream: int,
) -> None:  # fmt: skip
    """The same with a choice of interpolation."""
    how = _interpolation(runtime, config)
    jobs = [
        Job(source, target, result, area, _area(runtime, other), interpolation=how)
        for source, target, result, area, other in _batch(
            runtime, sources, counts, targets, areas, where
        )
    ]
    _process(runtime, channel, "batch crop, resize, paste", jobs, stream)


@entry("acl.media.dvpp_vpc_batch_crop_resize_make_border_async", "kklkllkk")
def vpc_batch_crop_resize_make_border(
    runtime: Runtime, channel: int, sources: int, counts: list[int], targets: int,
    areas: list[int], borders: list[int], config: int, stream: int,
) -> None:  # fmt: skip
    """Cut out several parts, scale them and put a border around each."""
    how = _interpolation(runtime, config)
    jobs = []
    for source, target, result, area, other in _batch(
        runtime, sources, counts, targets, areas, borders
    ):
        border = _border(runtime, other)
        jobs.append(Job(source, target, result, area, border=border, interpolation=how))
    _process(runtime, channel, "batch crop, resize, border", jobs, stream)
