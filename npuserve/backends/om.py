"""The om backend: serves models compiled for Ascend NPUs (`model.om`).

Parameters in config.pbtxt:

    engine          "acl" (default) or "ais_bench"
    pipeline_depth  executions in flight per instance, 2 by default: the next one is copied while
                    this one computes (acl)
    aicore_num      "cube|vector": AI cores an instance may use, such as "12|24" (acl)
    aipp_…          settings of dynamic AIPP, see acl/aipp.py (acl)
    mode, custom_sizes, gears   see ais_bench.py (ais_bench)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npuserve.backends.acl.aipp import aipp_parameters
from npuserve.backends.acl.library import load_library
from npuserve.backends.acl.runner import ModelRunner, RunnerOptions
from npuserve.backends.ais_bench import AisBenchInstance, complete_from_session
from npuserve.backends.base import Backend, BackendModelContext
from npuserve.backends.model_signature import complete_config, default_max_batch_size
from npuserve.backends.npu_instance import NpuInstance
from npuserve.backends.npu_signature import (
    complete_scheduler,
    default_batch,
    is_complete,
    refuse_batch_tensors,
    signature_of,
)
from npuserve.errors import InvalidConfigError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from npuserve.backends.base import ModelInstance

_DEFAULT_FILENAME = "model.om"


class OmBackend(Backend):
    """See the module."""

    def auto_complete(self, context: BackendModelContext) -> None:
        """See `Backend.auto_complete`. Loads the file unless the configuration is complete."""
        path = model_path(context)
        if is_complete(context.config):
            complete_scheduler(context.config)
            return
        # Instances have no places yet.
        device_id = next((card for g in context.config.instance_group for card in g.gpus), 0)
        if engine_of(context) == "ais_bench":
            complete_from_session(context, path, device_id)
        else:
            complete_from_file(context, path, device_id)

    def load(self, context: BackendModelContext) -> Sequence[ModelInstance]:
        """See `Backend.load`."""
        path = model_path(context)
        aipp = aipp_parameters(context.parameters)
        if engine_of(context) == "ais_bench":
            refuse_batch_tensors(context.config, "engine 'ais_bench'")
            if aipp:
                raise InvalidConfigError.of_parameter(
                    min(aipp),
                    f"parameter '{min(aipp)}' of model '{context.name}' needs engine 'acl': "
                    "ais_bench sets no dynamic AIPP",
                )
            return [
                AisBenchInstance(context, path, placement.device_id)
                for placement in context.placements
            ]
        load_library()  # a machine without CANN is told before threads start
        depth = positive_number(context.parameters, "pipeline_depth", 2)
        cube, vector = parse_cores(context.parameters.get("aicore_num", ""))
        return [
            NpuInstance(
                context, path, [RunnerOptions(placement.device_id, depth, cube, vector, aipp)]
            )
            for placement in context.placements
        ]


def model_path(context: BackendModelContext) -> Path:
    """The `.om` file: the configured name, else model.om, else the only one there is.

    Raises:
        NotFoundError: none, or several.
    """
    directory = context.version_dir
    name = context.config.default_model_filename or _DEFAULT_FILENAME
    path = directory / name
    if path.is_file():
        return path
    found = sorted(directory.glob("*.om"))
    # atc may append the host to the name it was given: model_linux_x86_64.om.
    if len(found) == 1 and not context.config.default_model_filename:
        return found[0]
    there = ", ".join(file.name for file in found) or "no .om file at all"
    raise NotFoundError(f"'{name}' is not in '{directory}' (there is {there})")


def engine_of(context: BackendModelContext) -> str:
    """Which library runs the model."""
    engine = context.parameters.get("engine") or context.backend_options.get("engine", "acl")
    if engine not in ("acl", "ais_bench"):
        raise InvalidConfigError.of_parameter(
            "engine",
            f"parameter 'engine' of model '{context.name}' is '{engine}'; acl and ais_bench exist",
        )
    return engine


def complete_from_file(context: BackendModelContext, path: Path, device_id: int) -> None:
    """Fill the configuration from a compiled model.

    The model is loaded for it, as the dims of gears are known to the loaded model only.
    """
    default = default_max_batch_size(context.backend_options)
    options = RunnerOptions(device_id, depth=1, aipp=aipp_parameters(context.parameters))
    with ModelRunner(load_library(), path, options) as runner:
        complete_config(
            context.config,
            signature_of(runner, context.config),
            default_batch(runner, default),
        )


def positive_number(parameters: Mapping[str, str], name: str, default: int) -> int:
    """A parameter that counts something.

    Raises:
        InvalidConfigError: no number above 0.
    """
    text = parameters.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise InvalidConfigError.of_parameter(
            name, f"parameter '{name}' is '{text}'; a number above 0 is expected"
        )
    return int(text)


def parse_cores(text: str) -> tuple[int, int]:
    """(cube, vector) of "cube|vector"; 0 for a side left empty.

    Raises:
        InvalidConfigError: another form.
    """
    if not text:
        return 0, 0
    cube, bar, vector = text.partition("|")
    sides = [side.strip() for side in (cube, vector)]
    if not all(side == "" or side.isdecimal() for side in sides) or not (bar or cube.strip()):
        raise InvalidConfigError.of_parameter(
            "aicore_num", f"'{text}' is no core limit; write cube|vector, such as 12|24"
        )
    return int(sides[0] or 0), int(sides[1] or 0)
