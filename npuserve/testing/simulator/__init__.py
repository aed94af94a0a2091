"""A simulated machine with Ascend cards: `acl`, `ais_bench`, `atc` and `npu-smi` stand-ins.

As strict as the real runtime: it refuses wrong pointers, sizes, contexts and descriptors, use
after free and double free with the return codes of the real one, models the time of copies and
compute, fails calls on demand and tells what leaked. Models are ONNX models in a stand-in file
that the simulated `atc` makes; onnxruntime executes them.

    with simulate(cards=2) as machine:
        import acl
        ...
    assert not machine.leaks()

    options.py    the machine          binding.py   what all calls have in common
    clock.py      real or modelled     core.py rt_*.py mdl_*.py util.py
    memory.py     device and host        the functions of `acl`
    device.py     engines, streams     om_file.py engine.py aipp.py   the model file, running it
    op_file.py op_kernels.py op_run.py blas.py   single operators and the functions for them
    media_*.py himpi_*.py   `acl.media` and `acl.himpi`: pictures and video
    pictures.py image_files.py video_stream.py   their pixels, files and streams
    runtime.py    a process's state    atc*.py npu_smi.py ais_bench.py   the other stand-ins
    telemetry.py  numbers for npu-smi    __main__.py   a program on the machine
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.backends.acl import library
from npuserve.server import devices
from npuserve.temporary import make_folder
from npuserve.testing.simulator import runtime as runtime_module
from npuserve.testing.simulator.options import VARIABLE, SimulatorOptions

if TYPE_CHECKING:
    from npuserve.testing.simulator.runtime import Runtime

__all__ = ["SimulatorOptions", "install", "simulate"]

_HERE = Path(__file__).parent
_PYTHON = "NPUSERVE_SIMULATOR_PYTHON"  # what the commands in bin/ run with
_VARIABLES = (VARIABLE, _PYTHON, "PYTHONPATH", "PATH")
_MODULES = ("acl", "ais_bench", "ais_bench.infer", "ais_bench.infer.interface")


def install(cards: int = 1, options: SimulatorOptions | None = None) -> Runtime:
    """Make this process and its children see simulated cards, until the process ends.

    Args:
        cards: number of cards.
        options: more about the machine; its `cards` is not used. Default: what the environment
            says, such as NPUSERVE_SIMULATOR='{"device_ms": 5, "trace_file": "/tmp/{pid}.json"}'.

    Raises:
        RuntimeError: the real `acl` is imported already.
        InternalError: there is no folder for temporary files.
    """
    settings = changed(options or SimulatorOptions.from_environment(), cards=cards)
    if not settings.state_dir:
        directory = str(make_folder("npuserve-simulator-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        settings = changed(settings, state_dir=directory)
    _set_environment(settings)
    devices.forget()
    if str(_HERE / "site") not in sys.path:
        sys.path.insert(0, str(_HERE / "site"))
    module = importlib.import_module("acl")
    if Path(module.__file__ or "").parent != _HERE / "site":
        raise RuntimeError(f"the real acl is there: {module.__file__}")
    return runtime_module.current()


def _set_environment(options: SimulatorOptions) -> None:
    environment = os.environ
    environment[VARIABLE] = options.to_environment()
    environment[_PYTHON] = sys.executable
    package_root = str(_HERE.parents[2])
    environment["PYTHONPATH"] = _prepended(
        environment.get("PYTHONPATH", ""), str(_HERE / "site"), package_root
    )
    environment["PATH"] = _prepended(environment.get("PATH", ""), str(_HERE / "bin"))


def _prepended(path: str, *entries: str) -> str:
    others = [entry for entry in path.split(os.pathsep) if entry and entry not in entries]
    return os.pathsep.join([*entries, *others])


@contextmanager
def simulate(cards: int = 1, **options: Any) -> Iterator[Runtime]:
    """A simulated machine for the length of a `with` block (or a test); see `SimulatorOptions`.

    Everything is put back afterwards; what leaked can still be asked.
    """
    environment = {name: os.environ.get(name) for name in _VARIABLES}
    path = list(sys.path)
    former = runtime_module.replace(None)
    try:
        yield install(cards, SimulatorOptions(**options))
    finally:
        library.shutdown()
        runtime_module.replace(former)
        for name in _MODULES:
            sys.modules.pop(name, None)
        sys.path[:] = path
        for variable, value in environment.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        devices.forget()
