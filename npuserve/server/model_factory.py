"""Builds `Model` objects: from a directory to a version that is ready to serve.

The one place that brings repository, backends, devices, warm-up and rate limiter together;
lifecycle.py decides when, this file knows how. Functions without `async` may block and are called
in helper threads.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from npuserve import model_repository
from npuserve.backends.base import Backend, BackendModelContext, Placement
from npuserve.backends.registry import BackendRegistry
from npuserve.errors import InvalidArgumentError, InvalidConfigError
from npuserve.model_config import ModelConfig
from npuserve.model_repository import LoadedConfig
from npuserve.server import instance_group
from npuserve.server.devices import visible_cards
from npuserve.server.ensemble_check import check_ensemble
from npuserve.server.ensemble_graph import member_models
from npuserve.server.host_policy import policy_cores
from npuserve.server.load_limit import check_load_limit
from npuserve.server.model import Model
from npuserve.server.warmup import run_warmup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from npuserve.model_repository import Fingerprint, ModelDirectory, Scan
    from npuserve.server.core import InferenceServer
    from npuserve.server.instance_pool import InstancePool

logger = logging.getLogger(__name__)


@contextmanager
def _located(where: Callable[[str], str]) -> Iterator[None]:
    """Say of a broken rule where in its file the field is."""
    try:
        yield
    except InvalidConfigError as error:
        raise InvalidArgumentError(f"{error}{where(error.field)}") from error


class ModelFactory:
    """How this server makes models."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._options = server.options
        # Besides those of the options: SageMaker names folders while the server runs.
        self.more_repositories: list[str] = []
        self.backends = BackendRegistry(directory=server.options.backend_directory)

    # ---------------------------------------------------------------- repository (may block)

    def scan(self) -> Scan:
        """What the repositories hold now."""
        repositories = (*self._options.model_repository, *self.more_repositories)
        return model_repository.scan(repositories, self._options)

    def load_config(self, directory: ModelDirectory, override_json: str | None) -> LoadedConfig:
        """Parsed and normalised configuration; raises with file, line and field."""
        return model_repository.load_config(directory, self._options, override_json)

    def fingerprint(self, directory: ModelDirectory) -> Fingerprint:
        """Equal as long as no file of the model changed."""
        return model_repository.fingerprint(directory)

    @staticmethod
    def select_versions(config: ModelConfig, directory: ModelDirectory) -> list[int]:
        """Versions that the policy serves, ascending."""
        return model_repository.select_versions(config, directory)

    @staticmethod
    def release(path: Path) -> None:
        """Remove a model directory that was made for a load; any other one is left alone."""
        model_repository.release(path)

    @staticmethod
    def directory_of(name: str, path: Path) -> ModelDirectory:
        """A model directory outside the repositories (files given with a load call)."""
        return model_repository.ModelDirectory.from_path(name, path)

    # ---------------------------------------------------------------- ensembles

    @staticmethod
    def members(config: ModelConfig) -> list[tuple[str, int]]:
        """Member models of an ensemble with their versions (-1 newest); [] for other models."""
        return member_models(config)

    def check_ensemble(
        self, config: ModelConfig, where: Callable[[str], str] = lambda _field: ""
    ) -> bool:
        """Whether the ensemble is decoupled, because a member is.

        Args:
            where: see `LoadedConfig`.

        Raises:
            InvalidArgumentError: the loaded members do not fit together.
        """

        def config_of(name: str, version: int) -> ModelConfig:
            return self._server.model(name, version).config

        with _located(where):
            return check_ensemble(config, config_of)

    # ---------------------------------------------------------------- models

    async def make(
        self, directory: ModelDirectory, loaded: LoadedConfig, version: int, namespace: str
    ) -> Model:
        """A started model version, ready to be published.

        Raises:
            NpuserveError: why not; nothing is left behind.
        """
        config = ModelConfig()
        config.CopyFrom(loaded.config)
        where = self._where(config, loaded.where)
        if self.members(config):
            decoupled = self.check_ensemble(config, where)
            config.model_transaction_policy.decoupled = decoupled
        # What is made for the model may use all cores.
        with _located(where), self._server.core_sharing:
            context, backend = await asyncio.to_thread(
                self._prepare, directory, LoadedConfig(config, where), version
            )
            model = Model(context, backend, self._server.loop, namespace)
            await model.start(self._server, configure_pool=self._configure_pool, warm_up=run_warmup)
        return model

    def _where(self, config: ModelConfig, in_file: Callable[[str], str]) -> Callable[[str], str]:
        """`in_file`, but for parameters that only the command line gives: those are there."""

        def where(field: str) -> str:
            for key in self._options.backend_options(config.backend):
                if field == f'parameters["{key}"]' and key not in config.parameters:
                    return f" (--backend-config: {key})"
            return in_file(field)

        return where

    def _prepare(
        self, directory: ModelDirectory, loaded: LoadedConfig, version: int
    ) -> tuple[BackendModelContext, Backend | None]:
        config, where = loaded
        options = self._options
        model_repository.fetch(directory)  # an unload may have removed the copy meanwhile
        is_ensemble = config.platform == "ensemble"
        backend = None if is_ensemble else self.backends.get(config.backend)
        context = BackendModelContext(
            name=config.name,
            version=version,
            config=config,
            model_dir=directory.path,
            version_dir=directory.version_path(version),
            placements=(),
            backend_options=options.backend_options(config.backend),
            services=self._server,
        )
        if backend is not None:
            if not options.disable_auto_complete_config:
                backend.auto_complete(context)
            model_repository.normalize(config)
            cards = visible_cards()
            instance_group.fill_instance_groups(config, cards)
            context.placements = [
                replace(
                    placement,
                    cpu_cores=self._policy_cores(placement.host_policy),
                    card_name=self._card_name(placement),
                )
                for placement in instance_group.placements(config)
            ]
        model_repository.validate_config(config, directory, where)
        check_load_limit(config.name, context.placements, options.model_load_gpu_limit)
        return context, backend

    def _policy_cores(self, policy: str) -> frozenset[int]:
        return policy_cores(policy, self._options.host_policy.get(policy, {}))

    def _card_name(self, placement: Placement) -> str:
        if placement.kind != "GPU":
            return ""
        return self._server.metrics.card_name(placement.device_id)

    def _configure_pool(self, pool: InstancePool, config: ModelConfig) -> None:
        if self._server.rate_limiter is not None:
            self._server.rate_limiter.configure(pool, config)
