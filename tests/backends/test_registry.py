"""Backends are found by name."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from npuserve.backends import registry
from npuserve.backends.identity import IdentityBackend
from npuserve.backends.registry import BackendRegistry, import_runtime
from npuserve.errors import InvalidArgumentError, UnavailableError


def test_a_backend_is_made_once() -> None:
    """All models of a server share the object."""
    backends = BackendRegistry()
    assert isinstance(backends.get("identity"), IdentityBackend)
    assert backends.get("identity") is backends.get("identity")
    assert set(backends.loaded()) == {"identity"}


def test_a_platform_names_its_backend() -> None:
    """`platform: "onnxruntime_onnx"` is the onnxruntime backend."""
    backends = BackendRegistry()
    assert backends.get("onnxruntime_onnx") is backends.get("onnxruntime")


def test_given_backends_come_first() -> None:
    """An embedding program may bring its own, also under a known name."""
    own = IdentityBackend()
    assert BackendRegistry({"python": own}).get("python") is own


def test_an_unknown_backend_names_the_known_ones() -> None:
    """Triton's sentence, then what there is and what to do."""
    with pytest.raises(InvalidArgumentError) as caught:
        BackendRegistry().get("tensorrt")
    text = str(caught.value)
    assert text.startswith("unable to find backend library for backend 'tensorrt'")
    assert "identity" in text
    assert "onnxruntime" in text
    assert "ONNX" in text


def test_the_in_tree_backends_are_registered() -> None:
    """As pyproject.toml lists them."""
    names = {"ge", "identity", "npu_ge", "om", "onnxruntime", "python", "pytorch"}
    assert names <= set(BackendRegistry().names())


def test_a_backend_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module at fault is named; nothing else of the server suffers."""
    point = EntryPoint("broken", "npuserve.no_such_module:Backend", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: {"broken": point})
    with pytest.raises(UnavailableError, match="no_such_module"):
        BackendRegistry().get("broken")


def test_a_missing_runtime_says_what_to_install() -> None:
    """The command is part of the error."""
    with pytest.raises(UnavailableError, match="pip install nothing"):
        import_runtime("npuserve_no_such_runtime", "pip install nothing")


def test_heavy_runtimes_are_not_imported_with_their_backend() -> None:
    """Making the onnxruntime backend imports no onnxruntime; a model's load does."""
    code = (
        "import sys; from npuserve.backends.registry import BackendRegistry;"
        "BackendRegistry().get('onnxruntime'); sys.exit('onnxruntime' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
