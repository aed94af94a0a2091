"""Implicit state: tensors that the server keeps for a sequence between its requests. Pure.

`state { input_name output_name }` of a sequence batcher: what a model writes to `output_name` is
what it reads from `input_name` with the sequence's next request. It works with every backend,
since a backend sees only one more input and one more output.

# Differs from Triton: its python backend always sees the initial state.

Source: Triton core src/sequence_state.cc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npuserve.errors import InternalError, InvalidArgumentError, InvalidConfigError
from npuserve.model_config import ModelConfig, datatype_name
from npuserve.tensor import ITEM_SIZE, Tensor, deserialize_bytes, element_count

if TYPE_CHECKING:
    from pathlib import Path

    from npuserve._proto.model_config_pb2 import ModelSequenceBatching
    from npuserve.response import InferenceResponse

# State input tensors by name, as the next execution gets them.
StateTensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class StateSpec:
    """One entry of `state`.

    Attributes:
        initial: the input of a sequence's first request.
        shape: what an output must have; -1 is variable, the batch dimension included.
        is_output: the output is also one of the model's outputs and stays in the response.
    """

    input_name: str
    output_name: str
    initial: Tensor
    shape: tuple[int, ...]
    is_output: bool


class ImplicitState:
    """The states of one model.

    Raises:
        InvalidArgumentError: with Triton's texts; a file of an initial state is not there or has
            the wrong size.
    """

    def __init__(self, config: ModelConfig, model_dir: Path) -> None:
        self._model_name = config.name
        outputs = {entry.name for entry in config.output}
        lead = (1,) if config.max_batch_size > 0 else ()
        specs: dict[str, list[StateSpec]] = {}
        names: set[str] = set()
        for index, state in enumerate(config.sequence_batching.state):
            field = f"sequence_batching.state[{index}]"
            if state.input_name in names:
                raise InvalidConfigError(
                    f"State input name '{state.input_name}' specified more than once.",
                    f"{field}.input_name",
                )
            names.add(state.input_name)
            try:
                initial = _initial_tensor(state, lead, model_dir)
            except InvalidArgumentError as error:
                raise InvalidConfigError(str(error), f"{field}.initial_state") from error
            shape, is_output = (*lead, *state.dims), state.output_name in outputs
            spec = StateSpec(state.input_name, state.output_name, initial, shape, is_output)
            specs.setdefault(spec.output_name, []).append(spec)
        self._specs = specs  # by output
        self.initial: StateTensors = {
            spec.input_name: spec.initial for each in specs.values() for spec in each
        }

    def __bool__(self) -> bool:
        """Whether the model has any state."""
        return bool(self._specs)

    def absorb(self, held: StateTensors, response: InferenceResponse) -> StateTensors:
        """Take the state outputs out of a response.

        Args:
            held: state the execution began with.
            response: of the execution; only outputs the client may see stay in it. The datatype
                and, in variable dimensions, the shape may differ from those of `held`.

        Returns:
            The state for the next execution; an output the model left out is as before.

        Raises:
            InternalError: an output does not have the configured shape.
        """
        specs = self._specs
        new: dict[str, Tensor] = {}
        kept: list[Tensor] = []
        for tensor in response.outputs:
            fed = specs.get(tensor.name, ())
            if not fed or fed[0].is_output:
                kept.append(tensor)
            for spec in fed:
                self._check_shape(spec, tensor)
                # Copied: it may outlive the request by long, and must not hold a worker's or
                # a device's buffer meanwhile.
                data = bytes(tensor.data)
                new[spec.input_name] = Tensor(
                    spec.input_name, tensor.datatype, tuple(tensor.shape), data
                )
        response.outputs = kept
        return {**held, **new} if new else held

    def _check_shape(self, spec: StateSpec, tensor: Tensor) -> None:
        shape = tuple(tensor.shape)
        if len(shape) != len(spec.shape) or any(
            want not in (-1, got) for want, got in zip(spec.shape, shape, strict=True)
        ):
            raise InternalError(
                f"unexpected shape for state '{spec.output_name}' for model "
                f"'{self._model_name}'. Expected {_text(spec.shape)}, got {_text(shape)}"
            )


def _initial_tensor(
    state: ModelSequenceBatching.State, lead: tuple[int, ...], model_dir: Path
) -> Tensor:
    """The state input of a first request; without `initial_state` zeros, -1 being 1.

    # Differs from Triton: without `initial_state` its buffer is not even zeroed.
    """
    name = state.input_name
    datatype = datatype_name(state.data_type)
    if len(state.initial_state) > 1:
        raise InvalidArgumentError(
            f"initial_state field for state input '{name}' must contain exactly one or zero "
            f"element. Found '{len(state.initial_state)}' elements."
        )
    if not state.initial_state:
        shape = (*lead, *(1 if dim == -1 else dim for dim in state.dims))
        return Tensor(name, datatype, shape, _zeros(datatype, shape))
    initial = state.initial_state[0]
    _check_initial(state, initial)
    shape = (*lead, *initial.dims)
    if initial.WhichOneof("state_data") == "data_file":
        return Tensor(name, datatype, shape, _read(initial.data_file, model_dir, datatype, shape))
    return Tensor(name, datatype, shape, _zeros(datatype, shape))


def _check_initial(
    state: ModelSequenceBatching.State, initial: ModelSequenceBatching.InitialState
) -> None:
    name = state.input_name
    if initial.data_type != state.data_type:
        raise InvalidArgumentError(
            f"The data type used for 'initial_state' field of state '{name}' does not match the "
            "state data type."
        )
    if not initial.name:
        raise InvalidArgumentError(
            f"Field 'name' must be set when using initial_state for state input '{name}'."
        )
    if len(initial.dims) != len(state.dims):
        raise InvalidArgumentError(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' "
            f"dimensions for state input '{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for got, want in zip(initial.dims, state.dims, strict=True):
        if got == -1:
            raise InvalidArgumentError(
                f"'initial_state' field for state input name '{name}' contains variable dimensions."
            )
        if want not in (-1, got):
            raise InvalidArgumentError(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim "
                f"description. {got} != {want}"
            )


def _zeros(datatype: str, shape: Sequence[int]) -> bytes:
    # Four zero bytes are the length of an empty text.
    return bytes(ITEM_SIZE.get(datatype, 4) * element_count(shape))


def _read(file_name: str, model_dir: Path, datatype: str, shape: Sequence[int]) -> bytes:
    """The raw bytes of an initial state, exactly those of its tensor."""
    directory = (model_dir / "initial_state").resolve()
    path = (directory / file_name).resolve()
    if not path.is_relative_to(directory):
        raise InvalidArgumentError(
            f"initial_state data file '{file_name}' is outside of '{directory}'"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            f"failed to read initial_state data file '{path}': {error.strerror}"
        ) from error
    if datatype == "BYTES":
        deserialize_bytes(data, element_count(shape))
    elif len(data) != (expected := ITEM_SIZE[datatype] * element_count(shape)):
        raise InvalidArgumentError(
            f"initial_state setting expects {expected} bytes, but the data provided from "
            f"{file_name} only has {len(data)} bytes"
            if len(data) < expected
            else f"initial_state setting expects {expected} bytes, but the data provided from "
            f"{file_name} has {len(data)} bytes"
        )
    return data


def _text(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
