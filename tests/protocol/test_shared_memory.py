"""Registered system shared-memory regions."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from npuserve.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from npuserve.protocol.shared_memory import SharedMemoryRegistry

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def path() -> Iterator[Path]:
    """A shared-memory object of 64 bytes: 0, 1, 2 and so on."""
    path = Path("/dev/shm", f"npuserve_test_{uuid.uuid4().hex}")
    path.write_bytes(bytes(range(64)))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def registry(path: Path) -> Iterator[SharedMemoryRegistry]:
    """A registry with the object registered from byte 16 on as `r`."""
    registry = SharedMemoryRegistry()
    registry.register_system("r", f"/{path.name}", 16, 48)
    yield registry
    registry.close()


def test_read_counts_from_the_regions_offset(registry: SharedMemoryRegistry) -> None:
    """The offsets of region and request add up."""
    assert bytes(registry.read("r", 4, 3)) == bytes([20, 21, 22])


def test_write_reaches_the_object(registry: SharedMemoryRegistry, path: Path) -> None:
    """An output is visible to the client at once."""
    place = registry.acquire("r", 8, 4)
    place.write("y", b"abcd")
    place.release()
    assert path.read_bytes()[24:28] == b"abcd"


def test_an_output_that_does_not_fit_names_both_sizes(registry: SharedMemoryRegistry) -> None:
    """Nothing is written then."""
    place = registry.acquire("r", 0, 8)
    with pytest.raises(InternalError, match=r"'y' \(8 bytes\) should be at least 16 bytes"):
        place.write("y", bytes(16))
    place.release()


def test_a_truncated_object_is_an_error(registry: SharedMemoryRegistry, path: Path) -> None:
    """A client that makes its object shorter gets an error, the server goes on."""
    os.truncate(path, 20)
    with pytest.raises(InternalError, match="shorter than when it was registered"):
        registry.read("r", 0, 16)
    place = registry.acquire("r", 0, 16)
    with pytest.raises(InternalError, match="shorter than when it was registered"):
        place.write("y", bytes(16))
    place.release()
    assert path.stat().st_size == 20


@pytest.mark.parametrize(
    ("offset", "size", "text"),
    [
        (48, 1, "Invalid offset for"),
        (40, 9, r"Invalid offset \+ byte size"),
        (-1, 1, "offset"),
        (0, 0, r"Invalid offset \+ byte size"),
        (0, -1, r"Invalid offset \+ byte size"),
    ],
)
def test_places_outside_of_the_region_are_refused(
    registry: SharedMemoryRegistry, offset: int, size: int, text: str
) -> None:
    """Neither reading nor writing leaves the region."""
    with pytest.raises(InvalidArgumentError, match=text):
        registry.read("r", offset, size)
    with pytest.raises(InvalidArgumentError, match=text):
        registry.acquire("r", offset, size)


def test_a_name_is_registered_once(registry: SharedMemoryRegistry, path: Path) -> None:
    """The second registration is refused and changes nothing."""
    with pytest.raises(AlreadyExistsError, match="shared memory region 'r' already in manager"):
        registry.register_system("r", path.name, 0, 8)
    (region,) = registry.system_status("r")
    assert (region.name, region.offset, region.byte_size) == ("r", 16, 48)


def test_a_region_in_use_is_removed_after_its_last_user(registry: SharedMemoryRegistry) -> None:
    """It stays visible and writable until then."""
    place = registry.acquire("r", 0, 8)
    registry.unregister_system("r")
    assert len(registry.system_status()) == 1
    place.write("y", b"12345678")
    place.release()
    place.release()
    assert registry.system_status() == []


def test_unregister_without_a_name_empties_the_registry(registry: SharedMemoryRegistry) -> None:
    """An unknown name is no error."""
    registry.unregister_system("other")
    assert len(registry.system_status()) == 1
    registry.unregister_system()
    assert registry.system_status() == []


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("/absent_object", "Unable to open shared memory region: '/absent_object'"),
        ("///", "invalid shm key"),
        ("..", "invalid shm key"),
        ("a/../../etc/passwd", "Unable to open"),
        ("\ud800", "Unable to open"),
        ("/triton_python_backend_shm_region_1", "reserved prefix"),
    ],
)
def test_bad_keys_are_refused(key: str, text: str) -> None:
    """No key leads out of the shared-memory directory."""
    with pytest.raises(InvalidArgumentError, match=text):
        SharedMemoryRegistry().register_system("r", key, 0, 1)


def test_a_region_beyond_its_object_is_refused(path: Path) -> None:
    """Offset and size must lie within the object, and there is no region of no bytes."""
    for offset, byte_size in ((60, 5), (0, 0), (64, 0), (0, 2**64 - 1), (2**64 - 1, 1)):
        with pytest.raises(InvalidArgumentError, match=r"failed to register .*'r': invalid args"):
            SharedMemoryRegistry().register_system("r", path.name, offset, byte_size)


def test_an_object_may_have_several_regions(registry: SharedMemoryRegistry, path: Path) -> None:
    """Each stays when another one goes."""
    registry.register_system("s", path.name, 3, 8)
    registry.unregister_system("r")
    assert bytes(registry.read("s", 0, 2)) == bytes([3, 4])


def test_unknown_regions_are_named(registry: SharedMemoryRegistry) -> None:
    """Use and status of an unknown region are NOT_FOUND."""
    with pytest.raises(NotFoundError, match="Unable to find shared memory region: 'x'"):
        registry.read("x", 0, 1)
    with pytest.raises(NotFoundError, match="Unable to find system shared memory region: 'x'"):
        registry.system_status("x")
    with pytest.raises(NotFoundError, match="Unable to find cuda shared memory region: 'x'"):
        registry.cuda_status("x")
    with pytest.raises(NotFoundError, match="registered as system shared memory, not CUDA"):
        registry.cuda_status("r")


def test_cuda_regions_are_refused(registry: SharedMemoryRegistry) -> None:
    """There is no CUDA device here; what is wrong with the name is told first, as in Triton."""
    with pytest.raises(InvalidArgumentError, match="GPUs not supported"):
        registry.register_cuda("g")
    with pytest.raises(InvalidArgumentError, match="'region name' is necessary to register cuda"):
        registry.register_cuda("")
    with pytest.raises(AlreadyExistsError, match="'r' already in manager"):
        registry.register_cuda("r")


def test_a_disabled_registry_still_answers_status() -> None:
    """Everything else names the flag."""
    registry = SharedMemoryRegistry(enabled=False)
    assert registry.system_status() == []
    with pytest.raises(UnsupportedError, match="--allow-client-shm=true"):
        registry.register_system("r", "k", 0, 1)
    with pytest.raises(UnsupportedError, match="--allow-client-shm=true"):
        registry.read("r", 0, 1)
