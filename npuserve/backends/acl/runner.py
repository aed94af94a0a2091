"""One loaded model at work on one card: streams, staging slots, the order of copies and compute.

A slot holds everything one execution needs (page-locked and device memory, datasets), so that
the next execution can be staged and copied while this one computes:

    slot 0 copies   ─upload 0─┐          ┌─download 0─┐
    compute                   └─execute 0─┬─execute 2 …
    slot 1 copies        ─upload 1─┐      └─ …

All executions of the model id go to the one compute stream, so it never runs twice at a time.
All methods belong to one thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from npuserve.backends.acl.gears import AxisRule, Dims, Gear, cut_dims, output_rules
from npuserve.backends.acl.library import AclCallError, AclLibrary
from npuserve.backends.acl.memory import (
    DeviceBuffer,
    HostBuffer,
    StagingBuffer,
    free_foreign,
)
from npuserve.backends.acl.model import Dataset, LoadedModel, ModelDescription, ModelKind
from npuserve.backends.acl.runtime import Context, Event, Owned, Stream
from npuserve.errors import InvalidArgumentError
from npuserve.tensor import ITEM_SIZE

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerOptions:
    """How a model is placed on a card.

    Attributes:
        device_id: card.
        depth: executions in flight at most; 2 overlap copies with compute.
        cube_cores, vector_cores: AI-core limits, 0 for none.
        aipp: parameters of dynamic AIPP, see aipp.py.
    """

    device_id: int = 0
    depth: int = 2
    cube_cores: int = 0
    vector_cores: int = 0
    aipp: Mapping[str, str] = field(default_factory=dict)


class Slot(Owned):
    """Memory and datasets of one execution."""

    def __init__(self, library: AclLibrary, description: ModelDescription) -> None:
        super().__init__()
        self.inputs: list[StagingBuffer] = []
        self.outputs: list[StagingBuffer] = []
        self.shapes: list[Dims] = []  # real shapes of the inputs of the running execution
        self.gear: Gear | None = None
        self.output_dims: tuple[Dims, ...] = ()  # of the running execution, gear models
        self._landing: HostBuffer | None = None
        self._library = library
        dynamic = description.kind is ModelKind.RANGES
        with ExitStack() as stack:
            self.stream = stack.enter_context(Stream(library))
            self.uploaded = stack.enter_context(Event(library))
            self.computed = stack.enter_context(Event(library))
            extras: list[DeviceBuffer] = []
            blocks: list[tuple[int, int]] = [(0, 0)] * description.dataset_inputs
            for spec in description.inputs:
                # A dynamic-shape input starts small and grows with the first request.
                staging = stack.enter_context(StagingBuffer(library, spec.size or 64))
                self.inputs.append(staging)
                blocks[spec.index] = (staging.device.pointer, staging.capacity)
            for extra in description.aipp_inputs:
                memory = stack.enter_context(DeviceBuffer(library, extra.size))
                extras.append(memory)
                blocks[extra.index] = (memory.pointer, memory.size)
            if description.gear_input is not None:
                gear_memory = stack.enter_context(
                    DeviceBuffer(library, description.gear_input_size)
                )
                extras.append(gear_memory)
                blocks[description.gear_input] = (gear_memory.pointer, gear_memory.size)
            if not dynamic:
                for spec in description.outputs:
                    self.outputs.append(stack.enter_context(StagingBuffer(library, spec.size)))
            results = (
                [(0, 0)] * len(description.outputs)
                if dynamic
                else [(output.device.pointer, output.capacity) for output in self.outputs]
            )
            self.input_dataset = stack.enter_context(Dataset(library, blocks))
            self.output_dataset = stack.enter_context(Dataset(library, results))
            stack.callback(self._close_landing)
            self._stack = stack.pop_all()
        self._extra_bytes = sum(memory.size for memory in extras)

    @property
    def host_bytes(self) -> int:
        """Page-locked memory of the tensors it has room for now."""
        return sum(staging.capacity for staging in (*self.inputs, *self.outputs))

    @property
    def device_bytes(self) -> int:
        """Memory of the card."""
        return self.host_bytes + self._extra_bytes

    def landing(self, size: int) -> HostBuffer:
        """Page-locked memory for an output whose size is known only after the execution."""
        if self._landing is None or self._landing.size < size:
            self._close_landing()
            self._landing = HostBuffer(self._library, size)
        return self._landing

    def _close_landing(self) -> None:
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.close()


class ModelRunner(Owned):
    """A model loaded in a context of its own.

    Use: `slot = acquire()`, write `input_view`s, `start`, later `finish` in the same order,
    then `release`.

    Raises:
        AclCallError: from the constructor, with everything already given back.
    """

    def __init__(self, library: AclLibrary, path: Path, options: RunnerOptions) -> None:
        super().__init__()
        self.options = options
        self._library = library
        self._running: deque[Slot] = deque()
        self._dims_by_gear: dict[Dims, tuple[Dims, ...]] = {}
        with ExitStack() as stack:
            self._context = stack.enter_context(Context(library, options.device_id))
            self._compute = stack.enter_context(Stream(library))
            if options.cube_cores or options.vector_cores:
                self._limit_cores(options.cube_cores, options.vector_cores)
            self._model = stack.enter_context(LoadedModel(library, path, options.aipp))
            self.description = self._model.description
            self._slots = [
                stack.enter_context(Slot(library, self.description)) for _ in range(options.depth)
            ]
            for slot in self._slots:
                self._model.set_aipp(slot.input_dataset)
            self._free = list(self._slots)
            self._rules = self._learn_output_rules()
            # First out: nothing may be freed while the card still works with it.
            stack.callback(self._drain)
            self._stack = stack.pop_all()

    def _limit_cores(self, cube: int, vector: int) -> None:
        """For this instance alone where CANN can do that, else for the card."""
        if not (self._compute.limit_cores(cube, vector) or self._context.limit_cores(cube, vector)):
            logger.warning("this CANN cannot limit AI cores at run time; use atc --aicore_num")

    def _learn_output_rules(self) -> list[dict[int, AxisRule | None]]:
        gears = self.description.gears
        count = len(self.description.outputs)
        if len(gears) < 2:
            return [{} for _ in range(count)]
        for gear in gears:
            self._set_gear(self._slots[0], gear)
        dims = [self._dims_by_gear[gear.key] for gear in gears]
        return [output_rules(gears, [per_gear[i] for per_gear in dims]) for i in range(count)]

    def output_shapes(self) -> list[Dims]:
        """Dims of the outputs, -1 for axes that follow the shape of the inputs."""
        return [
            tuple(-1 if axis in rules else length for axis, length in enumerate(spec.dims))
            for spec, rules in zip(self.description.outputs, self._rules, strict=True)
        ]

    def memory_bytes(self) -> tuple[int, int]:
        """What it holds now: (memory of the card, page-locked memory)."""
        device = self._model.device_bytes() + sum(slot.device_bytes for slot in self._slots)
        return device, sum(slot.host_bytes for slot in self._slots)

    @property
    def running(self) -> int:
        """Executions started and not yet finished."""
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether `acquire` gives a slot."""
        return bool(self._free)

    def acquire(self) -> Slot:
        """A slot to fill. The caller must `start` or `release` it."""
        return self._free.pop()

    def release(self, slot: Slot) -> None:
        """Give a slot back; views into it must not be used any more."""
        self._free.append(slot)

    def activate(self) -> None:
        """Make the model's context current in this thread."""
        self._context.activate()

    def input_view(self, slot: Slot, index: int, size: int) -> NDArray[np.uint8]:
        """Writable view of the first `size` bytes of the staging memory of data input `index`."""
        staging = slot.inputs[index]
        if staging.reserve(size):
            position = self.description.inputs[index].index
            slot.input_dataset.point(position, staging.device.pointer, staging.capacity)
        return staging.host.array[:size]

    def start(self, slot: Slot, shapes: Sequence[Dims], gear: Gear | None) -> None:
        """Queue upload, execution and download of a filled slot. Does not wait.

        Args:
            shapes: real shapes of the data inputs.
            gear: to run with; the staged inputs have its dims. None for dynamic shapes.

        Raises:
            AclCallError: nothing of the slot is in flight any more; `release` it.
        """
        slot.shapes = list(shapes)
        slot.gear = gear
        try:
            self._queue(slot, gear)
        except BaseException:
            self._settle(slot)
            raise
        self._running.append(slot)

    def _queue(self, slot: Slot, gear: Gear | None) -> None:
        staged = slot.shapes if gear is None else gear.inputs
        for spec, staging, dims in zip(self.description.inputs, slot.inputs, staged, strict=True):
            size = prod(dims) * ITEM_SIZE[spec.datatype]
            if gear is None:
                # The runtime checks the block's size against the shape.
                slot.input_dataset.point(spec.index, staging.device.pointer, size)
                slot.input_dataset.set_shape(spec.index, spec, dims)
            if size:
                staging.upload(size, slot.stream)
        slot.uploaded.record(slot.stream)
        if gear is not None:
            self._set_gear(slot, gear)
            slot.output_dims = self._dims_by_gear[gear.key]
        self._compute.wait_for(slot.uploaded)
        self._model.execute(slot.input_dataset, slot.output_dataset, self._compute)
        slot.computed.record(self._compute)
        slot.stream.wait_for(slot.computed)
        if gear is not None:
            for spec, staging, dims in zip(
                self.description.outputs, slot.outputs, slot.output_dims, strict=True
            ):
                size = prod(dims) * ITEM_SIZE[spec.datatype]
                if size:
                    staging.download(size, slot.stream)

    def _set_gear(self, slot: Slot, gear: Gear) -> None:
        self._model.set_gear(slot.input_dataset, gear)
        if gear.key not in self._dims_by_gear:
            self._dims_by_gear[gear.key] = self._model.current_output_dims()

    def finish(self) -> tuple[Slot, list[NDArray[Any]]]:
        """Wait for the oldest execution.

        Returns:
            Its slot, and for each output a uint8 array of shape [*dims, item size]: views into
            the slot's memory, cut back to the real dims (then not contiguous).

        Raises:
            AclCallError: the execution failed; its slot is free again.
        """
        slot = self._running.popleft()
        try:
            slot.stream.synchronize()
            self._check_compute()
            if slot.gear is None:
                return slot, self._collect_dynamic(slot)
            return slot, self._collect(slot, slot.gear)
        except BaseException:
            self._settle(slot)
            self.release(slot)
            raise

    def _check_compute(self) -> None:
        """Raise what went wrong on the compute stream.

        The copies wait for an event that is recorded after the execution also when that failed
        (streams go on after an error by default), so their stream may know nothing of it. With
        the next execution under way its end is not waited for; unconfirmed on hardware.
        """
        if self._running and self._library.has("acl.rt.stream_query"):
            self._library.value("acl.rt.stream_query", self._compute.handle)
        else:
            self._compute.synchronize()

    def _collect(self, slot: Slot, gear: Gear) -> list[NDArray[Any]]:
        outputs: list[NDArray[Any]] = []
        for spec, staging, dims, rules in zip(
            self.description.outputs, slot.outputs, slot.output_dims, self._rules, strict=True
        ):
            item = ITEM_SIZE[spec.datatype]
            array = staging.host.array[: prod(dims) * item].reshape(*dims, item)
            cut = cut_dims(dims, rules, gear, slot.shapes)
            if cut is None:
                gears = ", ".join(str([list(d) for d in g.inputs]) for g in self.description.gears)
                raise InvalidArgumentError(
                    f"output '{spec.name}' cannot be cut back after padding the inputs from "
                    f"{[list(s) for s in slot.shapes]} to {[list(d) for d in gear.inputs]}; send "
                    f"one of the shapes the model was compiled for: {gears}"
                )
            if cut != dims:
                array = array[tuple(slice(length) for length in cut)]
            outputs.append(array)
        return outputs

    def _collect_dynamic(self, slot: Slot) -> list[NDArray[Any]]:
        """Outputs of unknown size, which the runtime allocated: copy and free."""
        outputs: list[tuple[Dims, int, int]] = []  # dims, bytes, place in the landing memory
        end = 0
        for index, spec in enumerate(self.description.outputs):
            dims = slot.output_dataset.shape(index)
            size = prod(dims) * ITEM_SIZE[spec.datatype]
            outputs.append((dims, size, end))
            end += -(-size // 64) * 64  # asynchronous copies need aligned addresses
        landing = slot.landing(max(end, 64))
        for index, (_, size, offset) in enumerate(outputs):
            if size:
                landing.download(offset, slot.output_dataset.pointer(index), size, slot.stream)
        # Only synchronising lets go of the GIL, a plain memcpy would not.
        slot.stream.synchronize()
        self._free_outputs(slot)
        return [
            landing.array[offset : offset + size].reshape(*dims, ITEM_SIZE[spec.datatype])
            for (dims, size, offset), spec in zip(outputs, self.description.outputs, strict=True)
        ]

    def _free_outputs(self, slot: Slot) -> None:
        """Free what the runtime allocated for the outputs of a dynamic-shape execution."""
        for index in range(len(self.description.outputs)):
            pointer = slot.output_dataset.pointer(index)
            if pointer:
                slot.output_dataset.point(index, 0, 0)
                free_foreign(self._library, pointer)

    def _settle(self, slot: Slot) -> None:
        """After a failure: wait until nothing uses the slot any more.

        Failures are expected here (the same ones again) and add nothing to the first error.
        """
        for wait in (self._compute.synchronize, slot.stream.synchronize):
            with contextlib.suppress(AclCallError):
                wait()
        if self.description.kind is ModelKind.RANGES:
            with contextlib.suppress(AclCallError):
                self._free_outputs(slot)

    def _drain(self) -> None:
        self._context.reactivate()
        while self._running:
            self._settle(self._running.popleft())
