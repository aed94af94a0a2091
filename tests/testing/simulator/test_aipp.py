"""Dynamic AIPP in the simulator: what the runtime refuses, and with which code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npuserve.testing.simulator import aipp
from npuserve.testing.simulator.aipp import AippParams, ImageParams
from npuserve.testing.simulator.runtime import Runtime
from tests.backends.npu_models import AIPP_MAX_BYTES, aipp_om
from tests.testing.simulator.conftest import Loaded

RGB, GREY, YUV = 3, 4, 1
NOTHING = 0xFFFFFFFF


@pytest.fixture
def model(acl: Any, tmp_path: Path) -> Loaded:
    """FP32 images of 3x8x6 behind dynamic AIPP, gears 1, 2, 4."""
    return Loaded(acl, str(aipp_om(tmp_path) / "1" / "model.om"))


def settings(acl: Any, batch: int = 4, fmt: int = RGB, size: tuple[int, int] = (6, 8)) -> int:
    """A handle with what must be set."""
    handle = acl.mdl.create_aipp(batch)
    assert acl.mdl.set_aipp_input_format(handle, fmt) == 0
    assert acl.mdl.set_aipp_src_image_size(handle, *size) == 0
    return int(handle)


def test_the_extra_inputs_are_described(acl: Any, model: Loaded) -> None:
    """Data, settings, gear; the image's size is open and its bytes are the largest allowed."""
    mdl, desc = acl.mdl, model.desc
    names = [mdl.get_input_name_by_index(desc, i) for i in range(mdl.get_num_inputs(desc))]
    assert names == ["x", "ascend_dynamic_aipp_data", "ascend_mbatch_shape_data"]
    assert mdl.get_input_dims(desc, 0)[0]["dims"] == [-1, -1, -1, -1]
    assert mdl.get_input_dims_v2(desc, 0)[0]["dims"] == [-1, -1, -1, -1]
    assert mdl.get_input_size_by_index(desc, 0) == AIPP_MAX_BYTES
    size, ret = mdl.get_aipp_data_size(4)
    assert (size, ret) == (64 + 4 * 96, 0)
    assert mdl.get_input_size_by_index(desc, 1) == size
    assert [mdl.get_input_data_type(desc, i) for i in range(3)] == [4, 4, 9]
    assert mdl.get_input_index_by_name(desc, "ascend_dynamic_aipp_data") == (1, 0)
    assert mdl.get_aipp_type(model.id, 0) == (2, 1, 0)
    assert mdl.get_aipp_type(model.id, 1) == (3, NOTHING, 0)
    assert mdl.get_aipp_type(model.id, 2) == (0, NOTHING, 0)
    assert mdl.get_aipp_type(model.id, 3) == (0, NOTHING, 100000)
    assert mdl.get_first_aipp_info(model.id, 0) == (None, 100038)


def test_settings_must_fit_the_model(acl: Any, model: Loaded) -> None:
    """100000 for what is missing, too large, of another batch or another size."""
    mdl = acl.mdl

    def apply(handle: int, index: int = 1) -> int:
        ret: int = mdl.set_input_aipp(model.id, model.inputs, index, handle)
        return ret

    assert apply(mdl.create_aipp(4)) == 100000  # no format
    unsized = mdl.create_aipp(4)
    mdl.set_aipp_input_format(unsized, RGB)
    assert apply(unsized) == 100000
    assert apply(settings(acl, batch=2)) == 100000
    assert "ModelAippBatchSize = 4" in acl.get_recent_err_msg()
    assert apply(settings(acl, size=(6, 9))) == 100000
    assert apply(settings(acl, size=(60, 80))) == 100000
    assert "max_src_image_size" in acl.get_recent_err_msg()
    good = settings(acl)
    assert apply(good, 0) == 100000  # the image itself
    assert apply(good, 2) == 100000  # the gear
    assert apply(good, 9) == 100000
    assert apply(0) == 100000
    assert apply(good) == 0
    assert mdl.set_aipp_by_input_index(model.id, model.inputs, 0, good) == 0
    assert mdl.set_aipp_by_input_index(model.id, model.inputs, 1, good) == 500001
    assert mdl.set_aipp_crop_params(good, 1, 3, 0, 6, 8, 2) == 0
    assert apply(good) == 100000  # leaves the image
    assert mdl.set_aipp_crop_params(good, 1, 0, 0, 5, 8, 2) == 0
    assert apply(good) == 100000  # the third image becomes smaller than the others
    grey = settings(acl, fmt=GREY)
    assert mdl.set_aipp_csc_params(grey, 1, *range(15)) == 0
    assert apply(grey) == 100000
    camera = settings(acl, fmt=YUV, size=(7, 8))
    for image in range(4):
        mdl.set_aipp_crop_params(camera, 1, 1, 0, 6, 8, image)
    assert apply(camera) == 100000  # odd
    acl.update_data_buffer(model.input_buffers[1][1], model.input_buffers[1][0], 100)
    assert apply(settings(acl)) == 145012


@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("input_format", (9,)),
        ("src_image_size", (1, 8)),
        ("src_image_size", (6, 4097)),
        ("csc_params", (2, *range(15))),
        ("csc_params", (1, -32678, *range(14))),
        ("rbuv_swap_switch", (2,)),
        ("ax_swap_switch", (2,)),
        ("crop_params", (1, 0, 0, 0, 8, 0)),
        ("crop_params", (1, 0, 0, 6, 8, 4)),
        ("padding_params", (1, 33, 0, 0, 0, 0)),
        ("dtc_pixel_mean", (256, 0, 0, 0, 0)),
        ("dtc_pixel_min", (-1.0, 0, 0, 0, 0)),
        ("pixel_var_reci", (65505.0, 0, 0, 0, 0)),
    ],
)
def test_values_out_of_range_are_refused(acl: Any, call: str, values: tuple[Any, ...]) -> None:
    """100000, also for an image that the batch does not have."""
    handle = acl.mdl.create_aipp(4)
    assert getattr(acl.mdl, f"set_aipp_{call}")(handle, *values) == 100000
    assert acl.mdl.destroy_aipp(handle) == 0
    assert getattr(acl.mdl, f"set_aipp_{call}")(handle, *values) == 100000


@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("input_format", (3.0,)),
        ("csc_params", (1, 40000, *range(14))),
        ("csc_params", (-1, *range(15))),
        ("dtc_pixel_mean", (1.5, 0, 0, 0, 0)),
        ("pixel_var_reci", ("1", 0, 0, 0, 0)),
        ("rbuv_swap_switch", ()),
    ],
)
def test_arguments_of_other_types_are_type_errors(
    acl: Any, call: str, values: tuple[Any, ...]
) -> None:
    """As the C formats b, h and f take them."""
    handle = acl.mdl.create_aipp(1)
    with pytest.raises(TypeError, match="args parse failed"):
        getattr(acl.mdl, f"set_aipp_{call}")(handle, *values)


def test_settings_are_handles(acl: Any, machine: Runtime) -> None:
    """None for no batch; those not destroyed are leaks; a double destroy is refused."""
    assert acl.mdl.create_aipp(0) == 0
    assert acl.mdl.get_aipp_data_size(0) == (0, 100000)
    handle = acl.mdl.create_aipp(1)
    assert any("AIPP settings" in leak for leak in machine.leaks())
    assert acl.mdl.destroy_aipp(handle) == 0
    assert acl.mdl.destroy_aipp(handle) == 100000


def test_an_execution_without_settings_fails(acl: Any, model: Loaded, machine: Runtime) -> None:
    """507015: what was never set is noise."""
    assert acl.mdl.set_dynamic_batch_size(model.id, model.inputs, 2, 1) == 0
    assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 507015
    assert machine.violations == ["the parameters of dynamic AIPP were never set"]
    machine.violations.clear()


def test_settings_stay_until_they_are_set_again(acl: Any, model: Loaded) -> None:
    """They are in the input's memory; the handle may be destroyed."""
    image = np.arange(6 * 8 * 3, dtype=np.uint8)
    pointer = model.input_buffers[0][0]
    assert acl.rt.memcpy(pointer, image.nbytes, image.ctypes.data, image.nbytes, 1) == 0
    assert acl.mdl.set_dynamic_batch_size(model.id, model.inputs, 2, 1) == 0
    results = []
    for mean in (0, 7):
        handle = settings(acl)
        for index in range(4):
            assert acl.mdl.set_aipp_dtc_pixel_mean(handle, mean, mean, mean, 0, index) == 0
        assert acl.mdl.set_input_aipp(model.id, model.inputs, 1, handle) == 0
        assert acl.mdl.destroy_aipp(handle) == 0
        for _ in range(2):
            assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 0
            host = np.empty(6 * 8 * 3, np.float32)
            device = model.output_buffers[0][0]
            assert acl.rt.memcpy(host.ctypes.data, host.nbytes, device, host.nbytes, 2) == 0
            results.append(host)
    expected = image.reshape(8, 6, 3).transpose(2, 0, 1).reshape(-1).astype(np.float32)
    for result, mean in zip(results, (0, 0, 7, 7), strict=True):
        np.testing.assert_array_equal(result, expected - mean)


def test_too_small_an_image_is_noticed_on_the_card(
    acl: Any, model: Loaded, machine: Runtime
) -> None:
    """The runtime does not compare an image with its settings: 507015 at work."""
    handle = settings(acl)
    assert acl.mdl.set_input_aipp(model.id, model.inputs, 1, handle) == 0
    acl.update_data_buffer(model.input_buffers[0][1], model.input_buffers[0][0], 64)
    assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 507015
    assert "a buffer of 64" in machine.violations[0]
    machine.violations.clear()


def test_static_settings_are_told(acl: Any, tmp_path: Path) -> None:
    """All of them, under the binding's names."""
    text = (
        "aipp_op { aipp_mode: static input_format: RGB888_U8 src_image_size_w: 12 "
        "src_image_size_h: 10 crop: true load_start_pos_w: 1 crop_size_w: 6 crop_size_h: 8 "
        "mean_chn_1: 3 var_reci_chn_2: 0.5 csc_switch: true matrix_r0c0: 256 output_bias_1: 9 }"
    )
    model = Loaded(acl, str(aipp_om(tmp_path, text) / "1" / "model.om"))
    info, ret = acl.mdl.get_first_aipp_info(model.id, 0)
    assert ret == 0
    expected = {
        "inputFormat": 3, "srcImageSizeW": 12, "srcImageSizeH": 10, "cropSwitch": 1,
        "loadStartPosW": 1, "cropSizeW": 6, "cropSizeH": 8, "meanChn1": 3, "varReciChn2": 0.5,
        "cscSwitch": 1, "matrixR0C0": 256, "outputBias1": 9, "paddingSwitch": 0,
    }  # fmt: skip
    assert {name: info[name] for name in expected} == expected
    assert acl.mdl.get_aipp_type(model.id, 0) == (1, NOTHING, 0)
    dims = acl.mdl.get_input_dims(model.desc, 0)[0]["dims"]
    assert dims == [-1, 10, 12, 3]


def test_settings_survive_their_wire_form() -> None:
    """Everything comes back from the structure that the runtime hands to the card."""
    params = AippParams(
        "YUV420SP_U8", 640, 480, tuple(range(-4, 5)), (1, 2, 3), (16, 128, 128), True, True,
        [ImageParams((2, 4, 6, 8), (1, 2, 3, 4), (1, 2, 3, 4), (0.5, 1, 2, 3), (0.25, 1, 2, -4)),
         ImageParams()],
    )  # fmt: skip
    content = params.encode()
    assert len(content) == aipp.encoded_bytes(2)
    assert aipp.decode(content) == params
    with pytest.raises(ValueError, match="never set"):
        aipp.decode(content[:-1])
