"""An ensemble whose members answer when the test says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from google.protobuf import text_format

from npuserve.errors import NotFoundError, NpuserveError
from npuserve.model_config import ModelConfig
from npuserve.request import InferenceRequest
from npuserve.response import InferenceResponse
from npuserve.server.schedulers.base import SchedulerContext
from npuserve.server.schedulers.ensemble import EnsembleScheduler
from npuserve.server.statistics import ModelStatistics
from npuserve.tensor import Tensor
from npuserve.testing.clock import FakeClock

Values = dict[str, float]


def config(text: str) -> ModelConfig:
    parsed: ModelConfig = text_format.Parse(text, ModelConfig())
    return parsed


def member_config(
    name: str, inputs: str, outputs: str, *, batch: int = 0, decoupled: bool = False
) -> ModelConfig:
    """A model with FP32 [1] tensors; an input whose name ends in ? is optional."""
    text = f'name: "{name}" max_batch_size: {batch}\n'
    for kind, names in (("input", inputs), ("output", outputs)):
        for each in names.split():
            optional = "optional: true" if each.endswith("?") else ""
            bare = each.rstrip("?")
            text += f'{kind} {{ name: "{bare}" data_type: TYPE_FP32 dims: 1 {optional} }}\n'
    if decoupled:
        text += "model_transaction_policy { decoupled: true }\n"
    return config(text)


def tensor(name: str, value: float, batched: bool = False) -> Tensor:
    shape = (1, 1) if batched else (1,)
    return Tensor.from_numpy(name, np.full(shape, value, np.float32))


def values(tensors: list[Tensor]) -> Values:
    return {each.name: float(each.as_numpy().reshape(-1)[0]) for each in tensors}


class Answers:
    """What a client sees of one request."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.final: int = 0

    def __call__(self, response: InferenceResponse | None, final: bool) -> None:
        assert not self.final, "nothing comes after the final response"
        if response is not None:
            self.responses.append(response)
        self.final += final

    @property
    def outputs(self) -> list[Values]:
        return [values(response.outputs) for response in self.responses]

    @property
    def error(self) -> NpuserveError:
        assert self.final == 1
        assert self.responses[-1].error is not None
        return self.responses[-1].error


class Members:
    """Stands in for the server: keeps the requests of members until a test answers them."""

    def __init__(self, *configs: ModelConfig) -> None:
        self._configs = {each.name: each for each in configs}
        self.holds: Counter[str] = Counter()
        self.waiting: list[InferenceRequest] = []
        self.seen: list[InferenceRequest] = []
        self.at_once: dict[str, Callable[[Values], Values]] = {}

    def lookup(self, name: str, version: int) -> Any:
        if name not in self._configs:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        return SimpleNamespace(
            config=self._configs[name],
            labels=lambda output: [f"{name} {output}"],
            accept=self.accept,
            hold=lambda: self.holds.update([name]),
            let_go=lambda: self.holds.subtract([name]),
        )

    def accept(self, request: InferenceRequest) -> None:
        self.seen.append(request)
        function = self.at_once.get(request.model_name)
        if function is not None:
            self.answer(request, function(values(list(request.inputs.values()))))
        else:
            self.waiting.append(request)

    def unload(self, name: str) -> None:
        del self._configs[name]

    def take(self, name: str) -> InferenceRequest:
        """The request of this member that waits longest."""
        request = next(each for each in self.waiting if each.model_name == name)
        self.waiting.remove(request)
        return request

    def answer(
        self,
        request: InferenceRequest,
        outputs: Values | None,
        *,
        final: bool = True,
        parameters: Any = None,
    ) -> None:
        response = None
        if outputs is not None:
            batched = self._configs[request.model_name].max_batch_size > 0
            tensors = [tensor(name, value, batched) for name, value in outputs.items()]
            response = InferenceResponse(tensors, parameters=parameters)
        request.deliver(response, final)

    def fail(self, request: InferenceRequest, error: NpuserveError) -> None:
        request.deliver(InferenceResponse.from_error(error), True)


class Ensemble:
    """An ensemble scheduler with everything around it faked."""

    def __init__(self, text: str, *members: ModelConfig, cache: Any = None) -> None:
        self.members = Members(*members)
        self.statistics = ModelStatistics()
        self.clock = FakeClock()
        self.scheduler = EnsembleScheduler(
            SchedulerContext(
                name="e",
                version=1,
                config=config('name: "e" platform: "ensemble"\n' + text),
                model_dir=Path(),
                instances=None,  # type: ignore[arg-type]
                statistics=self.statistics,
                clock=self.clock,
                lookup=self.members.lookup,
                cache=cache,
            )
        )

    def infer(
        self, inputs: Values, outputs: tuple[str, ...] = (), **kwargs: Any
    ) -> tuple[InferenceRequest, Answers]:
        answers = Answers()
        request = InferenceRequest(
            "e",
            {name: tensor(name, value) for name, value in inputs.items()},
            answers,
            requested_outputs=outputs,
            **kwargs,
        )
        request.start_ns = request.queue_ns = self.clock.now_ns()
        self.statistics.pending += 1
        self.scheduler.enqueue(request)
        return request, answers


def io(kind: str, names: str) -> str:
    return "".join(
        f'{kind} {{ name: "{name.rstrip("?")}" data_type: TYPE_FP32 dims: 1 '
        f"optional: {str(name.endswith('?')).lower()} }}\n"
        if kind == "input"
        else f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 1 }}\n'
        for name in names.split()
    )


def step(model: str, inputs: str, outputs: str) -> str:
    """A step with maps given as "X=A Y=B"."""
    text = f'step {{ model_name: "{model}" model_version: -1 '
    for kind, pairs in (("input_map", inputs), ("output_map", outputs)):
        for pair in pairs.split():
            key, _, value = pair.partition("=")
            text += f'{kind} {{ key: "{key}" value: "{value}" }} '
    return text + "}\n"


def steps(*entries: str, extra: str = "") -> str:
    return f"ensemble_scheduling {{ {''.join(entries)} {extra} }}\n"


ONE = member_config("one", "X", "Y")
ADD = member_config("add", "X Y", "Z")
STREAM = member_config("stream", "X", "Y", decoupled=True)

CHAIN = (
    io("input", "A")
    + io("output", "MID END SIDE")
    + steps(
        step("one", "X=A", "Y=MID"), step("two", "X=MID", "Y=END"), step("three", "X=A", "Y=SIDE")
    )
)
CHAIN_MEMBERS = tuple(member_config(name, "X", "Y") for name in ("one", "two", "three"))


OPTIONAL = (
    io("input", "A B?")
    + io("output", "C D")
    + steps(step("opt", "X=A Y=B", "P=t Q=C"), step("opt", "X=A Y=t", "P=D"))
)
OPT = member_config("opt", "X Y?", "P Q")
