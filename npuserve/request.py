"""InferenceRequest: what a client asked, and the one way its responses go back.

A leaf of the package: front ends create it, schedulers queue it, backends read it. It knows
none of them; they hang their callables on it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from npuserve.errors import UnsupportedError
from npuserve.response import InferenceResponse, ParameterValue

if TYPE_CHECKING:
    from npuserve.tensor import Tensor

logger = logging.getLogger(__name__)

SEQUENCE_START = 1
SEQUENCE_END = 2

_MAX_TEXT_ID_BYTES = 128

# (response or None, final): None only together with final=True, for a decoupled model that ends
# a request without another response. Always called on the event loop's thread.
ResponseCallback = Callable[[InferenceResponse | None, bool], None]


def checked_text_id(correlation_id: str) -> str:
    """A text correlation id as it is.

    Raises:
        UnsupportedError: too long; as Triton does, for models without sequences too.
    """
    # What Triton calls characters are bytes of UTF-8.
    if len(correlation_id.encode(errors="surrogatepass")) > _MAX_TEXT_ID_BYTES:
        raise UnsupportedError(
            f"string correlation ID cannot be longer than {_MAX_TEXT_ID_BYTES} characters"
        )
    return correlation_id


class ModelCall(Protocol):
    """The call of a model (BLS) that a request belongs to; told by whoever has the request.

    Attributes:
        only: gives the node of the only instance that will do, None if any of the model's does;
            see `backends.base`.
    """

    only: Callable[[], Any]

    def taken(self, batch: Any) -> None:
        """An instance executes the request in this batch, as the models' backend knows it."""

    def part(self, model: Any) -> ModelCall:
        """The call of a request that an ensemble makes of a member, given by its context."""

    def elsewhere(self) -> ModelCall:
        """Something that is no instance is at work for the request, until `ended`."""

    def behind(self, others: Callable[[], Collection[Any]]) -> ModelCall:
        """The request waits, until `ended`, for one of others to be answered; None: a client's."""

    def ended(self) -> None:
        """The request of a member was answered, or what was at work elsewhere is done."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Proof that requests of some names, datatypes, shapes and byte sizes are valid.

    A front end that recognises such a request puts it on, and the checks are not repeated.

    Attributes:
        by: the validator of the model version for which it holds.
        batch_size: of such a request.
        strings: BYTES inputs with their numbers of elements; their contents remain to be checked.
    """

    by: object
    batch_size: int
    strings: tuple[tuple[str, int], ...] = ()


class InferenceRequest:
    """One inference request, from the socket to its final response.

    A request is answered exactly once as final, whatever happens: `deliver` drops anything after
    that. Layers that must see responses on their way back (ordering, cache, ensemble, implicit
    state) replace `on_response` by a callable that calls the former one.

    Attributes:
        model_name: as asked.
        model_version: -1 for the newest ready version.
        id: client's request id; "" for none.
        correlation_id: sequence id; 0 or "" for none.
        flags: SEQUENCE_START | SEQUENCE_END.
        priority: 0 means the model's default level.
        timeout_us: microseconds the request may wait in a queue; 0 for no wish.
        parameters: custom parameters, forwarded headers included.
        inputs: by name, in the order given. A scheduler may replace the dict to add
            state and control tensors.
        inputs_shared: whether others read the inputs' memory too, so that who hands it to a model
            that may write there has to copy it.
        requested_outputs: names; empty means every output of the model.
        on_response: see `ResponseCallback`.
        on_cancel: set by whoever holds the request at the moment (queue, worker) to learn of a
            cancellation; called at most once, on the loop's thread.
        on_release: called once, after the final response was handed over.
        on_hold: set by what executes a request of a decoupled model: asks it (True) to hold
            responses back since their reader is behind, or (False) to go on. Loop thread.
        held: whether responses are held back now.
        on_reschedule: set by a scheduler that takes the request back after an execution to
            execute it again (iterative sequences); None where models may not ask for that.
        model: the server's Model that serves it, set when the request was accepted.
        checked: see `Checked`; None for a request that has to be checked.
        batch_size: number of batch elements, 0 for a model without a batch dimension.
        *_ns: monotonic nanoseconds; 0 means not reached. `start_ns`: accepted by the core;
            `queue_ns`: entered a scheduler; `compute_start_ns`: its batch started.
        response_count: responses handed over so far.
        cancelled: nobody wants an answer any more.
        finished: the final response was handed over.
        filler: it stands in an empty sequence slot: no client, no statistics.
        scheduling: private to the scheduler that has the request; for a step of an ensemble that
            is an ensemble, the members that are held for it.
        trace: the request's sampled trace, None for nearly all requests.
        compute_ns: compute_input, compute_infer and compute_output durations, for the statistics
            of `parent`; set with the final response.
        parent: the request on whose behalf this one runs (ensemble, BLS).
        for_model: the call of a model (BLS) that it belongs to, directly or through an ensemble.
            The model may wait for it while it executes, so it must not be put behind an execution,
            which may be that of the very model.
    """

    __slots__ = (
        "batch_size", "cancelled", "checked", "compute_ns", "compute_start_ns", "correlation_id",
        "filler", "finished", "flags", "for_model", "held", "id", "inputs", "inputs_shared",
        "model", "model_name", "model_version", "on_cancel", "on_hold", "on_release",
        "on_reschedule", "on_response", "parameters", "parent", "priority", "queue_ns",
        "requested_outputs", "response_count", "scheduling", "start_ns", "timeout_us", "trace",
    )  # fmt: skip

    def __init__(
        self,
        model_name: str,
        inputs: dict[str, Tensor],
        on_response: ResponseCallback,
        *,
        model_version: int = -1,
        id: str = "",
        requested_outputs: tuple[str, ...] = (),
        parameters: dict[str, ParameterValue] | None = None,
        correlation_id: int | str = 0,
        flags: int = 0,
        priority: int = 0,
        timeout_us: int = 0,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self.id = id
        self.inputs = inputs
        self.inputs_shared = False
        self.requested_outputs = requested_outputs
        self.parameters = parameters
        self.correlation_id = correlation_id
        self.flags = flags
        self.priority = priority
        self.timeout_us = timeout_us
        self.on_response = on_response
        self.on_cancel: Callable[[InferenceRequest], None] | None = None
        self.on_release: Callable[[InferenceRequest], None] | None = None
        self.on_reschedule: Callable[[InferenceRequest], None] | None = None
        self.model: Any = None
        self.scheduling: Any = None
        self.parent: InferenceRequest | None = None
        self.for_model: ModelCall | None = None
        self.trace: Any = None
        self.batch_size = 0
        self.checked: Checked | None = None
        self.start_ns = 0
        self.queue_ns = 0
        self.compute_start_ns = 0
        self.compute_ns = (0, 0, 0)
        self.response_count = 0
        self.cancelled = False
        self.finished = False
        self.on_hold: Callable[[bool], None] | None = None
        self.held = False
        self.filler = False

    def __repr__(self) -> str:
        return (
            f"InferenceRequest(id={self.id!r}, model={self.model_name!r}, "
            f"inputs={list(self.inputs.values())!r})"
        )

    def deliver(self, response: InferenceResponse | None, final: bool) -> None:
        """Hand one response towards the client. Loop thread only.

        After the final one everything is dropped. An exception of a front end's callback is a
        bug there: it is logged and must not reach the scheduler.
        """
        if self.finished:
            return
        if final:
            self.finished = True
            self.on_cancel = None
            if self.held:
                self.hold(False)
        if response is not None:
            self.response_count += 1
        try:
            self.on_response(response, final)
        except Exception:
            logger.exception("response callback of request %r failed", self.id)
        if final:
            release, self.on_release = self.on_release, None
            if release is not None:
                release(self)

    def cancel(self) -> None:
        """The client no longer wants an answer. Loop thread only; harmless when repeated.

        A queued request is answered CANCELLED by its scheduler; a running one only sees
        `cancelled`, and the model decides.
        """
        if self.cancelled or self.finished:
            return
        self.cancelled = True
        self.hold(False)
        callback, self.on_cancel = self.on_cancel, None
        if callback is not None:
            callback(self)

    def hold(self, held: bool) -> None:
        """Ask for no more responses for now, or for them to go on. Loop thread only.

        A wish: what is on its way still comes. Ends by itself with the request.
        """
        if held == self.held or (held and (self.finished or self.cancelled)):
            return
        self.held = held
        if self.on_hold is not None:
            self.on_hold(held)
