"""The response cache: one store per server, one `ModelCache` per model that uses it.

A store keeps bytes under a key and knows nothing of requests: `LocalStore` in this process
(least recently used, bounded in bytes), `RedisStore` shared between servers. `ModelCache` makes
the keys, answers hits and stores what the model answers to misses; schedulers let it `admit`
every request before they queue it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from npuserve.errors import (
    InvalidArgumentError,
    NpuserveError,
    RequestCancelledError,
    as_npuserve_error,
)
from npuserve.model_config import is_decoupled
from npuserve.response import InferenceResponse
from npuserve.server.execution import reject
from npuserve.server.statistics import FailureReason
from npuserve.tensor import Buffer, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npuserve.options import ServerOptions
    from npuserve.request import InferenceRequest, ResponseCallback
    from npuserve.server.response_order import ResponseOrder
    from npuserve.server.schedulers.base import SchedulerContext

logger = logging.getLogger(__name__)

_now_ns = time.monotonic_ns

# What an entry costs besides its tensors' bytes: the key and the objects around them.
_ENTRY_OVERHEAD_BYTES = 512

_REDIS_PAUSE_NS = 1_000_000_000

# Keys of larger inputs are made beside the event loop: a digest takes a millisecond a megabyte.
_LARGE_BYTES = 1 << 20


class Store(Protocol):
    """Keeps packed responses. Loop thread only; `get` calls back, at once or later, in order."""

    def get(self, key: bytes, found: Callable[[bytes | None], None]) -> None:
        """Call `found` with the value, or None if there is none (or none can be had)."""

    def put(self, key: bytes, value: bytes) -> None:
        """Keep the value if possible; a failure is only logged."""

    def close(self) -> None:
        """Free everything."""


class LocalStore:
    """Least-recently-used store in the memory of this process.

    Args:
        max_bytes: budget; an entry that would not fit even alone is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.lookup_ns = 0
        self.insertion_ns = 0
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, found: Callable[[bytes | None], None]) -> None:
        """See `Store.get`."""
        start = _now_ns()
        value = self._entries.get(key)
        if value is None:
            self.misses += 1
        else:
            self.hits += 1
            self._entries.move_to_end(key)
        self.lookup_ns += _now_ns() - start
        found(value)

    def put(self, key: bytes, value: bytes) -> None:
        """See `Store.put`."""
        start = _now_ns()
        size = len(value) + _ENTRY_OVERHEAD_BYTES
        if size > self.max_bytes:
            logger.error(
                "Failed to insert a response of %d bytes into a cache of %d bytes",
                len(value),
                self.max_bytes,
            )
            return
        if key not in self._entries:  # else the same request was executed twice side by side
            while self.used_bytes + size > self.max_bytes:
                _, old = self._entries.popitem(last=False)
                self.used_bytes -= len(old) + _ENTRY_OVERHEAD_BYTES
                self.evictions += 1
            self._entries[key] = value
            self.used_bytes += size
        self.insertion_ns += _now_ns() - start

    def close(self) -> None:
        """See `Store.close`."""
        self._entries.clear()
        self.used_bytes = 0


class RedisStore:
    """Responses in a Redis server, through one helper thread, which keeps lookups in order.

    A server that cannot be reached is a miss; requests are executed as without a cache, and for a
    second it is not asked again.

    Args:
        unreachable: exceptions of the client that say so; others are about one command.
    """

    def __init__(
        self,
        client: Any,
        call_soon_threadsafe: Callable[..., object],
        unreachable: tuple[type[Exception], ...],
    ) -> None:
        self._client = client
        self._call_loop = call_soon_threadsafe
        self._unreachable = unreachable
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="redis-cache")
        self._failing: set[str] = set()  # reported: commands, and "" for a server out of reach
        self._retry_ns = 0
        # Differs from Triton: it does not start without its cache. Here the log says so.
        self._thread.submit(self._command, "ping")

    def get(self, key: bytes, found: Callable[[bytes | None], None]) -> None:
        """See `Store.get`."""
        if self._pausing:
            found(None)
            return

        def work() -> None:
            self._call_loop(found, self._command("get", key))

        self._thread.submit(work)

    def put(self, key: bytes, value: bytes) -> None:
        """See `Store.put`."""
        if not self._pausing:
            self._thread.submit(self._command, "set", key, value)

    def close(self) -> None:
        """See `Store.close`."""
        self._thread.shutdown(cancel_futures=True)
        self._client.close()

    @property
    def _pausing(self) -> bool:
        return _now_ns() < self._retry_ns

    def _command(self, name: str, *args: bytes) -> Any:
        if self._pausing:
            return None  # queued before the server went: each would wait for it once more
        try:
            answer = getattr(self._client, name)(*args)
        except self._unreachable as error:  # a cache is never a reason to fail a request
            self._report("", f"the Redis cache cannot be used, going on without: {error}")
            self._retry_ns = _now_ns() + _REDIS_PAUSE_NS
            return None
        except Exception as error:  # such as a full server that evicts nothing
            self._report(name, f"the Redis cache refuses '{name}': {error}")
            return None
        self._failing -= {"", name}
        return answer

    def _report(self, what: str, text: str) -> None:
        """Log a failure once, until that has worked again."""
        if what not in self._failing:
            self._failing.add(what)
            logger.error("%s", text)


def create_cache(
    options: ServerOptions, call_soon_threadsafe: Callable[..., object] | None = None
) -> Store | None:
    """The store that `--cache-config` asks for, None without one.

    Args:
        call_soon_threadsafe: of the event loop; by default of the running one.

    Raises:
        InvalidArgumentError: an unknown cache, several of them, or bad settings.
    """
    if not options.cache_config:
        return None
    if len(options.cache_config) > 1:
        raise InvalidArgumentError(
            "found multiple cache configurations, but only a single cache is currently supported"
        )
    ((kind, settings),) = options.cache_config.items()
    if kind == "local":
        return LocalStore(_checked_size(settings.get("size", "")))
    if kind == "redis":
        return _connect_redis(settings, call_soon_threadsafe)
    raise InvalidArgumentError(f"unknown cache '{kind}' in --cache-config; known: local, redis")


def _checked_size(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise InvalidArgumentError(
            f"--cache-config=local,size=<bytes> must be a positive number, got '{text}'"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if int(text) > memory:
        raise InvalidArgumentError(
            f"--cache-config=local,size={text} is more than the {memory} bytes of this machine"
        )
    return int(text)


def _connect_redis(
    settings: Mapping[str, str], call_soon_threadsafe: Callable[..., object] | None
) -> RedisStore:
    if not settings.get("host"):
        raise InvalidArgumentError("--cache-config=redis needs host=<name>")
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise InvalidArgumentError(
            "--cache-config=redis needs redis-py: pip install 'npuserve[redis]'"
        ) from error
    if call_soon_threadsafe is None:
        call_soon_threadsafe = asyncio.get_running_loop().call_soon_threadsafe
    timeout_ms = _redis_number(settings, "wait_timeout", 1_000)
    has_tls_files = any(settings.get(name) for name in ("cert", "key", "cacert", "cacert_dir"))
    client = redis.Redis(
        host=settings["host"],
        port=_redis_number(settings, "port", 6_379),
        db=_redis_number(settings, "db", 0),
        username=settings.get("user"),
        password=settings.get("password"),
        ssl=has_tls_files or settings.get("tls_enabled", "false").lower() == "true",
        ssl_certfile=settings.get("cert"),
        ssl_keyfile=settings.get("key"),
        ssl_ca_certs=settings.get("cacert"),
        ssl_ca_path=settings.get("cacert_dir"),
        socket_timeout=_redis_number(settings, "socket_timeout", timeout_ms) / 1_000,
        socket_connect_timeout=_redis_number(settings, "connect_timeout", timeout_ms) / 1_000,
        retry=Retry(NoBackoff(), 0),  # a request waits for the answer
    )
    unreachable = (redis.ConnectionError, redis.TimeoutError, OSError)
    return RedisStore(client, call_soon_threadsafe, unreachable)


def _redis_number(settings: Mapping[str, str], name: str, default: int) -> int:
    text = settings.get(name, "")
    if text and not text.isdecimal():
        raise InvalidArgumentError(f"--cache-config=redis,{name}={text} must be a number")
    return int(text) if text else default


class ModelCache:
    """The cache as the scheduler of one model version uses it.

    Args:
        queue_up: takes a request that was not found; may raise NpuserveError.
        order: the scheduler's line of responses, in which hits must stand too.
    """

    def __init__(
        self,
        context: SchedulerContext,
        queue_up: Callable[[InferenceRequest], None],
        order: ResponseOrder | None,
    ) -> None:
        self._store: Store = context.cache
        self._name = context.name
        self._version = str(context.version)
        self._outputs = frozenset(output.name for output in context.config.output)
        self.statistics = context.statistics
        self._queue_up = queue_up
        self._order = order
        # Requests whose keys are made beside the loop, and those behind them, in order.
        self._waiting: deque[tuple[_Lookup, asyncio.Future[bytes]]] = deque()

    @classmethod
    def for_model(
        cls,
        context: SchedulerContext,
        queue_up: Callable[[InferenceRequest], None],
        order: ResponseOrder | None = None,
    ) -> ModelCache | None:
        """None unless the server has a cache and the model uses it; never for decoupled models."""
        if context.cache is None or is_decoupled(context.config):
            return None
        return cls(context, queue_up, order)

    def admit(self, request: InferenceRequest) -> None:
        """Answer the request from the store, or queue it and store its answer.

        Raises:
            NpuserveError: refused by the queue; the request is still the caller's.
        """
        lookup = _Lookup(self, request)
        size = sum(len(tensor.data) for tensor in request.inputs.values())
        if size < _LARGE_BYTES and not self._waiting:
            lookup.run(self.key_of(request))
            lookup.late = True
            return
        lookup.late = True
        key = asyncio.get_running_loop().run_in_executor(None, self.key_of, request)
        self._waiting.append((lookup, key))
        key.add_done_callback(self._key_made)

    def _key_made(self, _: asyncio.Future[bytes]) -> None:
        while self._waiting and self._waiting[0][1].done():
            lookup, key = self._waiting.popleft()
            error = key.exception()
            if error is None:
                lookup.run(key.result())
            else:
                lookup.fail(as_npuserve_error(error))

    def key_of(self, request: InferenceRequest) -> bytes:
        """Digest of model, version and inputs.

        # Differs from Triton: shapes and datatypes count too. Triton hashes only the bytes, and
        # gives the answer for a 2x3 input to a request with the same numbers as 3x2.
        """
        digest = blake2b(f"{self._name}\0{self._version}".encode(), digest_size=20)
        for name in sorted(request.inputs):
            tensor = request.inputs[name]
            head = f"\0{name}\0{tensor.datatype}\0{list(tensor.shape)}\0{len(tensor.data)}\0"
            digest.update(head.encode())
            digest.update(tensor.data)
        return b"npuserve:" + digest.digest()

    def hit(self, request: InferenceRequest, response: InferenceResponse, lookup_ns: int) -> None:
        """Answer the request with a stored response."""
        response.model_name, response.model_version = self._name, self._version
        self.statistics.request_cache_hit(_now_ns() - request.start_ns, lookup_ns)
        if self._order is not None:
            self._order.add(request)
        request.deliver(response, True)

    def miss(self, request: InferenceRequest, key: bytes, lookup_ns: int, late: bool) -> None:
        """Queue the request; its answer will be stored.

        Args:
            late: the caller is gone, so that a refusal has to be answered here.
        """
        request.on_response = _Insertion(self, key, lookup_ns, request.on_response)
        if not late:
            self._queue_up(request)
        elif request.cancelled:
            reject(request, RequestCancelledError(""), self.statistics)
        else:
            try:
                self._queue_up(request)
            except NpuserveError as error:
                self.statistics.pending -= 1
                request.deliver(InferenceResponse.from_error(error), True)

    def usable(self, request: InferenceRequest, response: InferenceResponse) -> bool:
        """Whether the stored response has every output the request asks for.

        A model may have computed only those that the request before had asked for.
        """
        names = {tensor.name for tensor in response.outputs}
        return names.issuperset(request.requested_outputs or self._outputs)

    def insert(self, key: bytes, response: InferenceResponse | None, lookup_ns: int) -> None:
        """Store a copy of a good response; count the miss, whatever came of it."""
        start = _now_ns()
        if response is not None and response.error is None:
            self._store.put(key, pack_response(response))
        self.statistics.own.request_cache_miss(lookup_ns + _now_ns() - start)

    @property
    def store(self) -> Store:
        """Where the responses are."""
        return self._store


class _Lookup:
    """One request on its way through the store.

    Attributes:
        late: its caller is gone.
    """

    __slots__ = ("_cache", "_elsewhere", "_key", "_request", "_start_ns", "late")

    def __init__(self, cache: ModelCache, request: InferenceRequest) -> None:
        self._cache = cache
        self._request = request
        self._start_ns = _now_ns()
        self._key = b""
        self.late = False
        call = request.for_model
        self._elsewhere = None if call is None else call.elsewhere()

    def run(self, key: bytes) -> None:
        self._key = key
        self._cache.store.get(key, self._found)

    def fail(self, error: NpuserveError) -> None:
        self._end()
        reject(self._request, error, self._cache.statistics, FailureReason.OTHER)

    def _end(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.ended()

    def _found(self, value: bytes | None) -> None:
        cache, request = self._cache, self._request
        self._end()
        response = None
        if value is not None:
            try:
                response = unpack_response(value)
            except (ValueError, KeyError, TypeError):  # other programs may write to a Redis server
                logger.exception("a stored response cannot be read; the request is executed")
        lookup_ns = _now_ns() - self._start_ns
        if response is not None and cache.usable(request, response):
            cache.hit(request, response, lookup_ns)
        else:
            cache.miss(request, self._key, lookup_ns, late=self.late)


class _Insertion:
    """Stands in front of a request's callback and stores the response if it is a good one."""

    __slots__ = ("_cache", "_callback", "_key", "_lookup_ns")

    def __init__(
        self, cache: ModelCache, key: bytes, lookup_ns: int, callback: ResponseCallback
    ) -> None:
        self._cache = cache
        self._key = key
        self._lookup_ns = lookup_ns
        self._callback = callback

    def __call__(self, response: InferenceResponse | None, final: bool) -> None:
        self._cache.insert(self._key, response, self._lookup_ns)
        self._callback(response, final)


def pack_response(response: InferenceResponse) -> bytes:
    """Outputs and parameters as bytes: length of a JSON header, the header, the tensors."""
    header = orjson.dumps(
        {
            "outputs": [
                [t.name, str(t.datatype), list(t.shape), len(t.data)] for t in response.outputs
            ],
            "parameters": response.parameters,
        }
    )
    parts: list[Buffer] = [len(header).to_bytes(4, "little"), header]
    parts += [tensor.data for tensor in response.outputs]
    return b"".join(parts)


def unpack_response(packed: bytes) -> InferenceResponse:
    """The response of `pack_response`; its tensors are views of `packed`.

    Raises:
        ValueError, KeyError, TypeError: something else made it.
    """
    offset = 4 + int.from_bytes(packed[:4], "little")
    header = orjson.loads(packed[4:offset])
    view = memoryview(packed)
    outputs = []
    for name, datatype, shape, size in header["outputs"]:
        outputs.append(Tensor(name, datatype, shape, view[offset : offset + size]))
        offset += size
    if offset != len(packed):
        raise ValueError(f"{len(packed)} bytes are stored, {offset} are expected")
    return InferenceResponse(outputs, parameters=header["parameters"])
