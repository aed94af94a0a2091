"""Image processing of the simulated acl.himpi, written as the documentation's programs are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from npuserve.testing.simulator.runtime import Runtime
from tests.testing.simulator.himpi import (
    BAD_ADDR,
    ILLEGAL_PARAM,
    NOT_SUPPORT,
    SYS_ERROR,
    TIMEOUT,
    VPC,
    Himpi,
    opened,
)
from tests.testing.simulator.media import BGR, GREY, RGB, noise, photo
from tests.testing.simulator.test_media_image import bilinear, nv12


@pytest.fixture
def media(acl: Any, machine: Runtime) -> Iterator[Himpi]:
    """Nothing is left at the end."""
    yield from opened(acl, machine)


@pytest.fixture
def vpc(media: Himpi) -> Iterator[Himpi]:
    """With channel 0 for image processing."""
    attributes = {"attr": 0, "pic_width": 0, "pic_height": 0}
    assert media.himpi.vpc_create_chn(0, attributes) == 0
    yield media
    assert media.himpi.vpc_destroy_chn(0) == 0


def region(target: dict[str, int], left: int, top: int, width: int, height: int) -> dict[str, Any]:
    """Part of a picture, with an output."""
    crop = {"left_offset": left, "top_offset": top, "crop_width": width, "crop_height": height}
    return {"dest_pic_info": target, "crop_region": crop}


def resizing(width: int, height: int, interpolation: int = 0) -> dict[str, Any]:
    """How to scale a part."""
    return {
        "resize_info": {
            "resize_width": width, "resize_height": height, "interpolation": interpolation
        }
    }  # fmt: skip


def test_resize(vpc: Himpi) -> None:
    """As the formula of a textbook."""
    data, luma, _ = nv12(64, 40)
    source, target = vpc.picture(data, 64, 40), vpc.empty(48, 20)
    vpc.vpc("resize", source, target, 0, 0, 0)
    assert np.abs(vpc.luma(target).astype(int) - bilinear(luma, 48, 20, 0.5)).max() <= 1
    again = vpc.empty(48, 20)
    vpc.vpc("resize", source, again, 0.75, 0.5, 0)
    np.testing.assert_array_equal(vpc.content(again), vpc.content(target))


def test_crop(vpc: Himpi) -> None:
    """Two parts in one task."""
    data, luma, _ = nv12(64, 40)
    source = vpc.picture(data, 64, 40)
    targets = [vpc.empty(32, 20), vpc.empty(48, 10)]
    parts = [region(targets[0], 10, 6, 32, 20), region(targets[1], 16, 30, 48, 10)]
    vpc.vpc("crop", source, parts, 2)
    np.testing.assert_array_equal(vpc.luma(targets[0]), luma[6:26, 10:42])
    np.testing.assert_array_equal(vpc.luma(targets[1]), luma[30:, 16:])


@pytest.mark.parametrize("call", ["crop_resize", "crop_resize_paste"])
def test_parts_are_scaled_and_pasted(vpc: Himpi, call: str) -> None:
    """Twice as large by nearest neighbours; the rest of the output stays."""
    data, luma, _ = nv12(64, 40)
    source, target = vpc.picture(data, 64, 40), vpc.empty(80, 60)
    offset = {"dest_left_offset": 16, "dest_top_offset": 4} if call.endswith("paste") else {}
    part = region(target, 2, 4, 16, 10) | resizing(32, 20, 2) | offset
    vpc.vpc(call, source, [part], 1)
    left, top = (16, 4) if offset else (0, 0)
    expected = np.full((60, 80), 0x11)
    expected[top : top + 20, left : left + 32] = luma[4:14, 2:18].repeat(2, 0).repeat(2, 1)
    np.testing.assert_array_equal(vpc.luma(target), expected)


def test_borders(vpc: Himpi) -> None:
    """Around a whole picture, and around a part."""
    pixels = noise(20, 32, 3)
    source = vpc.picture(pixels.tobytes(), 32, 20, RGB)
    target, other = vpc.empty(48, 24, RGB), vpc.empty(48, 24, RGB)
    around = {"top": 4, "bottom": 0, "left": 6, "right": 10, "border_type": 0,
              "scalar_value": {"val": [9.0, 8.0, 7.0, 0.0]}}  # fmt: skip
    vpc.vpc("copy_make_border", source, target, around)
    expected = np.tile(np.array([9, 8, 7], np.uint8), (24, 48, 1))
    expected[4:, 6:38] = pixels
    np.testing.assert_array_equal(vpc.content(target).reshape(24, 48, 3), expected)
    part = region(other, 0, 0, 32, 20) | resizing(32, 20) | {
        "dest_left_offset": 6, "dest_top_offset": 4, "border_type": 1,
    }  # fmt: skip
    vpc.vpc("crop_resize_make_border", source, [part], 1)
    edge = np.pad(pixels, ((4, 0), (6, 10), (0, 0)), mode="edge")
    np.testing.assert_array_equal(vpc.content(other).reshape(24, 48, 3), edge)


def test_batches(vpc: Himpi) -> None:
    """Two pictures, one and two parts."""
    contents = [noise(60, 64), noise(61, 64)[1:]]
    sources = [vpc.picture(content.tobytes(), 64, 40) for content in contents]
    targets = [vpc.empty(32, 10) for _ in range(3)]
    parts = [
        region(target, left, 4, 32, 10) | resizing(32, 10)
        for target, left in zip(targets, (0, 8, 32), strict=True)
    ]
    for call in ("batch_crop_resize_paste", "batch_crop_resize_make_border"):
        vpc.vpc(call, sources, 2, parts, [1, 2])
        for target, content, left in zip(
            targets, (contents[0], contents[1], contents[1]), (0, 8, 32), strict=True
        ):
            np.testing.assert_array_equal(vpc.luma(target), content[4:14, left : left + 32])


def test_colours(vpc: Himpi) -> None:
    """RGB to NV12 as Pillow does, and back."""
    pixels = photo(64, 40)
    source, target = vpc.picture(pixels.tobytes(), 64, 40, RGB), vpc.empty(64, 40)
    vpc.vpc("convert_color_to_yuv420", source, target)
    expected = np.asarray(Image.fromarray(pixels).convert("YCbCr"))[..., 0]
    assert np.abs(vpc.luma(target).astype(int) - expected).max() <= 1
    back = vpc.empty(64, 40, BGR)
    vpc.vpc("convert_color", target, back)
    seen = vpc.content(back).reshape(40, 64, 3)[..., ::-1]
    assert np.abs(seen.astype(int) - pixels).mean() < 6  # chroma of four pixels is one


def test_pyramid(vpc: Himpi) -> None:
    """Two levels of a flat picture are flat; of noise they are smoother."""
    pixels = noise(80, 128)
    source = vpc.picture(pixels.tobytes(), 128, 80, GREY)
    targets = [vpc.empty(64, 40, GREY), vpc.empty(32, 20, GREY)]
    vpc.vpc("pyrdown", source, targets, 2, None, 0, {})
    deviations = [float(pixels.std()), *(float(vpc.luma(target).std()) for target in targets)]
    assert deviations == sorted(deviations, reverse=True)
    assert abs(float(vpc.luma(targets[1]).mean()) - float(pixels.mean())) < 3


def test_tasks_take_time_and_are_told_once(vpc: Himpi) -> None:
    """Not done, done, gone."""
    source, target = vpc.empty(64, 40), vpc.empty(32, 20)
    task, ret = vpc.himpi.vpc_resize(0, source, target, 0, 0, 0, 0)
    assert ret == 0
    assert vpc.himpi.vpc_get_process_result(0, task, 0) == VPC + TIMEOUT
    assert vpc.himpi.vpc_get_process_result(0, task, 1000) == 0
    assert vpc.himpi.vpc_get_process_result(0, task, 1000) == VPC + ILLEGAL_PARAM


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"picture_format": 999}, ILLEGAL_PARAM),
        ({"picture_width": 63}, ILLEGAL_PARAM),
        ({"picture_width": 8}, ILLEGAL_PARAM),
        ({"picture_width_stride": 60}, ILLEGAL_PARAM),
        ({"picture_height_stride": 39}, ILLEGAL_PARAM),
        ({"picture_buffer_size": 100}, ILLEGAL_PARAM),
        ({"picture_address": 0}, BAD_ADDR),
        ({"picture_address": 4096}, BAD_ADDR),
    ],
)
def test_pictures_that_are_refused(vpc: Himpi, values: dict[str, int], reason: int) -> None:
    """As inputs and as outputs."""
    good, bad = vpc.empty(64, 40), vpc.empty(64, 40) | values
    vpc.vpc("resize", bad, good, 0, 0, 0, expect=VPC + reason)
    vpc.vpc("resize", good, bad, 0, 0, 0, expect=VPC + reason)


def test_arguments_that_are_refused(vpc: Himpi) -> None:
    """Interpolation, factors, parts, sizes, counts."""
    source, target = vpc.empty(64, 40), vpc.empty(32, 20)
    illegal = VPC + ILLEGAL_PARAM
    vpc.vpc("resize", source, target, 0, 0, 5, expect=illegal)
    vpc.vpc("resize", source, target, 0.9, 0, 0, expect=illegal)
    for left, top, width, height in (
        (33, 0, 32, 20), (0, 0, 8, 20), (0, 0, 32, 4), (1, 0, 32, 20), (0, 22, 32, 20),
        (0, 0, 30, 20),
    ):  # fmt: skip
        part = region(target, left, top, width, height)
        vpc.vpc("crop", source, [part], 1, expect=illegal)
    with pytest.raises(TypeError):
        vpc.himpi.vpc_crop(0, source, [region(target, 0, 0, 32, 20)], 2, -1)
    with pytest.raises(TypeError):
        vpc.himpi.vpc_resize(0, [source], target, 0, 0, 0, -1)
    part = region(target, 0, 0, 32, 20) | resizing(34, 20)
    vpc.vpc("crop_resize", source, [part], 1, expect=illegal)
    vpc.vpc("convert_color", source, target, expect=illegal)
    border = {"left": 2, "border_type": 0}
    vpc.vpc("copy_make_border", source, target, border, expect=illegal)
    same = vpc.empty(64, 40)
    vpc.vpc("copy_make_border", source, same, {"border_type": 4}, expect=illegal)
    grey, half = vpc.empty(64, 40, GREY), vpc.empty(32, 20, GREY)
    vpc.vpc("pyrdown", grey, [half], 2, None, 0, {}, expect=illegal)
    kernel = [[1] * 5] * 5
    vpc.vpc("pyrdown", grey, [half], 1, kernel, 25, {}, expect=VPC + NOT_SUPPORT)


def test_numbers_that_are_none(vpc: Himpi, machine: Runtime) -> None:
    """The binding takes a NumPy integer for 0 without a word; the simulator tells."""
    source, target = vpc.empty(64, 40), vpc.empty(32, 20)
    wrong: dict[str, Any] = source | {"picture_width": np.int64(64)}
    vpc.vpc("resize", wrong, target, 0, 0, 0, expect=VPC + ILLEGAL_PARAM)
    assert "acl.himpi.vpc_resize ignores 'picture_width'" in machine.violations[0]


def test_memory_freed_in_flight(vpc: Himpi, machine: Runtime) -> None:
    """The result tells, and the simulator."""
    source, target = vpc.empty(64, 40), vpc.empty(32, 20)
    task, _ = vpc.himpi.vpc_resize(0, source, target, 0, 0, 0, -1)
    assert vpc.himpi.dvpp_free(source["picture_address"]) == 0
    vpc.blocks.remove(source["picture_address"])
    assert vpc.himpi.vpc_get_process_result(0, task, -1) == VPC + SYS_ERROR
    assert "freed while" in machine.violations[0]
