"""Models about what they use: other models, metrics, logs, and modules of their own or shared."""

from __future__ import annotations

from tests.e2e.models.preamble import BY_ID

CALLS = (
    """
import multiprocessing

def asks_plain(id):
    return shown(bls("plain", id).exec())
"""
    + BY_ID
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

    def in_forked_processes(self, r):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return text(pool.map(asks_plain, ["echo", "error", "raises", "zero_size"]))

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
