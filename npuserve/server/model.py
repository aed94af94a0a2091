"""One model version at work: configuration, scheduler, instances and statistics together.

Step 4 of the walk ends here: `Model.accept` validates a request and hands it to the scheduler.
How versions come and go is in lifecycle.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from npuserve.backends.base import MemoryUsage
from npuserve.errors import InternalError, InvalidArgumentError
from npuserve.model_config import is_decoupled
from npuserve.server.instance_pool import InstancePool
from npuserve.server.schedulers import create_scheduler
from npuserve.server.schedulers.base import SchedulerContext
from npuserve.server.statistics import ModelStatistics
from npuserve.server.validation import RequestValidator, reshaped

if TYPE_CHECKING:
    from collections.abc import Callable

    from npuserve.backends.base import Backend, BackendModelContext
    from npuserve.model_config import ModelConfig
    from npuserve.request import InferenceRequest
    from npuserve.response import InferenceResponse
    from npuserve.server.latency import Histogram
    from npuserve.server.schedulers.base import Scheduler
    from npuserve.server.schedulers.ensemble import EnsembleScheduler
    from npuserve.server.trace import Tracer

logger = logging.getLogger(__name__)

_now_ns = time.monotonic_ns


class Model:
    """A model version that has a configuration; `start` makes it able to serve.

    Attributes:
        name, version, config: what it is; `config` is complete.
        statistics: see `ModelStatistics`; a reload makes a new Model and so starts at zero.
        decoupled: whether a request may have any number of responses.
        input_specs: wire datatype and dims by input name, in the order of the configuration.
        inflight: requests accepted and not yet answered as final.
    """

    def __init__(
        self,
        context: BackendModelContext,
        backend: Backend | None,
        loop: asyncio.AbstractEventLoop,
        namespace: str = "",
    ) -> None:
        self.context = context
        self.backend = backend
        self.name = context.name
        self.version = context.version
        self.namespace = namespace
        self.config: ModelConfig = context.config
        self.decoupled = is_decoupled(self.config)
        self.max_batch_size = self.config.max_batch_size
        self.statistics = ModelStatistics()
        self.validator = RequestValidator(self.config)
        self.input_specs = {
            name: (spec.datatype, spec.dims) for name, spec in self.validator.inputs.items()
        }
        self.pool = InstancePool(self.name, self.version, loop, self.statistics, self.decoupled)
        context.limits = self.pool.limits
        self.pool.output_names = frozenset(self.validator.outputs) | {
            state.output_name for state in self.config.sequence_batching.state
        }
        if any(spec.reshape is not None for spec in self.validator.outputs.values()):
            self.pool.reshape_outputs = self._reshape_outputs
        self.inflight = 0
        self._holds = 0
        self.load_seconds = 0.0
        self._scheduler: Scheduler | None = None
        self._tracer: Tracer | None = None
        self._accepting = False
        self._drained = asyncio.Event()
        self._labels: dict[str, list[str]] = {}
        # Called when `ready` may have changed (a worker died or came back).
        self.on_health: Callable[[], None] | None = None

    @property
    def ready(self) -> bool:
        """Whether it takes requests and at least one instance is alive."""
        return self._accepting and (not self.pool.instances or self.pool.healthy)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of a started model."""
        assert self._scheduler is not None
        return self._scheduler

    async def start(
        self,
        services: Any,
        *,
        configure_pool: Callable[[InstancePool, ModelConfig], None],
        warm_up: Callable[[Model], Any],
    ) -> None:
        """Make and start the instances, run the warm-up, then accept requests.

        Args:
            services: the server, see SchedulerContext for what of it is used.
            configure_pool: attaches the rate limiter.
            warm_up: coroutine function run before the first request.

        Raises:
            NpuserveError: why it cannot serve; everything taken so far is freed.
        """
        begin = _now_ns()
        self._tracer = services.tracer
        self.pool.card_load = services.card_load
        self.pool.mailbox = services.mailbox
        try:
            self._labels = await asyncio.to_thread(self._read_labels)
            if self.backend is not None:
                await self._start_instances(self.backend)
            configure_pool(self.pool, self.config)
            self._scheduler = await self._make_scheduler(services)
            await warm_up(self)
        except BaseException:
            try:
                await self._free()
            except Exception:  # the first error is the one to tell
                logger.exception("freeing model '%s', which was not loaded, failed", self.name)
            raise
        self.pool.on_availability = self._availability_changed
        self.load_seconds = (_now_ns() - begin) / 1e9
        self._accepting = True

    async def _start_instances(self, backend: Backend) -> None:
        made = await asyncio.to_thread(backend.load, self.context)
        if len(made) != len(self.context.placements):
            raise InternalError(
                f"the backend of model '{self.name}' made {len(made)} instances, expected "
                f"{len(self.context.placements)}: one for each placement"
            )
        for placement, instance in zip(self.context.placements, made, strict=True):
            self.pool.add(placement, instance)
        await self.pool.initialize()
        held: Counter[tuple[str, int]] = Counter()
        for instance in made:
            for usage in instance.memory_usage:
                held[usage.type, usage.id] += usage.byte_size
        self.statistics.memory_usage = [
            MemoryUsage(*where, byte_size) for where, byte_size in sorted(held.items())
        ]

    async def _make_scheduler(self, services: Any) -> Scheduler:
        context = SchedulerContext(
            name=self.name,
            version=self.version,
            config=self.config,
            model_dir=self.context.model_dir,
            instances=self.pool,
            statistics=self.statistics,
            clock=services.clock,
            lookup=services.model,
            cache=services.cache if self.config.response_cache.enable else None,
        )
        if self.backend is None:  # an ensemble's asks the other models
            return create_scheduler(context)
        # Others read files: initial states, and hooks, which may import anything.
        return await asyncio.to_thread(create_scheduler, context)

    def accept(self, request: InferenceRequest) -> None:
        """Validate the request and queue it; from here the scheduler owns it.

        Raises:
            NpuserveError: refused, the request is still the caller's.
        """
        checked = request.checked
        if checked is not None and checked.by is self.validator:
            request.batch_size = self.validator.check_again(request, checked)
        else:
            request.batch_size = self.validator.check(request)
        request.model = self
        request.start_ns = request.queue_ns = _now_ns()
        requested = request.requested_outputs
        if requested and len(requested) < len(self.validator.output_names):
            _keep_requested(request)
        if self.statistics.first_response is not None:
            _observe_first_response(request, self.statistics.first_response)
        request.on_release = self._released
        self.inflight += 1
        self.statistics.pending += 1
        if self._tracer is not None and self._tracer.active:
            self._tracer.attach(request)
        scheduler = self._scheduler
        assert scheduler is not None
        try:
            scheduler.enqueue(request)
        except BaseException:
            self.inflight -= 1
            self.statistics.pending -= 1
            request.on_release = None
            if self._tracer is not None:
                self._tracer.refused(request)
            self._check_drained()
            raise

    def hold(self) -> None:
        """Go on serving the caller, even if unloaded meanwhile, until it calls `let_go`.

        An ensemble's request holds the members of its steps, so that they are the same versions
        from beginning to end.
        """
        self._holds += 1

    def let_go(self) -> None:
        """End a `hold`."""
        self._holds -= 1
        if not self._holds and not self._accepting:
            self.scheduler.stop()
            self._check_drained()

    def labels(self, output: str) -> list[str]:
        """Lines of the output's label file, [] without one; what is no UTF-8 as surrogates."""
        own = self._labels.get(output)
        if own is None and self.config.HasField("ensemble_scheduling"):
            ensemble = cast("EnsembleScheduler", self.scheduler)
            return ensemble.labels.get(output, [])
        return own or []

    def stop_accepting(self) -> None:
        """New requests are refused, except of who holds it; queued ones are still executed."""
        self._accepting = False
        if self._scheduler is not None and not self._holds:
            self._scheduler.stop()

    async def stop(self) -> None:
        """Refuse new requests, wait for the accepted ones, then free everything; called once."""
        self.stop_accepting()
        self._check_drained()
        await self._drained.wait()
        await self._free()

    async def _free(self) -> None:
        await self.pool.wait_idle()
        if self._scheduler is not None:
            self._scheduler.close()
        await self.pool.finalize()
        if self.pool.rate_limiter is not None:
            self.pool.rate_limiter.remove(self.pool)
        if self.backend is not None:
            await asyncio.to_thread(self.backend.unload, self.context)

    def _released(self, request: InferenceRequest) -> None:
        self.inflight -= 1
        if not self._accepting:
            self._check_drained()

    def _check_drained(self) -> None:
        if not (self._accepting or self.inflight or self._holds):
            self._drained.set()

    def _availability_changed(self) -> None:
        if self.on_health is not None:
            self.on_health()

    def _reshape_outputs(self, response: InferenceResponse) -> None:
        batching = self.max_batch_size > 0
        for position, tensor in enumerate(response.outputs):
            spec = self.validator.outputs.get(tensor.name)
            if spec is not None and spec.reshape is not None:
                response.outputs[position] = reshaped(tensor, spec.reshape, spec.dims, batching)

    def _read_labels(self) -> dict[str, list[str]]:
        labels = {}
        for output in self.config.output:
            if output.label_filename:
                path = Path(self.context.model_dir, output.label_filename)
                try:
                    text = path.read_text(encoding="utf-8", errors="surrogateescape")
                except OSError as error:
                    raise InvalidArgumentError(
                        f"failed to read the labels of output '{output.name}' from {path}: "
                        f"{error.strerror}"
                    ) from error
                labels[output.name] = text.splitlines()
        return labels


def _keep_requested(request: InferenceRequest) -> None:
    """Let only the requested outputs through to the client."""
    wanted = frozenset(request.requested_outputs)
    deliver = request.on_response

    def filtered(response: InferenceResponse | None, final: bool) -> None:
        if response is not None and response.outputs:
            response.outputs = [tensor for tensor in response.outputs if tensor.name in wanted]
        deliver(response, final)

    request.on_response = filtered


def _observe_first_response(request: InferenceRequest, histogram: Histogram) -> None:
    """Add the time until the first response, whoever makes it and whatever it says."""
    deliver, start_ns = request.on_response, request.start_ns
    seen = False

    def observed(response: InferenceResponse | None, final: bool) -> None:
        nonlocal seen
        if response is not None and not seen:
            seen = True
            histogram.observe((_now_ns() - start_ns) / 1_000_000)
        deliver(response, final)

    request.on_response = observed
