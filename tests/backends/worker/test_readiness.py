"""`is_ready` of a model decides about its readiness, whatever the model is busy with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.backends.worker.models import served_model

# execute waits until is_ready was called; so nothing is answered unless both run side by side.
BUSY = """
class TritonPythonModel:
    def initialize(self, args):
        self.asked = threading.Event()

    def is_ready(self):
        self.asked.set()
        return True

    def execute(self, requests):
        self.asked.wait()
        return [response(np.ones(1, np.float32)) for r in requests]
"""

BUSY_ASYNC = """
import asyncio

class TritonPythonModel:
    def initialize(self, args):
        self.asked = asyncio.Event()

    async def is_ready(self):
        self.asked.set()
        return True

    async def execute(self, requests):
        await self.asked.wait()
        return [response(np.ones(1, np.float32)) for r in requests]
"""

ANSWERS = """
class TritonPythonModel:
    def is_ready(self):
        ANSWER

    def execute(self, requests):
        return [response(np.ones(1, np.float32)) for r in requests]
"""

executions = pytest.mark.parametrize("execution", ["process", "thread"])


@executions
@pytest.mark.parametrize("code", [BUSY, BUSY_ASYNC], ids=["plain", "async"])
async def test_a_busy_model_is_asked(tmp_path: Path, code: str, execution: str) -> None:
    """The question does not wait for the end of a running execute."""
    async with served_model(tmp_path, code, execution=execution) as models:
        call = models.start()
        assert await models.server.model_ready("m")
        assert (await call.answer()).value == [1.0]


@executions
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("return False", ""),
        ("raise ValueError('no card')", "ValueError: no card"),
        ("return 1", "is_ready() must return a boolean value"),
        ("sys.exit(1)", "SystemExit: 1"),
    ],
)
async def test_anything_but_true_is_not_ready(
    tmp_path: Path, answer: str, reason: str, execution: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The model stays loaded and serves on, but it is not ready; the log says why."""
    code = ANSWERS.replace("ANSWER", answer)
    async with served_model(tmp_path, code, execution=execution) as models:
        assert not await models.server.model_ready("m")
        assert reason in caplog.text
        assert models.server.ready()
        assert (await models.infer()).value == [1.0]


@executions
async def test_a_coroutine_beside_a_plain_execute(tmp_path: Path, execution: str) -> None:
    """`async def is_ready` needs no `async def execute`."""
    code = ANSWERS.replace("def is_ready", "async def is_ready").replace("ANSWER", "return True")
    async with served_model(tmp_path, code, execution=execution) as models:
        assert await models.server.model_ready("m")


async def test_death_is_an_answer(tmp_path: Path) -> None:
    """A worker that dies of the question is not ready at once, not after the time limit."""
    code = ANSWERS.replace("ANSWER", "os._exit(3)")
    async with served_model(tmp_path, code) as models, asyncio.timeout(4):
        assert not await models.server.model_ready("m")


@executions
async def test_a_model_asks_about_itself(tmp_path: Path, execution: str) -> None:
    """pb_utils.is_model_ready of the model's own name, out of its execute, is answered."""
    code = """
    class TritonPythonModel:
        def is_ready(self):
            return True

        def execute(self, requests):
            ready = pb_utils.is_model_ready("m")
            return [response(np.array([ready], np.float32)) for r in requests]
    """
    async with served_model(tmp_path, code, execution=execution) as models:
        assert (await models.infer()).value == [1.0]
