"""`acl.media.*`: memory of the media hardware, and the descriptions programs fill in.

Descriptions are structures that only setters and getters reach; what their values have to be is
checked where they are used (`media_image.py`, `media_video.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npuserve.testing.simulator.binding import bare, entry
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.memory import device_of, device_view
from npuserve.testing.simulator.pictures import Area, Bytes, PixelFormat

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

INVALID_PARAM = 100000
_MAX_BATCH = 256
_MAX_LEVEL = 100
_INTERPOLATIONS = 5

# Memory.


def dvpp_malloc(runtime: Runtime, size: int, call: str) -> int:
    """Memory for the media hardware on the current card."""
    card = runtime.current.card
    address = card.memory.allocate(size, call, dvpp=True)
    runtime.shared_state.publish(card.index, card.memory.used, card.busy_ns)
    return address


def dvpp_free(runtime: Runtime, address: int) -> None:
    """Give it back."""
    runtime.require_init()
    device = device_of(address)
    if not 0 <= device < len(runtime.cards):
        raise RefusedError(107000, f"{address:#x} is not a device address")
    card = runtime.cards[device]
    card.memory.free(address, dvpp=True)
    runtime.shared_state.publish(card.index, card.memory.used, card.busy_ns)


def dvpp_bytes(runtime: Runtime, address: int, size: int) -> Bytes:
    """Content of memory the media hardware can reach: of `dvpp_malloc`, on the current card."""
    memory = runtime.current.card.memory
    try:
        view = device_view(memory, address, size)
    except RefusedError as error:
        raise RefusedError(INVALID_PARAM, str(error)) from error
    block = memory.blocks.find(address)
    if block is None or not block.dvpp:
        raise RefusedError(INVALID_PARAM, f"{address:#x} is not memory of dvpp_malloc")
    return view


@entry("acl.media.dvpp_malloc", "k", failure=(0,))
def media_malloc(runtime: Runtime, size: int) -> int:
    """Memory for pictures and streams."""
    return dvpp_malloc(runtime, size, "acl.media.dvpp_malloc")


@entry("acl.media.dvpp_malloc_with_cfg", "kio", failure=(0,))
def media_malloc_with_cfg(runtime: Runtime, size: int, policy: int, config: Any) -> int:
    """The same; the configuration names a module for statistics."""
    if not isinstance(config, dict):
        raise TypeError("acl.media.dvpp_malloc_with_cfg args parse failed: dict expected")
    return dvpp_malloc(runtime, size, "acl.media.dvpp_malloc_with_cfg")


@entry("acl.media.dvpp_free", "k")
def media_free(runtime: Runtime, address: int) -> None:
    """Give it back."""
    dvpp_free(runtime, address)


# Descriptions.


@dataclass(eq=False)
class PicDesc:
    """A picture: where its bytes are and what they mean."""

    data: int = 0
    size: int = 0
    format: int = PixelFormat.YUV_400
    width: int = 0
    height: int = 0
    width_stride: int = 0
    height_stride: int = 0
    ret_code: int = 0
    is_destroyed: bool = False


@dataclass(eq=False)
class StreamDesc:
    """A piece of a video stream."""

    data: int = 0
    size: int = 0
    format: int = 0
    timestamp: int = 0
    ret_code: int = 0
    eos: int = 0


@dataclass(eq=False)
class BatchPicDesc:
    """Pictures; their handles are made when asked for and belong to the batch."""

    pictures: list[PicDesc]
    handles: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class RoiConfig:
    """A rectangle."""

    left: int
    right: int
    top: int
    bottom: int

    @property
    def area(self) -> Area:
        """As numbers that no later call changes."""
        return Area(self.left, self.right, self.top, self.bottom)


@dataclass(eq=False)
class ResizeConfig:
    """How to scale."""

    interpolation: int = 0


@dataclass(eq=False)
class JpegeConfig:
    """How to compress."""

    level: int = 0  # as good as 100


@dataclass(eq=False)
class BorderConfig:
    """What to put around a picture."""

    border_type: int = 0
    top: int = 0
    bottom: int = 0
    left: int = 0
    right: int = 0
    values: list[float] = field(default_factory=lambda: [0.0] * 4)


def _bounded(name: str, limit: int) -> Callable[[int], None]:
    def check(value: int) -> None:
        if not 0 <= value < limit:
            raise RefusedError(INVALID_PARAM, f"{name} {value} is not in [0, {limit})")

    return check


def _anything(value: int) -> None:
    """Checked where it is used."""


def fields(
    prefix: str, kind: type[Any], letters: dict[str, str],
    checks: dict[str, Callable[[int], None]] | None = None,
) -> None:  # fmt: skip
    """Register `set_<prefix>_<field>` and `get_<prefix>_<field>`."""
    for name, letter in letters.items():
        check = (checks or {}).get(name, _anything)
        entry(f"acl.media.{_named('set', prefix, name)}", f"k{letter}")(_setter(kind, name, check))
        bare(f"acl.media.{_named('get', prefix, name)}", "k")(_getter(kind, name))


def _named(verb: str, prefix: str, name: str) -> str:
    family, _, rest = prefix.partition("_")
    return f"{family}_{verb}_{rest}_{name}"


def _setter(kind: type[Any], name: str, check: Callable[[int], None]) -> Callable[..., None]:
    def set_field(runtime: Runtime, handle: int, value: int) -> None:
        found = runtime.find(handle, kind)
        check(value)
        setattr(found, name, value)

    return set_field


def _getter(kind: type[Any], name: str) -> Callable[..., int]:
    def get_field(runtime: Runtime, handle: int) -> int:
        value: int = getattr(runtime.find(handle, kind), name)
        return value

    return get_field


def lifetime(name: str, kind: type[Any], what: str, on_device: bool) -> None:
    """Register `<family>_create_<what>` and `<family>_destroy_<what>` without arguments.

    Args:
        name: family and structure such as "dvpp_pic_desc".
        kind: what to make.
        what: for the leak report.
        on_device: the structure has a part on the card, so that making it needs a context.
    """
    family, _, rest = name.partition("_")
    created = f"acl.media.{family}_create_{rest}"

    def create(runtime: Runtime) -> int:
        runtime.require_init()
        if on_device:
            runtime.require_context()
        return runtime.register(kind(), what, created)

    def destroy(runtime: Runtime, handle: int) -> None:
        if handle:  # null is taken, as by free()
            runtime.drop(handle, kind)

    bare(created)(create)
    entry(f"acl.media.{family}_destroy_{rest}", "k")(destroy)


lifetime("dvpp_stream_desc", StreamDesc, "stream description", on_device=True)
lifetime("dvpp_resize_config", ResizeConfig, "resize configuration", on_device=False)
lifetime("dvpp_jpege_config", JpegeConfig, "JPEG configuration", on_device=False)
lifetime("dvpp_border_config", BorderConfig, "border configuration", on_device=False)

_PLACE = {"data": "k", "size": "i", "format": "i"}
fields(
    "dvpp_pic_desc",
    PicDesc,
    _PLACE | dict.fromkeys(("width", "height", "width_stride", "height_stride", "ret_code"), "i"),
)
fields("dvpp_stream_desc", StreamDesc, _PLACE | {"timestamp": "k", "ret_code": "i", "eos": "B"})
fields(
    "dvpp_resize_config",
    ResizeConfig,
    {"interpolation": "i"},
    {"interpolation": _bounded("interpolation", _INTERPOLATIONS)},
)
fields(
    "dvpp_jpege_config", JpegeConfig, {"level": "i"}, {"level": _bounded("level", _MAX_LEVEL + 1)}
)
fields(
    "dvpp_border_config",
    BorderConfig,
    dict.fromkeys(("border_type", "top", "bottom", "left", "right"), "i"),
    {"border_type": _bounded("border type", 4)},
)


@bare("acl.media.dvpp_create_pic_desc")
def create_pic_desc(runtime: Runtime) -> int:
    """Describe a picture."""
    runtime.require_context()
    return runtime.register(PicDesc(), "picture description", "acl.media.dvpp_create_pic_desc")


@entry("acl.media.dvpp_destroy_pic_desc", "k")
def destroy_pic_desc(runtime: Runtime, handle: int) -> None:
    """Destroy a description that is not part of a batch."""
    if not handle:
        return
    runtime.find(handle, PicDesc)
    for batch in runtime.objects.values():
        if isinstance(batch, BatchPicDesc) and handle in batch.handles.values():
            raise RefusedError(INVALID_PARAM, "the picture description belongs to a batch")
    runtime.drop(handle, PicDesc).is_destroyed = True


@bare("acl.media.dvpp_create_batch_pic_desc", "i")
def create_batch_pic_desc(runtime: Runtime, count: int) -> int:
    """Describe several pictures."""
    runtime.require_context()
    if not 1 <= count <= _MAX_BATCH:
        raise RefusedError(INVALID_PARAM, f"{count} pictures; 1 to {_MAX_BATCH} make a batch")
    batch = BatchPicDesc([PicDesc() for _ in range(count)])
    call = "acl.media.dvpp_create_batch_pic_desc"
    return runtime.register(batch, "batch picture description", call)


@bare("acl.media.dvpp_get_pic_desc", "ki")
def get_pic_desc(runtime: Runtime, handle: int, index: int) -> int:
    """One picture of a batch."""
    batch = runtime.find(handle, BatchPicDesc)
    if not 0 <= index < len(batch.pictures):
        raise RefusedError(INVALID_PARAM, f"picture {index} of {len(batch.pictures)}")
    if index not in batch.handles:
        picture, call = batch.pictures[index], "acl.media.dvpp_get_pic_desc"
        batch.handles[index] = runtime.register(picture, "picture of a batch", call)
    return batch.handles[index]


@entry("acl.media.dvpp_destroy_batch_pic_desc", "k")
def destroy_batch_pic_desc(runtime: Runtime, handle: int) -> None:
    """Destroy a batch and its pictures."""
    if not handle:
        return
    batch = runtime.drop(handle, BatchPicDesc)
    for picture in batch.pictures:
        picture.is_destroyed = True
    for picture_handle in batch.handles.values():
        runtime.drop(picture_handle, PicDesc)


# Rectangles.


@bare("acl.media.dvpp_create_roi_config", "iiii")
def create_roi_config(runtime: Runtime, left: int, right: int, top: int, bottom: int) -> int:
    """A rectangle."""
    runtime.require_init()
    roi = RoiConfig(left, right, top, bottom)
    return runtime.register(roi, "ROI configuration", "acl.media.dvpp_create_roi_config")


@entry("acl.media.dvpp_destroy_roi_config", "k")
def destroy_roi_config(runtime: Runtime, handle: int) -> None:
    """Destroy a rectangle."""
    if handle:
        runtime.drop(handle, RoiConfig)


@entry("acl.media.dvpp_set_roi_config", "kiiii")
def set_roi_config(
    runtime: Runtime, handle: int, left: int, right: int, top: int, bottom: int
) -> None:
    """Change a rectangle."""
    roi = runtime.find(handle, RoiConfig)
    roi.left, roi.right, roi.top, roi.bottom = left, right, top, bottom


for _side in ("left", "right", "top", "bottom"):
    entry(f"acl.media.dvpp_set_roi_config_{_side}", "ki")(_setter(RoiConfig, _side, _anything))


# Values of a border.


@entry("acl.media.dvpp_set_border_config_value", "kif")
def set_border_config_value(runtime: Runtime, handle: int, index: int, value: float) -> None:
    """Value of a channel of a constant border."""
    config = runtime.find(handle, BorderConfig)
    if not 0 <= index < len(config.values):
        raise RefusedError(INVALID_PARAM, f"channel {index} of {len(config.values)}")
    config.values[index] = value


@bare("acl.media.dvpp_get_border_config_value", "ki", failed=0.0)
def get_border_config_value(runtime: Runtime, handle: int, index: int) -> float:
    """Value of a channel."""
    config = runtime.find(handle, BorderConfig)
    if not 0 <= index < len(config.values):
        raise RefusedError(INVALID_PARAM, f"channel {index} of {len(config.values)}")
    return config.values[index]
