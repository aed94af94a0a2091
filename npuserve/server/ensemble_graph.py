"""Ensemble tensors and steps as a checked graph. Pure: configurations in, graph or error out.

`EnsembleGraph` is what the ensemble scheduler walks; whether the members fit together is checked
in ensemble_check.py.

A *scope* says how often a tensor comes: tensors of the scope `ROOT` come once a request; those
written by a decoupled step d, or computed from them, have the scope d and come once for every
response of that step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.errors import InvalidArgumentError, InvalidConfigError, NotFoundError
from npuserve.model_config import ModelConfig, is_decoupled
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from npuserve._proto.model_config_pb2 import ModelEnsembling, ModelOutput

ROOT = -1

_REMEMBERED_PLANS = 256  # clients choose the outputs, so the number of plans needs a bound

# (model name, version or -1 for the newest) → configuration of that model.
# Raises NotFoundError for a model that is not available.
ConfigLookup = Callable[[str, int], ModelConfig]


def member_models(config: ModelConfig) -> list[tuple[str, int]]:
    """(name, version) of the models that the ensemble's steps run, each once, in step order."""
    steps = config.ensemble_scheduling.step
    return list(dict.fromkeys((step.model_name, step.model_version) for step in steps))


@dataclass(frozen=True)
class StepInput:
    """One input of a step.

    Attributes:
        name: of the member's input.
        tensor: ensemble tensor that feeds it.
        may_be_absent: whether the step runs without it.
        dims: the member's configured dims.
        add_batch, strip_batch: the tensor comes without (with) a batch dimension and the member
            wants it the other way round.
    """

    name: str
    tensor: str
    may_be_absent: bool
    dims: tuple[int, ...]
    add_batch: bool
    strip_batch: bool

    def adapt(self, tensor: Tensor) -> Tensor:
        """The tensor under the member's name and with its batch dimension; the same bytes."""
        if self.add_batch or self.strip_batch:
            shape = convert_batch(tensor.shape, self.dims, self.add_batch)
            return Tensor(self.name, tensor.datatype, shape, tensor.data)
        if tensor.name == self.name:
            return tensor
        return Tensor(self.name, tensor.datatype, tensor.shape, tensor.data)


@dataclass(frozen=True)
class Step:
    """One step: which model runs on which ensemble tensors.

    Attributes:
        outputs: ensemble tensor by name of the member's output.
        requested_outputs: names of the member's outputs.
        decoupled: whether the member may answer any number of times.
        may_pause: whether its responses can be held back without holding up another step.
        scope: how often it runs; see the module.
    """

    index: int
    model_name: str
    model_version: int
    inputs: tuple[StepInput, ...]
    outputs: Mapping[str, str]
    requested_outputs: tuple[str, ...]
    decoupled: bool
    may_pause: bool
    scope: int


@dataclass(frozen=True)
class EnsembleOutput:
    """An output of the ensemble and how its tensor becomes it; fields as in `StepInput`."""

    name: str
    scope: int
    dims: tuple[int, ...]
    add_batch: bool
    strip_batch: bool

    def adapt(self, tensor: Tensor) -> Tensor:
        """The tensor as the ensemble's output."""
        if not (self.add_batch or self.strip_batch) and tensor.name == self.name:
            return tensor
        shape = tensor.shape
        if self.add_batch or self.strip_batch:
            shape = convert_batch(shape, self.dims, self.add_batch)
        return Tensor(self.name, tensor.datatype, shape, tensor.data)


@dataclass(frozen=True)
class Plan:
    """What to run for one choice of outputs: only the steps they depend on.

    Attributes:
        outputs: in the order of the configuration.
        steps: in order of dependency.
        waiting: by scope: by step: number of different tensors it needs.
        outer_tensors: by scope: number of (step of it, tensor of an outer scope it needs) pairs.
        consumers: steps by ensemble tensor.
        shared: steps of which some tensor is read by others too.
        entries: steps that read an input of the ensemble.
        output_names: by scope: outputs of that scope.
        leaf_scopes: scopes whose iterations make a response each; (ROOT,) without decoupled steps.
    """

    outputs: tuple[EnsembleOutput, ...]
    steps: tuple[Step, ...]
    waiting: Mapping[int, Mapping[int, int]]
    outer_tensors: Mapping[int, int]
    consumers: Mapping[str, tuple[Step, ...]]
    shared: frozenset[int]
    entries: frozenset[int]
    output_names: Mapping[int, frozenset[str]]
    leaf_scopes: tuple[int, ...]


class EnsembleGraph:
    """The steps of an ensemble in order of dependency, and the plans made of them.

    Raises:
        InvalidArgumentError: steps wait for each other, or one mixes two decoupled models.
    """

    def __init__(self, config: ModelConfig, lookup_config: ConfigLookup) -> None:
        self._name = config.name
        members = member_configs(config, lookup_config)
        self.inputs = tuple(entry.name for entry in config.input)
        self._scopes = dict.fromkeys(self.inputs, ROOT)
        self._batching = dict.fromkeys(self.inputs, config.max_batch_size > 0)
        self._pausable = _pausable_steps(members)
        self._steps = self._build_steps(config, members)
        self._producer = {
            tensor: step for step in self._steps.values() for tensor in step.outputs.values()
        }
        self.decoupled = any(step.decoupled for step in self._steps.values())
        outputs = {entry.name: entry for entry in config.output}  # one may be written twice
        self._outputs = tuple(
            self._build_output(entry, config.max_batch_size > 0) for entry in outputs.values()
        )
        self._plans: dict[tuple[str, ...], Plan] = {}

    def parent_scope(self, scope: int) -> int:
        """The scope in which the decoupled step `scope` itself runs."""
        return self._steps[scope].scope

    def sources(self) -> Iterable[tuple[str, str, int, str]]:
        """(output, member, its version, the member's output) of outputs that a member writes."""
        for output in self._outputs:
            step = self._producer.get(output.name)
            for name, tensor in step.outputs.items() if step is not None else ():
                if tensor == output.name and step is not None:
                    yield output.name, step.model_name, step.model_version, name

    def plan(self, requested: tuple[str, ...]) -> Plan:
        """The plan for these outputs, () meaning all; made once for each choice."""
        plan = self._plans.get(requested)
        if plan is None:
            if len(self._plans) >= _REMEMBERED_PLANS:
                self._plans.clear()
            plan = self._plans[requested] = self._make_plan(requested)
        return plan

    def _build_steps(self, config: ModelConfig, members: Sequence[ModelConfig]) -> dict[int, Step]:
        """Steps by index, every step after those whose tensors it reads."""
        entries = config.ensemble_scheduling.step
        missing = {i: set(e.input_map.values()) - set(self.inputs) for i, e in enumerate(entries)}
        readers: dict[str, list[int]] = {}
        for index, tensors in missing.items():
            for tensor in tensors:
                readers.setdefault(tensor, []).append(index)
        steps: dict[int, Step] = {}
        runnable = deque(index for index, tensors in missing.items() if not tensors)
        while runnable:
            index = runnable.popleft()
            steps[index] = self._build_step(index, entries[index], members[index])
            for tensor in steps[index].outputs.values():
                for reader in readers.pop(tensor, ()):
                    missing[reader].discard(tensor)
                    if not missing[reader]:
                        runnable.append(reader)
        for index, tensors in missing.items():
            if tensors:
                raise InvalidConfigError(
                    f"in ensemble {self._name}, ensemble tensor {min(tensors)} is not connected, "
                    f"so that model {entries[index].model_name} can never run (step {index})",
                    f"ensemble_scheduling.step[{index}].input_map",
                )
        return steps

    def _build_step(self, index: int, entry: ModelEnsembling.Step, member: ModelConfig) -> Step:
        batching = member.max_batch_size > 0
        configs = {spec.name: spec for spec in member.input}
        inputs = tuple(
            StepInput(
                name,
                tensor,
                may_be_absent=configs[name].optional or tensor in self.inputs,
                dims=tuple(configs[name].dims),
                add_batch=batching and not self._batching[tensor],
                strip_batch=not batching and self._batching[tensor],
            )
            for name, tensor in sorted(entry.input_map.items())
            if name in configs
        )
        scope = self._common_scope(index, entry.model_name, (each.tensor for each in inputs))
        decoupled = is_decoupled(member)
        outputs = dict(entry.output_map)
        for tensor in outputs.values():
            self._scopes[tensor] = index if decoupled else scope
            self._batching[tensor] = batching
        return Step(
            index,
            entry.model_name,
            entry.model_version,
            inputs,
            outputs,
            requested_outputs=tuple(outputs),
            decoupled=decoupled,
            may_pause=index in self._pausable,
            scope=scope,
        )

    def _common_scope(self, index: int, model: str, tensors: Iterable[str]) -> int:
        scopes = {self._scopes[tensor] for tensor in tensors} - {ROOT}
        if len(scopes) > 1:
            raise InvalidConfigError(
                f"in ensemble {self._name}, step of model '{model}' receives inputs originated "
                f"from different decoupled models (step {index})",
                f"ensemble_scheduling.step[{index}].input_map",
            )
        return scopes.pop() if scopes else ROOT

    def _build_output(self, entry: ModelOutput, batching: bool) -> EnsembleOutput:
        name = entry.name
        if name not in self._scopes:
            raise InvalidConfigError(
                f"output '{name}' for ensemble '{self._name}' is not written", "output"
            )
        return EnsembleOutput(
            name,
            self._scopes[name],
            tuple(entry.dims),
            add_batch=batching and not self._batching[name],
            strip_batch=not batching and self._batching[name],
        )

    def _make_plan(self, requested: tuple[str, ...]) -> Plan:
        outputs = tuple(each for each in self._outputs if not requested or each.name in requested)
        needed = self._needed_steps([each.name for each in outputs])
        waiting: dict[int, dict[int, int]] = {}
        outer_tensors: dict[int, int] = {}
        consumers: dict[str, list[Step]] = {}
        for step in needed:
            tensors = {each.tensor for each in step.inputs}
            for tensor in tensors:
                consumers.setdefault(tensor, []).append(step)
            waiting.setdefault(step.scope, {})[step.index] = len(tensors)
            outer = sum(self._scopes[tensor] != step.scope for tensor in tensors)
            outer_tensors[step.scope] = outer_tensors.get(step.scope, 0) + outer
        scopes = {each.scope for each in outputs}
        return Plan(
            outputs,
            tuple(needed),
            waiting,
            outer_tensors,
            consumers={tensor: tuple(steps) for tensor, steps in consumers.items()},
            shared=frozenset(s.index for s in needed if self._shares(s, consumers, outputs)),
            entries=frozenset(
                s.index for s in needed if any(i.tensor in self.inputs for i in s.inputs)
            ),
            output_names={
                scope: frozenset(each.name for each in outputs if each.scope == scope)
                for scope in scopes
            },
            leaf_scopes=self._leaf_scopes(scopes),
        )

    def _shares(
        self,
        step: Step,
        consumers: Mapping[str, Sequence[Step]],
        outputs: Sequence[EnsembleOutput],
    ) -> bool:
        """Whether anybody else, or a later iteration, reads a tensor that the step reads."""
        tensors = [each.tensor for each in step.inputs]
        names = {output.name for output in outputs}
        return len(set(tensors)) < len(tensors) or any(
            len(consumers[tensor]) > 1 or tensor in names or self._scopes[tensor] != step.scope
            for tensor in tensors
        )

    def _needed_steps(self, tensors: list[str]) -> list[Step]:
        """Steps that the tensors depend on, in order of dependency."""
        needed: set[int] = set()
        while tensors:
            step = self._producer.get(tensors.pop())
            if step is not None and step.index not in needed:
                needed.add(step.index)
                tensors.extend(each.tensor for each in step.inputs)
        return [step for index, step in self._steps.items() if index in needed]

    def _leaf_scopes(self, scopes: set[int]) -> tuple[int, ...]:
        """The scopes that no other one of the set lies within."""
        outer = {ancestor for scope in scopes for ancestor in self._ancestors(scope)}
        return tuple(sorted(scopes - outer))

    def _ancestors(self, scope: int) -> Iterable[int]:
        while scope != ROOT:
            scope = self.parent_scope(scope)
            yield scope


def _pausable_steps(members: Sequence[ModelConfig]) -> frozenset[int]:
    """Steps whose model no other step runs.

    Instances pause as a whole, so a paused step must not serve the very one it waits for. What
    members of an ensemble among the steps, or calls of a model to others, run is not looked into.
    """
    if any(member.HasField("ensemble_scheduling") for member in members):
        return frozenset()
    uses = Counter(member.name for member in members)
    return frozenset(index for index, member in enumerate(members) if uses[member.name] == 1)


def convert_batch(shape: Sequence[int], dims: Sequence[int], add: bool) -> Sequence[int]:
    """The shape with (`add`) or without a batch dimension, if `dims` shows that it needs that.

    Source: Triton core src/ensemble_scheduler, ReshapeTensorDims.
    """
    is_whole = fits(shape, dims)
    if add:
        return [1, *shape] if is_whole else shape
    return shape[1:] if not is_whole and shape and shape[0] == 1 else shape


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether the two shapes can be the same one, -1 standing for any size."""
    return len(shape) == len(dims) and all(
        a == b or -1 in (a, b) for a, b in zip(shape, dims, strict=True)
    )


def member_configs(config: ModelConfig, lookup_config: ConfigLookup) -> list[ModelConfig]:
    """Configuration of the member of each step."""
    found: dict[tuple[str, int], ModelConfig] = {}
    missing = []
    for name, version in member_models(config):
        try:
            found[name, version] = lookup_config(name, version)
        except NotFoundError as error:
            if version != -1:
                raise InvalidArgumentError(
                    f"ensemble '{config.name}' depends on '{name}' whose required version "
                    f"{version} is not loaded."
                ) from error
            missing.append(name)
    if missing:
        raise InvalidArgumentError(
            f"ensemble {config.name} contains models that are not available or ambiguous: "
            f"{', '.join(missing)}"
        )
    return [found[step.model_name, step.model_version] for step in config.ensemble_scheduling.step]
