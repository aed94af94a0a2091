"""`acl.mdl.*`: choosing gears, datasets, execution."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.testing.simulator import mdl_describe
from npuserve.testing.simulator.aipp import AippParams, decode
from npuserve.testing.simulator.binding import Pending, bare, entry
from npuserve.testing.simulator.core import ITEM_SIZE, DataBuffer, TensorDesc
from npuserve.testing.simulator.device import COMPUTE, Stream
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.mdl_load import Model

if TYPE_CHECKING:
    from npuserve.testing.simulator.om_file import OmGear
    from npuserve.testing.simulator.runtime import Runtime

_DEVICE_EXCEPTION = 507015


@dataclass(eq=False)
class Dataset:
    """Handles of data buffers in order of the tensors, and what was said about their shapes."""

    buffers: list[int] = field(default_factory=list)
    gear: list[int] | None = None
    shapes: dict[int, list[int]] = field(default_factory=dict)
    descs: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class ExecConfig:
    """Options of `execute_v2`."""

    values: dict[int, Any] = field(default_factory=dict)


# Gears.


def _set_gear(
    runtime: Runtime, model_id: int, handle: int, index: int, kind: str, key: list[int], code: int
) -> None:
    model = runtime.find(model_id, Model, 100011)
    dataset = runtime.find(handle, Dataset)
    description = model.description
    if not mdl_describe.has_gear_input(description):
        raise RefusedError(100019, "the model has no gears")
    if description.kind != kind:
        raise RefusedError(100000, f"the model has {description.kind} gears, not {kind}")
    if index != mdl_describe.count_inputs(description) - 1 or index >= len(dataset.buffers):
        raise RefusedError(145011, f"input {index} is not {mdl_describe.GEAR_INPUT} of the dataset")
    if key not in [gear.key for gear in description.gears]:
        known = [gear.key for gear in description.gears]
        raise RefusedError(code, f"E19013: {key} is not in the list of gears {known}")
    buffer = runtime.find(dataset.buffers[index], DataBuffer)
    size = mdl_describe.extra_inputs(description)[-1].size
    if buffer.size < size:
        raise RefusedError(
            145011, f"the buffer of {mdl_describe.GEAR_INPUT} has {buffer.size} bytes"
        )
    runtime.bytes_at(buffer.address, size)[:] = np.array(key, "<i8").view(np.uint8)
    dataset.gear = model.gear = key


@entry("acl.mdl.set_dynamic_batch_size", "ikkk")
def set_dynamic_batch_size(
    runtime: Runtime, model_id: int, handle: int, index: int, batch: int
) -> None:
    """Choose a batch gear."""
    _set_gear(runtime, model_id, handle, index, "batch", [batch], 145013)


@entry("acl.mdl.set_dynamic_hw_size", "ikkkk")
def set_dynamic_hw_size(
    runtime: Runtime, model_id: int, handle: int, index: int, height: int, width: int
) -> None:
    """Choose an image size gear."""
    _set_gear(runtime, model_id, handle, index, "hw", [height, width], 145012)


@entry("acl.mdl.set_input_dynamic_dims", "ikko")
def set_input_dynamic_dims(
    runtime: Runtime, model_id: int, handle: int, index: int, dims: Any
) -> None:
    """Choose a dims gear."""
    if not isinstance(dims, dict) or not isinstance(dims.get("dims"), list):
        raise TypeError("acl.mdl.set_input_dynamic_dims args parse failed: dims dict expected")
    if dims.get("dimCount") != len(dims["dims"]):
        raise RefusedError(100000, "dimCount does not count dims")
    _set_gear(runtime, model_id, handle, index, "dims", dims["dims"], 145012)


# Datasets.


@bare("acl.mdl.create_dataset")
def create_dataset(runtime: Runtime) -> int:
    """An empty dataset."""
    return runtime.register(Dataset(), "dataset", "acl.mdl.create_dataset")


@entry("acl.mdl.destroy_dataset", "k")
def destroy_dataset(runtime: Runtime, handle: int) -> None:
    """Destroy a dataset, not its buffers."""
    dataset = runtime.drop(handle, Dataset)
    for desc in dataset.descs.values():
        runtime.drop(desc, TensorDesc)


@entry("acl.mdl.add_dataset_buffer", "kk", failure=(0,))
def add_dataset_buffer(runtime: Runtime, handle: int, buffer: int) -> int:
    """Append the buffer of the next tensor."""
    runtime.find(buffer, DataBuffer)
    runtime.find(handle, Dataset).buffers.append(buffer)
    return handle


@bare("acl.mdl.get_dataset_num_buffers", "k")
def get_dataset_num_buffers(runtime: Runtime, handle: int) -> int:
    """Number of buffers."""
    return len(runtime.find(handle, Dataset).buffers)


@bare("acl.mdl.get_dataset_buffer", "kk")
def get_dataset_buffer(runtime: Runtime, handle: int, index: int) -> int:
    """Buffer of a tensor."""
    buffers = runtime.find(handle, Dataset).buffers
    if not 0 <= index < len(buffers):
        raise RefusedError(100000, f"buffer {index} of {len(buffers)}")
    return buffers[index]


@entry("acl.mdl.set_dataset_tensor_desc", "kkk", failure=(0,))
def set_dataset_tensor_desc(runtime: Runtime, handle: int, desc: int, index: int) -> int:
    """Tell the real shape of an input."""
    dataset = runtime.find(handle, Dataset)
    if not 0 <= index < len(dataset.buffers):
        raise RefusedError(100000, f"buffer {index} of {len(dataset.buffers)}")
    dataset.shapes[index] = list(runtime.find(desc, TensorDesc).dims)
    return handle


@bare("acl.mdl.get_dataset_tensor_desc", "kk")
def get_dataset_tensor_desc(runtime: Runtime, handle: int, index: int) -> int:
    """Real shape of a tensor; the description belongs to the dataset."""
    dataset = runtime.find(handle, Dataset)
    if index not in dataset.shapes:
        raise RefusedError(100000, f"no shape is known for tensor {index}")
    if index in dataset.descs:
        runtime.find(dataset.descs[index], TensorDesc).dims = dataset.shapes[index]
    else:
        desc = TensorDesc(0, dataset.shapes[index], 2)
        dataset.descs[index] = runtime.register(desc, "tensor description", "a dataset")
    return dataset.descs[index]


# Execution.


@dataclass
class Execution:
    """One checked execution."""

    runtime: Runtime
    model: Model
    inputs: list[DataBuffer]
    outputs: list[DataBuffer]
    output_dataset: Dataset
    shapes: list[list[int]]
    gear: OmGear | None

    def run(self) -> None:
        """Read the inputs, compute, write the outputs."""
        runtime, description = self.runtime, self.model.description
        aipp = self._aipp()
        data = []
        for index, (spec, shape) in enumerate(zip(description.inputs, self.shapes, strict=True)):
            size = prod(shape) * ITEM_SIZE[spec.datatype]
            if index in aipp:
                size = shape[0] * aipp[index].image_bytes
            data.append(self._memory(self.inputs[index], size))
        try:
            results = self.model.engine.run(data, self.shapes, aipp)
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError(_DEVICE_EXCEPTION, f"EZ9999: AI core exception: {error}") from error
        for index, (buffer, result) in enumerate(zip(self.outputs, results, strict=True)):
            if self.gear is None:
                self.output_dataset.shapes[index] = list(result.shape)
                if not buffer.address and result.nbytes:
                    memory = self.model.context.card.memory
                    buffer.address = memory.allocate(result.nbytes, "acl.mdl.execute")
                    buffer.size = result.nbytes
            if result.nbytes:
                content = result.reshape(-1).view(np.uint8)
                self._memory(buffer, result.nbytes)[:] = content
        card = self.model.context.card
        runtime.shared_state.publish(card.index, card.memory.used, card.busy_ns)

    def _aipp(self) -> dict[int, AippParams]:
        """Settings of dynamic AIPP by data input, as they are in the parameter inputs' memory."""
        description = self.model.description
        found: dict[int, AippParams] = {}
        for place, extra in enumerate(mdl_describe.extra_inputs(description)):
            if extra.aipp_of is None:
                continue
            content = self._memory(self.inputs[len(description.inputs) + place], extra.size)
            try:
                params = decode(content.tobytes())
            except ValueError as error:
                self.runtime.violations.append(str(error))
                raise RefusedError(_DEVICE_EXCEPTION, f"EZ9999: {error}") from error
            found[extra.aipp_of] = params
        return found

    def _memory(self, buffer: DataBuffer, size: int) -> Any:
        try:
            if buffer.size < size:
                raise RefusedError(_DEVICE_EXCEPTION, f"a buffer of {buffer.size} for {size} bytes")
            return self.runtime.bytes_at(buffer.address, size) if size else np.empty(0, np.uint8)
        except RefusedError as error:
            text = f"EZ9999: illegal address while model {self.model.id} executed: {error}"
            self.runtime.violations.append(text)
            raise RefusedError(_DEVICE_EXCEPTION, text) from error


def _check(
    runtime: Runtime, model_id: int, input_handle: int, output_handle: int, stream: Stream
) -> Execution:
    model = runtime.find(model_id, Model, 145003)
    if model.context is not runtime.current:
        raise RefusedError(107004, "the model was loaded in another context")
    if model.task is not None and not model.task.done and model.task.stream is not stream:
        raise RefusedError(507011, f"model {model_id} is executing on another stream")
    description = model.description
    inputs = runtime.find(input_handle, Dataset)
    outputs = runtime.find(output_handle, Dataset)
    if len(inputs.buffers) != mdl_describe.count_inputs(description):
        text = f"{len(inputs.buffers)} inputs for {mdl_describe.count_inputs(description)}"
        raise RefusedError(100017, text)
    if len(outputs.buffers) != len(description.outputs):
        text = f"{len(outputs.buffers)} outputs for {len(description.outputs)}"
        raise RefusedError(100018, text)
    gear = None
    if description.gears:
        gear = _chosen_gear(description.gears, inputs.gear)
        shapes = gear.inputs
    else:
        shapes = _told_shapes(model, inputs)
    # Copies: the user may point the wrappers elsewhere for the next execution.
    blocks = [_copied(runtime, handle) for handle in inputs.buffers]
    results = [runtime.find(handle, DataBuffer) for handle in outputs.buffers]
    _check_blocks(runtime, model, blocks, results, shapes)
    return Execution(runtime, model, blocks, results, outputs, shapes, gear)


def _chosen_gear(gears: list[OmGear], key: list[int] | None) -> OmGear:
    for gear in gears:
        if gear.key == key:
            return gear
    # Nothing pads and nothing complains: the largest gear runs on what is in the buffers.
    return max(gears, key=lambda gear: sum(prod(dims) for dims in gear.inputs))


def _told_shapes(model: Model, dataset: Dataset) -> list[list[int]]:
    shapes: list[list[int]] = []
    for index, spec in enumerate(model.description.inputs):
        shape = dataset.shapes.get(index)
        if shape is None:
            raise RefusedError(145021, f"set_dataset_tensor_desc is missing for '{spec.name}'")
        if len(shape) != len(spec.shape):
            raise RefusedError(145021, f"'{spec.name}' has {len(spec.shape)} dims, not {shape}")
        for length, (low, high) in zip(shape, spec.ranges, strict=True):
            if length < low or (high >= 0 and length > high):
                text = f"'{spec.name}' of {shape} is outside of {spec.ranges}"
                raise RefusedError(145021, text)
        shapes.append(shape)
    return shapes


def _copied(runtime: Runtime, handle: int) -> DataBuffer:
    buffer = runtime.find(handle, DataBuffer)
    return DataBuffer(buffer.address, buffer.size)


def _check_blocks(
    runtime: Runtime, model: Model, inputs: list[DataBuffer], outputs: list[DataBuffer],
    shapes: list[list[int]],
) -> None:  # fmt: skip
    description = model.description
    for block, spec, shape in zip(inputs, description.inputs, shapes, strict=False):
        if spec.has_dynamic_aipp:  # how large the image is is not known yet
            runtime.bytes_at(block.address, block.size)
            continue
        size = prod(shape) * ITEM_SIZE[spec.datatype]
        if block.size < size:
            text = f"input '{spec.name}' needs {size} bytes, its buffer has {block.size}"
            raise RefusedError(100017, text)
        if size:
            runtime.bytes_at(block.address, size)
    extra = mdl_describe.extra_inputs(description)
    for block, added in zip(inputs[len(description.inputs) :], extra, strict=True):
        if not block.address:
            raise RefusedError(145011, f"the buffer of {added.name} is null")
    for index, block in enumerate(outputs):
        if not description.gears and not block.address:
            continue  # the runtime allocates
        size = mdl_describe.output_bytes(description, index)
        if block.size < size:
            name = description.outputs[index].name
            raise RefusedError(100018, f"output '{name}' needs {size} bytes, not {block.size}")
        runtime.bytes_at(block.address, size)


def _queue(runtime: Runtime, execution: Execution, stream: Stream) -> int:
    """Queue it; its modelled end, ns."""
    model = execution.model
    device_ms = model.description.device_ms
    if device_ms is None:
        device_ms = runtime.options.device_ms
    duration = int(device_ms * 1e6)
    now = runtime.clock.now_ns()
    model.task = stream.queue(now, COMPUTE, f"model {model.id}", duration, execution.run)
    return model.task.end_ns


@entry("acl.mdl.execute", "ikk", hold=True)
def execute(runtime: Runtime, model_id: int, inputs: int, outputs: int) -> Pending:
    """Execute and wait, holding the GIL."""
    stream = runtime.stream(0)
    execution = _check(runtime, model_id, inputs, outputs, stream)
    end = _queue(runtime, execution, stream)
    stream.advance(None)
    return Pending(end, stream.take_failure())


@entry("acl.mdl.execute_v2", "ikkkk", hold=True)
def execute_v2(
    runtime: Runtime, model_id: int, inputs: int, outputs: int, handle: int, config: int
) -> Pending:
    """Execute on a stream and wait, holding the GIL."""
    runtime.find(config, ExecConfig)
    stream = runtime.stream(handle)
    execution = _check(runtime, model_id, inputs, outputs, stream)
    end = _queue(runtime, execution, stream)
    stream.advance(None)
    return Pending(end, stream.take_failure())


@entry("acl.mdl.execute_async", "ikkk")
def execute_async(runtime: Runtime, model_id: int, inputs: int, outputs: int, handle: int) -> None:
    """Queue an execution."""
    stream = runtime.stream(handle)
    execution = _check(runtime, model_id, inputs, outputs, stream)
    _queue(runtime, execution, stream)


@bare("acl.mdl.create_exec_config_handle")
def create_exec_config_handle(runtime: Runtime) -> int:
    """Options of `execute_v2`."""
    call = "acl.mdl.create_exec_config_handle"
    return runtime.register(ExecConfig(), "execution configuration", call)


@entry("acl.mdl.set_exec_config_opt", "kio")
def set_exec_config_opt(runtime: Runtime, handle: int, attribute: int, value: Any) -> None:
    """Set one option."""
    runtime.find(handle, ExecConfig).values[attribute] = value


@entry("acl.mdl.destroy_exec_config_handle", "k")
def destroy_exec_config_handle(runtime: Runtime, handle: int) -> None:
    """Destroy the options."""
    runtime.drop(handle, ExecConfig)
