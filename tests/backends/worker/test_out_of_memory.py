"""Workers that take more memory than there is: killed by the kernel, or refused by a limit."""

from __future__ import annotations

import errno
import json
import os
import resource
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
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
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = dict(line.split(":", 2)[1:] for line in lines)  # by controllers; "" is version 2
    parent = f"memory{paths['memory']}" if "memory" in paths else paths.get("", "").lstrip("/")
    path = Path("/sys/fs/cgroup", parent, f"npuserve-test-{os.getpid()}")
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
    async with served_model(tmp_path, code) as models:
        assert (await models.infer()).value == [min(_own_score() + 500, 1000)]


LIMITED = """
import resource

class TritonPythonModel:
    def initialize(self, args):
        used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))

    def execute(self, requests):
        if requests[0].request_id() == "work":
            np.ones(1 << 28, np.uint8)
        if requests[0].request_id() == "output":
            return [response(np.ones(10 << 20, np.float32)) for _ in requests]
        return [response(np.array([os.getpid()], np.float32)) for r in requests]
"""


@pytest.mark.parametrize(
    ("what", "size", "text"),
    [
        ("work", 1, "MemoryError: Unable to allocate 256. MiB"),
        ("output", 1, "output of the model cannot be sent: [Errno 12]"),
        ("", 1 << 25, "input of the request cannot be read: [Errno 12]"),
    ],
)
async def test_worker_at_its_memory_limit(tmp_path: Path, what: str, size: int, text: str) -> None:
    """What has no room is an error of that request; the worker goes on and keeps nothing."""
    async with served_model(tmp_path, LIMITED) as models:
        pid = (await models.infer()).value
        held = []
        for _ in range(3):
            call = models.start(inputs={"IN": np.ones(size, np.float32)}, id=what)
            assert text in (await call.answer()).error
            del call
            assert (await models.infer()).value == pid
            held.append((_descriptors(int(pid[0])), models.instance()._connection.link.lent_count))
    assert held[0] == held[2]
    assert held[0][1] == 0


async def test_server_at_its_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that the server cannot lend or map are errors of their requests alone."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            size = int(tensor(requests[0]).as_numpy()[0])
            if requests[0].request_id() != "call":
                return [response(np.ones(size, np.float32)) for _ in requests]
            inputs = [pb_utils.Tensor("IN", np.ones(size, np.float32))]
            call = pb_utils.InferenceRequest(
                model_name="other", requested_output_names=["OUT"], inputs=inputs
            )
            return [pb_utils.InferenceResponse(error=call.exec().error()) for _ in requests]
    """
    large = np.full(100_000, 100_000, np.float32)
    write_model(tmp_path, "other", code)
    async with served_model(tmp_path, code) as models:
        with monkeypatch.context() as patch:
            patch.setattr("npuserve.buffer_pool.mmap", _NoRoom)
            errors = [
                (await models.infer(inputs={"IN": inputs}, id=id)).error
                for inputs, id in ((large, ""), (large[:1], ""), (large[:1], "call"))
            ]
        assert [error.partition(": ")[0] for error in errors[1:]] == [
            "output of the model cannot be read", "input of the request cannot be read"
        ]  # fmt: skip
        assert ["no room" in error for error in errors] == [True, True, True]
        assert len((await models.infer(inputs={"IN": large})).value) == 100_000
        assert models.instance()._connection.link.lent_count == 0


class _NoRoom:
    """In the place of the module `mmap`."""

    @staticmethod
    def mmap(fd: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "no room")


async def test_worker_without_descriptors_is_replaced(tmp_path: Path) -> None:
    """Memory whose descriptor got lost is never readable: the next worker serves."""
    code = """
    import resource

    class TritonPythonModel:
        def execute(self, requests):
            if requests[0].request_id() == "limit":
                own = len(os.listdir("/proc/self/fd")) - 1
                resource.setrlimit(resource.RLIMIT_NOFILE, (own, own))
            return [response(tensor(r).as_numpy() * 2) for r in requests]
    """
    large = {"IN": np.ones(100_000, np.float32)}
    async with served_model(tmp_path, code) as models:
        await models.infer(id="limit")
        assert "is not healthy" in (await models.infer(inputs=large)).error
        assert (await models.infer(inputs=large)).value[:1] == [2.0]


async def test_server_without_descriptors_replaces_the_worker(tmp_path: Path) -> None:
    """The other way round: the request that is lost says so, and the next one is served."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [response(np.ones(100_000, np.float32)) for _ in requests]
    """
    async with served_model(tmp_path, code) as models:
        with _no_more_descriptors():
            error = (await models.infer()).error
        assert "descriptors of shared memory were lost: too many open files" in error
        assert len((await models.infer()).value) == 100_000


@contextmanager
def _no_more_descriptors() -> Iterator[None]:
    """No file can be opened, and no descriptor received, inside."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)  # the lowest number that is free
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _own_score() -> int:
    return int(Path("/proc/self/oom_score_adj").read_text())


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
