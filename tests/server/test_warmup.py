"""Warm-up: the model has run before it is ready."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from npuserve.backends.base import ExecutionBatch
from npuserve.backends.identity import IdentityInstance
from npuserve.errors import InvalidArgumentError, NpuserveError, UnavailableError
from npuserve.model_config import ModelConfig
from npuserve.response import InferenceResponse
from npuserve.server.warmup import sample_inputs
from npuserve.tensor import Tensor
from tests.server.models import serve, write_model


def sample(inputs: str, model_dir: Path, batching: bool = False) -> list[Tensor]:
    config = ModelConfig()
    text = f'model_warmup {{ name: "s" batch_size: 1 inputs {{ key: "I" value {{ {inputs} }} }} }}'
    text_format.Parse(text, config)
    return sample_inputs(config.model_warmup[0], model_dir, {"I"} if batching else set())


WARMUP = """
model_warmup { name: "s" batch_size: 2 count: 3
  inputs { key: "X" value { data_type: TYPE_FP32 dims: 2 zero_data: true } } }
model_warmup { name: "off" batch_size: 0
  inputs { key: "X" value { data_type: TYPE_FP32 dims: -1 zero_data: true } } }
"""


async def test_warm_up_runs_on_every_instance_and_is_counted(tmp_path: Path) -> None:
    """Two instances, three times two requests each; batch size 0 is skipped."""
    directory = write_model(tmp_path, "m", WARMUP)
    config = directory / "config.pbtxt"
    config.write_text(config.read_text().replace("kind: KIND_CPU", "kind: KIND_CPU count: 2"))
    async with serve(tmp_path) as server:
        statistics = server.model("m").statistics
        assert (statistics.success.count, statistics.inference_count) == (12, 12)
        assert statistics.execution_count == 6
        assert statistics.batch[2].compute_infer.count == 6
        assert statistics.pending == 0


async def test_a_failing_sample_fails_the_load(tmp_path: Path) -> None:
    """The reason names the sample."""
    bad = 'inputs { key: "X" value { data_type: TYPE_FP32 dims: 2 input_data_file: "none" } }'
    write_model(tmp_path, "m", f'model_warmup {{ name: "sam" batch_size: 1 {bad} }}')
    async with serve(tmp_path) as server:
        (entry,) = await server.repository_index()
        assert "sam" in entry.reason
        with pytest.raises(NpuserveError, match="sam"):
            await server.load_model("m")


def one_sample(inputs: str, batch_size: int = 1) -> str:
    return f'model_warmup {{ name: "sam" batch_size: {batch_size} {inputs} }}'


def of(name: str, data_type: str = "TYPE_FP32", dims: int = 2) -> str:
    value = f"data_type: {data_type} dims: {dims} zero_data: true"
    return f'inputs {{ key: "{name}" value {{ {value} }} }}'


@pytest.mark.parametrize(
    ("warmup", "text"),
    [
        (
            one_sample(of("X", "TYPE_INT32")),
            "input 'X' data-type is 'INT32', but model 'm' expects",
        ),
        (
            one_sample(of("X", dims=3)),
            "unexpected shape for input 'X' for model 'm'. Expected [-1,2",
        ),
        (one_sample(of("Q")), "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) []"),
        (one_sample(""), "expected 1 inputs but got 0 inputs for model 'm'. Got input(s) []"),
        (one_sample(of("X"), 9), "failed to run warmup sample 'sam': batch size 9 for 'm', max"),
    ],
)
async def test_a_sample_is_checked_like_a_request(tmp_path: Path, warmup: str, text: str) -> None:
    """With Triton's words, and where in the file it is."""
    write_model(tmp_path, "m", warmup)
    async with serve(tmp_path) as server:
        (entry,) = await server.repository_index()
    assert entry.reason.startswith("Invalid argument: ")
    assert text in entry.reason
    assert "config.pbtxt:" in entry.reason
    assert ": model_warmup[0])" in entry.reason


async def test_what_is_no_input_reaches_the_model_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls and states of a sequence have no batch dimension put in front."""
    seen: dict[str, list[int]] = {}

    def execute(instance: IdentityInstance, batch: ExecutionBatch) -> None:
        for request in batch.requests:
            seen.update({tensor.name: list(tensor.shape) for tensor in request.inputs.values()})
            batch.send(request, InferenceResponse([]))

    monkeypatch.setattr(IdentityInstance, "execute", execute)
    write_model(tmp_path, "m", one_sample(of("X") + of("START", dims=1)))
    async with serve(tmp_path) as server:
        assert await server.model_ready("m")
    assert seen == {"X": [1, 2], "START": [1]}


async def test_a_model_that_fails_says_so_for_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of Triton 2.51 in the index and, around it, as the load's answer."""

    def execute(instance: IdentityInstance, batch: ExecutionBatch) -> None:
        for request in batch.requests:
            batch.send(request, InferenceResponse.from_error(UnavailableError("boo")))

    monkeypatch.setattr(IdentityInstance, "execute", execute)
    write_model(tmp_path, "m", one_sample(of("X"), batch_size=2))
    async with serve(tmp_path) as server:
        (entry,) = await server.repository_index()
        assert entry.reason == "Invalid argument: failed to run warmup sample 'sam': boo; boo; "
        with pytest.raises(InvalidArgumentError) as caught:
            await server.load_model("m")
        assert str(caught.value) == (
            f"load failed for model 'm': version 1 is at UNAVAILABLE state: {entry.reason};\n"
        )


async def test_a_load_may_be_given_up_while_a_sample_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sample ends for nobody, without a word."""
    write_model(tmp_path, "m", WARMUP)
    async with serve(tmp_path, load_model=()) as server:
        loop, goes_on, started = server.loop, threading.Event(), asyncio.Event()

        def execute(instance: IdentityInstance, batch: ExecutionBatch) -> None:
            loop.call_soon_threadsafe(started.set)
            assert goes_on.wait(5)
            for request in batch.requests:
                batch.send(request, InferenceResponse([]))

        monkeypatch.setattr(IdentityInstance, "execute", execute)
        async with asyncio.TaskGroup() as group:
            load = group.create_task(server.load_model("m"))
            await started.wait()
            load.cancel()
            loop.call_soon(goes_on.set)
        assert load.cancelled()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP16", "FP32", "FP64", "BF16"])
def test_random_data_has_the_right_size_and_values(datatype: str, tmp_path: Path) -> None:
    """Numbers of every type, as many as the dims say; truth values are 0 or 1."""
    (tensor,) = sample(f"data_type: TYPE_{datatype} dims: [ 3, 50 ] random_data: true", tmp_path)
    array = tensor.as_numpy()
    assert array.shape == (3, 50)
    assert len(np.unique(array)) > 1
    if datatype == "BOOL":
        assert set(bytes(tensor.data)) == {0, 1}


def test_text_is_zeroes_and_zero_text_is_empty(tmp_path: Path) -> None:
    """For TYPE_STRING both kinds of data give empty strings, with the batch dimension in front."""
    for kind in ("zero_data", "random_data"):
        (tensor,) = sample(f"data_type: TYPE_STRING dims: 2 {kind}: true", tmp_path, batching=True)
        assert tensor.as_numpy().tolist() == [[b"", b""]]


def test_files_hold_raw_bytes(tmp_path: Path) -> None:
    """The file's bytes are the tensor; text is length-prefixed in bytes, not in characters."""
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "f").write_bytes(np.arange(3, dtype=np.float32).tobytes())
    (tensor,) = sample('data_type: TYPE_FP32 dims: 3 input_data_file: "f"', tmp_path)
    assert tensor.as_numpy().tolist() == [0, 1, 2]
    text = "昇腾".encode()
    (tmp_path / "warmup" / "t").write_bytes(len(text).to_bytes(4, "little") + text)
    (tensor,) = sample('data_type: TYPE_STRING dims: 1 input_data_file: "t"', tmp_path)
    assert tensor.as_numpy().tolist() == [text]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("data_type: TYPE_FP32 dims: -1 zero_data: true", "all variable-size dimensions are spec"),
        ("data_type: TYPE_FP32 dims: 1", "expects input 'I' to have input_data_type set"),
        (
            'data_type: TYPE_FP32 dims: 9 input_data_file: "f"',
            "warmup setting expects 36 bytes, but the data provided from fonly has 5 bytes",
        ),
        ('data_type: TYPE_STRING dims: 1 input_data_file: "f"', "warmup sample 's', f: incomplete"),
        ('data_type: TYPE_FP32 dims: 9 input_data_file: "no"', "sample 's' from no: No such file"),
    ],
)
def test_samples_that_cannot_be_made(inputs: str, message: str, tmp_path: Path) -> None:
    """Each error says what is wrong with which sample or input."""
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "f").write_bytes(b"\2\0\0\0a")
    arguments: Any = (inputs, tmp_path)
    with pytest.raises(InvalidArgumentError, match=message):
        sample(*arguments)
