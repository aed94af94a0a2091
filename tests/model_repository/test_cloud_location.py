"""URLs and credentials of cloud repositories are Triton's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npuserve.errors import InvalidArgumentError
from npuserve.model_repository.cloud_location import (
    CREDENTIAL_FILE,
    Location,
    filesystem_options,
    parse_location,
    scheme_of,
)


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket/a/b/", Location("s3", "bucket/a/b")),
        ("s3://bucket", Location("s3", "bucket")),
        ("s3://host:9000/bucket/a", Location("s3", "bucket/a", "http://host:9000")),
        ("s3://http://host:9000/bucket", Location("s3", "bucket", "http://host:9000")),
        ("s3://https://s3.host/bucket/a", Location("s3", "bucket/a", "https://s3.host")),
        ("gs://bucket/a", Location("gs", "bucket/a")),
        ("as://account/container/a", Location("as", "container/a", account="account")),
        (
            "as://account.blob.core.windows.net/container",
            Location("as", "container", account="account"),
        ),
        (
            "as://account.blob.core.chinacloudapi.cn/container",
            Location("as", "container", account="account", suffix="core.chinacloudapi.cn"),
        ),
        (
            "as://http://host:1/account/container/a",
            Location("as", "container/a", "http://host:1", "account"),
        ),
    ],
)
def test_urls(url: str, location: Location) -> None:
    """Every form of Triton's documentation."""
    assert parse_location(url) == location


@pytest.mark.parametrize(
    "url", ["s3://", "s3://host:1/", "gs:///", "as://account", "as:///c", "as://h:1/a"]
)
def test_urls_without_a_place_are_refused(url: str) -> None:
    """With the URL in the message."""
    with pytest.raises(InvalidArgumentError, match=url):
        parse_location(url)


@pytest.mark.parametrize(
    ("path", "scheme"),
    [("s3://b", "s3"), ("gs://b", "gs"), ("as://a/b", "as"), ("/s3", ""), ("ftp://b", "")],
)
def test_other_schemes_are_local_paths(path: str, scheme: str) -> None:
    """As in Triton."""
    assert scheme_of(path) == scheme


def options(url: str, **environ: str) -> dict[str, Any]:
    return filesystem_options(url, parse_location(url), environ)


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        ("s3://b", {}, {"client_kwargs": {}}),
        (
            "s3://b",
            {
                "AWS_ACCESS_KEY_ID": "k",
                "AWS_SECRET_ACCESS_KEY": "s",
                "AWS_SESSION_TOKEN": "t",
                "AWS_DEFAULT_REGION": "r",
                "AWS_PROFILE": "p",
            },
            {"key": "k", "secret": "s", "token": "t", "client_kwargs": {"region_name": "r"}},
        ),
        ("s3://b", {"AWS_PROFILE": "p"}, {"profile": "p", "client_kwargs": {}}),
        ("s3://h:1/b", {}, {"client_kwargs": {"endpoint_url": "http://h:1"}}),
        ("gs://b", {}, {}),
        ("gs://b", {"GOOGLE_APPLICATION_CREDENTIALS": "/key.json"}, {"token": "/key.json"}),
        (
            "as://a/c",
            {},
            {"connection_string": "BlobEndpoint=https://a.blob.core.windows.net;AccountName=a"},
        ),
        (
            "as://a/c",
            {"AZURE_STORAGE_ACCOUNT": "b", "AZURE_STORAGE_KEY": "k"},
            {
                "connection_string": "BlobEndpoint=https://b.blob.core.windows.net;"
                "AccountName=b;AccountKey=k"
            },
        ),
        (
            "as://http://host:1/a/c",
            {"AZURE_STORAGE_KEY": "k"},
            {"connection_string": "BlobEndpoint=http://host:1/a;AccountName=a;AccountKey=k"},
        ),
        (
            "as://a.blob.core.chinacloudapi.cn/c",
            {"AZURE_STORAGE_AUTH_TYPE": "managed_identity", "AZURE_STORAGE_CLIENT_ID": "i"},
            {
                "account_name": "a",
                "account_host": "a.blob.core.chinacloudapi.cn",
                "auth_type": "managed_identity",
                "client_id": "i",
            },
        ),
    ],
)
def test_environment(url: str, environ: dict[str, str], expected: dict[str, Any]) -> None:
    """The variables of each provider; without any, its default chain or anonymous access."""
    assert options(url, **environ) == expected


@pytest.fixture
def credential_file(tmp_path: Path) -> str:
    path = tmp_path / "credentials.json"
    path.write_text(
        json.dumps(
            {
                "s3": {
                    "": {"key_id": "default", "secret_key": "s"},
                    "s3://bucket": {"key_id": "bucket", "secret_key": "s"},
                    "s3://bucket/deep": {"key_id": "deep", "secret_key": "s", "region": "r"},
                },
                "gs": {"gs://one": "/one.json"},
                "as": {"": {"account_key": "k"}},
            }
        )
    )
    return str(path)


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("s3://other", "default"),
        ("s3://bucket/x", "bucket"),
        ("s3://bucket/deeper", "deep"),
        ("s3://bucket/deep/x", "deep"),
    ],
)
def test_the_longest_prefix_of_the_credential_file_wins(
    credential_file: str, url: str, key: str
) -> None:
    """It also replaces the environment."""
    environ = {CREDENTIAL_FILE: credential_file, "AWS_ACCESS_KEY_ID": "env"}
    assert options(url, **environ)["key"] == key


def test_the_credential_file_replaces_the_environment_even_without_an_entry(
    credential_file: str,
) -> None:
    """A bucket nobody named is read without a key."""
    environ = {CREDENTIAL_FILE: credential_file, "GOOGLE_APPLICATION_CREDENTIALS": "/env.json"}
    assert options("gs://one/a", **environ) == {"token": "/one.json"}
    assert options("gs://two", **environ) == {}
    assert options("as://a/c", **environ)["connection_string"].endswith(";AccountKey=k")


@pytest.mark.parametrize(
    "content",
    [None, "{", "[]", "3", '{"s3": {"s3://": "key"}}', '{"s3": {"s3://": {"key_id": 1}}}'],
)
def test_a_credential_file_that_cannot_be_used_ends_the_start(
    tmp_path: Path, content: str | None
) -> None:
    """With its path and the variable that names it."""
    path = tmp_path / "credentials.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=f"credentials.json.*{CREDENTIAL_FILE}"):
        options("s3://b", **{CREDENTIAL_FILE: str(path)})
