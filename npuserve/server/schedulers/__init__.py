"""Schedulers: which one a model gets, by its configuration."""

from __future__ import annotations

from npuserve.server.schedulers.base import Scheduler, SchedulerContext

__all__ = ["Scheduler", "SchedulerContext", "create_scheduler"]


def create_scheduler(context: SchedulerContext) -> Scheduler:
    """The scheduler that the configuration asks for (scheduling_choice).

    May block, but for an ensemble: see `DynamicBatcher` and `SequenceBatcher`.

    Raises:
        NpuserveError: what the configuration asks for cannot be.
    """
    # Imported here: a model without sequences or ensembles does not pay for them at start-up.
    choice = context.config.WhichOneof("scheduling_choice")
    if choice == "ensemble_scheduling":
        from npuserve.server.schedulers.ensemble import EnsembleScheduler

        return EnsembleScheduler(context)
    if choice == "sequence_batching":
        from npuserve.server.schedulers.sequence_batcher import SequenceBatcher

        return SequenceBatcher(context)
    if choice == "dynamic_batching":
        from npuserve.server.schedulers.dynamic_batcher import DynamicBatcher

        return DynamicBatcher(context)
    from npuserve.server.schedulers.default import DefaultScheduler

    return DefaultScheduler(context)
