"""The pytorch backend on the CPU, with TorchScript and torch.export files."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from npuserve.backends import torch_module
from npuserve.backends.base import Placement
from npuserve.backends.pytorch import PytorchBackend
from npuserve.backends.torch_module import device_of, positions
from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    NpuserveError,
    UnavailableError,
)
from npuserve.testing.backend_driver import BackendDriver
from npuserve.testing.check_backend import check_backend
from tests.backends.npu_models import parameters
from tests.backends.onnx_models import config

torch: Any = pytest.importorskip("torch")

# Newer torch releases deprecate TorchScript; people's files will stay for long.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

ADD = """
def forward(self, INPUT0, INPUT1):
    return INPUT0 + INPUT1, INPUT0 - INPUT1
"""
TWO_INPUTS = "".join(
    f'input {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }}' for name in ("INPUT0", "INPUT1")
)
TWO_OUTPUTS = "".join(
    f'output {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }}' for name in ("OUTPUT0", "OUTPUT1")
)


def scripted(model_dir: Path, *functions: str) -> Path:
    """A TorchScript module with these functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A class of its own: TorchScript keeps methods by class.
        module = type("Scripted", (torch.jit.ScriptModule,), {})()
        for function in functions:
            module.define(function)
        (model_dir / "1").mkdir(parents=True, exist_ok=True)
        module.save(str(model_dir / "1" / "model.pt"))
    return model_dir


class Scale(torch.nn.Module):  # type: ignore[misc]
    def forward(self, x: Any, by: Any) -> Any:
        return x * by, x.sum(dim=1)


def exported(model_dir: Path) -> Path:
    """A program with a free batch axis."""
    batch = torch.export.Dim("batch", min=1, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            Scale(), (torch.ones(2, 3), torch.ones(2, 3)), dynamic_shapes=({0: batch}, {0: batch})
        )
        (model_dir / "1").mkdir(parents=True, exist_ok=True)
        torch.export.save(program, model_dir / "1" / "model.pt2")
    return model_dir


def serve(model_dir: Path, text: str, **options: Any) -> BackendDriver:
    return BackendDriver(PytorchBackend(), config(text), model_dir, **options)


async def load_error(model_dir: Path, text: str, **options: Any) -> NpuserveError:
    with pytest.raises(NpuserveError) as caught:
        await serve(model_dir, text, **options).__aenter__()
    return caught.value


def ones(count: int = 1) -> NDArray[np.float32]:
    return np.ones((count, 4), np.float32)


@pytest.mark.parametrize("sharing", ["false", "true"])
async def test_keeps_the_rules_of_a_backend(tmp_path: Path, sharing: str) -> None:
    """The conformance kit finds nothing."""

    def make_inputs(seed: int) -> dict[str, NDArray[Any]]:
        random = np.random.default_rng(seed)
        return {f"INPUT{i}": random.standard_normal((1, 4), np.float32) for i in (0, 1)}

    text = "max_batch_size: 8 " + TWO_INPUTS + TWO_OUTPUTS
    await check_backend(
        PytorchBackend(),
        config(text + parameters(ENABLE_WEIGHT_SHARING=sharing)),
        scripted(tmp_path, ADD),
        make_inputs,
    )


async def test_names_of_the_arguments_in_any_order(tmp_path: Path) -> None:
    """Inputs go where their name says; outputs count by their order."""
    text = "max_batch_size: 2 " + "".join(
        f'input {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }}' for name in ("INPUT1", "INPUT0")
    )
    async with serve(scripted(tmp_path, ADD), text + TWO_OUTPUTS) as driver:
        (answer,) = await driver.infer({"INPUT1": ones(), "INPUT0": 3 * ones()})
        np.testing.assert_array_equal(answer.array("OUTPUT1"), 2 * ones())


async def test_indexed_names(tmp_path: Path) -> None:
    """INPUT__1 is the second argument, OUTPUT__1 the second result."""
    text = "max_batch_size: 2 " + "".join(
        f'input {{ name: "IN__{i}" data_type: TYPE_FP32 dims: 4 }}' for i in (1, 0)
    )
    text += 'output { name: "DIFFERENCE__1" data_type: TYPE_FP32 dims: 4 }'
    async with serve(scripted(tmp_path, ADD), text) as driver:
        (answer,) = await driver.infer({"IN__0": 3 * ones(), "IN__1": ones()})
        np.testing.assert_array_equal(answer.array("DIFFERENCE__1"), 2 * ones())


def test_indexed_names_are_all_or_none() -> None:
    """A mixture is refused, and so is an index used twice."""
    assert positions(["a__1", "b__0"], "input") == [1, 0]
    assert positions(["a", "b"], "input") is None
    for names in (["a__0", "b"], ["a__0", "b__0"]):
        with pytest.raises(InvalidArgumentError, match="__<index>"):
            positions(names, "input")


async def test_a_dictionary_of_outputs(tmp_path: Path) -> None:
    """Keys are output names; a missing one is named."""
    function = """
def forward(self, x):
    return {"double": x * 2, "half": x / 2}
"""
    text = 'max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: 4 }'
    half = 'output { name: "half" data_type: TYPE_FP32 dims: 4 }'
    async with serve(scripted(tmp_path, function), text + half) as driver:
        (answer,) = await driver.infer({"x": ones()})
        np.testing.assert_array_equal(answer.array("half"), ones() / 2)
    third = 'output { name: "third" data_type: TYPE_FP32 dims: 4 }'
    async with serve(tmp_path, text + third) as driver:
        (answer,) = await driver.infer({"x": ones()})
        assert "no output 'third'" in str(answer.error)


async def test_text_goes_in_and_out(tmp_path: Path) -> None:
    """TYPE_STRING is a list of str in TorchScript."""
    function = """
def forward(self, words: List[str]):
    return [word + "!" for word in words]
"""
    text = (
        'input { name: "words" data_type: TYPE_STRING dims: -1 }'
        'output { name: "out" data_type: TYPE_STRING dims: -1 }'
    )
    async with serve(scripted(tmp_path, function), text) as driver:
        (answer,) = await driver.infer({"words": np.array(["a", "ü"], np.object_)})
        assert answer.array("out").tolist() == [b"a!", "ü!".encode()]


async def test_bf16_is_kept(tmp_path: Path) -> None:
    """The bits travel as they are."""
    function = """
def forward(self, x):
    return x + x
"""
    text = (
        'input { name: "x" data_type: TYPE_BF16 dims: 2 }'
        'output { name: "y" data_type: TYPE_BF16 dims: 2 }'
    )
    async with serve(scripted(tmp_path, function), text) as driver:
        from npuserve.tensor import Tensor

        bits = np.array([0x3F80, 0x4040], np.uint16)  # 1, 3
        (answer,) = await driver.infer({"x": Tensor.from_numpy("x", bits, "BF16")})
        assert answer.array("y").tolist() == [0x4000, 0x40C0]  # 2, 6


async def test_text_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    """TorchScript has no bytes."""
    function = """
def forward(self, words: List[str]):
    return words
"""
    text = (
        'input { name: "words" data_type: TYPE_STRING dims: -1 }'
        'output { name: "out" data_type: TYPE_STRING dims: -1 }'
    )
    async with serve(scripted(tmp_path, function), text) as driver:
        (answer,) = await driver.infer({"words": np.array([b"\xff"], np.object_)})
        assert isinstance(answer.error, InvalidArgumentError)


async def test_ragged_inputs_share_a_batch(tmp_path: Path) -> None:
    """The model gets one row of elements and where each request ends; its output is cut back."""
    function = """
def forward(self, x, ends):
    return x * 2 + ends.sum()
"""
    text = """
        max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
        output { name: "y" data_type: TYPE_FP32 dims: -1 }
        batch_input {
            kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_FP32
            source_input: "x"
        }
        batch_output {
            target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x"
        }
    """
    async with serve(scripted(tmp_path, function), text) as driver:
        one, two = np.ones((1, 2), np.float32), np.ones((1, 3), np.float32)
        first, second = await driver.infer({"x": one}, {"x": two})
        np.testing.assert_array_equal(first.array("y"), 2 * one + 7)
        np.testing.assert_array_equal(second.array("y"), 2 * two + 7)


async def test_a_wrong_output_type_is_named(tmp_path: Path) -> None:
    """Configured as INT64, returned as FP32."""
    text = TWO_INPUTS + 'output { name: "OUTPUT0" data_type: TYPE_INT64 dims: 4 }'
    async with serve(scripted(tmp_path, ADD), "max_batch_size: 2 " + text) as driver:
        (answer,) = await driver.infer({"INPUT0": ones(), "INPUT1": ones()})
        assert "configured as INT64, the model returned FP32" in str(answer.error)


async def test_errors_of_the_model_reach_the_client(tmp_path: Path) -> None:
    """As Triton words them; the next request is served."""
    function = """
def forward(self, x):
    if bool(x.sum() < 0):
        raise RuntimeError("negative")
    return x
"""
    text = (
        'max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: 4 }'
        'output { name: "y" data_type: TYPE_FP32 dims: 4 }'
    )
    async with serve(scripted(tmp_path, function), text) as driver:
        (answer,) = await driver.infer({"x": -ones()})
        assert isinstance(answer.error, InternalError)
        assert "PyTorch execute failure" in str(answer.error)
        assert "negative" in str(answer.error)
        (answer,) = await driver.infer({"x": ones()})
        assert answer.error is None


async def test_exported_program_completes_its_configuration(tmp_path: Path) -> None:
    """Inputs by the names of the arguments, outputs OUTPUT__i, a free batch axis."""
    async with serve(exported(tmp_path), "") as driver:
        model = driver.context.config
        assert model.max_batch_size == 4
        assert [(t.name, list(t.dims)) for t in model.input] == [("x", [3]), ("by", [3])]
        assert [t.name for t in model.output] == ["OUTPUT__0", "OUTPUT__1"]
        x = np.array([[1, 2, 3]], np.float32)
        (answer,) = await driver.infer({"x": x, "by": 2 * x})
        np.testing.assert_array_equal(answer.array("OUTPUT__0"), 2 * x * x)


async def test_threads_and_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread count is set where the instance runs; no_grad and plain execution work."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(
        torch, "set_num_threads", lambda count: calls.append((threading.get_ident(), count))
    )
    text = "max_batch_size: 2 " + TWO_INPUTS + TWO_OUTPUTS
    text += parameters(
        INTRA_OP_THREAD_COUNT="3", INFERENCE_MODE="false", DISABLE_OPTIMIZED_EXECUTION="true"
    )
    async with serve(scripted(tmp_path, ADD), text) as driver:
        assert calls == [(driver.pool.instances[0].thread_id, 3)]
        (answer,) = await driver.infer({"INPUT0": ones(), "INPUT1": ones()})
        np.testing.assert_array_equal(answer.array("OUTPUT0"), 2 * ones())


async def test_a_card_without_torch_npu_means_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Served all the same; the log says what to install."""
    text = "max_batch_size: 2 " + TWO_INPUTS + TWO_OUTPUTS
    async with serve(scripted(tmp_path, ADD), text, kind="GPU") as driver:
        (answer,) = await driver.infer({"INPUT0": ones(), "INPUT1": ones()})
        np.testing.assert_array_equal(answer.array("OUTPUT0"), 2 * ones())
    assert "install the torch-npu release" in caplog.text


def test_a_card_that_torch_npu_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch_npu the cards it counts are the cards there are."""
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    cards = SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(torch, "npu", cards, raising=False)
    assert device_of(Placement("m_0", "GPU", 1, 0, 0)) == "npu:1"
    assert device_of(Placement("m_0", "CPU", 0, 0, 0)) == "cpu"
    with pytest.raises(UnavailableError, match="no NPU 2; torch_npu sees: 0, 1"):
        device_of(Placement("m_0", "GPU", 2, 0, 0))


async def test_a_reload_does_not_share_the_weights_of_what_it_replaces(tmp_path: Path) -> None:
    """Both are there for a while, made of the same path."""
    text = "max_batch_size: 2 " + TWO_INPUTS + TWO_OUTPUTS
    text += parameters(ENABLE_WEIGHT_SHARING="true")
    backend = PytorchBackend()
    async with BackendDriver(backend, config(text), scripted(tmp_path, ADD)) as former:
        scripted(tmp_path, ADD.replace("INPUT0 + INPUT1", "INPUT0 * 7"))
        async with BackendDriver(backend, config(text), tmp_path) as driver:
            (answer,) = await driver.infer({"INPUT0": ones(), "INPUT1": ones()})
            np.testing.assert_array_equal(answer.array("OUTPUT0"), 7 * ones())
        (answer,) = await former.infer({"INPUT0": ones(), "INPUT1": ones()})
        np.testing.assert_array_equal(answer.array("OUTPUT0"), 2 * ones())


@pytest.mark.parametrize("sharing", ["false", "true"])
async def test_an_unload_gives_the_memory_of_the_card_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: str
) -> None:
    """Torch would keep it for itself; other backends and processes need it."""
    modules: list[weakref.ref[Any]] = []
    alive: list[int] = []
    load = torch_module.load_module

    def load_and_watch(*arguments: Any) -> Any:
        module = load(*arguments)
        modules.append(weakref.ref(module))
        return module

    def empty_cache() -> None:
        gc.collect()
        alive.append(sum(module() is not None for module in modules))

    npu = SimpleNamespace(
        Stream=lambda device: device, stream=contextlib.nullcontext, empty_cache=empty_cache
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr("npuserve.backends.pytorch.device_of", lambda placement: "cpu:0")
    monkeypatch.setattr("npuserve.backends.pytorch.load_module", load_and_watch)
    text = "max_batch_size: 2 " + TWO_INPUTS + TWO_OUTPUTS
    text += parameters(ENABLE_WEIGHT_SHARING=sharing)
    async with serve(scripted(tmp_path, ADD), text):
        assert modules[0]() is not None
    assert alive[-1] == 0


async def test_bad_files_and_parameters(tmp_path: Path) -> None:
    """A missing file, rubbish, too many inputs, no threads, torchair for TorchScript."""
    text = "max_batch_size: 2 " + TWO_INPUTS + TWO_OUTPUTS
    assert isinstance(await load_error(tmp_path, text), NotFoundError)
    scripted(tmp_path, ADD)
    extra = 'input { name: "third" data_type: TYPE_FP32 dims: 4 }'
    assert "model provides 2" in str(await load_error(tmp_path, text + extra))
    for wrong in ({"INTRA_OP_THREAD_COUNT": "0"}, {"torchair": "max-autotune"}):
        error = await load_error(tmp_path, text + parameters(**wrong))
        assert isinstance(error, InvalidArgumentError)
    (tmp_path / "1" / "model.pt").write_bytes(b"rubbish")
    assert "failed to load model" in str(await load_error(tmp_path, text))


# torchair, as torch_npu publishes it: its module needs CANN to be imported.


class CompilerConfig:
    """Takes its own options only, and of the modes those there are."""

    MODES = ("max-autotune", "reduce-overhead", "npugraph_ex")

    def __init__(self) -> None:
        self.__dict__["mode"] = "max-autotune"

    def __setattr__(self, key: str, option: str) -> None:
        if key != "mode":
            raise ValueError(f"CompilerConfig has no option {key}")
        if option not in self.MODES:
            text = f"Value '{option}' not in optional list {self.MODES}."
            raise ValueError(f"{text}\nTraceback (most recent call last): …")
        self.__dict__[key] = option


class Torchair(ModuleType):
    """Counts graphs; what it compiles runs as it is."""

    CompilerConfig = CompilerConfig

    def __init__(self) -> None:
        super().__init__("torchair")
        self.graphs: list[str] = []

    def get_npu_backend(
        self, *, compiler_config: Any = None, custom_decompositions: Any = None
    ) -> Any:
        mode = "max-autotune" if compiler_config is None else compiler_config.mode

        def compile_graph(graph: Any, example_inputs: Any) -> Any:
            self.graphs.append(mode)
            return graph.forward

        return compile_graph


@pytest.fixture
def torchair(monkeypatch: pytest.MonkeyPatch) -> Torchair:
    """Torch_npu and torchair for a card that is the CPU."""
    module = Torchair()
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setitem(sys.modules, "torchair", module)
    npu = SimpleNamespace(
        Stream=lambda device: device, stream=contextlib.nullcontext, empty_cache=lambda: None
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr("npuserve.backends.pytorch.device_of", lambda placement: "cpu:0")
    torch._dynamo.reset()
    return module


SCALE = (
    'input { name: "x" data_type: TYPE_FP32 dims: 3 } '
    'input { name: "by" data_type: TYPE_FP32 dims: 3 } '
    'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 3 } '
)


@pytest.mark.timeout(120)
async def test_torchair_compiles_one_graph_for_all_batches(
    tmp_path: Path, torchair: Torchair
) -> None:
    """More batch sizes than torch would compile graphs for; a batch of one has its own graph."""
    text = "max_batch_size: 16 " + SCALE + parameters(torchair="reduce-overhead")
    async with serve(exported(tmp_path), text) as driver:
        for count in range(1, 17):
            x, by = np.random.default_rng(count).random((2, count, 3), np.float32)
            (answer,) = await driver.infer({"x": x, "by": by})
            np.testing.assert_array_equal(answer.array("OUTPUT__0"), x * by)
    assert set(torchair.graphs) == {"reduce-overhead"}
    assert len(torchair.graphs) <= 2


@pytest.mark.timeout(120)
async def test_torchair_compiles_a_fixed_shape_once(tmp_path: Path, torchair: Torchair) -> None:
    """A graph of static shape, by the default mode."""
    (tmp_path / "1").mkdir()
    program = torch.export.export(Scale(), (torch.ones(2, 3), torch.ones(2, 3)))
    torch.export.save(program, tmp_path / "1" / "model.pt2")
    text = SCALE.replace("dims: 3", "dims: [2, 3]") + parameters(torchair="max-autotune")
    async with serve(tmp_path, text) as driver:
        for factor in (1, 2, 3):
            x = np.full((2, 3), factor, np.float32)
            (answer,) = await driver.infer({"x": x, "by": x})
            np.testing.assert_array_equal(answer.array("OUTPUT__0"), x * x)
    assert torchair.graphs == ["max-autotune"]


async def test_torchair_that_cannot_be_used(
    tmp_path: Path, torchair: Torchair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another mode, shared weights, the CPU, a torchair or torch_npu that does not load."""
    exported(tmp_path)
    text = "max_batch_size: 4 " + SCALE
    error = await load_error(tmp_path, text + parameters(torchair="fastest"))
    assert isinstance(error, InvalidArgumentError)
    assert "parameter 'torchair' is 'fastest'" in str(error)
    assert "reduce-overhead" in str(error)
    assert "Traceback" not in str(error)
    wanted = text + parameters(torchair="max-autotune")
    error = await load_error(tmp_path, wanted + parameters(ENABLE_WEIGHT_SHARING="true"))
    assert "exclude each other" in str(error)
    broken = ModuleType("torchair")  # such as torch_npu's lazy one without CANN
    monkeypatch.setitem(sys.modules, "torchair", broken)
    error = await load_error(tmp_path, wanted)
    assert isinstance(error, UnavailableError)
    assert "torchair does not load" in str(error)
    monkeypatch.setattr("npuserve.backends.pytorch.device_of", lambda placement: "cpu")
    error = await load_error(tmp_path, wanted)
    assert isinstance(error, InvalidArgumentError)
    assert "the instance is on the CPU" in str(error)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    error = await load_error(tmp_path, wanted)
    assert isinstance(error, UnavailableError)
    assert "install the torch-npu release" in str(error)


# A published file.


@pytest.fixture(scope="session")
def silero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TorchScript of silero-vad, from its wheel; its package would want torchaudio."""
    directory = tmp_path_factory.mktemp("silero")
    command = [
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(directory),
        "silero-vad==6.2.3",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    wheels = list(directory.glob("*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of silero-vad: {result.stderr[-200:]}")
    (directory / "1").mkdir()
    with zipfile.ZipFile(wheels[0]) as wheel:
        content = wheel.read("silero_vad/data/silero_vad.jit")
    (directory / "1" / "model.pt").write_bytes(content)
    return directory


@pytest.mark.timeout(120)
async def test_silero_vad_hears_speech(silero: Path) -> None:
    """A published TorchScript model gives the same numbers as torch itself."""
    text = (
        'input { name: "x" data_type: TYPE_FP32 dims: [1, 512] }'
        'input { name: "sr" data_type: TYPE_INT64 dims: 1 }'
        'output { name: "probability" data_type: TYPE_FP32 dims: [1, 1] }'
    )
    audio = np.random.default_rng(0).standard_normal((3, 1, 512), np.float32) * 0.1
    reference = torch.jit.load(str(silero / "1" / "model.pt"))
    with torch.inference_mode():
        expected = [reference(torch.from_numpy(chunk), 16000).numpy() for chunk in audio]
    async with serve(silero, text) as driver:
        for chunk, probability in zip(audio, expected, strict=True):
            (answer,) = await driver.infer({"x": chunk, "sr": np.array([16000], np.int64)})
            np.testing.assert_allclose(answer.array("probability"), probability, atol=1e-5)
