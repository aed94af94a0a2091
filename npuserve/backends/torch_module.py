"""What a PyTorch model is loaded from and runs on: files, devices, threads, names.

Two kinds of file: TorchScript (`model.pt`) and `torch.export` programs (`model.pt2`).
"""

from __future__ import annotations

import logging
import re
import zipfile
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from npuserve.backends.model_signature import ModelSignature, ModelTensor
from npuserve.backends.registry import import_runtime
from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    InvalidConfigError,
    NotFoundError,
    NpuserveError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from npuserve.backends.base import BackendModelContext, Placement

logger = logging.getLogger(__name__)

_FILENAMES = ("model.pt", "model.pt2")
_INDEXED = re.compile(r".+__(\d+)$")

# Names of torch dtypes as `str(dtype)` shows them.
_DATATYPES = {
    "torch.bool": "BOOL", "torch.uint8": "UINT8", "torch.uint16": "UINT16",
    "torch.uint32": "UINT32", "torch.uint64": "UINT64", "torch.int8": "INT8",
    "torch.int16": "INT16", "torch.int32": "INT32", "torch.int64": "INT64",
    "torch.float16": "FP16", "torch.float32": "FP32", "torch.float64": "FP64",
    "torch.bfloat16": "BF16",
}  # fmt: skip


@cache
def runtime() -> Any:
    """The torch module.

    Raises:
        UnavailableError: it is not installed.
    """
    return import_runtime("torch", "pip install 'npuserve[torch]'")


def datatype_of(tensor: Any) -> str:
    """Wire datatype of a torch tensor.

    Raises:
        InternalError: it has none (complex, quantised).
    """
    name = _DATATYPES.get(str(tensor.dtype))
    if name is None:
        raise InternalError(f"the model returned a tensor of {tensor.dtype}, which has no datatype")
    return name


def model_path(context: BackendModelContext) -> Path:
    """The configured file, else model.pt or model.pt2.

    Raises:
        NotFoundError: it is not there.
    """
    directory = context.version_dir
    configured = context.config.default_model_filename
    names = (configured,) if configured else _FILENAMES
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise NotFoundError(
        f"unable to find '{directory / names[0]}' for model instance '{context.name}'"
    )


def device_of(placement: Placement) -> str:
    """The torch device of an instance: `npu:N` on cards where torch_npu is there, else `cpu`.

    Raises:
        UnavailableError: torch_npu is there, the card is not.
    """
    if placement.kind != "GPU":
        return "cpu"
    torch: Any = runtime()
    try:
        import_runtime("torch_npu", "install the torch-npu release that fits torch and CANN")
    except UnavailableError as error:
        logger.warning(
            "instance %s is placed on card %d and runs on the CPU: %s",
            placement.name, placement.device_id, error,
        )  # fmt: skip
        return "cpu"
    count = torch.npu.device_count()
    if not 0 <= placement.device_id < count:
        cards = ", ".join(map(str, range(count))) or "none"
        raise UnavailableError(f"there is no NPU {placement.device_id}; torch_npu sees: {cards}")
    return f"npu:{placement.device_id}"


def free_cached_memory(device: str) -> None:
    """Give a card the memory back that torch keeps of what is gone."""
    if device != "cpu":
        runtime().npu.empty_cache()


@dataclass
class TorchModule:
    """A loaded model.

    Attributes:
        call: runs it.
        argument_names: of its forward function, in order.
        positional: arguments that a `torch.export` program takes by position; the others by
            name. None for TorchScript, which takes all either way.
    """

    call: Any
    argument_names: list[str]
    positional: int | None = None

    def run(self, feeds: Mapping[str, Any], by_name: bool) -> Any:
        """Call the model.

        Args:
            feeds: tensors in the order of the arguments.
            by_name: whether their names are those of the arguments, so that some may be missing.
        """
        if self.positional is None:
            return self.call(**feeds) if by_name else self.call(*feeds.values())
        values = list(feeds.values())
        names = self.argument_names[self.positional :]
        by_keyword = dict(zip(names, values[self.positional :], strict=True))
        return self.call(*values[: self.positional], **by_keyword)


def load_module(path: Path, device: str, parameters: Mapping[str, str]) -> TorchModule:
    """Load a file onto a device.

    Raises:
        InternalError: torch refused the file.
        InvalidConfigError, UnavailableError: it cannot be compiled as `torchair` asks.
    """
    torch = runtime()
    try:
        if is_exported(path):
            program = torch.export.load(path)
            module = program.module().to(device)
            names = list(program.graph_signature.user_inputs)
            positional = len(program.example_inputs[0])
            mode = parameters.get("torchair")
            if mode:
                free = any(-1 in tensor.shape for tensor in _program_inputs(program))
                module = _compiled(module, mode, device, free)
            return TorchModule(module, names, positional)
        module = torch.jit.load(str(path), map_location=device)
        module.eval()
    except NpuserveError:
        raise
    except Exception as error:  # torch raises whatever it likes for a bad file
        raise InternalError(f"failed to load model '{path.name}': {error}") from error
    if parameters.get("torchair"):
        raise InvalidConfigError.of_parameter(
            "torchair", "parameter 'torchair' needs a torch.export file (model.pt2)"
        )
    schema = module.forward.schema
    names = [argument.name for argument in schema.arguments if argument.name != "self"]
    return TorchModule(module, names)


def is_exported(path: Path) -> bool:
    """Whether the file is a `torch.export` program; both kinds are zip archives."""
    if path.suffix == ".pt2":
        return True
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("archive_format") for name in archive.namelist())


def _compiled(module: Any, mode: str, device: str, free: bool) -> Any:
    """The module through torchair's graph mode; the first call of each graph compiles it.

    Args:
        mode: "max-autotune" (GE graphs), "reduce-overhead" (captured graphs) or what else this
            torchair knows.
        free: whether axes of its inputs are free. Then one graph serves all lengths: torch refuses
            to compile a ninth one, and each would take tens of seconds in the middle of serving.

    Source: `torchair/configs/compiler_config.py` and `npu_fx_compiler.py` of torch_npu.
    """
    import_runtime("torch_npu", "install the torch-npu release that fits torch and CANN")
    if device == "cpu":
        raise InvalidConfigError.of_parameter(
            "torchair",
            "parameter 'torchair' compiles for NPU cards, the instance is on the CPU; place it "
            "with kind: KIND_NPU",
        )
    torchair = import_runtime("torchair", "it comes with torch-npu")
    try:
        config = torchair.CompilerConfig()
    except Exception as error:  # torch_npu loads the real module now, with whatever that raises
        raise UnavailableError(f"torchair does not load: {error}") from error
    try:
        config.mode = mode
    except ValueError as error:
        reason = str(error).partition("\n")[0]  # a traceback follows
        raise InvalidConfigError.of_parameter(
            "torchair", f"parameter 'torchair' is '{mode}': {reason}"
        ) from error
    backend = torchair.get_npu_backend(compiler_config=config)
    return runtime().compile(module, backend=backend, dynamic=free, fullgraph=True)


def exported_signature(path: Path) -> ModelSignature:
    """Inputs and outputs of a `torch.export` program; outputs are called OUTPUT__0 and so on.

    Raises:
        InternalError: torch refused the file.
    """
    try:
        program = runtime().export.load(path)
    except Exception as error:  # torch raises whatever it likes for a bad file
        raise InternalError(f"failed to load model '{path.name}': {error}") from error
    values = _values(program)
    return ModelSignature(
        _program_inputs(program),
        tuple(
            _tensor(f"OUTPUT__{index}", values[name])
            for index, name in enumerate(program.graph_signature.user_outputs)
        ),
    )


def _values(program: Any) -> dict[str, Any]:
    """What every node of the program is for its example."""
    return {node.name: node.meta.get("val") for node in program.graph.nodes}


def _program_inputs(program: Any) -> tuple[ModelTensor, ...]:
    values = _values(program)
    return tuple(_tensor(name, values[name]) for name in program.graph_signature.user_inputs)


def _tensor(name: str, value: Any) -> ModelTensor:
    shape = tuple(length if isinstance(length, int) else -1 for length in value.shape)
    return ModelTensor(name, datatype_of(value), shape)


def positions(names: Sequence[str], role: str) -> list[int] | None:
    """Positions from names such as INPUT__1; None when the names do not follow this convention.

    Raises:
        InvalidArgumentError: only some do, or two have the same number.
    """
    matches = [_INDEXED.match(name) for name in names]
    numbers = [int(match[1]) for match in matches if match is not None]
    if not numbers:
        return None
    if len(numbers) < len(names) or len(set(numbers)) < len(numbers):
        raise InvalidArgumentError(
            f"{role} names {', '.join(names)}: either all end in __<index>, each with its own "
            "index, or none does"
        )
    return numbers


def configure_threads(parameters: Mapping[str, str]) -> None:
    """Apply INTRA_OP_THREAD_COUNT to the calling thread, INTER_OP_THREAD_COUNT to the process.

    Raises:
        InvalidConfigError: no number above 0.
    """
    torch = runtime()
    names = ("INTRA_OP_THREAD_COUNT", "INTER_OP_THREAD_COUNT")
    intra, inter = (parameters.get(name, "") for name in names)
    for name, text in zip(names, (intra, inter), strict=True):
        if text and not (text.isdecimal() and int(text) > 0):
            raise InvalidConfigError.of_parameter(name, f"'{text}' is no thread count")
    if intra:
        torch.set_num_threads(int(intra))
    if inter and int(inter) != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(int(inter))
        except RuntimeError as error:  # only possible before the first parallel work
            logger.warning("INTER_OP_THREAD_COUNT is not applied: %s", error)
