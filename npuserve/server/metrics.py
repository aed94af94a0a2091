"""Metric families and their values; no text format (protocol/prometheus.py writes it).

Nothing is counted here: model metrics are read from the same `ModelStatistics` that `/stats`
shows, when somebody scrapes. A series outlives a reload of its model, so its counters are the sums
over the model objects it has had; it ends with an unload.

What instances on a card count has the label `gpu_uuid` of that card, as in Triton; the series
without the label has what no card executed, and what ran before npu-smi first told of the cards:
counters never move from one series to another. Together they are what `/stats` shows.

`ServerMetrics.collect` yields prometheus_client's `Metric` objects, so an embedder can register
it as a collector of his own registry.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import Metric

from npuserve.server.custom_metrics import add_histogram
from npuserve.server.latency import FIRST_RESPONSE_BUCKETS_MS, Histogram, LatencySummaries
from npuserve.server.machine import Machine
from npuserve.server.metric_families import (
    CACHE_COUNTERS,
    CACHE_LATENCY_COUNTERS,
    CACHE_SUMMARIES,
    COUNTERS,
    LATENCY_COUNTERS,
    SUCCESS,
    SUMMARIES,
    Counter,
    all_readers,
    failure_reader,
)
from npuserve.server.npu_metrics import NpuMetrics
from npuserve.server.response_cache import LocalStore
from npuserve.server.statistics import FailureReason, ModelStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npuserve.model_config import ModelConfig
    from npuserve.server.core import InferenceServer
    from npuserve.server.model import Model
    from npuserve.server.statistics import DeviceStatistics

logger = logging.getLogger(__name__)

_DEFAULT_QUANTILES = "0.5:0.05,0.9:0.01,0.95:0.001,0.99:0.001,0.999:0.001"
_SETTINGS = frozenset(
    {"counter_latencies", "summary_latencies", "histogram_latencies", "summary_quantiles"}
)
_FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


@dataclass(frozen=True)
class MetricsConfig:
    """The `--metrics-config` settings."""

    counter_latencies: bool = True
    summary_latencies: bool = False
    histogram_latencies: bool = False
    quantiles: tuple[float, ...] = ()

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> MetricsConfig:
        """Read the settings; what is unknown or cannot be read is logged and left out."""
        for name in settings.keys() - _SETTINGS:
            # Differs from Triton: it says nothing, and a dashboard stays empty.
            logger.warning(
                "--metrics-config %s is not known and has no effect; known: %s",
                name, ", ".join(sorted(_SETTINGS)),
            )  # fmt: skip
        quantiles = []
        for pair in settings.get("summary_quantiles", _DEFAULT_QUANTILES).split(","):
            quantile, colon, _ = pair.partition(":")
            if not colon:
                logger.error(
                    "Invalid option: [%s]. No ':' delimiter found. Expected format is "
                    "<quantile>:<error>",
                    pair,
                )
            elif (fraction := _fraction(quantile)) is None:
                logger.error("Invalid option: [%s]. A quantile is a number from 0 to 1", pair)
            else:
                quantiles.append(fraction)
        return cls(
            counter_latencies=_flag(settings, "counter_latencies", True),
            summary_latencies=_flag(settings, "summary_latencies", False),
            histogram_latencies=_flag(settings, "histogram_latencies", False),
            quantiles=tuple(quantiles),
        )


@dataclass
class _Series:
    """The time series of one (model, version): the model objects behind it, the newest last."""

    labels: dict[str, str]
    caching: bool
    models: list[Model] = field(default_factory=list)
    # Totals of model objects that are freed, by card and counter.
    gone: dict[str, dict[str, int]] = field(default_factory=dict)

    def devices(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Each card that executed something, with its labels; first "", for none."""
        cards = dict.fromkeys(self.gone)
        for model in self.models:
            cards.update(dict.fromkeys(model.statistics.devices))
        for card in sorted(cards):
            yield card, self.labels | {"gpu_uuid": card} if card else self.labels

    def read(self, card: str, name: str, read: Callable[[DeviceStatistics], int]) -> int:
        """Total over all model objects the series has had."""
        now = (model.statistics.devices.get(card) for model in self.models)
        gone = self.gone.get(card, {}).get(name, 0)
        return gone + sum(read(statistics) for statistics in now if statistics is not None)

    def add_gone(self, model: Model) -> None:
        """Keep the totals of a model object that is freed."""
        for card, statistics in model.statistics.devices.items():
            totals = self.gone.setdefault(card, {})
            for name, read in all_readers():
                totals[name] = totals.get(name, 0) + read(statistics)


class ServerMetrics:
    """Everything `/metrics` shows. Loop thread only."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self.config = MetricsConfig.from_settings(server.options.metrics_config)
        self._series: dict[tuple[str, str, int], _Series] = {}
        self._npus = NpuMetrics(on_names=self._names_known)
        self._machine = Machine(round(server.options.metrics_interval_ms * 1_000_000))

    async def start(self) -> None:
        """Take the first sample of processor times; utilisation counts from here."""
        self._machine.refresh()
        if self._server.options.allow_gpu_metrics:
            self._npus.start()

    async def stop(self) -> None:
        """End what runs in the background."""
        if self._server.options.allow_gpu_metrics:
            self._npus.stop()

    # ---------------------------------------------------------------- models come and go

    def model_loaded(self, model: Model, replaced: Model | None) -> None:
        """Show a version that became READY; it goes on with the counters of the one it replaces.

        Args:
            replaced: the object of the same version it takes over from; it may still be draining.
        """
        key = _key(model)
        series = self._series.get(key)
        if series is None or replaced is None:
            series = self._series[key] = _Series(self._labels(model), _caching(model))
        series.labels, series.caching = self._labels(model), _caching(model)
        series.models.append(model)
        self._name_cards(model)  # known since its placements were made
        self._add_distributions(model, replaced)

    def model_unloaded(self, model: Model) -> None:
        """Drop the series of a freed version, unless another object has taken it over."""
        key = _key(model)
        series = self._series.get(key)
        if series is None or model not in series.models:
            return
        series.models.remove(model)
        if not series.models:
            del self._series[key]
            return
        series.add_gone(model)

    def _labels(self, model: Model) -> dict[str, str]:
        labels = {f"_{key}": value for key, value in model.config.metric_tags.items()}
        if self._server.options.model_namespacing:
            labels["namespace"] = model.namespace
        return {**labels, "model": model.name, "version": str(model.version)}

    def _add_distributions(self, model: Model, replaced: Model | None) -> None:
        """Give it the distributions that are wanted: those of the model it replaces, or new."""
        statistics = model.statistics
        former = replaced.statistics if replaced is not None else ModelStatistics()
        if self.config.histogram_latencies:
            bounds = _histogram_bounds(model.config)
            statistics.first_response = former.first_response or Histogram(bounds)
        if self.config.summary_latencies:
            for card, device in statistics.devices.items():
                old = former.devices.get(card)
                device.summaries = (old and old.summaries) or LatencySummaries()

    def card_name(self, card: int) -> str:
        """The `gpu_uuid` of a card, "" without metrics of cards. May block, see `NpuMetrics`."""
        return self._npus.name_of(card)

    def _names_known(self) -> None:
        """Tell the loop; in the thread that reads npu-smi."""
        try:
            self._server.loop.call_soon_threadsafe(self._name_all_cards)
        except RuntimeError:
            logger.debug("the loop is closed: nothing is counted any more")

    def _name_all_cards(self) -> None:
        for series in self._series.values():
            for model in series.models:
                self._name_cards(model)

    def _name_cards(self, model: Model) -> None:
        """Let instances whose card had no name count by its name from now on."""
        statistics = model.statistics
        for instance in model.pool.instances:
            if instance.card < 0 or instance.counters is not statistics.own:
                continue
            instance.counters = statistics.device(self._npus.known_name(instance.card))
            if self.config.summary_latencies and instance.counters.summaries is None:
                instance.counters.summaries = LatencySummaries()

    # ---------------------------------------------------------------- what a scrape sees

    def collect(self) -> Iterator[Metric]:
        """All families, Triton's first; what models add to one of these is in it."""
        custom = {family.name: family for family in self._server.custom_metrics.collect()}
        for family in self._own_families():
            if family.name in custom:
                family.samples += custom.pop(family.name).samples
            yield family
        yield from custom.values()

    def kinds(self) -> dict[str, str]:
        """Kinds of the families that are there without any model's, by name."""
        return {family.name: family.type.upper() for family in self._own_families()}

    def _own_families(self) -> Iterator[Metric]:
        yield from self._request_families()
        for counter in COUNTERS:
            yield self._counter_family(counter)
        if self.config.counter_latencies:
            for counter in LATENCY_COUNTERS:
                yield self._counter_family(counter)
        yield from self._model_gauges()
        if self._server.cache is not None:
            yield from self._model_cache_families()
        if self.config.histogram_latencies:
            yield self._histogram_family()
        if self.config.summary_latencies:
            yield from self._summary_families()
        yield from self._memory_families()
        if self._server.options.allow_cpu_metrics:
            yield from self._machine.collect()
        if self._server.options.allow_gpu_metrics:
            yield from self._npus.collect()
        if isinstance(self._server.cache, LocalStore):
            yield from _local_cache_families(self._server.cache)

    def _request_families(self) -> Iterator[Metric]:
        yield self._counter_family(SUCCESS)
        failure = Metric(
            "nv_inference_request_failure",
            "Number of failed inference requests, all batch sizes",
            "counter",
        )
        for series in self._series.values():
            for card, labels in series.devices():
                for reason in FailureReason:
                    failure.add_sample(
                        failure.name,
                        labels | {"reason": reason.value},
                        series.read(card, *failure_reader(reason)),
                    )
        yield failure

    def _counter_family(self, counter: Counter, caching_only: bool = False) -> Metric:
        family = Metric(counter.name, counter.help, "counter")
        for series in self._series.values():
            if caching_only and not series.caching:
                continue
            for card, labels in series.devices():
                value = series.read(card, counter.name, counter.read)
                family.add_sample(counter.name, labels, value)
        return family

    def _model_gauges(self) -> Iterator[Metric]:
        # Differs from Triton: these and the histogram have no series with `gpu_uuid`, whose value
        # would always be 0.
        pending = Metric(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            "gauge",
        )
        load = Metric("nv_model_load_duration_secs", "Model load time in seconds", "gauge")
        for series in self._series.values():
            waiting = sum(model.statistics.pending for model in series.models)
            pending.add_sample(pending.name, series.labels, waiting)
            load.add_sample(load.name, series.labels, series.models[-1].load_seconds)
        yield pending
        yield load

    def _model_cache_families(self) -> Iterator[Metric]:
        counters: tuple[Counter, ...] = CACHE_COUNTERS
        if self.config.counter_latencies:
            counters += CACHE_LATENCY_COUNTERS
        for counter in counters:
            yield self._counter_family(counter, caching_only=True)

    def _histogram_family(self) -> Metric:
        family = Metric(
            _FIRST_RESPONSE, "Duration from request to first response in milliseconds", "histogram"
        )
        for series in self._series.values():
            histogram = series.models[-1].statistics.first_response
            if histogram is not None:
                add_histogram(
                    family, series.labels, histogram.bounds, histogram.counts, histogram.sum
                )
        return family

    def _summary_families(self) -> Iterator[Metric]:
        every = list(self._series.values())
        caching = [series for series in every if series.caching]
        # Triton has no request summary for models that use the cache.
        plain = [series for series in every if not series.caching]
        for duration, name, text in SUMMARIES:
            shown = plain if duration == "request" else every
            yield self._summary_family(duration, name, text, shown)
        if self._server.cache is not None:
            for duration, name, text in CACHE_SUMMARIES:
                yield self._summary_family(duration, name, text, caching)

    def _summary_family(self, duration: str, name: str, text: str, shown: list[_Series]) -> Metric:
        family = Metric(name, text, "summary")
        now_ns = self._server.clock.now_ns()
        for series in shown:
            devices = series.models[-1].statistics.devices
            for card, labels in series.devices():
                device = devices.get(card)
                if device is None or device.summaries is None:
                    continue
                summary = device.summaries.by_name[duration]
                family.add_sample(f"{name}_count", labels, summary.count)
                family.add_sample(f"{name}_sum", labels, summary.sum)
                values = summary.quantiles(self.config.quantiles, now_ns)
                for quantile, value in zip(self.config.quantiles, values, strict=True):
                    family.add_sample(name, labels | {"quantile": f"{quantile:g}"}, value)
        return family

    def _memory_families(self) -> Iterator[Metric]:
        yield _gauge(
            "nv_pinned_memory_pool_total_bytes",
            "Pinned memory pool total memory size, in bytes",
            self._server.options.pinned_memory_pool_byte_size,
        )
        yield _gauge(
            "nv_pinned_memory_pool_used_bytes",
            "Pinned memory pool used memory size, in bytes",
            self._server.buffer_pool.leased_bytes,
        )


def _key(model: Model) -> tuple[str, str, int]:
    return model.namespace, model.name, model.version


def _caching(model: Model) -> bool:
    return model.config.response_cache.enable


def _fraction(text: str) -> float | None:
    """The number from 0 to 1, None if the text is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= 1 else None


def _flag(settings: Mapping[str, str], key: str, default: bool) -> bool:
    text = settings.get(key)
    return default if text is None else text.lower() in ("true", "1", "on")


def _histogram_bounds(config: ModelConfig) -> tuple[float, ...]:
    """The buckets of `model_metrics`, else the default ones."""
    for control in config.model_metrics.metric_control:
        if control.metric_identifier.family == _FIRST_RESPONSE:
            return tuple(control.histogram_options.buckets)
    return FIRST_RESPONSE_BUCKETS_MS


def _gauge(name: str, text: str, value: float) -> Metric:
    family = Metric(name, text, "gauge")
    family.add_sample(name, {}, value)
    return family


def _local_cache_families(store: LocalStore) -> Iterator[Metric]:
    lookups = store.hits + store.misses
    for name, text, value in (
        ("nv_cache_util", "Cache utilization [0.0 - 1.0]", store.used_bytes / store.max_bytes),
        ("nv_cache_num_entries", "Number of responses stored in response cache", len(store)),
        ("nv_cache_num_hits", "Number of cache hits in response cache", store.hits),
        ("nv_cache_num_misses", "Number of cache misses in response cache", store.misses),
        ("nv_cache_num_lookups", "Number of cache lookups in response cache", lookups),
        ("nv_cache_num_evictions", "Number of cache evictions in response cache",
         store.evictions),
        ("nv_cache_lookup_duration", "Total cache lookup duration (hit and miss), in microseconds",
         store.lookup_ns // 1_000),
        ("nv_cache_insertion_duration", "Total cache insertion duration, in microseconds",
         store.insertion_ns // 1_000),
    ):  # fmt: skip
        yield _gauge(name, text, value)
