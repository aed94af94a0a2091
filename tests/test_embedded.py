"""The server inside a Python program."""

from __future__ import annotations

import asyncio
import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pytest

import npuserve
from npuserve.errors import InternalError, InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADD = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            responses = []
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
                out = pb_utils.Tensor("Y", x + 1)
                responses.append(pb_utils.InferenceResponse([out]))
            return responses
"""

COUNT = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                n = int(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()[0])
                for i in range(n):
                    tensor = pb_utils.Tensor("Y", np.array([i], np.float32))
                    sender.send(pb_utils.InferenceResponse([tensor]))
                if n == 0:
                    error = pb_utils.TritonError("nothing to count")
                    sender.send(pb_utils.InferenceResponse(error=error))
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

CONFIG = """
backend: "python"
max_batch_size: {batch}
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
parameters {{ key: "execution" value {{ string_value: "thread" }} }}
{more}
"""


def write(root: Path, name: str, code: str, batch: int, more: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(CONFIG.format(batch=batch, more=more))
    (root / name / "1" / "model.py").write_text(textwrap.dedent(code))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[npuserve.Server]:
    root = tmp_path_factory.mktemp("repository")
    write(root, "add", ADD, 4)
    write(root, "count", COUNT, 0, "model_transaction_policy { decoupled: true }")
    with npuserve.Server(root, model_control_mode="explicit", load_model=("*",)) as running:
        yield running


def test_infer_takes_and_gives_arrays(server: npuserve.Server) -> None:
    """Lists and arrays are converted to the configured datatype."""
    result = server.infer("add", {"X": [[1], [2]]})
    np.testing.assert_array_equal(result["Y"], np.array([[2], [3]], np.float32))
    assert (result.model_name, result.model_version, result.datatypes) == (
        "add",
        "1",
        {"Y": "FP32"},
    )


async def test_infer_can_be_awaited_many_at_a_time(server: npuserve.Server) -> None:
    """Each caller gets its own answer."""
    results = await asyncio.gather(
        *(server.async_infer("add", {"X": np.full((1, 1), i, np.float32)}) for i in range(50))
    )
    assert [int(result["Y"][0, 0]) for result in results] == list(range(1, 51))


def test_a_refused_request_raises_its_error(server: npuserve.Server) -> None:
    """The exceptions are the server's own, with its texts."""
    with pytest.raises(NotFoundError, match="'ghost' is not found"):
        server.infer("ghost", {})
    with pytest.raises(InvalidArgumentError, match="batch-size must be <= 4"):
        server.infer("add", {"X": np.zeros((5, 1), np.float32)})


def test_responses_of_a_decoupled_model_are_iterated(server: npuserve.Server) -> None:
    """One result per response, in order, then the end."""
    values = [int(result["Y"][0]) for result in server.stream("count", {"X": [3]})]
    assert values == [0, 1, 2]


async def test_responses_can_be_iterated_asynchronously(server: npuserve.Server) -> None:
    """`async for` gives the same."""
    values = [int(result["Y"][0]) async for result in server.stream("count", {"X": [3]})]
    assert values == [0, 1, 2]


def test_an_error_response_is_raised_at_its_place(server: npuserve.Server) -> None:
    """Iterating a stream that ends in an error raises it."""
    with pytest.raises(InternalError, match="nothing to count"):
        list(server.stream("count", {"X": [0]}))


def test_views_show_what_the_endpoints_show(server: npuserve.Server) -> None:
    """Metadata, configuration, statistics, index and metrics speak of the same model."""
    server.infer("add", {"X": [[1]]})
    assert server.ready()
    assert server.model_ready("add")
    assert server.server_metadata().name == "triton"
    assert server.model_metadata("add").inputs[0].shape == [-1, 1]
    assert server.model_config("add")["max_batch_size"] == 4
    assert server.statistics("add")["model_stats"][0]["inference_stats"]["success"]["count"] >= 1
    assert {row.name for row in server.repository_index()} == {"add", "count"}
    assert 'nv_inference_request_success{model="add",version="1"}' in server.metrics()


def test_models_are_loaded_and_unloaded(server: npuserve.Server) -> None:
    """Model control works without a network too."""
    server.unload_model("add")
    assert not server.model_ready("add")
    server.load_model("add")
    assert server.model_ready("add")


def test_a_failing_start_says_why(tmp_path: Path) -> None:
    """The constructor raises the reason, and nothing keeps running."""
    write(tmp_path, "bad", "import no_such_module_at_all", 0)
    with pytest.raises(InternalError, match="no_such_module_at_all"):
        npuserve.Server(tmp_path)
