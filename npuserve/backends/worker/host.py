"""The model host: one instance of a user's model, and the rules of its methods.

The same object serves a worker process (`child.py`) and thread execution (`thread.py`), so a
model behaves alike in both. It knows neither sockets nor the server; `Port` stands for them.

Rules and texts: Triton python_backend, src/pb_stub.cc.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npuserve.backends.worker import pb_utils, wire
from npuserve.backends.worker.forks import leave
from npuserve.backends.worker.pb_config import ModelConfig
from npuserve.backends.worker.pb_request import (
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
)
from npuserve.backends.worker.pb_response import InferenceResponse
from npuserve.backends.worker.pb_tensor import Tensor, TritonModelException

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npuserve.backends.worker.port import Port

_MAX_FRAMES = 100  # of a traceback, the innermost

# Files whose frames say nothing about the model: this package, and what imports model.py.
_OWN_FRAMES = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(importlib.__file__) + os.sep,
    "<frozen importlib",
)


class ModelFailedError(Exception):
    """A method of the model failed; the text is for the client or the load's reason."""


# What `execute` made of a request: a response, wire.LATER or wire.RESCHEDULE.
Outcome = Any


class ModelHost:
    """One instance of `TritonPythonModel`.

    Args:
        spec: plain values that describe it: name, version, model_dir, version_dir, file (path of
            model.py), config (JSON), instance_name, kind, device_id.
        port: the server.
        importer: makes a module of a path and the bound helper module.

    Attributes:
        is_async: whether `execute` is a coroutine function; its batches may overlap.
        has_readiness: whether the model has `is_ready`.
        serving: whether initialize is over, so that the model may call other models.
        output_names: all outputs of the configuration.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        port: Port,
        importer: Callable[[str, ModuleType], ModuleType],
    ) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.instance_name: str = spec["instance_name"]
        self.version_dir: str = spec["version_dir"]
        config = json.loads(spec["config"])
        self.output_names = tuple(entry["name"] for entry in config.get("output", ()))
        # The server keeps these for the sequence's next request, whatever the client asked for.
        states = config.get("sequence_batching", {}).get("state", ())
        self._state_outputs = tuple(entry["output_name"] for entry in states)
        self._all_outputs = self.output_names + self._state_outputs
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self.is_async = False
        self.has_readiness = False
        self.serving = False
        self._port = port
        self._importer = importer
        self._module: ModuleType | None = None
        self._model: Any = None
        self._execute: Any = None
        self._pb_utils = pb_utils.bind(self, port)
        request_class: type[InferenceRequest] = self._pb_utils.InferenceRequest
        self._make_request = request_class._from_wire

    # -- life cycle ---------------------------------------------------------------------------

    def _class(self) -> Any:
        if self._module is None:
            self._module = self._importer(self.spec["file"], self._pb_utils)
        model_class = getattr(self._module, "TritonPythonModel", None)
        if model_class is None:
            raise ModelFailedError(
                f"{self.spec['file']} has no class TritonPythonModel (AttributeError: module "
                f"'{self._module.__name__}' has no attribute 'TritonPythonModel')"
            )
        return model_class

    def auto_complete(self) -> str:
        """Run auto_complete_config; gives the completed configuration as JSON.

        Raises:
            ModelFailedError: with Triton's text.
        """
        try:
            complete = getattr(self._class(), "auto_complete_config", None)
            if complete is None:
                config: str = self.spec["config"]
                return config
            completed = complete(ModelConfig(self.spec["config"]))
        except ModelFailedError:
            raise
        except BaseException as error:
            raise ModelFailedError(describe(error)) from None
        if not isinstance(completed, ModelConfig):
            raise ModelFailedError(
                f"auto_complete_config function in model '{self.name}' must return a valid "
                "pb.ModelConfig object."
            )
        return json.dumps(completed.as_dict())

    def initialize(self) -> None:
        """Import the file, make the model and call its `initialize`.

        Raises:
            ModelFailedError: with the traceback in Triton's form.
        """
        try:
            self._model = self._class()()
            initialize = getattr(self._model, "initialize", None)
            if initialize is not None:
                initialize(self._arguments())
            self._execute = getattr(self._model, "execute", None)
            self.has_readiness = getattr(self._model, "is_ready", None) is not None
        except ModelFailedError:
            raise
        except BaseException as error:  # sys.exit in a model is a failure like others
            raise ModelFailedError(describe(error)) from None
        self.is_async = inspect.iscoroutinefunction(self._execute)
        self.serving = True

    def _arguments(self) -> dict[str, str]:
        spec = self.spec
        return {
            "model_config": spec["config"],
            "model_instance_kind": spec["kind"],
            "model_instance_name": spec["instance_name"],
            "model_instance_device_id": str(spec["device_id"]),
            "model_repository": spec["model_dir"],
            "model_version": str(spec["version"]),
            "model_name": spec["name"],
        }

    def finalize(self) -> None:
        """Call the model's `finalize`, if it was made and has one.

        Raises:
            ModelFailedError: to be logged; nothing else comes of it.
        """
        self.serving = False
        model, self._model, self._execute = self._model, None, None
        try:
            finalize = getattr(model, "finalize", None)
            if finalize is not None:
                finalize()
        except BaseException as error:
            raise ModelFailedError(describe(error)) from None

    # -- readiness ----------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Ask the model whether it is ready; in a thread of its own.

        Raises:
            ModelFailedError: it raised, or did not say yes or no.
        """
        try:
            answer = self._model.is_ready()
            if inspect.iscoroutine(answer):
                answer = asyncio.run(answer)
        except BaseException as error:
            raise ModelFailedError(describe(error)) from None
        return _boolean(answer)

    async def is_ready_async(self) -> bool:
        """`is_ready` of a model that has an event loop, on that loop."""
        try:
            if inspect.iscoroutinefunction(self._model.is_ready):
                answer = await self._model.is_ready()
            else:  # it may block
                loop = asyncio.get_running_loop()
                answer = await loop.run_in_executor(None, self._is_ready)
        except BaseException as error:
            raise ModelFailedError(describe(error)) from None
        return _boolean(answer)

    def _is_ready(self) -> Any:
        """Body of a thread, which a process that the model forks in it would not come out of."""
        try:
            return self._model.is_ready()
        finally:
            if self._port.forked:
                leave()

    # -- requests -----------------------------------------------------------------------------

    def request(self, key: Any, inputs: list[Tensor], fields: Any) -> InferenceRequest:
        """A request object for the model, see `wire` for `fields`."""
        request = self._make_request(key, inputs, fields)
        if self.decoupled:
            # From the start, so that a request the model loses is noticed as it dies.
            request.get_response_sender()
        return request

    def execute(self, requests: list[InferenceRequest]) -> Sequence[Outcome]:
        """Run the model on a batch.

        Returns:
            An outcome per request; empty for a decoupled model, which answers through senders.

        Raises:
            ModelFailedError: no request of the batch was answered well.
        """
        try:
            returned = self._entry()(requests)
            if inspect.isgenerator(returned):
                returned = list(returned)
        except ModelFailedError:
            self.abandon(requests)
            raise
        except BaseException as error:
            self.abandon(requests)
            raise ModelFailedError(self._failure(describe(error))) from None
        return self._outcomes(requests, returned)

    async def execute_async(self, requests: list[InferenceRequest]) -> Sequence[Outcome]:
        """`execute` of a model that has `async def execute`."""
        try:
            returned = await self._entry()(requests)
        except BaseException as error:
            self.abandon(requests)
            raise ModelFailedError(self._failure(describe(error))) from None
        return self._outcomes(requests, returned)

    def _entry(self) -> Any:
        if self._execute is None:
            raise ModelFailedError(
                self._failure(
                    f"Python model {self.spec['file']} does not implement `execute` method."
                )
            )
        return self._execute

    def _failure(self, text: str) -> str:
        return f"Failed to process the request(s) for model '{self.instance_name}', message: {text}"

    def abandon(self, requests: list[InferenceRequest]) -> None:
        """The batch ends with an error for all: senders must not answer any more."""
        for request in requests:
            if request._sender is not None:
                request._sender._close()

    def _outcomes(self, requests: list[InferenceRequest], returned: Any) -> Sequence[Outcome]:
        try:
            if self.decoupled:
                return self._decoupled_outcomes(requests, returned)
            if returned is None:
                return [self._unlisted(request) for request in requests]
            if type(returned) is not list:
                raise ModelFailedError(
                    f"Expected a list in the execute return, found type '{type(returned)}'."
                )
            if len(returned) != len(requests):
                raise ModelFailedError(
                    "Number of InferenceResponse objects do not match the number of "
                    f"InferenceRequest objects. InferenceRequest(s) size is:{len(requests)}, and "
                    f"InferenceResponse(s) size is:{len(returned)}\n"
                )
            return list(map(self._outcome, requests, returned))
        except ModelFailedError as error:
            self.abandon(requests)
            raise ModelFailedError(self._failure(str(error))) from None

    def _decoupled_outcomes(
        self, requests: list[InferenceRequest], returned: Any
    ) -> Sequence[Outcome]:
        rescheduled = any(
            request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
            for request in requests
        )
        if returned is not None and not (rescheduled and isinstance(returned, list)):
            raise ModelFailedError(
                f"Python model '{self.instance_name}' is using the decoupled mode and the execute "
                "function must return None."
            )
        if not rescheduled:
            return ()
        return [
            _rescheduled(request)
            if request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
            else wire.LATER
            for request in requests
        ]

    def _outcome(self, request: InferenceRequest, response: Any) -> Outcome:
        if request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            if response is not None:
                raise ModelFailedError(
                    "Expected a None object in the execute function return list for reschduled "
                    f"request, found type '{type(response)}'."
                )
            return _rescheduled(request)
        if response is None:
            return self._unlisted(request)
        if not isinstance(response, InferenceResponse):
            raise ModelFailedError(
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(response)}'."
            )
        sender = request._sender
        if sender is not None:
            if sender._sent:
                raise ModelFailedError(
                    "the request was answered through its response sender already; return None "
                    "for it."
                )
            sender._close()
        return response

    def _unlisted(self, request: InferenceRequest) -> Outcome:
        """The request has no response in the returned list: its sender must answer it."""
        if request._sender is None:
            # Differs from Triton: there the request hangs for ever.
            raise ModelFailedError(
                f"execute of Python model '{self.name}' returned None for a request and did not "
                "take its response sender, so the request would never be answered. Return a list "
                "with one InferenceResponse per request."
            )
        return wire.LATER

    def kept_outputs(self, request: InferenceRequest) -> Any:
        """Names of the outputs that go back to the server; the others are dropped."""
        asked = request._output_names
        if asked and self._state_outputs:
            return (*asked, *self._state_outputs)
        return asked or self._all_outputs


def _boolean(answer: Any) -> bool:
    if not isinstance(answer, bool):
        raise ModelFailedError("is_ready() must return a boolean value")
    return answer


def _rescheduled(request: InferenceRequest) -> Outcome:
    if request._sender is not None:
        request._sender._close()
    return wire.RESCHEDULE


def describe(error: BaseException) -> str:
    """An exception as pybind11 writes it: the type, the text and the frames, innermost first."""
    if isinstance(error, TritonModelException):
        kind = "TritonModelException"
    else:
        kind = type(error).__name__
    try:
        text = str(error)
    except BaseException as failure:  # an exception class may be wrong as any code
        text = f"<no text: {type(failure).__name__}>"
    summary = f"{kind}: {text}" if text else kind
    # Differs from Triton: a deep recursion ends the list, as nobody reads thousands of frames.
    frames = [
        f"  {frame.filename}({frame.lineno}): {frame.name}\n"
        for frame in reversed(traceback.extract_tb(error.__traceback__, -_MAX_FRAMES))
        if not frame.filename.startswith(_OWN_FRAMES)
    ]
    whole = summary + ("\n\nAt:\n" + "".join(frames) if frames else "")
    return whole.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot travel
