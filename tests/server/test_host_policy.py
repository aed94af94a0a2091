"""On which cores the instances of a policy run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from npuserve.errors import InvalidArgumentError
from npuserve.options import ServerOptions
from npuserve.server.core import InferenceServer
from npuserve.server.host_policy import policy_cores
from tests.server.lifecycle_driver import infer

MINE = sorted(os.sched_getaffinity(0))


def test_cores_are_single_numbers_and_ranges() -> None:
    """As `--host-policy=p,cpu-cores=0-3,8` says them."""
    text = ",".join(f"{core}-{core}" for core in MINE[:-1]) or str(MINE[0])
    assert policy_cores("p", {"cpu-cores": f"{text},{MINE[-1]}"}) == frozenset(MINE)


def test_a_numa_node_stands_for_its_cores(tmp_path: Path) -> None:
    """Named cores win over the node."""
    (tmp_path / "node3").mkdir()
    (tmp_path / "node3" / "cpulist").write_text(f"{MINE[0]}\n")
    assert policy_cores("p", {"numa-node": "3"}, tmp_path) == {MINE[0]}
    settings = {"numa-node": "3", "cpu-cores": str(MINE[-1])}
    assert policy_cores("p", settings, tmp_path) == {MINE[-1]}


def test_a_policy_without_settings_may_use_all() -> None:
    """The usual case."""
    assert policy_cores("cpu", {}) == frozenset()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"cpu-cores": "x"}, "cores are written as '0-3,8', got 'x'"),
        ({"cpu-cores": "1-"}, "cores are written as"),
        ({"cpu-cores": ""}, "cores are written as"),
        ({"cpu-cores": "3-1"}, "no core in '3-1'"),
        ({"cpu-cores": "4000"}, "names cores that this process may not use: 4000"),
        ({"numa-node": "x"}, "NUMA node 'x' is no number"),
        ({"numa-node": "77"}, "this machine has no NUMA node 77"),
        ({"cores": "1"}, "unknown setting 'cores' of host policy 'p'"),
    ],
)
def test_what_the_machine_has_not_is_refused(settings: dict[str, str], text: str) -> None:
    """With the policy and what is wrong with it."""
    with pytest.raises(InvalidArgumentError, match=text):
        policy_cores("p", settings)


MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        cores = np.array([sorted(os.sched_getaffinity(0))], dtype=np.int32)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("CORES", cores)]) for _ in requests
        ]
"""


@pytest.mark.parametrize("execution", ["process", "thread"])
async def test_instances_run_on_the_cores_of_their_policy(tmp_path: Path, execution: str) -> None:
    """Named in the group; the rest of the server is not confined."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
    (tmp_path / "m" / "config.pbtxt").write_text(
        "backend: 'python' max_batch_size: 4\n"
        "input { name: 'X' data_type: TYPE_FP32 dims: 2 }\n"
        "output { name: 'CORES' data_type: TYPE_INT32 dims: -1 }\n"
        "instance_group { kind: KIND_CPU host_policy: 'last' }\n"
    )
    options = ServerOptions(
        model_repository=(str(tmp_path),),
        host_policy={"last": {"cpu-cores": str(MINE[-1])}},
        backend_config={"python": {"execution": execution}},
    )
    async with InferenceServer(options) as server:
        response = await infer(server, "m")
        assert response.outputs[0].as_numpy().tolist() == [[MINE[-1]]]
        assert sorted(os.sched_getaffinity(0)) == MINE
