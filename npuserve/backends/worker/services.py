"""What the server does for a model's code: BLS requests, model control, metrics, log lines.

One `ModelServices` per instance, whatever way it is executed; runs on the event loop.
Texts: Triton python_backend, src/request_executor.cc.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker.wire import STATUS_NAMES
from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    NpuserveError,
    StatusCode,
    UnavailableError,
    as_npuserve_error,
    error_from_code,
)
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse

if TYPE_CHECKING:
    from npuserve.backends.base import BackendModelContext, ServerServices
    from npuserve.backends.worker.call_graph import Call, Instance
    from npuserve.backends.worker.call_watch import CallWatch
    from npuserve.tensor import Tensor

STATUS_BY_INDEX = tuple(StatusCode[name] for name in STATUS_NAMES)
INDEX_OF_STATUS = {code: index for index, code in enumerate(STATUS_BY_INDEX)}

_LEVELS = {
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "VERBOSE": logging.DEBUG,
}

# (response or None, final), as InferenceRequest.on_response.
Reply = Callable[[InferenceResponse | None, bool], None]


def error_of(error: tuple[int, str]) -> NpuserveError:
    """The exception for an error as it travels: (index of the status code, text)."""
    return error_from_code(STATUS_BY_INDEX[error[0]], error[1])


class ModelServices:
    """The server's side of `Port` for one instance.

    Args:
        instance: the instance in the graph of who waits for whom.
        watch: told of each call.
    """

    def __init__(self, context: BackendModelContext, instance: Instance, watch: CallWatch) -> None:
        self._context = context
        self._log = context.log
        self._instance = instance
        instance.refuse = self._refuse
        self._watch = watch
        self._requests: dict[int, tuple[InferenceRequest, Reply]] = {}
        self._refused: set[int] = set()  # calls that the model need not hear of any more
        self._families: dict[int, int] = {}
        self._metrics: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _server(self) -> ServerServices:
        services = self._context.services
        if services is None:
            raise InternalError("the model runs without a server")
        return services

    def close(self) -> None:
        """The instance ended: nothing it asked for goes on, and its metrics go."""
        for request, _ in list(self._requests.values()):
            request.cancel()
        self._requests.clear()
        for task in self._tasks:
            task.cancel()
        self._delete_all_metrics()
        self._instance.clear()

    def log(self, level: str, text: str, file: str, line: int) -> None:
        """Write a line of the model's, with its own place in the source."""
        number = _LEVELS.get(level, logging.INFO)
        logger = self._log
        if logger.isEnabledFor(number):
            record = logger.makeRecord(logger.name, number, file, line, "%s", (text,), None)
            logger.handle(record)

    # -- BLS ----------------------------------------------------------------------------------

    def infer(
        self, call_id: int, target: tuple[str, int], inputs: list[Tensor],
        fields: Any, decoupled: bool, reply: Reply,
    ) -> None:  # fmt: skip
        """Run a request of the model; every answer, failure included, goes to `reply`.

        Args:
            call_id: names the request for `cancel_infer`.
            target: model name and version.
            fields: as in `wire`, the last one the request whose trace it continues, or None.
            decoupled: whether any number of responses is welcome.
        """
        name, version = target
        try:
            self._start(call_id, name, version, inputs, fields, decoupled, reply)
        except Exception as error:  # as in `call`
            reply(InferenceResponse.from_error(_prefixed(name, as_npuserve_error(error))), True)

    def _start(
        self, call_id: int, name: str, version: int, inputs: list[Tensor],
        fields: Any, decoupled: bool, reply: Reply,
    ) -> None:  # fmt: skip
        try:
            model = self._server.model(name, version)
        except (NotFoundError, UnavailableError):
            raise InternalError(
                f"Failed for execute the inference request. Model '{name}' is not ready."
            ) from None
        if model.decoupled and not decoupled:
            raise InternalError(
                f"Model {name} is using the decoupled. The current BLS request call doesn't "
                "support models using the decoupled transaction policy. Please use "
                "'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
                "models.'"
            )
        call = self._instance.starts(call_id, model.context, timed=bool(fields[3]))

        def answered(response: InferenceResponse | None, final: bool) -> None:
            call.responses += 1
            if final:
                self._requests.pop(call_id, None)
                self._instance.ends(call_id)
            if call_id in self._refused:
                if final:
                    self._refused.remove(call_id)
                return
            reply(response, final)

        request = _request(name, version, inputs, fields, answered)
        request.for_model = call
        self._requests[call_id] = request, reply
        try:
            self._server.infer(request)
        except Exception:
            self._requests.pop(call_id, None)
            self._instance.ends(call_id)
            raise
        self._watch.start(self._server.loop)

    def _refuse(self, call: Call, error: InternalError) -> None:
        """See `call_graph.Instance.refuse`."""
        request, reply = self._requests[call.call_id]
        self._refused.add(call.call_id)
        self._instance.ends(call.call_id)
        request.cancel()
        reply(InferenceResponse.from_error(error), True)

    def cancel_infer(self, call_id: int) -> None:
        """The model does not want the answer any more."""
        if call_id in self._requests:
            self._requests[call_id][0].cancel()

    # -- calls --------------------------------------------------------------------------------

    def call(self, method: str, args: tuple[Any, ...], answer: Callable[[bool, Any], None]) -> None:
        """Do what `Port.call` asks; the result, or (False, text), goes to `answer`."""
        if method in _SLOW_METHODS:
            self._spawn(self._control(method, args, answer))
            return
        try:
            answer(True, _METHODS[method](self, *args))
        except Exception as error:  # arguments of any kind come from the model, which waits
            answer(False, _CALL_PREFIX.get(method, "") + str(as_npuserve_error(error)))

    def _spawn(self, coroutine: Any) -> None:
        task = self._server.loop.create_task(coroutine, name=f"control-{self._context.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _control(
        self, method: str, args: tuple[Any, ...], answer: Callable[[bool, Any], None]
    ) -> None:
        result = None
        try:
            if method == "load_model":
                name, config, files = args
                await self._server.load_model(name, config or None, files)
            elif method == "unload_model":
                await self._server.unload_model(*args)
            else:
                result = await self._server.model_ready(*args)
        except Exception as error:  # as in `call`
            answer(False, _CALL_PREFIX[method] + str(as_npuserve_error(error)))
        else:
            answer(True, result)

    # -- metrics ------------------------------------------------------------------------------
    # Handles of the model (numbers it chose) to handles of the registry.

    def _family_new(self, handle: int, name: str, description: str, kind: str) -> None:
        registry = self._server.custom_metrics
        self._families[handle] = registry.create_family(name, description, kind)

    def _family_delete(self, handle: int) -> None:
        family = self._families.pop(handle, None)
        if family is not None:
            self._server.custom_metrics.delete_family(family)

    def _metric_new(
        self, handle: int, family: int, labels: dict[str, str], buckets: list[float] | None
    ) -> None:
        registry = self._server.custom_metrics
        self._metrics[handle] = registry.create_metric(self._families[family], labels, buckets)

    def _metric_delete(self, handle: int) -> None:
        metric = self._metrics.pop(handle, None)
        if metric is not None:
            self._server.custom_metrics.delete_metric(metric)

    def _metric_increment(self, handle: int, value: float) -> None:
        self._server.custom_metrics.increment(self._metrics[handle], value)

    def _metric_set(self, handle: int, value: float) -> None:
        self._server.custom_metrics.set(self._metrics[handle], value)

    def _metric_observe(self, handle: int, value: float) -> None:
        self._server.custom_metrics.observe(self._metrics[handle], value)

    def _metric_value(self, handle: int) -> float:
        value: float = self._server.custom_metrics.value(self._metrics[handle])
        return value

    def _delete_all_metrics(self) -> None:
        for handle in list(self._metrics):
            self._metric_delete(handle)
        for handle in list(self._families):
            self._family_delete(handle)


_SLOW_METHODS = frozenset({"load_model", "unload_model", "is_model_ready"})

_METHODS: dict[str, Callable[..., Any]] = {
    "metric_family_new": ModelServices._family_new,
    "metric_family_delete": ModelServices._family_delete,
    "metric_new": ModelServices._metric_new,
    "metric_delete": ModelServices._metric_delete,
    "metric_increment": ModelServices._metric_increment,
    "metric_set": ModelServices._metric_set,
    "metric_observe": ModelServices._metric_observe,
    "metric_value": ModelServices._metric_value,
}

_CALL_PREFIX = {
    "load_model": "Failed to load model: ",
    "unload_model": "Failed to unload model: ",
    "is_model_ready": "Failed to check model readiness: ",
    "metric_family_new": "Error when creating MetricFamily: ",
    "metric_new": "Error when creating Metric: ",
    "metric_increment": "Failed to increment metric value: ",
    "metric_set": "Failed to set metric value: ",
    "metric_observe": "Failed to observe metric value: ",
    "metric_value": "Failed to get metric value: ",
}


def _prefixed(name: str, error: NpuserveError) -> NpuserveError:
    return error_from_code(error.code, f"Model {name} - Error when running inference: {error}")


def _request(
    name: str, version: int, inputs: list[Tensor], fields: Any, on_response: Reply
) -> InferenceRequest:
    by_name: dict[str, Tensor] = {}
    for tensor in inputs:
        if tensor.name in by_name:
            raise InvalidArgumentError(f"input '{tensor.name}' already exists in request")
        by_name[tensor.name] = tensor
    id_, correlation_id, flags, timeout, priority, parameters, outputs, parent = fields
    request = InferenceRequest(
        name,
        by_name,
        on_response,
        model_version=version,
        id=id_,
        requested_outputs=tuple(outputs),
        parameters=json.loads(parameters) if parameters else None,
        correlation_id=correlation_id,
        flags=flags,
        priority=priority,
        timeout_us=timeout,
    )
    request.parent = parent
    return request
