"""The pytorch backend: TorchScript and torch.export models, on NPU cards or on the CPU.

Tensor names in the configuration are the arguments of the model's forward function, or end in
`__<index>` (INPUT__0), or count by their order. Parameters, as Triton's backend names them:

    INTRA_OP_THREAD_COUNT         threads of each instance
    INTER_OP_THREAD_COUNT         threads for parallel branches, for the whole process
    INFERENCE_MODE                "true" (default) or "false": torch.no_grad only
    DISABLE_OPTIMIZED_EXECUTION   "true": TorchScript without the profiling executor's rewriting
    ENABLE_WEIGHT_SHARING         "true": instances on one device share one copy of the model

and `torchair`: "max-autotune", "reduce-overhead" or another mode of torchair compiles a .pt2 model
for the card, once for each instance.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.backends.base import Backend, BackendModelContext, ExecutionBatch, ModelInstance
from npuserve.backends.batch_arrays import cut_rows, split_by_inputs
from npuserve.backends.batch_input import BatchTensors, join_ragged
from npuserve.backends.model_signature import (
    complete_config,
    default_max_batch_size,
    scheduler_input_names,
    scheduler_output_names,
)
from npuserve.backends.torch_module import (
    TorchModule,
    configure_threads,
    datatype_of,
    device_of,
    exported_signature,
    free_cached_memory,
    is_exported,
    load_module,
    model_path,
    positions,
    runtime,
)
from npuserve.errors import InternalError, InvalidArgumentError, InvalidConfigError, NpuserveError
from npuserve.model_config import datatype_name
from npuserve.response import InferenceResponse
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from npuserve.backends.base import Placement
    from npuserve.request import InferenceRequest


def _flag(text: str | None, default: bool) -> bool:
    return default if text is None else text.lower() in ("1", "true", "on")


class PytorchBackend(Backend):
    """See the module."""

    def __init__(self) -> None:
        # By model and device; a reload has another context than what it replaces.
        self._shared: dict[tuple[BackendModelContext, str], TorchModule] = {}
        self._lock = threading.Lock()

    def auto_complete(self, context: BackendModelContext) -> None:
        """See `Backend.auto_complete`. TorchScript files tell no shapes: nothing is filled."""
        path = model_path(context)
        if is_exported(path) and not (context.config.input and context.config.output):
            default = default_max_batch_size(context.backend_options)
            complete_config(context.config, exported_signature(path), default)

    def load(self, context: BackendModelContext) -> Sequence[ModelInstance]:
        """See `Backend.load`."""
        runtime()  # a machine without torch is told before threads start
        return [PytorchInstance(self, context, placement) for placement in context.placements]

    def unload(self, context: BackendModelContext) -> None:
        """See `Backend.unload`."""
        with self._lock:
            for key in [key for key in self._shared if key[0] is context]:
                del self._shared[key]
                free_cached_memory(key[1])

    def module(self, context: BackendModelContext, device: str) -> TorchModule:
        """The model on a device: a new one, or the shared one if the model wants that."""
        path = model_path(context)
        if not _flag(context.parameters.get("ENABLE_WEIGHT_SHARING"), False):
            return load_module(path, device, context.parameters)
        if context.parameters.get("torchair"):
            # Nothing says that one compiled graph may run in several threads.
            raise InvalidConfigError.of_parameter(
                "ENABLE_WEIGHT_SHARING",
                f"model '{context.name}': ENABLE_WEIGHT_SHARING and torchair exclude each other",
            )
        key = (context, device)
        with self._lock:
            if key not in self._shared:
                self._shared[key] = load_module(path, device, context.parameters)
            return self._shared[key]


class PytorchInstance(ModelInstance):
    """One instance in its own thread; torch lets go of the GIL while it computes."""

    def __init__(
        self, backend: PytorchBackend, context: BackendModelContext, placement: Placement
    ) -> None:
        self._backend = backend
        self._context = context
        self._placement = placement
        self._batching = context.config.max_batch_size > 0
        self._device = "cpu"
        self._module: TorchModule
        self._stream: Any = None
        self._by_name = False
        self._order: list[str] = []  # inputs by position
        self._outputs: dict[str, str] = {}  # datatype by name
        self._output_positions: list[int] | None = None
        self._states = scheduler_output_names(context.config)
        self._batch_tensors = BatchTensors(context.config)

    def initialize(self) -> None:
        """See `ModelInstance.initialize`."""
        configure_threads(self._context.parameters)
        self._device = device_of(self._placement)
        self._module = self._backend.module(self._context, self._device)
        if self._device != "cpu":
            # A stream of its own: instances on one card run side by side.
            self._stream = runtime().npu.Stream(device=self._device)
        self._bind_inputs()
        self._bind_outputs()

    def _bind_inputs(self) -> None:
        config = self._context.config
        names = [entry.name for entry in config.input]
        names += sorted(scheduler_input_names(config) - set(names))
        arguments = self._module.argument_names
        self._by_name = bool(names) and set(names) <= set(arguments)
        if self._by_name:
            self._order = [name for name in arguments if name in names]
            return
        numbers = positions(names, "input")
        self._order = names
        if numbers is not None:
            self._order = [name for _, name in sorted(zip(numbers, names, strict=True))]
        if len(names) > len(arguments):
            raise InvalidArgumentError(
                f"unable to load model '{config.name}', configuration expects {len(names)} inputs, "
                f"model provides {len(arguments)} ({', '.join(arguments)})"
            )

    def _bind_outputs(self) -> None:
        config = self._context.config
        self._outputs = {entry.name: datatype_name(entry.data_type) for entry in config.output}
        for state in config.sequence_batching.state:
            self._outputs.setdefault(state.output_name, datatype_name(state.data_type))
        self._output_positions = positions(list(self._outputs), "output")

    def execute(self, batch: ExecutionBatch) -> None:
        """See `ModelInstance.execute`."""
        for requests in split_by_inputs(batch.requests, self._batching):
            try:
                self._run(batch, requests)
            except NpuserveError as error:
                for request in requests:
                    batch.send(request, InferenceResponse.from_error(error))

    def finalize(self) -> None:
        """See `ModelInstance.finalize`."""
        self._module = TorchModule(None, [])
        self._stream = None
        free_cached_memory(self._device)

    def _run(self, batch: ExecutionBatch, requests: Sequence[InferenceRequest]) -> None:
        torch = runtime()
        inference_mode = _flag(self._context.parameters.get("INFERENCE_MODE"), True)
        plain = _flag(self._context.parameters.get("DISABLE_OPTIMIZED_EXECUTION"), False)
        stream = (
            contextlib.nullcontext() if self._stream is None else torch.npu.stream(self._stream)
        )
        with (
            torch.inference_mode() if inference_mode else torch.no_grad(),
            torch.jit.optimized_execution(not plain),
            stream,
        ):
            feeds = self._feeds(requests)
            batch.input_ready()
            try:
                result = self._module.run(feeds, self._by_name)
                outputs = self._collect(result)
            except NpuserveError:
                raise
            except Exception as error:  # whatever the model's own code raises
                raise InternalError(f"PyTorch execute failure: {error}") from error
            batch.output_ready()
        self._answer(batch, requests, outputs)

    def _feeds(self, requests: Sequence[InferenceRequest]) -> dict[str, Any]:
        """Torch tensors with memory of their own, which the model may write to."""
        made = self._batch_tensors.inputs(requests)
        feeds: dict[str, Any] = {}
        for name in self._order:
            if name in made:
                feeds[name] = self._on_device(made[name], "")
            elif name in requests[0].inputs:
                tensors = [request.inputs[name] for request in requests]
                feeds[name] = self._on_device(self._joined(name, tensors), tensors[0].datatype)
            elif not self._by_name or self._module.positional is not None:
                raise InvalidArgumentError(f"input '{name}' is missing; the model needs it")
        return feeds

    def _joined(self, name: str, tensors: Sequence[Tensor]) -> NDArray[Any]:
        if name in self._batch_tensors.ragged:
            return join_ragged(tensors)
        arrays = [tensor.as_numpy() for tensor in tensors]
        return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]

    def _on_device(self, array: NDArray[Any], datatype: str) -> Any:
        torch = runtime()
        if datatype == "BYTES":
            try:
                return [element.decode() for element in array.reshape(-1)]
            except UnicodeDecodeError as error:
                raise InvalidArgumentError(f"TorchScript takes text as UTF-8: {error}") from error
        if array.base is not None:  # a view of the request
            array = array.copy()
        if datatype == "BF16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self._device)
        return torch.from_numpy(array).to(self._device)

    def _collect(self, result: Any) -> dict[str, Tensor]:
        """The configured outputs in what the model returned: a tensor, a sequence or a dict."""
        if isinstance(result, dict):
            missing = [name for name in self._outputs if name not in result]
            if missing:
                raise InternalError(
                    f"the model returned {sorted(result)} and no output '{missing[0]}'"
                )
            values = [result[name] for name in self._outputs]
        else:
            values = self._by_position(result)
        return {
            name: self._output(name, value)
            for name, value in zip(self._outputs, values, strict=True)
        }

    def _by_position(self, result: Any) -> list[Any]:
        is_sequence = isinstance(result, (tuple, list)) and not _is_text(result)
        values = list(result) if is_sequence else [result]
        numbers = self._output_positions or list(range(len(self._outputs)))
        if max(numbers, default=-1) >= len(values):
            raise InternalError(
                f"the model returned {len(values)} outputs, the configuration has "
                f"{', '.join(self._outputs)}"
            )
        return [values[number] for number in numbers]

    def _output(self, name: str, value: Any) -> Tensor:
        torch = runtime()
        if _is_text(value):
            return Tensor.from_numpy(name, np.array([value], np.object_).reshape(-1))
        if not isinstance(value, torch.Tensor):
            raise InternalError(
                f"output '{name}' must be a tensor, the model returned {type(value).__name__}"
            )
        datatype = datatype_of(value)
        if datatype != self._outputs[name]:
            raise InternalError(
                f"output '{name}' is configured as {self._outputs[name]}, the model returned "
                f"{datatype}"
            )
        value = value.detach().to("cpu").contiguous()
        if datatype == "BF16":
            array = value.view(torch.int16).numpy().view(np.uint16)
        else:
            array = value.numpy()
        # A scalar goes out as one element, as its configuration has to say.
        return Tensor.from_numpy(name, np.atleast_1d(array), datatype)

    def _answer(
        self,
        batch: ExecutionBatch,
        requests: Sequence[InferenceRequest],
        outputs: dict[str, Tensor],
    ) -> None:
        parts = {name: self._cut(name, tensor, requests) for name, tensor in outputs.items()}
        for index, request in enumerate(requests):
            wanted = request.requested_outputs
            tensors = [
                Tensor.from_numpy(name, arrays[index], outputs[name].datatype)
                for name, arrays in parts.items()
                if not wanted or name in wanted or name in self._states
            ]
            batch.send(request, InferenceResponse(tensors))

    def _cut(
        self, name: str, tensor: Tensor, requests: Sequence[InferenceRequest]
    ) -> list[NDArray[Any]]:
        """The part of an output of the whole batch that belongs to each request."""
        array = tensor.as_numpy()
        if not self._batching:
            return [array]
        scattered = self._batch_tensors.scatter(name, array, requests)
        return scattered or cut_rows(name, array, requests)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)
    )
