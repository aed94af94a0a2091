"""A model file loaded on a card: its description, its datasets.

One model id must never be executed twice at the same time; whoever owns a `LoadedModel` calls it
from one thread and queues its executions on one stream.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.backends.acl import codes
from npuserve.backends.acl.aipp import Aipp, AippSettings, parameter_name, read_settings
from npuserve.backends.acl.gears import Dims, Gear
from npuserve.backends.acl.library import AclCallError
from npuserve.backends.acl.runtime import Owned, Stream
from npuserve.errors import InternalError, InvalidConfigError, UnsupportedError

if TYPE_CHECKING:
    from npuserve.backends.acl.library import AclLibrary


logger = logging.getLogger(__name__)


class ModelKind(Enum):
    """How the shapes of a model file may vary."""

    STATIC = "static"
    BATCH_GEARS = "dynamic batch"
    IMAGE_GEARS = "dynamic image size"
    DIMS_GEARS = "dynamic dims"
    RANGES = "dynamic shape"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output as the model file describes it.

    Attributes:
        index: position in the dataset.
        name: as in the file; outputs usually read `node:0:tensor`.
        dims: complete, batch axis included; -1 where the length varies.
        size: bytes; of the largest gear; 0 when unknown (dynamic shape).
        format: `aclFormat` number.
    """

    index: int
    name: str
    datatype: str
    acl_datatype: int
    dims: Dims
    size: int
    format: int

    @property
    def tensor_name(self) -> str:
        """Name without the node: the last part of `node:0:tensor`."""
        return self.name.rsplit(":", 1)[-1]


@dataclass(frozen=True)
class AippInput:
    """An extra input that carries the settings of an image input's dynamic AIPP.

    Attributes:
        index: position in the dataset.
        size: bytes.
        image: name of the image input.
    """

    index: int
    size: int
    image: str
    settings: AippSettings


@dataclass(frozen=True)
class ModelDescription:
    """What a model file takes and gives.

    Attributes:
        inputs: data inputs only.
        gear_input: index of the extra input that carries the gear, None without gears.
        gear_input_size: its bytes.
        gears: empty for `RANGES`; one for `STATIC`.
        aipp_inputs: the extra inputs of dynamic AIPP.
    """

    kind: ModelKind
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    gears: tuple[Gear, ...]
    gear_input: int | None
    gear_input_size: int
    aipp_inputs: tuple[AippInput, ...] = ()

    @property
    def dataset_inputs(self) -> int:
        """Number of buffers of an input dataset."""
        return len(self.inputs) + (self.gear_input is not None) + len(self.aipp_inputs)

    @property
    def largest_batch(self) -> int:
        """Length of the first axis in the largest gear."""
        return max(gear.inputs[0][0] for gear in self.gears)


class LoadedModel(Owned):
    """A model on the card of the current context.

    Args:
        path: of the `.om` file.
        aipp: parameters of dynamic AIPP, see `aipp.py`.

    Raises:
        AclCallError: the runtime refused the file.
        InvalidConfigError: a parameter of dynamic AIPP is missing or wrong.
        UnsupportedError: a dtype or feature that cannot be served.
    """

    def __init__(self, library: AclLibrary, path: Path, aipp: Mapping[str, str]) -> None:
        super().__init__()
        self.library = library
        with ExitStack() as stack:
            context = f"for '{path.name}' on {library.ask('acl.get_soc_name') or 'unknown chip'}"
            self.id: int = library.value("acl.mdl.load_from_file", str(path), context=context)
            stack.callback(library.release, "acl.mdl.unload", self.id)
            self._path = path
            self.descriptor = library.handle("acl.mdl.create_desc")
            stack.callback(library.release, "acl.mdl.destroy_desc", self.descriptor)
            library.call("acl.mdl.get_desc", self.descriptor, self.id, context=context)
            self.description = _Describer(library, self.id, self.descriptor, aipp).describe()
            self._stack = stack.pop_all()

    def device_bytes(self) -> int:
        """Memory of the card that the runtime took for it: to work in, and for its weights.

        An estimate for dynamic shapes, of which the runtime does not tell: the weights are nearly
        all of the file.
        """
        if self.description.kind is not ModelKind.RANGES:
            try:
                return sum(self.library.value("acl.mdl.query_size", str(self._path)))
            except AclCallError as error:
                logger.warning("%s; its file tells how large it is", error)
        return self._path.stat().st_size

    def set_aipp(self, dataset: Dataset) -> None:
        """Write the settings of dynamic AIPP into a dataset's extra inputs, where they stay."""
        for extra in self.description.aipp_inputs:
            with Aipp(self.library, extra.settings, self.description.largest_batch) as aipp:
                aipp.apply(self.id, dataset.handle, extra.index)

    def set_gear(self, dataset: Dataset, gear: Gear) -> None:
        """Choose the shape of the next execution with `dataset`, whose buffers are all added."""
        kind, index = self.description.kind, self.description.gear_input
        if kind is ModelKind.BATCH_GEARS:
            call, arguments = "acl.mdl.set_dynamic_batch_size", gear.key
        elif kind is ModelKind.IMAGE_GEARS:
            call, arguments = "acl.mdl.set_dynamic_hw_size", gear.key
        elif kind is ModelKind.DIMS_GEARS:
            call = "acl.mdl.set_input_dynamic_dims"
            dims = {"name": "", "dimCount": len(gear.key), "dims": list(gear.key)}
            self.library.call(call, self.id, dataset.handle, index, dims)
            return
        else:
            return
        self.library.call(
            call, self.id, dataset.handle, index, *arguments, context=f"for {list(gear.key)}"
        )

    def current_output_dims(self) -> tuple[Dims, ...]:
        """Dims of the outputs for the gear set last. Not for dynamic shapes."""
        call = (
            "acl.mdl.get_output_dims"
            if self.description.kind is ModelKind.STATIC
            else "acl.mdl.get_cur_output_dims"
        )
        return tuple(
            tuple(self.library.value(call, self.descriptor, output.index)["dims"])
            for output in self.description.outputs
        )

    def execute(self, inputs: Dataset, outputs: Dataset, stream: Stream) -> None:
        """Queue one execution. Datasets and buffers must stay as they are until it is done."""
        self.library.call(
            "acl.mdl.execute_async", self.id, inputs.handle, outputs.handle, stream.handle
        )


class Dataset(Owned):
    """The buffers of all inputs, or of all outputs, in order. Owns the wrappers, not the memory.

    Args:
        blocks: (device pointer, bytes) of each tensor; (0, 0) lets the runtime allocate an
            output of unknown size, which then has to be freed.
    """

    def __init__(self, library: AclLibrary, blocks: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.library = library
        self._buffers: list[int] = []
        self._shapes: dict[int, int] = {}  # tensor descriptions by input
        with ExitStack() as stack:
            self.handle = library.handle("acl.mdl.create_dataset")
            stack.callback(self._discard_shapes)
            stack.callback(library.release, "acl.mdl.destroy_dataset", self.handle)
            for pointer, size in blocks:
                buffer = library.handle("acl.create_data_buffer", pointer, size)
                stack.callback(library.release, "acl.destroy_data_buffer", buffer)
                library.value("acl.mdl.add_dataset_buffer", self.handle, buffer)
                self._buffers.append(buffer)
            self._stack = stack.pop_all()

    def point(self, index: int, pointer: int, size: int) -> None:
        """Make tensor `index` use another block; the former one is not freed."""
        self.library.call("acl.update_data_buffer", self._buffers[index], pointer, size)

    def pointer(self, index: int) -> int:
        """Device pointer of tensor `index`; what the runtime allocated for a null block."""
        address: int = self.library.ask("acl.get_data_buffer_addr", self._buffers[index])
        return address

    def set_shape(self, index: int, spec: TensorSpec, shape: Sequence[int]) -> None:
        """Tell the real shape of input `index` of a dynamic-shape model; nothing may be running."""
        library = self.library
        # A description lives until the next one: nothing says that the dataset keeps a copy.
        if index in self._shapes:
            library.discard("acl.destroy_tensor_desc", self._shapes.pop(index))
        self._shapes[index] = library.handle(
            "acl.create_tensor_desc", spec.acl_datatype, [int(length) for length in shape],
            spec.format,
        )  # fmt: skip
        library.value(
            "acl.mdl.set_dataset_tensor_desc", self.handle, self._shapes[index], index,
            context=f"for input '{spec.name}' of shape {list(shape)}",
        )  # fmt: skip

    def _discard_shapes(self) -> None:
        while self._shapes:
            self.library.discard("acl.destroy_tensor_desc", self._shapes.popitem()[1])

    def shape(self, index: int) -> Dims:
        """Real shape of output `index` after the execution of a dynamic-shape model."""
        library = self.library
        descriptor = library.handle("acl.mdl.get_dataset_tensor_desc", self.handle, index)
        rank: int = library.ask("acl.get_tensor_desc_num_dims", descriptor)
        return tuple(
            library.value("acl.get_tensor_desc_dim_v2", descriptor, axis) for axis in range(rank)
        )


class _Describer:
    """Reads a description handle into plain values."""

    def __init__(
        self, library: AclLibrary, model_id: int, descriptor: int, aipp: Mapping[str, str]
    ) -> None:
        self.library = library
        self.model_id = model_id
        self.descriptor = descriptor
        self.aipp = aipp

    def describe(self) -> ModelDescription:
        tensors = [self._input(index) for index in range(self._count("input"))]
        gear_input = None
        inputs: list[TensorSpec] = []
        parameter_inputs: dict[int, TensorSpec] = {}
        for tensor in tensors:
            if tensor.name == codes.DYNAMIC_TENSOR_NAME:
                gear_input = tensor
            elif tensor.name.startswith(codes.DYNAMIC_AIPP_NAME):
                parameter_inputs[tensor.index] = tensor
            else:
                inputs.append(tensor)
        aipp_inputs: list[AippInput] = []
        if parameter_inputs:
            inputs = [self._image(tensor, parameter_inputs, aipp_inputs) for tensor in inputs]
        elif self.aipp:
            raise InvalidConfigError.of_parameter(
                min(self.aipp),
                f"parameter '{min(self.aipp)}' is set, but the model has no dynamic AIPP (static "
                "AIPP got its settings when it was compiled)",
            )
        kind, gears = self._gears(inputs, gear_input)
        if aipp_inputs:
            self._check_aipp(kind, gears, inputs, {extra.image for extra in aipp_inputs})
        outputs = tuple(self._output(index) for index in range(self._count("output")))
        return ModelDescription(
            kind,
            tuple(inputs),
            outputs,
            gears,
            None if gear_input is None else gear_input.index,
            0 if gear_input is None else gear_input.size,
            tuple(aipp_inputs),
        )

    def _image(
        self, tensor: TensorSpec, parameter_inputs: Mapping[int, TensorSpec],
        found: list[AippInput],
    ) -> TensorSpec:  # fmt: skip
        """The input with the dims of the images that are sent, if it has dynamic AIPP."""
        kind, attached = self.library.value("acl.mdl.get_aipp_type", self.model_id, tensor.index)
        if kind != codes.WITH_DYNAMIC_AIPP:
            return tensor
        settings = read_settings(self.aipp, tensor.name)
        size = parameter_inputs[attached].size
        found.append(AippInput(attached, size, tensor.name, settings))
        # The file says [batch, -1, -1, -1], whatever the model behind AIPP takes.
        return replace(tensor, dims=settings.image_dims(tensor.dims[0]))

    def _check_aipp(
        self, kind: ModelKind, gears: Sequence[Gear], inputs: Sequence[TensorSpec],
        images: set[str],
    ) -> None:  # fmt: skip
        if kind not in (ModelKind.STATIC, ModelKind.BATCH_GEARS):
            raise UnsupportedError(
                f"the model combines dynamic AIPP and {kind.value}, for which the images would "
                "have to be of the largest size; compile it with static AIPP or one size"
            )
        for position, tensor in enumerate(inputs):
            needed = max(prod(gear.inputs[position]) for gear in gears)
            if tensor.name in images and needed > tensor.size:
                raise InvalidConfigError.of_parameter(
                    parameter_name(self.aipp, "src_image_size", tensor.name),
                    f"images of 'aipp_src_image_size' in 'aipp_input_format' need {needed} bytes "
                    f"for input '{tensor.name}', which was compiled for max_src_image_size "
                    f"{tensor.size}",
                )

    def _count(self, direction: str) -> int:
        count: int = self.library.ask(f"acl.mdl.get_num_{direction}s", self.descriptor)
        return count

    def _input(self, index: int) -> TensorSpec:
        # The newer call gives dims whose product is the byte size also with static AIPP.
        has_v2 = self.library.has("acl.mdl.get_input_dims_v2")
        return self._tensor(index, "input", "get_input_dims_v2" if has_v2 else "get_input_dims")

    def _output(self, index: int) -> TensorSpec:
        return self._tensor(index, "output", "get_output_dims")

    def _tensor(self, index: int, direction: str, dims_call: str) -> TensorSpec:
        library, descriptor = self.library, self.descriptor
        name: str = library.ask(
            f"acl.mdl.get_{direction}_name_by_index", descriptor, index, failed=""
        )
        number: int = library.ask(
            f"acl.mdl.get_{direction}_data_type", descriptor, index, failed=-1
        )
        datatype = codes.DATATYPE_BY_ACL.get(number)
        if datatype is None:
            raise UnsupportedError(
                f"{direction} '{name}' has the acl data type {number}, which cannot be served"
            )
        dims: dict[str, Any] = library.value(f"acl.mdl.{dims_call}", descriptor, index)
        return TensorSpec(
            index,
            name,
            datatype,
            number,
            tuple(dims["dims"]),
            library.ask(f"acl.mdl.get_{direction}_size_by_index", descriptor, index),
            library.ask(f"acl.mdl.get_{direction}_format", descriptor, index, failed=-1),
        )

    def _gears(
        self, inputs: Sequence[TensorSpec], gear_input: TensorSpec | None
    ) -> tuple[ModelKind, tuple[Gear, ...]]:
        shapes = tuple(tensor.dims for tensor in inputs)
        if gear_input is None:
            if any(codes.UNKNOWN_DIM in shape for shape in shapes):
                return ModelKind.RANGES, ()
            return ModelKind.STATIC, (Gear((), shapes),)
        batches = self.library.value("acl.mdl.get_dynamic_batch", self.descriptor)["batch"]
        if batches:
            keys = [(batch,) for batch in batches]
            return ModelKind.BATCH_GEARS, tuple(_filled(shapes, key) for key in keys)
        sizes = self.library.value("acl.mdl.get_dynamic_hw", self.descriptor, codes.ANY_INPUT)["hw"]
        if sizes:
            return ModelKind.IMAGE_GEARS, tuple(_filled(shapes, tuple(size)) for size in sizes)
        count = self.library.value(
            "acl.mdl.get_input_dynamic_gear_count", self.descriptor, codes.ANY_INPUT
        )
        gears = self.library.value(
            "acl.mdl.get_input_dynamic_dims", self.descriptor, codes.ANY_INPUT, count
        )
        if not gears:
            raise InternalError(f"the model has an input '{gear_input.name}' and no gears")
        return ModelKind.DIMS_GEARS, tuple(_split(shapes, tuple(gear["dims"])) for gear in gears)


def _filled(shapes: Sequence[Dims], key: Dims) -> Gear:
    """The gear whose key stands for the -1 axes of every input that has any, in order."""
    inputs: list[Dims] = []
    for shape in shapes:
        values = iter(key)
        inputs.append(tuple(next(values) if dim == codes.UNKNOWN_DIM else dim for dim in shape))
    return Gear(key, tuple(inputs))


def _split(shapes: Sequence[Dims], key: Dims) -> Gear:
    """The gear whose key is the dims of all inputs, one after the other."""
    inputs: list[Dims] = []
    start = 0
    for shape in shapes:
        inputs.append(key[start : start + len(shape)])
        start += len(shape)
    return Gear(key, tuple(inputs))
