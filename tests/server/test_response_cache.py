"""The response cache: keys, hits, misses, eviction. Redis is in test_redis_cache.py."""

from __future__ import annotations

import asyncio
import threading

import pytest
from google.protobuf import text_format

from npuserve.errors import InvalidArgumentError, UnavailableError
from npuserve.model_config import ModelConfig
from npuserve.options import ServerOptions
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.response_cache import (
    LocalStore,
    ModelCache,
    Store,
    create_cache,
    pack_response,
    unpack_response,
)
from npuserve.server.schedulers.default import DefaultScheduler
from npuserve.server.schedulers.dynamic_batcher import DynamicBatcher
from npuserve.tensor import Tensor
from npuserve.testing.clock import FakeClock
from npuserve.testing.instances import FakePool, context_of


class Pool(FakePool):
    """Answers with the number of the execution."""

    def answer(self, request: InferenceRequest) -> None:
        data = bytes([len(self.executed)])
        names = request.requested_outputs or ("A", "B")
        response = InferenceResponse([Tensor(name, "UINT8", [1, 1], data) for name in names])
        request.deliver(InferenceResponse.from_error(UnavailableError("no")) if self.fail
                        else response, True)  # fmt: skip


class Model:
    """A caching model and its answers: the number of the execution they came from."""

    def __init__(self, store: Store, batching: str | None = None, version: int = 1) -> None:
        self.clock = FakeClock()
        config = ModelConfig()
        scheduling = "" if batching is None else f"dynamic_batching {{ {batching} }}"
        text_format.Parse(
            f'name: "m" max_batch_size: 4 {scheduling} response_cache {{ enable: true }} '
            'output { name: "A" } output { name: "B" }',
            config,
        )
        self.pool = Pool(self.clock)
        self.statistics = self.pool.statistics
        scheduler = DefaultScheduler if batching is None else DynamicBatcher
        self.scheduler = scheduler(context_of(config, self.pool, cache=store, version=version))
        self.answers: list[int | str] = []
        self.answered = asyncio.Event()

    async def wait_for_answers(self, count: int) -> None:
        """Return once so many requests are answered."""
        async with asyncio.timeout(10):
            while len(self.answers) < count:
                self.answered.clear()
                await self.answered.wait()

    def send(
        self,
        data: bytes = b"x",
        *,
        name: str = "IN",
        shape: tuple[int, ...] = (1, 1),
        outputs: tuple[str, ...] = (),
    ) -> None:
        """Send a request and let the loop run."""

        def respond(response: InferenceResponse | None, final: bool) -> None:
            assert response is not None
            self.answers.append(
                str(response.error) if response.error else bytes(response.outputs[0].data)[0]
            )
            self.answered.set()

        tensor = Tensor(name, "UINT8", shape, data)
        request = InferenceRequest("m", {name: tensor}, respond, requested_outputs=outputs)
        request.batch_size = 1
        self.statistics.pending += 1
        self.scheduler.enqueue(request)
        self.clock.run()


def test_the_second_same_request_is_answered_from_the_cache() -> None:
    """A hit is a success without inference or execution."""
    model = Model(LocalStore(10_000))
    for data in (b"x", b"x", b"y", b"x"):
        model.send(data)
    assert model.answers == [1, 1, 2, 1]
    statistics = model.statistics
    assert (statistics.cache_hit.count, statistics.cache_miss.count) == (2, 2)
    assert (statistics.success.count, statistics.queue.count) == (2, 2)  # the pool counts none
    assert statistics.pending == 0


def test_what_makes_two_requests_different() -> None:
    """Input names, bytes and shapes count; so does the version."""
    store = LocalStore(100_000)
    model = Model(store)
    model.send(b"xy", shape=(1, 2))
    model.send(b"xy", shape=(2, 1))
    model.send(b"xy", shape=(1, 2), name="OTHER")
    assert model.answers == [1, 2, 3]
    other = Model(store, version=2)
    other.send(b"xy", shape=(1, 2))
    assert other.statistics.cache_hit.count == 0


def test_a_hit_must_have_all_outputs_asked_for() -> None:
    """A response computed for one output does not answer a request for both."""
    model = Model(LocalStore(10_000))
    model.send(outputs=("A",))
    model.send(outputs=("A",))
    model.send()
    assert model.answers == [1, 1, 2]


def test_error_responses_are_not_kept() -> None:
    """A failed request is executed again."""
    model = Model(LocalStore(10_000))
    model.pool.fail = True
    model.send()
    model.pool.fail = False
    model.send()
    assert model.answers == ["no", 2]


def test_the_least_recently_used_entry_is_evicted() -> None:
    """With room for two entries, the one not used for longest makes place."""
    store = LocalStore(1_500)
    model = Model(store)
    for data in (b"a", b"b", b"a", b"c", b"a", b"b"):
        model.send(data)
    assert model.answers == [1, 2, 1, 3, 1, 4]
    assert (len(store), store.evictions) == (2, 2)
    assert store.used_bytes <= store.max_bytes


def test_an_entry_above_the_budget_is_logged_and_not_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A cache too small for a response goes on without it."""
    store = LocalStore(100)
    model = Model(store)
    model.send()
    model.send()
    assert model.answers == [1, 2]
    assert "Failed to insert" in caplog.text
    assert len(store) == 0


def test_a_hit_waits_its_turn_where_ordering_is_preserved() -> None:
    """With preserve_ordering a hit comes after the answers before it."""
    store = LocalStore(10_000)
    model = Model(store, "preserve_ordering: true")
    model.send(b"known")
    model.pool.duration_ns = 1_000
    model.send(b"slow")
    model.send(b"known")
    assert model.answers == [1]
    model.clock.advance(us=1)
    assert model.answers == [1, 2, 1]


async def test_keys_of_large_inputs_are_made_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hit like others, and requests keep their order."""
    threads: list[bool] = []
    key_of = ModelCache.key_of

    def watched(cache: ModelCache, request: InferenceRequest) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return key_of(cache, request)

    monkeypatch.setattr(ModelCache, "key_of", watched)
    model = Model(LocalStore(10_000))
    large = bytes(1 << 20)
    for data in (large, b"x"):  # the second one is behind the first
        model.send(data, shape=(1, len(data)))
    assert model.answers == []
    await model.wait_for_answers(2)
    for data in (large, b"x"):
        model.send(data, shape=(1, len(data)))
    await model.wait_for_answers(4)
    assert model.answers == [1, 2, 1, 2]
    model.send(b"x")
    assert threads == [False] * 4 + [True]
    assert (model.statistics.cache_hit.count, model.statistics.pending) == (3, 0)


async def test_a_key_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request is answered, and the ones behind it are."""

    def no_memory(*_: object) -> bytes:
        raise MemoryError("none left")

    model = Model(LocalStore(10_000))
    large = bytes(1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(ModelCache, "key_of", no_memory)
        model.send(large, shape=(1, len(large)))
        await model.wait_for_answers(1)
    model.send(b"x")
    assert "none left" in str(model.answers[0])
    assert model.answers[1] == 1
    assert (model.statistics.failures["OTHER"], model.statistics.pending) == (1, 0)


async def test_a_large_request_that_the_queue_refuses_is_answered() -> None:
    """Its caller has returned when its key is known."""
    model = Model(LocalStore(10_000), "default_queue_policy { max_queue_size: 1 }")
    for number in range(4):
        model.send(bytes([number]) * (1 << 20), shape=(1, 1 << 20))
    await model.wait_for_answers(1)
    assert "Exceeds maximum queue size" in str(model.answers[0])


def test_a_packed_response_is_the_same() -> None:
    """Outputs and parameters survive the way into a store and out."""
    tensors = [Tensor("A", "BYTES", [2], b"\1\0\0\0a\0\0\0\0"), Tensor("B", "FP32", [0], b"")]
    packed = pack_response(InferenceResponse(tensors, parameters={"k": 1.5}))
    response = unpack_response(packed)
    assert response.parameters == {"k": 1.5}
    assert [(t.name, t.datatype, t.shape, bytes(t.data)) for t in response.outputs] == [
        (t.name, t.datatype, list(t.shape), t.data) for t in tensors
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local": {"size": "0"}}, "size=<bytes> must be a positive number"),
        ({"local": {"size": "²"}}, "size=<bytes> must be a positive number"),
        ({"local": {"size": "9" * 18}}, "is more than the [0-9]+ bytes of this machine"),
        ({"local": {"size": "1"}, "redis": {}}, "only a single cache is currently supported"),
        ({"redis": {}}, "needs host"),
        ({"memcached": {}}, "unknown cache 'memcached'"),
    ],
)
def test_settings_that_make_no_cache(settings: dict[str, dict[str, str]], message: str) -> None:
    """Bad --cache-config settings say what is wrong."""
    with pytest.raises(InvalidArgumentError, match=message):
        create_cache(ServerOptions(model_repository=("r",), cache_config=settings))
