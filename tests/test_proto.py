"""The protocol messages live beside tritonclient's, whoever is imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest

OURS = "from npuserve._proto import grpc_service_pb2, health_pb2, model_config_pb2"
THEIRS = "import tritonclient.grpc; from tritonclient.grpc import service_pb2"

CHECK = """
ours = grpc_service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"x"])
ours.parameters["k"].int64_param = 3
theirs = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
assert theirs.model_name == "m" and theirs.parameters["k"].int64_param == 3
assert theirs.SerializeToString(deterministic=True) == ours.SerializeToString(deterministic=True)
assert health_pb2.HealthCheckResponse.SERVING == 1 and model_config_pb2.TYPE_FP32 == 11
"""


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["first", "second"])
def test_both_sets_of_messages_live_in_one_process(order: tuple[str, str]) -> None:
    """Our messages and tritonclient's can be imported in either order and speak one wire."""
    script = "\n".join([*order, CHECK])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_committed_descriptors_are_what_protoc_makes_of_the_sources() -> None:
    """A change of a .proto file comes with a regenerated descriptor set."""
    from pathlib import Path

    from npuserve._proto import pool

    folder = Path(pool.__file__).parent
    root = folder.parent.parent
    compiled = subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{root}",
            "--include_imports",
            "--descriptor_set_out=/dev/stdout",
            *(str(folder / f"{name}.proto") for name in ("model_config", "grpc_service", "health")),
        ],
        capture_output=True,
        check=True,
    )
    assert compiled.stdout == (folder / "descriptor_set.binpb").read_bytes()
