"""`acl.mdl.*`: loading, describing, unloading."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.testing.simulator.binding import bare, entry
from npuserve.testing.simulator.core import ITEM_SIZE
from npuserve.testing.simulator.engine import Engine
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.om_file import OmDescription, decode

if TYPE_CHECKING:
    from npuserve.testing.simulator.device import Context, Task
    from npuserve.testing.simulator.runtime import Runtime

GEAR_INPUT = "ascend_mbatch_shape_data"
_GEAR_INPUT_TYPE = 9  # INT64
_FORMAT_ND = 2
_MODEL_CONTEXT = 107004


@dataclass(eq=False)
class Model:
    """A loaded model.

    Attributes:
        blocks: device memory the runtime took for it.
        task: its last execution.
        gear: the key set last, by `set_dynamic_*`.
    """

    id: int
    engine: Engine
    context: Context
    blocks: list[int]
    task: Task | None = None
    gear: list[int] | None = None

    @property
    def description(self) -> OmDescription:
        """What the file says."""
        return self.engine.description


@dataclass(eq=False)
class ModelDesc:
    """A description handle; empty until `get_desc`."""

    description: OmDescription | None = None
    model: Model | None = None


@dataclass(eq=False)
class LoadConfig:
    """Options of `load_with_config`."""

    values: dict[int, Any] = field(default_factory=dict)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RefusedError(145002, f"E10410: cannot read {path}: {error.strerror}") from error


def _parse(runtime: Runtime, content: bytes) -> tuple[OmDescription, bytes]:
    try:
        return decode(content)
    except ValueError as error:
        raise RefusedError(545005 if len(content) > 64 else 100015, str(error)) from error


def _load(runtime: Runtime, content: bytes, call: str, own_memory: tuple[int, int]) -> int:
    """Load; `own_memory`: (work, weight) pointers of the caller, 0 to let the runtime allocate."""
    context = runtime.current
    description, onnx = _parse(runtime, content)
    if description.soc_version != runtime.options.soc_name:
        raise RefusedError(
            507008,
            f"EE1001: The argument is invalid. Reason: supported socVersion="
            f"{runtime.options.soc_name}, but the model socVersion={description.soc_version}",
        )
    try:
        engine = Engine(description, onnx)
    except Exception as error:
        raise RefusedError(545003, f"the weights are damaged: {error}") from error
    memory = context.card.memory
    blocks: list[int] = []
    sizes = (description.work_bytes, description.weight_bytes)
    for pointer, size in zip(own_memory, sizes, strict=True):
        if pointer:
            runtime.bytes_at(pointer, size)
            continue
        try:
            blocks.append(memory.allocate(size, call))
        except RefusedError:
            for block in blocks:
                memory.free(block)
            raise
    model = Model(0, engine, context, blocks)
    model.id = runtime.register_model(model, call)
    runtime.shared_state.publish(context.card.index, memory.used, context.card.busy_ns)
    return model.id


@entry("acl.mdl.load_from_file", "s", failure=(0,), hold=True)
def load_from_file(runtime: Runtime, path: str) -> int:
    """Load a file."""
    runtime.require_context()
    return _load(runtime, _read(path), "acl.mdl.load_from_file", (0, 0))


@entry("acl.mdl.load_from_mem", "kk", failure=(0,), hold=True)
def load_from_mem(runtime: Runtime, address: int, size: int) -> int:
    """Load from host memory."""
    content = runtime.host.view(address, size).tobytes()
    return _load(runtime, content, "acl.mdl.load_from_mem", (0, 0))


@entry("acl.mdl.load_from_file_with_mem", "skkkk", failure=(0,), hold=True)
def load_from_file_with_mem(
    runtime: Runtime, path: str, work: int, work_size: int, weight: int, weight_size: int
) -> int:
    """Load a file into memory of the caller."""
    return _load(runtime, _read(path), "acl.mdl.load_from_file_with_mem", (work, weight))


@entry("acl.mdl.load_from_mem_with_mem", "kkkkkk", failure=(0,), hold=True)
def load_from_mem_with_mem(
    runtime: Runtime, address: int, size: int, work: int, work_size: int, weight: int,
    weight_size: int,
) -> int:  # fmt: skip
    """Load from host memory into memory of the caller."""
    content = runtime.host.view(address, size).tobytes()
    return _load(runtime, content, "acl.mdl.load_from_mem_with_mem", (work, weight))


@bare("acl.mdl.create_config_handle")
def create_config_handle(runtime: Runtime) -> int:
    """Options to load with."""
    return runtime.register(LoadConfig(), "load configuration", "acl.mdl.create_config_handle")


@entry("acl.mdl.set_config_opt", "kio")
def set_config_opt(runtime: Runtime, handle: int, attribute: int, value: Any) -> None:
    """Set one option."""
    config = runtime.find(handle, LoadConfig)
    if attribute == 2 and not isinstance(value, str):
        raise TypeError("acl.mdl.set_config_opt args parse failed: the path must be str")
    config.values[attribute] = value


@entry("acl.mdl.load_with_config", "k", failure=(0,), hold=True)
def load_with_config(runtime: Runtime, handle: int) -> int:
    """Load as the options say."""
    values = runtime.find(handle, LoadConfig).values
    kind = values.get(1)
    if kind in (1, 2):
        content = _read(values[2])
    elif kind in (3, 4):
        content = runtime.host.view(values[3], values[4]).tobytes()
    else:
        raise RefusedError(100000, f"load type {kind} is unknown")
    memory = (values.get(7, 0), values.get(5, 0)) if kind in (2, 4) else (0, 0)
    return _load(runtime, content, "acl.mdl.load_with_config", memory)


@entry("acl.mdl.destroy_config_handle", "k")
def destroy_config_handle(runtime: Runtime, handle: int) -> None:
    """Destroy the options."""
    runtime.drop(handle, LoadConfig)


@entry("acl.mdl.unload", "i")
def unload(runtime: Runtime, model_id: int) -> None:
    """Unload; nothing may be in flight."""
    context = runtime.current
    model = runtime.find(model_id, Model, 100011)
    if model.context is not context:
        raise RefusedError(_MODEL_CONTEXT, "the model was loaded in another context")
    if model.task is not None and not model.task.done:
        raise RefusedError(545009, f"model {model_id} is still executing")
    runtime.drop(model_id, Model, 100011)
    for block in model.blocks:
        context.card.memory.free(block)
    runtime.shared_state.publish(context.card.index, context.card.memory.used, context.card.busy_ns)


@entry("acl.mdl.query_size", "s", failure=(0, 0))
def query_size(runtime: Runtime, path: str) -> tuple[int, int]:
    """Work and weight bytes."""
    description, _ = _parse(runtime, _read(path))
    if description.kind == "range":
        raise RefusedError(545000, "the size of a model of undetermined shape is unknown")
    return description.work_bytes, description.weight_bytes


@entry("acl.mdl.query_size_from_mem", "kk", failure=(0, 0))
def query_size_from_mem(runtime: Runtime, address: int, size: int) -> tuple[int, int]:
    """The same from host memory."""
    description, _ = _parse(runtime, runtime.host.view(address, size).tobytes())
    return description.work_bytes, description.weight_bytes


# Description.


@bare("acl.mdl.create_desc")
def create_desc(runtime: Runtime) -> int:
    """An empty description."""
    runtime.require_init()
    return runtime.register(ModelDesc(), "model description", "acl.mdl.create_desc")


@entry("acl.mdl.get_desc", "ki")
def get_desc(runtime: Runtime, handle: int, model_id: int) -> None:
    """Describe a loaded model."""
    desc = runtime.find(handle, ModelDesc)
    model = runtime.find(model_id, Model, 100011)
    desc.description, desc.model = model.description, model


@entry("acl.mdl.get_desc_from_file", "ks")
def get_desc_from_file(runtime: Runtime, handle: int, path: str) -> None:
    """Describe a file without loading it."""
    runtime.find(handle, ModelDesc).description = _parse(runtime, _read(path))[0]


@entry("acl.mdl.get_desc_from_mem", "kkk")
def get_desc_from_mem(runtime: Runtime, handle: int, address: int, size: int) -> None:
    """Describe a model in host memory without loading it."""
    content = runtime.host.view(address, size).tobytes()
    runtime.find(handle, ModelDesc).description = _parse(runtime, content)[0]


@entry("acl.mdl.destroy_desc", "k")
def destroy_desc(runtime: Runtime, handle: int) -> None:
    """Destroy a description."""
    runtime.drop(handle, ModelDesc)


def described(runtime: Runtime, handle: int) -> OmDescription:
    """The description behind a handle."""
    description = runtime.find(handle, ModelDesc).description
    if description is None:
        raise RefusedError(100000, "the description is empty: get_desc was not called")
    return description


def has_gear_input(description: OmDescription) -> bool:
    """Whether the extra input is there, as the last one."""
    return description.kind in ("batch", "hw", "dims")


def count_inputs(description: OmDescription) -> int:
    """Inputs, the extra one included."""
    return len(description.inputs) + has_gear_input(description)


def gear_input_bytes(description: OmDescription) -> int:
    """Size of the extra input."""
    return 8 * len(description.gears[0].key)


def largest(description: OmDescription, index: int, direction: str) -> list[int]:
    """Dims of a tensor in the largest gear."""
    sides = [getattr(gear, direction)[index] for gear in description.gears]
    dims: list[int] = max(sides, key=prod)
    return dims


def input_bytes(description: OmDescription, index: int) -> int:
    """Bytes of a data input; 0 when unknown."""
    if not description.gears:
        return 0
    return (
        prod(largest(description, index, "inputs")) * ITEM_SIZE[description.inputs[index].datatype]
    )


def output_bytes(description: OmDescription, index: int) -> int:
    """Bytes of an output; 0 when unknown."""
    if not description.gears:
        return 0
    return (
        prod(largest(description, index, "outputs"))
        * ITEM_SIZE[description.outputs[index].datatype]
    )


def _check_input(description: OmDescription, index: int) -> bool:
    """Whether it is the extra input."""
    if not 0 <= index < count_inputs(description):
        raise RefusedError(100000, f"input {index} of {count_inputs(description)}")
    return index == len(description.inputs)


def _check_output(description: OmDescription, index: int) -> None:
    if not 0 <= index < len(description.outputs):
        raise RefusedError(100000, f"output {index} of {len(description.outputs)}")


def make_dims(name: str, dims: list[int]) -> dict[str, Any]:
    """The dictionary every `*_dims` call returns."""
    return {"name": name, "dimCount": len(dims), "dims": list(dims)}


@bare("acl.mdl.get_num_inputs", "k")
def get_num_inputs(runtime: Runtime, handle: int) -> int:
    """Number of inputs."""
    return count_inputs(described(runtime, handle))


@bare("acl.mdl.get_num_outputs", "k")
def get_num_outputs(runtime: Runtime, handle: int) -> int:
    """Number of outputs."""
    return len(described(runtime, handle).outputs)


@bare("acl.mdl.get_input_size_by_index", "kk")
def get_input_size_by_index(runtime: Runtime, handle: int, index: int) -> int:
    """Bytes of an input."""
    description = described(runtime, handle)
    if _check_input(description, index):
        return gear_input_bytes(description)
    return input_bytes(description, index)


@bare("acl.mdl.get_output_size_by_index", "kk")
def get_output_size_by_index(runtime: Runtime, handle: int, index: int) -> int:
    """Bytes of an output."""
    description = described(runtime, handle)
    _check_output(description, index)
    return output_bytes(description, index)


@bare("acl.mdl.get_input_name_by_index", "kk", failed="")
def get_input_name_by_index(runtime: Runtime, handle: int, index: int) -> str:
    """Name of an input."""
    description = described(runtime, handle)
    return GEAR_INPUT if _check_input(description, index) else description.inputs[index].name


@bare("acl.mdl.get_output_name_by_index", "kk", failed="")
def get_output_name_by_index(runtime: Runtime, handle: int, index: int) -> str:
    """Name of an output."""
    description = described(runtime, handle)
    _check_output(description, index)
    return description.outputs[index].name


@entry("acl.mdl.get_input_index_by_name", "ks", failure=(0,))
def get_input_index_by_name(runtime: Runtime, handle: int, name: str) -> int:
    """Index of an input."""
    description = described(runtime, handle)
    names = [tensor.name for tensor in description.inputs]
    names += [GEAR_INPUT] * has_gear_input(description)
    if name not in names:
        raise RefusedError(100000, f"no input '{name}'; inputs are {names}")
    return names.index(name)


@entry("acl.mdl.get_output_index_by_name", "ks", failure=(0,))
def get_output_index_by_name(runtime: Runtime, handle: int, name: str) -> int:
    """Index of an output."""
    names = [tensor.name for tensor in described(runtime, handle).outputs]
    if name not in names:
        raise RefusedError(100000, f"no output '{name}'; outputs are {names}")
    return names.index(name)


@bare("acl.mdl.get_input_format", "kk", failed=-1)
def get_input_format(runtime: Runtime, handle: int, index: int) -> int:
    """AclFormat of an input."""
    description = described(runtime, handle)
    return _FORMAT_ND if _check_input(description, index) else description.inputs[index].format


@bare("acl.mdl.get_output_format", "kk", failed=-1)
def get_output_format(runtime: Runtime, handle: int, index: int) -> int:
    """AclFormat of an output."""
    _check_output(described(runtime, handle), index)
    return _FORMAT_ND


@bare("acl.mdl.get_input_data_type", "kk", failed=-1)
def get_input_data_type(runtime: Runtime, handle: int, index: int) -> int:
    """AclDataType of an input."""
    description = described(runtime, handle)
    if _check_input(description, index):
        return _GEAR_INPUT_TYPE
    return description.inputs[index].datatype


@bare("acl.mdl.get_output_data_type", "kk", failed=-1)
def get_output_data_type(runtime: Runtime, handle: int, index: int) -> int:
    """AclDataType of an output."""
    description = described(runtime, handle)
    _check_output(description, index)
    return description.outputs[index].datatype


def _input_dims(runtime: Runtime, handle: int, index: int, real: bool) -> dict[str, Any]:
    description = described(runtime, handle)
    if _check_input(description, index):
        return make_dims(GEAR_INPUT, [len(description.gears[0].key)])
    tensor = description.inputs[index]
    dims = tensor.shape
    if not real and tensor.aipp.get("input_format") == "YUV420SP_U8":
        dims = [dims[0], dims[1] * 2 // 3, dims[2], 3]  # n, h, w, c of the image
    return make_dims(tensor.name, dims)


@entry("acl.mdl.get_input_dims", "kk", failure=({},))
def get_input_dims(runtime: Runtime, handle: int, index: int) -> dict[str, Any]:
    """Dims of an input; with AIPP those of the image."""
    return _input_dims(runtime, handle, index, real=False)


@entry("acl.mdl.get_input_dims_v2", "kk", failure=({},))
def get_input_dims_v2(runtime: Runtime, handle: int, index: int) -> dict[str, Any]:
    """Dims of an input whose product is its size."""
    return _input_dims(runtime, handle, index, real=True)


@entry("acl.mdl.get_output_dims", "kk", failure=({},))
def get_output_dims(runtime: Runtime, handle: int, index: int) -> dict[str, Any]:
    """Dims of an output, of the largest gear."""
    description = described(runtime, handle)
    _check_output(description, index)
    name = description.outputs[index].name
    if not description.gears:
        return make_dims(name, description.output_shapes[index])
    return make_dims(name, largest(description, index, "outputs"))


@entry("acl.mdl.get_cur_output_dims", "kk", failure=({},))
def get_cur_output_dims(runtime: Runtime, handle: int, index: int) -> dict[str, Any]:
    """Dims of an output for the gear set last."""
    description = described(runtime, handle)
    _check_output(description, index)
    if not description.gears:
        raise RefusedError(145000, "get_cur_output_dims is not for dynamic shapes")
    model = runtime.find(handle, ModelDesc).model
    gear = None if model is None else model.gear
    for candidate in description.gears:
        if candidate.key == gear:
            return make_dims(description.outputs[index].name, candidate.outputs[index])
    return get_output_dims(runtime, handle, index)


@bare("acl.mdl.get_tensor_real_name", "ks", failed="")
def get_tensor_real_name(runtime: Runtime, handle: int, name: str) -> str:
    """The simulator shortens no names."""
    described(runtime, handle)
    return name
