"""A simulated machine, its `acl` and a loaded model for the simulator's own tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.runtime import Runtime
from tests.backends.npu_models import affine, batch_om, compile_om
from tests.testing.simulator.media import Media


@pytest.fixture
def machine() -> Iterator[Runtime]:
    """Two cards of 4 MiB, modelled time."""
    with simulate(cards=2, time="modelled", memory_bytes=4 << 20) as runtime:
        yield runtime


@pytest.fixture
def acl(machine: Runtime) -> Any:
    """The module, initialised, with card 0 set in this thread."""
    module: Any = importlib.import_module("acl")
    assert module.init() == 0
    assert module.rt.set_device(0) == 0
    return module


@pytest.fixture
def media(acl: Any, machine: Runtime) -> Iterator[Media]:
    """A channel of acl.media for image processing; nothing is left at the end."""
    opened = Media(acl)
    yield opened
    opened.close()
    assert machine.leaks() == []


@pytest.fixture
def static_om(tmp_path: Path) -> str:
    """Y = 2 x + 1 for x of [2, 3]."""
    return str(compile_om(affine(tmp_path, [2, 3])) / "1" / "model.om")


@pytest.fixture
def gear_om(tmp_path: Path) -> str:
    """The same for rows of 3, gears 1, 2, 4."""
    return str(batch_om(tmp_path) / "1" / "model.om")


@pytest.fixture
def range_om(tmp_path: Path) -> str:
    """The same for any shape."""
    return str(compile_om(affine(tmp_path, ["n", "l"])) / "1" / "model.om")


class Loaded(SimpleNamespace):
    """A model with datasets, as samples make them."""

    def __init__(self, acl: Any, path: str, input_bytes: int = 0, output_bytes: int = 0) -> None:
        super().__init__()
        self.acl = acl
        self.id, ret = acl.mdl.load_from_file(path)
        assert ret == 0, acl.get_recent_err_msg()
        self.desc = acl.mdl.create_desc()
        assert acl.mdl.get_desc(self.desc, self.id) == 0
        self.inputs, self.input_buffers = self._dataset("input", input_bytes)
        self.outputs, self.output_buffers = self._dataset("output", output_bytes)

    def _dataset(self, direction: str, size: int) -> tuple[int, list[tuple[int, int]]]:
        mdl = self.acl.mdl
        dataset = mdl.create_dataset()
        made = []
        for index in range(getattr(mdl, f"get_num_{direction}s")(self.desc)):
            own = getattr(mdl, f"get_{direction}_size_by_index")(self.desc, index)
            length = own if index or not size else size
            pointer, ret = self.acl.rt.malloc(length, 0)
            assert ret == 0
            buffer = self.acl.create_data_buffer(pointer, length)
            assert mdl.add_dataset_buffer(dataset, buffer) == (dataset, 0)
            made.append((pointer, buffer))
        return dataset, made

    def close(self) -> None:
        for pointer, buffer in self.input_buffers + self.output_buffers:
            assert self.acl.rt.free(pointer) == 0
            assert self.acl.destroy_data_buffer(buffer) == 0
        assert self.acl.mdl.destroy_dataset(self.inputs) == 0
        assert self.acl.mdl.destroy_dataset(self.outputs) == 0
        assert self.acl.mdl.destroy_desc(self.desc) == 0
        assert self.acl.mdl.unload(self.id) == 0
