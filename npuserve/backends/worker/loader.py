"""Importing model.py: plainly in a worker process, into a private namespace in the server's own.

Both ways `import helper` and `from .helper import x` find files beside model.py.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, ClassVar, cast

from npuserve.backends.worker import pb_utils as helpers
from npuserve.backends.worker.pb_tensor import TritonModelException
from npuserve.backends.worker.pb_utils import ALIASES


def import_plainly(path: str, pb_utils: ModuleType) -> ModuleType:
    """Import `path` in an interpreter that belongs to this model instance.

    As in Triton, the module's directory and the one above are on sys.path, and the directory is
    the module's package (such as `1.model`), so relative imports work.

    # Differs from Triton: there they come last, and a package that happens to be installed hides
    # a module of the model.
    """
    for name in ALIASES:
        sys.modules[name] = pb_utils
    directory, file = os.path.split(path)
    sys.path[:0] = [directory, os.path.dirname(directory)]
    package = os.path.basename(directory)
    return _load_package_member(package, directory, file)


def _load_package_member(package: str, directory: str, file: str) -> ModuleType:
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [directory]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{os.path.splitext(file)[0]}")


class PrivateNamespace(importlib.abc.MetaPathFinder):
    """The modules beside one model.py, apart from those of every other model in the process.

    A package of a unique name stands for the directory. Code in it gets an `__import__` of its
    own, which looks into the directory first, so two models may both `import utils`, the same of
    `importlib.import_module`, and a `print` of its own. What this cannot separate: sys.path,
    os.environ, the working directory, what is written to sys.stdout itself, and the configuration
    of logging.

    Args:
        printer: `print` of the code in the directory.
    """

    _numbers = itertools.count(1)
    _living: ClassVar[dict[int, PrivateNamespace]] = {}  # by id of their builtins

    def __init__(
        self, path: str, pb_utils: ModuleType, printer: Callable[..., None] = print
    ) -> None:
        self._directory, self._file = os.path.split(path)
        self._package = f"npuserve_model_{next(self._numbers)}"
        self._pb_utils = pb_utils
        self._builtins = dict(vars(builtins), __import__=self._import, print=printer)

    def load(self) -> ModuleType:
        """Import the model's file."""
        self._living[id(self._builtins)] = self
        for name in ALIASES:
            sys.modules.setdefault(name, _FOR_LIBRARIES)
        sys.meta_path.insert(0, self)
        return _load_package_member(self._package, self._directory, self._file)

    def unload(self) -> None:
        """Forget the modules."""
        self._living.pop(id(self._builtins), None)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        prefix = self._package + "."
        for name in list(sys.modules):  # a copy: other threads import meanwhile
            if name == self._package or name.startswith(prefix):
                del sys.modules[name]

    @classmethod
    def pb_utils_of_caller(cls) -> ModuleType:
        """That of the model whose code is running.

        A thread that a library began by itself could be of any model that there is.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            namespace = cls._living.get(id(frame.f_builtins))
            if namespace is not None:
                return namespace._pb_utils
            frame = frame.f_back
        for namespace in tuple(cls._living.values()):
            return namespace._pb_utils
        raise TritonModelException("there is no model to do this for")

    def find_spec(
        self, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of the private package and have it run with the private builtins."""
        if not fullname.startswith(self._package + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _PrivateLoader(fullname, spec.loader.path, self._builtins)
        return spec

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        if level == 0:
            top = name.partition(".")[0]
            if top in ALIASES:
                return self._pb_utils
            if self._has(top):
                module = importlib.import_module(f"{self._package}.{name}")
                if not fromlist:
                    return sys.modules[f"{self._package}.{top}"]
                return builtins.__import__(module.__name__, globals, locals, fromlist, 0)
        module = builtins.__import__(name, globals, locals, fromlist, level)
        if module is not importlib:
            return module
        copy = ModuleType(importlib.__name__, importlib.__doc__)
        vars(copy).update(vars(importlib), import_module=self._import_module)
        return copy

    def _import_module(self, name: str, package: str | None = None) -> ModuleType:
        """See `importlib.import_module`."""
        top = name.partition(".")[0]
        if top in ALIASES:
            return self._pb_utils
        if top and self._has(top):
            return importlib.import_module(f"{self._package}.{name}")
        return importlib.import_module(name, package)

    def _has(self, top: str) -> bool:
        """Whether a top-level module is one of the directory."""
        private = f"{self._package}.{top}"
        if private in sys.modules:
            return True
        return importlib.machinery.PathFinder.find_spec(private, [self._directory]) is not None


class _OfCaller:
    """The port or the host of the model whose code is running.

    Either is found anew at each access, as an attribute of a class or by its own attributes.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: object) -> Any:
        return getattr(PrivateNamespace.pb_utils_of_caller().InferenceRequest, self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__get__(None, None), name)


# What libraries outside the directories of models import; they are shared by models.
_FOR_LIBRARIES = helpers.bind(cast("Any", _OfCaller("_host")), cast("Any", _OfCaller("_port")))


class _PrivateLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, private_builtins: dict[str, Any]) -> None:
        super().__init__(name, path)
        self._builtins = private_builtins

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._builtins
        super().exec_module(module)
