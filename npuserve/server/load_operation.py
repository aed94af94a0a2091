"""One start-up, poll or load call: each model is loaded once, members before their ensembles.

Decides the order and words the failures of ensembles; how one model is loaded and swapped in is
lifecycle.py's matter.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NoReturn

from npuserve.errors import InternalError, InvalidArgumentError, NpuserveError, as_npuserve_error
from npuserve.server.model_entry import ModelEntry, ModelState, VersionStatus

if TYPE_CHECKING:
    from npuserve.model_config import ModelConfig
    from npuserve.model_repository import LoadedConfig, Scan
    from npuserve.server.lifecycle import Lifecycle

logger = logging.getLogger(__name__)


class LoadOperation:
    """One start-up or load call: each model is loaded once, members before their ensembles."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        scan: Scan,
        configs: dict[str, LoadedConfig],
        forced: bool = False,
    ) -> None:
        self._lifecycle = lifecycle
        self._factory = lifecycle.factory
        self._scan = scan
        self._configs = configs
        self._forced = forced
        self._running: dict[str, asyncio.Future[None]] = {}

    async def load(self, name: str, locked: bool = False) -> None:
        """Load `name` after its members; concurrent callers share one load.

        Args:
            locked: the caller holds the entry's lock.
        """
        future = self._running.get(name)
        if future is not None:
            return await asyncio.shield(future)
        future = self._running[name] = asyncio.get_running_loop().create_future()
        try:
            await self._load(name, locked)
        except Exception as error:
            failure = as_npuserve_error(error)
            if failure is not error:
                logger.exception("loading '%s' failed", name)
                self._lifecycle.entry(name).failure = failure.reason
            future.set_exception(failure)
            future.exception()  # a load that nobody else waits for is no unhandled error
            await self._free_files(name, locked)
            raise failure from error
        except BaseException:
            future.cancel()
            raise
        future.set_result(None)
        return None

    async def _free_files(self, name: str, locked: bool) -> None:
        directory, entry = self._scan.models.get(name), self._lifecycle.entry(name)
        if directory is not None and locked:
            await self._lifecycle.free_files(entry, directory.path)
        elif directory is not None:
            async with entry.lock:
                await self._lifecycle.free_files(entry, directory.path)

    async def _load(self, name: str, locked: bool) -> None:
        entry = self._lifecycle.entry(name)
        directory = self._scan.models.get(name)
        loaded = self._configs.get(name)
        if directory is None or loaded is None:
            if directory is None and name not in self._scan.problems:
                entry.failure = (
                    self._lifecycle.ambiguity(name) or "model not found in any model repository."
                )
                logger.error("failed to poll model '%s': %s", name, entry.failure)
            elif name in self._scan.problems:
                entry.failure = self._scan.problems[name]
            # Differs from Triton: the reason, which it only logs, is part of the answer.
            raise InternalError(
                f"failed to load '{name}', failed to poll from model repository: {entry.failure}"
            )
        if self._lifecycle.namespacing:
            entry.namespace = directory.repository
        members = {member for member, _version in self._factory.members(loaded.config)}
        if members:
            await self._load_members(entry, loaded, members)
        if locked:
            await self._lifecycle.load_one(entry, directory, loaded, self._forced)
        else:
            async with entry.lock:
                await self._lifecycle.load_one(entry, directory, loaded, forced=False)

    async def _load_members(
        self, entry: ModelEntry, loaded: LoadedConfig, members: set[str]
    ) -> None:
        config, where = loaded
        cycle = self._cycle(entry.name)
        if cycle:
            text = f"circular dependency between ensembles: {' -> '.join(cycle)}"
            self._fail(entry, config, InvalidArgumentError(text))
        results = await asyncio.gather(
            *(self._load_member(entry.name, member) for member in sorted(members)),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, NpuserveError):
                self._fail(entry, config, result)
            elif isinstance(result, BaseException):
                raise result
        try:
            self._factory.check_ensemble(config, where)
        except NpuserveError as error:
            self._fail(entry, config, error)

    async def _load_member(self, ensemble: str, member: str) -> None:
        loaded = self._lifecycle.entries.get(member)
        if loaded is not None and loaded.loaded and member not in self._running:
            return
        try:
            await self.load(member)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"ensemble '{ensemble}' depends on '{member}' which has no loaded version. Model "
                f"'{member}' loading failed with error: {error}"
            ) from error
        except NpuserveError as error:
            raise InvalidArgumentError(
                f"ensemble {ensemble} contains models that are not available or ambiguous: "
                f"{member} ({error})"
            ) from error

    def _cycle(self, name: str) -> list[str]:
        """The way from `name` over members back to `name`; [] if there is none."""
        stack = [[name]]
        visited: set[str] = set()
        while stack:
            path = stack.pop()
            loaded = self._configs.get(path[-1])
            for member, _version in self._factory.members(loaded.config) if loaded else ():
                if member == name:
                    return [*path, name]
                if member not in visited:
                    visited.add(member)
                    stack.append([*path, member])
        return []

    def _fail(self, entry: ModelEntry, config: ModelConfig, error: NpuserveError) -> NoReturn:
        """Record why an ensemble cannot be loaded, and raise it as its load failure."""
        directory = self._scan.models[entry.name]
        text = ""
        for version in self._factory.select_versions(config, directory):
            text += f"version {version} is at UNAVAILABLE state: {error.reason};\n"
            status = entry.versions.get(version)
            if status is None or status.state is not ModelState.READY:
                entry.versions[version] = VersionStatus(ModelState.UNAVAILABLE, error.reason)
            logger.error("failed to load '%s' version %d: %s", entry.name, version, error.reason)
        raise InvalidArgumentError(f"load failed for model '{entry.name}': {text}")
