"""Sequences and ensembles in a whole server, with real python models in worker processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from npuserve.errors import NpuserveError
from npuserve.options import ServerOptions
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.core import InferenceServer
from npuserve.tensor import Tensor
from tests.backends import onnx_models

PYTHON_HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils

def get(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()

def respond(**outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(n, v) for n, v in outputs.items()])
"""

STATEFUL_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "SUM" data_type: TYPE_INT32 dims: 1 }
output { name: "LOG" data_type: TYPE_STRING dims: 1 }
instance_group { kind: KIND_CPU }
sequence_batching {
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
  state { input_name: "TOTAL_IN" output_name: "TOTAL_OUT" data_type: TYPE_INT32 dims: 1
          initial_state { name: "i" data_type: TYPE_INT32 dims: 1 data_file: "hundred" } }
  state { input_name: "LOG_IN" output_name: "LOG_OUT" data_type: TYPE_STRING dims: 1 }
  state { input_name: "ALL_IN" output_name: "ALL_OUT" data_type: TYPE_INT32 dims: -1 }
}
"""

STATEFUL_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.step(request) for request in requests]

    def step(self, request):
        value = get(request, "IN")
        total = get(request, "TOTAL_IN") + value
        log = get(request, "LOG_IN").item() + b" " + str(value.item()).encode()
        every = np.concatenate([get(request, "ALL_IN"), value], axis=1)
        if value.item() < 0:
            every = every.reshape(-1)
        shown = get(request, "ID").item() + b":" + log + b" " + str(every.size).encode()
        text = lambda content: np.array([[content]], dtype=object)
        return respond(SUM=total, LOG=text(shown), TOTAL_OUT=total, LOG_OUT=text(log),
                       ALL_OUT=every)
"""

MORTAL_CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "PID" data_type: TYPE_INT64 dims: 1 }
instance_group { kind: KIND_CPU count: 2 }
sequence_batching { direct { } }
"""

MORTAL_MODEL = """
import os
import time

class TritonPythonModel:
    def execute(self, requests):
        if get(requests[0], "IN").item() < 0:
            os._exit(3)
        return [respond(PID=np.array([os.getpid()])) for _ in requests]
"""

COUNTDOWN_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
instance_group { kind: KIND_CPU }
model_transaction_policy { decoupled: true }
sequence_batching {
  iterative_sequence: true
  state { input_name: "LEFT_IN" output_name: "LEFT_OUT" data_type: TYPE_INT32 dims: 1 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
}
"""

COUNTDOWN_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            start = get(request, "START").item()
            left = get(request, "IN") if start else get(request, "LEFT_IN") - 1
            sender = request.get_response_sender()
            sender.send(respond(OUT=left, LEFT_OUT=left))
            if left.item() > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

ADD_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_INT32 dims: 1 }
input { name: "Y" data_type: TYPE_INT32 dims: 1 }
output { name: "Z" data_type: TYPE_INT32 dims: 1 }
instance_group { kind: KIND_CPU }
parameters { key: "execution" value { string_value: "thread" } }
dynamic_batching { }
"""

ADD_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        return [respond(Z=get(r, "X") + get(r, "Y")) for r in requests]
"""


def write_model(root: Path, name: str, config: str, model: str = "") -> None:
    version = root / name / "1"
    version.mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    if model:
        (version / "model.py").write_text(PYTHON_HEAD + model)


class Stream:
    """The answers to one request, one after the other."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[tuple[InferenceResponse | None, bool]] = asyncio.Queue()
        self._final = False

    def on_response(self, response: InferenceResponse | None, final: bool) -> None:
        self._answers.put_nowait((response, final))

    async def all(self) -> list[dict[str, Any]]:
        """Values of every response; an error is raised."""
        found = []
        final = False
        while not final:
            response, final = await self._answers.get()
            if response is None:
                continue
            if response.error is not None:
                raise response.error
            found.append({each.name: each.as_numpy().reshape(-1)[0] for each in response.outputs})
        return found

    async def arrays(self) -> dict[str, NDArray[Any]]:
        """The whole outputs of the only response."""
        response, final = await self._answers.get()
        assert response is not None
        assert final
        if response.error is not None:
            raise response.error
        return {each.name: each.as_numpy() for each in response.outputs}


def send(
    server: InferenceServer,
    model: str,
    inputs: dict[str, NDArray[Any]],
    correlation_id: int | str = 0,
    flags: int = 0,
    outputs: tuple[str, ...] = (),
) -> Stream:
    stream = Stream()
    tensors = {name: Tensor.from_numpy(name, array) for name, array in inputs.items()}
    server.infer(
        InferenceRequest(
            model,
            tensors,
            stream.on_response,
            correlation_id=correlation_id,
            flags=flags,
            requested_outputs=outputs,
        )
    )
    return stream


def number(value: int, batched: bool = True) -> NDArray[np.int32]:
    return np.full((1, 1) if batched else (1,), value, np.int32)


def serve(root: Path) -> InferenceServer:
    return InferenceServer(ServerOptions(model_repository=(str(root),)))


async def test_implicit_state_works_with_the_python_backend(tmp_path: Path) -> None:
    """Several states, from a file, from zeros, of growing shape, with a text id."""
    write_model(tmp_path, "m", STATEFUL_CONFIG, STATEFUL_MODEL)
    (tmp_path / "m" / "initial_state").mkdir()
    (tmp_path / "m" / "initial_state" / "hundred").write_bytes(np.int32(100).tobytes())
    async with serve(tmp_path) as server:

        async def run(name: str) -> list[tuple[int, bytes]]:
            seen = []
            for value, flags in ((1, SEQUENCE_START), (2, 0), (3, SEQUENCE_END)):
                (got,) = await send(server, "m", {"IN": number(value)}, name, flags).all()
                assert set(got) == {"SUM", "LOG"}
                seen.append((int(got["SUM"]), got["LOG"]))
            return seen

        both = await asyncio.gather(run("甲"), run("b"))
        for name, seen in zip(("甲", "b"), both, strict=True):
            prefix = name.encode() + b":"
            assert seen == [
                (101, prefix + b" 1 2"),
                (103, prefix + b" 1 2 3"),
                (106, prefix + b" 1 2 3 4"),
            ]


async def test_implicit_state_works_with_onnxruntime(tmp_path: Path) -> None:
    """Sequences share executions and keep their states apart, fillers included."""
    node, value = onnx.helper.make_node, onnx_models.value
    shape: onnx_models.Shape = ("batch", 1)
    onnx_models.save(
        tmp_path / "m",
        [
            node("Add", ["IN", "S_IN"], ["OUT"]),
            node("Identity", ["OUT"], ["S_OUT"]),
        ],
        [value(name, onnx.TensorProto.INT32, shape) for name in ("IN", "S_IN")],
        [value(name, onnx.TensorProto.INT32, shape) for name in ("OUT", "S_OUT")],
    )
    (tmp_path / "m" / "config.pbtxt").write_text(
        """platform: "onnxruntime_onnx" max_batch_size: 4
        instance_group { kind: KIND_CPU count: 1 }
        sequence_batching {
          state { input_name: "S_IN" output_name: "S_OUT" data_type: TYPE_INT32 dims: 1 } }"""
    )
    async with serve(tmp_path) as server:

        async def run(name: str) -> list[int]:
            seen = []
            for value, flags in ((1, SEQUENCE_START), (2, 0), (3, SEQUENCE_END)):
                (got,) = await send(server, "m", {"IN": number(value)}, name, flags).all()
                seen.append(int(got["OUT"]))
            return seen

        assert await asyncio.gather(*(run(str(n)) for n in range(9))) == [[1, 3, 6]] * 9
        statistics = server.model("m").statistics
        assert statistics.execution_count < statistics.inference_count == 27


async def test_a_state_of_the_wrong_shape_fails_one_request(tmp_path: Path) -> None:
    """Its text names state and shapes; the sequence goes on with the state before."""
    write_model(tmp_path, "m", STATEFUL_CONFIG, STATEFUL_MODEL)
    (tmp_path / "m" / "initial_state").mkdir()
    (tmp_path / "m" / "initial_state" / "hundred").write_bytes(np.int32(100).tobytes())
    async with serve(tmp_path) as server:
        await send(server, "m", {"IN": number(1)}, "a", SEQUENCE_START).all()
        with pytest.raises(NpuserveError, match="unexpected shape for state 'ALL_OUT'"):
            await send(server, "m", {"IN": number(-1)}, "a").all()
        (got,) = await send(server, "m", {"IN": number(5)}, "a", outputs=("SUM",)).all()
        assert got == {"SUM": 106}
        assert server.model("m").statistics.failures["BACKEND"] == 1


async def test_a_dead_worker_ends_its_own_sequences_only(tmp_path: Path) -> None:
    """The sequence of the other instance goes on; the lost one has to start again."""
    write_model(tmp_path, "m", MORTAL_CONFIG, MORTAL_MODEL)
    async with serve(tmp_path) as server:

        def step(name: str, value: int, flags: int = 0) -> Stream:
            return send(server, "m", {"IN": number(value, batched=False)}, name, flags)

        first, other = step("a", 1, SEQUENCE_START), step("b", 1, SEQUENCE_START)
        (one,), (two,) = await first.all(), await other.all()
        assert one["PID"] != two["PID"]
        fatal, behind = step("a", -1), step("a", 1)
        with pytest.raises(NpuserveError):
            await fatal.all()
        with pytest.raises(NpuserveError, match="sequence a of model 'm' is lost"):
            await behind.all()
        with pytest.raises(NpuserveError, match="must specify the START flag"):
            step("a", 1)
        assert await step("b", 1).all() == [two]
        (again,) = await step("a", 1, SEQUENCE_START).all()
        assert again["PID"] not in (one["PID"], two["PID"])


async def test_iterative_sequences_share_executions(tmp_path: Path) -> None:
    """Requests that come later join; each counts down on its own, with state in the server."""
    write_model(tmp_path, "m", COUNTDOWN_CONFIG, COUNTDOWN_MODEL)
    async with serve(tmp_path) as server:
        streams = [send(server, "m", {"IN": number(value)}) for value in (5, 2, 7, 0, 3, 4)]
        got = [[int(each["OUT"]) for each in await stream.all()] for stream in streams]
        assert got == [list(range(value, -1, -1)) for value in (5, 2, 7, 0, 3, 4)]
        statistics = server.model("m").statistics
        assert statistics.execution_count < sum(len(each) for each in got)
        assert statistics.pending == 0


def add_step(x: str, y: str, z: str, model: str = "add") -> str:
    pairs = (("input_map", "X", x), ("input_map", "Y", y), ("output_map", "Z", z))
    maps = " ".join(f'{kind} {{ key: "{key}" value: "{value}" }}' for kind, key, value in pairs)
    return f'step {{ model_name: "{model}" model_version: -1 {maps} }}\n'


def ensemble(*steps: str) -> str:
    return (
        'platform: "ensemble" max_batch_size: 8\n'
        + "".join(f'input {{ name: "{n}" data_type: TYPE_INT32 dims: 1 }}\n' for n in "XY")
        + 'output { name: "Z" data_type: TYPE_INT32 dims: 1 }\n'
        + f"ensemble_scheduling {{ {''.join(steps)} }}\n"
    )


async def test_seven_steps_in_three_levels_of_ensembles(tmp_path: Path) -> None:
    """Linear in the number of requests, and nothing is left in flight afterwards."""
    write_model(tmp_path, "add", ADD_CONFIG, ADD_MODEL)
    inner = ensemble(add_step("X", "Y", "t"), add_step("t", "Y", "Z"))  # x + 2y
    middle = ensemble(  # (x + 2y) + 2(x + y) = 3x + 4y
        add_step("X", "Y", "p", "inner"), add_step("X", "Y", "q"), add_step("p", "q", "Z", "inner")
    )
    outer = ensemble(add_step("X", "Y", "r", "middle"), add_step("r", "X", "Z"))  # 4x + 4y
    for name, text in (("inner", inner), ("middle", middle), ("outer", outer)):
        write_model(tmp_path, name, text)
    async with serve(tmp_path) as server:
        streams = [send(server, "outer", {"X": number(x), "Y": number(x * 10)}) for x in range(64)]
        got = [(await stream.all())[0]["Z"] for stream in streams]
        assert got == [4 * x + 40 * x for x in range(64)]
        counts = {m.name: m.statistics.execution_count for m in server.models}
        assert counts["outer"] == 64
        outer_statistics = server.model("outer").statistics
        assert outer_statistics.compute_infer.ns > server.model("inner").statistics.compute_infer.ns
        assert counts["add"] < 6 * 64, "steps of different requests share executions"
        assert all(m.inflight == m.statistics.pending == 0 for m in server.models)


BIG_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_INT32 dims: -1 }
output { name: "Y" data_type: TYPE_INT32 dims: -1 }
instance_group { kind: KIND_CPU }
"""

BIG_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = get(request, "X")
            x += 1  # in place
            answers.append(respond(Y=x * 2))
        return answers
"""

BIG_ENSEMBLE = """
platform: "ensemble"
input { name: "A" data_type: TYPE_INT32 dims: -1 }
output { name: "LINE" data_type: TYPE_INT32 dims: -1 }
output { name: "MID" data_type: TYPE_INT32 dims: -1 }
output { name: "SIDE" data_type: TYPE_INT32 dims: -1 }
ensemble_scheduling {
  step { model_name: "one" model_version: -1
         input_map { key: "X" value: "A" } output_map { key: "Y" value: "MID" } }
  step { model_name: "two" model_version: -1
         input_map { key: "X" value: "MID" } output_map { key: "Y" value: "LINE" } }
  step { model_name: "three" model_version: -1
         input_map { key: "X" value: "A" } output_map { key: "Y" value: "SIDE" } }
}
"""


async def test_large_tensors_go_from_worker_to_worker_without_a_copy(tmp_path: Path) -> None:
    """And models that write to their inputs do not disturb each other where they share one."""
    for name in ("one", "two", "three"):
        write_model(tmp_path, name, BIG_CONFIG, BIG_MODEL)
    write_model(tmp_path, "e", BIG_ENSEMBLE)
    async with serve(tmp_path) as server:
        pool = server.buffer_pool
        leases: list[int] = []
        lease = pool.lease

        def counted(size: int) -> memoryview:
            leases.append(size)
            return lease(size)

        pool.lease = counted  # type: ignore[method-assign]
        value = np.arange(200_000, dtype=np.int32)

        async def run(*outputs: str) -> dict[str, NDArray[Any]]:
            data = lease(value.nbytes)  # as a large request body is received
            data[:] = value.tobytes()
            leases.clear()
            stream = Stream()
            server.infer(
                InferenceRequest(
                    "e",
                    {"A": Tensor("A", "INT32", value.shape, data)},
                    stream.on_response,
                    requested_outputs=outputs,
                )
            )
            return await stream.arrays()

        got = await run("LINE")
        assert (got["LINE"] == ((value + 1) * 2 + 1) * 2).all()
        assert leases == []
        got = await run()
        assert (got["LINE"] == ((value + 1) * 2 + 1) * 2).all()
        assert (got["MID"] == (value + 1) * 2).all()
        assert (got["SIDE"] == (value + 1) * 2).all()
