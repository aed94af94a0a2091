"""Object stores that run inside the test process, each with a writer that is not under test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest


@dataclass(frozen=True)
class Store:
    """A fresh bucket; keys are below its folder `models`.

    Attributes:
        url: of the repository, as a command line names it.
        put: makes an object.
        delete: removes one.
    """

    url: str
    put: Callable[[str, bytes], None]
    delete: Callable[[str], None]


@contextmanager
def s3_server() -> Iterator[str]:
    """S3 by moto on a free port: host:port."""
    moto_server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
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


def s3_store(endpoint: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A bucket of the S3 server; the environment gets keys for it."""
    from botocore.session import Session  # type: ignore[import-untyped]

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = Session().create_client("s3", endpoint_url=f"http://{endpoint}")
    client.create_bucket(Bucket=name)

    def put(key: str, body: bytes) -> None:
        client.put_object(Bucket=name, Key=f"models/{key}", Body=body)

    def delete(key: str) -> None:
        client.delete_object(Bucket=name, Key=f"models/{key}")

    return Store(f"s3://{endpoint}/{name}/models", put, delete)


@contextmanager
def gs_server() -> Iterator[str]:
    """An emulator of Google's store on a free port: host:port."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    yield f"127.0.0.1:{server._api._httpd.server_port}"
    server.stop()


def gs_store(endpoint: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A bucket of the emulator, which gcsfs finds through the environment."""
    base = f"http://{endpoint}"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", base)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    httpx.post(f"{base}/storage/v1/b", params={"project": "p"}, json={"name": name})

    def put(key: str, body: bytes) -> None:
        httpx.post(
            f"{base}/upload/storage/v1/b/{name}/o",
            params={"uploadType": "media", "name": f"models/{key}"},
            content=body,
        ).raise_for_status()

    def delete(key: str) -> None:
        path = quote(f"models/{key}", safe="")
        httpx.delete(f"{base}/storage/v1/b/{name}/o/{path}").raise_for_status()

    return Store(f"gs://{name}/models", put, delete)


# Azurite's account, the same in every one. Source: its README.
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@contextmanager
def as_server(directory: Path) -> Iterator[str]:
    """Azure's emulator on a free port: host:port.

    It is a program for Node, not a Python package: `npm install -g azurite`, or the path of
    `azurite-blob` in the variable AZURITE_BLOB.
    """
    program = os.environ.get("AZURITE_BLOB") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is neither on PATH nor in AZURITE_BLOB")
    pytest.importorskip("adlfs")
    command = [program, "--blobPort=0", "--inMemoryPersistence", "--silent", "--disableTelemetry"]
    command.append("--skipApiVersionCheck")  # clients may be newer than it is
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        found = (re.search(r"successfully listens on http://(\S+)", line) for line in lines)
        yield next(match[1] for match in found if match)
        process.terminate()


def as_store(endpoint: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A container of the emulator; the environment gets the key for it."""
    from azure.storage.blob import ContainerClient

    monkeypatch.setenv("AZURE_STORAGE_KEY", AZURITE_KEY)
    client = ContainerClient.from_connection_string(
        f"BlobEndpoint=http://{endpoint}/{AZURITE_ACCOUNT};"
        f"AccountName={AZURITE_ACCOUNT};AccountKey={AZURITE_KEY}",
        name,
    )
    client.create_container()

    def put(key: str, body: bytes) -> None:
        client.upload_blob(f"models/{key}", body, overwrite=True)

    def delete(key: str) -> None:
        client.delete_blob(f"models/{key}")

    return Store(f"as://{endpoint}/{AZURITE_ACCOUNT}/{name}/models", put, delete)
