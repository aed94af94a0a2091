"""Models that wait for each other: refused where no call could be answered, and only there."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from npuserve.backends.worker import call_watch
from npuserve.backends.worker.call_graph import Call, CallGraph
from tests.backends.worker.models import CONFIG, DECOUPLED, Models, parameter, served, write_model

pytestmark = pytest.mark.parametrize("execution", ["process", "thread"])

# Models answer with JSON text. Whom they call is in the request id: with "a,b,a" a model calls a,
# which is sent "b,a"; with "" it calls nobody.
COMMON = """
import asyncio, concurrent.futures, multiprocessing.pool

def report(value):
    return response(np.array([json.dumps(value)], object))

def along(request, correlation_id=0):
    target, _, rest = request.request_id().partition(",")
    x = pb_utils.Tensor("IN", tensor(request).as_numpy())
    return pb_utils.InferenceRequest(
        request_id=rest, model_name=target, requested_output_names=["OUT"], inputs=[x],
        correlation_id=correlation_id)

def value(answer):
    if answer.has_error():
        return answer.error().message()
    return json.loads(answer.output_tensors()[0].as_numpy()[0])

def outcome(answer):
    return answer.error().message() if answer.has_error() else "end"

def wait_for_test():
    with open(os.path.join(pb_utils.get_model_dir(), "..", "..", "gate")) as gate:
        return gate.read()
"""

BLOCKS = """
class TritonPythonModel:
    def execute(self, requests):
        return [report(value(along(r).exec()) if r.request_id() else "end") for r in requests]
"""

AWAITS = """
class TritonPythonModel:
    async def execute(self, requests):
        return [report(await self.one(r) if r.request_id() else "end") for r in requests]

    async def one(self, r):
        return value(await along(r).async_exec())
"""

ASYNC_BLOCKS = AWAITS.replace("value(await along(r).async_exec())", "value(along(r).exec())")


def write(root: Path, name: str, code: str, config: str = CONFIG) -> None:
    write_model(root, name, COMMON + code, config)


def write_ensemble(
    root: Path, name: str, member: str, config: str = CONFIG, limit: str = ""
) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(
        'platform: "ensemble"\n'
        + config[config.index("max_batch_size") : config.index("instance_group")]
        + f'ensemble_scheduling {{ {limit} step [ {{ model_name: "{member}" model_version: -1 '
        + 'input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } ] }\n'
    )


async def ask(models: Models, name: str, way: str = "") -> str:
    """The text with which the model answers."""
    answer = (await models.infer(name, id=way)).text
    value: str = json.loads(answer)
    return value


REFUSED = "could never be answered"


def several(limit: int) -> str:
    return CONFIG + parameter("async_batches", str(limit))


@pytest.mark.parametrize(
    ("models", "way", "circle"),
    [
        ({"a": (BLOCKS, CONFIG)}, "a", "(a -> a)"),
        ({"a": (BLOCKS, CONFIG), "b": (BLOCKS, CONFIG)}, "b,a", "(b -> a -> b)"),
        ({"a": (AWAITS, several(1)), "b": (AWAITS, several(1))}, "b,a", "(b -> a -> b)"),
        ({"a": (AWAITS, several(2)), "b": (AWAITS, several(2))}, "b,a,b,a", " -> a -> b"),
        ({"a": (AWAITS, several(2)), "b": (BLOCKS, CONFIG)}, "a,b,a", "(b -> a -> b)"),
        ({"a": (ASYNC_BLOCKS, several(3))}, "a", "(a -> a)"),
        ({"a": (ASYNC_BLOCKS, several(3)), "b": (BLOCKS, CONFIG)}, "b,a", "(b -> a -> b)"),
    ],
)
async def test_circles(
    tmp_path: Path,
    execution: str,
    models: dict[str, tuple[str, str]],
    way: str,
    circle: str,
) -> None:
    """The circle is named, and service goes on: once alone, once with others in the same place."""
    for name, (code, config) in models.items():
        write(tmp_path, name, code, config)
    async with served(tmp_path, execution) as running:
        answer = await ask(running, "a", way)
        assert REFUSED in answer
        assert circle in answer
        for answer in await asyncio.gather(*(ask(running, "a", way) for _ in range(6))):
            assert REFUSED in answer
        for name in models:
            assert await ask(running, name) == "end"


@pytest.mark.parametrize("way", ["e", "outer"])
@pytest.mark.parametrize("limit", [0, 1])
async def test_circle_through_an_ensemble(
    tmp_path: Path, execution: str, way: str, limit: int
) -> None:
    """A model that calls an ensemble of itself waits for itself, however deep it is inside."""
    write(tmp_path, "a", AWAITS if limit else BLOCKS, several(limit) if limit else CONFIG)
    write_ensemble(tmp_path, "e", "a")
    write_ensemble(tmp_path, "outer", "e")
    async with served(tmp_path, execution) as models:
        assert REFUSED in await ask(models, "a", way)
        assert await ask(models, way) == "end"


async def test_circle_through_an_ensemble_with_a_free_instance(
    tmp_path: Path, execution: str
) -> None:
    """The free instances of b are of no use to a, which waits for the one that calls it back."""
    write(tmp_path, "a", BLOCKS)
    write(tmp_path, "b", BLOCKS, CONFIG.replace("KIND_CPU", "KIND_CPU count: 3"))
    write_ensemble(tmp_path, "e", "b")
    async with served(tmp_path, execution) as models:
        answer = await ask(models, "a", "e,a")
        assert "(b -> a -> e -> b)" in answer


INFLIGHT = "max_inflight_requests: 1"


async def test_circle_through_the_limit_of_an_ensemble(tmp_path: Path, execution: str) -> None:
    """There are free instances, but the call is behind the one that waits for it."""
    write(tmp_path, "a", BLOCKS)
    write(tmp_path, "b", BLOCKS, CONFIG.replace("KIND_CPU", "KIND_CPU count: 3"))
    write_ensemble(tmp_path, "e", "b", limit=INFLIGHT)
    async with served(tmp_path, execution) as models:
        assert "(b -> e -> b)" in await ask(models, "a", "e,e")
        assert await ask(models, "a", "e") == "end"


async def test_circle_of_both_kinds_of_execution(tmp_path: Path, execution: str) -> None:
    """A model in a process and one in a thread find their circle."""
    other = "thread" if execution == "process" else "process"
    write(tmp_path, "a", BLOCKS)
    write(tmp_path, "b", AWAITS, several(1) + parameter("execution", other))
    async with served(tmp_path, execution) as models:
        assert REFUSED in await ask(models, "a", "b,a")
        assert REFUSED in await ask(models, "b", "a,b")


# Models that call themselves in the way that the request id names, and wait for it by other means
# than in the place of the call.
CALLS_ITSELF = """
def itself(r):
    x = pb_utils.Tensor("IN", tensor(r).as_numpy())
    return pb_utils.InferenceRequest(model_name="a", requested_output_names=["OUT"], inputs=[x])

def first(answers):
    return [value(answer) for answer in answers][0]

class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(
            json.loads(args["model_config"]))
        self.pool = concurrent.futures.ThreadPoolExecutor()

    def answer(self, requests, answers):
        if not self.decoupled:
            return [report(answer) for answer in answers]
        for request, answer in zip(requests, answers):
            request.get_response_sender().send(report(answer), flags=1)
"""

WAITS_FOR_THREADS = (
    CALLS_ITSELF
    + """
    def execute(self, requests):
        return self.answer(requests, [self.one(r, r.request_id()) for r in requests])

    def one(self, r, how):
        return getattr(self, how)(itself(r)) if how else "end"

    def joins(self, call):
        got = []
        thread = threading.Thread(target=lambda: got.append(first(call.exec(decoupled=True))))
        thread.start()
        thread.join()
        return got[0]

    def result(self, call):
        return self.pool.submit(lambda: first(call.exec(decoupled=True))).result()

    def maps(self, call):
        return list(self.pool.map(lambda call: first(call.exec(decoupled=True)), [call]))[0]

    def waits(self, call):
        futures = [self.pool.submit(first, call.exec(decoupled=True)), self.pool.submit(str)]
        return concurrent.futures.wait(futures).done and futures[0].result()

    def waits_for_first(self, call):
        futures = [self.pool.submit(first, call.exec(decoupled=True)) for _ in range(2)]
        return concurrent.futures.wait(futures, return_when="FIRST_COMPLETED").done.pop().result()

    def as_completed(self, call):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # others have to wait for these
            futures = [pool.submit(lambda: first(call.exec(decoupled=True))) for _ in range(4)]
            return [future.result() for future in concurrent.futures.as_completed(futures)][0]

    def thread_pool(self, call):
        with multiprocessing.pool.ThreadPool(2) as pool:
            return pool.map(lambda call: first(call.exec(decoupled=True)), [call] * 3)[0]

    def one_of_thread_pool(self, call):
        with multiprocessing.pool.ThreadPool(3) as pool:
            return pool.apply(lambda: first(call.exec(decoupled=True)))

    def thread_pool_one_by_one(self, call):
        with multiprocessing.pool.ThreadPool(2) as pool:
            return next(pool.imap(lambda call: first(call.exec(decoupled=True)), [call] * 2))

    def shuts_down(self, call):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(lambda: first(call.exec(decoupled=True)))
        return answer.result()

    def runs_loop(self, call):
        async def answer():
            return [value(a) async for a in await call.async_exec(decoupled=True)][0]
        return asyncio.run(answer())

    def runs_loop_for_thread(self, call):
        return asyncio.run(asyncio.to_thread(lambda: first(call.exec(decoupled=True))))
"""
)

WAITS_FOR_TASKS = (
    CALLS_ITSELF
    + """
    async def execute(self, requests):
        return self.answer(requests, [await self.one(r, r.request_id()) for r in requests])

    async def one(self, r, how):
        return await getattr(self, how)(itself(r)) if how else "end"

    async def streams(self, call):
        return [value(a) async for a in await call.async_exec(decoupled=True)][0]

    async def gathers(self, call):
        return (await asyncio.gather(self.streams(call), self.streams(call)))[1]

    async def waits(self, call):
        done, _ = await asyncio.wait([asyncio.ensure_future(self.streams(call))])
        return done.pop().result()

    async def awaits_task(self, call):
        return await asyncio.ensure_future(self.streams(call))

    async def waits_for(self, call):
        return await asyncio.wait_for(self.streams(call), None)

    async def awaits_thread(self, call):
        return await asyncio.to_thread(lambda: first(call.exec(decoupled=True)))

    async def awaits_busy_threads(self, call):
        loop = asyncio.get_running_loop()
        def answer():
            return first(call.exec(decoupled=True))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            *_, last = [loop.run_in_executor(pool, answer) for _ in range(2)]
            return await last

    async def as_completed(self, call):
        return [await each for each in asyncio.as_completed(map(self.streams, [call, call]))][0]

    async def shields(self, call):
        return await asyncio.shield(asyncio.ensure_future(self.streams(call)))

    async def locks(self, call):
        return await self.behind(asyncio.Lock(), call)

    async def condition(self, call):
        return await self.behind(asyncio.Condition(), call)

    async def semaphore(self, call):
        return await self.behind(asyncio.BoundedSemaphore(2), call)

    async def behind(self, lock, call):
        async def answer():
            async with lock:
                return await self.streams(call)
        async def later():
            async with lock:
                return "later"
        tasks = [asyncio.ensure_future(answer()) for _ in range(2)]
        await asyncio.sleep(0)
        return await later() and await tasks[0]

    async def groups(self, call):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.streams(call)) for _ in range(2)]
        return tasks[0].result()
"""
)


@pytest.mark.parametrize("config", [CONFIG, DECOUPLED], ids=["", "decoupled"])
@pytest.mark.parametrize(
    ("code", "ways"),
    [
        (
            WAITS_FOR_THREADS,
            [
                "joins", "result", "maps", "waits", "waits_for_first", "as_completed",
                "thread_pool", "one_of_thread_pool", "thread_pool_one_by_one",
                "shuts_down", "runs_loop", "runs_loop_for_thread",
            ],
        ),
        (
            WAITS_FOR_TASKS,
            [
                "streams", "gathers", "waits", "awaits_task", "waits_for", "awaits_thread",
                "awaits_busy_threads", "as_completed", "shields", "locks", "condition", "semaphore",
                "groups",
            ],
        ),
    ],
    ids=["threads", "tasks"],
)  # fmt: skip
async def test_what_execute_waits_for(
    tmp_path: Path, execution: str, config: str, code: str, ways: list[str]
) -> None:
    """What a thread, loop or task waits for that execute waits for, execute waits for."""
    write(tmp_path, "a", code, config + parameter("async_batches", "1"))
    async with served(tmp_path, execution) as models:
        answers = {way: await ask(models, "a", way) for way in ways}
        assert {way for way, answer in answers.items() if REFUSED in answer} == set(ways)
        assert await ask(models, "a") == "end"


RESOURCE = 'KIND_CPU rate_limiter { resources [ { name: "R" count: 1 } ] }'


@pytest.mark.parametrize("amount", [1, 2])
@pytest.mark.parametrize(
    ("callee", "circle"), [("b", "(a -> b -> a)"), ("identity", "(a -> identity -> a)"), ("a", "a")]
)
async def test_resource_of_the_rate_limiter(
    tmp_path: Path, execution: str, callee: str, circle: str, amount: int
) -> None:
    """A model that holds what the one it calls needs waits for itself, unless there is enough."""
    limited = CONFIG.replace("KIND_CPU", RESOURCE)
    code = BLOCKS.replace("value(along(r).exec())", "outcome(along(r).exec())")
    write(tmp_path, "a", code, limited.replace("] } }", "] } count: 2 }"))
    write(tmp_path, "b", BLOCKS, limited)
    write(tmp_path, "identity", BLOCKS, limited.replace('"python"', '"identity"'))
    if amount == 2:  # is as much as the neediest needs
        write(tmp_path, "c", BLOCKS, limited.replace("count: 1", "count: 2"))
    async with served(tmp_path, execution, rate_limit="execution_count") as models:
        answer = await ask(models, "a", callee)
        assert answer == "end" if amount == 2 else circle in answer and REFUSED in answer
        assert await ask(models, "a") == "end"


SEQUENCES = (
    CONFIG.replace("max_batch_size: 0", "max_batch_size: 1").replace(
        "KIND_CPU", "KIND_CPU count: 2"
    )
    + "sequence_batching { max_sequence_idle_microseconds: 60000000 }"
)


@pytest.mark.parametrize("code", [BLOCKS, AWAITS], ids=["blocks", "awaits"])
async def test_sequence_that_continues_itself(tmp_path: Path, execution: str, code: str) -> None:
    """The request belongs on the instance that waits for it, though another one is free."""
    code = code.replace("along(r)", "along(r, r.correlation_id())")
    write(tmp_path, "a", code, SEQUENCES)
    async with served(tmp_path, execution) as models:
        one = {"IN": np.ones((1, 1), np.float32)}
        answer = await models.infer("a", one, id="a", correlation_id=5, flags=1)
        assert REFUSED in json.loads(answer.text)
        again = await models.infer("a", one, correlation_id=5, flags=1)
        assert json.loads(again.text) == "end"


async def test_answer_is_not_held_back_for_the_order(tmp_path: Path, execution: str) -> None:
    """With preserve_ordering a model is answered before the request for which it asks."""
    two = CONFIG.replace("max_batch_size: 0", "max_batch_size: 1")
    two = two.replace("KIND_CPU", "KIND_CPU count: 2")
    write(tmp_path, "a", BLOCKS, two + "dynamic_batching { preserve_ordering: true }")
    async with served(tmp_path, execution) as models:
        one = {"IN": np.ones((1, 1), np.float32)}
        answer = await models.infer("a", one, id="a")
        assert json.loads(answer.text) == "end"


# ------------------------------------------------------------------- what must not be refused


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], asyncio.Future[None]]:
    """A function that gives a future, set when it was looked for circles twice more."""
    waiting: list[tuple[asyncio.Future[None], int]] = []
    find = CallGraph.circle

    def circle(self: CallGraph) -> list[Call]:
        found = find(self)
        for entry in waiting[:]:
            waiting.remove(entry)
            future, left = entry
            if left:
                waiting.append((future, left - 1))
            else:
                future.set_result(None)
        return found

    def begin() -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        waiting.append((future, 1))
        return future

    monkeypatch.setattr(CallGraph, "circle", circle)
    return begin


async def _goes_on(
    tmp_path: Path, execution: str, judged: Callable[[], asyncio.Future[None]], chain: str
) -> None:
    """Model a goes on once the gate is opened, which is after its calls were judged."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with served(tmp_path, execution) as models:
        looked = judged()
        call = models.start("a", id=chain)
        await looked
        await _open(gate)
        assert json.loads((await call.answer()).text) == "opened"
        assert await ask(models, "a") == "end"


async def _open(gate: Path) -> None:
    """Let a model go on that waits in `wait_for_test`."""
    await asyncio.to_thread(gate.write_text, "opened")


GOES_ON = {
    "unread stream": """
    def execute(self, requests):
        (r,) = requests
        if r.request_id():
            self.kept = along(r).exec(decoupled=True)
            return [report(wait_for_test())]
        return [report("end")]
""",
    "thread": """
    def execute(self, requests):
        (r,) = requests
        if r.request_id():
            self.kept = threading.Thread(target=lambda: self.got.append(value(along(r).exec())))
            self.kept.start()
            return [report(wait_for_test())]
        return [report("end")]
""",
    "loop that outlives execute": """
    def execute(self, requests):
        (r,) = requests
        if r.request_id():
            self.loop = asyncio.new_event_loop()
            self.kept = self.loop.create_task(along(r).async_exec())
            self.loop.run_until_complete(asyncio.sleep(0))
            return [report(wait_for_test())]
        if not self.got:  # called by itself
            self.got.append("called")
            return [report("called")]
        answer = value(self.loop.run_until_complete(self.kept))
        self.loop.close()
        return [report("end" if answer == "called" else answer)]
""",
    "task": """
    async def execute(self, requests):
        (r,) = requests
        if r.request_id():
            self.kept = asyncio.ensure_future(along(r).async_exec())
            return [report(await asyncio.to_thread(wait_for_test))]
        return [report("end")]
""",
    "first of two": """
    async def execute(self, requests):
        (r,) = requests
        if r.request_id():
            self.kept = asyncio.ensure_future(along(r).async_exec())
            test = asyncio.ensure_future(asyncio.to_thread(wait_for_test))
            done, _ = await asyncio.wait([self.kept, test], return_when="FIRST_COMPLETED")
            return [report(done.pop().result())]
        return [report("end")]
""",
    "odd future": """
    class Odd(asyncio.Future):
        __hash__ = None

    async def execute(self, requests):
        (r,) = requests
        if r.request_id():
            self.kept = asyncio.ensure_future(along(r).async_exec())
            loop, odd = asyncio.get_running_loop(), self.Odd()

            def wait():
                loop.call_soon_threadsafe(odd.set_result, wait_for_test())

            threading.Thread(target=wait).start()
            return [report(await odd)]
        return [report("end")]
""",
    "own loop": """
    def execute(self, requests):
        (r,) = requests
        if r.request_id():
            return [report(asyncio.run(self.one(r)))]
        return [report("end")]

    async def one(self, r):
        self.kept = asyncio.ensure_future(along(r).async_exec())
        return await asyncio.to_thread(wait_for_test)
""",
}

IN_THREADS = """
    def execute(self, requests):
        (r,) = requests
        if not r.request_id():
            return [report("end")]
        self.pool = concurrent.futures.ThreadPoolExecutor(2)
        return [report(self.one(lambda: value(along(r).exec())))]

    threads = None

    def finalize(self):
        if self.threads is not None:
            self.threads.close()
"""

GOES_ON_IN_THREADS = {
    "first of two": """
    def one(self, call):
        both = [self.pool.submit(call), self.pool.submit(wait_for_test)]
        done, _ = concurrent.futures.wait(both, return_when="FIRST_COMPLETED")
        return done.pop().result()
""",
    "any of two": """
    def one(self, call):
        both = [self.pool.submit(call), self.pool.submit(wait_for_test)]
        return next(concurrent.futures.as_completed(both)).result()
""",
    "for some time": """
    def one(self, call):
        both = [self.pool.submit(call), self.pool.submit(wait_for_test)]
        concurrent.futures.wait(both[:1], timeout=0.3)
        return both[1].result()
""",
    "in the queue of a pool": """
    def one(self, call):
        *_, last = [self.pool.submit(each) for each in (call, wait_for_test, lambda: "opened")]
        return next(concurrent.futures.as_completed([last])).result()
""",
    "callback of what is done": """
    def one(self, call):
        def ends_while_it_is_waited_for():
            while not first._waiters:
                os.sched_yield()

        begin = threading.Lock()
        with begin:
            first = self.pool.submit(lambda: begin.acquire() and ends_while_it_is_waited_for())
            first.add_done_callback(lambda _: call())
        second = self.pool.submit(wait_for_test)
        concurrent.futures.wait([first, second])
        return second.result()
""",
    "thread pool": """
    def one(self, call):
        self.threads = multiprocessing.pool.ThreadPool(2)
        return [self.threads.apply_async(each) for each in (call, wait_for_test)][1].get()
""",
    "any of a thread pool": """
    def one(self, call):
        self.threads = multiprocessing.pool.ThreadPool(2)
        return next(self.threads.imap_unordered(lambda each: each(), [call, wait_for_test]))
""",
}

IN_TASKS = """
    async def execute(self, requests):
        (r,) = requests
        if not r.request_id():
            return [report("end")]
        return [report(await self.one(along(r)))]

    async def both(self, call, lock):
        self.tasks = [asyncio.ensure_future(each) for each in (self.first(call, lock),
                                                               self.second(lock))]
        await asyncio.sleep(0)
        async with lock:
            return "opened"

    async def second(self, lock):
        await lock.acquire()
        await asyncio.to_thread(wait_for_test)
        lock.release()

    async def first(self, call, lock):
        async with lock:
            await call.async_exec()
"""

GOES_ON_IN_TASKS = {
    "any of two": """
    async def one(self, call):
        for each in asyncio.as_completed([call.async_exec(), asyncio.to_thread(wait_for_test)]):
            return await each
""",
    "shield": """
    async def one(self, call):
        self.kept = asyncio.ensure_future(call.async_exec())
        return await asyncio.shield(asyncio.to_thread(wait_for_test))
""",
    "lock that was let go of": """
    async def one(self, call):
        return await self.both(call, asyncio.Lock())

    async def first(self, call, lock):
        async with lock:
            lock.release()
            await call.async_exec()
            await lock.acquire()
""",
    "condition": """
    async def one(self, call):
        return await self.both(call, asyncio.Condition())

    async def first(self, call, condition):
        self.kept = asyncio.ensure_future(call.async_exec())
        async with condition:
            await condition.wait_for(lambda: self.kept.done())
""",
    "semaphore": """
    async def one(self, call):
        return await self.both(call, asyncio.Semaphore(2))
""",
    "bounded semaphore": """
    async def one(self, call):
        return await self.both(call, asyncio.BoundedSemaphore(2))
""",
    "event": """
    async def one(self, call):
        event = asyncio.Event()
        self.kept = asyncio.ensure_future(call.async_exec())
        self.other = asyncio.ensure_future(asyncio.to_thread(wait_for_test))
        self.other.add_done_callback(lambda _: event.set())
        return await event.wait() and "opened"
""",
    "queue": """
    async def one(self, call):
        queue = asyncio.Queue()
        self.kept = asyncio.ensure_future(call.async_exec())
        self.other = asyncio.ensure_future(asyncio.to_thread(wait_for_test))
        self.other.add_done_callback(lambda _: queue.put_nowait("opened"))
        return await queue.get()
""",
}
GOES_ON |= {f"{how}, threads": IN_THREADS + code for how, code in GOES_ON_IN_THREADS.items()}
GOES_ON |= {f"{how}, tasks": IN_TASKS + code for how, code in GOES_ON_IN_TASKS.items()}


@pytest.mark.parametrize("how", GOES_ON)
async def test_call_that_nobody_waits_for(
    tmp_path: Path,
    execution: str,
    how: str,
    judged: Callable[[], asyncio.Future[None]],
) -> None:
    """The caller holds the only place, but does not wait: the call is answered after it."""
    code = "\nclass TritonPythonModel:\n    got = []\n" + GOES_ON[how]
    write(tmp_path, "a", code, several(1))
    await _goes_on(tmp_path, execution, judged, "a")


@pytest.mark.parametrize("lock", ["Lock()", "BoundedSemaphore(1)", "Condition()"])
async def test_lock_that_another_batch_has(tmp_path: Path, execution: str, lock: str) -> None:
    """There are places left, but who has the lock waits for who wants it."""
    code = f"""
class TritonPythonModel:
    def initialize(self, args):
        self.lock = asyncio.{lock}

    async def execute(self, requests):
        return [report(await self.one(r)) for r in requests]

    async def one(self, r):
        async with self.lock:
            return value(await along(r).async_exec()) if r.request_id() else "end"
"""
    write(tmp_path, "a", code)
    write(tmp_path, "b", BLOCKS)
    async with served(tmp_path, execution) as models:
        assert "(b -> a -> b)" in await ask(models, "a", "b,a")
        assert await ask(models, "a", "b") == "end"


async def test_event_that_a_request_sets(
    tmp_path: Path, execution: str, judged: Callable[[], asyncio.Future[None]]
) -> None:
    """As long as there are places, a client may bring what all wait for."""
    code = """
class TritonPythonModel:
    def initialize(self, args):
        self.event = asyncio.Event()

    async def execute(self, requests):
        (r,) = requests
        if r.request_id() == "set":
            self.event.set()
        elif r.request_id():
            return [report(value(await along(r).async_exec()))]
        await self.event.wait()
        return [report("end")]
"""
    write(tmp_path, "a", code)
    write(tmp_path, "b", BLOCKS)
    async with served(tmp_path, execution) as models:
        looked = judged()
        call = models.start("a", id="b,a")
        await looked
        assert await ask(models, "a", "set") == "end"
        assert json.loads((await call.answer()).text) == "end"


async def test_call_at_the_limit_of_an_ensemble(
    tmp_path: Path, execution: str, judged: Callable[[], asyncio.Future[None]]
) -> None:
    """It is let through once the one before it is answered, by a model that does not wait."""
    write(tmp_path, "a", BLOCKS)
    write(tmp_path, "b", "class TritonPythonModel:" + GOES_ON["unread stream"])
    write_ensemble(tmp_path, "e", "b", limit=INFLIGHT)
    await _goes_on(tmp_path, execution, judged, "e,e")


async def test_call_with_a_time_out_of_its_own(tmp_path: Path, execution: str) -> None:
    """A model that waits for some time only goes on by itself."""
    code = """
class TritonPythonModel:
    async def execute(self, requests):
        (r,) = requests
        if not r.request_id():
            return [report("end")]
        try:
            return [report(value(await asyncio.wait_for(along(r).async_exec(), 0.5)))]
        except asyncio.TimeoutError:
            return [report("timed out")]
"""
    write(tmp_path, "a", code, several(1))
    async with served(tmp_path, execution) as models:
        assert await ask(models, "a", "a") == "timed out"
        assert await ask(models, "a") == "end"


@pytest.mark.parametrize(
    ("ends", "batching", "text"),
    [
        ("", "priority_levels: 2 default_priority_level: 2", REFUSED),
        (
            "",
            "default_queue_policy { default_timeout_microseconds: 300000 }",
            "Request timeout expired",
        ),
        ("answers.cancel()", "", ""),
    ],
    ids=["priorities", "queue time-out", "cancelled"],
)
async def test_call_in_the_queue_of_a_batcher(
    tmp_path: Path, execution: str, ends: str, batching: str, text: str
) -> None:
    """A call that leaves the queue by itself is not refused."""
    code = f"""
class TritonPythonModel:
    def execute(self, requests):
        return [report(self.one(r) if r.request_id() else "end") for r in requests]

    def one(self, r):
        answers = along(r).exec(decoupled=True)
        {ends}
        return [value(answer) for answer in answers][0]
"""
    config = CONFIG.replace("max_batch_size: 0", "max_batch_size: 2")
    write(tmp_path, "a", code, config + f"dynamic_batching {{ {batching} }}")
    write_ensemble(tmp_path, "e", "a", config)
    async with served(tmp_path, execution) as models:
        one = {"IN": np.ones((1, 1), np.float32)}
        answer = json.loads((await models.infer("a", one, id="a")).text)
        assert text in answer if text else answer == ""
        if "time" in text:
            assert text in json.loads((await models.infer("a", one, id="e")).text)
        assert json.loads((await models.infer("a", one)).text) == "end"


async def test_instance_that_dies_in_a_circle(
    tmp_path: Path, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its death ends the calls it had and those it made."""
    if execution == "thread":
        pytest.skip("a thread takes the server with it")
    monkeypatch.setattr(call_watch, "_PAUSE_S", 3600)
    dies = BLOCKS.replace(
        "    def execute(self, requests):\n",
        "    def execute(self, requests):\n"
        "        threading.Thread(target=lambda: wait_for_test() and os._exit(1)).start()\n",
    )
    write(tmp_path, "a", BLOCKS)
    write(tmp_path, "b", dies)
    os.mkfifo(tmp_path / "gate")
    async with served(tmp_path, execution) as models:
        call = models.start("a", id="b,a")
        await _open(tmp_path / "gate")
        assert "Stub process 'b_0_0' is not healthy" in json.loads((await call.answer()).text)
        assert await ask(models, "a") == "end"


async def test_whoever_waits_for_the_circle_gets_its_answer(tmp_path: Path, execution: str) -> None:
    """A call that a circle holds up is answered once the circle is broken."""
    write(tmp_path, "a", BLOCKS)
    write(tmp_path, "b", BLOCKS)
    async with served(tmp_path, execution) as models:
        circle, waits = models.start("a", id="a"), models.start("b", id="a")
        assert REFUSED in json.loads((await circle.answer()).text)
        assert json.loads((await waits.answer()).text) == "end"


async def test_sender_that_another_thread_uses(
    tmp_path: Path, execution: str, judged: Callable[[], asyncio.Future[None]]
) -> None:
    """A thread that answers the call for which execute waits makes both go on."""
    first = "[value(a) for a in along(r).exec(decoupled=True)][0]"
    write(tmp_path, "a", BLOCKS.replace("value(along(r).exec())", first))
    code = """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()

            def answer():
                sender.send(report(wait_for_test()), flags=1)

            threading.Thread(target=answer).start()
            self.got = value(along(r).exec())
"""
    write(tmp_path, "b", code, DECOUPLED)
    await _goes_on(tmp_path, execution, judged, "b,a")
