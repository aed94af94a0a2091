"""The onnxruntime backend on small real models."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from npuserve.backends import onnx_session
from npuserve.backends.base import Placement
from npuserve.backends.onnx_session import usable_cores
from npuserve.backends.onnxruntime import OnnxruntimeBackend
from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NpuserveError,
    UnavailableError,
    UnsupportedError,
)
from npuserve.model_config import ModelConfig
from npuserve.tensor import Tensor
from npuserve.testing.backend_driver import BackendDriver
from npuserve.testing.check_backend import check_backend
from tests.backends import onnx_models
from tests.backends.onnx_models import config, value

DTYPES = [
    (TensorProto.BOOL, np.bool_), (TensorProto.UINT8, np.uint8), (TensorProto.UINT16, np.uint16),
    (TensorProto.UINT32, np.uint32), (TensorProto.UINT64, np.uint64), (TensorProto.INT8, np.int8),
    (TensorProto.INT16, np.int16), (TensorProto.INT32, np.int32), (TensorProto.INT64, np.int64),
    (TensorProto.FLOAT16, np.float16), (TensorProto.FLOAT, np.float32),
    (TensorProto.DOUBLE, np.float64),
]  # fmt: skip


def serve(model_dir: Path, text: str = "", **options: Any) -> BackendDriver:
    """A driver for the model in `model_dir` with this configuration text."""
    return BackendDriver(OnnxruntimeBackend(), config(text), model_dir, **options)


async def load_error(model_dir: Path, text: str = "", **options: Any) -> NpuserveError:
    """The error that loading ends in."""
    with pytest.raises(NpuserveError) as caught:
        await serve(model_dir, text, **options).__aenter__()
    return caught.value


async def test_keeps_the_rules_of_a_backend(tmp_path: Path) -> None:
    """The conformance kit finds nothing."""

    def make_inputs(seed: int) -> dict[str, NDArray[Any]]:
        random = np.random.default_rng(seed)
        return {f"INPUT{i}": random.standard_normal((1, 4), np.float32) for i in (0, 1)}

    onnx_models.sum_and_difference(tmp_path)
    await check_backend(OnnxruntimeBackend(), config("max_batch_size: 8"), tmp_path, make_inputs)


@pytest.mark.parametrize(("elem_type", "dtype"), DTYPES)
async def test_every_datatype_goes_through(tmp_path: Path, elem_type: int, dtype: Any) -> None:
    """Values come back unchanged, extreme ones too."""
    onnx_models.identity(tmp_path, ("batch", "n"), elem_type)
    info = np.finfo(dtype) if np.issubdtype(dtype, np.floating) else None
    if info is not None:
        row = [info.min, info.max, 0.5]
    elif dtype is np.bool_:
        row = [True, False, True]
    else:
        row = [np.iinfo(dtype).min, np.iinfo(dtype).max, 1]
    data = np.array([row], dtype)
    async with serve(tmp_path) as driver:
        first, second = await driver.infer({"IN": data}, {"IN": np.concatenate([data, data])})
    np.testing.assert_array_equal(first.array("OUT"), data)
    np.testing.assert_array_equal(second.array("OUT"), np.concatenate([data, data]))


async def test_text_goes_through(tmp_path: Path) -> None:
    """Chinese and empty elements included."""
    onnx_models.identity(tmp_path, ("batch", "n"), TensorProto.STRING)
    texts = np.array([["中文".encode(), b""]], np.object_)
    async with serve(tmp_path) as driver:
        (answer,) = await driver.infer({"IN": texts})
    np.testing.assert_array_equal(answer.array("OUT"), texts)


async def test_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    """Only the request that sent it fails, and its input is named."""
    onnx_models.identity(tmp_path, ("batch", "n"), TensorProto.STRING)
    async with serve(tmp_path) as driver:
        (answer,) = await driver.infer({"IN": np.array([[b"\xff"]], np.object_)})
    assert isinstance(answer.error, InvalidArgumentError)
    assert "'IN'" in str(answer.error)


async def test_bfloat16_goes_in_and_out(tmp_path: Path) -> None:
    """Two bytes a value, bit for bit; a cast to FP32 shows that the runtime understood them."""
    onnx_models.save(
        tmp_path,
        [
            helper.make_node("Identity", ["IN"], ["SAME"]),
            helper.make_node("Cast", ["IN"], ["FLOAT"], to=TensorProto.FLOAT),
        ],
        [value("IN", TensorProto.BFLOAT16, ["n"])],
        [
            value("SAME", TensorProto.BFLOAT16, ["n"]),
            value("FLOAT", TensorProto.FLOAT, ["n"]),
        ],
    )
    floats = np.array([1.5, -2, 0], np.float32)
    bits = (floats.view(np.uint32) >> 16).astype(np.uint16)
    async with serve(tmp_path, 'input { name: "IN" dims: -1 }') as driver:
        (answer,) = await driver.infer({"IN": Tensor.from_numpy("IN", bits, "BF16")})
    np.testing.assert_array_equal(answer.array("SAME"), bits)
    np.testing.assert_array_equal(answer.array("FLOAT"), floats)


async def test_a_batch_is_one_run(tmp_path: Path) -> None:
    """Three requests are gathered; each gets the rows that are its own."""
    onnx_models.sum_and_difference(tmp_path)
    rows = [np.full((n, 4), n, np.float32) for n in (1, 2, 1)]
    async with serve(tmp_path) as driver:
        answers = await driver.infer(*({"INPUT0": r, "INPUT1": r} for r in rows))
        assert driver.pool.statistics.execution_count == 1
    for answer, row in zip(answers, rows, strict=True):
        np.testing.assert_array_equal(answer.array("OUTPUT0"), row * 2)


async def test_two_instances_run_side_by_side(tmp_path: Path) -> None:
    """Both answer, from one shared session and from one each."""
    onnx_models.identity(tmp_path)
    data = {"IN": np.ones((1, 3), np.float32)}
    for shared in ("1", "0"):
        model_config = with_parameters({"share_session_between_instances": shared})
        async with BackendDriver(
            OnnxruntimeBackend(), model_config, tmp_path, instances=2
        ) as driver:
            for index in (0, 1):
                (answer,) = await driver.infer(data, instance=index)
                np.testing.assert_array_equal(answer.array("OUT"), data["IN"])


async def test_requests_with_different_optional_inputs_share_no_run(tmp_path: Path) -> None:
    """The one that lacks an input fails, its neighbour does not."""
    onnx_models.sum_and_difference(tmp_path)
    row = np.ones((1, 4), np.float32)
    async with serve(tmp_path) as driver:
        good, bad = await driver.infer({"INPUT0": row, "INPUT1": row}, {"INPUT0": row})
    np.testing.assert_array_equal(good.array("OUTPUT0"), row * 2)
    assert bad.error is not None


async def test_a_model_without_batch_dimension_runs_requests_one_by_one(tmp_path: Path) -> None:
    """max_batch_size 0: shapes may differ from request to request."""
    onnx_models.identity(tmp_path, ("n",))
    async with serve(tmp_path, 'input { name: "IN" dims: -1 }') as driver:
        short, long = await driver.infer(
            {"IN": np.ones(2, np.float32)}, {"IN": np.ones(5, np.float32)}
        )
    assert short.array("OUT").shape == (2,)
    assert long.array("OUT").shape == (5,)


async def test_nothing_found_is_an_empty_tensor(tmp_path: Path) -> None:
    """An output of shape [1, 0] stays one."""
    onnx_models.save(
        tmp_path,
        [helper.make_node("NonZero", ["IN"], ["IDX"])],
        [value("IN", TensorProto.FLOAT, ["n"])],
        [value("IDX", TensorProto.INT64, [1, "found"])],
    )
    async with serve(tmp_path) as driver:
        (answer,) = await driver.infer({"IN": np.zeros(3, np.float32)})
    assert answer.array("IDX").shape == (1, 0)


async def test_a_scalar_is_served_as_one_element(tmp_path: Path) -> None:
    """In both directions, since a configuration has no scalars."""
    onnx_models.identity(tmp_path, ())
    async with serve(tmp_path) as driver:
        assert list(driver.context.config.output[0].dims) == [1]
        (answer,) = await driver.infer({"IN": np.array([7], np.float32)})
    assert answer.array("OUT").tolist() == [7]


async def test_an_output_without_a_row_for_each_element_is_an_error(tmp_path: Path) -> None:
    """Its rows belong to nobody: cut as they are, requests would be given those of others."""
    onnx_models.save(
        tmp_path,
        [
            helper.make_node("NonZero", ["IN"], ["PLACES"]),
            helper.make_node("Transpose", ["PLACES"], ["IDX"]),
        ],
        [value("IN", TensorProto.FLOAT, ["n", 2])],
        [value("IDX", TensorProto.INT64, ["found", 2])],
    )
    text = (
        'max_batch_size: 4 input { name: "IN" data_type: TYPE_FP32 dims: 2 }'
        'output { name: "IDX" data_type: TYPE_INT64 dims: 2 }'
    )
    row = np.ones((1, 2), np.float32)
    async with serve(tmp_path, text) as driver:
        answers = await driver.infer({"IN": row}, {"IN": row}, {"IN": row})
        assert [str(answer.error) for answer in answers] == [
            "output 'IDX' has 6 rows for a batch of 3"
        ] * 3


async def test_a_shape_the_model_refuses_is_the_clients_error(tmp_path: Path) -> None:
    """The configuration leaves a dimension open that the file fixes."""
    onnx_models.identity(tmp_path, ("batch", 3))
    text = (
        'max_batch_size: 4 input { name: "IN" data_type: TYPE_FP32 dims: -1 }'
        'output { name: "OUT" data_type: TYPE_FP32 dims: -1 }'
    )
    async with serve(tmp_path, text) as driver:
        (answer,) = await driver.infer({"IN": np.ones((1, 5), np.float32)})
    assert isinstance(answer.error, InvalidArgumentError)
    assert "IN" in str(answer.error)


async def test_a_failing_operator_is_an_internal_error(tmp_path: Path) -> None:
    """It has Triton's prefix and the instance lives on."""
    onnx_models.save(
        tmp_path,
        [helper.make_node("Gather", ["DATA", "INDEX"], ["OUT"])],
        [value("DATA", TensorProto.FLOAT, ["n"]), value("INDEX", TensorProto.INT64, ["k"])],
        [value("OUT", TensorProto.FLOAT, ["k"])],
    )
    text = 'input { name: "DATA" dims: -1 } input { name: "INDEX" dims: -1 }'
    data = np.ones(3, np.float32)
    async with serve(tmp_path, text) as driver:
        (bad,) = await driver.infer({"DATA": data, "INDEX": np.array([9])})
        (good,) = await driver.infer({"DATA": data, "INDEX": np.array([2])})
    assert isinstance(bad.error, (InternalError, InvalidArgumentError))
    assert str(bad.error).startswith("onnx runtime error ")
    assert good.array("OUT").tolist() == [1]


class TestBadFiles:
    """A file that is no model leaves a reason that says so."""

    async def test_missing(self, tmp_path: Path) -> None:
        """The path is in the reason."""
        error = await load_error(tmp_path)
        assert isinstance(error, UnavailableError)
        assert "unable to find" in str(error)
        assert "1/model.onnx" in str(error)

    async def test_empty(self, tmp_path: Path) -> None:
        """An empty file is called empty."""
        onnx_models.identity(tmp_path)
        (tmp_path / "1" / "model.onnx").write_bytes(b"")
        assert "is empty" in str(await load_error(tmp_path))

    async def test_lfs_pointer(self, tmp_path: Path) -> None:
        """A clone without Git LFS is recognised, and the cure named."""
        onnx_models.identity(tmp_path)
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        (tmp_path / "1" / "model.onnx").write_bytes(pointer)
        assert "git lfs pull" in str(await load_error(tmp_path))

    async def test_garbage(self, tmp_path: Path) -> None:
        """Onnxruntime's own words are kept."""
        onnx_models.identity(tmp_path)
        (tmp_path / "1" / "model.onnx").write_bytes(b"hello")
        error = await load_error(tmp_path)
        assert isinstance(error, InternalError)
        assert str(error).startswith("onnx runtime error 7: ")

    async def test_newer_opset(self, tmp_path: Path) -> None:
        """The reason speaks of the opset."""
        onnx_models.save(
            tmp_path,
            [helper.make_node("Identity", ["IN"], ["OUT"])],
            [value("IN", TensorProto.FLOAT, ["n"])],
            [value("OUT", TensorProto.FLOAT, ["n"])],
            opset=99,
        )
        assert "opset" in str(await load_error(tmp_path)).lower()

    async def test_a_tensor_no_client_can_send(self, tmp_path: Path) -> None:
        """Complex numbers have no datatype in the protocol."""
        onnx_models.identity(tmp_path, ("n",), TensorProto.COMPLEX64)
        error = await load_error(tmp_path)
        assert isinstance(error, UnsupportedError | InternalError)


class TestParameters:
    """Parameters carry the names of Triton's backend."""

    @pytest.mark.parametrize(
        "parameters",
        [
            {"intra_op_thread_count": "1", "inter_op_thread_count": "1", "execution_mode": "1"},
            {"enable_mem_arena": "0", "enable_mem_pattern": "0"},
            {"memory.enable_memory_arena_shrinkage": "cpu:0"},
            {"session.set_denormal_as_zero": "1"},
        ],
    )
    async def test_known_ones_are_taken(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, parameters: dict[str, str]
    ) -> None:
        """The model serves and nothing is complained about."""
        onnx_models.identity(tmp_path)
        model_config = with_parameters(parameters)
        with caplog.at_level(logging.WARNING):
            async with BackendDriver(OnnxruntimeBackend(), model_config, tmp_path) as driver:
                (answer,) = await driver.infer({"IN": np.ones((1, 3), np.float32)})
        assert answer.error is None
        assert not caplog.records

    async def test_unknown_ones_are_named_in_the_log(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A typing error is not ignored silently."""
        onnx_models.identity(tmp_path)
        model_config = with_parameters({"intra_op_threads": "1"})
        async with BackendDriver(OnnxruntimeBackend(), model_config, tmp_path):
            assert "'intra_op_threads'" in caplog.text

    async def test_a_number_is_checked(self, tmp_path: Path) -> None:
        """The parameter and its value are named."""
        onnx_models.identity(tmp_path)
        model_config = with_parameters({"intra_op_thread_count": "many"})
        with pytest.raises(InvalidArgumentError, match="intra_op_thread_count .*'many'"):
            await BackendDriver(OnnxruntimeBackend(), model_config, tmp_path).__aenter__()

    @pytest.mark.parametrize(
        "options",
        [
            {"default-max-batch-size": "many"},
            {"enable-global-threadpool": "1", "intra_op_thread_count": "many"},
        ],
    )
    async def test_numbers_of_the_command_line_are_checked(
        self, tmp_path: Path, options: dict[str, str]
    ) -> None:
        """The same of `--backend-config`."""
        onnx_models.identity(tmp_path)
        name = list(options)[-1]
        with pytest.raises(InvalidArgumentError, match=f"{name}.*'many'"):
            await serve(tmp_path, backend_options=options).__aenter__()

    @pytest.mark.parametrize("level", [-1, 1, 2])
    async def test_graph_optimisation_level(self, tmp_path: Path, level: int) -> None:
        """`optimization { graph { level } }` is accepted with each of Triton's values."""
        onnx_models.identity(tmp_path)
        async with serve(tmp_path, f"optimization {{ graph {{ level: {level} }} }}") as driver:
            (answer,) = await driver.infer({"IN": np.ones((1, 3), np.float32)})
        assert answer.error is None

    async def test_an_unknown_accelerator_is_refused(self, tmp_path: Path) -> None:
        """The known ones are listed."""
        onnx_models.identity(tmp_path)
        text = 'optimization { execution_accelerators { cpu_execution_accelerator { name: "x" } } }'
        assert "unknown Execution Accelerator 'x'" in str(await load_error(tmp_path, text))

    @pytest.mark.parametrize(
        ("given", "device"), [("", "3"), ('parameters { key: "device_id" value: "1" }', "1")]
    )
    def test_an_accelerator_is_the_card_of_the_instance(
        self, tmp_path: Path, given: str, device: str
    ) -> None:
        """Unless its parameters name another one."""
        text = f"""optimization {{ execution_accelerators {{
            gpu_execution_accelerator {{ name: "cann" {given} }} }} }}"""
        context = serve(tmp_path, text).context
        ort = SimpleNamespace(
            get_available_providers=lambda: ["CANNExecutionProvider", "CPUExecutionProvider"]
        )
        providers = onnx_session._providers(ort, context, Placement("m_0_0", "GPU", 3, 0, 0))
        assert providers == [
            ("CANNExecutionProvider", {"device_id": device}),
            "CPUExecutionProvider",
        ]

    async def test_a_card_without_provider_falls_back_to_the_cpu(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """KIND_GPU on a plain onnxruntime is served, and the log says where."""
        onnx_models.identity(tmp_path)
        async with serve(tmp_path, kind="GPU") as driver:
            (answer,) = await driver.infer({"IN": np.ones((1, 3), np.float32)})
        assert answer.error is None
        assert "runs on the CPU" in caplog.text


async def test_equals_onnxruntime_itself(tmp_path: Path) -> None:
    """Serving changes no bit of the result."""
    onnx_models.sum_and_difference(tmp_path)
    session = onnxruntime.InferenceSession(str(tmp_path / "1" / "model.onnx"))
    random = np.random.default_rng(0)
    inputs = {f"INPUT{i}": random.standard_normal((3, 4), np.float32) for i in (0, 1)}
    async with serve(tmp_path) as driver:
        (answer,) = await driver.infer(inputs)
    for name, expected in zip(("OUTPUT0", "OUTPUT1"), session.run(None, inputs), strict=True):
        np.testing.assert_array_equal(answer.array(name), expected)


def with_parameters(parameters: dict[str, str]) -> ModelConfig:
    """A configuration with these parameters."""
    model_config = config()
    for key, text in parameters.items():
        model_config.parameters[key].string_value = text
    return model_config


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("100000 100000", 1), ("150000 100000", 2), ("20000 100000", 1), ("max 100000", 8), ("", 8)],
)
def test_threads_keep_to_the_limit_of_the_container(
    limit: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than cores only wait for the quota of the next period."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    file = tmp_path / "cpu.max"
    assert usable_cores(file) == 8
    file.write_text(f"{limit}\n")
    assert usable_cores(file) == cores
