"""Backends by name, found through the entry-point group `npuserve.backends`.

The in-tree backends are registered the same way as third-party ones. A backend's module is
imported when the first model asks for it, and a module imports its runtime (onnxruntime, torch,
acl) no earlier than in `load` or `auto_complete`: a server without that runtime starts, and the
models of other backends are served.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from npuserve.errors import InvalidConfigError, UnavailableError

if TYPE_CHECKING:
    from types import ModuleType

    from npuserve.backends.base import Backend

ENTRY_POINT_GROUP = "npuserve.backends"

BACKEND_BY_PLATFORM: dict[str, str] = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_aoti": "pytorch",
    "pytorch_libtorch": "pytorch",
}

# Backends of Triton that people's repositories name, and what to do about them here.
_ADVICE = {
    "dali": "move the preprocessing into a python model",
    "openvino": 'convert the model to ONNX and use backend: "onnxruntime"',
    "tensorflow": 'convert the model to ONNX (tf2onnx) and use backend: "onnxruntime"',
    "tensorrt": 'export the model to ONNX and use backend: "ge" on an NPU or "onnxruntime"',
    "tensorrtllm": "plans are built for one kind of GPU and run nowhere else",
    "vllm": "serve the model from a decoupled python model",
}


class BackendRegistry:
    """The backends of one server: each is made once, on first use. Thread-safe.

    Args:
        backends: ready-made ones by name; they take precedence over entry points (for
            embedding and for tests).
        directory: holds `<name>/model.py` for backends that are themselves written as a Python
            model (--backend-directory); entry points take precedence.
    """

    def __init__(
        self, backends: dict[str, Backend] | None = None, directory: str | Path = ""
    ) -> None:
        self._backends: dict[str, Backend] = dict(backends or {})
        self._directory = Path(directory) if directory else None
        self._lock = threading.Lock()

    def get(self, name: str) -> Backend:
        """The backend called `name`, or the one for a platform of that name.

        May import a module: not to be called on the event loop.

        Raises:
            InvalidConfigError: there is no such backend; the text names those there are.
            UnavailableError: its module cannot be imported; the text says why.
        """
        name = BACKEND_BY_PLATFORM.get(name, name)
        with self._lock:
            if name not in self._backends:
                self._backends[name] = self._make(name)
            return self._backends[name]

    def loaded(self) -> dict[str, Backend]:
        """The backends made so far, by name."""
        with self._lock:
            return dict(self._backends)

    def names(self) -> list[str]:
        """Every name `get` knows, platforms left out."""
        return sorted({*_entry_points(), *self._backends})

    def _make(self, name: str) -> Backend:
        point = _entry_points().get(name)
        if point is None:
            return self._python_based(name)
        try:
            backend: Backend = point.load()()
        except ImportError as error:
            raise UnavailableError(
                f"backend '{name}' ({point.value}) cannot be imported: {error}"
            ) from error
        return backend

    def _python_based(self, name: str) -> Backend:
        """A backend that is a model.py; its models need none of their own."""
        file = self._directory / name / "model.py" if self._directory else None
        if file is None or Path(name).name != name or not file.is_file():
            raise InvalidConfigError(_unknown(name), "backend")
        from npuserve.backends.python import PythonBackend

        return PythonBackend(file)


def import_runtime(module: str, install: str) -> ModuleType:
    """Import the runtime a backend stands on.

    Args:
        install: what the user has to do where it is missing, such as
            `pip install 'npuserve[onnxruntime]'`.

    Raises:
        UnavailableError: it is not installed, or broken.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UnavailableError(f"{module} cannot be imported ({error}): {install}") from error


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _unknown(name: str) -> str:
    # Triton's sentence first: scripts and people search for it.
    text = (
        f"unable to find backend library for backend '{name}', try specifying runtime on the "
        f"model configuration. Known backends: {', '.join(sorted(_entry_points()))}"
    )
    advice = _ADVICE.get(name, f"a package that adds it has to register '{ENTRY_POINT_GROUP}'")
    return f"{text}; for '{name}': {advice}"
