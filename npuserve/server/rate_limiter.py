"""Resources and priorities across the instances of all models (`--rate-limit`).

An instance whose group names resources gets a batch only while it holds all of them; they come
back when the execution ends. Instances that have to wait are served in the order of
`executions x priority`, the smallest first, so a priority of 2 gets half the turns of 1.

Source: Triton core src/rate_limiter.cc.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npuserve.errors import InvalidConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from npuserve.flag_values import RateLimitResource
    from npuserve.model_config import ModelConfig
    from npuserve.options import ServerOptions
    from npuserve.server.instance import Instance
    from npuserve.server.instance_pool import InstancePool

GLOBAL = -1  # device number of a resource that all devices share

_Key = tuple[str, int]  # (resource, device)


@dataclass
class _Share:
    """What one instance needs, and how often it was served.

    Attributes:
        needs: of each batch.
        lent: batches that have it now.
    """

    needs: dict[_Key, int]
    priority: int
    executions: int = 0
    lent: int = 0

    @property
    def rank(self) -> int:
        return self.executions * self.priority


@dataclass
class _PoolState:
    """One model's instances, and whether its scheduler waits for a grant."""

    shares: dict[int, _Share] = field(default_factory=dict)  # by instance index
    waiting: bool = False


class RateLimiter:
    """Lends resources to instances. Loop thread only.

    Args:
        limits: amount by resource and device (None: of every device, or of a global one); a
            resource without a limit has as much as the neediest instance asks for.
    """

    def __init__(self, limits: Iterable[RateLimitResource] = ()) -> None:
        self._limits = {(limit.name, limit.device): limit.count for limit in limits}
        self._pools: dict[InstancePool, _PoolState] = {}
        self._amount: dict[_Key, int] = {}
        self._lent: dict[_Key, int] = {}
        self._waking = False

    @classmethod
    def from_options(cls, options: ServerOptions) -> RateLimiter | None:
        """None where `--rate-limit` is off: the settings of models are ignored then."""
        if options.rate_limit == "off":
            return None
        return cls(options.rate_limit_resource)

    def configure(self, pool: InstancePool, config: ModelConfig) -> None:
        """Take a model's instances in; called before its first batch.

        Raises:
            InvalidConfigError: an instance could never get what it needs.
        """
        state = _PoolState()
        for instance in pool.instances:
            placement = instance.placement
            state.shares[instance.index] = _share(placement.rate_limiter, placement.device_id)
        self._check(config.name, pool, state)
        self._pools[pool] = state
        self._resize()
        pool.rate_limiter = self

    def remove(self, pool: InstancePool) -> None:
        """Forget a model; nothing of it is running."""
        if self._pools.pop(pool, None) is not None:
            pool.rate_limiter = None
            self._resize()
            self._wake_soon(pool)

    def acquire(
        self, pool: InstancePool, instance: Instance, *, only: bool = False
    ) -> Instance | None:
        """An instance of the pool that has got its resources and must be run at once, or None.

        Args:
            instance: free, the one the pool would choose; another free one is taken if its
                resources are not available or it had more turns.
            only: no other one will do (sequences stay on their instance).
        """
        state = self._pools[pool]
        state.waiting = False
        candidates = (instance,) if only else pool.instances
        free = [i for i in candidates if i.is_free and not i.placement.passive]
        free.sort(key=lambda i: (state.shares[i.index].rank, i is not instance))
        for candidate in free:
            share = state.shares[candidate.index]
            if self._available(share) and not self._yields_to_another(pool, share):
                self._lend(share)
                return candidate
        state.waiting = True
        return None

    def release(self, instance: Instance) -> None:
        """An execution ended: take its resources back and let waiting models try."""
        share = self._pools[instance.pool].shares[instance.index]
        if not share.lent:  # a warm-up has none
            return
        share.lent -= 1
        for key, count in share.needs.items():
            self._lent[key] -= count
        self._wake_soon(instance.pool)

    def holders(self, instance: Instance) -> list[Instance]:
        """Those who hold what the instance lacks; nobody if that is not why it stands idle."""
        lacking: set[_Key] = set()
        if not instance.inflight:
            lacking = self._short_of(self._pools[instance.pool].shares[instance.index])
        return [
            pool.instances[index]
            for pool, state in self._pools.items()
            for index, share in state.shares.items()
            if share.lent and lacking & share.needs.keys()
        ]

    # ---------------------------------------------------------------- resources

    def _available(self, share: _Share) -> bool:
        return not self._short_of(share)

    def _short_of(self, share: _Share) -> set[_Key]:
        return {
            key
            for key, count in share.needs.items()
            if self._lent.get(key, 0) + count > self._amount[key]
        }

    def _lend(self, share: _Share) -> None:
        share.executions += 1
        share.lent += 1
        for key, count in share.needs.items():
            self._lent[key] = self._lent.get(key, 0) + count

    def _yields_to_another(self, pool: InstancePool, share: _Share) -> bool:
        """Whether a model that waits for the same resources has a smaller rank."""
        if not share.needs:
            return False
        return any(
            rival.rank < share.rank and rival.needs.keys() & share.needs.keys()
            for other, index, rival in self._waiting_shares()
            if other is not pool and other.instances[index].is_free
        )

    def _waiting_shares(self) -> Iterator[tuple[InstancePool, int, _Share]]:
        for pool, state in self._pools.items():
            if state.waiting:
                for index, share in state.shares.items():
                    yield pool, index, share

    def _wake_soon(self, pool: InstancePool) -> None:
        # Not now: the model whose instance became free asks first, so that it is compared too.
        if not self._waking:
            self._waking = True
            pool.loop.call_soon(self._wake_waiting)

    def _wake_waiting(self) -> None:
        """Let schedulers that got no instance ask again, the one with the smallest rank first."""
        self._waking = False
        for pool, index, share in sorted(self._waiting_shares(), key=lambda entry: entry[2].rank):
            instance, state = pool.instances[index], self._pools[pool]
            if state.waiting and instance.is_free and self._available(share) and pool.on_free:
                state.waiting = False
                pool.on_free(instance)

    def _resize(self) -> None:
        """Amounts after the models changed: the limit given, else the largest need."""
        amount: dict[_Key, int] = {}
        for state in self._pools.values():
            for share in state.shares.values():
                for key, count in share.needs.items():
                    amount[key] = max(amount.get(key, 0), count)
        for key in amount:
            limit = self._limit(key)
            if limit is not None:
                amount[key] = limit
        self._amount = amount

    def _limit(self, key: _Key) -> int | None:
        name, device = key
        limit = self._limits.get((name, None if device == GLOBAL else device))
        return self._limits.get((name, None)) if limit is None else limit

    def _check(self, model: str, pool: InstancePool, state: _PoolState) -> None:
        keys = {key for known in self._pools.values() for s in known.shares.values()
                for key in s.needs}  # fmt: skip
        for index, share in state.shares.items():
            keys |= share.needs.keys()
            for key, count in share.needs.items():
                limit = self._limit(key)
                if limit is not None and count > limit:
                    group = pool.instances[index].placement.group
                    raise InvalidConfigError(
                        f'Resource count for "{key[0]}" is limited to {limit} which will prevent '
                        "scheduling of one or more model instances, the minimum required count "
                        f"is {count}",
                        f"instance_group[{group}].rate_limiter",
                    )
        for name, device in sorted(keys):
            if device != GLOBAL and (name, GLOBAL) in keys:
                raise InvalidConfigError(
                    f'Resource "{name}" is present as both global and device-specific resource '
                    f"in the model configuration. (model {model})",
                    "instance_group",
                )


def _share(settings: Any, device: int) -> _Share:
    """The needs of one instance by the `rate_limiter` of its group."""
    if settings is None:
        return _Share({}, 1)
    needs = {
        (resource.name, GLOBAL if getattr(resource, "global") else device): resource.count
        for resource in settings.resources
    }
    return _Share(needs, max(1, settings.priority))
