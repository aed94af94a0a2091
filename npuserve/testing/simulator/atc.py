"""Stand-in for `atc`: compiles an ONNX file into a model file of the simulator.

    atc --framework=5 --model=m.onnx --output=out/m --soc_version=Ascend910B3
        [--input_shape="x:-1,3,8,8"] [--dynamic_batch_size=1,2,4 | --dynamic_image_size=8,8;16,16
        | --dynamic_dims=1,8;2,8] [--insert_op_conf=aipp.cfg] [--precision_mode_v2=origin] …
    atc --singleop=operators.json --output=directory --soc_version=Ascend910B3

Source of flags, messages and limits: ATC user guide of CANN. One flag is the simulator's own:
`--simulator_device_ms`, the modelled time of one execution.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from npuserve.testing.simulator import aipp
from npuserve.testing.simulator.atc_singleop import compile_operators
from npuserve.testing.simulator.engine import open_session
from npuserve.testing.simulator.om_file import (
    ACL_BY_ONNX,
    NUMPY_BY_ACL,
    OmDescription,
    OmGear,
    OmInput,
    OmOutput,
    write,
)

_FLAGS = {
    "mode", "framework", "model", "output", "soc_version", "input_format", "input_shape",
    "input_shape_range", "dynamic_batch_size", "dynamic_image_size", "dynamic_dims",
    "precision_mode", "precision_mode_v2", "aicore_num", "insert_op_conf", "output_type",
    "input_fp16_nodes", "op_select_implmode", "op_precision_mode", "optypelist_for_implmode",
    "external_weight", "op_compiler_cache_mode", "op_compiler_cache_dir", "log", "host_env_os",
    "host_env_cpu", "buffer_optimize", "enable_small_channel", "singleop", "simulator_device_ms",
}  # fmt: skip
_PRECISION_V2 = {
    "fp16", "origin", "mixed_float16", "mixed_bfloat16", "cube_fp16in_fp32out", "mixed_hif8",
    "cube_hif8",
}  # fmt: skip
_SOC = re.compile(r"Ascend(310|310P\d|310B\d|910[A-C]?\d?|910_93\d+|910Pro[AB]|950\w*)$")
_FORMATS = {"NCHW": 0, "NHWC": 1, "ND": 2}
_MAX_GEARS = 100


class AtcError(Exception):
    """Compilation failed; the text starts with an E code."""


def parse_flags(arguments: list[str]) -> dict[str, str]:
    """`--name=value` pairs.

    Raises:
        AtcError: an unknown or malformed flag.
    """
    flags: dict[str, str] = {}
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not name.startswith("--") or not separator:
            raise AtcError(f"E10001: Value [{argument}] for parameter is invalid.")
        if name[2:] not in _FLAGS:
            raise AtcError(f"E10016: unknown command line flag '{name[2:]}'")
        flags[name[2:]] = value
    return flags


def _required(flags: dict[str, str], name: str) -> str:
    if not flags.get(name):
        raise AtcError(f"E10004: Value for parameter [--{name}] is empty.")
    return flags[name]


def parse_shapes(text: str) -> dict[str, list[str]]:
    """`a:1,3,8~16,-1;b:1` as text of every axis."""
    shapes: dict[str, list[str]] = {}
    for part in filter(None, text.split(";")):
        name, separator, dims = part.rpartition(":")
        if not separator:
            raise AtcError(
                f"E10002: Value [{text}] for parameter [--input_shape] is invalid. Reason: "
                '[The input_shape format must be "input_name1:n1,c1,h1,w1;input_name2:n2"].'
            )
        shapes[name] = [axis for axis in dims.split(",") if axis]
    return shapes


def parse_gears(text: str, name: str) -> list[list[int]]:
    """`1,2;4,8` as numbers."""
    try:
        gears = [[int(value) for value in part.split(",")] for part in text.split(";") if part]
    except ValueError as error:
        raise AtcError(f"E10033: Value [{text}] for parameter [--{name}] is invalid.") from error
    return gears


def parse_aipp(text: str) -> dict[int, dict[str, str]]:
    """The AIPP configuration by number of the input.

    Raises:
        AtcError: a setting is missing or wrong.
    """
    configs: dict[int, dict[str, str]] = {}
    for config in aipp.parse(text):
        mode = config.get("aipp_mode", "undefined")
        try:
            if mode == "dynamic":
                if int(config.get("max_src_image_size", 0)) <= 0:
                    raise AtcError("E10043: dynamic AIPP needs max_src_image_size above 0.")
            elif mode == "static":
                aipp.from_config(config)
            else:
                raise AtcError(f"E10041: aipp_mode {mode} is neither static nor dynamic")
            configs[int(config.get("related_input_rank", 0))] = config
        except KeyError as error:
            image_format = config.get("input_format", "")
            text = f"E10042: AIPP input_format {image_format} is not supported"
            raise AtcError(text) from error
        except ValueError as error:
            raise AtcError(f"E10044: a setting of AIPP is no number: {error}") from error
    if not configs:
        raise AtcError("E10040: there is no aipp_op in the AIPP configuration")
    return configs


class Compiler:
    """One run of atc."""

    def __init__(self, flags: dict[str, str]) -> None:
        self.flags = flags

    def run(self) -> Path:
        """Compile; the file written, or the directory of single operators."""
        flags = self.flags
        if flags.get("singleop"):
            return self._compile_operators(flags["singleop"])
        if _required(flags, "framework") != "5":
            raise AtcError(f"E10007: [--framework] {flags['framework']}: only 5 (ONNX) is there")
        soc = self._soc_version()
        precision = flags.get("precision_mode_v2")
        if precision is not None and precision not in _PRECISION_V2:
            raise AtcError(
                f"E10001: Value [{precision}] for parameter [--precision_mode_v2] is invalid. "
                f"Reason: The value must be one of {sorted(_PRECISION_V2)}."
            )
        if precision is not None and "precision_mode" in flags:
            raise AtcError(
                "E10057: [--precision_mode] and [--precision_mode_v2] exclude each other."
            )
        path = Path(_required(flags, "model"))
        target = Path(_required(flags, "output") + ".om")
        onnx = self._read(path)
        description = self._describe(onnx, soc)
        target.parent.mkdir(parents=True, exist_ok=True)
        write(target, description, onnx)
        return target

    def _soc_version(self) -> str:
        soc = _required(self.flags, "soc_version")
        if not _SOC.match(soc):
            raise AtcError(f"E10001: Value [{soc}] for parameter [--soc_version] is invalid.")
        return soc

    def _compile_operators(self, json_path: str) -> Path:
        for name in ("model", "framework"):
            if name in self.flags:
                raise AtcError(f"E10009: [--singleop] and [--{name}] exclude each other.")
        output = Path(_required(self.flags, "output"))
        try:
            compile_operators(Path(json_path), output, self._soc_version())
        except ValueError as error:
            raise AtcError(str(error)) from error
        return output

    def _read(self, path: Path) -> bytes:
        try:
            onnx = path.read_bytes()
        except OSError as error:
            raise AtcError(f"E10410: Cannot open file [{path}]. Reason: {error}") from error
        try:
            self._session = open_session(onnx)
        except Exception as error:
            raise AtcError(f"E16002: Failed to parse the ONNX model [{path}]: {error}") from error
        return onnx

    def _describe(self, onnx: bytes, soc: str) -> OmDescription:
        from onnx import load_from_string

        graph = load_from_string(onnx).graph
        weights = {tensor.name for tensor in graph.initializer}
        makers = {name: (node.name or node.op_type, i)
                  for node in graph.node for i, name in enumerate(node.output)}  # fmt: skip
        inputs = [_input(value) for value in graph.input if value.name not in weights]
        self._apply_shapes(inputs)
        outputs = []
        for value in graph.output:
            node, index = makers.get(value.name, (value.name, 0))
            datatype = ACL_BY_ONNX[value.type.tensor_type.elem_type]
            outputs.append(OmOutput(f"{node}:{index}:{value.name}", datatype))
        kind, keys = self._gear_keys(inputs)
        self._session_outputs = [value.name for value in graph.output]
        device_ms = self.flags.get("simulator_device_ms")
        description = OmDescription(
            soc, kind, inputs, outputs,
            device_ms=None if device_ms is None else float(device_ms),
            weight_bytes=max(64, len(onnx)),
        )  # fmt: skip
        for key in keys:
            description.gears.append(self._gear(inputs, key, kind))
        if kind == "range":
            description.output_shapes = [_shape(value) for value in graph.output]
        self._insert_aipp(description)
        return description

    def _apply_shapes(self, inputs: list[OmInput]) -> None:
        told = parse_shapes(self.flags.get("input_shape", ""))
        by_name = {spec.name: spec for spec in inputs}
        input_format = self.flags.get("input_format", "NCHW")
        for name, axes in told.items():
            if name not in by_name:
                raise AtcError(
                    f"E10016: Opname [{name}] specified in [--input_shape] is not found in the "
                    f"model. Inputs are {sorted(by_name)}."
                )
            spec = by_name[name]
            if len(axes) != len(spec.shape):
                raise AtcError(
                    f"E10010: [--input_shape] of [{name}] has {len(axes)} dims, the model has "
                    f"{len(spec.shape)}."
                )
            spec.shape = [-1 if "~" in axis else int(axis) for axis in axes]
            spec.ranges = [_range(axis) for axis in axes]
        for spec in inputs:
            spec.format = _FORMATS.get(input_format, 2) if len(spec.shape) == 4 else 2
            if not spec.ranges:
                spec.ranges = [_range(str(axis)) for axis in spec.shape]

    def _gear_keys(self, inputs: list[OmInput]) -> tuple[str, list[list[int]]]:
        flags = self.flags
        asked = [
            name for name in ("dynamic_batch_size", "dynamic_image_size", "dynamic_dims")
            if flags.get(name)
        ]  # fmt: skip
        if len(asked) > 1:
            raise AtcError(f"E10009: {', '.join(f'[--{name}]' for name in asked)} exclude each "
                           "other.")  # fmt: skip
        has_unknown = any(-1 in spec.shape for spec in inputs)
        if not asked:
            return ("range", []) if has_unknown else ("static", [[]])
        name = asked[0]
        if not has_unknown:
            raise AtcError(f"E10047: [--{name}] needs -1 axes in [--input_shape].")
        if name == "dynamic_batch_size":
            keys = [[batch] for batch in parse_gears(flags[name], name)[0]]
            kind = "batch"
        elif name == "dynamic_image_size":
            keys, kind = parse_gears(flags[name], name), "hw"
        else:
            if flags.get("input_format", "NCHW") != "ND":
                raise AtcError("E10050: [--dynamic_dims] needs [--input_format=ND].")
            keys, kind = parse_gears(flags[name], name), "dims"
        if not 2 <= len(keys) <= _MAX_GEARS:
            raise AtcError(f"E10042: [--{name}] has {len(keys)} gears; 2 to {_MAX_GEARS} allowed.")
        return kind, keys

    def _gear(self, inputs: list[OmInput], key: list[int], kind: str) -> OmGear:
        values = iter(key)
        dims: list[list[int]] = []
        for spec in inputs:
            if kind != "dims":
                values = iter(key)
            dims.append([_next(values, key) if axis == -1 else axis for axis in spec.shape])
        told = [length for shape in dims for length in shape] if kind == "dims" else key
        return OmGear(told, dims, self._trial(inputs, dims))

    def _trial(self, inputs: list[OmInput], dims: list[list[int]]) -> list[list[int]]:
        """Shapes of the outputs, by running the model once."""
        feeds = {
            spec.name: np.zeros(shape, NUMPY_BY_ACL[spec.datatype])
            for spec, shape in zip(inputs, dims, strict=True)
        }
        try:
            results = self._session.run(self._session_outputs, feeds)
        except Exception as error:
            raise AtcError(f"E19010: Failed to infer shapes for {dims}: {error}") from error
        return [list(result.shape) for result in results]

    def _insert_aipp(self, description: OmDescription) -> None:
        config = self.flags.get("insert_op_conf")
        if not config:
            return
        if self.flags.get("dynamic_dims"):
            raise AtcError("E10009: [--dynamic_dims] and [--insert_op_conf] exclude each other.")
        try:
            configs = parse_aipp(Path(config).read_text())
        except OSError as error:
            raise AtcError(f"E10410: Cannot open file [{config}].") from error
        for rank, settings in configs.items():
            if not 0 <= rank < len(description.inputs) or len(description.inputs[rank].shape) != 4:
                raise AtcError(f"E10045: related_input_rank {rank} is no image input of the model.")
            if description.kind == "range":
                raise AtcError("E10046: AIPP before dynamic shapes is not simulated.")
            _add_aipp(description, rank, settings)


def _add_aipp(description: OmDescription, rank: int, settings: dict[str, str]) -> None:
    spec = description.inputs[rank]
    spec.model_shape = list(spec.shape)
    spec.aipp, spec.datatype, spec.format = settings, ACL_BY_ONNX[2], _FORMATS["NHWC"]
    if spec.has_dynamic_aipp:
        spec.shape = [spec.shape[0], -1, -1, -1]  # the image may have any size
        return
    params = aipp.from_config(settings)
    spec.shape = _image_shape(spec.shape, params)
    for gear in description.gears:
        gear.inputs[rank] = _image_shape(gear.inputs[rank], params)


def _image_shape(shape: list[int], params: aipp.AippParams) -> list[int]:
    """Of the image for an input of `[n, c, h, w]`; as configured, or else of the same size."""
    count, _, height, width = shape
    size = (params.height or height, params.width or width)
    return [count, *params.image_dims(*size)]


def _next(values: Any, key: list[int]) -> int:
    try:
        return int(next(values))
    except StopIteration:
        raise AtcError(f"E10046: gear {key} has fewer numbers than there are -1 axes.") from None


def _range(axis: str) -> list[int]:
    if "~" in axis:
        low, high = axis.split("~")
        return [int(low), int(high)]
    return [0, -1] if axis == "-1" else [int(axis), int(axis)]


def _shape(value: Any) -> list[int]:
    return [
        axis.dim_value if axis.HasField("dim_value") else -1
        for axis in value.type.tensor_type.shape.dim
    ]


def _input(value: Any) -> OmInput:
    return OmInput(value.name, ACL_BY_ONNX[value.type.tensor_type.elem_type], _shape(value))


def compile_model(*arguments: str) -> Path:
    """Compile in this process; for tests and examples.

    Raises:
        AtcError: as atc would print it.
    """
    return Compiler(parse_flags(list(arguments))).run()


def main() -> NoReturn:
    """The command."""
    if "--help" in sys.argv[1:]:
        print(__doc__, "\nFlags: " + " ".join(f"--{name}" for name in sorted(_FLAGS)))  # noqa: T201
        sys.exit(0)
    print("ATC start working now, please wait for a moment.")  # noqa: T201 - it is a command
    try:
        compile_model(*sys.argv[1:])
    except AtcError as error:
        print("ATC run failed, Please check the detail log, Try 'atc --help' for more "  # noqa: T201
              "information")  # fmt: skip
        print(error)  # noqa: T201
        sys.exit(255)
    print("ATC run success, welcome to the next use.")  # noqa: T201
    sys.exit(0)


if __name__ == "__main__":
    main()
