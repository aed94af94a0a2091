"""Runs a backend alone: real instances in their threads or workers, without scheduler and wire.

What `check_backend` and the tests of backends stand on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npuserve.backends.base import BackendModelContext, Placement
from npuserve.model_config import is_decoupled
from npuserve.request import InferenceRequest
from npuserve.server.instance_pool import InstancePool
from npuserve.server.statistics import ModelStatistics
from npuserve.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from numpy.typing import NDArray

    from npuserve.backends.base import Backend, ServerServices
    from npuserve.model_config import ModelConfig
    from npuserve.response import InferenceResponse


@dataclass
class Answer:
    """What came back for one request, in order.

    Attributes:
        responses: every response delivered.
        finals: how often `final=True` came; exactly 1 when all is well.
    """

    responses: list[InferenceResponse] = field(default_factory=list)
    finals: int = 0

    @property
    def error(self) -> Exception | None:
        """Error of the first response, if it is one."""
        return self.responses[0].error if self.responses else None

    def array(self, name: str) -> NDArray[Any]:
        """An output of the only response.

        Raises:
            Exception: the response's error, where it is one.
        """
        (response,) = self.responses
        if response.error is not None:
            raise response.error
        (tensor,) = (tensor for tensor in response.outputs if tensor.name == name)
        return tensor.as_numpy()


class BackendDriver:
    """One model of one backend, loaded on entry and unloaded on exit.

    Args:
        config: as in config.pbtxt; auto-completed first, as the server does.
        model_dir: holds the version directory; need not exist for a backend without files.
        instances: number of instances to make.
    """

    def __init__(
        self,
        backend: Backend,
        config: ModelConfig,
        model_dir: Path,
        *,
        instances: int = 1,
        kind: str = "CPU",
        backend_options: Mapping[str, str] | None = None,
        services: ServerServices | None = None,
    ) -> None:
        self.backend = backend
        self.context = BackendModelContext(
            name=config.name,
            version=1,
            config=config,
            model_dir=model_dir,
            version_dir=model_dir / "1",
            placements=[
                Placement(f"{config.name}_0_{index}", kind, 0, 0, index)
                for index in range(instances)
            ],
            backend_options=backend_options or {},
            services=services,
        )
        self.pool: InstancePool

    async def __aenter__(self) -> BackendDriver:
        context = self.context
        await asyncio.to_thread(self.backend.auto_complete, context)
        self.pool = InstancePool(
            context.name,
            context.version,
            asyncio.get_running_loop(),
            ModelStatistics(),
            is_decoupled(context.config),
        )
        made = await asyncio.to_thread(self.backend.load, context)
        for placement, instance in zip(context.placements, made, strict=True):
            self.pool.add(placement, instance)
        try:
            await self.pool.initialize()
        except BaseException:
            await self._free()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.pool.wait_idle()
        await self._free()

    async def infer(
        self,
        *requests: Mapping[str, NDArray[Any] | Tensor],
        outputs: Sequence[str] = (),
        instance: int = 0,
    ) -> list[Answer]:
        """Execute the requests as one batch and wait for their final responses.

        Args:
            requests: for each the inputs by name, `[batch, *dims]` for a model that batches.
            outputs: requested output names; empty for all.
        """
        loop = asyncio.get_running_loop()
        answers = [Answer() for _ in requests]
        done: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]
        batch = [
            self._request(inputs, outputs, answer, future)
            for inputs, answer, future in zip(requests, answers, done, strict=True)
        ]
        batch_size = sum(max(1, request.batch_size) for request in batch)
        self.pool.statistics.pending += len(batch)
        self.pool.instances[instance].run(batch, batch_size)
        await asyncio.gather(*done)
        await self.pool.wait_idle()
        return answers

    def _request(
        self,
        inputs: Mapping[str, NDArray[Any] | Tensor],
        outputs: Sequence[str],
        answer: Answer,
        done: asyncio.Future[None],
    ) -> InferenceRequest:
        def on_response(response: InferenceResponse | None, final: bool) -> None:
            if response is not None:
                answer.responses.append(response)
            if final:
                answer.finals += 1
                done.set_result(None)

        tensors = {
            name: value if isinstance(value, Tensor) else Tensor.from_numpy(name, value)
            for name, value in inputs.items()
        }
        request = InferenceRequest(
            self.context.name, tensors, on_response, requested_outputs=tuple(outputs)
        )
        if self.context.config.max_batch_size > 0:
            request.batch_size = next(iter(tensors.values())).shape[0]
        return request

    async def _free(self) -> None:
        await self.pool.finalize()
        await asyncio.to_thread(self.backend.unload, self.context)
