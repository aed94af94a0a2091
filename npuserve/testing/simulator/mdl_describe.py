"""`acl.mdl.*`: what a model takes and gives, its gears."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from npuserve.testing.simulator.aipp import encoded_bytes
from npuserve.testing.simulator.binding import bare, entry
from npuserve.testing.simulator.core import ITEM_SIZE
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.mdl_load import Model, ModelDesc, parse_model, read_file

if TYPE_CHECKING:
    from npuserve.testing.simulator.om_file import OmDescription
    from npuserve.testing.simulator.runtime import Runtime

GEAR_INPUT = "ascend_mbatch_shape_data"
AIPP_INPUT = "ascend_dynamic_aipp_data"
_UINT8, _INT64 = 4, 9
_FORMAT_ND = 2


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
    runtime.find(handle, ModelDesc).description = parse_model(read_file(path))[0]


@entry("acl.mdl.get_desc_from_mem", "kkk")
def get_desc_from_mem(runtime: Runtime, handle: int, address: int, size: int) -> None:
    """Describe a model in host memory without loading it."""
    content = runtime.host.view(address, size).tobytes()
    runtime.find(handle, ModelDesc).description = parse_model(content)[0]


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


@dataclass(frozen=True)
class ExtraInput:
    """An input that compiling added behind the data inputs.

    Attributes:
        aipp_of: the data input whose dynamic AIPP it sets; None for the input of the gear.
    """

    name: str
    datatype: int
    dims: list[int]
    size: int
    aipp_of: int | None = None


def has_gear_input(description: OmDescription) -> bool:
    """Whether the gear is told by an extra input, which is the last one then."""
    return description.kind in ("batch", "hw", "dims")


def extra_inputs(description: OmDescription) -> list[ExtraInput]:
    """The extra inputs in their order."""
    extra: list[ExtraInput] = []
    for index, spec in enumerate(description.inputs):
        if spec.has_dynamic_aipp:
            size = encoded_bytes(largest(description, index, "inputs")[0])
            name = f"{AIPP_INPUT}_{spec.name}" if extra else AIPP_INPUT
            extra.append(ExtraInput(name, _UINT8, [size], size, index))
    if has_gear_input(description):
        count = len(description.gears[0].key)
        extra.append(ExtraInput(GEAR_INPUT, _INT64, [count], 8 * count))
    return extra


def count_inputs(description: OmDescription) -> int:
    """Inputs, the extra ones included."""
    return len(description.inputs) + len(extra_inputs(description))


def largest(description: OmDescription, index: int, direction: str) -> list[int]:
    """Dims of a tensor in the largest gear."""
    sides = [getattr(gear, direction)[index] for gear in description.gears]
    dims: list[int] = max(sides, key=prod)
    return dims


def input_bytes(description: OmDescription, index: int) -> int:
    """Bytes of a data input; 0 when unknown."""
    if not description.gears:
        return 0
    if description.inputs[index].has_dynamic_aipp:
        return int(description.inputs[index].aipp["max_src_image_size"])
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


def extra_input(description: OmDescription, index: int) -> ExtraInput | None:
    """The extra input of that index; None for a data input."""
    extra = extra_inputs(description)
    count = len(description.inputs) + len(extra)
    if not 0 <= index < count:
        raise RefusedError(100000, f"input {index} of {count}")
    return None if index < len(description.inputs) else extra[index - len(description.inputs)]


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
    extra = extra_input(description, index)
    return input_bytes(description, index) if extra is None else extra.size


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
    extra = extra_input(description, index)
    return description.inputs[index].name if extra is None else extra.name


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
    names += [extra.name for extra in extra_inputs(description)]
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
    extra = extra_input(description, index)
    return description.inputs[index].format if extra is None else _FORMAT_ND


@bare("acl.mdl.get_output_format", "kk", failed=-1)
def get_output_format(runtime: Runtime, handle: int, index: int) -> int:
    """AclFormat of an output."""
    _check_output(described(runtime, handle), index)
    return _FORMAT_ND


@bare("acl.mdl.get_input_data_type", "kk", failed=-1)
def get_input_data_type(runtime: Runtime, handle: int, index: int) -> int:
    """AclDataType of an input."""
    description = described(runtime, handle)
    extra = extra_input(description, index)
    return description.inputs[index].datatype if extra is None else extra.datatype


@bare("acl.mdl.get_output_data_type", "kk", failed=-1)
def get_output_data_type(runtime: Runtime, handle: int, index: int) -> int:
    """AclDataType of an output."""
    description = described(runtime, handle)
    _check_output(description, index)
    return description.outputs[index].datatype


def _input_dims(runtime: Runtime, handle: int, index: int, real: bool) -> dict[str, Any]:
    description = described(runtime, handle)
    extra = extra_input(description, index)
    if extra is not None:
        return make_dims(extra.name, extra.dims)
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


# Gears.


@entry("acl.mdl.get_dynamic_batch", "k", failure=({},))
def get_dynamic_batch(runtime: Runtime, handle: int) -> dict[str, Any]:
    """Batch gears."""
    description = described(runtime, handle)
    gears = [g.key[0] for g in description.gears] if description.kind == "batch" else []
    return {"batchCount": len(gears), "batch": gears}


@entry("acl.mdl.get_dynamic_hw", "kk", failure=({},))
def get_dynamic_hw(runtime: Runtime, handle: int, index: int) -> dict[str, Any]:
    """Image size gears."""
    description = described(runtime, handle)
    gears = [list(g.key) for g in description.gears] if description.kind == "hw" else []
    return {"hwCount": len(gears), "hw": gears}


@entry("acl.mdl.get_input_dynamic_gear_count", "kk", failure=(0,))
def get_input_dynamic_gear_count(runtime: Runtime, handle: int, index: int) -> int:
    """Number of dims gears."""
    description = described(runtime, handle)
    return len(description.gears) if description.kind == "dims" else 0


@entry("acl.mdl.get_input_dynamic_dims", "kkk", failure=([],))
def get_input_dynamic_dims(
    runtime: Runtime, handle: int, index: int, count: int
) -> list[dict[str, Any]]:
    """Dims gears; each concatenates the dims of all data inputs."""
    description = described(runtime, handle)
    if count > 4096 or description.kind != "dims":
        raise RefusedError(100000, f"no {count} dims gears")
    return [make_dims("", gear.key) for gear in description.gears[:count]]


@entry("acl.mdl.get_input_dims_range", "kk", failure=({"rangeCount": 0, "range": []},))
def get_input_dims_range(runtime: Runtime, handle: int, index: int) -> dict[str, Any]:
    """Ranges of a dynamic-shape input."""
    description = described(runtime, handle)
    if not 0 <= index < len(description.inputs):
        raise RefusedError(100000, f"input {index}")
    ranges = description.inputs[index].ranges
    return {"rangeCount": len(ranges), "range": [list(pair) for pair in ranges]}
