"""The `acl` module of the simulator, put together."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from npuserve.testing.simulator import (
    blas,
    core,
    himpi_decode,
    himpi_encode,
    himpi_system,
    himpi_vpc,
    mdl_aipp,
    mdl_describe,
    mdl_load,
    mdl_run,
    media_desc,
    media_image,
    media_jpeg,
    media_video,
    op_run,
    rt_device,
    rt_memory,
    rt_stream,
    util,
)
from npuserve.testing.simulator.binding import ENTRIES, build_module

# Functions that wait for other threads must not hold the simulator's lock as entries do.
_PLAIN: dict[str, Any] = {
    "acl.rt.process_report": rt_stream.process_report,
    "acl.util.start_thread": util.start_thread,
    "acl.util.stop_thread": util.stop_thread,
}
_PARTS = (
    core,
    rt_device,
    rt_memory,
    rt_stream,
    mdl_describe,
    mdl_load,
    mdl_run,
    mdl_aipp,
    op_run,
    blas,
    himpi_decode,
    himpi_encode,
    himpi_system,
    himpi_vpc,
    media_desc,
    media_image,
    media_jpeg,
    media_video,
    util,
)


def fill(module: ModuleType) -> None:
    """Make `module` the simulated `acl`."""
    build_module(module)
    for name, function in _PLAIN.items():
        _, part, last = name.split(".")
        setattr(getattr(module, part), last, function)


def function_names() -> set[str]:
    """Full names of all functions there are."""
    return {*ENTRIES, *_PLAIN}
