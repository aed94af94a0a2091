"""What a worker process keeps apart, and what happens when it dies."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import numpy as np
import pytest

from npuserve.backends.worker import fork_server
from npuserve.errors import InternalError
from npuserve.server.schedulers import default
from tests.backends.worker.models import CONFIG, parameter, served, served_model, write_model

DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        return [response(tensor(r).as_numpy() * 2) for r in requests]
"""

DEADLY = """
import signal

class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        mode = requests[0].request_id()
        if mode == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if mode == "exit":
            os._exit(7)
        if mode == "hang":
            while True:
                time.sleep(1)
        if mode == "fork":
            self.fork()
        self.count += 1
        return [response(np.array([self.count], np.float32)) for r in requests]

    def fork(self):
        pid = os.fork()
        if pid == 0:
            sys.exit(0)
        os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(("mode", "how"), [("segfault", "signal 11 (SIGSEGV)"), ("exit", "code 7")])
async def test_death_fails_the_request_and_the_instance_comes_back(
    tmp_path: Path, mode: str, how: str
) -> None:
    """The request in hand fails at once and says how; a queued one is served by the next worker."""
    async with served_model(tmp_path, DEADLY) as models:
        await models.infer()
        dying = models.start(id=mode)
        queued = models.start()
        assert "Stub process 'm_0_0' is not healthy: it " in (await dying.answer()).error
        assert how in dying.error
        assert (await queued.answer()).value == [1.0]
        statistics = models.server.model("m").statistics
        assert (statistics.success.count, statistics.fail.count) == (2, 1)


@pytest.fixture
def handed_over_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first execution, however long it takes, the next request is handed over early."""
    monkeypatch.setattr(default, "_SHORT_EXECUTION_NS", 1 << 62)


@pytest.mark.usefixtures("handed_over_early")
async def test_death_fails_what_was_executed(tmp_path: Path) -> None:
    """What waits is served by the next worker, also what the dead one had in its channel."""
    async with served_model(tmp_path, DEADLY) as models:
        await models.infer()
        calls = [models.start(id=mode) for mode in ("", "segfault", *[""] * 20)]
        errors = [(await call.answer()).error for call in calls]
        assert [i for i, error in enumerate(errors) if error] == [1]
        assert [call.value for call in calls[2:]] == [[n] for n in range(1, 21)]
        statistics = models.server.model("m").statistics
        assert (statistics.success.count, statistics.fail.count) == (22, 1)
        assert models.server.model("m").pool.inflight == 0


@pytest.mark.usefixtures("handed_over_early")
async def test_nobody_waits_for_a_worker_that_keeps_dying(tmp_path: Path) -> None:
    """From the second death on, what it had in its channel fails as well."""
    async with served_model(tmp_path, DEADLY) as models:
        await models.infer(id="exit")
        await models.infer()
        calls = [models.start(id=mode) for mode in ("", "segfault", *[""] * 3)]
        errors = [(await call.answer()).error for call in calls]
    assert [i for i, error in enumerate(errors) if error] == [1, 2]


@pytest.mark.usefixtures("handed_over_early")
async def test_what_waits_for_a_worker_that_does_not_come_up_fails(tmp_path: Path) -> None:
    """A queue may wait for better times, but what was handed over is told."""
    code = f"""
    FLAG = {str(tmp_path / "flag")!r}

    class TritonPythonModel:
        def initialize(self, args):
            if os.path.exists(FLAG):
                os.remove(FLAG)
                raise ValueError("not now")

        def execute(self, requests):
            if requests[0].request_id() == "die":
                open(FLAG, "w").close()
                os._exit(1)
            return [response(np.ones(1, np.float32)) for r in requests]
    """
    async with served_model(tmp_path, code) as models:
        await models.infer()
        calls = [models.start(id=id) for id in ("", "die", "handed over", "queued", "")]
        errors = [(await call.answer()).error for call in calls]
    assert [bool(error) for error in errors] == [False, True, True, False, False]
    assert "not now" in errors[2]


async def test_readiness_shows_the_restart(tmp_path: Path) -> None:
    """The model is not ready while its only worker is down."""
    async with served_model(tmp_path, DEADLY) as models:
        await models.infer(id="exit")
        assert not await models.server.model_ready("m")
        await models.infer()  # waits for the next worker
        assert await models.server.model_ready("m")


async def test_model_that_cannot_come_back_can_be_unloaded(tmp_path: Path) -> None:
    """While restarts fail again and again an unload goes through, and the attempts end."""
    code = f"""
    FLAG = {str(tmp_path / "flag")!r}

    class TritonPythonModel:
        def initialize(self, args):
            if os.path.exists(FLAG):
                os._exit(3)
            open(FLAG, "w").close()

        def execute(self, requests):
            os._exit(1)
    """
    async with asyncio.timeout(8), served_model(tmp_path, code) as models:
        assert "code 1" in (await models.infer()).error
        instance = models.instance()
    assert not instance._mourning
    assert not instance.available


async def test_execute_time_out(tmp_path: Path) -> None:
    """A batch over its time ends with an error, and the next one is served."""
    config = CONFIG + parameter("execute_timeout_seconds", "0.2")
    async with served_model(tmp_path, DEADLY, config) as models:
        assert "execute_timeout_seconds" in (await models.infer(id="hang")).error
        assert (await models.infer()).value == [1.0]


async def test_process_forked_by_the_model_does_not_serve(tmp_path: Path) -> None:
    """A fork that leaves execute ends there; the worker answers."""
    async with served_model(tmp_path, DEADLY) as models:
        assert (await models.infer(id="fork")).value == [1.0]
        assert (await models.infer()).value == [2.0]


@pytest.mark.parametrize(
    ("code", "config", "reason"),
    [
        ("raise ImportError('nope')", "", "ImportError: nope"),
        ("def broken(:", "", "SyntaxError"),
        ("x = 1", "", "TritonPythonModel"),
        ("class TritonPythonModel:\n  def initialize(self, a): sys.exit(4)", "", "SystemExit: 4"),
        ("class TritonPythonModel:\n  def initialize(self, args): os.abort()", "", "SIGABRT"),
        (
            "class TritonPythonModel:\n  def __getattr__(self, name): raise ValueError('odd')",
            "",
            "ValueError: odd",
        ),
        (
            "class TritonPythonModel:\n  def initialize(self, args): time.sleep(60)",
            parameter("initialize_timeout_seconds", "0.3"),
            "initialize_timeout_seconds",
        ),
    ],
)  # fmt: skip
async def test_failed_load_says_why(tmp_path: Path, code: str, config: str, reason: str) -> None:
    """A model that cannot start is UNAVAILABLE with the cause, within moments."""
    async with served_model(tmp_path, code, CONFIG + config) as models:
        (entry,) = await models.server.repository_index()
    assert (entry.state, reason in entry.reason) == ("UNAVAILABLE", True), entry.reason


async def test_a_model_that_parses_arguments_finds_none(tmp_path: Path) -> None:
    """As in Triton: scripts turned into models keep their argparse."""
    code = """
    import argparse

    OPTIONS = argparse.ArgumentParser(prog="script")
    OPTIONS.add_argument("--size", type=int, default=7)

    class TritonPythonModel:
        def execute(self, requests):
            size = OPTIONS.parse_args().size
            return [response(np.array([size], np.float32)) for _ in requests]
    """
    async with served_model(tmp_path, code) as models:
        assert (await models.infer()).value == [7.0]


async def test_helpers_of_equal_names(tmp_path: Path) -> None:
    """Two models with a utils.py and a package of the same name each see their own."""
    code = """
    import utils
    from helpers.deep import WHO as DEEP
    from .beside import WHO as BESIDE
    import helpers.deep

    class TritonPythonModel:
        def execute(self, requests):
            import late
            who = [utils.WHO, DEEP, BESIDE, helpers.deep.WHO, late.WHO]
            return [response(np.array(["".join(who)], object)) for _ in requests]
    """
    for name in ("a", "b"):
        own = f"WHO = {name!r}\n"
        files = dict.fromkeys(
            ("utils.py", "helpers/__init__.py", "helpers/deep.py", "beside.py", "late.py"), own
        )
        write_model(tmp_path, name, code, files=files)
    before = set(sys.modules)
    for execution in ("process", "thread"):
        async with served(tmp_path, execution) as models:
            assert [(await models.infer(name)).text for name in "abab"] == ["aaaaa", "bbbbb"] * 2
    assert not {name for name in set(sys.modules) - before if "npuserve_model" in name}


async def test_prints_and_logging_reach_the_log_in_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """stdout, stderr, logging and Logger lines appear with the model's name, Chinese intact."""
    code = """
    import logging

    class TritonPythonModel:
        def execute(self, requests):
            print("one 推理")
            sys.stderr.write("two\\n")
            os.write(1, b"three\\n")
            logging.getLogger("user").warning("four")
            for refused in (("never", "ERROR"), (None,)):
                try:
                    pb_utils.Logger.log(*refused)
                except TypeError:
                    continue
                print("taken", refused)
            pb_utils.Logger.log("five", pb_utils.Logger.LogLevel.ERROR)
            return [response(np.ones(1, np.float32)) for _ in requests]

        def finalize(self):
            print("bye")
    """
    caplog.set_level(logging.INFO, "npuserve.model.m")
    async with served_model(tmp_path, code, CONFIG + parameter("env.LANG", "C")) as models:
        await models.infer()
        lines = [r.getMessage() for r in caplog.records if r.name == "npuserve.model.m"]
        assert lines[:5] == ["one 推理", "two", "three", "four", "five"]
        assert [r.filename for r in caplog.records if "two" in r.getMessage()] == ["m_0_0"]
    assert "bye" in caplog.text
    (line,) = [record for record in caplog.records if record.getMessage() == "five"]
    assert (line.levelno, Path(line.pathname).name) == (logging.ERROR, "model.py")


async def test_model_that_closed_its_standard_streams(tmp_path: Path) -> None:
    """Daemons do: what it prints then goes nowhere, and requests are answered."""
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            for fd in (0, 1, 2):
                os.close(fd)

        def execute(self, requests):
            print("out")
            sys.stderr.write("err\\n")
            sys.stdout.buffer.write(b"raw")
            sys.stdout.flush()
            pb_utils.Logger.log_info("logged")
            return [response(np.ones(1, np.float32)) for _ in requests]
    """
    async with served_model(tmp_path, code) as models:
        for _ in range(2):
            assert (await models.infer()).value == [1.0]


async def test_left_over_thread_does_not_hold_the_stop(tmp_path: Path) -> None:
    """The model is finalised and the worker ends although a thread of it goes on for ever."""
    code = f"""
    class TritonPythonModel:
        def initialize(self, args):
            threading.Thread(target=time.sleep, args=(1000,)).start()

        def execute(self, requests):
            return [response(np.ones(1, np.float32)) for _ in requests]

        def finalize(self):
            open({str(tmp_path / "finalized")!r}, "w").close()
    """
    async with asyncio.timeout(5), served_model(tmp_path, code) as models:
        pid = models.instance()._process.pid
    assert (tmp_path / "finalized").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_environment_of_a_placement(tmp_path: Path) -> None:
    """env.<NAME> parameters reach the worker before the model is imported."""
    code = """
    VALUE = os.environ["GREETING"]

    class TritonPythonModel:
        def execute(self, requests):
            return [response(np.array([VALUE], object)) for _ in requests]
    """
    async with served_model(tmp_path, code, CONFIG + parameter("env.GREETING", "hi")) as models:
        assert (await models.infer()).text == "hi"


async def test_virtual_environment_of_a_model(tmp_path: Path) -> None:
    """EXECUTION_ENV_PATH below the model's directory runs the workers."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [response(np.array([sys.prefix], object)) for _ in requests]
    """
    path = parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/env")
    write_model(tmp_path, "m", code, CONFIG + path)
    environment = tmp_path / "m" / "env"
    venv.create(environment, symlinks=True)
    site = environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (site / "numpy.pth").write_text(str(Path(np.__file__).parent.parent))
    async with served(tmp_path) as models:
        assert (await models.infer()).text == str(environment)


async def test_packed_environment_is_activated(tmp_path: Path) -> None:
    """A conda-pack archive is unpacked, and its activate script is sourced."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [response(np.array([os.environ["ACTIVATED"]], object)) for _ in requests]
    """
    environment = tmp_path / "packed"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    packages = Path(np.__file__).parent.parent  # the interpreter alone may have no NumPy
    activate = f"export ACTIVATED=yes\nexport PYTHONPATH='{packages}'\n"
    (environment / "bin" / "activate").write_text(activate)
    archive = tmp_path / "env.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(environment, ".")
    repository = tmp_path / "repository"
    write_model(repository, "m", code, CONFIG + parameter("EXECUTION_ENV_PATH", str(archive)))
    async with served(repository) as models:
        assert (await models.infer()).text == "yes"


async def test_worker_comes_back_when_its_fork_server_is_killed(tmp_path: Path) -> None:
    """A killed fork server takes its workers along; both are started again."""
    async with served_model(tmp_path, DEADLY) as models:
        await models.infer()
        instance = models.instance()
        worker = instance._process
        os.kill(instance._launcher.fork_server._process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while True:  # some meet the old worker, living or dying
                call = await models.infer()
                if instance._process is not worker and not call.error:
                    break
        assert call.value[0] >= 1.0


async def test_model_may_use_multiprocessing(tmp_path: Path) -> None:
    """Pools of forked and of spawned processes work, and end with the worker."""
    code = """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    class TritonPythonModel:
        def execute(self, requests):
            out = []
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                with ProcessPoolExecutor(1, context) as pool:
                    out.append(pool.submit(abs, -3).result())
            return [response(np.array(out, np.float32)) for _ in requests]
    """
    async with served_model(tmp_path, code) as models:
        assert (await models.infer()).value == [3.0, 3.0]


async def test_other_file_name(tmp_path: Path) -> None:
    """default_model_filename names the file; one that is no .py is refused."""
    for name, file in (("a", "serve.py"), ("b", "serve.txt")):
        write_model(tmp_path, name, "", CONFIG + f'default_model_filename: "{file}"')
        code = (tmp_path / name / "1" / "model.py").read_text() + DOUBLE
        (tmp_path / name / "1" / file).write_text(code)
    async with served(tmp_path) as models:
        assert (await models.infer("a")).value == [2.0]
        reasons = [entry.reason for entry in await models.server.repository_index()]
    assert "Model name must end with '.py'. Model name is \"serve.txt\"." in reasons[1]


async def test_environment_must_exist_and_stay_inside(tmp_path: Path) -> None:
    """A wrong EXECUTION_ENV_PATH fails the load and names itself."""
    for name, path in (("a", "$$TRITON_MODEL_DIRECTORY/../x"), ("b", "/nowhere")):
        write_model(tmp_path, name, "", CONFIG + parameter("EXECUTION_ENV_PATH", path))
    async with served(tmp_path) as models:
        index = await models.server.repository_index()
    assert ["EXECUTION_ENV_PATH" in entry.reason for entry in index] == [True, True]


async def test_instances_draw_different_random_numbers(tmp_path: Path) -> None:
    """Workers are forked from one process, but do not share NumPy's random state."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            return [response(np.random.rand(1)) for _ in requests]
    """
    config = CONFIG.replace("kind: KIND_CPU", "count: 2 kind: KIND_CPU")
    async with served_model(tmp_path, code, config) as models:
        drawn = {(await models.infer()).value[0] for _ in range(4)}
    assert len(drawn) == 4


async def test_crashes_leave_nothing_behind(tmp_path: Path) -> None:
    """After crashes and an unload no descriptor, process or shared memory is left."""
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            if requests[0].request_id() == "exit":
                os._exit(1)
            return [response(tensor(r).as_numpy() * 2) for r in requests]
    """
    large = {"IN": np.ones(100_000, np.float32)}
    write_model(tmp_path, "m", code)
    async with served(tmp_path) as models:  # imports, helper threads and caches come first
        await models.infer(inputs=large)
    gc.collect()
    before = _resources()
    async with served(tmp_path) as models:
        for _ in range(3):
            await models.infer(inputs=large)
            await models.infer(inputs=large, id="exit")
        del models
    gc.collect()
    assert _resources() == before


def _resources() -> tuple[int, int, int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    maps = Path("/proc/self/maps").read_text().count("memfd:npuserve")
    return len(os.listdir("/proc/self/fd")), len(children), maps


def test_fork_server_ends_in_order_when_its_news_were_not_read() -> None:
    """The server may be killed while a message to it is under way; workers still finalise."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, fork_server.__file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
        )
    select.select([ours], [], [])  # it is up and says so, to nobody
    ours.close()
    _, messages = process.communicate()
    assert (process.returncode, messages) == (0, b"")


async def test_fork_server_that_ended_unnoticed(tmp_path: Path) -> None:
    """Asking it for a worker, or to kill one, before its end was read: said, and then mended."""
    async with served_model(tmp_path, DEADLY) as models:
        instance = models.instance()
        forker = instance._launcher.fork_server
        for step in ("fork", "kill"):
            await models.infer()
            process = forker._process
            process.kill()
            process.wait()  # without a turn of the loop, which would read the end
            if step == "fork":
                with pytest.raises(InternalError, match="ended: see its messages"):
                    await forker.fork([], 10)
            else:
                forker.kill(instance._process.pid)
            assert forker._control is None
            async with asyncio.timeout(60):
                while (await models.infer()).error:  # it meets the dying worker, perhaps
                    pass


NICENESS = """
import threading

class TritonPythonModel:
    def execute(self, requests):
        found = []
        thread = threading.Thread(target=lambda: found.append(os.nice(0)))
        thread.start()
        thread.join()
        return [response(np.array([os.nice(0), *found], np.float32)) for r in requests]
"""


@pytest.mark.parametrize(
    ("optimization", "niceness"),
    [("", 10), ("priority: PRIORITY_MAX", 0), ("priority: PRIORITY_MIN", 19)],
    ids=["default", "max", "min"],
)
async def test_a_worker_is_nicer_than_the_server(
    tmp_path: Path, optimization: str, niceness: int
) -> None:
    """Its threads too; by how much, the model's configuration says."""
    config = CONFIG + f"optimization {{ {optimization} }}\n"
    expected = min(os.nice(0) + niceness, 19)
    async with served_model(tmp_path, NICENESS, config) as models:
        assert (await models.infer()).value == [expected, expected]


async def test_niceness_that_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose niceness cannot be set serves all the same, as nice as the server."""

    def refuse(*_arguments: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    async with served_model(tmp_path, NICENESS) as models:
        assert (await models.infer()).value == [os.nice(0)] * 2
