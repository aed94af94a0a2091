"""The ge backend (also `npu_ge`): compiles ONNX models for the card at hand and serves them.

`atc` makes an .om file for the chip, the result is kept (see atc.py), and it runs as one of the
om backend does. Parameters in config.pbtxt, or `--backend-config=npu_ge,<key>=<value>`, named as
the GE backend for Triton names them:

    device_ids            cards, such as "2" or "4,5"; default: those of the instance groups
    device_exec_blocks    how often the model is loaded on each card, each time with streams of
                          its own
    instance_exec_blocks  how many of these an instance feeds
    static_model          "1": the dims are complete and fixed, no max_batch_size
    [global.|session.|graph.]ge.…   options of the graph engine, see _GE_OPTIONS
    profiling, dump_graph, dump_data   accepted without effect, with a warning

and npuserve's own: `dynamic_batch_size` (gears, "1,2,4"), `cache_dir`, `pipeline_depth`,
`aipp_…` (settings of dynamic AIPP, see acl/aipp.py) and `atc.<flag>` for any flag of atc. The file
of `atc.insert_op_conf` (AIPP) lies beside the model; clients then send images, as the
configuration has to say.
"""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.backends.acl.aipp import PREFIX as AIPP_PREFIX
from npuserve.backends.acl.aipp import aipp_parameters
from npuserve.backends.acl.library import AclLibrary, load_library
from npuserve.backends.acl.runner import RunnerOptions
from npuserve.backends.atc import Compilers, compile_onnx, default_cache_dir, find_atc
from npuserve.backends.base import Backend, BackendModelContext
from npuserve.backends.model_signature import complete_config, default_max_batch_size
from npuserve.backends.npu_batch import sizes_of
from npuserve.backends.npu_instance import NpuInstance
from npuserve.backends.npu_signature import (
    batch_tensor_settings,
    complete_scheduler,
    is_complete,
)
from npuserve.backends.om import positive_number
from npuserve.backends.onnx_graph import read_signature
from npuserve.errors import InvalidConfigError, NotFoundError, UnavailableError
from npuserve.model_config import datatype_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npuserve.backends.base import ModelInstance, Placement
    from npuserve.model_config import ModelConfig

_DEFAULT_FILENAME = "model.onnx"
_MAX_BATCH_GEARS = 100
_INSERT_OP_CONF = "atc.insert_op_conf"

# Options of the graph engine → flags of atc. Source: GE and ATC user guides of CANN.
_GE_OPTIONS = {
    "ge.socVersion": "soc_version",
    "ge.aicoreNum": "aicore_num",
    "ge.inputShape": "input_shape",
    "ge.dynamicDims": "dynamic_dims",
    "ge.exec.precision_mode": "precision_mode",
    "ge.exec.precision_mode_v2": "precision_mode_v2",
    "ge.outputDatatype": "output_type",
    "ge.opSelectImplmode": "op_select_implmode",
    "ge.optypelistForImplmode": "optypelist_for_implmode",
    "ge.op_compiler_cache_mode": "op_compiler_cache_mode",
    "ge.op_compiler_cache_dir": "op_compiler_cache_dir",
    "ge.externalWeight": "external_weight",
    "ge.bufferOptimize": "buffer_optimize",
    "ge.enableSmallChannel": "enable_small_channel",
}
_OWN_PARAMETERS = frozenset(
    {
        "device_ids", "device_exec_blocks", "instance_exec_blocks", "static_model",
        "dynamic_batch_size", "cache_dir", "pipeline_depth",
        "ge.dynamicNodeType",  # says how dynamicDims are fed; the data inputs are the only way here
    }
)  # fmt: skip
_WITHOUT_EFFECT = frozenset({"profiling", "dump_graph", "dump_data"})
_SCOPES = ("global.", "session.", "graph.")


class GeBackend(Backend):
    """See the module."""

    def __init__(self) -> None:
        self._compilers = Compilers()

    def stop(self) -> None:
        """See `Backend.stop`."""
        self._compilers.stop()

    def auto_complete(self, context: BackendModelContext) -> None:
        """See `Backend.auto_complete`. Reads the ONNX file only."""
        path = onnx_path(context)
        if is_complete(context.config):
            complete_scheduler(context.config)
            return
        default = default_max_batch_size(context.backend_options)
        parameters = merged_parameters(context)
        if _INSERT_OP_CONF in parameters:
            raise InvalidConfigError.of_parameter(
                _INSERT_OP_CONF,
                f"model '{context.name}' has '{_INSERT_OP_CONF}': write all of input and output; "
                "clients send what AIPP takes, not what the ONNX file does",
            )
        if parameters.get("static_model") == "1":
            default = 0
        complete_config(context.config, read_signature(path), default)

    def load(self, context: BackendModelContext) -> Sequence[ModelInstance]:
        """See `Backend.load`. Compiles, unless that was done before."""
        path = onnx_path(context)
        try:
            library = load_library()
            find_atc()
        except UnavailableError as error:
            raise UnavailableError(f"backend '{_name(context)}': {error}") from error
        parameters = merged_parameters(context)
        aipp = aipp_parameters(parameters)
        warn_of_unknown(context)
        flags = atc_flags(context.config, parameters, path, library)
        cache_dir = Path(parameters.get("cache_dir") or default_cache_dir())
        compiled = compile_onnx(path, flags, cache_dir, self._compilers)
        depth = positive_number(parameters, "pipeline_depth", 2)
        return [
            NpuInstance(
                context, compiled, [RunnerOptions(device, depth, aipp=aipp) for device in devices]
            )
            for devices in assign_devices(context.placements, parameters)
        ]


def _name(context: BackendModelContext) -> str:
    return context.config.backend or "ge"


def onnx_path(context: BackendModelContext) -> Path:
    """The model: the configured name, else model.onnx, else the only `*.onnx` there is.

    Raises:
        NotFoundError: none, or several.
    """
    directory = context.version_dir
    configured = context.config.default_model_filename
    path = directory / (configured or _DEFAULT_FILENAME)
    if path.is_file():
        return path
    found = sorted(directory.glob("*.onnx"))
    if len(found) == 1 and configured in ("", _DEFAULT_FILENAME):
        return found[0]
    there = ", ".join(file.name for file in found) or "no .onnx file at all"
    raise NotFoundError(f"'{path.name}' is not in '{directory}' (there is {there})")


def merged_parameters(context: BackendModelContext) -> dict[str, str]:
    """Parameters of the model over those of the command line, scopes (`session.`) taken off."""
    merged = {**context.backend_options, **context.parameters}
    return {_unscoped(key): value for key, value in merged.items()}


def _unscoped(key: str) -> str:
    for scope in _SCOPES:
        if key.startswith(scope):
            return key.removeprefix(scope)
    return key


def warn_of_unknown(context: BackendModelContext) -> None:
    """Name the parameters that have no effect."""
    for key in context.parameters:
        name = _unscoped(key)
        if name in _WITHOUT_EFFECT:
            context.log.warning("parameter '%s' has no effect in npuserve", key)
        elif not (
            name in _OWN_PARAMETERS or name in _GE_OPTIONS or name.startswith(("atc.", AIPP_PREFIX))
        ):
            context.log.warning("parameter '%s' is unknown to backend ge; it is not used", key)


def atc_flags(
    config: ModelConfig, parameters: Mapping[str, str], path: Path, library: AclLibrary
) -> dict[str, str]:
    """Flags for atc: the chip, the shapes that the configuration asks for, and what was given.

    Raises:
        InvalidConfigError: static_model without complete dims.
        UnavailableError: no card tells its chip.
    """
    flags = {
        flag: parameters[option] for option, flag in _GE_OPTIONS.items() if option in parameters
    }
    flags |= {
        key.removeprefix("atc."): value for key, value in parameters.items() if key[:4] == "atc."
    }
    if "insert_op_conf" in flags:
        flags["insert_op_conf"] = str(path.parent / flags["insert_op_conf"])
    if "soc_version" not in flags:
        flags["soc_version"] = _chip(library)
    if "dynamic_dims" in flags:
        flags.setdefault("input_format", "ND")
    if "input_shape" not in flags:
        flags |= _shape_flags(config, parameters, path)
    return flags


def _chip(library: AclLibrary) -> str:
    """The chip of this machine's cards.

    Raises:
        UnavailableError: no card is visible.
    """
    name: str | None = library.ask("acl.get_soc_name", failed=None)
    if not name:
        raise UnavailableError(
            "no NPU is visible, so the chip to compile for is unknown (see npu-smi info and "
            "ASCEND_RT_VISIBLE_DEVICES); parameter 'ge.socVersion' would name it"
        )
    return name


def _shape_flags(config: ModelConfig, parameters: Mapping[str, str], path: Path) -> dict[str, str]:
    batching = config.max_batch_size > 0
    has_aipp = _INSERT_OP_CONF in parameters
    shapes = {name: list(dims) for name, dims in _input_dims(config, path, has_aipp).items()}
    # A flat row of several requests has any length, whatever dims say of one.
    is_ragged = bool(batch_tensor_settings(config))
    is_fixed = not is_ragged and all(-1 not in dims for dims in shapes.values())
    if parameters.get("static_model") == "1" and (batching or not is_fixed):
        raise InvalidConfigError.of_parameter(
            "static_model",
            "static_model needs fixed shapes: leave max_batch_size out and write whole dims "
            f"without -1 (now: max_batch_size {config.max_batch_size}, {shapes})",
        )
    flags: dict[str, str] = {}
    leading: list[int] = []
    if batching:
        gears = batch_gears(config, parameters.get("dynamic_batch_size"))
        if is_fixed and len(gears) > 1:
            flags["dynamic_batch_size"] = ",".join(map(str, gears))
        # Free axes beside the batch: a dynamic shape, without gears.
        leading = [gears[-1] if is_fixed and len(gears) == 1 else -1]
    flags["input_shape"] = ";".join(
        f"{name}:{','.join(map(str, leading + dims))}" for name, dims in shapes.items()
    )
    return flags


def _input_dims(config: ModelConfig, path: Path, has_aipp: bool) -> dict[str, Sequence[int]]:
    """Dims of the model's inputs without the batch axis: as configured, else as in the file."""
    skip = 1 if config.max_batch_size > 0 else 0
    dims: dict[str, Sequence[int]] = {
        tensor.name: tensor.shape[skip:] for tensor in read_signature(path).inputs
    }
    for entry in config.input:
        # Images are not of the model's shape: what is behind AIPP is in the file.
        if entry.name in dims and not (has_aipp and datatype_name(entry.data_type) == "UINT8"):
            shape = entry.reshape.shape if entry.HasField("reshape") else entry.dims
            # A scalar is configured as one element.
            dims[entry.name] = list(shape) if dims[entry.name] else []
    return dims


def batch_gears(config: ModelConfig, asked: str | None) -> list[int]:
    """Batch sizes to compile for: as asked, else powers of two, preferred sizes and the maximum.

    Raises:
        InvalidConfigError: the parameter is no list of numbers.
    """
    if asked is not None:
        try:
            return sizes_of(asked)
        except ValueError as error:
            raise InvalidConfigError.of_parameter(
                "dynamic_batch_size",
                f"parameter 'dynamic_batch_size' is '{asked}'; write batch sizes, such as 1,2,4",
            ) from error
    maximum: int = config.max_batch_size
    gears = {1 << power for power in range(maximum.bit_length()) if 1 << power <= maximum}
    gears |= {s for s in config.dynamic_batching.preferred_batch_size if 0 < s <= maximum}
    return sorted(gears | {maximum})[-_MAX_BATCH_GEARS:]


def assign_devices(
    placements: Sequence[Placement], parameters: Mapping[str, str]
) -> list[list[int]]:
    """For every instance the cards it loads the model on, one entry a load.

    Raises:
        InvalidConfigError: a parameter is no (list of) number(s).
    """
    asked = parameters.get("device_ids", "")
    cards = [int(card) for card in asked.split(",") if card.strip().isdecimal()]
    if asked and len(cards) != len(asked.split(",")):
        raise InvalidConfigError.of_parameter(
            "device_ids", f"parameter 'device_ids' is '{asked}'; write card numbers, such as 0,1"
        )
    instances = len(placements)
    if not cards:
        blocks = positive_number(parameters, "instance_exec_blocks", 1)
        return [[placement.device_id] * blocks for placement in placements]
    per_card = positive_number(parameters, "device_exec_blocks", -(-instances // len(cards)))
    total = per_card * len(cards)
    per_instance = positive_number(
        parameters, "instance_exec_blocks", max(1, -(-total // max(1, instances)))
    )
    order = cycle(cards)
    return [list(islice(order, per_instance)) for _ in placements]
