"""`acl.op.*`: single operators.

As on a card, an operator runs only if one compiled for just these tensors and attributes was
loaded (`set_model_dir` or `load`); others are not found. `acl.op`'s dumps and custom kernels are
not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.testing.simulator.binding import bare, entry
from npuserve.testing.simulator.core import DataBuffer, TensorDesc
from npuserve.testing.simulator.device import COMPUTE
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.om_file import NUMPY_BY_ACL
from npuserve.testing.simulator.op_file import OpDescription, OpTensor, decode, files_below
from npuserve.testing.simulator.op_kernels import compute

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npuserve.testing.simulator.runtime import Runtime

# Return codes, see backends/acl/codes.py.
_INVALID_PARAM = 100000
_REPEATED = 100002
_DAMAGED = 100012
_UNREADABLE = 100014
_INPUT_NOT_MATCH = 100021
_OUTPUT_NOT_MATCH = 100022
_NOT_FOUND = 100024
_UNSUPPORTED = 200001
_SIZE_INVALID = 145000
_WRONG_CHIP = 507008
_DEVICE_EXCEPTION = 507015

_UNDEFINED = -1


@dataclass(eq=False)
class OpAttr:
    """Attributes of an operator."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpCall:
    """An operator that was found, and the tensors it is called with (copies)."""

    description: OpDescription
    inputs: tuple[TensorDesc, ...]
    outputs: tuple[TensorDesc, ...]


@dataclass(eq=False)
class OpHandle:
    """An operator looked up once, to be executed many times."""

    call: OpCall


# Loading.


@entry("acl.op.set_model_dir", "s")
def set_model_dir(runtime: Runtime, path: str) -> None:
    """Load all operator files of a directory; once in a process."""
    runtime.require_init()
    directory = Path(path)
    if not directory.is_dir():
        raise RefusedError(_UNREADABLE, f"EH0002: {path} is no directory")
    if runtime.has_op_dir:
        raise RefusedError(_REPEATED, "the operators' directory was set before")
    runtime.op_models += [_decoded(file.read_bytes()) for file in files_below(directory)]
    runtime.has_op_dir = True


@entry("acl.op.load", "kk")
def load(runtime: Runtime, address: int, size: int) -> None:
    """Load an operator file from host memory."""
    runtime.require_init()
    if not size:
        raise RefusedError(_INVALID_PARAM, "an operator file of 0 bytes")
    runtime.op_models.append(_decoded(runtime.host.view(address, size).tobytes()))


def _decoded(content: bytes) -> OpDescription:
    try:
        return decode(content)
    except ValueError as error:
        raise RefusedError(_DAMAGED, str(error)) from error


# Attributes.


@bare("acl.op.create_attr")
def create_attr(runtime: Runtime) -> int:
    """No attributes yet."""
    return runtime.register(OpAttr(), "operator attributes", "acl.op.create_attr")


@bare("acl.op.destroy_attr", "k", failed=None, can_fail=False)
def destroy_attr(runtime: Runtime, handle: int) -> None:
    """Destroy attributes."""
    runtime.drop(handle, OpAttr)


def _set(runtime: Runtime, handle: int, name: str, value: Any) -> None:
    runtime.find(handle, OpAttr).values[name] = value


@entry("acl.op.set_attr_bool", "ksB")
def set_attr_bool(runtime: Runtime, handle: int, name: str, value: int) -> None:
    """Set a truth value."""
    _set(runtime, handle, name, bool(value))


@entry("acl.op.set_attr_int", "ksi")
def set_attr_int(runtime: Runtime, handle: int, name: str, value: int) -> None:
    """Set an integer."""
    _set(runtime, handle, name, value)


@entry("acl.op.set_attr_float", "ksf")
def set_attr_float(runtime: Runtime, handle: int, name: str, value: float) -> None:
    """Set a number."""
    _set(runtime, handle, name, value)


@entry("acl.op.set_attr_string", "kss")
def set_attr_string(runtime: Runtime, handle: int, name: str, value: str) -> None:
    """Set a text."""
    _set(runtime, handle, name, value)


@entry("acl.op.set_attr_list_int", "ksl")
def set_attr_list_int(runtime: Runtime, handle: int, name: str, values: list[int]) -> None:
    """Set a list of integers."""
    _set(runtime, handle, name, list(values))


def _listed(call: str, values: Any, kind: type | tuple[type, ...]) -> list[Any]:
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise TypeError(f"acl.op.{call} args parse failed: a list is expected, got {values!r}")
    return list(values)


@entry("acl.op.set_attr_list_bool", "ksl")
def set_attr_list_bool(runtime: Runtime, handle: int, name: str, values: list[int]) -> None:
    """Set a list of truth values."""
    if not all(0 <= value <= 255 for value in values):
        raise ValueError("acl.op.set_attr_list_bool: the value must between 0 and 255")
    _set(runtime, handle, name, [bool(value) for value in values])


@entry("acl.op.set_attr_list_float", "kso")
def set_attr_list_float(runtime: Runtime, handle: int, name: str, values: Any) -> None:
    """Set a list of numbers."""
    numbers = _listed("set_attr_list_float", values, (float, int))
    _set(runtime, handle, name, [float(number) for number in numbers])


@entry("acl.op.set_attr_list_string", "kso")
def set_attr_list_string(runtime: Runtime, handle: int, name: str, values: Any) -> None:
    """Set a list of texts."""
    _set(runtime, handle, name, _listed("set_attr_list_string", values, str))


@entry("acl.op.set_attr_list_list_int", "kso")
def set_attr_list_list_int(runtime: Runtime, handle: int, name: str, values: Any) -> None:
    """Set a list of lists of integers."""
    call = "set_attr_list_list_int"
    lists = [_listed(call, value, int) for value in _listed(call, values, list)]
    _set(runtime, handle, name, lists)


@entry("acl.op.set_attr_data_type", "ksi", failure=(0,))
def set_attr_data_type(runtime: Runtime, handle: int, name: str, datatype: int) -> int:
    """Set a datatype; returns the handle as well."""
    _set(runtime, handle, name, datatype)
    return handle


@entry("acl.op.set_attr_list_data_type", "ksl", failure=(0,))
def set_attr_list_data_type(runtime: Runtime, handle: int, name: str, values: list[int]) -> int:
    """Set a list of datatypes; returns the handle as well."""
    _set(runtime, handle, name, list(values))
    return handle


# Finding.


def _tensors(
    runtime: Runtime, call: str, what: str, descs: Sequence[int], buffers: Sequence[int] | None
) -> tuple[TensorDesc, ...]:
    if buffers is not None and len(descs) != len(buffers):
        text = f"{call}: {len(descs)} {what} descriptions for {len(buffers)} buffers"
        raise RefusedError(_INVALID_PARAM, text)
    return tuple(replace(runtime.find(desc, TensorDesc)) for desc in descs)


def find_operator(
    runtime: Runtime, op_type: str, inputs: tuple[TensorDesc, ...],
    outputs: tuple[TensorDesc, ...], attributes: dict[str, Any],
) -> OpCall:  # fmt: skip
    """The loaded operator for these tensors and attributes."""
    given = _compared(op_type, attributes)
    used = tuple(desc for desc in inputs if desc.datatype != _UNDEFINED)  # no unused optional ones
    if any(length < 0 for desc in (*used, *outputs) for length in desc.dims):
        raise RefusedError(_INVALID_PARAM, f"shapes of {op_type} must be known when it is executed")
    for description in runtime.op_models:
        if (
            description.op_type == op_type
            and _all_hold(description.inputs, used)
            and _all_hold(description.outputs, outputs)
            and _compared(op_type, description.attributes) == given
        ):
            if description.soc_version != runtime.options.soc_name:
                raise RefusedError(
                    _WRONG_CHIP, f"operator {op_type} was compiled for {description.soc_version}"
                )
            return OpCall(description, inputs, outputs)
    tensors = [(desc.datatype, desc.format, desc.dims) for desc in (*used, *outputs)]
    raise RefusedError(
        _NOT_FOUND,
        f"EZ9999: no loaded operator {op_type} for tensors {tensors} and attributes {given}",
    )


def _all_hold(compiled: Sequence[OpTensor], called: Sequence[TensorDesc]) -> bool:
    return len(compiled) == len(called) and all(
        tensor.holds(desc.datatype, desc.format, desc.dims, desc.const)
        for tensor, desc in zip(compiled, called, strict=True)
    )


def _compared(op_type: str, attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes that tell operators apart: `truncate` of Cast is reserved."""
    reserved = {"truncate"} if op_type == "Cast" else set()
    return {name: value for name, value in attributes.items() if name not in reserved}


def _attributes(runtime: Runtime, handle: int) -> dict[str, Any]:
    return dict(runtime.find(handle, OpAttr).values) if handle else {}


# Executing.


def execute_operator(
    runtime: Runtime, call: OpCall, inputs: Sequence[DataBuffer], outputs: Sequence[DataBuffer],
    stream_handle: int,
) -> None:  # fmt: skip
    """Queue a found operator."""
    stream = runtime.stream(stream_handle)
    for desc, buffer in zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True):
        if desc.const is not None or desc.datatype == _UNDEFINED:
            continue
        if buffer.size < desc.size:
            text = f"a tensor of {desc.size} bytes in a buffer of {buffer.size}"
            raise RefusedError(_SIZE_INVALID, text)
        _content(runtime, desc, buffer)  # an address that is wrong now
    blocks = [replace(buffer) for buffer in inputs]
    results = [replace(buffer) for buffer in outputs]
    name = call.description.op_type

    def run() -> None:
        arrays = [
            _array(runtime, name, desc, block)
            for desc, block in zip(call.inputs, blocks, strict=True)
            if desc.datatype != _UNDEFINED
        ]
        for desc, block in zip(call.outputs, results, strict=True):
            dtype = np.dtype(NUMPY_BY_ACL[desc.datatype])
            try:
                with np.errstate(all="ignore"):
                    result = compute(name, arrays, call.description.attributes, dtype, desc.dims)
            except (ValueError, IndexError) as error:
                raise RefusedError(
                    _DEVICE_EXCEPTION, f"EZ9999: AI core exception: {error}"
                ) from error
            _at_work(runtime, name, desc, block)[:] = result.reshape(-1).view(np.uint8)

    duration = int(runtime.options.op_us * 1000)
    stream.queue(runtime.clock.now_ns(), COMPUTE, name, duration, run)


def _content(runtime: Runtime, desc: TensorDesc, buffer: DataBuffer) -> NDArray[np.uint8]:
    where = runtime.host.view if desc.on_host else runtime.bytes_at
    content: NDArray[np.uint8] = where(buffer.address, desc.size)
    return content


def _at_work(
    runtime: Runtime, name: str, desc: TensorDesc, buffer: DataBuffer
) -> NDArray[np.uint8]:
    try:
        return _content(runtime, desc, buffer)
    except RefusedError as error:
        text = f"EZ9999: illegal address while operator {name} executed: {error}"
        runtime.violations.append(text)
        raise RefusedError(_DEVICE_EXCEPTION, text) from error


def _array(runtime: Runtime, name: str, desc: TensorDesc, buffer: DataBuffer) -> NDArray[Any]:
    if desc.const is not None:
        content = np.frombuffer(desc.const, np.uint8)
    else:
        content = _at_work(runtime, name, desc, buffer)
    return content.view(NUMPY_BY_ACL[desc.datatype]).reshape(desc.dims)


def _buffers(runtime: Runtime, handles: Sequence[int]) -> list[DataBuffer]:
    return [runtime.find(handle, DataBuffer) for handle in handles]


def _execute(
    runtime: Runtime, call_name: str, op_type: str, input_descs: list[int], inputs: list[int],
    output_descs: list[int], outputs: list[int], attributes: int, stream: int,
) -> None:  # fmt: skip
    runtime.require_context()
    given = _tensors(runtime, call_name, "input", input_descs, inputs)
    made = _tensors(runtime, call_name, "output", output_descs, outputs)
    if all(0 in desc.dims for desc in made):
        return  # nothing to compute
    values = _attributes(runtime, attributes)
    blocks, results = _buffers(runtime, inputs), _buffers(runtime, outputs)
    call = find_operator(runtime, op_type, given, made, values)
    execute_operator(runtime, call, blocks, results, stream)


@entry("acl.op.execute", "sllllkk")
def execute(
    runtime: Runtime, op_type: str, input_descs: list[int], inputs: list[int],
    output_descs: list[int], outputs: list[int], attributes: int, stream: int,
) -> None:  # fmt: skip
    """Queue an operator; deprecated."""
    _execute(
        runtime, "acl.op.execute", op_type, input_descs, inputs, output_descs, outputs, attributes,
        stream,
    )  # fmt: skip


@entry("acl.op.execute_v2", "sllllkk")
def execute_v2(
    runtime: Runtime, op_type: str, input_descs: list[int], inputs: list[int],
    output_descs: list[int], outputs: list[int], attributes: int, stream: int,
) -> None:  # fmt: skip
    """Queue an operator."""
    _execute(
        runtime, "acl.op.execute_v2", op_type, input_descs, inputs, output_descs, outputs,
        attributes, stream,
    )  # fmt: skip


def make_handle(runtime: Runtime, call: OpCall, name: str) -> int:
    """A handle of a found operator."""
    if any(desc.on_host for desc in (*call.inputs, *call.outputs)):
        raise RefusedError(_UNSUPPORTED, f"{name} does not support tensors in host memory")
    return runtime.register(OpHandle(call), "operator handle", name)


@entry("acl.op.create_handle", "sllk", failure=(0,))
def create_handle(
    runtime: Runtime, op_type: str, inputs: list[int], outputs: list[int], attributes: int
) -> int:
    """Look an operator up."""
    name = "acl.op.create_handle"
    given = _tensors(runtime, name, "input", inputs, None)
    made = _tensors(runtime, name, "output", outputs, None)
    call = find_operator(runtime, op_type, given, made, _attributes(runtime, attributes))
    return make_handle(runtime, call, name)


@bare("acl.op.destroy_handle", "k", failed=None, can_fail=False)
def destroy_handle(runtime: Runtime, handle: int) -> None:
    """Destroy a handle."""
    runtime.drop(handle, OpHandle)


@entry("acl.op.execute_with_handle", "kllk")
def execute_with_handle(
    runtime: Runtime, handle: int, inputs: list[int], outputs: list[int], stream: int
) -> None:
    """Queue the operator of a handle."""
    call = runtime.find(handle, OpHandle).call
    if len(inputs) != len(call.inputs):
        text = f"{len(inputs)} inputs for {len(call.inputs)} of the handle"
        raise RefusedError(_INPUT_NOT_MATCH, text)
    if len(outputs) != len(call.outputs):
        text = f"{len(outputs)} outputs for {len(call.outputs)} of the handle"
        raise RefusedError(_OUTPUT_NOT_MATCH, text)
    blocks, results = _buffers(runtime, inputs), _buffers(runtime, outputs)
    execute_operator(runtime, call, blocks, results, stream)


# Cast.


def _cast(runtime: Runtime, source: int, target: int) -> OpCall:
    given = (replace(runtime.find(source, TensorDesc)),)
    made = (replace(runtime.find(target, TensorDesc)),)
    return find_operator(runtime, "Cast", given, made, {"dst_type": made[0].datatype})


@entry("acl.op.cast", "kkkkBk")
def cast(
    runtime: Runtime, source: int, source_buffer: int, target: int, target_buffer: int,
    truncate: int, stream: int,
) -> None:  # fmt: skip
    """Queue a change of the datatype."""
    blocks = _buffers(runtime, [source_buffer])
    results = _buffers(runtime, [target_buffer])
    execute_operator(runtime, _cast(runtime, source, target), blocks, results, stream)


@entry("acl.op.create_handle_for_cast", "kkB", failure=(0,))
def create_handle_for_cast(runtime: Runtime, source: int, target: int, truncate: int) -> int:
    """Look a change of the datatype up."""
    return make_handle(runtime, _cast(runtime, source, target), "acl.op.create_handle_for_cast")


@entry("acl.op.set_max_op_queue_num", "k")
def set_max_op_queue_num(runtime: Runtime, count: int) -> None:
    """Bound the number of operators kept loaded; the simulator keeps all."""
    if not count:
        raise RefusedError(_INVALID_PARAM, "the number of operators must be positive")
