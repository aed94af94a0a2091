"""Models about requests, their answers, and the life of a model: what goes in and out."""

from __future__ import annotations

from tests.e2e.models.preamble import BY_ID

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
