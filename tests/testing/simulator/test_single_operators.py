"""Single operators: right results for what was compiled, and a code for everything else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from npuserve.testing.simulator.atc import AtcError, compile_model
from npuserve.testing.simulator.faults import Fault
from npuserve.testing.simulator.runtime import Runtime

ACL_TYPE = {"float32": 0, "float16": 1, "int8": 2, "int32": 3}
NAMES = {0: "float", 1: "float16", 2: "int8", 3: "int32"}
ND = 2

Array = NDArray[Any]


def tensor(array: Array, const: bool = False) -> dict[str, Any]:
    """An entry of the JSON file."""
    entry: dict[str, Any] = {
        "format": "ND", "shape": list(array.shape), "type": NAMES[ACL_TYPE[array.dtype.name]],
    }  # fmt: skip
    if const:
        entry |= {"is_const": True, "const_value": array.tolist()}
    return entry


def compile_op(
    directory: Path, op: str, inputs: Sequence[dict[str, Any]], outputs: Sequence[dict[str, Any]],
    soc: str = "Ascend910B3", **attributes: Any,
) -> str:  # fmt: skip
    """Compile one operator; the directory for `set_model_dir`."""
    attr = [{"name": name, "type": "int", "value": value} for name, value in attributes.items()]
    entry = {"op": op, "input_desc": inputs, "output_desc": outputs, "attr": attr}
    path = directory / "op.json"
    path.write_text(json.dumps([entry]))
    target = directory / "op_models"
    compile_model(f"--singleop={path}", f"--output={target}", f"--soc_version={soc}")
    return str(target)


class Tensors:
    """Arrays on the card, with what the calls want."""

    def __init__(self, acl: Any) -> None:
        self.acl = acl
        self.pointers: list[int] = []
        self.descs: list[int] = []
        self.buffers: list[int] = []

    def add(self, array: Array) -> int:
        """Upload; the index."""
        pointer, ret = self.acl.rt.malloc(array.nbytes, 0)
        assert ret == 0
        content = array.tobytes()
        source = self.acl.util.bytes_to_ptr(content)
        assert self.acl.rt.memcpy(pointer, array.nbytes, source, array.nbytes, 1) == 0
        self.pointers.append(pointer)
        kind = ACL_TYPE[array.dtype.name]
        self.descs.append(self.acl.create_tensor_desc(kind, list(array.shape), ND))
        self.buffers.append(self.acl.create_data_buffer(pointer, array.nbytes))
        return len(self.descs) - 1

    def read(self, index: int, like: Array) -> Array:
        """Download."""
        host = np.empty_like(like)
        address = host.ctypes.data
        assert self.acl.rt.memcpy(address, host.nbytes, self.pointers[index], host.nbytes, 2) == 0
        return host

    def close(self) -> None:
        while self.descs:
            self.acl.destroy_tensor_desc(self.descs.pop())
            assert self.acl.destroy_data_buffer(self.buffers.pop()) == 0
            assert self.acl.rt.free(self.pointers.pop()) == 0


@pytest.fixture
def tensors(acl: Any) -> Tensors:
    return Tensors(acl)


def run(tensors: Tensors, op: str, inputs: Sequence[Array], like: Array, attr: int = 0) -> Array:
    """Execute on a stream of its own and wait."""
    acl = tensors.acl
    given = [tensors.add(array) for array in inputs]
    made = tensors.add(np.zeros_like(like))
    stream, _ = acl.rt.create_stream()
    ret = acl.op.execute_v2(
        op, [tensors.descs[i] for i in given], [tensors.buffers[i] for i in given],
        [tensors.descs[made]], [tensors.buffers[made]], attr, stream,
    )  # fmt: skip
    assert ret == 0, acl.get_recent_err_msg()
    assert acl.rt.synchronize_stream(stream) == 0
    assert acl.rt.destroy_stream(stream) == 0
    return tensors.read(made, like)


RANDOM = np.random.default_rng(3)
A = RANDOM.integers(-9, 9, (4, 6)).astype(np.float16)
B = RANDOM.integers(-9, 9, (6, 5)).astype(np.float16)
I8 = np.arange(24, dtype=np.int32).reshape(4, 6)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "expected"),
    [
        ("Add", [I8, I8], {}, I8 + I8),
        ("Mul", [I8, I8], {}, I8 * I8),
        ("Sub", [A, A], {}, A - A),
        ("MatMul", [A, B], {}, A @ B),
        ("MatMulV2", [A.T.copy(), B], {"transpose_x1": True}, A @ B),
        ("BatchMatMul", [A[None], B.T[None].copy()], {"adj_x2": True}, (A @ B)[None]),
        ("Slice", [I8, np.array([1, 2], np.int32), np.array([2, -1], np.int32)], {}, I8[1:3, 2:]),
    ],
)
def test_operators_compute(
    acl: Any, tensors: Tensors, tmp_path: Path, machine: Runtime, op: str, inputs: list[Array],
    attributes: dict[str, Any], expected: Array,
) -> None:  # fmt: skip
    """Real arithmetic, with the operator's attributes; and nothing is left."""
    directory = compile_op(
        tmp_path, op, [tensor(a) for a in inputs], [tensor(expected)], **attributes
    )
    assert acl.op.set_model_dir(directory) == 0
    attr = acl.op.create_attr()
    for name, value in attributes.items():
        assert acl.op.set_attr_bool(attr, name, value) == 0
    np.testing.assert_array_equal(run(tensors, op, inputs, expected, attr), expected)
    assert acl.op.destroy_attr(attr) is None
    tensors.close()
    assert acl.rt.reset_device(0) == 0
    assert machine.leaks() == []


def test_cast_and_arg_max_with_a_constant_dimension(
    acl: Any, tensors: Tensors, tmp_path: Path
) -> None:
    """Of the classification samples: FP32 to FP16, then the index of the largest one."""
    scores = RANDOM.standard_normal(10).astype(np.float32)
    half = scores.astype(np.float16)
    index = np.zeros(1, np.int32)
    entries = [
        {"op": "Cast", "input_desc": [tensor(scores)], "output_desc": [tensor(half)],
         "attr": [{"name": "truncate", "type": "bool", "value": False},
                  {"name": "dst_type", "type": "int", "value": 1}]},
        {"op": "ArgMaxV2", "input_desc": [tensor(half), tensor(index, const=True)],
         "output_desc": [tensor(index)]},
    ]  # fmt: skip
    (tmp_path / "list.json").write_text(json.dumps(entries))
    compile_model(
        f"--singleop={tmp_path}/list.json", f"--output={tmp_path}/a/b", "--soc_version=Ascend910B3"
    )
    assert acl.op.set_model_dir(str(tmp_path / "a")) == 0
    source, target = tensors.add(scores), tensors.add(half * 0)
    cast = [(tensors.descs[i], tensors.buffers[i]) for i in (source, target)]
    assert acl.op.cast(*cast[0], *cast[1], 0, 0) == 0
    result = tensors.add(index)
    dimension = acl.create_tensor_desc(3, [1], ND)
    content = bytes(4)
    assert acl.set_tensor_const(dimension, acl.util.bytes_to_ptr(content), 4) == 0
    nothing = acl.create_data_buffer(0, 0)
    ret = acl.op.execute_v2(
        "ArgMaxV2", [tensors.descs[target], dimension], [tensors.buffers[target], nothing],
        [tensors.descs[result]], [tensors.buffers[result]], 0, 0,
    )  # fmt: skip
    assert ret == 0, acl.get_recent_err_msg()
    assert acl.rt.synchronize_stream(0) == 0
    np.testing.assert_array_equal(tensors.read(target, half), half)
    assert tensors.read(result, index)[0] == half.argmax()
    other = acl.create_tensor_desc(3, [1], ND)
    one = np.int32(1).tobytes()
    assert acl.set_tensor_const(other, acl.util.bytes_to_ptr(one), 4) == 0
    ret = acl.op.execute_v2(
        "ArgMaxV2", [tensors.descs[target], other], [tensors.buffers[target], nothing],
        [tensors.descs[result]], [tensors.buffers[result]], 0, 0,
    )  # fmt: skip
    assert ret == 100024  # compiled for another constant


def add_model(acl: Any, tmp_path: Path, soc: str = "Ascend910B3") -> None:
    path = compile_op(tmp_path, "Add", [tensor(I8), tensor(I8)], [tensor(I8)], soc)
    assert acl.op.set_model_dir(path) == 0


def add_arguments(tensors: Tensors) -> list[Any]:
    for _ in range(3):
        tensors.add(I8)
    descs, buffers = tensors.descs, tensors.buffers
    return ["Add", descs[:2], buffers[:2], descs[2:3], buffers[2:3], 0, 0]


def test_only_compiled_operators_are_found(acl: Any, tensors: Tensors, tmp_path: Path) -> None:
    """100024 for another operator, shape, datatype, number of tensors or attribute."""
    arguments = add_arguments(tensors)
    assert acl.op.execute_v2(*arguments) == 100024  # nothing is loaded
    add_model(acl, tmp_path)
    assert acl.op.execute_v2(*arguments) == 0
    assert acl.op.execute(*arguments) == 0
    assert acl.op.execute_v2("Mul", *arguments[1:]) == 100024
    assert "no loaded operator Mul" in acl.get_recent_err_msg()
    narrow = acl.create_tensor_desc(3, [4, 5], ND)
    floats = acl.create_tensor_desc(0, [4, 6], ND)
    images = acl.create_tensor_desc(3, [4, 6], 0)
    for desc in (narrow, floats, images):
        wrong = [*arguments]
        wrong[1] = [desc, arguments[1][1]]
        assert acl.op.execute_v2(*wrong) == 100024
    single = [*arguments]
    single[1:3] = arguments[1][:1], arguments[2][:1]
    assert acl.op.execute_v2(*single) == 100024
    attr = acl.op.create_attr()
    assert acl.op.set_attr_int(attr, "axis", 1) == 0
    assert acl.op.execute_v2(*arguments[:5], attr, 0) == 100024


def test_wrong_tensors_are_refused(acl: Any, tensors: Tensors, tmp_path: Path) -> None:
    """Null and dead handles, lists of different lengths, short buffers, host memory."""
    arguments = add_arguments(tensors)
    add_model(acl, tmp_path)

    def execute(position: int, value: Any) -> int:
        changed = [*arguments]
        changed[position] = value
        ret: int = acl.op.execute_v2(*changed)
        return ret

    assert execute(1, [0, arguments[1][1]]) == 100000
    assert execute(2, arguments[2][:1]) == 100000
    assert execute(2, [arguments[1][0], arguments[2][1]]) == 100000  # a description, no buffer
    assert execute(5, arguments[1][0]) == 100000  # no attributes
    assert execute(6, 12345) == 107017  # no stream
    short = acl.create_data_buffer(tensors.pointers[0], 8)
    assert execute(2, [short, arguments[2][1]]) == 145000
    on_host = acl.create_data_buffer(I8.ctypes.data, I8.nbytes)
    assert execute(2, [on_host, arguments[2][1]]) == 107000
    assert acl.set_tensor_place_ment(arguments[1][0], 1) == 0
    assert execute(2, [on_host, arguments[2][1]]) == 0
    unknown = acl.create_tensor_desc(3, [-1, 6], ND)
    assert execute(1, [unknown, arguments[1][1]]) == 100000
    with pytest.raises(TypeError, match="args parse failed"):
        execute(1, tuple(arguments[1]))
    with pytest.raises(TypeError, match="args parse failed"):
        execute(0, b"Add")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(acl.op.execute_v2, *arguments).result() == 107002


def test_memory_freed_while_an_operator_runs_is_noticed(
    acl: Any, tensors: Tensors, tmp_path: Path, machine: Runtime
) -> None:
    """507015 at synchronisation, as of an illegal address."""
    arguments = add_arguments(tensors)
    add_model(acl, tmp_path)
    assert acl.op.execute_v2(*arguments) == 0
    assert acl.rt.free(tensors.pointers[0]) == 0
    assert acl.rt.synchronize_stream(0) == 507015
    assert "operator Add" in machine.violations[0]
    machine.violations.clear()


def test_operators_take_modelled_time_on_their_stream(
    acl: Any, tensors: Tensors, tmp_path: Path, machine: Runtime
) -> None:
    """Asynchronous: three of them, one after the other, 20 microseconds each."""
    arguments = add_arguments(tensors)
    add_model(acl, tmp_path)
    before = tensors.read(2, I8)
    for _ in range(3):
        assert acl.op.execute_v2(*arguments) == 0
    np.testing.assert_array_equal(before, I8)
    assert acl.rt.synchronize_stream(0) == 0
    spans = [span for span in machine.spans() if span.name == "Add"]
    assert [span.end_ns - span.start_ns for span in spans] == [20_000] * 3
    assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))


def test_handles_are_looked_up_once(
    acl: Any, tensors: Tensors, tmp_path: Path, machine: Runtime
) -> None:
    """Descriptions may go; counts must fit; a destroyed handle is dead."""
    assert acl.op.create_handle("Add", [], [], 0) == (0, 100024)
    add_model(acl, tmp_path)
    arguments = add_arguments(tensors)
    handle, ret = acl.op.create_handle("Add", arguments[1], arguments[3], 0)
    assert ret == 0
    for desc in tensors.descs:
        acl.destroy_tensor_desc(desc)
    inputs, outputs = arguments[2], arguments[4]
    assert acl.op.execute_with_handle(handle, inputs, outputs, 0) == 0
    assert acl.rt.synchronize_stream(0) == 0
    np.testing.assert_array_equal(tensors.read(2, I8), I8 + I8)
    assert acl.op.execute_with_handle(handle, inputs[:1], outputs, 0) == 100021
    assert acl.op.execute_with_handle(handle, inputs, [], 0) == 100022
    assert any("operator handle" in leak for leak in machine.leaks())
    assert acl.op.destroy_handle(handle) is None
    assert acl.op.execute_with_handle(handle, inputs, outputs, 0) == 100000
    assert "was destroyed" in acl.get_recent_err_msg()


def test_cast_handles(acl: Any, tensors: Tensors, tmp_path: Path) -> None:
    """`create_handle_for_cast` finds a compiled Cast, and no other."""
    path = compile_op(tmp_path, "Cast", [tensor(I8)], [tensor(A)], dst_type=1)
    assert acl.op.set_model_dir(path) == 0
    source, target = tensors.add(I8), tensors.add(A)
    descs = (tensors.descs[source], tensors.descs[target])
    handle, ret = acl.op.create_handle_for_cast(*descs, 0)
    assert ret == 0
    buffers = tensors.buffers
    assert acl.op.execute_with_handle(handle, [buffers[0]], [buffers[1]], 0) == 0
    assert acl.rt.synchronize_stream(0) == 0
    np.testing.assert_array_equal(tensors.read(target, A), I8.astype(np.float16))
    assert acl.op.create_handle_for_cast(*descs[::-1], 0) == (0, 100024)
    acl.op.destroy_handle(handle)


# Loading.


def test_the_directory_is_set_once(acl: Any, tmp_path: Path) -> None:
    """100014 for none, 100012 for a foreign file, 100002 the second time."""
    assert acl.op.set_model_dir(str(tmp_path / "absent")) == 100014
    damaged = tmp_path / "bad"
    damaged.mkdir()
    (damaged / "0_Add.om").write_bytes(b"NPUSERVE-OP\n{}")
    assert acl.op.set_model_dir(str(damaged)) == 100012
    add_model(acl, tmp_path)
    assert acl.op.set_model_dir(str(tmp_path / "op_models")) == 100002


def test_files_deeper_than_three_levels_are_not_read(
    acl: Any, tensors: Tensors, tmp_path: Path
) -> None:
    """As documented."""
    path = Path(compile_op(tmp_path, "Add", [tensor(I8), tensor(I8)], [tensor(I8)]))
    deep = tmp_path / "root" / "1" / "2" / "3"
    deep.mkdir(parents=True)
    (file,) = path.glob("*.om")
    file.rename(deep / file.name)
    assert acl.op.set_model_dir(str(tmp_path / "root")) == 0
    assert acl.op.execute_v2(*add_arguments(tensors)) == 100024


def test_an_operator_is_loaded_from_memory(acl: Any, tensors: Tensors, tmp_path: Path) -> None:
    """`acl.op.load`; no size and foreign bytes are refused."""
    path = Path(compile_op(tmp_path, "Add", [tensor(I8), tensor(I8)], [tensor(I8)]))
    (file,) = path.glob("*.om")
    content = file.read_bytes()
    assert acl.op.load(acl.util.bytes_to_ptr(content), 0) == 100000
    foreign = b"something else"
    assert acl.op.load(acl.util.bytes_to_ptr(foreign), len(foreign)) == 100012
    assert acl.op.load(acl.util.bytes_to_ptr(content), len(content)) == 0
    assert acl.op.execute_v2(*add_arguments(tensors)) == 0


def test_an_operator_of_another_chip_is_refused(acl: Any, tensors: Tensors, tmp_path: Path) -> None:
    """507008."""
    add_model(acl, tmp_path, "Ascend310P3")
    assert acl.op.execute_v2(*add_arguments(tensors)) == 507008


def test_attributes_are_of_their_type(acl: Any) -> None:
    """The binding's formats; attributes are handles like others."""
    attr = acl.op.create_attr()
    assert acl.op.set_attr_bool(attr, "a", True) == 0
    assert acl.op.set_attr_float(attr, "b", 1) == 0
    assert acl.op.set_attr_string(attr, "c", "text") == 0
    assert acl.op.set_attr_list_int(attr, "d", [1, 2]) == 0
    assert acl.op.set_attr_list_bool(attr, "e", [0, 1]) == 0
    assert acl.op.set_attr_list_float(attr, "f", [0.5, 1]) == 0
    assert acl.op.set_attr_list_string(attr, "g", ["a", "b"]) == 0
    assert acl.op.set_attr_list_list_int(attr, "h", [[1], [2, 3]]) == 0
    assert acl.op.set_attr_data_type(attr, "i", 1) == (attr, 0)
    assert acl.op.set_attr_list_data_type(attr, "j", [0, 1]) == (attr, 0)
    for call, value in (
        ("int", 1.5), ("float", "1"), ("string", b"x"), ("list_int", (1,)), ("bool", 0.5),
        ("list_bool", [0.5]), ("list_float", ["1"]), ("list_string", "ab"),
        ("list_list_int", [1]), ("data_type", "1"), ("list_data_type", 1),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="args parse failed"):
            getattr(acl.op, f"set_attr_{call}")(attr, "k", value)
    with pytest.raises(ValueError, match="between 0 and 255"):
        acl.op.set_attr_list_bool(attr, "k", [256])
    acl.op.destroy_attr(attr)
    assert acl.op.set_attr_bool(attr, "a", True) == 100000


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"op": "Conv9"}, "No supported Ops kernel"),
        ({"op": "Add", "input_desc": [], "output_desc": []}, "no output_desc"),
        ({"op": "Add", "output_desc": [{"format": "ND", "shape": [1], "type": "f1"}]}, "E10405"),
        ({"op": "GEMM", "input_desc": [tensor(I8)] * 5, "output_desc": [tensor(I8)]}, "data types"),
    ],
)
def test_atc_refuses_operators_it_does_not_have(
    tmp_path: Path, entry: dict[str, Any], text: str
) -> None:
    """With a code, as for models."""
    path = tmp_path / "op.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(AtcError, match=text):
        compile_model(f"--singleop={path}", f"--output={tmp_path}/out", "--soc_version=Ascend910B3")


# BLAS.


def gemm_model(acl: Any, tmp_path: Path, kinds: tuple[Any, Any, Any], m: int, n: int) -> None:
    a, b, c = (np.dtype(kind) for kind in kinds)
    k = 6
    factor = tensor(np.zeros((), c))
    inputs = [tensor(np.zeros((m, k), a)), tensor(np.zeros((n, k), b)), tensor(np.zeros((m, n), c))]
    attributes: dict[str, Any] = {"transpose_a": False, "transpose_b": True}
    path = compile_op(tmp_path, "GEMM", [*inputs, factor, factor], inputs[2:], **attributes)
    assert acl.op.set_model_dir(path) == 0


def test_products_of_matrices(acl: Any, tensors: Tensors, tmp_path: Path) -> None:
    """C = 2 A B' + 3 C in INT8 and INT32."""
    gemm_model(acl, tmp_path, (np.int8, np.int8, np.int32), 4, 5)
    a = RANDOM.integers(-100, 100, (4, 6)).astype(np.int8)
    b = RANDOM.integers(-100, 100, (5, 6)).astype(np.int8)
    c = RANDOM.integers(-100, 100, (4, 5)).astype(np.int32)
    for array in (a, b, c, np.array([2], np.int32), np.array([3], np.int32)):
        tensors.add(array)
    pa, pb, pc, alpha, beta = tensors.pointers
    expected = 2 * (a.astype(np.int32) @ b.T.astype(np.int32)) + 3 * c
    assert acl.blas.s8gemm(0, 1, 0, 4, 5, 6, alpha, pa, -1, pb, -1, beta, pc, -1, 0, 0) == 0
    assert acl.rt.synchronize_stream(0) == 0
    np.testing.assert_array_equal(tensors.read(2, c), expected)
    arguments = [0, 1, 0, 4, 5, 6, alpha, pa, -1, 2, pb, -1, 2, beta, pc, -1, 3, 0, 0]
    assert acl.blas.gemm_ex(*arguments) == 0
    assert acl.rt.synchronize_stream(0) == 0

    def wrong(position: int, value: int) -> int:
        changed = [*arguments]
        changed[position] = value
        ret: int = acl.blas.gemm_ex(*changed)
        return ret

    assert wrong(5, 0) == 100000  # k
    assert wrong(8, 6) == 100000  # lda
    assert wrong(2, 1) == 100000  # C transposed
    assert wrong(0, 3) == 100000  # an unknown transposition
    assert wrong(6, 0) == 100000  # alpha is null
    assert wrong(17, 1) == 100000  # low precision
    assert wrong(0, 2) == 200001  # fractal
    assert wrong(0, 1) == 100024  # not compiled so
    assert wrong(7, I8.ctypes.data) == 107000  # host memory
    handle, ret = acl.blas.create_handle_for_s8gemm(0, 1, 0, 4, 5, 6, 0)
    assert ret == 0
    acl.op.destroy_handle(handle)
    assert acl.blas.create_handle_for_hgemm(0, 1, 0, 4, 5, 6, 0) == (0, 100024)


def test_products_of_a_matrix_and_a_vector(acl: Any, tensors: Tensors, tmp_path: Path) -> None:
    """In FP16; as a product of matrices with one column."""
    x = B[:, :1].copy()
    factor = tensor(np.zeros((), np.float16))
    y = np.zeros((4, 1), np.float16)
    attributes: dict[str, Any] = {"transpose_a": False, "transpose_b": False}
    inputs = [tensor(A), tensor(x), tensor(y), factor, factor]
    path = compile_op(tmp_path, "GEMM", inputs, [tensor(y)], **attributes)
    assert acl.op.set_model_dir(path) == 0
    for array in (A, x, y, np.array([1], np.float16), np.array([0], np.float16)):
        tensors.add(array)
    pa, px, py, alpha, beta = tensors.pointers
    assert acl.blas.hgemv(0, 4, 6, alpha, pa, -1, px, -1, beta, py, -1, 0, 0) == 0
    assert acl.rt.synchronize_stream(0) == 0
    np.testing.assert_array_equal(tensors.read(2, y), A @ x)
    assert acl.blas.gemv_ex(0, 4, 6, alpha, pa, -1, 1, px, -1, 1, beta, py, -1, 1, 0, 0) == 0
    handle, ret = acl.blas.create_handle_for_gemv_ex(0, 4, 6, 1, 1, 1, 0)
    assert ret == 0
    acl.op.destroy_handle(handle)
    handle, ret = acl.blas.create_handle_for_hgemv(0, 4, 6, 0)
    acl.op.destroy_handle(handle)


def test_each_call_can_be_made_to_fail(
    acl: Any, tensors: Tensors, tmp_path: Path, machine: Runtime
) -> None:
    """Every function but those that return nothing gives the code asked for."""
    add_model(acl, tmp_path)
    arguments = add_arguments(tensors)
    attr = acl.op.create_attr()
    calls: list[tuple[str, tuple[Any, ...], Any]] = [
        ("acl.op.set_model_dir", (str(tmp_path),), 500000),
        ("acl.op.load", (0, 0), 500000),
        ("acl.op.create_attr", (), 0),
        ("acl.op.set_attr_bool", (attr, "x", 1), 500000),
        ("acl.op.set_attr_int", (attr, "x", 1), 500000),
        ("acl.op.execute", tuple(arguments), 500000),
        ("acl.op.execute_v2", tuple(arguments), 500000),
        ("acl.op.create_handle", ("Add", [], [], 0), (0, 500000)),
        ("acl.op.execute_with_handle", (0, [], [], 0), 500000),
        ("acl.op.cast", (0, 0, 0, 0, 0, 0), 500000),
        ("acl.op.create_handle_for_cast", (0, 0, 0), (0, 500000)),
        ("acl.set_tensor_const", (tensors.descs[0], 0, 0), 500000),
        ("acl.set_tensor_place_ment", (tensors.descs[0], 0), 500000),
        ("acl.blas.hgemm", (0,) * 16, 500000),
        ("acl.blas.s8gemv", (0,) * 13, 500000),
        ("acl.blas.create_handle_for_gemm_ex", (0,) * 10, (0, 500000)),
    ]
    for name, values, expected in calls:
        machine.faults.append(Fault(name))
        target = acl
        for part in name.split(".")[1:]:
            target = getattr(target, part)
        assert target(*values) == expected, name
        assert name in acl.get_recent_err_msg()


def test_half_precision_numbers(acl: Any) -> None:
    """Both ways, as 16 bits."""
    assert acl.float_to_float16(1.5) == 0x3E00
    assert acl.float16_to_float(0x3E00) == 1.5
