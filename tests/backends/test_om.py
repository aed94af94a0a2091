"""The om backend on the simulator: every shape kind, both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from npuserve.backends.acl.library import AclLibrary
from npuserve.backends.base import Backend
from npuserve.backends.ge import GeBackend
from npuserve.backends.om import OmBackend, parse_cores
from npuserve.errors import (
    InvalidArgumentError,
    NotFoundError,
    NpuserveError,
    UnavailableError,
    UnsupportedError,
)
from npuserve.testing.backend_driver import BackendDriver
from npuserve.testing.check_backend import check_backend
from npuserve.testing.simulator.device import Stream
from npuserve.testing.simulator.runtime import Runtime
from tests.backends import onnx_models
from tests.backends.npu_models import (
    affine,
    batch_om,
    compile_om,
    make_config,
    parameters,
)
from tests.backends.onnx_models import value


def serve(model_dir: Path, text: str = "", **options: Any) -> BackendDriver:
    return BackendDriver(OmBackend(), make_config(text), model_dir, **options)


async def load_error(model_dir: Path, text: str = "", **options: Any) -> NpuserveError:
    with pytest.raises(NpuserveError) as caught:
        await serve(model_dir, text, **options).__aenter__()
    return caught.value


def rows(count: int, width: int = 3, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, width), np.float32)


async def run(driver: BackendDriver, *arrays: NDArray[Any], name: str = "y") -> list[NDArray[Any]]:
    answers = await driver.infer(*({"x": array} for array in arrays))
    return [answer.array(name) for answer in answers]


async def check_affine(driver: BackendDriver, *arrays: NDArray[Any]) -> None:
    for array, result in zip(arrays, await run(driver, *arrays), strict=True):
        np.testing.assert_allclose(result, 2 * array + 1, rtol=1e-6)


@pytest.mark.parametrize("engine", ["acl", "ais_bench"])
async def test_keeps_the_rules_of_a_backend(tmp_path: Path, machine: Runtime, engine: str) -> None:
    """The conformance kit finds nothing, with either engine."""

    def make_inputs(seed: int) -> dict[str, NDArray[Any]]:
        return {"x": rows(1, seed=seed)}

    batch_om(tmp_path)
    text = "max_batch_size: 4 " + parameters(engine=engine, gears="1,2,4")
    await check_backend(OmBackend(), make_config(text), tmp_path, make_inputs)


# Batch gears.


async def test_batch_gears_complete_the_configuration(tmp_path: Path, machine: Runtime) -> None:
    """max_batch_size is the largest gear; names, types and dims come from the file."""
    async with serve(batch_om(tmp_path, "1,4,16")) as driver:
        config = driver.context.config
        assert config.max_batch_size == 16
        assert [(t.name, list(t.dims)) for t in config.input] == [("x", [3])]
        assert [(t.name, list(t.dims)) for t in config.output] == [("y", [3])]
        assert list(config.dynamic_batching.preferred_batch_size) == [16]


async def test_a_configuration_is_completed_on_a_card_of_its_instances(
    tmp_path: Path, machine: Runtime
) -> None:
    """Card 0 may be full, or somebody else's."""
    machine.cards[0].memory.total = 1
    text = "instance_group { kind: KIND_GPU gpus: 1 }"
    driver = serve(batch_om(tmp_path), text)
    driver.context.placements = ()  # known when the configuration is complete
    OmBackend().auto_complete(driver.context)
    assert driver.context.config.max_batch_size == 4


async def test_a_batch_runs_with_the_nearest_gear(tmp_path: Path, machine: Runtime) -> None:
    """Three rows run with the gear of four, and three rows come back."""
    async with serve(batch_om(tmp_path)) as driver:
        await check_affine(driver, rows(1), rows(2, seed=1))
        uploads = [span.name for span in machine.spans() if span.engine == "copy to device"]
        assert uploads == [f"{4 * 3 * 4} bytes"]


async def test_a_batch_beyond_the_largest_gear_is_split(tmp_path: Path, machine: Runtime) -> None:
    """Nine rows of two requests go in three executions and come back to their requests."""
    async with serve(batch_om(tmp_path), "max_batch_size: 16") as driver:
        await check_affine(driver, rows(5), rows(4, seed=1))
        assert machine.calls["acl.mdl.execute_async"] == 3


@pytest.mark.parametrize("kind", ["gears", "dynamic"])
async def test_any_mix_of_requests_comes_back_to_its_owners(
    tmp_path: Path, machine: Runtime, kind: str
) -> None:
    """Random numbers of requests, rows and (dynamic shapes) lengths in one batch."""
    if kind == "gears":
        batch_om(tmp_path)
    else:
        compile_om(affine(tmp_path, ["n", "l"]))
    random = np.random.default_rng(7)
    async with serve(tmp_path, "max_batch_size: 64") as driver:
        for _ in range(30):
            widths = [3 if kind == "gears" else int(random.integers(1, 4)) for _ in range(6)]
            counts = random.integers(1, 8, size=int(random.integers(1, 6)))
            arrays = [
                random.standard_normal((int(n), width), np.float32)
                for n, width in zip(counts, widths, strict=False)
            ]
            await check_affine(driver, *arrays)


async def test_a_request_may_ask_for_some_outputs(tmp_path: Path, machine: Runtime) -> None:
    """Only those are copied and returned."""
    onnx_models.sum_and_difference(tmp_path, ("n", 4))
    compile_om(tmp_path, "--input_shape=INPUT0:-1,4;INPUT1:-1,4", "--dynamic_batch_size=1,4")
    async with serve(tmp_path) as driver:
        one, two = rows(2, 4), rows(2, 4, seed=1)
        (answer,) = await driver.infer({"INPUT0": one, "INPUT1": two}, outputs=["OUTPUT1"])
        assert [tensor.name for tensor in answer.responses[0].outputs] == ["OUTPUT1"]
        np.testing.assert_array_equal(answer.array("OUTPUT1"), one - two)
        (answer,) = await driver.infer({"INPUT0": one})
        assert "input 'INPUT1' is missing" in str(answer.error)


async def test_static_batch_is_padded_and_split(tmp_path: Path, machine: Runtime) -> None:
    """A model compiled for four rows serves one row and six rows."""
    compile_om(affine(tmp_path, ["n", 3]), "--input_shape=x:4,3")
    async with serve(tmp_path, "max_batch_size: 8") as driver:
        assert driver.context.config.max_batch_size == 8
        await check_affine(driver, rows(1))
        await check_affine(driver, rows(6))
        assert machine.calls["acl.mdl.execute_async"] == 3


async def test_static_model_without_batching_keeps_its_shape(
    tmp_path: Path, machine: Runtime
) -> None:
    """Without max_batch_size the whole shape is configured, and no other one is taken."""
    compile_om(affine(tmp_path, [4, 3]))
    async with serve(tmp_path) as driver:
        assert driver.context.config.max_batch_size == 0
        assert list(driver.context.config.input[0].dims) == [4, 3]
        await check_affine(driver, rows(4))
        (answer,) = await driver.infer({"x": rows(3)})
        assert isinstance(answer.error, InvalidArgumentError)
        assert "[4, 3]" in str(answer.error)


# Image size gears and dims gears.


def image_om(model_dir: Path, flags: tuple[str, ...]) -> Path:
    """Max-pooling by 2: the output is half as high and wide."""
    pool = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 2])
    onnx_models.save(
        model_dir, [pool],
        [value("x", TensorProto.FLOAT, ["n", 1, "h", "w"])],
        [value("y", TensorProto.FLOAT, ["n", 1, "h2", "w2"])],
    )  # fmt: skip
    return compile_om(model_dir, *flags)


IMAGE_FLAGS = {
    "hw": ("--input_shape=x:1,1,-1,-1", "--dynamic_image_size=8,8;16,12"),
    "dims": ("--input_shape=x:1,1,-1,-1", "--dynamic_dims=8,8;16,12", "--input_format=ND"),
}


@pytest.mark.parametrize("kind", sorted(IMAGE_FLAGS))
async def test_an_image_is_padded_to_the_nearest_gear_and_cut_back(
    tmp_path: Path, machine: Runtime, kind: str
) -> None:
    """The output of a 6x8 image run with the gear 8x8 is 3x4."""
    async with serve(image_om(tmp_path, IMAGE_FLAGS[kind])) as driver:
        assert list(driver.context.config.output[0].dims) == [1, 1, -1, -1]
        for height, width in ((8, 8), (6, 8), (16, 12), (10, 4)):
            image = np.random.default_rng(1).random((1, 1, height, width), np.float32)
            (result,) = await run(driver, image)
            expected = image.reshape(1, 1, height // 2, 2, width // 2, 2).max((3, 5))
            np.testing.assert_array_equal(result, expected)


async def test_an_image_larger_than_all_gears_is_refused(tmp_path: Path, machine: Runtime) -> None:
    """The error names the shapes there are."""
    async with serve(image_om(tmp_path, IMAGE_FLAGS["hw"])) as driver:
        (answer,) = await driver.infer({"x": np.zeros((1, 1, 20, 8), np.float32)})
        assert isinstance(answer.error, InvalidArgumentError)
        assert "[1, 1, 16, 12]" in str(answer.error)


async def test_an_output_that_cannot_be_cut_back_needs_an_exact_gear(
    tmp_path: Path, machine: Runtime
) -> None:
    """H * w values in one axis: a padded image is refused, an exact one is served."""
    flatten = helper.make_node("Flatten", ["x"], ["y"], axis=1)
    onnx_models.save(
        tmp_path, [flatten],
        [value("x", TensorProto.FLOAT, [1, 1, "h", "w"])],
        [value("y", TensorProto.FLOAT, [1, "n"])],
    )  # fmt: skip
    compile_om(tmp_path, "--input_shape=x:1,1,-1,-1", "--dynamic_image_size=2,4;4,8")
    async with serve(tmp_path) as driver:
        (exact,) = await run(driver, np.ones((1, 1, 2, 4), np.float32))
        assert exact.shape == (1, 8)
        (answer,) = await driver.infer({"x": np.ones((1, 1, 1, 4), np.float32)})
        assert "cannot be cut back" in str(answer.error)


async def test_dims_gears_of_two_inputs(tmp_path: Path, machine: Runtime) -> None:
    """One gear sets the length of both inputs; batches and lengths are padded together."""
    onnx_models.save(
        tmp_path, [helper.make_node("Add", ["x", "z"], ["y"])],
        [value("x", TensorProto.FLOAT, ["n", "l"]), value("z", TensorProto.FLOAT, ["n", "l"])],
        [value("y", TensorProto.FLOAT, ["n", "l"])],
    )  # fmt: skip
    compile_om(
        tmp_path, "--input_format=ND", "--input_shape=x:-1,-1;z:-1,-1",
        "--dynamic_dims=1,4,1,4;2,8,2,8",
    )  # fmt: skip
    async with serve(tmp_path, "max_batch_size: 2") as driver:
        x, z = rows(2, 5), rows(2, 5, seed=1)
        (answer,) = await driver.infer({"x": x, "z": z})
        np.testing.assert_array_equal(answer.array("y"), x + z)


# Dynamic shapes.


async def test_dynamic_shape_takes_any_shape(tmp_path: Path, machine: Runtime) -> None:
    """Input buffers grow with the request, outputs are as large as they are."""
    compile_om(affine(tmp_path, ["n", "l"]))
    async with serve(tmp_path) as driver:
        assert driver.context.config.max_batch_size == 4
        await check_affine(driver, rows(2, 3), rows(1, 3))
        await check_affine(driver, rows(3, 700))
        await check_affine(driver, rows(1, 1))


async def test_an_output_with_more_rows_than_elements_is_an_error(
    tmp_path: Path, machine: Runtime
) -> None:
    """Each request would be given rows of others. One after the other they can be served."""
    onnx_models.save(
        tmp_path, [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)],
        [value("x", TensorProto.FLOAT, ["n", 3])], [value("y", TensorProto.FLOAT, ["m", 3])],
    )  # fmt: skip
    compile_om(tmp_path)
    async with serve(tmp_path, "max_batch_size: 4") as driver:
        answers = await driver.infer({"x": rows(1)}, {"x": rows(2)})
        assert [str(answer.error) for answer in answers] == [
            "output 'y' of shape [6, 3] has not one row for each of the 3 batch elements; use "
            "max_batch_size: 0 for this model"
        ] * 2


async def test_dynamic_output_may_be_empty(tmp_path: Path, machine: Runtime) -> None:
    """NonZero of zeros: a shape with a 0, and no bytes."""
    onnx_models.save(
        tmp_path, [helper.make_node("NonZero", ["x"], ["y"])],
        [value("x", TensorProto.FLOAT, ["n"])], [value("y", TensorProto.INT64, [1, "k"])],
    )  # fmt: skip
    compile_om(tmp_path)
    async with serve(tmp_path, "input { name: 'x' dims: -1 data_type: TYPE_FP32 }") as driver:
        empty, full = await run(driver, np.zeros(5, np.float32), np.ones(3, np.float32))
        assert empty.shape == (1, 0)
        np.testing.assert_array_equal(full, [[0, 1, 2]])


async def test_shape_outside_of_the_range_is_refused(tmp_path: Path, machine: Runtime) -> None:
    """The runtime's own message reaches the client."""
    compile_om(affine(tmp_path, ["n", "l"]), "--input_shape=x:1~4,8")
    async with serve(tmp_path, "max_batch_size: 8") as driver:
        (answer,) = await driver.infer({"x": rows(5, 8)})
        assert isinstance(answer.error, InvalidArgumentError)
        assert "145021" in str(answer.error)
        assert "outside of [[1, 4], [8, 8]]" in str(answer.error)
        await check_affine(driver, rows(4, 8))


# Datatypes and AIPP.


@pytest.mark.parametrize(
    ("elem_type", "dtype"),
    [
        (TensorProto.FLOAT16, np.float16), (TensorProto.INT8, np.int8),
        (TensorProto.BOOL, np.bool_), (TensorProto.INT64, np.int64), (TensorProto.UINT8, np.uint8),
    ],
)  # fmt: skip
async def test_output_datatypes(
    tmp_path: Path, machine: Runtime, elem_type: int, dtype: Any
) -> None:
    """FP16, INT8, BOOL and INT64 outputs come back with their type."""
    onnx_models.save(
        tmp_path, [helper.make_node("Cast", ["x"], ["y"], to=elem_type)],
        [value("x", TensorProto.FLOAT, [2, 3])], [value("y", elem_type, [2, 3])],
    )  # fmt: skip
    compile_om(tmp_path)
    async with serve(tmp_path) as driver:
        array = np.array([[0, 1, 2], [3, 0, 5]], np.float32)
        (result,) = await run(driver, array)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, array.astype(dtype))


AIPP = """
aipp_op {
    aipp_mode: static
    input_format: RGB888_U8
    mean_chn_0: 10
    var_reci_chn_0: 0.5
    var_reci_chn_1: 0.5
    var_reci_chn_2: 0.5
}
"""


async def test_static_aipp_takes_images_as_bytes(tmp_path: Path, machine: Runtime) -> None:
    """The input is the UINT8 NHWC image that the file asks for, not the FP32 of the ONNX model."""
    identity = helper.make_node("Identity", ["x"], ["y"])
    shape: list[int | str | None] = ["n", 3, 4, 4]
    onnx_models.save(
        tmp_path, [identity],
        [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, shape)],
    )  # fmt: skip
    aipp = tmp_path / "aipp.cfg"
    aipp.write_text(AIPP)
    compile_om(
        tmp_path, "--input_shape=x:-1,3,4,4", "--dynamic_batch_size=1,2", f"--insert_op_conf={aipp}"
    )
    async with serve(tmp_path) as driver:
        config = driver.context.config
        assert list(config.input[0].dims) == [4, 4, 3]
        image = np.random.default_rng(0).integers(0, 255, (1, 4, 4, 3), np.uint8)
        (result,) = await run(driver, image)
        expected = (image - np.array([10, 0, 0], np.float32)) * 0.5
        np.testing.assert_allclose(result, expected.transpose(0, 3, 1, 2))


# Configuration.


async def test_the_full_name_of_an_output_may_be_configured(
    tmp_path: Path, machine: Runtime
) -> None:
    """`add:0:y` is what the file says, `y` what is served where nothing is configured."""
    text = 'output { name: "add:0:y" data_type: TYPE_FP32 dims: 3 }'
    async with serve(batch_om(tmp_path), f"max_batch_size: 4 {text}") as driver:
        (result,) = await run(driver, rows(1), name="add:0:y")
        assert result.shape == (1, 3)


async def test_a_complete_configuration_batches_dynamically_too(
    tmp_path: Path, machine: Runtime
) -> None:
    """The file need not be read for it; another scheduler is left alone."""
    tensors = (
        'input { name: "x" data_type: TYPE_FP32 dims: 3 }'
        'output { name: "y" data_type: TYPE_FP32 dims: 3 }'
    )
    async with serve(batch_om(tmp_path), f"max_batch_size: 4 {tensors}") as driver:
        assert list(driver.context.config.dynamic_batching.preferred_batch_size) == [4]
        assert machine.calls["acl.mdl.load_from_file"] == 1
    sequences = "sequence_batching { }"
    async with serve(tmp_path, f"max_batch_size: 4 {tensors} {sequences}") as driver:
        assert not driver.context.config.HasField("dynamic_batching")


async def test_a_wrong_datatype_is_refused(tmp_path: Path, machine: Runtime) -> None:
    """The configuration says INT32, the file FP32."""
    text = 'input { name: "x" data_type: TYPE_INT32 dims: 3 }'
    error = await load_error(batch_om(tmp_path), f"max_batch_size: 4 {text}")
    assert isinstance(error, InvalidArgumentError)
    assert "TYPE_INT32" in str(error)


async def test_a_missing_file_is_named(tmp_path: Path, machine: Runtime) -> None:
    """The error says what is in the directory instead."""
    affine(tmp_path, ["n", 3])
    error = await load_error(tmp_path)
    assert isinstance(error, NotFoundError)
    assert "model.om" in str(error)


async def test_a_file_for_another_chip_is_refused(tmp_path: Path, machine: Runtime) -> None:
    """Both chips are named, and nothing leaks."""
    affine(tmp_path, ["n", 3])
    compile_om(tmp_path, "--input_shape=x:1,3", soc="Ascend310P3")
    error = await load_error(tmp_path)
    assert "Ascend310P3" in str(error)
    assert "Ascend910B3" in str(error)


async def test_a_damaged_file_is_refused(tmp_path: Path, machine: Runtime) -> None:
    """The error names the file and the runtime's code."""
    path = tmp_path / "1" / "model.om"
    path.parent.mkdir()
    path.write_bytes(b"no model" * 100)
    error = await load_error(tmp_path)
    assert "model.om" in str(error)
    assert "545005" in str(error)


async def test_without_cann_the_model_is_unavailable(tmp_path: Path) -> None:
    """The reason names what is missing."""
    batch_om(tmp_path)
    error = await load_error(tmp_path)
    assert isinstance(error, UnavailableError)
    assert "'acl'" in str(error)
    assert "set_env.sh" in str(error)


# Ragged batches.

RAGGED = {
    "batch_input": "batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: 'end' "
    "data_type: TYPE_INT32 source_input: 'x' }",
    "batch_output": "batch_output { target_name: 'y' kind: BATCH_SCATTER_WITH_INPUT_SHAPE "
    "source_input: 'x' }",
    "allow_ragged_batch": "input { name: 'x' data_type: TYPE_FP32 dims: -1 "
    "allow_ragged_batch: true }",
}


def ragged_onnx(model_dir: Path) -> Path:
    """Twice a row of elements, their ends, and twice a scale for each request."""
    return onnx_models.save(
        model_dir,
        [
            helper.make_node("Constant", [], ["axis"], value_ints=[1]),
            helper.make_node("Add", ["x", "x"], ["y"], name="add"),
            helper.make_node("Unsqueeze", ["end", "axis"], ["seen"], name="seen"),
            helper.make_node("Add", ["scale", "scale"], ["twice"], name="twice"),
        ],
        [
            value("x", TensorProto.FLOAT, ["elements"]),
            value("end", TensorProto.INT32, ["requests"]),
            value("scale", TensorProto.FLOAT, ["requests", 2]),
        ],
        [
            value("y", TensorProto.FLOAT, ["elements"]),
            value("seen", TensorProto.INT32, ["requests", 1]),
            value("twice", TensorProto.FLOAT, ["requests", 2]),
        ],
    )


RAGGED_CONFIG = (
    "max_batch_size: 8 " + " ".join(RAGGED.values()) + " input { name: 'scale' data_type: "
    "TYPE_FP32 dims: 2 } output { name: 'y' data_type: TYPE_FP32 dims: -1 } output { name: 'seen' "
    "data_type: TYPE_INT32 dims: 1 } output { name: 'twice' data_type: TYPE_FP32 dims: 2 } "
)


@pytest.mark.parametrize("backend", ["om", "ge"])
async def test_ragged_requests_share_an_execution_of_a_dynamic_shape(
    tmp_path: Path, machine: Runtime, backend: str
) -> None:
    """One row of elements with their ends goes in, and what comes out is cut apart again."""
    ragged_onnx(tmp_path)
    config = make_config(RAGGED_CONFIG)
    made: Backend = OmBackend()
    if backend == "ge":
        config = onnx_models.config(
            'backend: "ge" ' + RAGGED_CONFIG + parameters(cache_dir=str(tmp_path / "cache"))
        )
        made = GeBackend()
    else:
        compile_om(tmp_path)
    lengths = (3, 1, 4, 700)
    requests = [
        {"x": rows(1, length, length), "scale": rows(1, 2, seed)}
        for seed, length in enumerate(lengths)
    ]
    async with BackendDriver(made, config, tmp_path) as driver:
        before = machine.calls["acl.mdl.execute_async"]
        answers = await driver.infer(*requests)
        assert machine.calls["acl.mdl.execute_async"] == before + 1
        (some,) = await driver.infer(requests[0], outputs=["y"])
    for answer, request, end in zip(answers, requests, np.cumsum(lengths), strict=True):
        np.testing.assert_array_equal(answer.array("y"), 2 * request["x"])
        np.testing.assert_array_equal(answer.array("seen"), [[end]])
        np.testing.assert_array_equal(answer.array("twice"), 2 * request["scale"])
    assert [tensor.name for tensor in some.responses[0].outputs] == ["y"]


async def test_a_ragged_output_must_have_the_elements_of_the_batch(
    tmp_path: Path, machine: Runtime
) -> None:
    """Else it cannot be cut apart: an error for those requests."""
    ragged_onnx(tmp_path)
    compile_om(tmp_path)
    text = RAGGED_CONFIG.replace("target_name: 'y'", "target_name: 'seen'")
    config = make_config(text.replace("output { name: 'y' data_type: TYPE_FP32 dims: -1 }", ""))
    async with BackendDriver(OmBackend(), config, tmp_path) as driver:
        (answer,) = await driver.infer({"x": rows(1, 5), "scale": rows(1, 2)})
        assert "output 'seen' has 1 elements, but input 'x'" in str(answer.error)


async def test_batch_inputs_have_the_datatype_of_the_model(
    tmp_path: Path, machine: Runtime
) -> None:
    """Bytes are all that the card sees, so a mistake would give wrong numbers."""
    ragged_onnx(tmp_path)
    compile_om(tmp_path)
    error = await load_error(
        tmp_path, RAGGED_CONFIG.replace("TYPE_INT32 source", "TYPE_INT64 source")
    )
    assert "batch_input 'end' is INT64, the model's input is INT32" in str(error)


@pytest.mark.parametrize("name", sorted(RAGGED))
async def test_ragged_batches_need_a_dynamic_shape(
    tmp_path: Path, machine: Runtime, name: str
) -> None:
    """With gears they are an error of the load that names the setting, and with ais_bench."""
    batch_om(tmp_path)
    text = f"max_batch_size: 4 {RAGGED[name]} "
    if name != "allow_ragged_batch":
        text += "input { name: 'x' data_type: TYPE_FP32 dims: 3 }"
    for engine in ("acl", "ais_bench"):
        error = await load_error(tmp_path, text + parameters(engine=engine))
        assert f"{name} is not supported for" in str(error)
    assert machine.leaks() == []


async def test_an_unknown_engine_is_refused(tmp_path: Path, machine: Runtime) -> None:
    """The error names the engines there are."""
    error = await load_error(batch_om(tmp_path), parameters(engine="mxrt"))
    assert "acl and ais_bench" in str(error)


async def test_string_tensors_cannot_be_served(tmp_path: Path, machine: Runtime) -> None:
    """A datatype without a counterpart is an error at load."""
    affine(tmp_path, [1, 3])
    compile_om(tmp_path)
    path = tmp_path / "1" / "model.om"
    path.write_bytes(path.read_bytes().replace(b'"datatype": 0', b'"datatype": 5'))
    error = await load_error(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "data type 5" in str(error)


@pytest.mark.parametrize(
    ("name", "text", "engine"),
    [
        ("pipeline_depth", "²", "acl"), ("aicore_num", "²|1", "acl"),
        ("gears", "0,2", "ais_bench"), ("gears", "1,x", "ais_bench"),
        ("custom_sizes", "-1", "ais_bench"),
    ],
)  # fmt: skip
async def test_parameters_that_are_no_numbers_are_named(
    tmp_path: Path, machine: Runtime, name: str, text: str, engine: str
) -> None:
    """At the load, and not as a fault of ours."""
    settings = parameters(**{name: text, "engine": engine})
    error = await load_error(batch_om(tmp_path), "max_batch_size: 4 " + settings)
    assert isinstance(error, InvalidArgumentError)
    assert text in str(error)


@pytest.mark.parametrize("engine", ["acl", "ais_bench"])
async def test_the_default_batch_size_is_a_number(
    tmp_path: Path, machine: Runtime, engine: str
) -> None:
    """The option of the command line is named."""
    error = await load_error(
        batch_om(tmp_path), parameters(engine=engine),
        backend_options={"default-max-batch-size": "x"},
    )  # fmt: skip
    assert isinstance(error, InvalidArgumentError)
    assert "'default-max-batch-size' is 'x'" in str(error)


def test_core_limits_are_cube_and_vector() -> None:
    """Either side may be left out."""
    assert parse_cores("12|24") == (12, 24)
    assert parse_cores("10|") == (10, 0)
    assert parse_cores("") == (0, 0)
    with pytest.raises(InvalidArgumentError):
        parse_cores("many")


@pytest.mark.parametrize("kind", ["gears", "dynamic"])
async def test_the_memory_an_instance_holds(tmp_path: Path, machine: Runtime, kind: str) -> None:
    """As the card sees it; a dynamic shape's own part is estimated by the file."""
    if kind == "gears":
        batch_om(tmp_path)
    else:
        compile_om(affine(tmp_path, ["n", "l"]))
    async with serve(tmp_path) as driver:
        device, host = driver.pool.instances[0].backend_instance.memory_usage
        blocks = machine.cards[0].memory.blocks
        taken = [(block.call, block.size) for block in blocks]
        loaded = sum(size for call, size in taken if "load" in call)
        staging = sum(size for call, size in taken if "malloc" in call)
        assert loaded
        assert staging
        if kind == "dynamic":
            loaded = (tmp_path / "1" / "model.om").stat().st_size
        assert device == ("GPU", 0, loaded + staging)
        pinned = sum(block.size for block in machine.host.blocks)
        assert host == ("CPU_PINNED", 0, pinned)


async def test_core_limits_reach_the_runtime(tmp_path: Path, machine: Runtime) -> None:
    """`aicore_num` is set on the stream that computes, before the model is loaded."""
    async with serve(batch_om(tmp_path), parameters(aicore_num="12|24")):
        limits = [
            stream.core_limits for stream in machine.objects.values() if isinstance(stream, Stream)
        ]
        assert {0: 12, 1: 24} in limits


async def test_a_limit_of_the_card_ends_with_its_last_model(
    tmp_path: Path, machine: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where CANN limits whole cards only, other models have all cores again."""
    has = AclLibrary.has
    monkeypatch.setattr(
        AclLibrary,
        "has",
        lambda library, name: name != "acl.rt.set_stream_res_limit" and has(library, name),
    )
    batch_om(tmp_path)
    async with serve(tmp_path, "max_batch_size: 4"):
        async with serve(tmp_path, "max_batch_size: 4 " + parameters(aicore_num="8|16")):
            async with serve(tmp_path, "max_batch_size: 4 " + parameters(aicore_num="12|24")):
                assert machine.cards[0].core_limits == {0: 12, 1: 24}
            assert machine.cards[0].core_limits
        assert machine.cards[0].core_limits == {}


# ais_bench.


async def test_ais_bench_static_batch_is_padded(tmp_path: Path, machine: Runtime) -> None:
    """A model of four rows serves six."""
    compile_om(affine(tmp_path, ["n", 3]), "--input_shape=x:4,3")
    async with serve(tmp_path, "max_batch_size: 8 " + parameters(engine="ais_bench")) as driver:
        await check_affine(driver, rows(5), rows(1))


async def test_ais_bench_dynamic_shape(tmp_path: Path, machine: Runtime) -> None:
    """The mode is found out from the file."""
    compile_om(affine(tmp_path, ["n", "l"]))
    async with serve(tmp_path, parameters(engine="ais_bench", custom_sizes="4096")) as driver:
        await check_affine(driver, rows(2, 7))


async def test_ais_bench_refuses_unknown_modes(tmp_path: Path, machine: Runtime) -> None:
    """The spelling of some documents is refused before the first request."""
    error = await load_error(batch_om(tmp_path), parameters(engine="ais_bench", mode="dynbatch"))
    assert "dymbatch" in str(error)
