"""An instance of a compiled NPU model: rows in, executions on one or more lanes, rows out.

A lane is the model loaded once: on one card, with a stream and staging memory of its own. An
instance of `om` has one lane; `ge` may give an instance several, on several cards. Batches are
cut to what the compiled shapes hold, each part goes to the least busy lane, and the parts are
collected in the order they were started.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.backends.acl.codes import is_device_exception
from npuserve.backends.acl.gears import Gear, Paddable, largest_batch, nearest, paddable_axes
from npuserve.backends.acl.library import AclCallError, load_library
from npuserve.backends.acl.model import ModelKind
from npuserve.backends.acl.runner import ModelRunner, RunnerOptions
from npuserve.backends.base import (
    BackendModelContext,
    ExecutionBatch,
    MemoryUsage,
    PipelinedInstance,
)
from npuserve.backends.batch_input import BatchTensors
from npuserve.backends.model_signature import check_config, scheduler_output_names
from npuserve.backends.npu_batch import Group, OutputWriter, Shape, group_requests, stage_input
from npuserve.backends.npu_signature import check_batch_tensors, output_names, signature_of
from npuserve.errors import InternalError, InvalidArgumentError, NpuserveError, as_npuserve_error
from npuserve.response import InferenceResponse
from npuserve.tensor import ITEM_SIZE, element_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from npuserve.backends.acl.model import ModelDescription

logger = logging.getLogger(__name__)


class Lane:
    """The model on one card; made again after the card's context was lost."""

    def __init__(self, path: Path, options: RunnerOptions) -> None:
        self._path = path
        self.options = options
        self.runner: ModelRunner | None = None

    def open(self) -> ModelRunner:
        """The runner, with its context current in this thread."""
        if self.runner is None:
            self.runner = ModelRunner(load_library(), self._path, self.options)
        self.runner.activate()
        return self.runner

    @property
    def running(self) -> int:
        """Executions in flight."""
        return 0 if self.runner is None else self.runner.running

    @property
    def has_room(self) -> bool:
        """Whether another execution can be started."""
        return self.runner is None or self.runner.has_room

    def close(self) -> None:
        """Unload; harmless when repeated."""
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()


@dataclass
class _Part:
    """Rows [start, stop) of a group in flight on a lane; both 0 without a batch dimension."""

    group: Group
    start: int
    stop: int
    lane: Lane
    batch: ExecutionBatch


class NpuInstance(PipelinedInstance):
    """See the module.

    Args:
        path: of the compiled model.
        lanes: where to load it.
    """

    def __init__(
        self,
        context: BackendModelContext,
        path: Path,
        lanes: Sequence[RunnerOptions],
    ) -> None:
        self._context = context
        self._lanes = [Lane(path, options) for options in lanes]
        self._parts: deque[_Part] = deque()
        self._groups: dict[int, list[Group]] = {}  # by id(batch), of the submitted batches
        self._batching = context.config.max_batch_size > 0
        self._batch_tensors = BatchTensors(context.config)
        self.pipeline_depth = sum(options.depth for options in lanes)
        self.max_inflight = self.pipeline_depth + 1
        self._description: ModelDescription
        self._paddable: Paddable = ()
        self._input_names: list[str] = []
        self._output_names: list[str] = []
        self._writer: OutputWriter

    def initialize(self) -> None:
        """See `ModelInstance.initialize`."""
        runners = [lane.open() for lane in self._lanes]
        config = self._context.config
        signature = signature_of(runners[0], config)
        self._description = runners[0].description
        self.memory_usage = list(_memory_usage(self._lanes, runners))
        check_batch_tensors(config, self._description)
        check_config(config, signature)
        self._paddable = paddable_axes(self._description.gears, self._batching)
        self._input_names = [spec.name for spec in self._description.inputs]
        self._output_names = output_names(self._description.outputs, config)
        states = scheduler_output_names(config)
        served = {output.name for output in config.output} | states
        datatypes = {
            name: spec.datatype
            for name, spec in zip(self._output_names, self._description.outputs, strict=True)
            if name in served
        }
        services = self._context.services
        pool = None if services is None else services.buffer_pool
        # With one compiled shape outputs are as long as that; else they were cut back, or never
        # padded.
        exact = len(self._description.gears) != 1
        self._writer = OutputWriter(datatypes, states, pool, self._batch_tensors, exact)

    def submit(self, batch: ExecutionBatch) -> None:
        """See `PipelinedInstance.submit`."""
        groups, refused = group_requests(
            batch.requests, self._input_names, self._batching, self._batch_tensors
        )
        for request, error in refused:
            batch.send(request, InferenceResponse.from_error(error))
        self._groups[id(batch)] = groups
        for group in groups:
            try:
                for start, stop in self._cuts(group):
                    self._start(batch, group, start, stop)
            except Exception as error:
                group.fail(_logged(error))
        batch.input_ready()

    def collect(self, batch: ExecutionBatch) -> None:
        """See `PipelinedInstance.collect`."""
        while any(part.batch is batch for part in self._parts):
            self._finish_oldest()
        for group in self._groups.pop(id(batch)):
            for index, request in enumerate(group.requests):
                batch.send(request, self._writer.response(group, index))

    def finalize(self) -> None:
        """See `ModelInstance.finalize`."""
        self._parts.clear()
        errors: list[Exception] = []
        for lane in self._lanes:
            try:
                lane.close()
            except NpuserveError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _cuts(self, group: Group) -> Iterator[tuple[int, int]]:
        """Row ranges that each fit one execution; (0, 0) without a batch dimension."""
        if not group.rows:
            yield 0, 0
            return
        limit = group.rows
        if self._description.gears:
            limit = largest_batch(self._description.gears, group.shapes, self._paddable)
            if not limit:
                raise self._no_gear(group.shapes)
        for start in range(0, group.rows, limit):
            yield start, min(start + limit, group.rows)

    def _start(self, batch: ExecutionBatch, group: Group, start: int, stop: int) -> None:
        shapes: list[Shape] = group.shapes
        if group.rows and not group.made:
            shapes = [(stop - start, *shape[1:]) for shape in shapes]
        gear = self._gear(shapes)
        staged = shapes if gear is None else gear.inputs
        while not any(lane.has_room for lane in self._lanes):
            self._finish_oldest()
        lane = min((lane for lane in self._lanes if lane.has_room), key=lambda lane: lane.running)
        runner = lane.open()
        slot = runner.acquire()
        try:
            for index, (spec, dims) in enumerate(
                zip(self._description.inputs, staged, strict=True)
            ):
                size = element_count(dims) * ITEM_SIZE[spec.datatype]
                view = runner.input_view(slot, index, size)
                stage_input(group, spec.name, start, stop, view, tuple(dims))
            runner.start(slot, shapes, gear)
        except BaseException as error:
            runner.release(slot)
            self._mend(lane, error)
            raise
        self._parts.append(_Part(group, start, stop, lane, batch))

    def _gear(self, shapes: Sequence[Shape]) -> Gear | None:
        if self._description.kind is ModelKind.RANGES:
            return None
        gear = nearest(self._description.gears, shapes, self._paddable)
        if gear is None:
            raise self._no_gear(shapes)
        return gear

    def _no_gear(self, shapes: Sequence[Shape]) -> InvalidArgumentError:
        asked = ", ".join(
            f"'{name}' {list(shape)}" for name, shape in zip(self._input_names, shapes, strict=True)
        )
        known = "; ".join(
            ", ".join(str(list(dims)) for dims in gear.inputs) for gear in self._description.gears
        )
        return InvalidArgumentError(
            f"the model was not compiled for inputs {asked}; its shapes are: {known}"
        )

    def _finish_oldest(self) -> None:
        part = self._parts.popleft()
        runner = part.lane.runner
        if runner is None or not runner.running:
            part.group.fail(InternalError("the execution was lost when its card failed"))
            return
        try:
            runner.activate()
            slot, arrays = runner.finish()
        except Exception as error:
            part.group.fail(_logged(error))
            self._mend(part.lane, error)
            return
        part.batch.output_ready()
        try:
            for name, array in zip(self._output_names, arrays, strict=True):
                if name in self._writer.datatypes:
                    self._writer.take(part.group, part.start, part.stop, name, array)
        except Exception as error:
            # Of this batch; whoever waited for the slot, perhaps the next one, has no part in it.
            part.group.fail(_logged(error))
        finally:
            runner.release(slot)

    def _mend(self, lane: Lane, error: BaseException) -> None:
        """After a device exception nothing works in its context: load the model anew."""
        if not (isinstance(error, AclCallError) and is_device_exception(error.ret)):
            return
        logger.error("%s; loading the model anew on NPU %d", error, lane.options.device_id)
        lost = InternalError(f"lost with its card's context: {error}")
        for part in [part for part in self._parts if part.lane is lane]:
            part.group.fail(lost)
            self._parts.remove(part)
        try:
            lane.close()
        except NpuserveError as closing:
            logger.warning("%s", closing)
        # The next execution opens it; a card that stays broken then fails those requests only.


def _logged(error: Exception) -> NpuserveError:
    if not isinstance(error, NpuserveError):
        logger.error("an execution failed", exc_info=error)
    return as_npuserve_error(error)


def _memory_usage(lanes: Sequence[Lane], runners: Sequence[ModelRunner]) -> Iterator[MemoryUsage]:
    for lane, runner in zip(lanes, runners, strict=True):
        device, host = runner.memory_bytes()
        yield MemoryUsage("GPU", lane.options.device_id, device)
        yield MemoryUsage("CPU_PINNED", 0, host)
