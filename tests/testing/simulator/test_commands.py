"""The stand-ins of atc, npu-smi and ais_bench, and what child processes see."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from npuserve.testing.simulator import engine, simulate
from npuserve.testing.simulator.atc import AtcError, compile_model, parse_aipp, parse_gears
from npuserve.testing.simulator.om_file import decode
from npuserve.testing.simulator.runtime import Runtime
from tests.backends.npu_models import SOC, affine, batch_om, compile_om


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)


# atc.


def test_atc_compiles_and_says_so(machine: Runtime, tmp_path: Path) -> None:
    """The success line, status 0 and the file."""
    onnx = affine(tmp_path, [2, 3]) / "1" / "model.onnx"
    result = run(
        "atc", "--framework=5", f"--model={onnx}", f"--output={tmp_path}/out/m",
        f"--soc_version={SOC}",
    )  # fmt: skip
    assert result.returncode == 0
    assert "ATC run success, welcome to the next use." in result.stdout
    description, _ = decode((tmp_path / "out" / "m.om").read_bytes())
    assert description.kind == "static"
    assert description.outputs[0].name == "add:0:y"


def test_atc_fails_with_a_code(machine: Runtime, tmp_path: Path) -> None:
    """Status other than 0 and an E code."""
    result = run("atc", "--framework=5", "--model=absent.onnx", "--output=m", "--soc_version=X")
    assert result.returncode != 0
    assert "ATC run failed" in result.stdout
    assert "E10001" in result.stdout


def test_atc_explains_itself() -> None:
    """Its error text says to try that."""
    result = run(sys.executable, "-m", "npuserve.testing.simulator.atc", "--help")
    assert result.returncode == 0
    assert "--dynamic_batch_size" in result.stdout


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--soc_version=Ascend1"], "E10001"),
        (["--input_shape=nope:1,3"], "E10016"),
        (["--input_shape=x:1"], "E10010"),
        (["--input_shape=x;1,3"], "E10002"),
        (["--dynamic_batch_size=1,2", "--dynamic_dims=1;2"], "E10009"),
        (["--dynamic_batch_size=1,2", "--input_shape=x:2,3"], "E10047"),
        (["--dynamic_batch_size=1", "--input_shape=x:-1,3"], "E10042"),
        (["--dynamic_dims=1;2", "--input_shape=x:-1,3"], "E10050"),
        (["--precision_mode_v2=best"], "E10001"),
        (["--precision_mode_v2=origin", "--precision_mode=force_fp32"], "E10057"),
        (["--no_such_flag=1"], "E10016"),
        (["--framework=3"], "E10007"),
        (["--model="], "E10004"),
    ],
)
def test_atc_refuses(tmp_path: Path, flags: list[str], code: str) -> None:
    """Contradictions and unknown values, by the code of the real program."""
    onnx = affine(tmp_path, ["n", 3]) / "1" / "model.onnx"
    base = [
        "--framework=5", f"--model={onnx}", f"--output={tmp_path}/m", f"--soc_version={SOC}"
    ]  # fmt: skip
    with pytest.raises(AtcError, match=code):
        compile_model(*base, *flags)
    assert not (tmp_path / "m.om").exists()


def test_atc_refuses_what_is_no_onnx(tmp_path: Path) -> None:
    """E16002 with the parser's message."""
    path = tmp_path / "1" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(b"nothing")
    with pytest.raises(AtcError, match="E16002"):
        compile_om(tmp_path)


def test_gears_are_numbers() -> None:
    """E10033 names the flag."""
    assert parse_gears("1,2;3,4", "dynamic_dims") == [[1, 2], [3, 4]]
    with pytest.raises(AtcError, match="dynamic_dims"):
        parse_gears("1,x", "dynamic_dims")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("aipp_op { aipp_mode: dynamic }", "max_src_image_size"),
        ("aipp_op { aipp_mode: sometimes }", "neither static nor dynamic"),
        ("aipp_op { aipp_mode: static input_format: BGR }", "BGR is not supported"),
        ("aipp_op { aipp_mode: static input_format: RGB888_U8 mean_chn_0: x }", "no number"),
        ("input_format: RGB888_U8", "no aipp_op"),
    ],
)
def test_wrong_aipp_configurations_are_refused(text: str, error: str) -> None:
    """With a code, as by atc."""
    with pytest.raises(AtcError, match=error):
        parse_aipp(text)


def test_several_aipp_configurations_are_told_apart() -> None:
    """By the number of the input; comments do not count."""
    text = (
        "aipp_op { aipp_mode: dynamic max_src_image_size: 8 }  # the first\n"
        "aipp_op {\n related_input_rank: 2 # third\n aipp_mode: static\n "
        "input_format : RGB888_U8 }"
    )
    assert {rank: c["aipp_mode"] for rank, c in parse_aipp(text).items()} == {
        0: "dynamic", 2: "static",
    }  # fmt: skip


# ais_bench.


def test_ais_bench_runs_gears(machine: Runtime, tmp_path: Path) -> None:
    """`dymbatch` with a gear; a batch that is none fails; unknown modes fail."""
    from ais_bench.infer.interface import InferSession

    session = InferSession(0, str(batch_om(tmp_path) / "1" / "model.om"))
    assert [tensor.name for tensor in session.get_inputs()] == ["x"]
    x = np.ones((2, 3), np.float32)
    (y,) = session.infer([x], mode="dymbatch")
    np.testing.assert_array_equal(y, 2 * x + 1)
    with pytest.raises(RuntimeError, match="145013"):
        session.infer([np.ones((3, 3), np.float32)], mode="dymbatch")
    with pytest.raises(RuntimeError, match="wrong infer_mode"):
        session.infer([x], mode="dynbatch")
    session.free_resource()
    InferSession.finalize()
    assert machine.leaks() == []


def test_ais_bench_does_not_check_datatypes(machine: Runtime, tmp_path: Path) -> None:
    """As the original: bytes of the right number are taken for numbers of the right type."""
    from ais_bench.infer.interface import InferSession

    om = compile_om(affine(tmp_path, [2, 2])) / "1" / "model.om"
    session = InferSession(0, str(om))
    (y,) = session.infer([np.ones(2, np.float64)])
    assert y.shape == (2, 2)
    with pytest.raises(RuntimeError, match="not match"):
        session.infer([np.ones(3, np.float64)])
    session.free_resource()


# Other processes.


def test_children_see_the_cards(machine: Runtime) -> None:
    """`import acl` in a spawned interpreter, through the environment alone."""
    code = "import acl; acl.init(); print(acl.rt.get_device_count(), acl.get_soc_name())"
    result = run(sys.executable, "-c", code)
    assert result.stdout.split() == ["(2,", "0)", "Ascend910B3"], result.stderr


def test_a_leaking_child_says_so(tmp_path: Path) -> None:
    """On stderr and in the report directory, at exit."""
    code = "import acl; acl.init(); acl.rt.set_device(0); acl.rt.malloc(64, 0)"
    with simulate(report_dir=str(tmp_path)):
        result = run(sys.executable, "-c", code)
    assert "64 bytes of device 0" in result.stderr
    (report,) = tmp_path.glob("*.txt")
    assert "set_device without reset_device" in report.read_text()


def test_faults_reach_children(tmp_path: Path) -> None:
    """By the environment: the second malloc of a child."""
    code = (
        "import acl; acl.init(); acl.rt.set_device(0);"
        "print([acl.rt.malloc(64, 0)[1] for _ in range(3)])"
    )
    with simulate(faults="acl.rt.malloc:1:207001"):
        assert "[0, 207001, 0]" in run(sys.executable, "-c", code).stdout


def test_the_machine_is_put_back() -> None:
    """After the block there is no acl and no environment of the simulator."""
    with simulate():
        __import__("acl")
    with pytest.raises(ModuleNotFoundError):
        __import__("acl")


def test_real_time_is_waited_for(tmp_path: Path) -> None:
    """Without modelled time an execution takes its time."""
    import time

    from tests.testing.simulator.conftest import Loaded

    path = str(compile_om(affine(tmp_path, [2, 3]), "--simulator_device_ms=20") / "1" / "model.om")
    with simulate():
        acl = __import__("acl")
        acl.init()
        acl.rt.set_device(0)
        model = Loaded(acl, path)
        start = time.monotonic()
        assert acl.mdl.execute(model.id, model.inputs, model.outputs) == 0
        assert time.monotonic() - start >= 0.018


def test_the_environment_describes_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--npu-simulator` leaves open: chip, times, faults, where the trace goes."""
    code = (
        "from npuserve.testing.simulator import install; machine = install(cards=3);"
        "print(machine.options.device_ms, machine.options.soc_name, len(machine.cards))"
    )
    monkeypatch.setenv("NPUSERVE_SIMULATOR", '{"device_ms": 5, "soc_name": "Ascend310P3"}')
    assert run(sys.executable, "-c", code).stdout.split() == ["5", "Ascend310P3", "3"]


def test_a_program_runs_on_the_simulated_machine(tmp_path: Path) -> None:
    """As it is: its arguments, the cards it sees and its exit code."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, acl\n"
        "acl.init()\n"
        "print(acl.rt.get_device_count()[0], *sys.argv[1:])\n"
        "acl.finalize()\n"
        "sys.exit(3)\n"
    )
    simulator = (sys.executable, "-m", "npuserve.testing.simulator", "--cards=2")
    result = run(*simulator, str(program), "-x", "--cards=5")
    assert (result.returncode, result.stdout.split()) == (3, ["2", "-x", "--cards=5"])
    assert "910B3" in run(*simulator, "npu-smi", "info").stdout
    assert "no-such-program cannot be started" in run(*simulator, "no-such-program").stderr


def test_a_model_file_of_cann_is_told_from_a_damaged_one() -> None:
    """Who brings one learns what the simulator takes instead."""
    with pytest.raises(ValueError, match=r"its own atc made .* model\.onnx with the backend ge"):
        decode(b"IMOD" + bytes(252))


def test_without_onnxruntime_the_extra_is_named(
    machine: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By atc and at the load; a model is not called damaged for it."""
    om = compile_om(affine(tmp_path, [2, 3])) / "1" / "model.om"
    onnx = affine(tmp_path / "other", [2, 5]) / "1" / "model.onnx"
    acl = __import__("acl")
    acl.init()
    acl.rt.set_device(0)
    engine._session.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert acl.mdl.load_from_file(str(om))[1] == 545003
    assert "pip install 'npuserve[npu-sim]'" in acl.get_recent_err_msg()
    with pytest.raises(AtcError, match="npu-sim"):
        compile_model(
            "--framework=5", f"--model={onnx}", f"--output={tmp_path}/m", f"--soc_version={SOC}"
        )


def test_the_trace_is_written_at_exit(tmp_path: Path) -> None:
    """As Chrome trace events, one file a process."""
    om = compile_om(affine(tmp_path, [2, 3])) / "1" / "model.om"
    code = (
        "from pathlib import Path\n"
        "from npuserve.backends.acl.library import load_library\n"
        "from npuserve.backends.acl.runner import ModelRunner, RunnerOptions\n"
        f"with ModelRunner(load_library(), Path({str(om)!r}), RunnerOptions()) as runner:\n"
        "    slot = runner.acquire(); runner.input_view(slot, 0, 24)[:] = 0\n"
        "    runner.start(slot, [(2, 3)], runner.description.gears[0]); runner.finish()\n"
    )
    with simulate(trace_file=str(tmp_path / "{pid}.json")):
        result = run(sys.executable, "-c", code)
    assert result.stderr == ""
    (trace,) = tmp_path.glob("*.json")
    engines = [event["tid"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert engines == ["copy to device", "compute", "copy to host"]
