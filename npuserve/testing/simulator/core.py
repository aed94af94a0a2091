"""`acl.*`: process level calls, data buffers, tensor descriptions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npuserve.testing.simulator.binding import bare, entry
from npuserve.testing.simulator.faults import RefusedError

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

# Bytes per element by aclDataType.
ITEM_SIZE = {
    0: 4, 1: 2, 2: 1, 3: 4, 4: 1, 6: 2, 7: 2, 8: 4, 9: 8, 10: 8, 11: 8, 12: 1,
    16: 8, 17: 16, 27: 2, 33: 4,
}  # fmt: skip

_MAX_CONFIG_DEPTH = 10
_MAX_DIMS = 128


@dataclass(eq=False)
class DataBuffer:
    """A wrapper of somebody's memory."""

    address: int
    size: int


@dataclass(eq=False)
class TensorDesc:
    """Datatype, shape and format of a tensor.

    Attributes:
        const: the tensor's content, when it is an operator's constant input.
        on_host: whether a single operator finds the tensor in host memory.
    """

    datatype: int
    dims: list[int]
    format: int
    name: str = ""
    const: bytes | None = None
    on_host: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.dims) * ITEM_SIZE.get(self.datatype, 0)


@entry("acl.init", "|o")
def init(runtime: Runtime, config: Any = None) -> None:
    """Initialise the process."""
    if config:
        if not isinstance(config, str):
            raise TypeError("acl.init args parse failed: str expected")
        _check_config(Path(config))
    runtime.init_count += 1
    if runtime.init_count > 1:
        raise RefusedError(100002, "acl.init was called before in this process")


def _check_config(path: Path) -> None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RefusedError(100003, f"cannot read the JSON file {path}: {error}") from error
    if _depth(value) > _MAX_CONFIG_DEPTH:
        raise RefusedError(100003, f"{path} is nested deeper than {_MAX_CONFIG_DEPTH}")


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


@entry("acl.finalize")
def finalize(runtime: Runtime) -> None:
    """Release the state of the process."""
    if not runtime.init_count:
        raise RefusedError(100037, "acl.finalize was called before")
    runtime.init_count = 0


@entry("acl.finalize_reference", failure=(0,))
def finalize_reference(runtime: Runtime) -> int:
    """Give back one `init`."""
    if not runtime.init_count:
        raise RefusedError(100037, "acl.finalize was called before")
    runtime.init_count -= 1
    return runtime.init_count


@entry("acl.get_version", failure=(0, 0, 0))
def get_version(runtime: Runtime) -> tuple[int, int, int]:
    """Version of the interface."""
    return 1, 15, 0


@bare("acl.get_soc_name", failed=None)
def get_soc_name(runtime: Runtime) -> str | None:
    """Chip of the visible cards."""
    return runtime.options.soc_name if runtime.cards else None


@bare("acl.get_recent_err_msg", failed=None, can_fail=False)
def get_recent_err_msg(runtime: Runtime) -> str | None:
    """Last error of this thread; reading clears it."""
    return runtime.last_error


@bare("acl.app_log", "is", failed=None, can_fail=False)
def app_log(runtime: Runtime, level: int, text: str) -> None:
    """Write to the log of the device; the simulator has none."""


@bare("acl.data_type_size", "i")
def data_type_size(runtime: Runtime, datatype: int) -> int:
    """Bytes per element."""
    return ITEM_SIZE.get(datatype, 0)


# Data buffers.


@bare("acl.create_data_buffer", "kk")
def create_data_buffer(runtime: Runtime, address: int, size: int) -> int:
    """Wrap memory."""
    return runtime.register(DataBuffer(address, size), "data buffer", "acl.create_data_buffer")


@entry("acl.destroy_data_buffer", "k")
def destroy_data_buffer(runtime: Runtime, handle: int) -> None:
    """Destroy the wrapper."""
    runtime.drop(handle, DataBuffer)


@bare("acl.get_data_buffer_addr", "k")
def get_data_buffer_addr(runtime: Runtime, handle: int) -> int:
    """Address of the wrapped memory."""
    return runtime.find(handle, DataBuffer).address


@bare("acl.get_data_buffer_size_v2", "k")
def get_data_buffer_size_v2(runtime: Runtime, handle: int) -> int:
    """Bytes of the wrapped memory."""
    return runtime.find(handle, DataBuffer).size


@bare("acl.get_data_buffer_size", "k")
def get_data_buffer_size(runtime: Runtime, handle: int) -> int:
    """The same with 32 bits; deprecated."""
    return runtime.find(handle, DataBuffer).size & 0xFFFFFFFF


@entry("acl.update_data_buffer", "kkk")
def update_data_buffer(runtime: Runtime, handle: int, address: int, size: int) -> None:
    """Wrap other memory."""
    buffer = runtime.find(handle, DataBuffer)
    buffer.address, buffer.size = address, size


# Tensor descriptions.


@bare("acl.create_tensor_desc", "ili")
def create_tensor_desc(runtime: Runtime, datatype: int, dims: list[int], format_: int) -> int:
    """Describe a tensor."""
    if len(dims) > _MAX_DIMS:
        raise RefusedError(100000, f"{len(dims)} dims; at most {_MAX_DIMS}")
    desc = TensorDesc(datatype, list(dims), format_)
    return runtime.register(desc, "tensor description", "acl.create_tensor_desc")


@bare("acl.destroy_tensor_desc", "k", failed=None, can_fail=False)
def destroy_tensor_desc(runtime: Runtime, handle: int) -> None:
    """Destroy a description."""
    runtime.drop(handle, TensorDesc)


@bare("acl.get_tensor_desc_type", "k", failed=-1)
def get_tensor_desc_type(runtime: Runtime, handle: int) -> int:
    """Data type."""
    return runtime.find(handle, TensorDesc).datatype


@bare("acl.get_tensor_desc_format", "k", failed=-1)
def get_tensor_desc_format(runtime: Runtime, handle: int) -> int:
    """Format."""
    return runtime.find(handle, TensorDesc).format


@bare("acl.get_tensor_desc_size", "k")
def get_tensor_desc_size(runtime: Runtime, handle: int) -> int:
    """Bytes."""
    return runtime.find(handle, TensorDesc).size


@bare("acl.get_tensor_desc_element_count", "k")
def get_tensor_desc_element_count(runtime: Runtime, handle: int) -> int:
    """Elements."""
    return prod(runtime.find(handle, TensorDesc).dims)


@bare("acl.get_tensor_desc_num_dims", "k")
def get_tensor_desc_num_dims(runtime: Runtime, handle: int) -> int:
    """Rank."""
    return len(runtime.find(handle, TensorDesc).dims)


@entry("acl.get_tensor_desc_dim_v2", "ki", failure=(0,))
def get_tensor_desc_dim_v2(runtime: Runtime, handle: int, axis: int) -> int:
    """Length of an axis."""
    dims = runtime.find(handle, TensorDesc).dims
    if not 0 <= axis < len(dims):
        raise RefusedError(100000, f"axis {axis} of {len(dims)}")
    return dims[axis]


@bare("acl.get_tensor_desc_dim", "ki", failed=-1)
def get_tensor_desc_dim(runtime: Runtime, handle: int, axis: int) -> int:
    """The same without a code; deprecated."""
    return get_tensor_desc_dim_v2(runtime, handle, axis)


@bare("acl.get_tensor_desc_name", "k", failed="")
def get_tensor_desc_name(runtime: Runtime, handle: int) -> str:
    """Name."""
    return runtime.find(handle, TensorDesc).name


@bare("acl.set_tensor_desc_name", "ks", failed=None, can_fail=False)
def set_tensor_desc_name(runtime: Runtime, handle: int, name: str) -> None:
    """Name the tensor."""
    runtime.find(handle, TensorDesc).name = name


@entry("acl.set_tensor_shape", "kl")
def set_tensor_shape(runtime: Runtime, handle: int, dims: list[int]) -> None:
    """Give the tensor another shape."""
    runtime.find(handle, TensorDesc).dims = list(dims)


@entry("acl.set_tensor_format", "ki")
def set_tensor_format(runtime: Runtime, handle: int, format_: int) -> None:
    """Give the tensor another format."""
    runtime.find(handle, TensorDesc).format = format_


@entry("acl.set_tensor_const", "kkk")
def set_tensor_const(runtime: Runtime, handle: int, address: int, size: int) -> None:
    """Make it a constant input of an operator; the content is in host memory."""
    desc = runtime.find(handle, TensorDesc)
    if not size:
        raise RefusedError(100000, "a constant of 0 bytes")
    desc.const = runtime.host.view(address, size).tobytes()


@entry("acl.set_tensor_place_ment", "ki")
def set_tensor_place_ment(runtime: Runtime, handle: int, place: int) -> None:
    """Say where the tensor is: 0 on the card, 1 and 2 in host memory."""
    if not 0 <= place <= 2:
        raise RefusedError(100000, f"memory type {place} is unknown")
    runtime.find(handle, TensorDesc).on_host = place > 0


# Half precision.


@bare("acl.float16_to_float", "i", failed=0.0)
def float16_to_float(runtime: Runtime, bits: int) -> float:
    """The number that 16 bits stand for; higher bits are cut off, as by the C format `H`."""
    return float(np.uint16(bits & 0xFFFF).view(np.float16))


@bare("acl.float_to_float16", "f")
def float_to_float16(runtime: Runtime, value: float) -> int:
    """The 16 bits that stand for a number."""
    return int(np.float16(value).view(np.uint16))
