"""Repositories in object stores: real servers, real client libraries."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from npuserve.errors import InternalError, InvalidArgumentError, NpuserveError
from npuserve.model_repository import (
    ModelDirectory,
    Scan,
    cloud,
    fingerprint,
    load_config,
    release,
    scan,
    select_versions,
)
from npuserve.model_repository.cloud import CloudRepository, close_cloud_repositories
from npuserve.options import ServerOptions
from npuserve.server.core import InferenceServer
from tests.model_repository import stores
from tests.model_repository.stores import Store

asyn = pytest.importorskip("fsspec.asyn")

OPTIONS = ServerOptions()
CONFIG = b'backend: "identity" max_batch_size: 2'


@pytest.fixture(autouse=True)
def kept_filesystems(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """File systems live until the process ends, those of gcsfs without their connections.

    The libraries close connections in finalizers, which would run in whatever test happens to
    collect garbage, and in the wrong thread.
    """
    opened: list[Any] = []

    def open_and_keep(url: str) -> Any:
        opened.append(open_filesystem(url))
        return opened[-1]

    open_filesystem = cloud._open_filesystem
    monkeypatch.setattr(cloud, "_open_filesystem", open_and_keep)
    yield
    for filesystem in opened:
        if type(filesystem).__module__.startswith("gcsfs") and filesystem.session is not None:
            asyn.sync(filesystem.loop, filesystem.session.close)
    _kept.extend(opened)


_kept: list[Any] = []


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    with stores.s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def gs_endpoint() -> Iterator[str]:
    with stores.gs_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def as_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stores.as_server(tmp_path_factory.mktemp("azurite")) as endpoint:
        yield endpoint


@pytest.fixture(params=["s3", "gs", "as"])
def store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Store]:
    """A fresh bucket with one model; its copies go below `tmp_path`."""
    make = {"s3": stores.s3_store, "gs": stores.gs_store, "as": stores.as_store}[request.param]
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_AWS_MOUNT_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("TRITON_GCS_MOUNT_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("TRITON_AZURE_MOUNT_DIRECTORY", str(tmp_path))
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[:60].strip("-")
    store = make(request.getfixturevalue(f"{request.param}_endpoint"), name, monkeypatch)
    store.put("m/config.pbtxt", CONFIG)
    store.put("m/1/data", b"1")
    yield store
    close_cloud_repositories()
    assert not list(tmp_path.glob("npuserve-cloud-*"))


def look(store: Store) -> Scan:
    return scan([store.url], OPTIONS)


def model(store: Store, name: str = "m") -> ModelDirectory:
    return look(store).models[name]


def test_models_are_listed_and_copied(store: Store, tmp_path: Path) -> None:
    """The copy lies where the mount variable says and holds every file."""
    store.put("m/3/deep/weights.bin", b"123")
    store.put("docs/readme.txt", b"x")
    store.put("stray.txt", b"x")
    found = look(store)
    assert list(found.models) == ["m"]
    directory = found.models["m"]
    assert directory.versions == (1, 3)
    assert not directory.path.exists()  # nothing is copied before it is needed
    config = load_config(directory, OPTIONS).config
    assert (config.name, config.max_batch_size) == ("m", 2)
    assert select_versions(config, directory) == [3]
    assert (directory.version_path(3) / "deep" / "weights.bin").read_bytes() == b"123"
    assert directory.path.is_relative_to(tmp_path)
    assert directory.path.name == "m"


class OddBucket:
    """A file system with an object that no client of ours would write."""

    def invalidate_cache(self) -> None:
        """Nothing is kept."""

    def find(self, path: str, **options: Any) -> dict[str, dict[str, Any]]:
        """All objects."""
        names = (
            "m/1/data", "m/1/../../../../escaped", "../n/1/data", "m//escaped", "m/1//data",
            "./1/data", "m/./1/data", "m/1/zero\0byte",
        )  # fmt: skip
        return {f"{path}/{name}": {"type": "file", "size": 1, "mtime": 1} for name in names}


def test_an_object_whose_name_is_no_path_is_not_copied_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who may write into the bucket may not write to this machine's files."""
    monkeypatch.setattr(cloud, "_open_filesystem", lambda _: OddBucket())
    repository = CloudRepository("s3://bucket/models")
    assert repository.refresh() == {"m": {"1/data": ("1", 1)}}
    repository.close()


class SlowBucket:
    """A file system that copies one model when it is told to."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.go_on = threading.Event()

    def invalidate_cache(self) -> None:
        """Nothing is kept."""

    def find(self, path: str, **options: Any) -> dict[str, dict[str, Any]]:
        """All objects."""
        names = ("slow/1/data", "quick/1/data")
        return {f"{path}/{name}": {"type": "file", "size": 1, "mtime": 1} for name in names}

    def get_file(self, remote: str, local: str) -> None:
        """Copy an object."""
        if "/slow/" in remote:
            self.started.set()
            self.go_on.wait()
        Path(local).write_bytes(b"1")


def test_a_model_that_is_being_copied_holds_no_other_one_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another is listed, copied and released meanwhile."""
    bucket = SlowBucket()
    monkeypatch.setattr(cloud, "_open_filesystem", lambda _: bucket)
    repository = CloudRepository("s3://bucket/models")
    repository.refresh()
    slow, quick = repository.local_path("slow"), repository.local_path("quick")

    def serve_the_other() -> None:
        assert set(repository.refresh()) == {"slow", "quick"}
        repository.download("quick", quick)
        assert quick.exists()
        repository.release(quick)
        assert not quick.exists()

    with ThreadPoolExecutor(2) as threads:
        copying = threads.submit(repository.download, "slow", slow)
        bucket.started.wait()
        try:
            threads.submit(serve_the_other).result(timeout=10)
            assert not slow.exists()
        finally:
            bucket.go_on.set()
        copying.result()
    assert slow.exists()
    repository.close()


def test_an_empty_version_folder_is_an_object_with_a_slash(store: Store) -> None:
    """All that an ensemble has."""
    store.put("e/config.pbtxt", b"name: 'e' backend: 'identity'")
    # The emulator of Google's store takes no empty bodies.
    store.put("e/1/", b"-" if store.url.startswith("gs") else b"")
    directory = model(store, "e")
    assert directory.versions == (1,)
    load_config(directory, OPTIONS)
    assert directory.version_path(1).is_dir()


@pytest.mark.parametrize("store", ["s3", "as"], indirect=True)
def test_an_empty_file_is_a_file(store: Store) -> None:
    """Though it looks like an empty folder in some listings."""
    store.put("m/1/marker", b"")
    directory = model(store)
    load_config(directory, OPTIONS)
    assert (directory.version_path(1) / "marker").is_file()


def test_a_change_in_the_store_changes_the_fingerprint(store: Store) -> None:
    """Polling sees changed, added and removed objects, and nothing else."""
    first = fingerprint(model(store))
    assert fingerprint(model(store)) == first
    store.put("m/1/extra.txt", b"x")
    second = fingerprint(model(store))
    assert second != first
    assert second.config == first.config
    store.put("m/1/extra.txt", b"y")  # the same size, and in the same second
    assert fingerprint(model(store)) not in (first, second)
    store.delete("m/1/extra.txt")
    assert fingerprint(model(store)) == first
    store.put("m/config.pbtxt", CONFIG + b" # longer")
    third = fingerprint(model(store))
    assert (third.files, third.config) != (first.files, first.config)
    assert third.files == first.files


def test_a_serving_copy_is_not_changed_by_the_next_one(store: Store) -> None:
    """The old version keeps its files while the new one is loaded, and until it is released."""
    paths = []
    for size in (1, 2, 3):
        store.put("m/1/data", b"x" * size)
        directory = model(store)
        load_config(directory, OPTIONS)
        paths.append(directory.path)
    assert [(path / "1" / "data").read_bytes() for path in paths] == [b"x", b"xx", b"xxx"]
    release(paths[0])
    assert [path.exists() for path in paths] == [False, True, True]


def test_an_unchanged_model_is_copied_once(store: Store) -> None:
    """Loading it again reads the copy that is there."""
    directory = model(store)
    load_config(directory, OPTIONS)
    (directory.path / "mark").touch()
    again = model(store)
    load_config(again, OPTIONS)
    assert again.path == directory.path
    assert (again.path / "mark").exists()


def test_an_object_that_vanishes_while_it_is_copied_fails_the_model(store: Store) -> None:
    """No half copy is taken for the model afterwards."""
    directory = model(store)
    store.delete("m/1/data")
    with pytest.raises(InternalError, match="failed to copy model 'm' from (s3|gs|as)://"):
        load_config(directory, OPTIONS)
    assert not directory.path.exists()


def test_a_repository_that_is_not_there_ends_the_start(store: Store) -> None:
    """A wrong bucket must not look like an empty repository."""
    with pytest.raises(InternalError, match="failed to stat file (s3|gs|as)://"):
        scan([f"{store.url}-nowhere"], OPTIONS)


@pytest.mark.parametrize("store", ["as"], indirect=True)  # the other two check no keys
def test_a_store_that_refuses_the_key_ends_the_start(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the library makes of it, the reason and the repository are named."""
    monkeypatch.setenv("AZURE_STORAGE_KEY", "d3Jvbmc=")
    with pytest.raises(InvalidArgumentError, match="no access to as://.*failed to authenticate"):
        scan([store.url], OPTIONS)


def test_local_and_cloud_repositories_share_one_name_space(store: Store, tmp_path: Path) -> None:
    """A name in both is served from neither."""
    (tmp_path / "local" / "m" / "1").mkdir(parents=True)
    found = scan([str(tmp_path / "local"), store.url], OPTIONS)
    assert found.models == {}
    assert list(found.problems) == ["m"]


async def test_an_unloaded_model_leaves_no_copy(store: Store, tmp_path: Path) -> None:
    """Its files go with its last version, and come back when it is loaded again."""
    store.put("m/2/data", b"2")
    store.put("m/config.pbtxt", CONFIG + b" version_policy { all { } }")
    options = ServerOptions(
        model_repository=(store.url,), model_control_mode="explicit", load_model=("m",)
    )
    async with InferenceServer(options) as server:
        for _ in range(2):
            assert len(copies(tmp_path)) == 2
            await server.unload_model("m")
            await asyncio.gather(*server.lifecycle._draining.values())
            assert not copies(tmp_path)
            await server.load_model("m")
        assert len(copies(tmp_path)) == 2


async def test_reloads_that_fail_leave_the_copy_that_serves(store: Store, tmp_path: Path) -> None:
    """However many there are, and nothing of their own; the old copy goes with a good one."""
    options = ServerOptions(
        model_repository=(store.url,), model_control_mode="explicit", load_model=("m",)
    )
    async with InferenceServer(options) as server:
        served = server.model("m").context.model_dir
        for broken in (b"backend:", b'backend: "none"', b'backend: "identity" max_batch_size: -1'):
            store.put("m/config.pbtxt", broken)
            with pytest.raises(NpuserveError):
                await server.load_model("m")
            assert [path.parent.parent for path in copies(tmp_path)] == [served]
        store.put("m/config.pbtxt", CONFIG + b" # good")
        await server.load_model("m")
        await asyncio.gather(*server.lifecycle._draining.values())
        served = server.model("m").context.model_dir
        assert [path.parent.parent for path in copies(tmp_path)] == [served]


def copies(root: Path) -> list[Path]:
    """Data files of all local copies."""
    return list(root.glob("npuserve-cloud-*/m/*/m/*/data"))


async def test_a_server_follows_the_store(store: Store) -> None:
    """Start-up, then polls that find a new version, a new model and one gone."""
    options = ServerOptions(model_repository=(store.url,), model_control_mode="none")
    async with InferenceServer(options) as server:

        async def served() -> dict[str, list[str]]:
            rows = await server.repository_index(ready_only=True)
            return {row.name: [r.version for r in rows if r.name == row.name] for row in rows}

        assert await served() == {"m": ["1"]}
        store.put("m/2/data", b"2")
        store.put("new/config.pbtxt", CONFIG)
        store.put("new/1/data", b"1")
        await server.lifecycle.poll_once()
        assert await served() == {"m": ["2"], "new": ["1"]}
        store.delete("new/1/data")
        store.delete("new/config.pbtxt")
        await server.lifecycle.poll_once()
        assert await served() == {"m": ["2"]}


@pytest.mark.parametrize(
    ("url", "environ", "service", "credential"),
    [
        ("as://me/c/models", {}, "https://me.blob.core.windows.net/", "NoneType"),
        (
            "as://me/c/models",
            {"AZURE_STORAGE_KEY": "a2V5"},
            "https://me.blob.core.windows.net/",
            "SharedKeyCredentialPolicy",
        ),
        (
            "as://me.blob.core.chinacloudapi.cn/c/models",
            {"AZURE_STORAGE_AUTH_TYPE": "default"},
            "https://me.blob.core.chinacloudapi.cn/",
            "DefaultAzureCredential",
        ),
        (
            "as://other/c/models",
            {"AZURE_STORAGE_AUTH_TYPE": "managed_identity", "AZURE_STORAGE_ACCOUNT": "me"},
            "https://me.blob.core.windows.net/",
            "ManagedIdentityCredential",
        ),
    ],
)
def test_azure_s_library_takes_the_credentials(
    url: str,
    environ: dict[str, str],
    service: str,
    credential: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those that no emulator has; variables that Triton does not read change nothing."""
    pytest.importorskip("adlfs")
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    other = "AccountName=other;AccountKey=a2V5;EndpointSuffix=core.windows.net"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", other)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "b3RoZXI=")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    repository = CloudRepository(url)
    client = repository._filesystem.service_client
    assert (client.url, type(client.credential).__name__) == (service, credential)
    repository.close()
