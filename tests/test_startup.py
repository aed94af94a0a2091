"""The process: what it prints while it starts, how it ends, and with which code."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

CONFIG = """
backend: "identity"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
ANY_PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One good model."""
    (tmp_path / "repo" / "good" / "1").mkdir(parents=True)
    (tmp_path / "repo" / "good" / "config.pbtxt").write_text(CONFIG)
    return tmp_path / "repo"


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "npuserve", *flags]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """A start that is to fail."""
    return subprocess.run(command(*flags), capture_output=True, text=True, timeout=20)


def start_and_stop(*flags: str) -> tuple[int, str]:
    """Start, wait for the last service, SIGTERM; exit code and everything printed."""
    process = subprocess.Popen(command(*flags), stderr=subprocess.PIPE, text=True)
    lines = []
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "Started Metrics Service" in line:
                process.send_signal(signal.SIGTERM)
    return process.returncode, "".join(lines)


def test_a_start_prints_what_scrapers_look_for_and_sigterm_ends_it_well(repository: Path) -> None:
    """Models, tables and services, in tritonserver's words."""
    code, text = start_and_stop(f"--model-repository={repository}", *ANY_PORTS)
    assert code == 0
    assert '"loading: good:1"' in text
    assert "\"successfully loaded 'good'" in text
    assert "| good  | 1       | READY  |" in text
    assert re.search(r"\| model_repository_path\[0\] +\| " + re.escape(str(repository)), text)
    services = re.findall(r'"Started (.+) at 0\.0\.0\.0:([1-9]\d*)"', text)
    assert {name for name, _port in services} == {
        "GRPCInferenceService",
        "HTTPService",
        "Metrics Service",
    }


def test_a_missing_repository_ends_the_start() -> None:
    """Code 1, and the line of tritonserver."""
    done = run("--model-repository=/no/such/place")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "error: creating server: Internal - failed to stat file /no/such/place"


def test_a_failing_model_ends_the_start_and_the_table_says_why(repository: Path) -> None:
    """--exit-on-error is on unless turned off."""
    (repository / "bad" / "1").mkdir(parents=True)
    (repository / "bad" / "config.pbtxt").write_text("backend: 'identity' max_batchsize: 1")
    done = run(f"--model-repository={repository}", *ANY_PORTS)
    assert done.returncode == 1
    assert re.search(r"\| bad .*UNAVAILABLE: .*config\.pbtxt:1:21: .*max_batchsize", done.stderr)
    assert "| good  |" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == "error: creating server: Internal - failed to load all models"


def test_the_log_goes_to_the_file_in_the_format_asked_for(repository: Path, tmp_path: Path) -> None:
    """Nothing but the file has it."""
    (repository / "bad" / "1").mkdir(parents=True)
    log = tmp_path / "server.log"
    done = run(
        f"--model-repository={repository}", f"--log-file={log}", "--log-format=ISO8601", *ANY_PORTS
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: creating server: Internal - failed to load all models"
    ]
    stamps = re.findall(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ [IWE] \d+ ", log.read_text(), re.M)
    assert len(stamps) > 4


def test_a_port_in_use_ends_the_start(repository: Path) -> None:
    """After the models are loaded, with the address."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(
            f"--model-repository={repository}",
            f"--http-port={port}",
            "--grpc-port=0",
            "--metrics-port=0",
        )
    assert done.returncode == 1
    assert f"Socket '0.0.0.0:{port}' already in use" in done.stderr


def test_sigint_while_a_model_loads_ends_the_start(repository: Path) -> None:
    """Nobody waits for a model that is no longer wanted."""
    model = repository / "slow" / "1"
    model.mkdir(parents=True)
    fifo_path = repository.parent / "fifo"
    (model / "model.py").write_text(
        "import os, time\n"
        "class TritonPythonModel:\n"
        "    def initialize(self, args):\n"
        f"        os.write(os.open({str(fifo_path)!r}, os.O_WRONLY), b'x')\n"
        "        time.sleep(60)\n"
    )
    os.mkfifo(fifo_path)
    process = subprocess.Popen(
        command(f"--model-repository={repository}", *ANY_PORTS), stderr=subprocess.PIPE, text=True
    )
    with process, open(fifo_path, "rb") as fifo:
        assert fifo.read(1) == b"x"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=15)
    assert process.returncode in (0, 1)


def start_executing(
    repository: Path, then: str, *flags: str
) -> tuple[subprocess.Popen[str], dict[str, int], socket.socket]:
    """A server with a request that is being executed: process, ports by service, its client."""
    model = repository / "slow" / "1"
    model.mkdir(parents=True)
    fifo_path = repository.parent / "fifo"
    (model / "model.py").write_text(
        "import os, time\n"
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        f"        os.write(os.open({str(fifo_path)!r}, os.O_WRONLY), b'x')\n"
        f"        {then}\n"
        "        tensor = pb_utils.Tensor('Y', requests[0].inputs()[0].as_numpy())\n"
        "        return [pb_utils.InferenceResponse([tensor])]\n"
    )
    (model.parent / "config.pbtxt").write_text(CONFIG.replace("identity", "python"))
    os.mkfifo(fifo_path)
    process = subprocess.Popen(
        command(f"--model-repository={repository}", *ANY_PORTS, *flags),
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    ports: dict[str, int] = {}
    while "Metrics Service" not in ports:
        started = re.search(r"Started (.+) at 0\.0\.0\.0:(\d+)", next_line(process))
        if started:
            ports[started[1]] = int(started[2])
    body = b'{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}'
    head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    client = socket.create_connection(("127.0.0.1", ports["HTTPService"]))
    client.sendall(head.encode() + b"\r\n" + body)
    with open(fifo_path, "rb") as fifo:
        assert fifo.read(1) == b"x"
    return process, ports, client


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line, "the server ended"
    return line


def test_an_exit_that_takes_too_long_names_who_is_waited_for(repository: Path) -> None:
    """The signal, the model with its requests in flight, then code 1."""
    process, _, client = start_executing(repository, "time.sleep(60)", "--exit-timeout-secs=0")
    with process, client:
        process.send_signal(signal.SIGTERM)
        text = process.communicate(timeout=15)[1]
    assert process.returncode == 1
    assert '"Signal (15) received."' in text
    assert '"Timeout 0: Found 1 model versions that have in-flight inferences"' in text
    assert "\"Model 'slow' (version 1) has 1 in-flight inferences\"" in text
    assert text.splitlines()[-1].endswith('"Exit timeout expired. Exiting immediately."')


def test_metrics_can_be_read_until_the_last_request_is_answered(repository: Path) -> None:
    """What is answered after SIGTERM would else be missing in every dashboard."""
    gate = repository.parent / "gate"
    os.mkfifo(gate)
    process, ports, client = start_executing(repository, f"open({str(gate)!r}).read()")
    with process, client:
        process.send_signal(signal.SIGTERM)
        while "has 1 in-flight inferences" not in next_line(process):
            pass
        url = f"http://127.0.0.1:{ports['Metrics Service']}/metrics"
        with urllib.request.urlopen(url, timeout=15) as reply:
            assert b"nv_inference_count" in reply.read()
        gate.write_text("go")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        process.communicate(timeout=15)
    assert process.returncode == 0
