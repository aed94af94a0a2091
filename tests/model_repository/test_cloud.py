"""A repository in an S3-compatible store: a real server, a real client library."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from npuserve.errors import InternalError
from npuserve.model_repository import (
    ModelDirectory,
    Scan,
    fingerprint,
    load_config,
    scan,
    select_versions,
)
from npuserve.model_repository.cloud import close_cloud_repositories
from npuserve.options import ServerOptions

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

OPTIONS = ServerOptions()
CONFIG = b'backend: "python" max_batch_size: 2'


@dataclass
class Bucket:
    """A bucket of the store, written to through botocore."""

    client: Any
    endpoint: str
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.endpoint}/{self.name}/models"

    def put(self, key: str, body: bytes = b"") -> None:
        self.client.put_object(Bucket=self.name, Key=f"models/{key}", Body=body)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=f"models/{key}")

    def scan(self) -> Scan:
        return scan([self.url], OPTIONS)

    def model(self, name: str) -> ModelDirectory:
        return self.scan().models[name]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """host:port of a store in this process."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        def send_response(self, code: int, message: str | None = None) -> None:
            # Without werkzeug's `Server`: moto sends one too, and aiohttp refuses two.
            self.send_response_only(code, message)

    application = moto_server.DomainDispatcherApplication(moto_server.create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bucket(
    endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Bucket]:
    """A fresh bucket with one model; its copies go below `tmp_path`."""
    from botocore.session import Session  # type: ignore[import-untyped]

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("TRITON_AWS_MOUNT_DIRECTORY", str(tmp_path))
    client = Session().create_client("s3", endpoint_url=f"http://{endpoint}")
    name = request.node.name.replace("_", "-")[:60].strip("-")
    client.create_bucket(Bucket=name)
    bucket = Bucket(client, endpoint, name)
    bucket.put("m/config.pbtxt", CONFIG)
    bucket.put("m/1/model.py", b"x = 1")
    yield bucket
    client.close()
    close_cloud_repositories()
    assert not list(tmp_path.glob("npuserve-cloud-*"))


def test_models_are_listed_and_copied(bucket: Bucket, tmp_path: Path) -> None:
    """The copy lies where the mount variable says and holds every file."""
    bucket.put("m/3/deep/weights.bin", b"123")
    bucket.put("docs/readme.txt")
    bucket.put("stray.txt")
    found = bucket.scan()
    assert list(found.models) == ["m"]
    directory = found.models["m"]
    assert directory.versions == (1, 3)
    assert not directory.path.exists()  # nothing is copied before it is needed
    config = load_config(directory, OPTIONS)
    assert (config.name, config.max_batch_size) == ("m", 2)
    assert select_versions(config, directory) == [3]
    assert (directory.version_path(3) / "deep" / "weights.bin").read_bytes() == b"123"
    assert directory.path.is_relative_to(tmp_path)
    assert directory.path.name == "m"


def test_an_empty_version_folder_is_an_object_with_a_slash(bucket: Bucket) -> None:
    """All that an ensemble has."""
    bucket.put("e/config.pbtxt", b"name: 'e' backend: 'identity'")
    bucket.put("e/1/")
    directory = bucket.model("e")
    assert directory.versions == (1,)
    load_config(directory, OPTIONS)
    assert directory.version_path(1).is_dir()


def test_a_change_in_the_store_changes_the_fingerprint(bucket: Bucket) -> None:
    """Polling sees changed, added and removed objects, and nothing else."""
    first = fingerprint(bucket.model("m"))
    assert fingerprint(bucket.model("m")) == first
    bucket.put("m/1/extra.txt", b"x")
    second = fingerprint(bucket.model("m"))
    assert second != first
    assert second.config == first.config
    bucket.delete("m/1/extra.txt")
    assert fingerprint(bucket.model("m")) == first
    bucket.put("m/config.pbtxt", CONFIG + b" # longer")
    third = fingerprint(bucket.model("m"))
    assert (third.files, third.config) != (first.files, first.config)
    assert third.files == first.files


def test_a_serving_copy_is_not_changed_by_the_next_one(bucket: Bucket) -> None:
    """The old version keeps its files while the new one is loaded; older copies go."""
    paths = []
    for size in (1, 2, 3):
        bucket.put("m/1/model.py", b"x" * size)
        directory = bucket.model("m")
        load_config(directory, OPTIONS)
        paths.append(directory.path)
    assert [path.exists() for path in paths] == [False, True, True]
    assert (paths[1] / "1" / "model.py").read_bytes() == b"xx"
    assert (paths[2] / "1" / "model.py").read_bytes() == b"xxx"


def test_an_unchanged_model_is_copied_once(bucket: Bucket) -> None:
    """Loading it again reads the copy that is there."""
    directory = bucket.model("m")
    load_config(directory, OPTIONS)
    (directory.path / "mark").touch()
    again = bucket.model("m")
    load_config(again, OPTIONS)
    assert again.path == directory.path
    assert (again.path / "mark").exists()


def test_an_object_that_vanishes_while_it_is_copied_fails_the_model(bucket: Bucket) -> None:
    """No half copy is taken for the model afterwards."""
    directory = bucket.model("m")
    bucket.delete("m/1/model.py")
    with pytest.raises(InternalError, match="failed to copy model 'm' from s3://"):
        load_config(directory, OPTIONS)
    assert not directory.path.exists()


def test_a_repository_that_is_not_there_ends_the_start(bucket: Bucket) -> None:
    """A wrong bucket must not look like an empty repository."""
    with pytest.raises(InternalError, match="failed to stat file s3://"):
        scan([f"{bucket.url}-nowhere"], OPTIONS)


def test_local_and_cloud_repositories_share_one_name_space(bucket: Bucket, tmp_path: Path) -> None:
    """A name in both is served from neither."""
    (tmp_path / "local" / "m" / "1").mkdir(parents=True)
    found = scan([str(tmp_path / "local"), bucket.url], OPTIONS)
    assert found.models == {}
    assert list(found.problems) == ["m"]
