"""Dynamic AIPP: the card does with the images what the model's parameters say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from npuserve.backends.ge import GeBackend
from npuserve.backends.om import OmBackend
from npuserve.errors import InvalidArgumentError, NpuserveError, UnsupportedError
from npuserve.testing.backend_driver import BackendDriver
from npuserve.testing.simulator.faults import Fault
from npuserve.testing.simulator.runtime import Runtime
from tests.backends import onnx_models
from tests.backends.npu_models import (
    AIPP_MAX_BYTES,
    DYNAMIC_AIPP,
    aipp_om,
    compile_om,
    image_onnx,
    make_config,
    parameters,
)
from tests.backends.onnx_models import value

BATCHES = ("--input_shape=x:-1,3,8,6", "--dynamic_batch_size=1,2,4")

# YUV to RGB of the ATC user guide (BT.601, narrow).
CSC = "298,0,409,298,-100,-208,298,516,0"
MATRIX = np.array([int(number) for number in CSC.split(",")]).reshape(3, 3)


def serve(model_dir: Path, text: str = "", **aipp: str) -> BackendDriver:
    named = {f"aipp_{name}": setting for name, setting in aipp.items()}
    return BackendDriver(OmBackend(), make_config(f"{text} {parameters(**named)}"), model_dir)


async def load_error(model_dir: Path, text: str = "", **aipp: str) -> NpuserveError:
    with pytest.raises(NpuserveError) as caught:
        await serve(model_dir, text, **aipp).__aenter__()
    return caught.value


async def run(driver: BackendDriver, *images: NDArray[np.uint8]) -> list[NDArray[Any]]:
    answers = await driver.infer(*({"x": image} for image in images))
    return [answer.array("y") for answer in answers]


def random_images(count: int, dims: list[int], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, *dims), np.uint8)


# The same settings for both kinds: parameters for dynamic AIPP, the file of atc for static.
SETTINGS: dict[str, tuple[dict[str, str], str, int]] = {
    "plain": ({"input_format": "RGB888_U8", "src_image_size": "6,8"},
              "input_format: RGB888_U8", 3),
    "normalised": (
        {"input_format": "RGB888_U8", "src_image_size": "6,8", "mean": "104,117,123",
         "min": "1,0.5,0", "var_reci": "0.017,0.018,0.019", "rbuv_swap": "true"},
        "input_format: RGB888_U8 mean_chn_0: 104 mean_chn_1: 117 mean_chn_2: 123 min_chn_0: 1 "
        "min_chn_1: 0.5 var_reci_chn_0: 0.017 var_reci_chn_1: 0.018 var_reci_chn_2: 0.019 "
        "rbuv_swap_switch: true", 3,
    ),
    "cropped": (
        {"input_format": "RGB888_U8", "src_image_size": "12,10", "crop": "3,1,4,5",
         "padding": "1,2,0,2", "mean": "7"},
        "input_format: RGB888_U8 src_image_size_w: 12 src_image_size_h: 10 crop: true "
        "load_start_pos_w: 3 load_start_pos_h: 1 crop_size_w: 4 crop_size_h: 5 padding: true "
        "top_padding_size: 1 bottom_padding_size: 2 left_padding_size: 0 right_padding_size: 2 "
        "mean_chn_0: 7", 3,
    ),
    "camera": (
        {"input_format": "YUV420SP_U8", "src_image_size": "8,10", "crop": "2,2,6,8",
         "csc_matrix": CSC, "csc_input_bias": "16,128,128", "rbuv_swap": "true"},
        "input_format: YUV420SP_U8 src_image_size_w: 8 src_image_size_h: 10 crop: true "
        "load_start_pos_w: 2 load_start_pos_h: 2 crop_size_w: 6 crop_size_h: 8 csc_switch: true "
        "matrix_r0c0: 298 matrix_r0c1: 0 matrix_r0c2: 409 matrix_r1c0: 298 matrix_r1c1: -100 "
        "matrix_r1c2: -208 matrix_r2c0: 298 matrix_r2c1: 516 matrix_r2c2: 0 input_bias_0: 16 "
        "input_bias_1: 128 input_bias_2: 128 rbuv_swap_switch: true", 3,
    ),
    "defaults": (
        {"input_format": "YUV420SP_U8", "src_image_size": "6,8",
         "csc_matrix": "298,516,0,298,-100,-208,298,0,409"},
        "input_format: YUV420SP_U8 csc_switch: true", 3,
    ),
    "luma": (
        {"input_format": "RGB888_U8", "src_image_size": "6,8",
         "csc_matrix": "66,129,25,-38,-74,112,112,-94,-18"},
        "input_format: RGB888_U8 csc_switch: true", 3,
    ),
    "four": ({"input_format": "XRGB8888_U8", "src_image_size": "6,8", "ax_swap": "true"},
             "input_format: XRGB8888_U8 ax_swap_switch: true", 3),
    "grey": ({"input_format": "YUV400_U8", "src_image_size": "6,8", "var_reci": "0.5"},
             "input_format: YUV400_U8 var_reci_chn_0: 0.5", 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(SETTINGS))
async def test_dynamic_aipp_does_what_static_aipp_does(
    tmp_path: Path, machine: Runtime, kind: str
) -> None:
    """The same images, settings and batches give the same tensors."""
    settings, static, channels = SETTINGS[kind]
    aipp_om(tmp_path / "dynamic", channels=channels)
    aipp_om(tmp_path / "static", f"aipp_op {{ aipp_mode: static {static} }}", channels=channels)
    async with (
        serve(tmp_path / "dynamic", **settings) as dynamic,
        serve(tmp_path / "static") as compiled,
    ):
        dims = [list(driver.context.config.input[0].dims) for driver in (dynamic, compiled)]
        assert dims[0] == dims[1]
        assert dynamic.context.config.max_batch_size == 4
        batches = [random_images(count, dims[0], count) for count in (1, 3)]
        expected = await run(compiled, *batches)
        for result, wanted in zip(await run(dynamic, *batches), expected, strict=True):
            assert result.shape[1:] == (channels, 8, 6)
            np.testing.assert_array_equal(result, wanted)
        assert expected[0].any()


async def test_the_steps_of_the_card(tmp_path: Path, machine: Runtime) -> None:
    """Crop, colour space conversion, mean and variance, padding, worked out by hand."""
    aipp_om(tmp_path, channels=3)
    async with serve(
        tmp_path, input_format="RGB888_U8", src_image_size="5,9", crop="1,2,4,6",
        padding="2,0,1,1", csc_matrix="77,150,29,-43,-85,128,128,-107,-21",
        csc_output_bias="0,128,128", mean="16,0,0", var_reci="0.5,1,2",
    ) as driver:  # fmt: skip
        image = random_images(1, [9, 5, 3])
        (result,) = await run(driver, image)
    matrix = np.array([[77, 150, 29], [-43, -85, 128], [128, -107, -21]])
    cut = image[0, 2:8, 1:5].astype(int)
    converted = np.clip((cut @ matrix.T >> 8) + [0, 128, 128], 0, 255)
    normal = (converted - [16, 0, 0]) * [0.5, 1, 2]
    padded = np.zeros((8, 6, 3))
    padded[2:, 1:5] = normal
    np.testing.assert_array_equal(result[0], padded.transpose(2, 0, 1))


async def test_a_camera_image_becomes_rgb(tmp_path: Path, machine: Runtime) -> None:
    """NV12: each pair of U and V is for four pixels."""
    aipp_om(tmp_path)
    async with serve(
        tmp_path, input_format="YUV420SP_U8", src_image_size="6,8", csc_matrix=CSC,
        csc_input_bias="16,128,128",
    ) as driver:  # fmt: skip
        image = random_images(1, [12, 6, 1])
        (result,) = await run(driver, image)
    yuv = np.zeros((8, 6, 3), int)
    yuv[..., 0] = image[0, :8, :, 0]
    for row in range(8):
        for column in range(6):
            yuv[row, column, 1:] = image[0, 8 + row // 2, column // 2 * 2 :, 0][:2]
    rgb = np.clip((yuv - [16, 128, 128]) @ MATRIX.T >> 8, 0, 255)
    np.testing.assert_array_equal(result[0], rgb.transpose(2, 0, 1))


async def test_a_static_model_with_dynamic_aipp(tmp_path: Path, machine: Runtime) -> None:
    """One shape: the file says -1 for the image, which makes it no dynamic shape."""
    aipp_om(tmp_path, DYNAMIC_AIPP, "--input_shape=x:2,3,8,6")
    text = "max_batch_size: 8"
    async with serve(tmp_path, text, input_format="RGB888_U8", src_image_size="6,8") as driver:
        image = random_images(3, [8, 6, 3])
        (result,) = await run(driver, image)
        np.testing.assert_array_equal(result, image.transpose(0, 3, 1, 2))


async def test_settings_of_one_of_two_images(tmp_path: Path, machine: Runtime) -> None:
    """`aipp_mean.b` is for input b alone; a third input has no AIPP."""
    shape: list[int | str | None] = ["n", 3, 8, 6]
    onnx_models.save(
        tmp_path,
        [helper.make_node("Sub", ["a", "b"], ["d"]), helper.make_node("Mul", ["d", "s"], ["y"])],
        [value("a", TensorProto.FLOAT, shape), value("b", TensorProto.FLOAT, shape),
         value("s", TensorProto.FLOAT, ["n", 1, 1, 1])],
        [value("y", TensorProto.FLOAT, shape)],
    )  # fmt: skip
    path = tmp_path / "aipp.cfg"
    path.write_text(
        DYNAMIC_AIPP + f"\naipp_op {{ aipp_mode: dynamic related_input_rank: 1 "
        f"max_src_image_size: {AIPP_MAX_BYTES} }}"
    )
    compile_om(
        tmp_path, "--input_shape=a:-1,3,8,6;b:-1,3,8,6;s:-1,1,1,1", "--dynamic_batch_size=1,2",
        f"--insert_op_conf={path}",
    )  # fmt: skip
    named = parameters(
        aipp_input_format="RGB888_U8", aipp_src_image_size="6,8", aipp_mean="10,0,0",
        **{"aipp_mean.b": "0,0,20"},
    )  # fmt: skip
    async with BackendDriver(OmBackend(), make_config(named), tmp_path) as driver:
        a, b = random_images(1, [8, 6, 3]), random_images(1, [8, 6, 3], 1)
        scale = np.full((1, 1, 1, 1), 3, np.float32)
        (answer,) = await driver.infer({"a": a, "b": b, "s": scale})
        difference = (a.astype(int) - [10, 0, 0]) - (b.astype(int) - [0, 0, 20])
        np.testing.assert_array_equal(answer.array("y"), 3 * difference.transpose(0, 3, 1, 2))


GOOD: dict[str, str | None] = {"input_format": "RGB888_U8", "src_image_size": "6,8"}


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"input_format": None}, ["'aipp_input_format' is missing", "input 'x'"]),
        ({"src_image_size": None}, ["'aipp_src_image_size' is missing"]),
        ({"input_format": "BGR"}, ["'aipp_input_format' is 'BGR'", "RGB888_U8"]),
        ({"src_image_size": "8"}, ["'aipp_src_image_size' is '8'", "width,height"]),
        ({"src_image_size": "1,8"}, ["'aipp_src_image_size'", "at least 2"]),
        ({"src_image_size": "9,7", "input_format": "YUV420SP_U8"}, ["even for YUV420SP_U8"]),
        ({"src_image_size": "5000,8"}, ["'aipp_src_image_size'", "[1, 4096]"]),
        (
            {"src_image_size": "60,80"},
            ["'aipp_src_image_size'", f"max_src_image_size {AIPP_MAX_BYTES}"],
        ),
        ({"crop": "0,0,7,8"}, ["'aipp_crop' is '0,0,7,8'", "within the image of 6x8"]),
        ({"crop": "0,0,6"}, ["'aipp_crop'", "x,y,width,height"]),
        ({"crop": "0,0,2,2"}, ["aipp_crop 0,0,2,2", "ModelAippOutputW = 6"]),
        ({"padding": "1,1,1,40"}, ["'aipp_padding'", "[0, 32]"]),
        ({"padding": "1,1,1,1"}, ["aipp_padding 1,1,1,1", "100000"]),
        ({"csc_matrix": "1,2,3"}, ["'aipp_csc_matrix'", "nine numbers"]),
        ({"csc_input_bias": "1,2,3"}, ["'aipp_csc_input_bias'", "without aipp_csc_matrix"]),
        ({"csc_matrix": CSC, "csc_input_bias": "1,2,300"}, ["'aipp_csc_input_bias'", "[0, 255]"]),
        ({"csc_matrix": CSC, "input_format": "YUV400_U8"}, ["'aipp_csc_matrix'", "no colours"]),
        ({"rbuv_swap": "1"}, ["'aipp_rbuv_swap' is '1'", "true or false"]),
        ({"mean": "a"}, ["'aipp_mean' is 'a'"]),
        ({"mean": "0.5"}, ["'aipp_mean' is '0.5'", "whole numbers"]),
        ({"mean": "1,2,3,4,5"}, ["'aipp_mean'"]),
        ({"min": "-1"}, ["'aipp_min' is '-1'", "[0, 255]"]),
        ({"var_reci": "1e9"}, ["'aipp_var_reci'", "65504"]),
        ({"means": "1"}, ["'aipp_means' is unknown", "aipp_mean"]),
        ({"mean.x": "256"}, ["'aipp_mean.x' is '256'"]),
    ],
)
async def test_wrong_settings_are_named(
    tmp_path: Path, machine: Runtime, settings: dict[str, str | None], texts: list[str]
) -> None:
    """Each mistake is an error of the load that names the parameter; nothing stays loaded."""
    aipp_om(tmp_path)
    given = {name: text for name, text in (GOOD | settings).items() if text is not None}
    error = await load_error(tmp_path, **given)
    assert all(text in str(error) for text in texts), error
    assert machine.leaks() == []


async def test_settings_need_dynamic_aipp(tmp_path: Path, machine: Runtime) -> None:
    """A model without it, or with static AIPP, refuses them; so does ais_bench."""
    image_onnx(tmp_path / "none")
    compile_om(tmp_path / "none", *BATCHES)
    static = "aipp_op { aipp_mode: static input_format: RGB888_U8 }"
    for model_dir in (tmp_path / "none", aipp_om(tmp_path / "static", static)):
        error = await load_error(model_dir, mean="1")
        assert isinstance(error, InvalidArgumentError)
        assert "'aipp_mean' is set, but the model has no dynamic AIPP" in str(error)
    aipp_om(tmp_path / "dynamic")
    complete = (
        "max_batch_size: 4 input { name: 'x' data_type: TYPE_UINT8 dims: [8, 6, 3] } "
        "output { name: 'y' data_type: TYPE_FP32 dims: [3, 8, 6] } "
    )
    error = await load_error(
        tmp_path / "dynamic", complete + parameters(engine="ais_bench"), mean="1"
    )
    assert "ais_bench sets no dynamic AIPP" in str(error)


async def test_image_size_gears_with_dynamic_aipp_are_refused(
    tmp_path: Path, machine: Runtime
) -> None:
    """Only the largest could run."""
    image_onnx(tmp_path)
    shape: list[int | str | None] = [1, 3, "h", "w"]
    onnx_models.save(
        tmp_path, [helper.make_node("Identity", ["x"], ["y"])],
        [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, shape)],
    )  # fmt: skip
    path = tmp_path / "aipp.cfg"
    path.write_text(DYNAMIC_AIPP)
    compile_om(
        tmp_path, "--input_shape=x:1,3,-1,-1", "--dynamic_image_size=8,6;10,12",
        f"--insert_op_conf={path}",
    )  # fmt: skip
    error = await load_error(tmp_path, input_format="RGB888_U8", src_image_size="6,8")
    assert isinstance(error, UnsupportedError)
    assert "dynamic image size" in str(error)


async def test_each_call_of_dynamic_aipp_may_fail(tmp_path: Path, machine: Runtime) -> None:
    """The load fails with the call's name, nothing leaks, and the next load works."""
    aipp_om(tmp_path)
    settings, _, _ = SETTINGS["camera"]
    settings = settings | {"padding": "0,0,0,0"}
    async with serve(tmp_path, **settings):
        names = {name for name in machine.calls if "aipp" in name}
    assert len(names) == 14
    for name in sorted(names):
        machine.faults[:] = [Fault(name)]
        if name == "acl.mdl.destroy_aipp":  # what gives something back is tried again
            await check_load(tmp_path, settings)
        else:
            assert f"{name} failed" in str(await load_error(tmp_path, **settings))
        assert machine.faults.pop().count == 0
        assert machine.leaks() == []
    await check_load(tmp_path, settings)


async def check_load(model_dir: Path, settings: dict[str, str]) -> None:
    async with serve(model_dir, **settings) as driver:
        (result,) = await run(driver, random_images(1, [15, 8, 1]))
        assert result.shape == (1, 3, 8, 6)


# ge.


def ge_config(**extra: str) -> str:
    return (
        'backend: "ge" max_batch_size: 4 '
        'input { name: "x" data_type: TYPE_UINT8 dims: [8, 6, 3] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [3, 8, 6] } ' + parameters(**extra)
    )


async def test_ge_compiles_dynamic_aipp(tmp_path: Path, machine: Runtime) -> None:
    """The configuration file of atc lies beside the model; another content compiles anew."""
    model_dir = image_onnx(tmp_path / "model")
    aipp = model_dir / "1" / "aipp.cfg"
    aipp.write_text(DYNAMIC_AIPP)
    aipp_settings = {
        "aipp_input_format": "RGB888_U8", "aipp_src_image_size": "6,8", "aipp_mean": "9,0,0",
    }  # fmt: skip
    named = {"atc.insert_op_conf": "aipp.cfg", "cache_dir": str(tmp_path / "cache")}
    image = random_images(3, [8, 6, 3])
    async with BackendDriver(
        GeBackend(), onnx_models.config(ge_config(**named, **aipp_settings)), model_dir
    ) as driver:
        (result,) = await run(driver, image)
        expected = (image.astype(int) - [9, 0, 0]).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(result, expected)
    aipp.write_text("aipp_op { aipp_mode: static input_format: RGB888_U8 mean_chn_0: 5 }")
    async with BackendDriver(
        GeBackend(), onnx_models.config(ge_config(**named)), model_dir
    ) as driver:
        (result,) = await run(driver, image)
        expected = (image.astype(int) - [5, 0, 0]).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(result, expected)


async def test_ge_does_not_guess_what_clients_send(tmp_path: Path, machine: Runtime) -> None:
    """With AIPP the ONNX file does not tell; the configuration has to."""
    model_dir = image_onnx(tmp_path / "model")
    text = 'backend: "ge" ' + parameters(**{"atc.insert_op_conf": "aipp.cfg"})
    with pytest.raises(InvalidArgumentError, match="write all of input and output"):
        await BackendDriver(GeBackend(), onnx_models.config(text), model_dir).__aenter__()
