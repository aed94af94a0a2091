"""The models of test_both_executions.py: small files that together do all that a model.py may."""

from __future__ import annotations

import textwrap
from pathlib import Path

CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""  # noqa: E501
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"
BATCHING = CONFIG.replace("backend:", "max_batch_size: 4 backend:")
SEQUENCES = BATCHING + (
    "sequence_batching { control_input [ "
    '{ name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },'
    '{ name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },'
    '{ name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] '
    'state [ { input_name: "SI" output_name: "SO" data_type: TYPE_FP32 dims: [ 1 ] } ] }'
)
PAIRED = BATCHING + (
    "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 10000000 }"
)
ITERATIVE = BATCHING + "sequence_batching { iterative_sequence: true }\n"

PREAMBLE = """
import asyncio, json, os, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def tensor(request, name="IN"):
    return pb_utils.get_input_tensor_by_name(request, name)

def response(array, name="OUT", **options):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.asarray(array))], **options)

def number(value=1.0, **options):
    return response(np.array([value], np.float32), **options)

def text(value):
    return response(np.array([value if isinstance(value, str) else json.dumps(value)], object),
                    "TEXT")

def failed(message, code="INTERNAL"):
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(error=error)

def raised(function, *args, **options):
    try:
        return function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def bls(name, request_id="", outputs=(), inputs=None, **options):
    if inputs is None:
        inputs = [pb_utils.Tensor("IN", np.array([1, 2], np.float32))]
    return pb_utils.InferenceRequest(request_id=request_id, model_name=name, inputs=inputs,
                                     requested_output_names=list(outputs), **options)

def shown(answer):
    if answer.has_error():
        return [str(answer.error().code()), answer.error().message(), answer.parameters()]
    return [[t.name(), list(t.shape()), str(t.as_numpy().tolist())] for t in answer.output_tensors()
            ] + [answer.parameters()]
"""

# `execute` runs the method that the id of the request names, for each request by itself.
BY_ID = """
class TritonPythonModel:
    def execute(self, requests):
        return [getattr(self, r.request_id())(r) for r in requests]
"""

PLAIN = (
    BY_ID
    + """
    def echo(self, r):
        return response(tensor(r).as_numpy())

    def empty_response(self, r):
        return pb_utils.InferenceResponse([])

    def raises(self, r):
        raise ValueError("中文 \\ud800 <&>")

    def raises_chain(self, r):
        try:
            raise KeyError("first")
        except KeyError as error:
            raise RuntimeError("second\\nline") from error

    def raises_model_exception(self, r):
        raise pb_utils.TritonModelException("mine")

    def raises_group(self, r):
        raise ExceptionGroup("several", [ValueError("a"), TypeError("b")])

    def raises_without_text(self, r):
        raise StopIteration

    def leaves(self, r):
        sys.exit("bye")

    def memory(self, r):
        raise MemoryError("none left")

    def deep(self, r):
        return self.deep(r)

    def none(self, r):
        return None

    def a_text(self, r):
        return "x"

    def a_tensor(self, r):
        return pb_utils.Tensor("OUT", np.ones(1, np.float32))

    def other_outputs(self, r):
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(n, np.ones((2, 1), np.int8)) for n in ("NO", "OUT", "TEXT")])

    def twice_the_output(self, r):
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT", np.full(1, i, np.float32)) for i in range(2)])

    def zero_size(self, r):
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("OUT", np.zeros((0, 3), np.float32)),
            pb_utils.Tensor("TEXT", np.zeros((2, 0), object))])

    def scalar(self, r):
        return response(np.array(5.0))

    def strided(self, r):
        return response(np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)[::-2])

    def large(self, r):
        return response(np.arange(100_000))

    def large_text(self, r):
        return response(np.array([b"\\xff" * 40_000, "语", b"", 7, None], object), "TEXT")

    def fixed_text(self, r):
        return response(np.array([b"a\\0", b"bcd"]), "TEXT")

    def bad_text(self, r):
        return response(np.array(["a\\ud800"], object), "TEXT", parameters={"p": 1})

    def parameters(self, r):
        return number(parameters={"i": 1, "b": True, "s": "语", "f": 0.5, "big": 2**40})

    def bad_parameters(self, r):
        return text([raised(number, parameters=p) for p in (1, {1: 1}, {"a": [1]}, {"a": None})])

    def error(self, r):
        return failed("no <语>", "NOT_FOUND")

    def error_and_outputs(self, r):
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT", np.ones(1))], pb_utils.TritonError("e"), parameters={"p": 1})

    def codes(self, r):
        return failed("code", json.loads(r.parameters())["code"])

    def fields(self, r):
        return text([r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.priority(),
            json.loads(r.parameters()), sorted(r.requested_output_names()),
            [[t.name(), t.shape(), t.triton_dtype(), t.is_cpu()] for t in r.inputs()],
            r.trace().get_context(), r.is_cancelled(), str(r.preferred_memory()).split(" ")[0]])

    def settable(self, r):
        r.set_flags(3)
        return text([r.flags(), raised(r.set_flags, -1), raised(r.set_release_flags, 7),
                     raised(r.model_name), raised(setattr, r, "x", 1)])

    def reschedules(self, r):
        r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return None

    def reschedules_and_answers(self, r):
        r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return number()

    def sender(self, r):
        r.get_response_sender().send(number(3), flags=FINAL)

    def sender_in_thread(self, r):
        threading.Thread(target=r.get_response_sender().send, args=(number(4), FINAL)).start()

    def sender_and_response(self, r):
        r.get_response_sender().send(number(5), flags=FINAL)
        return number(6)

    def sender_dropped(self, r):
        r.get_response_sender()

    def sender_misused(self, r):
        sender = r.get_response_sender()
        said = [raised(sender.send), raised(sender.send, flags=FINAL), raised(sender.send, 1),
                raised(sender.send, number(), 9), sender.is_cancelled()]
        sender.send(text(said))
        raised(sender.send, number())

    def arguments(self, r):
        from collections import Counter
        return text([raised(pb_utils.Tensor, "", np.ones(1)), raised(pb_utils.Tensor, "a", [1]),
            raised(pb_utils.Tensor, "a", np.ones(1, complex)), raised(pb_utils.TritonError, 1),
            raised(pb_utils.TritonError, "a", 3), raised(pb_utils.InferenceResponse, [1]),
            raised(pb_utils.InferenceResponse, [None]), raised(bls, "m", correlation_id=1.5),
            raised(bls, "m", inputs=[None]), raised(bls, "m", flags=-1),
            raised(pb_utils.MetricFamily, "a", "b", 1)])

    def until_cancelled(self, r):
        pb_utils.Logger.log_warn("begun")
        while not r.is_cancelled():
            time.sleep(0.001)
        return failed("stopped", "CANCELLED")

    def own_loop(self, r):
        async def value():
            await asyncio.sleep(0)
            return 7
        return text(asyncio.run(value()))

    def names(self, r):
        return text([__file__, pb_utils.get_model_dir(), pb_utils.__name__,
                     vars(sys.modules[type(self).__module__]) is globals()])
"""
)

# One request after the other changes what the model has.
STATE = """
import copy

class TritonPythonModel:
    count = 0

    def initialize(self, args):
        self.args = args
        self.kept = []

    def execute(self, requests):
        self.count += 1
        self.kept.append(tensor(requests[0]).as_numpy())
        self.kept[-1] += 1
        facts = {k: v for k, v in self.args.items() if k != "model_config"}
        facts["config"] = json.loads(self.args["model_config"])
        facts["kept"] = [k.tolist() for k in self.kept]
        facts["count"] = self.count
        return [text(facts) for _ in requests]
"""

STREAM = """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            returned = getattr(self, r.request_id())(r, r.get_response_sender())
            if returned is not None:
                return returned

    def nothing(self, r, sender):
        sender.send(flags=FINAL)

    def one(self, r, sender):
        sender.send(number(1, parameters={"p": "语"}), flags=FINAL)

    def several(self, r, sender):
        for i in range(5):
            sender.send(number(i))
        sender.send(flags=FINAL)

    def threads(self, r, sender):
        threading.Thread(target=self.several, args=(r, sender)).start()

    def large(self, r, sender):
        array = np.zeros(20_000, np.float32)
        for i in range(3):
            array[:] = i
            sender.send(response(array))
        sender.send(flags=FINAL)

    def error(self, r, sender):
        sender.send(failed("no", "UNAVAILABLE"))
        sender.send(number(2))
        sender.send(failed("last", "INVALID_ARG"), flags=FINAL)

    def empty(self, r, sender):
        sender.send(pb_utils.InferenceResponse([]))
        sender.send(pb_utils.InferenceResponse([]), flags=FINAL)

    def raises(self, r, sender):
        sender.send(number(1))
        raise ValueError("late")

    def raises_at_once(self, r, sender):
        raise ValueError("soon")

    def returns(self, r, sender):
        return [number(1)]

    def drops(self, r, sender):
        sender.send(number(1))

    def misuses(self, r, sender):
        said = [raised(sender.send), raised(sender.send, number(), 2), raised(sender.send, "x")]
        sender.send(text(said))
        sender.send(flags=FINAL)
        raised(sender.send, number())
        raised(sender.send, flags=FINAL)

    def reschedules(self, r, sender):
        r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)

    def until_cancelled(self, r, sender):
        sender.send(number(1))
        while not (sender.is_cancelled() and r.is_cancelled()):
            time.sleep(0.001)
        pb_utils.Logger.log_warn("cancelled")
        sender.send(failed("stopped", "CANCELLED"), flags=FINAL)

    def bad_text(self, r, sender):
        sender.send(response(np.array(["a\\ud800"], object), "TEXT", parameters={"p": 1}))
        sender.send(flags=FINAL)

    def not_asked(self, r, sender):
        sender.send(pb_utils.InferenceResponse(
            [pb_utils.Tensor(n, np.ones(1, np.float32)) for n in ("TEXT", "OUT", "NO")]))
        sender.send(flags=FINAL)
"""

ASYNC = """
class TritonPythonModel:
    def initialize(self, args):
        self.loops = []
        async def once():
            self.loops.append(asyncio.get_running_loop())
        asyncio.run(once())

    async def execute(self, requests):
        return [await getattr(self, r.request_id())(r) for r in requests]

    async def echo(self, r):
        await asyncio.sleep(0)
        return response(tensor(r).as_numpy())

    async def raises(self, r):
        raise ValueError("x")

    async def leaves(self, r):
        await asyncio.sleep(0)
        raise pb_utils.TritonModelException("x")

    async def none(self, r):
        return None

    async def wrong(self, r):
        return 5

    async def cancels(self, r):
        raise asyncio.CancelledError

    async def sender(self, r):
        asyncio.get_running_loop().call_soon(r.get_response_sender().send, number(3), FINAL)

    async def sender_in_thread(self, r):
        await asyncio.to_thread(r.get_response_sender().send, number(4), FINAL)

    async def until_cancelled(self, r):
        pb_utils.Logger.log_warn("begun")
        while not r.is_cancelled():
            await asyncio.sleep(0.001)
        return number()

    async def calls(self, r):
        answers = await asyncio.gather(*(bls("plain", i).async_exec() for i in ("echo", "error")))
        return text([shown(a) for a in answers])

    async def streams(self, r):
        answers = await bls("stream", "several").async_exec(decoupled=True)
        return text([shown(a) async for a in answers])

    async def blocks(self, r):
        return text(shown(bls("plain", "echo").exec()))

    async def same_loop(self, r):
        self.loops.append(asyncio.get_running_loop())
        return text([self.loops[0] is self.loops[-1], asyncio.get_event_loop() is self.loops[-1]])

    def finalize(self):
        async def log():
            pb_utils.Logger.log_warn("finalized")
        asyncio.run(log())
"""

INHERITED_ASYNC = """
class Base:
    async def _execute(self, requests):
        if not hasattr(self, "lock"):
            self.lock, self.loop = asyncio.Lock(), asyncio.get_running_loop()
        async with self.lock:
            return [text(asyncio.get_running_loop() is self.loop) for r in requests]

class TritonPythonModel(Base):
    execute = Base._execute
"""

CALLS = (
    BY_ID
    + """
    def works(self, r):
        return text(shown(bls("plain", "echo").exec()))

    def raises(self, r):
        return text(shown(bls("plain", "raises").exec()))

    def error(self, r):
        return text(shown(bls("plain", "error").exec()))

    def error_with_parameters(self, r):
        return text(shown(bls("plain", "error_and_outputs").exec()))

    def unknown(self, r):
        return text(shown(bls("nobody").exec()))

    def version(self, r):
        return text([shown(bls("plain", "echo", model_version=v).exec()) for v in (1, 2, -1, -5)])

    def outputs(self, r):
        return text([shown(bls("plain", "other_outputs", o).exec()) for o in
                     (["OUT"], ["OUT", "OUT"], ["TEXT", "OUT"], ["NO"], [])])

    def inputs(self, r):
        x, y = (pb_utils.Tensor(n, np.ones(1, np.float32)) for n in ("IN", "NO"))
        z = pb_utils.Tensor("IN", np.ones((1, 1)))
        return text([shown(bls("plain", "echo", inputs=i).exec()) for i in
                     ([], [x, x], [y], [x, y], [z])])

    def own_input(self, r):
        return bls("plain", "echo", inputs=r.inputs()).exec()

    def parameters(self, r):
        return bls("plain", "fields", parameters={"a": 1, "b": True, "c": "语", "d": 0.5},
                   timeout=5, priority=2).exec()

    def answer_parameters(self, r):
        return text(shown(bls("plain", "parameters").exec()))

    def zero_size(self, r):
        return text(shown(bls("plain", "zero_size").exec()))

    def large(self, r):
        (out, parameters) = shown(bls("plain", "large").exec())
        return text([out[1], len(out[2])])

    def decoupled_target(self, r):
        return text(shown(bls("stream", "several").exec()))

    def streams(self, r):
        return text([[shown(a) for a in bls("stream", i).exec(decoupled=True)] for i in
                     ("nothing", "one", "several", "error", "empty", "raises", "drops")])

    def streams_plain(self, r):
        return text([[shown(a) for a in bls("plain", i).exec(decoupled=True)] for i in
                     ("echo", "raises", "error")])

    def stream_cancelled(self, r):
        answers = bls("stream", "until_cancelled").exec(decoupled=True)
        first = shown(next(iter(answers)))
        answers.cancel()
        return text([first] + [shown(a) for a in answers])

    def sequence(self, r):
        out = []
        for corrid in (7, "seven"):
            for flags in (1, 0, 2):
                x = [pb_utils.Tensor("IN", np.ones((1, 1), np.float32))]
                answer = bls("sequences", inputs=x, flags=flags, correlation_id=corrid).exec()
                out.append(shown(answer))
        return text(out)

    def no_sequence(self, r):
        x = [pb_utils.Tensor("IN", np.ones((1, 1), np.float32))]
        return text(shown(bls("sequences", inputs=x).exec()))

    def itself(self, r):
        return text(shown(bls("calls", "works").exec()))

    def ready(self, r):
        return text([raised(pb_utils.is_model_ready, *a) for a in
                     (("plain",), ("nobody",), ("plain", "1"), ("plain", "2"), ("plain", "x"),
                      (5,), ("unready",))])

    def control(self, r):
        return text([raised(pb_utils.load_model, "nobody"),
                     raised(pb_utils.load_model, "plain", files=[]),
                     raised(pb_utils.load_model, "plain", config="{"),
                     raised(pb_utils.load_model, "plain", files={"file:1/model.py": "text"}),
                     raised(pb_utils.unload_model, "nobody")])

    def loads(self, r):
        pb_utils.load_model("loaded")
        ready = pb_utils.is_model_ready("loaded")
        answer = shown(bls("loaded", "echo").exec())
        pb_utils.unload_model("loaded")
        return text([ready, answer, pb_utils.is_model_ready("loaded")])

    def in_thread(self, r):
        out = []
        thread = threading.Thread(target=lambda: out.append(shown(bls("plain", "echo").exec())))
        thread.start()
        thread.join()
        return text(out)

    def own_loop(self, r):
        async def both():
            return [shown(a) for a in await asyncio.gather(
                *(bls("plain", i).async_exec() for i in ("echo", "error")))]
        return text(asyncio.run(both()))

    def requests_of_its_own(self, r):
        request = bls("plain", "x")
        return text([raised(request.get_response_sender), request.is_cancelled(),
                     request.model_name(), request.model_version(),
                     sorted(request.requested_output_names()), request.trace().get_context()])

    def initialize(self, args):
        self.early = [raised(bls("plain", "echo").exec), raised(pb_utils.is_model_ready, "calls")]

    def before_it_serves(self, r):
        return text(self.early)
"""
)

LOOPS = (
    BY_ID
    + """
    def default_loop(self, r):
        async def value():
            return id(asyncio.get_running_loop())
        loop = asyncio.get_event_loop()
        return text([loop.run_until_complete(value()) == id(loop) for _ in range(2)])
"""
)

PRINTS = """
print("imported")

class TritonPythonModel:
    def execute(self, requests):
        print("语", 1, "a\\ud800", sep="-")
        pb_utils.Logger.log_warn("between")
        print("two\\nlines, and ", end="")
        pb_utils.Logger.log_warn("before the end of the line")
        print("its rest", file=sys.stderr)
        with open(os.devnull, "w") as elsewhere:
            print("elsewhere", file=elsewhere)
        pb_utils.Logger.log_warn("last")
        return [number() for r in requests]
"""

METRICS = (
    """
early = pb_utils.MetricFamily("early", "made on import", pb_utils.MetricFamily.GAUGE)
early_value = early.Metric(labels={"a": "语"})
early_value.set(3)
"""
    + BY_ID
    + """
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(int(early_value.value()) - 3)
        return config

    def initialize(self, args):
        make = pb_utils.MetricFamily
        self.families = [make("c", "counter", make.COUNTER), make("g", "gauge", make.GAUGE),
                         make("h", "histogram", make.HISTOGRAM)]
        self.counter = self.families[0].Metric(labels={"x": "1", "y": '"\\\\'})
        self.gauge = self.families[1].Metric()
        self.histogram = self.families[2].Metric(labels={}, buckets=[1, 2.5])

    def changes(self, r):
        self.counter.increment(2)
        self.gauge.increment(-1.5)
        self.gauge.set(4)
        self.gauge.increment(0.25)
        for value in (0, 1, 2, 5):
            self.histogram.observe(value)
        return text([self.counter.value(), self.gauge.value()])

    def misused(self, r):
        metrics = (self.counter, self.gauge, self.histogram)
        return text([raised(getattr(m, f), *a) for m in metrics for f, a in
                     (("increment", (-1,)), ("set", (1,)), ("observe", (1,)), ("value", ()))]
            + [raised(self.families[0].Metric, **a) for a in
               (dict(labels=[]), dict(buckets=[1.0]), dict(buckets=1))]
            + [raised(self.families[2].Metric, **a) for a in
               (dict(), dict(buckets=[2.0, 1.0]), dict(buckets=[]))]
            + [raised(pb_utils.MetricFamily, *a) for a in
               (("c", "counter", pb_utils.MetricFamily.GAUGE), ("bad name", "x",
                 pb_utils.MetricFamily.GAUGE), ("nv_inference_count", "x",
                 pb_utils.MetricFamily.COUNTER))])

    def comes_and_goes(self, r):
        family = pb_utils.MetricFamily("short", "lived", pb_utils.MetricFamily.COUNTER)
        metric = family.Metric()
        metric.increment(1)
        value = metric.value()
        del family
        return text([value, raised(metric.value), raised(metric.increment, 1)])
"""
)

LOGS = """
import logging
import warnings

log = pb_utils.Logger
log.log_warn("imported")

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        log.log_warn("completes")
        return config

    def initialize(self, args):
        log.log_warn("initialized")

    def execute(self, requests):
        log.log("info")
        log.log("warning", log.WARNING)
        log.log_error("语 %s {} \\n two")
        log.log_verbose("verbose")
        log.log(5, log.ERROR)
        log.log("odd level", "LOUD")
        return [number() for r in requests]

    def finalize(self):
        log.log_warn("finalized")
        raise ValueError("finalize")
"""

SEQUENCE = """
class TritonPythonModel:
    def execute(self, requests):
        out = []
        for r in requests:
            controls = [tensor(r, n).as_numpy().tolist() if tensor(r, n) else None
                        for n in ("START", "END", "CORRID", "SI")]
            facts = [controls, r.correlation_id(), r.flags(), sorted(r.requested_output_names())]
            state = tensor(r, "SI").as_numpy() + tensor(r).as_numpy().sum()
            out.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("TEXT", np.array([[json.dumps(facts)]], object)),
                pb_utils.Tensor("SO", state.astype(np.float32)),
                pb_utils.Tensor("OUT", state.astype(np.float32))]))
        return out
"""

ITERATES = """
class TritonPythonModel:
    def initialize(self, args):
        self.counts = {}

    def execute(self, requests):
        out = []
        for r in requests:
            count = self.counts[r.correlation_id()] = self.counts.get(r.correlation_id(), 0) + 1
            if count < 3:
                r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                out.append(None)
            else:
                del self.counts[r.correlation_id()]
                out.append(response(np.array([[count]], np.float32)))
        return out
"""

BATCHES = """
class TritonPythonModel:
    def execute(self, requests):
        return [response(tensor(r).as_numpy() * len(requests)) for r in requests]
"""

# Two requests, executed together.
PAIRS = """
class TritonPythonModel:
    def execute(self, requests):
        requests = sorted(requests, key=lambda r: r.request_id())
        assert len(requests) == 2
        first, second = requests
        mode = json.loads(first.parameters())["mode"]
        if mode == "fine":
            return [number(tensor(r).as_numpy().sum()) for r in requests]
        if mode == "one_error":
            return [failed("first"), number(2)]
        if mode == "raises":
            raise ValueError("both")
        if mode == "too_few":
            return [number(1)]
        if mode == "one_none":
            return [number(1), None]
        if mode == "wrong":
            return [number(1), 2]
        if mode == "sender_and_list":
            first.get_response_sender().send(number(1), flags=FINAL)
            return [None, number(2)]
        if mode == "sender_and_raise":
            first.get_response_sender().send(number(1), flags=FINAL)
            raise ValueError("second")
        if mode == "sender_later":
            second.get_response_sender()
            threading.Thread(target=second.get_response_sender().send,
                             args=(number(2), FINAL)).start()
            return [number(1), None]
        if mode == "reschedules":
            first.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [None, number(2)]
"""

TYPES = """
class TritonPythonModel:
    def execute(self, requests):
        (r,) = requests
        (x,) = r.inputs()
        if r.request_id() == "numpy":
            array = x.as_numpy()
            facts = [str(array.dtype), array.shape, array.flags.writeable, array.flags.owndata or
                     array.flags.c_contiguous, x.triton_dtype(), raised(x.to_dlpack) == "x"]
            return [pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", array),
                pb_utils.Tensor("TEXT", np.array([json.dumps(facts)], object))])]
        if r.request_id() == "dlpack":
            return [pb_utils.InferenceResponse(
                [pb_utils.Tensor.from_dlpack("OUT", x.to_dlpack())])]
        if r.request_id() == "same":
            return [pb_utils.InferenceResponse([x])]
        if r.request_id() == "device":
            return [text([str(x.__dlpack_device__()), raised(x.as_numpy) is None,
                          raised(pb_utils.Tensor.from_dlpack, "OUT", 5)])]
"""

HELPED = """
import helper
from .helper import NAME
from package import inner
import package.inner as other

class TritonPythonModel:
    def execute(self, requests):
        if requests[0].request_id() == "lazy":
            import late
            return [text(late.VALUE)]
        if requests[0].request_id() == "by_name":
            import importlib
            return [text(importlib.import_module("late").VALUE)]
        if requests[0].request_id() == "fails":
            import broken
        if requests[0].request_id() == "missing":
            import no_such_module
        if requests[0].request_id() == "raises":
            helper.fail()
        if requests[0].request_id() == "pickle":
            import pickle
            return [text(pickle.loads(pickle.dumps(helper.Point(3))).x)]
        return [text([NAME, inner.VALUE, other is inner, helper.numpy_sum(), helper.ready()])]
"""
HELPERS = {
    "helper.py": """
        import numpy as np
        import triton_python_backend_utils as pb_utils
        import package.inner
        NAME = "helper"

        class Point:
            def __init__(self, x):
                self.x = x

        def numpy_sum():
            return int(np.ones(3).sum()) + package.inner.VALUE

        def ready():
            return pb_utils.is_model_ready("plain")

        def fail():
            raise ValueError("in a helper")
    """,
    "package/__init__.py": "",
    "package/inner.py": "VALUE = 5\n",
    "late.py": "VALUE = 'late'\n",
    "broken.py": "import json\n\nraise RuntimeError('broken')\n",
}

# Models that share a library from outside their directories, see `LIBRARY`.
SHARES = """
from pathlib import Path
sys.path.insert(0, str(Path(pb_utils.get_model_dir()).parents[2] / "library"))
import shared_by_models

class TritonPythonModel:
    def execute(self, requests):
        return [text(shared_by_models.facts(pb_utils.get_model_dir())) for _ in requests]
"""
LIBRARY = """
import numpy as np
import triton_python_backend_utils as pb_utils
from triton_python_backend_utils import InferenceRequest, Logger, MetricFamily, get_model_dir

families = {}

def facts(name):
    Logger.log_warn("from a library")
    if name not in families:
        family = MetricFamily("shared", "of a library", MetricFamily.GAUGE)
        families[name] = family, family.Metric(labels={"model": name.split("/")[-2]})
    families[name][1].increment(1)
    x = pb_utils.Tensor("IN", np.ones(1, np.float32))
    answer = InferenceRequest(model_name="plain", request_id="echo", inputs=[x],
                              requested_output_names=["OUT"]).exec()
    return [get_model_dir(), pb_utils.get_model_dir(), answer.output_tensors()[0].shape(),
            [f[1].value() for f in families.values() if f is families[name]]]
"""

READY = """
class TritonPythonModel:
    def is_ready(self):
        ANSWER
"""

FAILING = {
    "syntax": "def x(:\n",
    "import": "import no_such_module\n",
    "on_import": "raise ValueError('on import')\n",
    "no_class": "x = 1\n",
    "constructor": "class TritonPythonModel:\n    def __init__(self):\n        1 / 0\n",
    "initialize": """
        class TritonPythonModel:
            def initialize(self, args):
                raise ValueError("initialize 语")

            def finalize(self):
                pb_utils.Logger.log_warn("finalize of what failed")
        """,
    "model_exception": """
        class TritonPythonModel:
            def initialize(self, args):
                raise pb_utils.TritonModelException("initialize")
        """,
    "leaves": "class TritonPythonModel:\n    def initialize(self, args):\n        sys.exit(3)\n",
    "arguments": "class TritonPythonModel:\n    def initialize(self):\n        pass\n",
    "completes": """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                config.set_max_batch_size(-1)
                config.add_input({"name": "IN", "data_type": "TYPE_INT8", "dims": [3]})
                return config
        """,
    "completes_nothing": """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                return 5
        """,
    "async_initialize": """
        class TritonPythonModel:
            def initialize(self, args):
                raise ValueError("of an async model")

            async def execute(self, requests):
                return []
        """,
}

STRING = CONFIG.replace('"IN" data_type: TYPE_FP32', '"IN" data_type: TYPE_STRING')


def _typed(datatype: str) -> str:
    return CONFIG.replace("TYPE_FP32", datatype)


DATATYPES = {
    "BOOL": "BOOL", "INT8": "INT8", "UINT16": "UINT16", "INT64": "INT64", "FP16": "FP16",
    "BF16": "BF16", "FP64": "FP64", "STRING": "BYTES",
}  # fmt: skip

MODELS: dict[str, tuple[str, str]] = {
    "plain": (PLAIN, CONFIG),
    "state": (STATE, CONFIG),
    "stream": (STREAM, DECOUPLED),
    "async": (ASYNC, CONFIG),
    "inherited_async": (INHERITED_ASYNC, CONFIG),
    "calls": (CALLS, CONFIG),
    "metrics": (METRICS, CONFIG),
    "logs": (LOGS, CONFIG),
    "loops": (LOOPS, CONFIG),
    "prints": (PRINTS, CONFIG),
    "sequences": (SEQUENCE, SEQUENCES),
    "iterates": (ITERATES, ITERATIVE),
    "batches": (BATCHES, BATCHING),
    "pairs": (PAIRS, PAIRED),
    "no_execute": ("class TritonPythonModel:\n    pass\n", CONFIG),
    "helped": (HELPED, CONFIG),
    "shares_a": (SHARES, CONFIG),
    "shares_b": (SHARES, CONFIG),
    "loaded": (PLAIN, CONFIG),
    "unready": (READY.replace("ANSWER", "return False"), CONFIG),
    **{
        f"type_{name.lower()}": (TYPES, _typed(f"TYPE_{name}"))
        for name in DATATYPES
    },
    **{
        f"ready_{name}": (READY.replace("ANSWER", answer), CONFIG)
        for name, answer in {
            "yes": "return True", "no": "return False", "text": "return 'yes'",
            "raises": "raise ValueError('语')", "leaves": "sys.exit(2)",
        }.items()
    },
    "ready_async": (
        READY.replace("    def is", "    async def is").replace("ANSWER", "return True"), CONFIG
    ),
    **{f"fails_{name}": (code, CONFIG) for name, code in FAILING.items()},
}  # fmt: skip


def write_models(root: Path) -> None:
    """The repository of both servers, and a library beside it."""
    library = root.parent / "library"
    library.mkdir()
    (library / "shared_by_models.py").write_text(LIBRARY)
    for name, (code, config) in MODELS.items():
        version = root / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(PREAMBLE + textwrap.dedent(code))
        (version.parent / "config.pbtxt").write_text(config)
    for path, text in HELPERS.items():
        file = root / "helped" / "1" / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
