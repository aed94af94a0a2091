"""Model readiness as the instances themselves see it.

The server knows whether an instance is alive; whether it can serve (its card answers, a service it
needs is up) only the instance can tell, and it may take its time. Source: `is_ready` of Triton's
python_backend.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from npuserve.backends.base import ModelInstance, settle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npuserve.server.instance import Instance

logger = logging.getLogger(__name__)

ANSWER_LIMIT_S = 5.0
"""An instance that takes longer counts as not ready. Source: Triton."""


class Readiness:
    """Asks the instances of one model; an instance is asked one question at a time.

    Checks that come while it is out share its answer, also if an earlier check gave up on it: an
    instance that hangs is not asked ever more often.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._questions: dict[str, asyncio.Task[bool]] = {}  # by name of the instance

    async def check(self, instances: Iterable[Instance]) -> bool:
        """Whether all of the instances that have an opinion are ready."""
        questions = [self._ask(i) for i in instances if i.backend_instance.has_readiness]
        if not questions:
            return True
        answered, open_ones = await asyncio.wait(questions, timeout=ANSWER_LIMIT_S)
        return not open_ones and all(not q.cancelled() and q.result() for q in answered)

    def close(self) -> None:
        """The instances are going to be finalised: nobody waits for their answers."""
        for question in self._questions.values():
            question.cancel()

    def _ask(self, instance: Instance) -> asyncio.Task[bool]:
        question = self._questions.get(instance.name)
        if question is None or question.done():
            question = self._loop.create_task(
                self._answer(instance), name=f"readiness-{instance.name}"
            )
            self._questions[instance.name] = question
        return question

    async def _answer(self, instance: Instance) -> bool:
        asked = instance.backend_instance
        try:
            if isinstance(asked, ModelInstance):
                return await self._in_thread(asked)
            return await asked.is_ready()
        except Exception as error:
            logger.warning("is_ready of model instance '%s' failed: %s", instance.name, error)
            return False

    def _in_thread(self, asked: ModelInstance) -> asyncio.Future[bool]:
        """Not in a shared pool of threads, which a few instances that hang would use up."""
        answer: asyncio.Future[bool] = self._loop.create_future()

        def run() -> None:
            try:
                asked.mailbox.post(settle, answer, asked.is_ready())
            except Exception as error:
                asked.mailbox.post(settle, answer, error)

        threading.Thread(target=run, name="is_ready", daemon=True).start()
        return answer
