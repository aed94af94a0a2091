"""What counts as a model, a version, a change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from npuserve.errors import InternalError, InvalidArgumentError
from npuserve.model_repository.layout import (
    DUPLICATE,
    ModelDirectory,
    fingerprint,
    scan_repositories,
)


def make_model(repository: Path, name: str, *versions: str) -> Path:
    path = repository / name
    for version in versions or ("1",):
        (path / version).mkdir(parents=True)
        (path / version / "model.py").write_text("x = 1\n")
    (path / "config.pbtxt").write_text('backend: "python"\n')
    return path


def fingerprint_of(path: Path) -> object:
    return fingerprint(ModelDirectory.from_path(path.name, path))


def test_every_folder_with_something_of_a_model_is_one(tmp_path: Path) -> None:
    """Plain files, hidden folders and folders of documents are passed over."""
    make_model(tmp_path, "good")
    (tmp_path / "only_version" / "1").mkdir(parents=True)
    (tmp_path / "only_config").mkdir()
    (tmp_path / "only_config" / "config.pbtxt").touch()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "readme.txt").touch()
    (tmp_path / ".git" / "1").mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    found = scan_repositories([str(tmp_path)])
    assert sorted(found.models) == ["good", "only_config", "only_version"]
    assert found.problems == {}


def test_only_positive_numbers_without_leading_zeros_are_versions(tmp_path: Path) -> None:
    """`-1` is no version, and neither are reserved or hidden folders."""
    path = make_model(tmp_path, "m", "3", "12", "1")
    for name in ("0", "007", "-1", "2x", "warmup", "configs", "..2026", "9" * 30, "\u0663"):
        (path / name).mkdir()
    (path / "5").touch()
    assert ModelDirectory.from_path("m", path).versions == (1, 3, 12)


def test_a_name_in_two_repositories_is_served_from_neither(tmp_path: Path) -> None:
    """The third one of the name does not bring it back."""
    repositories = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for repository in repositories:
        make_model(repository, "twice")
    make_model(repositories[0], "once")
    found = scan_repositories([str(path) for path in repositories])
    assert list(found.models) == ["once"]
    assert found.problems == {"twice": DUPLICATE}


def test_the_same_repository_twice_is_one(tmp_path: Path) -> None:
    """A flag given twice makes no duplicates."""
    make_model(tmp_path, "m")
    assert list(scan_repositories([str(tmp_path)] * 2).models) == ["m"]


def test_a_missing_repository_ends_the_start(tmp_path: Path) -> None:
    """A wrong path must not look like an empty repository."""
    with pytest.raises(InternalError, match="failed to stat file"):
        scan_repositories([str(tmp_path / "nowhere")])
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="not a valid directory"):
        scan_repositories([str(tmp_path / "file")])


def test_links_of_a_kubernetes_volume_are_followed(tmp_path: Path) -> None:
    """config.pbtxt and the version folder are links into a hidden folder."""
    real = tmp_path / "repo" / "m" / "..2026_01"
    (real / "1").mkdir(parents=True)
    (real / "1" / "model.py").touch()
    (real / "config.pbtxt").touch()
    model = real.parent
    (model / "..data").symlink_to("..2026_01")
    (model / "config.pbtxt").symlink_to("..data/config.pbtxt")
    (model / "1").symlink_to("..data/1")
    (tmp_path / "repo" / "linked").symlink_to(model)
    found = scan_repositories([str(tmp_path / "repo")])
    assert {name: entry.versions for name, entry in found.models.items()} == {
        "linked": (1,),
        "m": (1,),
    }
    assert "1/model.py" in fingerprint(found.models["m"]).files


def test_fingerprint_tells_a_change_of_any_file(tmp_path: Path) -> None:
    """Changed, added and removed files count, and the configuration is told from the rest."""
    path = make_model(tmp_path, "m")
    directory = ModelDirectory.from_path("m", path)
    first = fingerprint(directory)
    assert fingerprint(directory) == first
    os.utime(path / "1" / "model.py", ns=(0, 10**18))
    second = fingerprint(directory)
    assert second.config == first.config
    assert second.files != first.files
    os.utime(path / "config.pbtxt", ns=(0, 10**18))
    third = fingerprint(directory)
    assert third.files == second.files
    assert third.config != second.config
    (path / "1" / "weights.bin").touch()
    assert fingerprint(directory) != third


def test_fingerprint_passes_over_what_running_models_write(tmp_path: Path) -> None:
    """Byte code and editor files do not cause a reload, a new version folder does."""
    path = make_model(tmp_path, "m")
    first = fingerprint_of(path)
    (path / "1" / "__pycache__").mkdir()
    (path / "1" / "__pycache__" / "model.cpython-311.pyc").touch()
    (path / "1" / ".model.py.swp").touch()
    assert fingerprint_of(path) == first
    (path / "2").mkdir()
    assert fingerprint_of(path) != first


def test_with_namespaces_a_name_may_be_in_several_repositories(tmp_path: Path) -> None:
    """Ambiguous names get identifiers, and each repository knows its own."""
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    for repository in (first, second):
        make_model(Path(repository), "twice")
    make_model(Path(first), "once")
    found = scan_repositories([first + "/", second], namespaces=True)
    assert sorted(found.models) == [f"{first}::twice", f"{second}::twice", "once"]
    assert found.problems == {}
    assert found.ambiguous == {"twice": (f"{first}::twice", f"{second}::twice")}
    assert found.models["once"].siblings == {"twice": f"{first}::twice"}
    assert found.models[f"{second}::twice"].siblings == {"twice": f"{second}::twice"}


def test_links_that_lead_back_up_are_followed_once(tmp_path: Path) -> None:
    """A fingerprint ends, whatever people link to."""
    path = make_model(tmp_path, "m")
    before = fingerprint(ModelDirectory.from_path("m", path))
    for name in ("a", "b", "c"):
        (path / "1" / name).symlink_to("..")
    assert fingerprint(ModelDirectory.from_path("m", path)).files == before.files


def test_a_folder_that_cannot_be_read_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on its way out, or belong to somebody else."""
    make_model(tmp_path, "bad")
    make_model(tmp_path, "good")
    listing = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == "bad":
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert list(scan_repositories([str(tmp_path)]).models) == ["good"]
