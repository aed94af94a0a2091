"""`acl.himpi.vpc_*`: image processing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from npuserve.testing.simulator.binding import Pending, entry
from npuserve.testing.simulator.device import VPC
from npuserve.testing.simulator.himpi_system import (
    MediaChannel,
    Module,
    Reason,
    add_channel,
    channels,
    check_new,
    find_channel,
    numbers,
    reach,
    refusal,
    refusing,
    remove_channel,
    require_system,
    start_task,
)
from npuserve.testing.simulator.media_desc import PicDesc
from npuserve.testing.simulator.media_image import Job
from npuserve.testing.simulator.media_place import (
    VPC_INPUT,
    VPC_OUTPUT,
    Place,
    check_scale,
    place_of,
)
from npuserve.testing.simulator.pictures import MATRICES, Area, Border, PixelFormat, halve

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

_LIMIT = 512
_MODULE = Module.VPC
_MOST_AREAS = 256
_LEAST_AREA = (10, 6)
_BORDERS = range(4)
_MOST_LEVELS = 5
_INTERPOLATIONS = range(5)
_YUV420 = {PixelFormat.NV12, PixelFormat.NV21}
_OUTPUTS = _YUV420 | {
    PixelFormat.YUV_400, PixelFormat.RGB_888, PixelFormat.BGR_888, PixelFormat.ARGB_8888,
    PixelFormat.ABGR_8888, PixelFormat.RGBA_8888, PixelFormat.BGRA_8888,
}  # fmt: skip
_reach = reach(_MODULE)


@dataclass(eq=False)
class VpcChannel(MediaChannel):
    """A channel for image processing."""


_find = partial(find_channel, kind=VpcChannel, module=_MODULE, limit=_LIMIT)


def _create(runtime: Runtime, number: int, attributes: Any, call: str) -> None:
    numbers(runtime, call, attributes, "attr", "pic_width", "pic_height")
    stream = check_new(runtime, VpcChannel, _MODULE, number, _LIMIT)
    add_channel(runtime, VpcChannel(number, stream), call)


@entry("acl.himpi.vpc_create_chn", "io")
def vpc_create_chn(runtime: Runtime, number: int, attributes: Any) -> None:
    """Open the channel of a number."""
    _create(runtime, number, attributes, "acl.himpi.vpc_create_chn")


@entry("acl.himpi.vpc_sys_create_chn", "o", failure=(0,))
def vpc_sys_create_chn(runtime: Runtime, attributes: Any) -> int:
    """Open a channel of whatever number is free."""
    require_system(runtime, _MODULE)
    taken = {channel.number for channel in channels(runtime, VpcChannel)}
    number = next(number for number in range(_LIMIT + 1) if number not in taken)
    _create(runtime, number, attributes, "acl.himpi.vpc_sys_create_chn")
    return number


@entry("acl.himpi.vpc_destroy_chn", "i")
def vpc_destroy_chn(runtime: Runtime, number: int) -> Pending:
    """Close a channel when its tasks are over."""
    return remove_channel(runtime, _find(runtime, number=number))


@entry("acl.himpi.vpc_get_process_result", "iii")
def vpc_get_process_result(runtime: Runtime, number: int, task: int, wait_ms: int) -> Pending:
    """Wait for a task; each can be asked for once."""
    channel = _find(runtime, number=number)
    started = next((each for each in channel.tasks if each.number == task), None)
    if started is None or started.task is None:
        raise refusal(_MODULE, Reason.ILLEGAL_PARAM, f"task {task} is unknown, or was asked for")
    limit = runtime.clock.now_ns() + wait_ms * 1_000_000
    if wait_ms >= 0 and started.task.end_ns > limit:
        return Pending(limit, refusal(_MODULE, Reason.TIMEOUT, f"not done after {wait_ms} ms"))
    channel.stream.advance(started.task)
    channel.tasks.remove(started)
    failure = started.failure
    if failure is not None:
        failure = refusal(_MODULE, Reason.SYS_ERROR, str(failure))
    return Pending(started.task.end_ns, failure)


# Structures.

_PICTURE = (
    "picture_address", "picture_buffer_size", "picture_width", "picture_height",
    "picture_width_stride", "picture_height_stride", "picture_format",
)  # fmt: skip


def _picture(runtime: Runtime, call: str, value: Any) -> PicDesc:
    address, size, width, height, row, rows, pixel_format = numbers(
        runtime, call, value, *_PICTURE
    ).values()
    return PicDesc(address, size, pixel_format, width, height, row, rows)


def _source(runtime: Runtime, call: str, value: Any) -> Place:
    desc = _picture(runtime, call, value)
    with refusing(_MODULE):
        return place_of(runtime, desc, VPC_INPUT, reach=_reach)


def _target(
    runtime: Runtime, call: str, value: Any, formats: set[PixelFormat] | None = None
) -> Place:
    desc = _picture(runtime, call, value)
    with refusing(_MODULE):
        return place_of(runtime, desc, VPC_OUTPUT, formats or _OUTPUTS, _reach)


def _region(runtime: Runtime, call: str, value: Any, place: Place) -> Area:
    """A part of a picture: inside, not too small, on whole chroma samples."""
    names = ("left_offset", "top_offset", "crop_width", "crop_height")
    left, top, width, height = numbers(runtime, call, value, *names).values()
    return _checked(Area(left, left + width - 1, top, top + height - 1), place)


def _checked(area: Area, place: Place) -> Area:
    across, down = place.layout.even
    if (
        area.width < _LEAST_AREA[0]
        or area.height < _LEAST_AREA[1]
        or area.right >= place.width
        or area.bottom >= place.height
        or (area.left % across, area.width % across) != (0, 0)
        or (area.top % down, area.height % down) != (0, 0)
    ):
        raise refusal(
            _MODULE,
            Reason.ILLEGAL_PARAM,
            f"{area} of {place.width}x{place.height}, in steps of {across}x{down}",
        )
    return area


def _resizing(runtime: Runtime, call: str, value: Any) -> tuple[int, int, int]:
    names = ("resize_width", "resize_height", "interpolation")
    width, height, interpolation = numbers(runtime, call, value, *names).values()
    return width, height, _interpolation(interpolation)


def _interpolation(value: int) -> int:
    if value not in _INTERPOLATIONS:
        raise refusal(_MODULE, Reason.ILLEGAL_PARAM, f"interpolation {value} is not supported")
    return value


def _dict(call: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{call} args parse failed: dict expected, got {value!r}")
    return value


def _regions(call: str, values: Any, count: int) -> list[dict[str, Any]]:
    if not isinstance(values, list):
        raise TypeError(f"{call} args parse failed: list expected, got {values!r}")
    if len(values) != count:
        raise TypeError(f"{call}: {len(values)} regions are not {count}")
    if not 1 <= count <= _MOST_AREAS:
        raise refusal(_MODULE, Reason.ILLEGAL_PARAM, f"{count} regions: 1 to {_MOST_AREAS}")
    return [_dict(call, value) for value in values]


# Tasks.


def _process(runtime: Runtime, number: int, name: str, jobs: list[Job]) -> int:
    """Queue jobs as one task; its number."""
    channel = _find(runtime, number=number)
    for job in jobs:
        whole = (job.source.width, job.source.height)
        part = (job.area.width, job.area.height) if job.area is not None else whole
        with refusing(_MODULE):
            check_scale(part, job.inner_size)

    def work() -> None:
        for job in jobs:
            job.run(runtime, MATRICES[0])

    pixels = sum(job.source.pixels + job.target.pixels for job in jobs)
    return start_task(runtime, channel, VPC, name, pixels, work).number


@entry("acl.himpi.vpc_resize", "iooffii", failure=(0,))
def vpc_resize(
    runtime: Runtime, number: int, source: Any, target: Any, across: float, down: float,
    interpolation: int, wait_ms: int,
) -> int:  # fmt: skip
    """Scale a picture; factors other than 0 have to fit the sizes."""
    call = "acl.himpi.vpc_resize"
    _find(runtime, number=number)
    from_place, to_place = _source(runtime, call, source), _target(runtime, call, target)
    for factor, before, after in (
        (across, from_place.width, to_place.width),
        (down, from_place.height, to_place.height),
    ):
        if factor and round(before * factor) != after:
            raise refusal(_MODULE, Reason.ILLEGAL_PARAM, f"{before} x {factor} is not {after}")
    job = Job(from_place, to_place, interpolation=_interpolation(interpolation))
    return _process(runtime, number, "resize", [job])


@entry("acl.himpi.vpc_crop", "iooii", failure=(0,))
def vpc_crop(
    runtime: Runtime, number: int, source: Any, regions: Any, count: int, wait_ms: int
) -> int:
    """Cut out parts, each as large as its output."""
    call = "acl.himpi.vpc_crop"
    _find(runtime, number=number)
    from_place = _source(runtime, call, source)
    jobs = []
    for region in _regions(call, regions, count):
        to_place = _target(runtime, call, region.get("dest_pic_info"))
        area = _region(runtime, call, region.get("crop_region"), from_place)
        if (area.width, area.height) != (to_place.width, to_place.height):
            raise refusal(
                _MODULE,
                Reason.ILLEGAL_PARAM,
                f"a part of {area.width}x{area.height} for {to_place.width}x{to_place.height}",
            )
        jobs.append(Job(from_place, to_place, area=area))
    return _process(runtime, number, "crop", jobs)


def _pasting(runtime: Runtime, call: str, source: Place, region: dict[str, Any]) -> Job:
    """A part of a picture scaled and put somewhere into another one."""
    target = _target(runtime, call, region.get("dest_pic_info"))
    area = _region(runtime, call, region.get("crop_region"), source)
    width, height, interpolation = _resizing(runtime, call, region.get("resize_info"))
    left, top = numbers(runtime, call, region, "dest_left_offset", "dest_top_offset").values()
    where = _checked(Area(left, left + width - 1, top, top + height - 1), target)
    return Job(source, target, area=area, where=where, interpolation=interpolation)


def _bordered(runtime: Runtime, call: str, source: Place, region: dict[str, Any]) -> Job:
    """The same with a border over the rest of the output."""
    job = _pasting(runtime, call, source, region)
    assert job.where is not None
    kind = numbers(runtime, call, region, "border_type")["border_type"]
    where, target = job.where, job.target
    border = Border(
        _border_kind(kind), where.top, target.height - where.bottom - 1, where.left,
        target.width - where.right - 1, _scalar(call, region.get("scalar_value")),
    )  # fmt: skip
    return Job(source, target, area=job.area, border=border, interpolation=job.interpolation)


def _border_kind(kind: int) -> int:
    if kind not in _BORDERS:
        raise refusal(_MODULE, Reason.ILLEGAL_PARAM, f"border type {kind} is not supported")
    return kind


def _scalar(call: str, value: Any) -> tuple[float, ...]:
    values = [] if value is None else _dict(call, value).get("val", [])
    return (*map(float, values), *[0.0] * (4 - len(values)))


def _parts(
    runtime: Runtime, call: str, number: int, source: Any, regions: Any, count: int, work: str,
    make: Any,
) -> int:  # fmt: skip
    """Parts of one picture, each as `make` says."""
    _find(runtime, number=number)
    place = _source(runtime, call, source)
    jobs = [make(runtime, call, place, region) for region in _regions(call, regions, count)]
    return _process(runtime, number, work, jobs)


@entry("acl.himpi.vpc_crop_resize", "iooii", failure=(0,))
def vpc_crop_resize(
    runtime: Runtime, number: int, source: Any, regions: Any, count: int, wait_ms: int
) -> int:
    """Cut out parts and scale each."""
    call = "acl.himpi.vpc_crop_resize"
    return _parts(runtime, call, number, source, regions, count, "crop, resize", _pasting)


@entry("acl.himpi.vpc_crop_resize_paste", "iooii", failure=(0,))
def vpc_crop_resize_paste(
    runtime: Runtime, number: int, source: Any, regions: Any, count: int, wait_ms: int
) -> int:
    """Cut out parts, scale each and put it somewhere into its output."""
    call = "acl.himpi.vpc_crop_resize_paste"
    return _parts(runtime, call, number, source, regions, count, "crop, resize, paste", _pasting)


@entry("acl.himpi.vpc_crop_resize_make_border", "iooii", failure=(0,))
def vpc_crop_resize_make_border(
    runtime: Runtime, number: int, source: Any, regions: Any, count: int, wait_ms: int
) -> int:
    """Cut out parts, scale each and put a border around it."""
    call = "acl.himpi.vpc_crop_resize_make_border"
    return _parts(runtime, call, number, source, regions, count, "crop, resize, border", _bordered)


def _batch(
    runtime: Runtime, call: str, number: int, sources: Any, count: int, regions: Any, counts: Any,
    make: Any,
) -> int:  # fmt: skip
    _find(runtime, number=number)
    for values in (sources, regions, counts):
        if not isinstance(values, list):
            raise TypeError(f"{call} args parse failed: list expected, got {values!r}")
    if not 1 <= count <= len(sources) or count > len(counts):
        raise refusal(_MODULE, Reason.ILLEGAL_PARAM, f"{count} of {len(sources)} pictures")
    remaining = iter(_regions(call, regions, sum(counts[:count])))
    jobs = [
        make(runtime, call, place, next(remaining))
        for source, each in zip(sources, counts[:count], strict=False)
        for place in [_source(runtime, call, source)] * each
    ]
    return _process(runtime, number, "batch", jobs)


@entry("acl.himpi.vpc_batch_crop_resize_paste", "ioiooi", failure=(0,))
def vpc_batch_crop_resize_paste(
    runtime: Runtime, number: int, sources: Any, count: int, regions: Any, counts: Any,
    wait_ms: int,
) -> int:  # fmt: skip
    """The same for several pictures, each with several parts."""
    call = "acl.himpi.vpc_batch_crop_resize_paste"
    return _batch(runtime, call, number, sources, count, regions, counts, _pasting)


@entry("acl.himpi.vpc_batch_crop_resize_make_border", "ioiooi", failure=(0,))
def vpc_batch_crop_resize_make_border(
    runtime: Runtime, number: int, sources: Any, count: int, regions: Any, counts: Any,
    wait_ms: int,
) -> int:  # fmt: skip
    """The same with a border around each."""
    call = "acl.himpi.vpc_batch_crop_resize_make_border"
    return _batch(runtime, call, number, sources, count, regions, counts, _bordered)


def _convert(
    runtime: Runtime, call: str, number: int, source: Any, target: Any, formats: set[PixelFormat]
) -> int:
    _find(runtime, number=number)
    from_place = _source(runtime, call, source)
    to_place = _target(runtime, call, target, formats)
    if (from_place.width, from_place.height) != (to_place.width, to_place.height):
        text = "conversion of colours does not change the size"
        raise refusal(_MODULE, Reason.ILLEGAL_PARAM, text)
    return _process(runtime, number, "convert", [Job(from_place, to_place)])


@entry("acl.himpi.vpc_convert_color", "iooi", failure=(0,))
def vpc_convert_color(runtime: Runtime, number: int, source: Any, target: Any, wait_ms: int) -> int:
    """The same picture in another format."""
    call = "acl.himpi.vpc_convert_color"
    return _convert(runtime, call, number, source, target, _OUTPUTS)


@entry("acl.himpi.vpc_convert_color_to_yuv420", "iooi", failure=(0,))
def vpc_convert_color_to_yuv420(
    runtime: Runtime, number: int, source: Any, target: Any, wait_ms: int
) -> int:
    """The same to NV12 or NV21."""
    call = "acl.himpi.vpc_convert_color_to_yuv420"
    return _convert(runtime, call, number, source, target, _YUV420)


@entry("acl.himpi.vpc_copy_make_border", "ioooi", failure=(0,))
def vpc_copy_make_border(
    runtime: Runtime, number: int, source: Any, target: Any, around: Any, wait_ms: int
) -> int:
    """The same picture with a border."""
    call = "acl.himpi.vpc_copy_make_border"
    _find(runtime, number=number)
    from_place, to_place = _source(runtime, call, source), _target(runtime, call, target)
    names = ("top", "bottom", "left", "right", "border_type")
    top, bottom, left, right, kind = numbers(runtime, call, around, *names).values()
    scalar = _scalar(call, _dict(call, around).get("scalar_value"))
    border = Border(_border_kind(kind), top, bottom, left, right, scalar)
    job = Job(from_place, to_place, border=border)
    if job.inner_size != (from_place.width, from_place.height):
        raise refusal(_MODULE, Reason.ILLEGAL_PARAM, f"the border leaves {job.inner_size}")
    return _process(runtime, number, "border", [job])


@entry("acl.himpi.vpc_pyrdown", "iooioioi", failure=(0,))
def vpc_pyrdown(
    runtime: Runtime, number: int, source: Any, targets: Any, levels: int, kernel: Any,
    divisor: int, border: Any, wait_ms: int,
) -> int:  # fmt: skip
    """A grey picture halved level by level; only with the hardware's own kernel (None)."""
    call = "acl.himpi.vpc_pyrdown"
    channel = _find(runtime, number=number)
    if not isinstance(targets, list):
        raise TypeError(f"{call} args parse failed: list expected, got {targets!r}")
    if kernel is not None:
        raise refusal(_MODULE, Reason.NOT_SUPPORT, "the simulator has the default kernel only")
    if not 1 <= levels <= _MOST_LEVELS or len(targets) != levels:
        raise refusal(_MODULE, Reason.ILLEGAL_PARAM, f"{len(targets)} outputs, {levels} levels")
    grey = {PixelFormat.YUV_400}
    places = [_source(runtime, call, source)]
    places += [_target(runtime, call, target, grey) for target in targets]
    for before, after in pairwise(places):
        if (before.width, before.height) != (2 * after.width, 2 * after.height):
            raise refusal(_MODULE, Reason.ILLEGAL_PARAM, "an output is not half as large")

    def work() -> None:
        picture = places[0].read(runtime)
        for place in places[1:]:
            picture = halve(picture)
            place.write(runtime, picture)

    pixels = sum(place.pixels for place in places)
    return start_task(runtime, channel, VPC, "pyramid", pixels, work).number
