"""The servers that tests run against."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from npuserve.errors import InternalError
from npuserve.testing.serve import serve, serve_process

IDENTITY = """
backend: "identity" max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 2 }
output { name: "OUT" data_type: TYPE_FP32 dims: 2 }
"""

SHOUT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]

    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0].decode()
            answer = np.array([f"{self.name}: {text.upper()}".encode()], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", answer)]))
        return responses
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model, `echo`."""
    (tmp_path / "echo" / "1").mkdir(parents=True)
    (tmp_path / "echo" / "config.pbtxt").write_text(IDENTITY)
    return tmp_path


def test_it_is_ready_on_entry_and_gone_on_exit(repository: Path) -> None:
    """All three services answer at once; afterwards nothing listens."""
    with serve(repository) as server:
        assert httpx.get(f"http://{server.http_url}/v2/health/ready").status_code == 200
        assert "nv_inference_count" in httpx.get(server.metrics_url).text
        assert server.grpc_port
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://{server.http_url}/v2/health/live")


def test_options_are_those_of_the_server(repository: Path) -> None:
    """A service that is switched off has port 0."""
    with serve(repository, allow_grpc=False, allow_metrics=False) as server:
        assert (server.grpc_port, server.metrics_port) == (0, 0)


def test_a_model_that_does_not_load_is_an_error(repository: Path) -> None:
    """The error holds the reason; with exit_on_error=False the others are served."""
    (repository / "bad" / "1").mkdir(parents=True)
    (repository / "bad" / "config.pbtxt").write_text('backend: "no_such_backend"')
    with pytest.raises(InternalError, match="no_such_backend"), serve(repository):
        pass
    with serve(repository, exit_on_error=False) as server:
        url = f"http://{server.http_url}/v2/models"
        assert httpx.get(f"{url}/echo/ready").status_code == 200
        assert httpx.get(f"{url}/bad/ready").status_code != 200


def test_a_process_of_its_own(repository: Path) -> None:
    """The command line listens where it says it does, and stops with code 0."""
    with serve_process(repository) as server:
        assert httpx.get(f"http://{server.http_url}/v2/models/echo/ready").status_code == 200
        assert httpx.get(server.metrics_url).status_code == 200
    assert server.process.returncode == 0


def test_a_process_without_metrics_and_grpc(repository: Path) -> None:
    """It is ready when the services that are left listen."""
    flags = ["--allow-metrics=false", "--allow-grpc=false"]
    with serve_process(repository, flags=flags) as server:
        assert httpx.get(f"http://{server.http_url}/v2/health/ready").status_code == 200
        assert (server.grpc_port, server.metrics_port) == (0, 0)


def test_a_process_that_cannot_start_shows_its_log(repository: Path) -> None:
    """The error is in the text."""
    flags = ["--no-such-flag=1"]
    with pytest.raises(InternalError, match="no-such-flag"), serve_process(repository, flags=flags):
        pass


def test_a_process_that_is_killed_is_an_error(repository: Path) -> None:
    """A server that dies under a test fails it."""
    running = serve_process(repository)
    server = running.__enter__()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    with pytest.raises(InternalError, match="code -9"):
        running.__exit__(None, None, None)


def test_a_backend_written_in_python(tmp_path: Path) -> None:
    """`--backend-directory` holds `<name>/model.py`; its models bring no file of their own."""
    backend = tmp_path / "backends" / "shout" / "model.py"
    backend.parent.mkdir(parents=True)
    backend.write_text(SHOUT)
    for name in ("one", "two"):
        (tmp_path / "repository" / name / "1").mkdir(parents=True)
        (tmp_path / "repository" / name / "config.pbtxt").write_text(
            """
            backend: "shout"
            input { name: "IN" data_type: TYPE_STRING dims: 1 }
            output { name: "OUT" data_type: TYPE_STRING dims: 1 }
            """
        )
    body = {"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1], "data": ["hello"]}]}
    directory = str(tmp_path / "backends")
    with serve(tmp_path / "repository", backend_directory=directory) as server:
        for name in ("one", "two"):
            reply = httpx.post(f"http://{server.http_url}/v2/models/{name}/infer", json=body)
            assert reply.json()["outputs"][0]["data"] == [f"{name}: HELLO"]
