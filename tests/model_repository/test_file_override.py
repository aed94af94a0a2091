"""Model folders made of the files of a load call: what they may touch."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest

from npuserve.errors import InternalError, InvalidArgumentError
from npuserve.model_repository.file_override import remove_files, write_files


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for /tmp with something of others in it."""
    (tmp_path / "of-others").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_what_was_written_is_removed(temporary: Path) -> None:
    """The folder of the load goes, its neighbours stay."""
    folder = write_files("m", {"1/model.py": b"x"})
    assert (folder / "1/model.py").read_bytes() == b"x"
    remove_files(folder)
    assert [entry.name for entry in temporary.iterdir()] == ["of-others"]


@pytest.mark.parametrize("name", ["", ".", "..", "/", "/etc", "a/b", "../m", "/repo::m"])
def test_a_name_that_is_no_folder_is_refused(temporary: Path, name: str) -> None:
    """Else its files would be written, and later removed, elsewhere."""
    with pytest.raises(InternalError, match="folder"):
        write_files(name, {"1/model.py": b"x"})
    assert [entry.name for entry in temporary.iterdir()] == ["of-others"]


@pytest.mark.parametrize("path", ["../x", "/../x", "1/../../x"])
def test_a_file_that_leaves_the_folder_is_refused(temporary: Path, path: str) -> None:
    """Nothing is left of the attempt."""
    with pytest.raises(InternalError, match="must stay within model directory"):
        write_files("m", {path: b"x"})
    assert [entry.name for entry in temporary.iterdir()] == ["of-others"]


def test_a_leading_slash_means_the_models_folder(temporary: Path) -> None:
    """As in Triton."""
    folder = write_files("m", {"/1/model.py": b"x", "//labels.txt": b"y"})
    assert (folder / "1/model.py").read_bytes() == b"x"
    assert (folder / "labels.txt").read_bytes() == b"y"
    remove_files(folder)


@pytest.mark.parametrize("path", ["", "1", "1/x/y", "a" * 300, "1/\0"])
def test_a_path_that_no_file_can_have_is_refused(temporary: Path, path: str) -> None:
    """A folder, a file below a file, too long a name, a NUL."""
    for files in ({"1/x": b"x", path: b"x"}, {path: b"x", "1/x": b"x"}):
        with pytest.raises(InvalidArgumentError, match="Invalid file parameter"):
            write_files("m", files)
    assert [entry.name for entry in temporary.iterdir()] == ["of-others"]


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_a_name_that_no_folder_can_have_is_refused(temporary: Path, name: str) -> None:
    """The file system decides."""
    with pytest.raises(InvalidArgumentError, match="invalid model name"):
        write_files(name, {"1/x": b"x"})
    assert [entry.name for entry in temporary.iterdir()] == ["of-others"]


def test_no_other_folder_is_ever_removed(temporary: Path) -> None:
    """Whatever path comes in, and whatever its name."""
    for folder in (temporary / "of-others", temporary / "npuserve-load-1" / "m"):
        folder.mkdir(parents=True, exist_ok=True)
        remove_files(folder)
        assert folder.is_dir()


def test_without_a_folder_for_temporary_files_the_place_to_say_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container whose file system is read-only."""

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(InternalError, match="TMPDIR may name one: No usable"):
        write_files("m", {"1/model.py": b""})
