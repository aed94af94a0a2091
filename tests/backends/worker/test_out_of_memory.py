"""Workers that take more memory than there is: killed by the kernel, or refused by a limit."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from npuserve.testing.serve import serve_process
from tests.backends.worker.models import served_model, write_model

KILLED = "it was ended by signal 9 (SIGKILL, perhaps for lack of memory)"

GREEDY = """
class TritonPythonModel:
    def execute(self, requests):
        if requests[0].request_id() == "greedy":
            taken = []
            while True:
                taken.append(np.ones(1 << 20, np.uint8))
        return [response(tensor(r).as_numpy() * 2) for r in requests]
"""


class MemoryCgroup:
    """A control group with a limit, below the one this process is in; version 1 or 2."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processes = path / "cgroup.procs"

    def limit(self, size: int) -> None:
        """The most that its processes may have together, swap included."""
        for name in (
            "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max", "memory.swap.max"
        ):  # fmt: skip
            file = self.path / name
            if file.exists():
                file.write_text("0" if name == "memory.swap.max" else str(size))

    @property
    def kills(self) -> int:
        """How many of its processes were killed for lack of memory."""
        for name in ("memory.oom_control", "memory.events"):
            if (self.path / name).exists():
                lines = (self.path / name).read_text().splitlines()
                return int(dict(line.split() for line in lines)["oom_kill"])
        raise AssertionError("no memory controller")


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    """A new group, gone afterwards; skips where nobody may make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers == "memory":
            parent = Path("/sys/fs/cgroup/memory" + inside)
            break
        if not controllers:
            parent = Path("/sys/fs/cgroup" + inside)
    path = parent / f"npuserve-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        if not any((path / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            pytest.skip("control groups have no memory controller here")
        yield MemoryCgroup(path)
    finally:
        path.rmdir()


async def test_worker_killed_for_lack_of_memory(tmp_path: Path, cgroup: MemoryCgroup) -> None:
    """The request it held fails and says so; the next one is served, and both are counted."""
    cgroup.limit(64 << 20)
    join = f"""
    def initialize(self, args):
        with open({str(cgroup.processes)!r}, "w") as file:
            file.write(str(os.getpid()))
"""
    async with served_model(tmp_path, GREEDY + join) as models:
        greedy = models.start(id="greedy")
        queued = models.start()
        assert KILLED in (await greedy.answer()).error
        assert not await models.server.model_ready("m")
        assert (await queued.answer()).value == [2.0]
        assert await models.server.model_ready("m")
        statistics = models.server.model("m").statistics
        assert (statistics.success.count, statistics.fail.count) == (1, 1)
        assert cgroup.kills == 1


def test_server_outlives_a_worker_in_the_same_cgroup(tmp_path: Path, cgroup: MemoryCgroup) -> None:
    """In a container the kernel takes the worker, though the server is the larger process."""
    write_model(tmp_path, "m", GREEDY)
    with serve_process(tmp_path) as server:
        pids = _tree(server.process.pid)
        sizes = [_resident_bytes(pid) for pid in pids]
        # By size alone the worker would still be second when the limit is reached.
        cgroup.limit(int(0.8 * (sizes[0] - sizes[-1])))
        for pid in pids:
            cgroup.processes.write_text(str(pid))
        assert KILLED in _infer(server.http_url, "greedy")
        assert '"data":[2.0]' in _infer(server.http_url, "")
        assert cgroup.kills == 1


async def test_worker_is_ended_by_sigkill(tmp_path: Path) -> None:
    """Whoever sent the signal, the answer names it and what it may mean."""
    code = """
    import signal

    class TritonPythonModel:
        def execute(self, requests):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    async with served_model(tmp_path, code) as models:
        assert KILLED in (await models.infer()).error


async def test_worker_offers_itself_to_the_oom_killer(tmp_path: Path) -> None:
    """Its score is the server's and 500 more, however that was set."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            score = int(open("/proc/self/oom_score_adj").read())
            return [response(np.array([score], np.float32)) for _ in requests]
    """
    own = int(Path("/proc/self/oom_score_adj").read_text())
    async with served_model(tmp_path, code) as models:
        assert (await models.infer()).value == [min(own + 500, 1000)]


def _tree(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    pids = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            pids += _tree(int(child))
    return pids


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _infer(url: str, request_id: str) -> str:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}
    body = json.dumps({"id": request_id, "inputs": [tensor]}).encode()
    try:
        with urllib.request.urlopen(f"http://{url}/v2/models/m/infer", body, timeout=20) as reply:
            text: bytes = reply.read()
    except urllib.error.HTTPError as error:
        text = error.read()
    return text.decode()
