"""Errors, initialisation and clean-up of the pyACL wrapper."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from npuserve.backends.acl import codes, library
from npuserve.backends.acl.library import AclCallError, load_library, make_error
from npuserve.backends.acl.memory import DeviceBuffer, HostBuffer, StagingBuffer
from npuserve.backends.acl.runtime import Context, Event, Stream
from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NpuserveError,
    UnavailableError,
)
from npuserve.testing.simulator import simulate
from npuserve.testing.simulator.faults import Fault
from npuserve.testing.simulator.runtime import Runtime


@pytest.fixture
def machine() -> Iterator[Runtime]:
    with simulate(cards=2, time="modelled") as runtime:
        yield runtime
        assert runtime.leaks() == []


# Errors.


def test_an_error_says_everything() -> None:
    """Call, code, name, what it was for, what to do, the runtime's own text."""
    error = make_error("acl.rt.malloc", 207001, "EL0004: no\nmemory", "for 64 bytes")
    text = str(error)
    assert text.startswith(
        "acl.rt.malloc failed with 207001 (ACL_ERROR_RT_MEMORY_ALLOCATION) for 64 bytes; "
        "free device memory"
    )
    assert text.endswith("the runtime says: EL0004: no memory")
    assert (error.call, error.ret) == ("acl.rt.malloc", 207001)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (207001, UnavailableError), (207008, UnavailableError), (145013, InvalidArgumentError),
        (145021, InvalidArgumentError), (507015, InternalError), (107002, InternalError),
        (999999, InternalError),
    ],
)  # fmt: skip
def test_codes_become_the_right_errors(code: int, kind: type[NpuserveError]) -> None:
    """Out of resources is unavailable, a missing gear the client's fault, the rest internal."""
    error = make_error("acl.mdl.execute", code, "")
    assert isinstance(error, kind)
    assert isinstance(error, AclCallError)


def test_every_code_has_a_name_in_capitals() -> None:
    """As the header spells them, without their prefix."""
    for code, info in codes.CODES.items():
        assert 100000 <= code < 600000
        assert info.name == info.name.upper()
        assert not info.name.startswith("ACL_")


def test_device_exceptions_are_told_from_others() -> None:
    """After one of them the context has to be made anew."""
    assert codes.is_device_exception(507015)
    assert not codes.is_device_exception(207001)


# Start and end.


def test_without_cann_the_error_says_what_to_do() -> None:
    """It names the script to source and the simulator."""
    with pytest.raises(UnavailableError, match=r"set_env\.sh.*--npu-simulator"):
        load_library()


def test_a_broken_cann_is_told_from_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader's own message is in the text."""
    (tmp_path / "acl.py").write_text("raise ImportError('libascendcl.so: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnavailableError, match=r"libascendcl\.so"):
        library.import_acl()
    (tmp_path / "acl.py").write_text("import no_such_dependency")
    with pytest.raises(UnavailableError, match="no_such_dependency"):
        library.import_acl()


def test_initialised_once(machine: Runtime) -> None:
    """However often it is asked for; finalized by an explicit call."""
    assert load_library() is load_library()
    assert machine.calls["acl.init"] == 1
    library.shutdown()
    library.shutdown()
    assert machine.calls["acl.finalize"] == 1
    assert load_library() is not None
    assert machine.calls["acl.init"] == 2


def test_what_others_initialised_is_not_finalized(machine: Runtime) -> None:
    """User code was first; it goes on after npuserve is done."""
    acl = importlib.import_module("acl")
    assert acl.init() == 0
    with Context(load_library(), 0):
        pass
    library.shutdown()
    assert machine.calls["acl.finalize"] == 0
    assert acl.rt.set_device(0) == 0
    assert acl.rt.reset_device(0) == 0
    assert acl.finalize() == 0


def test_a_failed_init_is_tried_again_next_time(machine: Runtime) -> None:
    """The first load fails, the next one works."""
    machine.faults.append(Fault("acl.init", code=500000))
    with pytest.raises(AclCallError, match=r"acl\.init failed with 500000"):
        load_library()
    assert load_library() is not None


def test_stub_libraries_are_explained(machine: Runtime) -> None:
    """100039: the path finds the compiler's stubs first."""
    machine.faults.append(Fault("acl.init", code=100039))
    with pytest.raises(AclCallError, match="LD_LIBRARY_PATH"):
        load_library()


def test_finalized_at_exit() -> None:
    """A process that only loads the runtime leaves nothing."""
    code = "from npuserve.backends.acl.library import load_library; load_library()"
    with simulate() as machine:
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert machine.calls["acl.init"] == 0
    assert result.stderr == ""


# Resources.


def test_resources_are_given_back_once(machine: Runtime) -> None:
    """Closing twice is harmless."""
    with Context(load_library(), 1) as context:
        free, total = context.memory()
        resources = [
            Stream(load_library()), Event(load_library()), DeviceBuffer(load_library(), 64),
            HostBuffer(load_library(), 64), StagingBuffer(load_library(), 64),
        ]  # fmt: skip
        assert context.memory()[0] < free <= total
        for resource in resources:
            resource.close()
            resource.close()
        assert context.memory() == (free, total)


def test_memory_of_cards_without_hbm() -> None:
    """DDR is asked when HBM has no answer."""
    with (
        simulate(soc_name="Ascend310P3", memory_bytes=1 << 20),
        Context(load_library(), 0) as context,
    ):
        assert context.memory() == (1 << 20, 1 << 20)


def test_a_card_that_is_not_there_is_named(machine: Runtime) -> None:
    """With those that are."""
    with pytest.raises(InvalidArgumentError, match="no NPU 2; cards there are: 0, 1"):
        Context(load_library(), 2)


def test_a_staging_buffer_grows_and_survives_a_failure(machine: Runtime) -> None:
    """Out of memory while growing leaves nothing behind, and the next attempt works."""
    with Context(load_library(), 0):
        staging = StagingBuffer(load_library(), 64)
        assert not staging.reserve(64)
        machine.faults.append(Fault("acl.rt.malloc", code=207001))
        with pytest.raises(AclCallError):
            staging.reserve(100)
        assert staging.reserve(100)
        assert staging.capacity >= 100
        staging.close()


def test_a_release_that_fails_twice_is_an_error(machine: Runtime) -> None:
    """Everything else is given back all the same."""
    with Context(load_library(), 0):
        buffer = DeviceBuffer(load_library(), 64)
        machine.faults.append(Fault("acl.rt.free", code=500000, count=2))
        with pytest.raises(AclCallError, match=r"acl\.rt\.free"):
            buffer.close()
        importlib.import_module("acl").rt.free(buffer.pointer)
