"""Models about how requests are executed: streams, coroutines, batches and sequences."""

from __future__ import annotations

from tests.e2e.models.preamble import BY_ID

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
