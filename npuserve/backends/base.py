"""The plug-in surface: all that the author of a backend reads.

A backend is a class with a `load` method, registered under the entry-point group
`npuserve.backends`. `load` returns one instance object per placement. Two kinds of instance:

* `ModelInstance` blocks: the server gives each one a thread of its own and calls
  `initialize`, `execute` and `finalize` only there. Right for runtimes that release the GIL.
* `LoopInstance` never blocks: its methods run on the event loop and the work happens
  elsewhere (a worker process, a device queue).

Both answer through the `ExecutionBatch` they are given. This file imports leaves only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from npuserve.buffer_pool import BufferPool
    from npuserve.errors import NpuserveError
    from npuserve.model_config import ModelConfig
    from npuserve.request import InferenceRequest
    from npuserve.response import InferenceResponse


@dataclass(frozen=True)
class Placement:
    """Where one instance of a model runs.

    Attributes:
        name: instance name as Triton builds it, `<group>_<n>`, such as `plain_0_0`.
        kind: "CPU", "GPU" (an NPU card where the machine has NPUs) or "MODEL".
        device_id: card number; 0 for CPU.
        group: index of its instance group in the configuration.
        index: running number over all instances of the model version.
        host_policy: name given in the group, else `gpu_<id>`, `cpu` or `model`.
        profile, passive, rate_limiter: taken from the group as they are.
        cpu_cores: cores the host policy leaves it; empty for all.
        card_name: stable name of its card, as the metrics show it; empty if it is on none, or the
            card does not tell.
    """

    name: str
    kind: str
    device_id: int
    group: int
    index: int
    host_policy: str = ""
    profile: tuple[str, ...] = ()
    passive: bool = False
    rate_limiter: Any = None  # ModelRateLimiter message of the group, or None
    cpu_cores: frozenset[int] = frozenset()
    card_name: str = ""


class MemoryUsage(NamedTuple):
    """Memory that a model or an instance holds.

    Attributes:
        type: "CPU", "CPU_PINNED" (page-locked) or "GPU" (a card).
        id: number of the card, 0 for the others.
    """

    type: str
    id: int
    byte_size: int


class Mailbox(Protocol):
    """The way from an instance's threads to the event loop."""

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have a function called on the loop's thread; from any thread.

        In the order posted, also with what the same thread sends through an `ExecutionBatch`.
        """

    @property
    def idle(self) -> bool:
        """Whether all that was posted has been done."""


def settle(future: asyncio.Future[Any], outcome: Any) -> None:
    """Give a future its result or exception, unless nobody waits any more. Loop thread."""
    if future.done():  # cancelled
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class ServerServices(Protocol):
    """What a backend may ask of the server. All of it on the event loop's thread."""

    loop: asyncio.AbstractEventLoop
    buffer_pool: BufferPool

    def infer(self, request: InferenceRequest) -> None:
        """Run a request of another model (BLS); answers come through `request.on_response`.

        Raises:
            NpuserveError: refused; nothing was queued and `on_response` will not be called.
        """

    def model(self, name: str, version: int = -1) -> Any:
        """The ready model version (server/model.py), -1 for the newest.

        Raises:
            NotFoundError, UnavailableError: there is none.
        """

    def parse_version(self, text: str) -> int:
        """The version number of a text; "" is -1. Raises InvalidArgumentError."""

    async def load_model(
        self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load or reload a model; see `InferenceServer.load_model`."""

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model; see `InferenceServer.unload_model`."""

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether the model version can serve; unknown names are False."""

    @property
    def custom_metrics(self) -> Any:
        """Registry of the metric families that models create (server/custom_metrics.py)."""


@dataclass(eq=False)
class BackendModelContext:
    """One model version as its backend sees it.

    Attributes:
        config: complete configuration (defaults filled in). Auto-completion may change it.
        model_dir: directory of the model (holds config.pbtxt).
        version_dir: directory of the version.
        placements: one per instance to make, in order.
        backend_options: `--backend-config=<backend>,<key>=<value>` entries, the global ones
            (empty backend name) below them.
        services: the server; None when a backend is driven alone in a test.
        limits: gives, with a rate limiter, the `node` of each instance that is given requests, and
            those of the instances that hold what it needs but has not, while it stands idle.
    """

    name: str
    version: int
    config: ModelConfig
    model_dir: Path
    version_dir: Path
    placements: Sequence[Placement]
    backend_options: Mapping[str, str] = field(default_factory=dict)
    services: ServerServices | None = None
    limits: Callable[[], Sequence[tuple[Any, Sequence[Any]]]] = tuple

    @property
    def parameters(self) -> dict[str, str]:
        """The `parameters` of the configuration as plain text values."""
        return {key: value.string_value for key, value in self.config.parameters.items()}

    def may_expire(self, timed: bool) -> bool:
        """Whether a request may leave the model's queue because of its age.

        Args:
            timed: it has a time-out of its own.
        """
        batching = self.config.dynamic_batching
        policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
        return (timed and self.config.HasField("sequence_batching")) or any(
            policy.default_timeout_microseconds and not policy.timeout_action for policy in policies
        )

    @property
    def log(self) -> logging.Logger:
        """A logger whose lines carry the model's name."""
        return logging.getLogger(f"npuserve.model.{self.name}")


class ExecutionBatch(Protocol):
    """One batch in the hands of an instance.

    Attributes:
        requests: in order; every one must be answered.
        batch_size: batch elements of all requests together (at least 1 a request).
    """

    requests: Sequence[InferenceRequest]
    batch_size: int

    def input_ready(self) -> None:
        """Inputs are where the runtime wants them: ends compute_input, starts compute_infer."""

    def output_ready(self) -> None:
        """The runtime is done: ends compute_infer, starts compute_output."""

    def set_times(self, input_ready_ns: int, output_ready_ns: int) -> None:
        """Both marks at once, monotonic ns, for a backend that learns of them afterwards."""

    def send(
        self, request: InferenceRequest, response: InferenceResponse | None, final: bool = True
    ) -> None:
        """One response of one request of this batch; from any thread (`LoopInstance`: the loop's).

        For a decoupled model any number, also after `execute` returned, until final=True.
        """

    def flush(self) -> None:
        """What was sent goes now.

        What the thread that executes sends may wait for the end of the execution otherwise.
        """

    def keep_open(self, request: InferenceRequest) -> None:
        """The request of a model that is not decoupled will be answered after the execution.

        To be called before the execution ends, in the thread that executes.
        """

    def reschedule(self, request: InferenceRequest) -> None:
        """The model wants to execute this request of an iterative sequence once more.

        Gives the request back to its scheduler; nothing more may be sent for it in this batch.
        To be called before the execution ends. A request of any other model is answered with
        an error; one that has its final response already is left alone.
        """

    def execution_over(self) -> None:
        """`LoopInstance` only, optional: the instance could begin the next batch now.

        To be called before the answers of this one are sent; `done` must still follow.
        """

    def done(self, error: NpuserveError | None = None) -> None:
        """`LoopInstance` only: the execution ended and the instance can take the next batch.

        Requests of a non-decoupled model without an answer get `error`, or one that says the
        model did not answer. With `error`, open requests of a decoupled model end with it too.
        """


class ModelInstance:
    """An instance that blocks; every method runs in the instance's own thread.

    `execute` may raise: every request of the batch not yet answered gets the error (an
    NpuserveError as it is, anything else as InternalError) and the instance lives on.
    """

    # Set by the server before `initialize`.
    mailbox: Mailbox

    # What its backend knows it by in calls between models, see `request.ModelCall`.
    node: Any = None

    # Whether `is_ready` has something to say.
    has_readiness: bool = False

    # Batches the instance may hold at once (started before the former one is done). More than
    # one overlaps copies with compute: `execute` is still entered once at a time.
    max_inflight: int = 1

    # The next batch may be handed over while `max_inflight` are being executed: it waits in the
    # instance and begins without a gap. No overlap comes of it.
    prefetches: bool = True

    # What it holds once it is initialized, for the statistics; empty if it does not know.
    memory_usage: Sequence[MemoryUsage] = ()

    # Whether an execution holds the interpreter lock nearly all the time, so that a second core
    # would be of no use to it.
    holds_gil: bool = False

    def initialize(self) -> None:
        """Get ready in this thread. An exception makes the load fail."""

    def execute(self, batch: ExecutionBatch) -> None:
        """Answer every request of `batch` through `batch.send`."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it can serve now, for model readiness; an exception means no.

        The one method that runs in a thread of its own, so also while `execute` runs.
        """
        return True

    def finalize(self) -> None:
        """Free what `initialize` took; also called after a failed `initialize`."""


class PipelinedInstance(ModelInstance):
    """A blocking instance that feeds a device: it can queue a batch before the former is done.

    The server calls `submit` while fewer than `pipeline_depth` batches are submitted and more are
    waiting, else `collect` for the oldest; so copies of the next batch overlap this one's compute.
    """

    pipeline_depth: int = 2

    # One more than on the device: the next batch is at hand when one has been collected.
    max_inflight: int = 3
    prefetches = False  # there is always one waiting

    def submit(self, batch: ExecutionBatch) -> None:
        """Queue the batch on the device; must not wait for its end.

        May raise: the batch gets the error as in `execute` and is not collected.
        """
        raise NotImplementedError

    def collect(self, batch: ExecutionBatch) -> None:
        """Wait for the batch submitted first, and answer every request of it."""
        raise NotImplementedError

    def execute(self, batch: ExecutionBatch) -> None:
        """One batch alone."""
        self.submit(batch)
        self.collect(batch)


class LoopInstance:
    """An instance driven on the event loop; nothing in it may block."""

    # Set by the server before `initialize`.
    mailbox: Mailbox

    # What its backend knows it by in calls between models, see `request.ModelCall`.
    node: Any = None

    max_inflight: int = 1

    # See `ModelInstance.prefetches`: `start` may be called once while `max_inflight` batches are
    # being executed.
    prefetches: bool = False

    # Whether `is_ready` has something to say.
    has_readiness: bool = False

    # See `ModelInstance.memory_usage`.
    memory_usage: Sequence[MemoryUsage] = ()

    # The kernel's id of the process that executes its batches (of its main thread), or 0.
    native_thread_id: int = 0

    # Set by the server while that process and the loop are kept on one core.
    shares_core: bool = False

    # Set by the server: call it whenever `available` changes.
    on_available_change: Callable[[], None] | None = None

    # False while the instance cannot take a batch (its worker died and is being restarted).
    available: bool = True

    async def initialize(self) -> None:
        """Get ready. An exception makes the load fail."""

    def start(self, batch: ExecutionBatch) -> None:
        """Begin executing; must end in `batch.done()`, whatever happens."""
        raise NotImplementedError

    def hold(self, held: bool) -> None:
        """Hold responses of decoupled requests back, as their reader is behind, or go on.

        Best effort; an instance that cannot hold them lets them gather in the server.
        """

    async def is_ready(self) -> bool:
        """Whether it can serve now, for model readiness; an exception means no.

        Not called again before it returned, nor cancelled before the model goes.
        """
        return True

    async def finalize(self) -> None:
        """Free everything; also called after a failed `initialize`."""


class Backend:
    """Base of a backend; one object per server process serves all its models.

    Methods run in a helper thread and may block, so heavy imports belong into them.
    """

    def auto_complete(self, context: BackendModelContext) -> None:
        """Fill `context.config` from the model's file, as Triton's backends do.

        May set max_batch_size, inputs, outputs, a scheduler (if none is set) and
        model_transaction_policy; anything else is dropped by the server.

        Raises:
            NpuserveError: the model's file and the configuration contradict each other; an
                InvalidConfigError is shown with the line of its field.
        """

    def load(self, context: BackendModelContext) -> Sequence[ModelInstance | LoopInstance]:
        """One instance per `context.placements`, not yet initialised."""
        raise NotImplementedError

    def unload(self, context: BackendModelContext) -> None:
        """Free what the instances shared, after all of them were finalised."""

    def stop(self) -> None:
        """The server stops: give up what a load may do for long. On the event loop, no waiting."""
