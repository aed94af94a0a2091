"""Models whose forked processes call the server, in a process and in a thread."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from npuserve.testing.serve import serve
from tests.backends.worker.models import (
    CONFIG,
    DECOUPLED,
    STREAM,
    Models,
    served,
    served_model,
    write_model,
)

pytestmark = [
    pytest.mark.parametrize("execution", ["process", "thread"]),
    # Newer Pythons warn of what is tested here; an error in the thread of a model, otherwise.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning"),
]

TARGET = """
class TritonPythonModel:
    def execute(self, requests):
        out = []
        for r in requests:
            if r.request_id() == "error":
                error = pb_utils.TritonError("nobody home", pb_utils.TritonError.NOT_FOUND)
                out.append(pb_utils.InferenceResponse(error=error))
            elif r.request_id() == "raises":
                raise ValueError("raised")
            elif r.request_id() == "gate":  # the test decides when it ends
                gates = os.path.join(pb_utils.get_model_dir(), "..", "..")
                with open(os.path.join(gates, "begun"), "w"):
                    pass
                with open(os.path.join(gates, "gate")) as gate:
                    gate.read()
                out.append(response(tensor(r).as_numpy()))
            else:
                out.append(response(tensor(r).as_numpy() * 2))
        return out
"""


# Answers with what the method of the request's id gives, as JSON text.
FORKS = """
import asyncio, concurrent.futures, gc, multiprocessing, select, signal, traceback

FORK = multiprocessing.get_context("fork")

def bls(name, id="", values=(1,), **options):
    x = pb_utils.Tensor("IN", np.array(values, np.float32))
    return pb_utils.InferenceRequest(
        request_id=id, model_name=name, requested_output_names=["OUT"], inputs=[x], **options)

def shown(answer):
    if answer.has_error():
        return [answer.error().code().name, answer.error().message()]
    return [t.as_numpy().tolist() for t in answer.output_tensors()]

def doubled(value):
    (total,) = shown(bls("target", values=[value] * 2).exec())
    return total

def large(value):
    answer = bls("target", values=np.full(300_000, value)).exec()
    out = answer.output_tensors()[0].as_numpy()
    return [out.shape[0], float(out.min()), float(out.max())]

class Forked:
    '''A forked process that runs a function; `result` is what it gave, or its exception.'''

    def __init__(self, function, *args):
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(writer)
            return
        try:
            found = function(*args)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        with open(writer, "w") as file:
            file.write(json.dumps(found))
        os._exit(0)

    def result(self):
        with open(self.reader) as file:
            text = file.read()
        os.waitpid(self.pid, 0)
        return json.loads(text) if text else "nothing"

class TritonPythonModel:
    def initialize(self, args):
        self.early_pool = concurrent.futures.ProcessPoolExecutor(2, FORK)
        self.early_pool.submit(os.getpid).result()
        self.on_load = Forked(doubled, 1).result()
        family = pb_utils.MetricFamily("forks", "d", pb_utils.MetricFamily.COUNTER)
        self.family, self.metric = family, family.Metric()

    def finalize(self):
        self.early_pool.shutdown()

    def execute(self, requests):
        out = []
        for r in requests:
            self.request = r
            value = getattr(self, r.request_id())()
            out.append(response(np.array([json.dumps(value)], object)))
        return out

    def once(self):
        return Forked(doubled, 3).result()

    def process(self):
        answers = FORK.SimpleQueue()
        process = FORK.Process(target=lambda: answers.put(doubled(4)))
        process.start()
        process.join()
        return answers.get()

    def pool(self):
        with FORK.Pool(3) as pool:
            return pool.map(doubled, range(12), chunksize=1)

    def executor(self):
        with concurrent.futures.ProcessPoolExecutor(3, FORK) as pool:
            return list(pool.map(doubled, range(12)))

    def forked_in_initialize(self):
        return list(self.early_pool.map(doubled, range(6)))

    def early_pids(self):
        return list(self.early_pool._processes)

    def called_in_initialize(self):
        return self.on_load

    def nested(self):
        return Forked(lambda: [Forked(doubled, n).result() for n in range(3)]).result()

    def large(self):
        with FORK.Pool(2) as pool:
            return pool.map(large, range(6), chunksize=1)

    def errors(self):
        return Forked(lambda: [shown(bls("target", "error").exec()),
                               shown(bls("target", "raises").exec())[1].partition("\\n")[0][-18:],
                               shown(bls("nobody").exec()),
                               shown(bls("stream").exec())[0]]).result()

    def beside_the_parent(self):
        there = Forked(lambda: [doubled(n) for n in range(30)])
        here = [doubled(n) for n in range(30)]
        return there.result() == here

    def threads(self):
        def both():
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                return list(pool.map(doubled, range(12)))
        return Forked(both).result()

    def coroutines(self):
        async def all_of_them():
            answers = [bls("target", values=[n]).async_exec() for n in range(5)]
            stream = await bls("stream", values=[1, 2]).async_exec(decoupled=True)
            return ([shown(a) for a in await asyncio.gather(*answers)]
                    + [shown(a) async for a in stream])
        return Forked(lambda: asyncio.run(all_of_them())).result()

    def stream(self):
        return Forked(lambda: [shown(a) for a in
                               bls("stream", values=[1, 2, 3]).exec(decoupled=True)]).result()

    def metrics(self):
        return [Forked(lambda: [self.metric.increment(2), self.metric.value()]).result(),
                self.metric.value(),
                Forked(lambda: pb_utils.MetricFamily("x", "d", self.family.GAUGE)).result(),
                Forked(lambda: self.family.Metric(labels={"a": "b"})).result()]

    def control(self):
        def steps():
            pb_utils.load_model("target")
            facts = [pb_utils.is_model_ready("target"), pb_utils.is_model_ready("nobody")]
            pb_utils.unload_model("nobody")
            return facts
        return Forked(steps).result()

    def logs(self):
        def lines():
            pb_utils.Logger.log_warn("said by a fork")
            print("printed by a fork")
        return Forked(lines).result()

    def refused(self):
        r = self.request
        mailbox = bls("target", "gate").exec(decoupled=True)
        found = [Forked(r.is_cancelled).result(),
                 Forked(lambda: r.get_response_sender().send(response(np.ones(1)))).result(),
                 Forked(lambda: shown(next(mailbox))).result()]
        for gate, mode in (("begun", "r"), ("gate", "w")):
            with open(os.path.join(pb_utils.get_model_dir(), "..", "..", gate), mode):
                pass
        return found + [shown(answer) for answer in mailbox]

    def leaves(self):
        pid = os.fork()
        if pid == 0:
            return "not seen by anybody"
        return os.waitpid(pid, 0)[1]

    def terminate(self):
        running = FORK.SimpleQueue()

        def wait():
            running.put(True)
            signal.pause()

        process = FORK.Process(target=wait)
        process.start()
        running.get()
        process.terminate()
        process.join()
        return process.exitcode

    def program(self):
        import subprocess
        before = set(os.listdir("/proc/self/fd")), threading.active_count()
        subprocess.run([sys.executable, "-c", ""], check=True)
        return before == (set(os.listdir("/proc/self/fd")), threading.active_count())

    def begin(self):  # a call whose end the test decides, and hears of
        self.pid = os.fork()
        if self.pid:
            return
        try:
            found = str(shown(bls("target", "gate").exec()))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        with open(os.path.join(pb_utils.get_model_dir(), "..", "..", "report"), "w") as file:
            file.write(found)
        os._exit(0)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        return self.reap()

    def reap(self):
        return os.waitpid(self.pid, 0)[1]

    def descriptors(self):
        gc.collect()
        return len(os.listdir("/proc/self/fd")) + threading.active_count()
"""

THE_PROCESS = "do it in the process that runs execute"

ANSWERS: dict[str, object] = {
    "once": [6, 6],
    "process": [8, 8],
    "pool": [[2 * n] * 2 for n in range(12)],
    "executor": [[2 * n] * 2 for n in range(12)],
    "forked_in_initialize": [[2 * n] * 2 for n in range(6)],
    "called_in_initialize": (
        "TritonModelException: BLS is only supported during the 'execute' function."
    ),
    "nested": [[0, 0], [2, 2], [4, 4]],
    "large": [[300_000, 2 * n, 2 * n] for n in range(6)],
    "errors": [
        ["NOT_FOUND", "nobody home"],
        "ValueError: raised",
        [
            "INTERNAL",
            "Model nobody - Error when running inference: Failed for execute the inference "
            "request. Model 'nobody' is not ready.",
        ],
        "INTERNAL",
    ],
    "beside_the_parent": True,
    "threads": [[2 * n] * 2 for n in range(12)],
    "coroutines": [[[2 * n]] for n in range(5)] + [[[1]], [[2]], []],
    "stream": [[[1]], [[2]], [[3]], []],
    "metrics": [
        [None, 2],
        2,
        "TritonModelException: a process forked by the model cannot make a metric family: "
        + THE_PROCESS,
        "TritonModelException: a process forked by the model cannot make a metric: " + THE_PROCESS,
    ],
    "control": [True, False],
    "logs": None,
    "refused": [
        "TritonModelException: a process forked by the model cannot ask whether a request of the "
        "model was cancelled: " + THE_PROCESS,
        "TritonModelException: a process forked by the model cannot send responses of the model's "
        "requests: " + THE_PROCESS,
        "TritonModelException: a process forked by the model cannot wait for what was called "
        "before the fork: " + THE_PROCESS,
        [[1]],
    ],
    "leaves": 0,
    "program": True,
}


def write(root: Path) -> None:
    write_model(root, "target", TARGET, CONFIG.replace("KIND_CPU", "KIND_CPU count: 3"))
    write_model(root, "stream", STREAM, DECOUPLED)
    write_model(root, "m", FORKS)
    for gate in ("gate", "begun", "report"):
        os.mkfifo(root / gate)


async def ask(models: Models, way: str) -> Any:
    answer: Any = json.loads((await models.infer(id=way)).text)
    return answer


@pytest.mark.timeout(60)
async def test_what_forked_processes_may_do(
    tmp_path: Path, execution: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything that a model may ask for, but for what belongs to a request of the model."""
    write(tmp_path)
    async with served(
        tmp_path, execution, model_control_mode="explicit", load_model=("*",)
    ) as models:
        for way, expected in ANSWERS.items():
            assert await ask(models, way) == expected, way
    assert "said by a fork" in caplog.text


async def in_gate(models: Models, root: Path) -> None:
    """Have a forked process call, and return once the other model executes the request."""
    await ask(models, "begin")
    with await asyncio.to_thread(open, root / "begun") as begun:
        begun.read()


async def open_gate(root: Path) -> None:
    await asyncio.to_thread((root / "gate").write_text, "")


async def report(root: Path) -> str:
    """What became of the call."""
    return await asyncio.to_thread((root / "report").read_text)


async def test_killed_in_a_call(tmp_path: Path, execution: str) -> None:
    """The call of a forked process that is killed is cancelled, and nothing of it is left."""
    write(tmp_path)
    async with served(tmp_path, execution) as models:
        assert await ask(models, "once") == [6, 6]
        before = await ask(models, "descriptors")
        calls = models.instance().node.calls
        for _ in range(5):
            await in_gate(models, tmp_path)
            assert len(calls) == 1
            assert await ask(models, "kill") == signal.SIGKILL
            await open_gate(tmp_path)
            while calls:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0)
            assert await ask(models, "once") == [6, 6]
        while await ask(models, "descriptors") > before:
            pass


async def test_outlives_the_execution(tmp_path: Path, execution: str) -> None:
    """A forked process that still waits gets its answer after the execution that forked it."""
    write(tmp_path)
    async with served(tmp_path, execution) as models:
        await in_gate(models, tmp_path)
        assert await ask(models, "once") == [6, 6]
        await open_gate(tmp_path)
        assert await report(tmp_path) == "[[1.0]]"
        assert await ask(models, "reap") == 0


GONE = "ServerGoneError: the process that has the model ended"


async def test_a_worker_that_dies(tmp_path: Path, execution: str) -> None:
    """Its forked processes get an error in their calls and end; the next worker forks as well."""
    if execution == "thread":
        pytest.skip("the server itself")
    write(tmp_path)
    async with served(tmp_path, execution) as models:
        await in_gate(models, tmp_path)
        died = models.instance()._process
        for pid in (died.pid, *await ask(models, "early_pids")):  # its pool would stay for ever
            os.kill(pid, signal.SIGKILL)
        assert await report(tmp_path) == GONE
        await open_gate(tmp_path)
        instance = models.instance()
        while instance._process is died or not instance.available:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert await ask(models, "once") == [6, 6]


async def test_a_model_that_is_unloaded(tmp_path: Path, execution: str) -> None:
    """Its forked processes get an error in their calls, too."""
    write(tmp_path)
    async with served(
        tmp_path, execution, model_control_mode="explicit", load_model=("*",)
    ) as models:
        await in_gate(models, tmp_path)
        async with asyncio.TaskGroup() as group:
            group.create_task(models.server.unload_model("m"))
            assert await report(tmp_path) == GONE
        await open_gate(tmp_path)


async def test_signals_of_the_server(tmp_path: Path, execution: str) -> None:
    """A pool ends its processes by SIGTERM: it ends them, and not the server."""
    write(tmp_path)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with served(tmp_path, execution) as models:
        loop.add_signal_handler(signal.SIGTERM, ended.set)
        try:
            assert await ask(models, "terminate") == -signal.SIGTERM
            assert await ask(models, "once") == ANSWERS["once"]
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
    assert not ended.is_set()


LEAVES_CONFIGURATION = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        pid = os.fork()
        if not pid:
            raise ValueError("in the forked process")
        status = os.waitpid(pid, 0)[1]
        if status:
            raise RuntimeError(f"it ended with {status}")
        config.set_max_batch_size(3)
        return config

    def execute(self, requests):
        return [response(tensor(r).as_numpy()) for r in requests]
"""


async def test_a_fork_that_leaves_the_configuration(tmp_path: Path, execution: str) -> None:
    """It ends quietly, whatever it raised; what its parent completed counts."""
    write_model(tmp_path, "m", LEAVES_CONFIGURATION, CONFIG.replace("max_batch_size: 0\n", ""))
    async with served(tmp_path, execution) as models:
        assert models.server.model("m").config.max_batch_size == 3


LEAVES_IS_READY = """
class TritonPythonModel:
    def is_ready(self):
        pid = os.fork()
        if not pid:
            LEAVE
        return os.waitpid(pid, 0)[1] == 0

    async def execute(self, requests):
        return [response(tensor(r).as_numpy()) for r in requests]
"""


@pytest.mark.parametrize("leave", ["return False", "raise ValueError"])
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_fork_that_leaves_is_ready(
    tmp_path: Path, execution: str, kind: str, leave: str
) -> None:
    """It ends quietly beside coroutines, whatever it would answer; its parent's answer counts."""
    code = LEAVES_IS_READY.replace("def is_ready", f"{kind} is_ready").replace("LEAVE", leave)
    async with served_model(tmp_path, code, execution=execution) as models:
        assert await models.server.model_ready("m")
        assert (await models.infer()).value == [1.0]


def test_sockets_of_the_server(tmp_path: Path, execution: str) -> None:
    """A forked process keeps no connection open that the server closes, and no port taken."""
    write(tmp_path)
    with serve(tmp_path, backend_config={"python": {"execution": execution}}) as server:
        url = ("127.0.0.1", server.http_port)
        ask = json.dumps(
            {
                "id": "begin",
                "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}],
            }
        )
        with socket.create_connection(url, timeout=10) as before:
            before.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert before.recv(4096).startswith(b"HTTP/1.1 200")
            urllib.request.urlopen(f"http://127.0.0.1:{url[1]}/v2/models/m/infer", ask.encode())
            (tmp_path / "begun").read_text()
            before.sendall(b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\n\r\n")
            while before.recv(4096):
                pass
        (tmp_path / "gate").write_text("")
    with socket.create_server(url):  # the forked process is still there
        assert (tmp_path / "report").read_text()


# A model that calls itself in a forked process, and waits for that one in the way of the id.
CIRCLE = """
import concurrent.futures, multiprocessing

FORK = multiprocessing.get_context("fork")

def itself(_=0):
    x = pb_utils.Tensor("IN", np.ones(1, np.float32))
    answer = pb_utils.InferenceRequest(
        model_name="m", requested_output_names=["OUT"], inputs=[x]).exec()
    return answer.error().message() if answer.has_error() else "answered"

class TritonPythonModel:
    def execute(self, requests):
        return [response(np.array([json.dumps(self.one(r.request_id()))], object))
                for r in requests]

    def one(self, way):
        return getattr(self, way)() if way else "end"

    def process(self):
        answers = FORK.SimpleQueue()
        process = FORK.Process(target=lambda: answers.put(itself()))
        process.start()
        process.join()
        return answers.get()

    def pool(self):
        with FORK.Pool(2) as pool:
            return pool.map(itself, range(2), chunksize=1)[0]

    def idle(self):
        with FORK.Pool(3) as pool:
            return pool.apply(itself)

    def executor(self):
        with concurrent.futures.ProcessPoolExecutor(2, FORK) as pool:
            return pool.submit(itself).result()

    def shutdown(self):
        with concurrent.futures.ProcessPoolExecutor(2, FORK) as pool:
            answer = pool.submit(itself)
        return answer.result()
"""


@pytest.mark.parametrize("way", ["process", "pool", "idle", "executor", "shutdown"])
async def test_circles(tmp_path: Path, execution: str, way: str) -> None:
    """A model that waits for a forked process which calls it is told that nobody can answer."""
    write_model(tmp_path, "m", CIRCLE)
    async with served(tmp_path, execution) as models:
        assert "(m -> m)" in str(await ask(models, way))
        assert await ask(models, "") == "end"


@pytest.mark.parametrize("way", ["process", "pool", "idle", "executor", "shutdown"])
async def test_no_circles(tmp_path: Path, execution: str, way: str) -> None:
    """With another instance such calls are answered."""
    config = CONFIG.replace("KIND_CPU", "KIND_CPU count: 2")
    write_model(tmp_path, "m", CIRCLE, config)
    async with served(tmp_path, execution) as models:
        assert await ask(models, way) == "answered"
