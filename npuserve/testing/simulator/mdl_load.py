"""`acl.mdl.*`: loading and unloading."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.testing.simulator.binding import bare, entry
from npuserve.testing.simulator.engine import Engine
from npuserve.testing.simulator.faults import RefusedError
from npuserve.testing.simulator.om_file import OmDescription, decode

if TYPE_CHECKING:
    from npuserve.testing.simulator.device import Context, Task
    from npuserve.testing.simulator.runtime import Runtime

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


def read_file(path: str) -> bytes:
    """Content of a model file."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RefusedError(145002, f"E10410: cannot read {path}: {error.strerror}") from error


def parse_model(content: bytes) -> tuple[OmDescription, bytes]:
    """(description, ONNX bytes) of a model file."""
    try:
        return decode(content)
    except ValueError as error:
        raise RefusedError(545005 if len(content) > 64 else 100015, str(error)) from error


def _load(runtime: Runtime, content: bytes, call: str, own_memory: tuple[int, int]) -> int:
    """Load; `own_memory`: (work, weight) pointers of the caller, 0 to let the runtime allocate."""
    context = runtime.current
    description, onnx = parse_model(content)
    if description.soc_version != runtime.options.soc_name:
        raise RefusedError(
            507008,
            f"EE1001: The argument is invalid. Reason: supported socVersion="
            f"{runtime.options.soc_name}, but the model socVersion={description.soc_version}",
        )
    try:
        engine = Engine(description, onnx)
    except ImportError as error:
        raise RefusedError(545003, str(error)) from error
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
    return _load(runtime, read_file(path), "acl.mdl.load_from_file", (0, 0))


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
    return _load(runtime, read_file(path), "acl.mdl.load_from_file_with_mem", (work, weight))


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
        content = read_file(values[2])
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
    description, _ = parse_model(read_file(path))
    if description.kind == "range":
        raise RefusedError(545000, "the size of a model of undetermined shape is unknown")
    return description.work_bytes, description.weight_bytes


@entry("acl.mdl.query_size_from_mem", "kk", failure=(0, 0))
def query_size_from_mem(runtime: Runtime, address: int, size: int) -> tuple[int, int]:
    """The same from host memory."""
    description, _ = parse_model(runtime.host.view(address, size).tobytes())
    return description.work_bytes, description.weight_bytes
