"""Who is kept on the loop's core, and that everybody gets all cores back."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import TYPE_CHECKING

import pytest

from npuserve.server import core_sharing
from npuserve.server.core_sharing import CoreSharing, LinuxCores
from npuserve.testing.clock import FakeClock
from tests.server.models import infer, serve

if TYPE_CHECKING:
    from collections.abc import Set
    from pathlib import Path

LOOP = 10
ALL = frozenset({0, 1, 2, 3})
US = 1000


class Machine:
    """Four cores; the loop runs on core 2. A new thread gets the cores of the one that makes it."""

    def __init__(self) -> None:
        self.cores: dict[int, frozenset[int]] = {LOOP: ALL}
        self.process_of = {LOOP: LOOP}
        self.used_ns: dict[int, int] = {LOOP: 0}

    def start(self, thread: int, parent: int | None = None) -> None:
        """A thread of `parent`'s process, or a process of its own."""
        self.cores[thread] = ALL if parent is None else self.cores[parent]
        self.process_of[thread] = thread if parent is None else self.process_of[parent]
        self.used_ns[thread] = 0

    def end(self, thread: int) -> None:
        del self.cores[thread], self.process_of[thread], self.used_ns[thread]

    def allowed(self) -> frozenset[int]:
        return self.cores[LOOP]

    def current(self) -> int:
        return 2

    def siblings(self, thread: int) -> frozenset[int]:
        process = self.process_of.get(thread)
        return frozenset(t for t, p in self.process_of.items() if p == process)

    def processor_ns(self, thread: int) -> int:
        return self.used_ns.get(thread, 0)

    def is_confined(self, thread: int, core: int) -> bool:
        return self.cores.get(thread) == frozenset({core})

    def confine(self, thread: int, cores: Set[int]) -> None:
        if thread in self.cores:
            self.cores[thread] = frozenset(cores)


class Executor:
    """An instance; `execute` is what it did lately."""

    def __init__(self, machine: Machine, thread: int, own_process: bool, overlaps: bool) -> None:
        machine.start(thread, None if own_process else LOOP)
        self.machine = machine
        self.native_thread_id = thread
        self.overlaps = overlaps
        self.executions = 0
        self.requests = 0
        self.batch = 1  # requests in an execution
        self.lone_executions = 0
        self.shared: list[bool] = []

    def core_shared(self, shared: bool) -> None:
        self.shared.append(shared)

    def execute(self, times: int, each_ns: int, lone: bool) -> None:
        self.executions += times
        self.requests += times * self.batch
        self.lone_executions += times if lone else 0
        self.machine.used_ns[self.native_thread_id] += times * each_ns


class Rig:
    """A CoreSharing on a virtual clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.machine = Machine()
        self.executors: list[Executor] = []
        self.sharing = CoreSharing(self.clock, lambda: self.executors, LOOP, self.machine)
        self.sharing.start()
        self.busy: list[tuple[Executor, int, bool]] = []

    def add(self, thread: int, own_process: bool = False, overlaps: bool = False) -> Executor:
        executor = Executor(self.machine, thread, own_process, own_process or overlaps)
        self.executors.append(executor)
        return executor

    def serve(self, seconds: float, *work: tuple[Executor, int, bool], per_ms: int = 2) -> None:
        """Each executor executes `per_ms` times a ms: (who, ns each, one at a time)."""
        for _ in range(round(seconds * 1000)):
            for executor, each_ns, lone in work:
                executor.execute(per_ms, each_ns, lone)
            self.clock.advance(ms=1)

    def together(self, *threads: int) -> bool:
        return all(self.machine.cores[t] == {2} for t in (LOOP, *threads))

    def apart(self) -> bool:
        return all(cores == ALL for cores in self.machine.cores.values())


@pytest.fixture
def rig() -> Rig:
    """A server that has served nothing yet."""
    return Rig()


@pytest.mark.parametrize("lone", [True, False])
def test_a_quick_thread_shares_the_core_of_the_loop(rig: Rig, lone: bool) -> None:
    """However many requests there are: one interpreter does one thing at a time."""
    quick = rig.add(11)
    rig.serve(1.5, (quick, 30 * US, lone))
    assert rig.together(11)
    assert quick.shared == [True]


@pytest.mark.parametrize(
    ("each_us", "shares"), [(240, True), (260, False), (5000, False), (0, False)]
)
def test_long_executions_keep_all_cores(rig: Rig, each_us: int, shares: bool) -> None:
    """What counts is processor time, where the kernel tells it; waiting for a device is none."""
    rig.serve(1.5, (rig.add(11), each_us * US, False))
    assert rig.together(11) is shares
    assert rig.apart() is not shares


@pytest.mark.parametrize(("loop_us", "shares"), [(400, True), (600, False)])
def test_a_busy_loop_keeps_all_cores(rig: Rig, loop_us: int, shares: bool) -> None:
    """With large bodies most of the work is the loop's, and the client is on the same machine."""
    quick = rig.add(11)
    for _ in range(1500):
        rig.machine.used_ns[LOOP] += 2 * loop_us * US
        rig.serve(0.001, (quick, 30 * US, True))
    assert rig.together(11) is shares


@pytest.mark.parametrize(
    ("batch", "each_us", "loop_us", "shares"),
    [
        (32, 1_100, 1_500, True),
        (32, 1_300, 1_500, False),
        (32, 600, 2_500, False),
        (2, 290, 500, False),
        (2, 200, 600, False),
    ],
)
def test_a_batch_may_take_longer(
    rig: Rig, batch: int, each_us: int, loop_us: int, shares: bool
) -> None:
    """30 us for each further request, 50 us of the loop's."""
    model = rig.add(11)
    model.batch = batch
    for _ in range(1500):
        rig.machine.used_ns[LOOP] += loop_us * US
        rig.serve(0.001, (model, each_us * US, False), per_ms=1)
    assert rig.together(11) is shares


def test_few_large_batches_count_by_their_requests(rig: Rig) -> None:
    """An instance with a batch now and then shares, and stays while others have the work."""
    busy, other = rig.add(11), rig.add(12)
    busy.batch = other.batch = 32

    def serve(milliseconds: int, others_every: int) -> None:
        for ms in range(milliseconds):
            if ms % 3 == 0:
                busy.execute(1, 1_100 * US, False)
                rig.machine.used_ns[LOOP] += 1_500 * US
            if ms % others_every == 0:
                other.execute(1, 1_100 * US, False)
                rig.machine.used_ns[LOOP] += 1_500 * US
            rig.serve(0.001)

    serve(1_500, others_every=50)
    assert rig.together(11, 12)
    serve(200, others_every=1_000)
    assert rig.together(11, 12)
    assert busy.shared == other.shared == [True]


def test_a_thread_that_becomes_slow_is_let_go(rig: Rig) -> None:
    """Between the two limits it stays what it is; beyond the upper one it goes at the next look."""
    model = rig.add(11)
    rig.serve(1.5, (model, 30 * US, False))
    rig.serve(0.1, (model, 300 * US, False))
    assert rig.together(11)
    rig.serve(0.2, (model, 500 * US, False))
    assert rig.apart()
    assert model.shared == [True, False]


@pytest.mark.parametrize("own_process", [True, False])
def test_what_overlaps_shares_only_while_requests_come_one_at_a_time(
    rig: Rig, own_process: bool
) -> None:
    """With more of them the loop and the worker, or a library's code, work at the same time."""
    worker = rig.add(20, own_process, overlaps=True)
    rig.serve(1.5, (worker, 30 * US, False))
    assert rig.apart()
    rig.serve(0.3, (worker, 30 * US, True))
    assert rig.together(20)
    rig.serve(0.3, (worker, 30 * US, False))
    assert rig.apart()
    assert worker.shared == [True, False]


def test_two_busy_processes_do_not_share(rig: Rig) -> None:
    """Each has one request at a time, but together they use two cores."""
    one, two = rig.add(20, own_process=True), rig.add(30, own_process=True)
    rig.serve(1.5, (one, 30 * US, True), (two, 30 * US, True))
    assert rig.apart()


def test_a_slow_process_beside_a_quick_thread_is_left_alone(rig: Rig) -> None:
    """Each is judged for itself."""
    quick, slow = rig.add(11), rig.add(20, own_process=True)
    rig.serve(1.5, (quick, 30 * US, False), (slow, 5000 * US, True))
    assert rig.together(11)
    assert rig.machine.cores[20] == ALL
    assert slow.shared == []


def test_an_idle_server_confines_nothing(rig: Rig) -> None:
    """When the requests cease, and where they are too few to matter."""
    quick = rig.add(11)
    rig.serve(1.5, (quick, 30 * US, True))
    rig.serve(0.3)
    assert rig.apart()
    for _ in range(20):
        rig.serve(0.1)
        quick.execute(5, 30 * US, True)
        assert rig.apart()


def test_the_kernel_gets_a_chance_to_move_them(rig: Rig) -> None:
    """Once a second everything is loose for a moment, and then together again."""
    quick = rig.add(11)
    rig.serve(1.5, (quick, 30 * US, True))
    loose = 0
    for _ in range(2000):
        rig.serve(0.001, (quick, 30 * US, True))
        loose += rig.apart()
    assert 20 <= loose <= 60
    assert rig.together(11)


def test_nothing_is_confined_while_a_model_is_loaded(rig: Rig) -> None:
    """Its threads and processes would inherit the one core; loads may overlap."""
    quick = rig.add(11)
    rig.serve(1.5, (quick, 30 * US, True))
    with rig.sharing:
        assert rig.apart()
        with rig.sharing:
            rig.serve(1.5, (quick, 30 * US, True))
        rig.serve(1.5, (quick, 30 * US, True))
        assert rig.apart()
    rig.serve(0.3, (quick, 30 * US, True))
    assert rig.together(11)


@pytest.mark.parametrize("parent", [LOOP, 11, 20])
def test_a_thread_born_on_the_shared_core_is_set_free(rig: Rig, parent: int) -> None:
    """One that the loop, a model's thread or a worker starts; those that were there stay."""
    executor = rig.add(20, own_process=True) if parent == 20 else rig.add(11)
    rig.machine.start(40, parent)
    rig.machine.confine(40, {2})  # somebody wants it there
    rig.serve(1.5, (executor, 30 * US, True))
    rig.machine.start(41, parent)
    assert rig.machine.cores[41] == {2}
    rig.serve(0.2, (executor, 30 * US, True))
    assert rig.machine.cores[41] == ALL
    assert rig.machine.cores[40] == {2}
    rig.machine.start(42, parent)
    rig.sharing.stop()
    assert rig.machine.cores[42] == ALL


def test_ended_threads_and_processes_disturb_nothing(rig: Rig) -> None:
    """A worker that died, and a model that was unloaded, while they shared."""
    worker = rig.add(20, own_process=True)
    rig.serve(1.5, (worker, 30 * US, True))
    rig.machine.end(20)
    rig.machine.start(21)
    worker.native_thread_id = 21
    rig.serve(1.5, (worker, 30 * US, True))
    assert rig.together(21)
    rig.machine.end(21)
    rig.executors.clear()
    rig.serve(0.2)
    assert rig.apart()


def test_a_single_core_is_left_as_it_is(rig: Rig) -> None:
    """There is nothing to choose."""
    rig.machine.cores[LOOP] = frozenset({3})
    quick = rig.add(11)
    rig.serve(1.5, (quick, 30 * US, True))
    assert rig.machine.cores[LOOP] == {3}
    assert quick.shared == []


async def test_on_this_machine() -> None:
    """The kernel's side: confine a real thread, see it confined, count its time, let it go."""
    cores = LinuxCores()
    allowed = cores.allowed()
    ready, ended = threading.Event(), threading.Event()
    ids: list[int] = []

    def work() -> None:
        ids.append(threading.get_native_id())
        ready.set()
        ended.wait()

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(ready.wait)
    try:
        (native_id,) = ids
        core = cores.current()
        assert core in allowed
        assert {native_id, threading.get_native_id()} <= cores.siblings(os.getpid())
        cores.confine(native_id, {core})
        assert cores.is_confined(native_id, core)
        cores.confine(native_id, allowed)
        assert os.sched_getaffinity(native_id) == allowed
        assert cores.processor_ns(native_id) > 0
    finally:
        ended.set()
        thread.join()


def test_where_the_kernel_refuses_nobody_asks_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a sandbox: said once, everything goes on as before."""
    asked = []

    def refuse(thread: int, cores: Set[int]) -> None:
        asked.append(thread)
        raise PermissionError("not here")

    monkeypatch.setattr(rig.machine, "confine", refuse)
    quick = rig.add(11)
    rig.serve(3, (quick, 30 * US, True))
    assert rig.apart()
    assert set(asked) == {LOOP, 11}
    assert len(asked) == 4  # to share, and to make sure that nothing is left of it
    assert "not here" in caplog.text
    assert quick.shared == [True, False]
    rig.sharing.stop()
    assert len(asked) == 4


def test_cores_and_threads_that_do_not_exist() -> None:
    """A core is refused by the kernel; for a thread that is gone there is nothing to do."""
    cores = LinuxCores()
    before = cores.allowed()
    with pytest.raises(OSError, match="Invalid argument"):
        cores.confine(threading.get_native_id(), {1023})
    assert cores.allowed() == before
    gone = 2**22 + 1  # above the kernel's largest id
    cores.confine(gone, before)
    assert not cores.is_confined(gone, 0)
    assert cores.siblings(gone) == frozenset()
    assert cores.processor_ns(gone) == 0


MODEL = """
import os
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.cores = [len(os.sched_getaffinity(0))]
        child = threading.Thread(target=lambda: self.cores.append(len(os.sched_getaffinity(0))))
        child.start()
        child.join()

    def execute(self, requests):
        cores = np.array([self.cores + [len(os.sched_getaffinity(0))]] , dtype=np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", cores)]) for _ in requests]
"""

CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 2 }
output { name: "Y" data_type: TYPE_FP32 dims: 3 }
instance_group { kind: KIND_CPU }
parameters { key: "execution" value { string_value: "%s" } }
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_in_a_server(tmp_path: Path, execution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy model gets onto the loop's core; one that is loaded meanwhile may use all cores."""
    monkeypatch.setattr(core_sharing, "_QUICK_NS", 10**9)  # however slow this machine is
    monkeypatch.setattr(core_sharing, "_SLOW_NS", 10**9)
    monkeypatch.setattr(core_sharing, "_LOOP_NS", 10**9)
    monkeypatch.setattr(core_sharing, "_MIN_EVERY_NS", 10**8)
    allowed = os.sched_getaffinity(0)
    for name in ("busy", "late"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(CONFIG % execution)
        (tmp_path / name / "1" / "model.py").write_text(MODEL)

    async def cores(model: str) -> list[float]:
        response = await infer(server, model)
        values: list[float] = response.outputs[0].as_numpy()[0].tolist()
        return values

    async with serve(tmp_path, load_model=("busy",)) as server, asyncio.timeout(60):
        while (await cores("busy"))[2] != 1:
            pass
        assert len(os.sched_getaffinity(0)) == 1
        await server.load_model("late")
        assert await cores("late") == [len(allowed)] * 3
        while (await cores("busy"))[2] != 1:
            pass
    assert os.sched_getaffinity(0) == allowed
    kernel = LinuxCores()
    threads = kernel.siblings(os.getpid())
    assert not [t for t in threads if any(kernel.is_confined(t, core) for core in allowed)]
