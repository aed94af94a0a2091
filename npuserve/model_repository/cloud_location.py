"""Where a cloud repository is and with whose rights it is read. Pure.

URLs and credentials are Triton's: one chain of environment variables for each provider, or the
JSON file of `TRITON_CLOUD_CREDENTIAL_PATH`, which replaces them.
Source: Triton core src/filesystem/implementations/{s3,gcs,as}.h.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

CREDENTIAL_FILE = "TRITON_CLOUD_CREDENTIAL_PATH"

SCHEMES = ("s3", "gs", "as")

# Folder for the local copies of each provider's models.
MOUNT_VARIABLES = {
    "s3": "TRITON_AWS_MOUNT_DIRECTORY",
    "gs": "TRITON_GCS_MOUNT_DIRECTORY",
    "as": "TRITON_AZURE_MOUNT_DIRECTORY",
}


@dataclass(frozen=True)
class Location:
    """A place in a cloud.

    Attributes:
        scheme: one of SCHEMES.
        path: `bucket/folder` or `container/folder`, without slashes at the ends.
        endpoint: URL of another service than the provider's own: S3-compatible, an emulator of
            Azure. "" for the provider's.
        account: storage account in the URL (as); credentials may name another one.
        suffix: domain of Azure's services (as).
    """

    scheme: str
    path: str
    endpoint: str = ""
    account: str = ""
    suffix: str = "core.windows.net"


def scheme_of(repository: str) -> str:
    """The cloud scheme a repository path begins with; "" for a local path."""
    scheme, separator, _ = repository.partition("://")
    return scheme if separator and scheme in SCHEMES else ""


def parse_location(url: str) -> Location:
    """Take a repository URL apart.

    Raises:
        InvalidArgumentError: no bucket, account or container.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "s3":
        return _s3_location(url, rest)
    if scheme == "as":
        return _as_location(url, rest)
    path = rest.strip("/")
    if not path:
        raise InvalidArgumentError(f"'{url}' has no bucket")
    return Location(scheme, path)


def _s3_location(url: str, rest: str) -> Location:
    endpoint, rest = _cut_endpoint(rest)
    path = rest.strip("/")
    if not path:
        raise InvalidArgumentError(f"'{url}' has no bucket")
    return Location("s3", path, endpoint=endpoint)


def _as_location(url: str, rest: str) -> Location:
    # Differs from Triton: it knows Azure's global service only, no emulator and no other cloud.
    endpoint, rest = _cut_endpoint(rest)
    host, _, path = rest.partition("/")
    # Both the plain account and its host name are good.
    account, _, domain = host.partition(".")
    path = path.strip("/")
    if not account or not path:
        raise InvalidArgumentError(
            f"'{url}' is no Azure location, expected as://<account>/<container>/<path>"
        )
    suffix = domain.partition(".")[2] or Location.suffix  # behind the service, "blob"
    return Location("as", path, endpoint, account, suffix)


def _cut_endpoint(rest: str) -> tuple[str, str]:
    """The service that a URL names behind its scheme, `host:port` or in full; what follows it."""
    match = re.match(r"(https?)://([^/]+)/", rest) or re.match(r"()([^/]+:\d+)/", rest)
    if match is None:
        return "", rest
    return f"{match[1] or 'http'}://{match[2]}", rest[match.end() :]


def filesystem_options(url: str, location: Location, environ: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments for the fsspec file system of a location.

    Args:
        url: as given; prefixes of the credential file are compared with it.
        location: from `parse_location(url)`.
        environ: where the credentials or the path of their file are.

    Raises:
        InvalidArgumentError: the credential file cannot be used.
    """
    path = environ.get(CREDENTIAL_FILE, "")
    given = _from_file(path, url, location.scheme) if path else None
    if location.scheme == "s3":
        return _s3_options(given if given is not None else _s3_environ(environ), location)
    if location.scheme == "gs":
        return _gs_options(given if given is not None else environ.get(_GS_VARIABLE))
    return _as_options(given if given is not None else _as_environ(environ), location)


_GS_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"


def _from_file(path: str, url: str, scheme: str) -> Any:
    """The entry of the longest prefix of `url`; {} if none fits."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8")).get(scheme, {})
        prefixes = [prefix for prefix in entries if url.startswith(prefix)]
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(
            f"cannot read the cloud credentials in '{path}' ({CREDENTIAL_FILE}): {error}"
        ) from error
    entry = entries[max(prefixes, key=len)] if prefixes else {}
    texts = entry.values() if isinstance(entry, dict) else (entry,)
    if (scheme != "gs" and not isinstance(entry, dict)) or not all(
        isinstance(text, str) for text in texts
    ):
        wanted = "the path of a key file" if scheme == "gs" else "an object of texts"
        raise InvalidArgumentError(
            f"the cloud credentials in '{path}' ({CREDENTIAL_FILE}) for {url} are not {wanted}"
        )
    return entry


def _s3_environ(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        "key_id": environ.get("AWS_ACCESS_KEY_ID", ""),
        "secret_key": environ.get("AWS_SECRET_ACCESS_KEY", ""),
        "session_token": environ.get("AWS_SESSION_TOKEN", ""),
        "region": environ.get("AWS_DEFAULT_REGION", ""),
        "profile": environ.get("AWS_PROFILE", ""),
    }


def _s3_options(given: Mapping[str, str], location: Location) -> dict[str, Any]:
    client = {"region_name": given.get("region"), "endpoint_url": location.endpoint}
    options: dict[str, Any] = {"client_kwargs": {key: text for key, text in client.items() if text}}
    if given.get("key_id"):
        # Keys win over a profile, as in the SDK's own chain.
        names = {"key": "key_id", "secret": "secret_key", "token": "session_token"}
        options |= {name: given[source] for name, source in names.items() if given.get(source)}
    elif given.get("profile"):
        options["profile"] = given["profile"]
    return options


def _gs_options(given: Any) -> dict[str, Any]:
    # Without a token gcsfs goes through the service account of the machine to anonymous access.
    return {"token": given} if given else {}


def _as_environ(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        "account_str": environ.get("AZURE_STORAGE_ACCOUNT", ""),
        "account_key": environ.get("AZURE_STORAGE_KEY", ""),
        "auth_type": environ.get("AZURE_STORAGE_AUTH_TYPE", ""),
        "client_id": environ.get("AZURE_STORAGE_CLIENT_ID", ""),
    }


def _as_options(given: Mapping[str, str], location: Location) -> dict[str, Any]:
    account = given.get("account_str") or location.account
    host = f"{account}.blob.{location.suffix}"
    service = f"{location.endpoint}/{account}" if location.endpoint else f"https://{host}"
    auth_type = given.get("auth_type", "")
    if auth_type in ("managed_identity", "default"):
        return {
            "account_name": account,
            "account_host": service.partition("://")[2],
            # Made into a credential object where the SDK is imported.
            "auth_type": auth_type,
            "client_id": given.get("client_id", ""),
        }
    # As a whole, so that adlfs adds nothing from variables that Triton does not read.
    text = f"BlobEndpoint={service};AccountName={account}"
    if given.get("account_key"):
        text += f";AccountKey={given['account_key']}"
    return {"connection_string": text}
