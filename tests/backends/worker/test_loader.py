"""The private namespace of a model that is executed in a thread."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from npuserve.backends.worker.loader import PrivateNamespace


def _write(directory: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return directory / "model.py"


@pytest.mark.parametrize(
    "statement",
    [
        "import helper; VALUE = helper.VALUE",
        "from helper import VALUE",
        "from .helper import VALUE",
        "import package.inner; VALUE = package.inner.VALUE",
        "from package import inner; VALUE = inner.VALUE",
        "from package.inner import VALUE as VALUE",
        "import package.inner as short; VALUE = short.VALUE",
        "import importlib; VALUE = importlib.import_module('helper').VALUE",
        "import importlib.util as u, importlib; VALUE = importlib.import_module('helper').VALUE",
        "from importlib import import_module as i; VALUE = i('package.inner').VALUE",
        "from importlib import import_module as i; VALUE = i('.helper', __package__).VALUE",
        "from importlib import import_module as i; VALUE = i('math') and i('helper').VALUE",
    ],
)
def test_import_forms(tmp_path: Path, statement: str) -> None:
    """Every form of import finds the file beside the model."""
    path = _write(
        tmp_path,
        {
            "model.py": statement,
            "helper.py": "VALUE = 7",
            "package/__init__.py": "",
            "package/inner.py": "from helper import VALUE",
        },
    )
    namespace = PrivateNamespace(str(path), ModuleType("pb"))
    assert namespace.load().VALUE == 7
    namespace.unload()


def test_own_files_win_over_installed_modules_and_stay_private(tmp_path: Path) -> None:
    """A json.py beside the model is the model's json, and nobody else's."""
    import json

    path = _write(tmp_path, {"model.py": "import json, math\n", "json.py": "VALUE = 1"})
    namespace = PrivateNamespace(str(path), ModuleType("pb"))
    module = namespace.load()
    assert module.json.VALUE == 1
    assert module.math is sys.modules["math"]
    assert sys.modules["json"] is json
    namespace.unload()


def test_each_model_gets_its_own_helper_module(tmp_path: Path) -> None:
    """triton_python_backend_utils is that of the instance, in helpers too."""
    path = _write(
        tmp_path,
        {
            "model.py": "import helper, triton_python_backend_utils as pb",
            "helper.py": "import triton_python_backend_utils as pb",
        },
    )
    for _ in range(2):
        bound = ModuleType("bound")
        namespace = PrivateNamespace(str(path), bound)
        module = namespace.load()
        assert module.pb is bound
        assert module.helper.pb is bound
        namespace.unload()
