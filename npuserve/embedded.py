"""The server inside a Python program: no network, NumPy in and out.

What Triton's C API and its Python API are for. The server runs on an event loop in a thread of
its own; every method may be called from any thread, and the `async_*` twins from any event loop.

    with npuserve.Server(model_repository="./repo") as server:
        result = server.infer("add_sub", {"INPUT0": a, "INPUT1": b})
        print(result["OUTPUT0"])
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from npuserve.errors import InternalError, InvalidArgumentError, NpuserveError
from npuserve.model_config import config_to_dict
from npuserve.options import ServerOptions
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest
from npuserve.server.core import InferenceServer
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npuserve.response import InferenceResponse, ParameterValue
    from npuserve.server.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata

_T = TypeVar("_T")


@dataclass
class InferenceResult:
    """One response: outputs by name, and what came with them.

    Attributes:
        outputs: arrays of `[batch, *dims]`; BYTES as object arrays of `bytes`.
        datatypes: wire datatype by output name (BF16 arrays hold uint16 bits).
        parameters: response parameters of the model.
    """

    model_name: str
    model_version: str
    outputs: dict[str, NDArray[Any]]
    datatypes: dict[str, str]
    parameters: dict[str, ParameterValue] = field(default_factory=dict)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.outputs[name]

    @classmethod
    def from_response(cls, response: InferenceResponse) -> InferenceResult:
        """Arrays over the response's buffers. Raises the response's error, if it has one."""
        if response.error is not None:
            raise response.error
        return cls(
            response.model_name,
            response.model_version,
            {tensor.name: tensor.as_numpy() for tensor in response.outputs},
            {tensor.name: tensor.datatype for tensor in response.outputs},
            dict(response.parameters or {}),
        )


class ResultStream:
    """Responses of one request as they come; iterate it, with `for` or `async for`.

    An error response is raised at its place and ends the iteration. Leaving early: `cancel()`.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._items: queue.SimpleQueue[tuple[InferenceResponse | None, bool]] = queue.SimpleQueue()
        self._request: InferenceRequest | None = None
        self._ended = False
        self._waiter: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[InferenceResult]:
        while not self._ended:
            result = self._take(*self._items.get())
            if result is not None:
                yield result

    async def __aiter__(self) -> AsyncIterator[InferenceResult]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(arrived.set)

        self._waiter = wake
        while not self._ended:
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                await arrived.wait()
                arrived.clear()
                continue
            result = self._take(*item)
            if result is not None:
                yield result

    def cancel(self) -> None:
        """Tell the server that no more responses are wanted."""
        if self._request is not None:
            self._server._loop.call_soon_threadsafe(self._request.cancel)

    def _take(self, response: InferenceResponse | None, final: bool) -> InferenceResult | None:
        self._ended = final
        if response is None:
            return None
        if response.error is not None:
            self._ended = True
        return InferenceResult.from_response(response)

    def _receive(self, response: InferenceResponse | None, final: bool) -> None:
        self._items.put((response, final))
        waiter = self._waiter
        if waiter is not None:
            waiter()


class Server:
    """An embedded inference server.

    Args:
        model_repository: one directory (or cloud URL) or several.
        options: any setting of `ServerOptions` by its name, such as
            `model_control_mode="explicit"`.

    Raises:
        NpuserveError: a repository cannot be read, or a start-up model failed while
            `exit_on_error` is true (the default, as with the command line).
    """

    def __init__(self, model_repository: str | Path | Sequence[str | Path], **options: Any) -> None:
        paths = [model_repository] if isinstance(model_repository, str | Path) else model_repository
        self.options = ServerOptions(model_repository=tuple(str(path) for path in paths), **options)
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="npuserve", daemon=True)
        self._thread.start()
        self._started.result()

    # ---------------------------------------------------------------- life

    def _run(self) -> None:
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            else:
                raise

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with InferenceServer(self.options) as server:
            failed = server.lifecycle.failed_startup
            if failed and self.options.exit_on_error:
                reasons = "; ".join(
                    entry.failure or "; ".join(s.reason for s in entry.versions.values())
                    for entry in (server.lifecycle.entries[name] for name in failed)
                )
                raise InternalError(f"failed to load {', '.join(failed)}: {reasons}")
            self._server = server
            self._started.set_result(None)
            await self._stop.wait()

    def close(self) -> None:
        """Answer what was accepted, unload every model, end the thread. Harmless when repeated."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---------------------------------------------------------------- inference

    def infer(
        self, model_name: str, inputs: Mapping[str, Any], **request_options: Any
    ) -> InferenceResult:
        """Run one request and wait for its only response.

        Args:
            inputs: arrays (or `Tensor`s, or nested lists) of `[batch, *dims]` by input name;
                their dtype is converted to the one configured where NumPy can do it safely.
            request_options: `model_version`, `requested_outputs`, `request_id`, `parameters`,
                `correlation_id`, `sequence_start`, `sequence_end`, `priority`, `timeout_us`.

        Raises:
            NpuserveError: refused, or the model answered with an error.
        """
        return self._start_unary(model_name, inputs, request_options).result()

    async def async_infer(
        self, model_name: str, inputs: Mapping[str, Any], **request_options: Any
    ) -> InferenceResult:
        """As `infer`, awaited."""
        return await asyncio.wrap_future(self._start_unary(model_name, inputs, request_options))

    def stream(
        self, model_name: str, inputs: Mapping[str, Any], **request_options: Any
    ) -> ResultStream:
        """Run one request of any model, decoupled ones included, and iterate its responses."""
        stream = ResultStream(self)

        def submit() -> None:
            stream._request = self._request(model_name, inputs, stream._receive, request_options)
            self._server.infer(stream._request)

        self._call(submit)
        return stream

    def _start_unary(
        self, model_name: str, inputs: Mapping[str, Any], request_options: dict[str, Any]
    ) -> concurrent.futures.Future[InferenceResult]:
        future: concurrent.futures.Future[InferenceResult] = concurrent.futures.Future()

        def receive(response: InferenceResponse | None, final: bool) -> None:
            if future.done():
                return
            try:
                if response is None:
                    raise InternalError(f"model '{model_name}' ended without a response")
                if not final and self._server.model(model_name).decoupled:
                    raise InvalidArgumentError(
                        f"model '{model_name}' is decoupled: use stream() for its responses"
                    )
                future.set_result(InferenceResult.from_response(response))
            except NpuserveError as error:
                future.set_exception(error)

        def submit() -> None:
            request = self._request(model_name, inputs, receive, request_options)
            self._server.infer(request)

        self._call(submit)
        return future

    def _request(
        self,
        model_name: str,
        inputs: Mapping[str, Any],
        receive: Callable[[InferenceResponse | None, bool], None],
        given: dict[str, Any],
    ) -> InferenceRequest:
        options = dict(given)
        version = options.pop("model_version", -1)
        specs = self._server.model(model_name, version).input_specs
        tensors = {name: _tensor(name, value, specs) for name, value in inputs.items()}
        flags = options.pop("sequence_start", False) * SEQUENCE_START
        flags |= options.pop("sequence_end", False) * SEQUENCE_END
        return InferenceRequest(
            model_name,
            tensors,
            receive,
            model_version=version,
            id=options.pop("request_id", ""),
            requested_outputs=tuple(options.pop("requested_outputs", ())),
            flags=flags,
            **options,
        )

    # ---------------------------------------------------------------- control and views

    def load_model(
        self,
        name: str,
        config_json: str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Load or reload a model (model control mode `explicit`)."""
        self._await(lambda: self._server.load_model(name, config_json, files))

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model (model control mode `explicit`)."""
        self._await(lambda: self._server.unload_model(name, unload_dependents))

    def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        """Models of the repositories and their states."""
        return self._await(lambda: self._server.repository_index(ready_only))

    def ready(self) -> bool:
        """Whether every start-up model can serve."""
        return self._call(self._server.ready)

    def model_ready(self, name: str, version: int | str = "") -> bool:
        """Whether the version (the newest without one) can serve."""
        return self._await(lambda: self._server.model_ready(name, str(version)))

    def server_metadata(self) -> ServerMetadata:
        """Name, version and extensions."""
        return self._server.server_metadata()

    def model_metadata(self, name: str, version: int | str = "") -> ModelMetadata:
        """Inputs, outputs and ready versions."""
        return self._call(lambda: self._server.model_metadata(name, str(version)))

    def model_config(self, name: str, version: int | str = "") -> dict[str, Any]:
        """The complete configuration, as `/config` shows it."""
        return self._call(lambda: config_to_dict(self._server.model_config(name, str(version))))

    def statistics(self, name: str = "", version: int | str = "") -> dict[str, Any]:
        """The statistics extension's answer, as `/stats` shows it."""
        from npuserve.protocol.http.statistics_codec import statistics_document

        return self._call(
            lambda: statistics_document(self._server.model_statistics(name, str(version)))
        )

    def metrics(self) -> str:
        """Prometheus text, as `/metrics` shows it."""
        from npuserve.protocol.prometheus import render

        return self._call(lambda: render(self._server)).decode()

    def _call(self, function: Callable[[], _T]) -> _T:
        """Run a function on the server's loop and wait for it."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return future.result()

    def _await(self, coroutine: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine(), self._loop).result()


def _tensor(name: str, value: Any, specs: Mapping[str, tuple[str, Sequence[int]]]) -> Tensor:
    if isinstance(value, Tensor):
        return value
    datatype = specs[name][0] if name in specs else None
    array = np.asarray(value)
    if datatype is not None and datatype not in ("BYTES", "BF16"):
        from npuserve.tensor import NUMPY_DTYPE

        wanted = NUMPY_DTYPE[datatype]
        if array.dtype != wanted and np.can_cast(array.dtype, wanted, casting="same_kind"):
            array = array.astype(wanted)
    return Tensor.from_numpy(name, array, datatype if datatype == "BF16" else None)
