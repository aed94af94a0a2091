"""What a model's execute may do, alike in a worker process and in a thread."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import numpy as np
import pytest

from tests.backends.worker.models import CONFIG, DECOUPLED, Models, served_model

pytestmark = pytest.mark.parametrize("execution", ["process", "thread"])

MODES = """
class TritonPythonModel:
    def execute(self, requests):
        mode = requests[0].request_id()
        return getattr(self, mode)(requests)

    def good(self, requests):
        return [response(tensor(r).as_numpy() * 2) for r in requests]

    def raises(self, requests):
        raise ValueError("xx")

    def textless(self, requests):
        class Textless(Exception):
            def __str__(self):
                return str(1 / 0)

        raise Textless

    def surrogate(self, requests):
        raise ValueError("a\\ud800b")

    def surrogate_error(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("a\\ud800b"))]

    def recursion(self, requests):
        return self.recursion(requests)

    def leaves(self, requests):
        sys.exit(3)

    def interrupted(self, requests):
        raise KeyboardInterrupt

    def number(self, requests):
        return 1

    def nothing(self, requests):
        return None

    def listed_none(self, requests):
        return [None for _ in requests]

    def too_few(self, requests):
        return []

    def text(self, requests):
        return ["x"]

    def coded(self, requests):
        error = pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error)]

    def other_name(self, requests):
        tensors = [pb_utils.Tensor(name, np.ones(1, np.int64)) for name in ("OTHER", "OUT")]
        return [pb_utils.InferenceResponse(tensors)]

    def in_place(self, requests):
        out = []
        for r in requests:
            x = tensor(r).as_numpy()
            x += 1
            out.append(response(x))
        return out

    def generator(self, requests):
        for r in requests:
            yield response(tensor(r).as_numpy() * 3)

    def parameters(self, requests):
        return [response(np.ones(1, np.float32), parameters={"p": 1, "q": "x"})]

    def sender(self, requests):
        for r in requests:
            threading.Thread(target=self.answer, args=(r.get_response_sender(),)).start()

    def answer(self, sender):
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        sender.send(response(np.full(1, 7, np.float32)), flags=final)

    def dropped(self, requests):
        requests[0].get_response_sender()

    def twice(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(response(np.ones(1, np.float32)))
        texts = []
        for arguments in ((response(np.ones(1, np.float32)), 0), (None, 0), (None, 5)):
            try:
                sender.send(*arguments)
            except pb_utils.TritonModelException as error:
                texts.append(str(error))
        sender.send(flags=1)
        try:
            sender.send(flags=1)
        except pb_utils.TritonModelException as error:
            texts.append(str(error))
        self.texts = texts
"""


@pytest.fixture
def models(tmp_path: Path, execution: str) -> object:
    return served_model(tmp_path, MODES, execution=execution)


async def _error(models: Models, mode: str) -> str:
    """The error of a request in `mode`; the next request must be served."""
    error = (await models.infer(id=mode)).error
    assert (await models.infer(id="good")).value == [2.0]
    return error


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (
            "raises",
            "Failed to process the request(s) for model 'm_0_0', message: ValueError: xx"
            "\n\nAt:\n",
        ),
        ("leaves", "message: SystemExit: 3"),
        ("interrupted", "message: KeyboardInterrupt"),
        ("number", "Expected a list in the execute return, found type '<class 'int'>'."),
        ("nothing", "would never be answered"),
        ("listed_none", "would never be answered"),
        ("too_few", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n"),
        (
            "text",
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            "type '<class 'str'>'.",
        ),
        ("dropped", "dropped the response sender"),
        ("textless", "message: Textless: <no text: ZeroDivisionError>"),
        ("surrogate", "message: ValueError: a\\ud800b\n\nAt:"),
        ("surrogate_error", "a\\ud800b"),
        ("recursion", "maximum recursion depth exceeded"),
    ],
)  # fmt: skip
async def test_misuse_is_an_error_and_the_instance_lives_on(
    models: object, mode: str, text: str
) -> None:
    """Every misuse gets its text, and the next request is served."""
    async with models as served:  # type: ignore[attr-defined]
        assert text in await _error(served, mode)


async def test_deep_recursion_is_told_briefly(models: object) -> None:
    """The innermost frames of a traceback are listed, not a thousand of the same."""
    async with models as served:  # type: ignore[attr-defined]
        frames = (await _error(served, "recursion")).split("At:\n")[1].splitlines()
    assert 10 < len(frames) <= 100


async def test_traceback_names_file_line_and_function(models: object) -> None:
    """The frames of the model are listed, and no others."""
    async with models as served:  # type: ignore[attr-defined]
        frames = (await _error(served, "raises")).split("At:\n")[1].splitlines()
    assert [frame.split(": ")[1] for frame in frames] == ["raises", "execute"]
    assert all("/m/1/model.py(" in frame for frame in frames)


async def test_error_code_travels(models: object) -> None:
    """A TritonError's code and bare text reach the client."""
    async with models as served:  # type: ignore[attr-defined]
        error = (await served.infer(id="coded")).responses[0].error
    assert (str(error), error.code.name) == ("no", "NOT_FOUND")


async def test_outputs_outside_the_configuration_are_dropped(models: object) -> None:
    """Only configured outputs come back; their type and shape are what the model made."""
    async with models as served:  # type: ignore[attr-defined]
        call = await served.infer(id="other_name")
    assert [(t.name, t.datatype) for t in call.responses[0].outputs] == [("OUT", "INT64")]


@pytest.mark.parametrize("size", [4, 100_000])
async def test_inputs_may_be_changed_in_place(models: object, size: int) -> None:
    """as_numpy is writable, and the client's data stays as it was."""
    data = np.zeros(size, np.float32)
    async with models as served:  # type: ignore[attr-defined]
        call = await served.infer(inputs={"IN": data.copy()}, id="in_place")
        assert set(call.value) == {1.0}


async def test_generator_is_taken_as_the_list(models: object) -> None:
    """`execute` may yield its responses."""
    async with models as served:  # type: ignore[attr-defined]
        assert (await served.infer(id="generator")).value == [3.0]


async def test_response_parameters(models: object) -> None:
    """Parameters of a response keep their types."""
    async with models as served:  # type: ignore[attr-defined]
        call = await served.infer(id="parameters")
    assert call.responses[0].parameters == {"p": 1, "q": "x"}


async def test_default_model_may_answer_through_its_sender_later(models: object) -> None:
    """The method returns None and a thread sends the response."""
    async with models as served:  # type: ignore[attr-defined]
        assert (await served.infer(id="sender")).value == [7.0]


async def test_misuse_of_a_default_sender(tmp_path: Path, execution: str) -> None:
    """A second response, an empty one, unknown flags and a closed sender have Triton's texts."""
    code = (
        MODES
        + """
    def texts_of(self, requests):
        return [response(np.array(["|".join(self.texts)], object))]
"""
    )
    async with served_model(tmp_path, code, execution=execution) as served:
        assert (await served.infer(id="twice")).value == [1.0]
        texts = (await served.infer(id="texts_of")).text.split("|")
    assert [text.removeprefix("Unable to send response. ") for text in texts] == [
        "Non-decoupled model cannot send more than one response.",
        "Inference Response object must be provided when the response flags is set to zero.",
        "Unsupported flag provided.",
        "Response sender has been closed.",
    ]


REPEAT = """
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            mode = r.request_id()
            sender = r.get_response_sender()
            if mode == "returns":
                return []
            if mode == "raises":
                sender.send(response(np.zeros(1, np.float32)))
                raise ValueError("late")
            if mode == "dropped":
                sender.send(response(np.zeros(1, np.float32)))
                continue
            if mode == "thread":
                threading.Thread(target=self.repeat, args=(r,)).start()
                continue
            if mode == "cancel":
                threading.Thread(target=self.until_cancelled, args=(sender,)).start()
                continue
            self.repeat(r)

    def repeat(self, request):
        sender = request.get_response_sender()
        for value in tensor(request).as_numpy():
            sender.send(response(np.array([value], np.float32)))
        sender.send(flags=FINAL)

    def until_cancelled(self, sender):
        sender.send(response(np.zeros(1, np.float32)))
        while not sender.is_cancelled():
            time.sleep(0.001)
        error = pb_utils.TritonError("stopped", pb_utils.TritonError.CANCELLED)
        sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
"""


@pytest.mark.parametrize("mode", ["plain", "thread"])
@pytest.mark.parametrize("count", [0, 1, 20])
async def test_decoupled_model_sends_any_number(
    tmp_path: Path, execution: str, mode: str, count: int
) -> None:
    """0, 1 and many responses arrive in order, also from a thread after execute returned."""
    async with served_model(tmp_path, REPEAT, DECOUPLED, execution) as served:
        values = np.arange(count, dtype=np.float32)
        call = await served.infer(inputs={"IN": values}, id=mode)
    assert call.values == [[value] for value in values]


@pytest.mark.parametrize(
    ("mode", "text", "count"),
    [
        ("returns", "using the decoupled mode and the execute function must return None.", 1),
        ("raises", "ValueError: late", 2),
        ("dropped", "dropped the response sender", 2),
    ],
)  # fmt: skip
async def test_decoupled_misuse_ends_the_stream(
    tmp_path: Path, execution: str, mode: str, text: str, count: int
) -> None:
    """A stream that cannot go on ends with an error after what was sent, and never hangs."""
    async with served_model(tmp_path, REPEAT, DECOUPLED, execution) as served:
        call = await served.infer(id=mode)
        assert text in call.error
        assert len(call.responses) == count
        assert (await served.infer(id="plain")).values == [[1.0]]


async def test_failure_after_the_last_response_is_in_the_log(
    tmp_path: Path, execution: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No client hears of it."""
    code = """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            r.get_response_sender().send(response(np.ones(1, np.float32)), flags=1)
        raise ValueError("too late")
"""
    async with served_model(tmp_path, code, DECOUPLED, execution) as models:
        assert (await models.infer()).value == [1]
    (record,) = [r for r in caplog.records if "too late" in r.getMessage()]
    assert record.levelname == "ERROR"
    assert "model.py" in record.getMessage()


async def test_sender_sees_that_the_client_went(tmp_path: Path, execution: str) -> None:
    """is_cancelled of a sender turns true while the model streams."""
    async with served_model(tmp_path, REPEAT, DECOUPLED, execution) as served:
        call = served.start(id="cancel")
        while not call.responses:
            await served.infer(id="plain")
        call.request.cancel()
        assert (await call.answer()).error == "stopped"


FIELDS = """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        out = []
        for r in requests:
            facts = {
                "id": r.request_id(), "correlation": r.correlation_id(), "flags": r.flags(),
                "timeout": r.timeout(), "outputs": sorted(r.requested_output_names()),
                "parameters": r.parameters(), "inputs": [t.name() for t in r.inputs()],
                "args": self.args, "dir": pb_utils.get_model_dir(), "cancelled": r.is_cancelled(),
            }
            del facts["args"]["model_config"]
            out.append(response(np.array([json.dumps(facts)], object)))
        return out
"""


async def test_model_sees_the_fields_of_the_request(tmp_path: Path, execution: str) -> None:
    """Ids, parameters and arguments arrive with their types."""
    import json

    async with served_model(tmp_path, FIELDS, execution=execution) as served:
        call = await served.infer(
            id="a",
            timeout_us=7,
            parameters={"t": 0.5, "b": True, "s": "\u6a21", "n": 3, "f": math.inf},
        )
        facts = json.loads(call.text)
    assert facts == {
        "id": "a", "correlation": 0, "flags": 0, "timeout": 7, "outputs": ["OUT"],
        # Triton's text, byte for byte.
        "parameters": '{"t":0.5,"b":true,"s":"\u6a21","n":3,"f":Infinity}', "inputs": ["IN"],
        "args": {
            "model_instance_kind": "CPU", "model_instance_name": "m_0_0",
            "model_instance_device_id": "0", "model_repository": str(tmp_path / "m"),
            "model_version": "1", "model_name": "m",
        },
        "dir": str(tmp_path / "m" / "1"), "cancelled": False,
    }  # fmt: skip


async def test_an_empty_text_is_a_correlation_id(tmp_path: Path, execution: str) -> None:
    """As with Triton: not the number 0 that stands for none."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [response(np.array([repr(r.correlation_id())], object)) for r in requests]
    """
    async with served_model(tmp_path, code, execution=execution) as served:
        ids: list[int | str] = ["", 0, "a", 7]
        answers = [(await served.infer(correlation_id=each)).text for each in ids]
    assert answers == ["''", "0", "'a'", "7"]


async def test_model_without_execute_answers_with_an_error(tmp_path: Path, execution: str) -> None:
    """The load succeeds; requests are told what is missing."""
    async with served_model(
        tmp_path, "class TritonPythonModel:\n    pass\n", execution=execution
    ) as served:
        assert "does not implement `execute` method." in (await served.infer()).error


@pytest.mark.parametrize("values", [[], ["a", "语言", ""], [b"\xff\x00", b"x" * 50_000]])
async def test_text_goes_both_ways(tmp_path: Path, execution: str, values: list[object]) -> None:
    """BYTES elements arrive and leave byte for byte, empty tensors included."""
    config = CONFIG.replace("TYPE_FP32", "TYPE_STRING")
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [response(tensor(r).as_numpy()) for r in requests]
    """
    async with served_model(tmp_path, code, config, execution) as served:
        call = await served.infer(inputs={"IN": np.array(values, object)})
    assert call.value == [v.encode() if isinstance(v, str) else v for v in values]


async def test_async_model_that_leaves_its_event_loop(tmp_path: Path, execution: str) -> None:
    """Stopping the loop, or sys.exit in a task of the model's own, ends no instance for good."""
    code = """
    import asyncio

    class TritonPythonModel:
        async def execute(self, requests):
            mode = requests[0].request_id()
            if mode == "stop":
                asyncio.get_running_loop().stop()
            if mode == "exit":
                asyncio.get_running_loop().call_soon(sys.exit, 3)
            await asyncio.sleep(0)
            return [response(tensor(r).as_numpy() * 2) for r in requests]
    """
    async with served_model(tmp_path, code, execution=execution) as models:
        for mode in ("stop", "exit"):
            await models.infer(id=mode)  # answered, or failed as the worker is replaced
            assert (await models.infer()).value == [2.0]


async def test_async_output_that_cannot_be_sent(
    tmp_path: Path, execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for an output is an error of its request, in an event loop as well."""
    if execution == "process":
        pytest.skip("covered by test_out_of_memory")
    code = """
    class TritonPythonModel:
        async def execute(self, requests):
            return [response(np.ones(100_000, np.float32)) for r in requests]
    """

    def no_room(size: int) -> memoryview:
        raise OSError(errno.ENOMEM, "no room")

    async with served_model(tmp_path, code, execution=execution) as models:
        monkeypatch.setattr(models.server.buffer_pool, "lease", no_room)
        assert "no room" in (await models.infer()).error
