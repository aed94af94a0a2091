"""Whole servers with NPU models on the simulator, through stock clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from npuserve.testing.serve import serve
from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.faults import Fault
from npuserve.testing.simulator.runtime import Runtime
from tests.backends.npu_models import affine, batch_om, compile_om

X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def machine() -> Iterator[Runtime]:
    """Two cards; nothing may be left when the server has ended."""
    with simulate(cards=2) as runtime:
        yield runtime
        assert runtime.leaks() + runtime.violations == []


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """`affine` as an om model with the shortest configuration, and a CPU model."""
    write_config(batch_om(tmp_path / "om"), 'backend: "om"')
    write_config(affine(tmp_path / "cpu", ["n", 3]), 'backend: "onnxruntime"', "KIND_CPU")
    return tmp_path


def write_config(model_dir: Path, text: str, kind: str = "") -> None:
    group = f"instance_group {{ kind: {kind} }}" if kind else ""
    (model_dir / "config.pbtxt").write_text(f"{text}\n{group}\n")


def client_of(server: Any) -> tritonclient.http.InferenceServerClient:
    return tritonclient.http.InferenceServerClient(server.http_url)


def infer(client: tritonclient.http.InferenceServerClient, model: str, x: Any = X) -> Any:
    tensor = tritonclient.http.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    return client.infer(model, [tensor]).as_numpy("y")


def reason_of(client: tritonclient.http.InferenceServerClient, model: str) -> str:
    (entry,) = (e for e in client.get_model_repository_index() if e["name"] == model)
    return str(entry.get("reason", ""))


def test_a_model_without_instance_group_gets_every_card(repository: Path, machine: Runtime) -> None:
    """One instance a card, both used, and the right numbers."""
    with serve(repository) as server, client_of(server) as client:
        (group,) = client.get_model_config("om")["instance_group"]
        assert (group["kind"], group["gpus"]) == ("KIND_GPU", [0, 1])
        for _ in range(4):
            np.testing.assert_array_equal(infer(client, "om"), 2 * X + 1)
        assert all(card.trace for card in machine.cards)


@pytest.mark.parametrize(
    "call", ["acl.init", "acl.rt.create_context", "acl.mdl.load_from_file", "acl.rt.malloc"]
)
def test_a_failed_load_leaves_a_living_server(
    repository: Path, machine: Runtime, call: str
) -> None:
    """The index shows the call, other models are served, and the next load works."""
    machine.faults.append(Fault(call, code=500000, count=1 if call == "acl.init" else 99))
    options = {"exit_on_error": False, "model_control_mode": "explicit"}
    with serve(repository, **options) as server, client_of(server) as client:
        client.load_model("cpu")
        with pytest.raises(InferenceServerException, match="load failed"):
            client.load_model("om")
        assert call in reason_of(client, "om")
        np.testing.assert_array_equal(infer(client, "cpu"), 2 * X + 1)
        machine.faults.clear()
        client.load_model("om")
        np.testing.assert_array_equal(infer(client, "om"), 2 * X + 1)


def test_a_failed_execution_is_one_error(repository: Path, machine: Runtime) -> None:
    """A device exception: this request fails, the model is loaded anew, the next one is served."""
    with serve(repository) as server, client_of(server) as client:
        machine.faults.append(Fault("acl.mdl.execute_async", code=507015))
        with pytest.raises(InferenceServerException, match="507015"):
            infer(client, "om")
        for _ in range(2):
            np.testing.assert_array_equal(infer(client, "om"), 2 * X + 1)


def test_a_shape_without_a_gear_is_the_clients_mistake(tmp_path: Path, machine: Runtime) -> None:
    """Status 400, and the shapes there are."""
    model = affine(tmp_path / "om", [1, 1, "h", "w"])
    compile_om(model, "--input_shape=x:1,1,-1,-1", "--dynamic_image_size=8,8;16,16")
    write_config(model, 'backend: "om"')
    with serve(tmp_path) as server, client_of(server) as client:
        with pytest.raises(InferenceServerException) as caught:
            infer(client, "om", np.zeros((1, 1, 20, 8), np.float32))
        assert caught.value.status() == "400"
        assert "[1, 1, 16, 16]" in str(caught.value)


def test_a_card_that_is_not_there_is_named(tmp_path: Path, machine: Runtime) -> None:
    """With the cards that are."""
    text = 'backend: "om" instance_group { kind: KIND_NPU gpus: 7 }'
    write_config(batch_om(tmp_path / "om"), text)
    with serve(tmp_path, exit_on_error=False) as server, client_of(server) as client:
        reason = reason_of(client, "om")
        assert "7" in reason
        assert "0, 1" in reason


def test_metrics_have_the_cards(repository: Path, machine: Runtime) -> None:
    """Under the names of GPUs and of NPUs."""
    text = ""
    with serve(repository) as server:
        deadline = time.monotonic() + 10  # the first reading takes as long as npu-smi does
        while "nv_npu_memory_used_bytes{" not in text and time.monotonic() < deadline:
            with urlopen(server.metrics_url) as response:
                text = response.read().decode()
        assert 'nv_gpu_utilization{gpu_uuid="NPU-0000:C0:00.0"}' in text
        assert 'nv_npu_memory_used_bytes{npu_uuid="NPU-0000:C1:00.0"}' in text


def test_a_repository_for_npus_on_an_ordinary_machine(tmp_path: Path) -> None:
    """NPU models are unavailable and say why; the CPU model is served."""
    write_config(batch_om(tmp_path / "om"), 'backend: "om"', "KIND_CPU")
    write_config(affine(tmp_path / "ge", ["n", 3]), 'backend: "npu_ge"', "KIND_CPU")
    write_config(affine(tmp_path / "cpu", ["n", 3]), 'backend: "onnxruntime"')
    with serve(tmp_path, exit_on_error=False) as server, client_of(server) as client:
        assert "'acl'" in reason_of(client, "om")
        assert "npu_ge" in reason_of(client, "ge")
        np.testing.assert_array_equal(infer(client, "cpu"), 2 * X + 1)
