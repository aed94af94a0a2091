"""The life of models: load, reload, unload, and what the repository index says of them.

    (found) ─ load ─▶ LOADING ─▶ READY ─ unload ─▶ UNLOADING ─▶ UNAVAILABLE "unloaded"
                         └─ failure ─▶ UNAVAILABLE <reason>

All versions of one load succeed or fail together. A reload builds new `Model` objects beside the
old ones and swaps them in one step, so no request finds a gap; the old ones drain by themselves.
Operations on one model run one after the other; other models are not held up.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from npuserve.errors import (
    InternalError,
    InvalidArgumentError,
    NpuserveError,
    UnavailableError,
    as_npuserve_error,
)
from npuserve.model_repository import watcher
from npuserve.model_repository.file_override import write_files
from npuserve.server.load_operation import LoadOperation
from npuserve.server.metadata import ModelIndexEntry
from npuserve.server.model_entry import ModelEntry, ModelState, VersionStatus
from npuserve.server.model_factory import ModelFactory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping
    from pathlib import Path

    from npuserve.backends.registry import BackendRegistry
    from npuserve.model_repository import Fingerprint, LoadedConfig, ModelDirectory, Scan
    from npuserve.server.core import InferenceServer
    from npuserve.server.model import Model

logger = logging.getLogger(__name__)

_PROGRESS_PERIOD_S = 5.0
_UNLOADED = "unloaded"  # the reason in the index


class Lifecycle:
    """Owns every `Model` of the server. Loop thread only; blocking work goes to helper threads."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._options = server.options
        self.factory = ModelFactory(server)
        self._slots = asyncio.Semaphore(self._options.model_load_thread_count)
        self._draining: dict[Model, asyncio.Task[None]] = {}
        self.entries: dict[str, ModelEntry] = {}
        self._polled: dict[str, Fingerprint] = {}  # of the last poll
        self._ambiguous: dict[str, tuple[str, ...]] = {}  # of the last scan
        self.starting = True
        self.failed_startup: list[str] = []

    @property
    def namespacing(self) -> bool:
        """Whether models of one name may come from several repositories."""
        return self._options.model_namespacing

    @property
    def backends(self) -> BackendRegistry:
        """The backends in use, for the start-up table."""
        return self.factory.backends

    # ---------------------------------------------------------------- start-up and shutdown

    async def start(self, names: Iterable[str] | None) -> None:
        """Load the start-up models side by side; failures are kept, not raised.

        Args:
            names: models to load; None for every model of the repositories.
        """
        scan = await self._scan()
        for name, reason in scan.problems.items():
            self.entry(name).failure = reason
        self._polled = await asyncio.to_thread(self._fingerprints, scan)
        wanted = (
            sorted(set(scan.models) | set(scan.problems))
            if names is None
            else list(dict.fromkeys(names))
        )
        configs = await self._configs(scan, wanted)
        operation = LoadOperation(self, scan, configs)
        progress = self._server.spawn(self._report_progress(), name="start-up progress")
        try:
            results = await asyncio.gather(
                *(operation.load(name) for name in wanted), return_exceptions=True
            )
        finally:
            progress.cancel()
        for name, result in zip(wanted, results, strict=True):
            if isinstance(result, NpuserveError):
                self.failed_startup.append(name)
            elif isinstance(result, BaseException):
                raise result
            self.entry(name).explicit = True
        self.starting = False

    async def _report_progress(self) -> None:
        """Say what the start-up waits for, so that nobody takes a slow model for a hang."""
        begin = self._server.loop.time()
        while True:
            await asyncio.sleep(_PROGRESS_PERIOD_S)
            loading = [
                f"{name}:{version}"
                for name, entry in self.entries.items()
                for version, status in entry.versions.items()
                if status.state is ModelState.LOADING
            ]
            logger.info(
                "still loading after %d s: %s",
                self._server.loop.time() - begin,
                ", ".join(sorted(loading)),
            )

    async def poll(self, period_s: float) -> None:
        """Follow the repositories until cancelled (model control mode `poll`)."""
        while True:
            await asyncio.sleep(period_s)
            try:
                await self.poll_once()
            except Exception:
                logger.exception("polling the model repositories failed; trying again later")

    async def poll_once(self) -> None:
        """Load what is new or changed, unload what is gone. One bad model holds up no other."""
        scan = await self._scan()
        for name, reason in scan.problems.items():
            self.entry(name).failure = reason
        prints = await asyncio.to_thread(self._fingerprints, scan)
        changes = watcher.compare(self._polled, prints, self.entries, scan.problems)
        self._polled = prints
        for name in changes.unload:
            if self.entries[name].in_use:
                await self.unload(name)
            else:  # unloaded at an earlier poll
                del self.entries[name]
        configs = await self._configs(scan, changes.load)
        operation = LoadOperation(self, scan, configs)
        results = await asyncio.gather(
            *(operation.load(name) for name in changes.load), return_exceptions=True
        )
        for name, result in zip(changes.load, results, strict=True):
            if result is None:  # else it was reported
                await self._refresh_dependents(name)

    def _fingerprints(self, scan: Scan) -> dict[str, Fingerprint]:
        return {name: self.factory.fingerprint(d) for name, d in scan.models.items()}

    async def stop(self) -> None:
        """Stop all models; each answers what it has accepted first. No load begins any more."""
        for entry in list(self.entries.values()):
            async with entry.lock:
                pass  # a load that had begun is over
        models = [
            status.model
            for entry in self.entries.values()
            for status in entry.versions.values()
            if status.model is not None and status.model not in self._draining
        ]
        for model in models:
            model.stop_accepting()
        await asyncio.gather(*map(self._stop_model, models), *self._draining.values())
        for path in {model.context.model_dir for model in models}:
            await asyncio.to_thread(self.factory.release, path)

    # ---------------------------------------------------------------- load

    async def load(
        self, name: str, config_json: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load or reload a model and, for an ensemble, the members that are not loaded yet.

        Args:
            config_json: configuration that replaces config.pbtxt as a whole.
            files: relative path → content; they replace the whole model directory.

        Raises:
            InternalError: the model is in no repository or its configuration cannot be read.
            InvalidArgumentError: a bad name, or a version failed to load; the old ones, if any,
                go on serving.
            UnavailableError: the server stops.
        """
        _check_name(name, is_folder=bool(files))
        if files and config_json is None:
            raise InternalError(
                f"failed to load '{name}', failed to poll from model repository: Load parameter "
                "'config' must be specified for model file override"
            )
        async with self._locked_entry(name) as entry:
            if self._server.stopping:
                raise UnavailableError(f"failed to load '{name}', the server is stopping")
            entry.explicit = True
            former = entry.file_override
            known = bool(entry.versions or entry.failure)
            try:
                if files:
                    entry.file_override = await asyncio.to_thread(write_files, name, files)
                elif config_json is None:
                    entry.file_override = None
                scan = await self._scan()
                known = known or name in scan.models or name in scan.problems
                self._override_directory(scan, entry)
                override = {name: config_json} if config_json is not None else {}
                configs = await self._configs(scan, [name], override)
                operation = LoadOperation(self, scan, configs, forced=bool(override))
                await operation.load(name, locked=True)
            except BaseException:
                failed, entry.file_override = entry.file_override, former
                if failed is not None:
                    await self.free_files(entry, failed)
                if not known:
                    del self.entries[name]  # a slip of the caller is no failed model
                raise
            entry.override = config_json or ""
        await self._refresh_dependents(name)

    @asynccontextmanager
    async def _locked_entry(self, name: str) -> AsyncIterator[ModelEntry]:
        """The entry of a name, made on first use, with its lock held."""
        while True:
            entry = self.entry(name)
            async with entry.lock:
                # A failed load that was before us may have taken it out.
                if self.entries.get(name) is entry:
                    yield entry
                    return

    async def load_one(
        self, entry: ModelEntry, directory: ModelDirectory, loaded: LoadedConfig, forced: bool
    ) -> None:
        """Make the versions of one model and swap them in. The entry's lock is held."""
        fingerprint = await asyncio.to_thread(self.factory.fingerprint, directory)
        if entry.loaded and not forced and not entry.override and fingerprint == entry.fingerprint:
            return
        versions = self.factory.select_versions(loaded.config, directory)
        if not versions:
            entry.failure = (
                "at least one version must be available under the version policy of model "
                f"'{entry.name}'"
            )
            raise InvalidArgumentError(f"load failed for model '{entry.name}': {entry.failure}\n")
        entry.failure = ""
        for version in versions:
            if version not in entry.versions:
                entry.versions[version] = VersionStatus(ModelState.LOADING)
            elif entry.versions[version].state is not ModelState.READY:
                entry.versions[version].state = ModelState.LOADING
                entry.versions[version].reason = ""
        async with self._slots:
            made = await asyncio.gather(
                *(self._make(entry, directory, loaded, version) for version in versions)
            )
        errors = {v: m for v, m in zip(versions, made, strict=True) if isinstance(m, NpuserveError)}
        models = [m for m in made if not isinstance(m, NpuserveError)]
        if errors:
            await self._give_up(entry, versions, errors, models)
        else:
            entry.fingerprint, entry.config = fingerprint, models[0].config
            self._swap(entry, models)

    async def _make(
        self, entry: ModelEntry, directory: ModelDirectory, loaded: LoadedConfig, version: int
    ) -> Model | NpuserveError:
        for _retry in range(self._options.model_load_retry_count):
            outcome = await self._try_to_make(entry, directory, loaded, version)
            if not isinstance(outcome, NpuserveError):
                return outcome
            logger.warning("retrying to load '%s' version %d", entry.name, version)
        return await self._try_to_make(entry, directory, loaded, version)

    async def _try_to_make(
        self, entry: ModelEntry, directory: ModelDirectory, loaded: LoadedConfig, version: int
    ) -> Model | NpuserveError:
        logger.info("loading: %s:%d", entry.name, version)
        try:
            return await self.factory.make(directory, loaded, version, entry.namespace)
        except Exception as error:
            failure = as_npuserve_error(error)
            if failure is not error:
                logger.exception("loading model '%s' version %d failed", entry.name, version)
        logger.error("failed to load '%s' version %d: %s", entry.name, version, failure.reason)
        return failure

    async def _give_up(
        self,
        entry: ModelEntry,
        versions: list[int],
        errors: dict[int, NpuserveError],
        made: list[Model],
    ) -> None:
        await asyncio.gather(*(model.stop() for model in made))
        text = ""
        for version in versions:
            status = entry.versions[version]
            error = errors.get(version)
            reason = error.reason if error else "another version of the same load failed"
            if error:
                text += f"version {version} is at UNAVAILABLE state: {reason};\n"
            if status.state is not ModelState.READY:
                entry.versions[version] = VersionStatus(ModelState.UNAVAILABLE, reason)
        raise InvalidArgumentError(f"load failed for model '{entry.name}': {text}")

    def _swap(self, entry: ModelEntry, models: list[Model]) -> None:
        former = entry.versions
        entry.versions = {
            model.version: VersionStatus(ModelState.READY, "", model) for model in models
        }
        for version, status in former.items():
            if status.model is not None:
                self._retire(entry, status.model)
            if version not in entry.versions:
                entry.versions[version] = VersionStatus(ModelState.UNAVAILABLE, _UNLOADED)
        for model in models:
            replaced = former.get(model.version)
            self._server.model_loaded(model, replaced.model if replaced else None)
            logger.info("successfully loaded '%s' version %d", model.name, model.version)
        self._server.publish(entry)

    # ---------------------------------------------------------------- unload

    def add_repository(self, path: str) -> None:
        """Look for models in one more repository from now on."""
        self.factory.more_repositories.append(path)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Begin to unload; returns once new requests are refused. Unknown names are fine."""
        entry = self.entries.get(name)
        if entry is None:
            return
        async with entry.lock:
            self._unload_entry(entry)
        if unload_dependents and entry.config is not None:
            for member, _version in self.factory.members(entry.config):
                other = self.entries.get(member)
                if other and not other.explicit and not self._dependents(member):
                    await self.unload(member, unload_dependents=True)
        await self._unload_dependents(name)

    def _unload_entry(self, entry: ModelEntry, reason: str = _UNLOADED) -> None:
        entry.explicit = False
        entry.failure = ""
        entry.fingerprint = None
        entry.override = ""
        entry.file_override = None
        for version, status in entry.versions.items():
            if status.model is not None:
                status.state, status.reason = ModelState.UNLOADING, ""
                self._retire(entry, status.model, status, reason)
            elif status.state is not ModelState.UNLOADING:
                entry.versions[version] = VersionStatus(ModelState.UNAVAILABLE, reason)
        self._server.publish(entry)

    def _retire(
        self,
        entry: ModelEntry,
        model: Model,
        status: VersionStatus | None = None,
        reason: str = "",
    ) -> None:
        """Let the model finish what it has in the background, then free it.

        Args:
            status, reason: of a version that is unloaded, to be told of the end.
        """
        if model in self._draining:
            return
        model.stop_accepting()

        async def drain() -> None:
            await self._stop_model(model)
            if status is not None:
                status.model = None
                if status.state is ModelState.UNLOADING:
                    status.state, status.reason = ModelState.UNAVAILABLE, reason
                    logger.info("successfully unloaded '%s' version %d", model.name, model.version)
            async with entry.lock:
                await self.free_files(entry, model.context.model_dir, freed=model)
            del self._draining[model]

        self._draining[model] = self._server.spawn(
            drain(), name=f"drain {model.name}:{model.version}"
        )

    def busy_models(self) -> list[Model]:
        """Models, those that are being replaced included, that owe somebody an answer."""
        serving = (
            status.model for entry in self.entries.values() for status in entry.versions.values()
        )
        models = dict.fromkeys(model for model in (*serving, *self._draining) if model is not None)
        return [model for model in models if model.inflight]

    async def free_files(self, entry: ModelEntry, path: Path, freed: Model | None = None) -> None:
        """Remove a model directory that was made for a load, unless it is needed.

        The caller holds the entry's lock, so that no load is about to need it.

        Args:
            freed: a model that does not count any more.
        """
        models = {*self._draining, *(status.model for status in entry.versions.values())}
        models -= {None, freed}
        needed = any(model is not None and model.context.model_dir == path for model in models)
        if not needed and path != entry.file_override:
            await asyncio.to_thread(self.factory.release, path)

    async def _stop_model(self, model: Model) -> None:
        try:
            await model.stop()
        except Exception:
            logger.exception("stopping '%s' version %d failed", model.name, model.version)
        self._server.model_unloaded(model)

    # ---------------------------------------------------------------- ensembles

    def _dependents(self, name: str) -> list[ModelEntry]:
        """Loaded ensembles that have `name` as a member."""
        return [
            entry
            for entry in self.entries.values()
            if entry.loaded
            and entry.config is not None
            and any(member == name for member, _version in self.factory.members(entry.config))
        ]

    async def _unload_dependents(self, name: str) -> None:
        """Unload the ensembles that have the model as a member, and those that have these."""
        for dependent in self._dependents(name):
            async with dependent.lock:
                self._unload_entry(dependent)
            await self._unload_dependents(dependent.name)

    async def _refresh_dependents(self, name: str) -> None:
        """A member was (re)loaded: its ensembles must still fit."""
        for entry in self._dependents(name):
            assert entry.config is not None
            try:
                self.factory.check_ensemble(entry.config)
            except NpuserveError as error:
                logger.error("ensemble '%s' no longer fits: %s", entry.name, error)
                async with entry.lock:
                    self._unload_entry(entry, error.reason)
                await self._unload_dependents(entry.name)

    # ---------------------------------------------------------------- repository

    async def index(self, ready_only: bool) -> list[ModelIndexEntry]:
        """Rows of the repository index: models of the repositories, one row a version."""
        scan = await self._scan()
        rows: list[ModelIndexEntry] = []
        for name in sorted({*scan.models, *scan.problems, *self.entries}):
            entry = self.entries.get(name)
            found = name in scan.models or name in scan.problems
            if not found and (entry is None or not entry.loaded):
                continue
            rows.extend(self._index_rows(name, entry, scan.problems.get(name, "")))
        return [row for row in rows if not ready_only or row.state == ModelState.READY]

    @staticmethod
    def _index_rows(name: str, entry: ModelEntry | None, problem: str) -> list[ModelIndexEntry]:
        # Differs from Triton: a model that could not be read is listed with the reason.
        failure = problem or (entry.failure if entry is not None else "")
        if entry is not None and entry.versions:
            return [
                ModelIndexEntry(
                    name,
                    str(version),
                    status.state,
                    failure if failure and status.reason == _UNLOADED else status.reason,
                )
                for version, status in sorted(entry.versions.items())
            ]
        if failure:
            return [ModelIndexEntry(name, "", ModelState.UNAVAILABLE, failure)]
        return [ModelIndexEntry(name)]

    async def _scan(self) -> Scan:
        scan = await asyncio.to_thread(self.factory.scan)
        self._ambiguous = scan.ambiguous
        return scan

    def ambiguity(self, name: str) -> str:
        """Why a bare name says too little where namespaces are on; "" if it does not."""
        identifiers = self._ambiguous.get(name, ())
        if not identifiers:
            return ""
        return (
            f"There are {len(identifiers)} identifiers of model '{name}' in global map, model "
            f"namespace must be provided to resolve ambiguity: {', '.join(identifiers)}"
        )

    async def _configs(
        self, scan: Scan, names: Iterable[str], overrides: Mapping[str, str] | None = None
    ) -> dict[str, LoadedConfig]:
        """Configurations of the models and of all members below them; failures are recorded."""
        configs: dict[str, LoadedConfig] = {}
        waiting = list(names)
        seen = set(waiting)
        while waiting:
            name = waiting.pop()
            directory = scan.models.get(name)
            if directory is None:
                continue
            try:
                loaded = await asyncio.to_thread(
                    self.factory.load_config, directory, (overrides or {}).get(name)
                )
            except (NpuserveError, OSError) as error:  # the latter: replaced at this moment
                self.entry(name).failure = as_npuserve_error(error).reason
                logger.error("failed to poll model '%s': %s", name, error)
                continue
            configs[name] = loaded
            for member, _version in self.factory.members(loaded.config):
                if member not in seen:
                    seen.add(member)
                    waiting.append(member)
        return configs

    def _override_directory(self, scan: Scan, entry: ModelEntry) -> None:
        if entry.file_override is not None:
            scan.models[entry.name] = self.factory.directory_of(entry.name, entry.file_override)
            scan.problems.pop(entry.name, None)

    def entry(self, name: str) -> ModelEntry:
        """What is known of a name; made on first use."""
        entry = self.entries.get(name)
        if entry is None:
            entry = self.entries[name] = ModelEntry(name)
        return entry


def _check_name(name: str, *, is_folder: bool) -> None:
    """Refuse what names no model, before anything is done with it.

    Args:
        is_folder: a folder of this name is to be made. Other names may be identifiers of
            `--model-namespacing`, which have slashes.
    """
    if not name:
        raise InvalidArgumentError(
            "Model name cannot be empty. Please enter a valid name to deploy."
        )
    if name in (".", "..") or "\0" in name or (is_folder and "/" in name):
        raise InvalidArgumentError(
            f"invalid model name '{name}', model name must not contain path traversal characters"
        )
