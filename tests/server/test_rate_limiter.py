"""The rate limiter: resources shared by instances of several models, and who is next."""

from __future__ import annotations

from typing import Any, cast

import pytest
from google.protobuf import text_format

from npuserve.backends.base import Placement
from npuserve.errors import InvalidArgumentError
from npuserve.flag_values import RateLimitResource
from npuserve.model_config import ModelConfig
from npuserve.request import SEQUENCE_END, SEQUENCE_START, InferenceRequest
from npuserve.server.rate_limiter import RateLimiter
from npuserve.server.schedulers import Scheduler, create_scheduler
from npuserve.testing.clock import FakeClock
from npuserve.testing.instances import FakePool, context_of

MS = 1_000_000


class Models:
    """Models under one limiter, their requests counted as they start."""

    def __init__(self, *limits: RateLimitResource) -> None:
        self.clock = FakeClock()
        self.limiter = RateLimiter(limits)
        self.pools: dict[str, FakePool] = {}
        self.schedulers: dict[str, Scheduler] = {}
        self.started: list[str] = []

    def add(
        self,
        name: str,
        rate_limiter: str,
        count: int = 1,
        device: int = 0,
        scheduling: str = "",
        max_inflight: int = 1,
    ) -> None:
        """Load a model whose instances all have this `rate_limiter`."""
        config = ModelConfig()
        text_format.Parse(f'name: "{name}" {scheduling}', config)
        group = config.instance_group.add()
        text_format.Parse(rate_limiter, group.rate_limiter)

        def duration(_: object) -> int:
            self.started.append(name)
            return 10 * MS

        pool = FakePool(self.clock, count=count, duration_ns=duration, max_inflight=max_inflight)
        for instance in pool.instances:
            instance.placement = Placement(
                instance.name, "GPU", device, 0, instance.index, rate_limiter=group.rate_limiter
            )
        self.limiter.configure(cast("Any", pool), config)
        self.pools[name] = pool
        self.schedulers[name] = create_scheduler(context_of(config, pool))

    def send(self, name: str, count: int = 1) -> None:
        """Requests for a model, each a sequence of its own where that matters."""
        both = SEQUENCE_START | SEQUENCE_END
        for number in range(1, count + 1):
            request = InferenceRequest(name, {}, lambda *_: None, correlation_id=number, flags=both)
            self.pools[name].statistics.pending += 1
            self.schedulers[name].enqueue(request)

    def running(self) -> int:
        """Executions under way."""
        return sum(i.inflight for pool in self.pools.values() for i in pool.instances)


def test_instances_that_share_a_resource_take_turns() -> None:
    """Two instances need the one R1 there is: they run one after the other."""
    models = Models(RateLimitResource("R1", 1))
    models.add("m", 'resources { name: "R1" count: 1 }', count=2)
    models.send("m", 3)
    for _ in range(3):
        assert models.running() == 1
        models.clock.advance(ms=10)
    assert models.running() == 0
    assert len(models.pools["m"].executed) == 3


def test_who_holds_what_an_idle_instance_lacks() -> None:
    """Those that have any of it; nobody for an instance that executes or has all it needs."""
    models = Models(RateLimitResource("R1", 1))
    models.add("m", 'resources { name: "R1" count: 1 }', count=2)
    models.add("n", 'resources [ { name: "R1" count: 1 }, { name: "R2" count: 1 } ]')
    models.add("other", 'resources { name: "R2" count: 1 }')
    (first, second), (third,), (other,) = (pool.instances for pool in models.pools.values())
    models.send("other")
    models.send("m")

    def holders(instance: Any) -> list[Any]:
        return models.limiter.holders(instance)

    assert [holders(each) for each in (first, second, third)] == [[], [first], [first, other]]
    models.clock.advance(ms=10)
    assert [holders(each) for each in (first, second, third)] == [[], [], []]


def test_without_a_limit_the_neediest_instance_sets_the_amount() -> None:
    """One model asks for 2, one for 1: amount 2, so two of the small ones or one large one run."""
    models = Models()
    models.add("large", 'resources { name: "R" count: 2 }')
    models.add("small", 'resources { name: "R" count: 1 }', count=3)
    models.send("small", 3)
    assert models.running() == 2


def test_device_resources_are_separate_and_global_ones_are_not() -> None:
    """Instances on two cards do not compete for a device resource, but for a global one."""
    models = Models(RateLimitResource("local", 1), RateLimitResource("shared", 1))
    models.add("a", 'resources { name: "local" count: 1 }', device=0)
    models.add("b", 'resources { name: "local" count: 1 }', device=1)
    models.send("a")
    models.send("b")
    assert models.running() == 2
    models = Models(RateLimitResource("shared", 1))
    models.add("a", 'resources { name: "shared" count: 1 global: true }', device=0)
    models.add("b", 'resources { name: "shared" count: 1 global: true }', device=1)
    models.send("a")
    models.send("b")
    assert models.running() == 1


def test_a_priority_of_two_gets_half_the_turns_of_one() -> None:
    """Waiting instances are served by executions x priority, the smallest first."""
    models = Models(RateLimitResource("R", 1))
    models.add("often", 'resources { name: "R" count: 1 } priority: 1')
    models.add("seldom", 'resources { name: "R" count: 1 } priority: 2')
    models.send("often", 40)
    models.send("seldom", 40)
    models.clock.advance(ms=300)
    assert abs(models.started.count("often") - 2 * models.started.count("seldom")) <= 2


def test_an_instance_of_overlapping_batches_gives_back_what_each_of_them_had() -> None:
    """Two batches side by side, twice: nothing of the resource is lost."""
    models = Models(RateLimitResource("R", 2))
    models.add("m", 'resources { name: "R" count: 1 }', max_inflight=3)
    for _ in range(3):
        models.send("m", 3)
        assert models.running() == 2
        models.clock.advance(ms=20)
        assert models.running() == 0
    assert len(models.started) == 9


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_a_model_with_sequences_has_its_turns(strategy: str) -> None:
    """Of two models that always have requests waiting, each runs half of the time."""
    models = Models(RateLimitResource("R", 1))
    models.add("plain", 'resources { name: "R" count: 1 }')
    scheduling = f"sequence_batching {{ {strategy} {{ }} }}"
    models.add("sequences", 'resources { name: "R" count: 1 }', scheduling=scheduling)
    models.send("plain", 40)
    models.send("sequences", 40)
    models.clock.advance(ms=400)
    assert abs(models.started.count("plain") - models.started.count("sequences")) <= 2


def test_a_model_without_resources_never_waits() -> None:
    """Instances that need nothing run although everything is lent."""
    models = Models(RateLimitResource("R", 1))
    models.add("limited", 'resources { name: "R" count: 1 }')
    models.add("free", "")
    models.send("limited")
    models.send("free")
    assert models.running() == 2


def test_an_unload_gives_way_to_the_others() -> None:
    """When the neediest model goes, the amount follows, and nobody is stuck."""
    models = Models()
    models.add("a", 'resources { name: "R" count: 1 }')
    models.add("b", 'resources { name: "R" count: 1 }')
    models.send("a")
    models.send("b")
    assert models.running() == 1
    models.clock.advance(ms=10)
    models.limiter.remove(cast("Any", models.pools["a"]))
    models.clock.advance(ms=10)
    assert models.started == ["a", "b"]


def test_an_instance_that_could_never_run_fails_the_load() -> None:
    """A need above the limit is refused with Triton's text."""
    models = Models(RateLimitResource("R", 2))
    with pytest.raises(
        InvalidArgumentError,
        match='Resource count for "R" is limited to 2 which will prevent scheduling of one or '
        "more model instances, the minimum required count is 5",
    ):
        models.add("m", 'resources { name: "R" count: 5 }')


def test_a_resource_is_either_global_or_of_devices() -> None:
    """The same name in both roles is refused."""
    models = Models()
    models.add("a", 'resources { name: "R" count: 1 global: true }')
    with pytest.raises(InvalidArgumentError, match='Resource "R" is present as both global and'):
        models.add("b", 'resources { name: "R" count: 1 }')
