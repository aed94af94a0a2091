"""A request against its model's configuration."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import text_format

from npuserve.errors import InvalidArgumentError
from npuserve.model_config import ModelConfig
from npuserve.request import Checked, InferenceRequest
from npuserve.server.validation import RequestValidator, reshaped
from npuserve.tensor import Tensor

CONFIG = """
name: "m" max_batch_size: 4
input { name: "A" data_type: TYPE_FP32 dims: [ 2, -1 ] }
input { name: "T" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


def validator(text: str = CONFIG) -> RequestValidator:
    return RequestValidator(text_format.Parse(text, ModelConfig()))


def request(*tensors: Tensor, outputs: tuple[str, ...] = (), id: str = "") -> InferenceRequest:
    return InferenceRequest(
        "m",
        {tensor.name: tensor for tensor in tensors},
        lambda response, final: None,
        id=id,
        requested_outputs=outputs,
    )


def fp32(name: str, *shape: int) -> Tensor:
    return Tensor.from_numpy(name, np.zeros(shape, np.float32))


def text(name: str, shape: list[int], *items: bytes) -> Tensor:
    return Tensor(name, "BYTES", shape, b"".join(len(i).to_bytes(4, "little") + i for i in items))


def refusal(tensors: list[Tensor], config: str = CONFIG, **more: object) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        validator(config).check(request(*tensors, **more))  # type: ignore[arg-type]
    return str(caught.value)


def test_a_valid_request_gives_its_batch_size_again_and_again() -> None:
    """The remembered shape gives the same answer as the first check."""
    checks = validator()
    assert [checks.check(request(fp32("A", 3, 2, 5))) for _ in range(2)] == [3, 3]


def test_a_model_without_batching_has_batch_size_zero() -> None:
    """Without max_batch_size the first dimension is an ordinary one."""
    config = 'name: "m" input { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }'
    assert validator(config).check(request(fp32("A", 2))) == 0


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([fp32("B", 1, 2, 3)], "unexpected inference input 'B' for model 'm'"),
        ([text("T", [1, 1], b"x")], "but missing required input(s) ['A']"),
        ([], "got 0 inputs"),
        ([fp32("A")], "has no shape but model requires batch dimension"),
        ([fp32("A", 5, 2, 3)], "batch-size must be <= 4 for 'm'"),
        ([fp32("A", 0, 2, 3)], "batch-size must be >= 1"),
        ([fp32("A", 1, 3, 3)], "Expected [-1,2,-1], got [1,3,3]. NOTE:"),
        ([fp32("A", 1, 2)], "Expected [-1,2,-1], got [1,2]"),
        (
            [Tensor("A", "INT32", [1, 2, 3], bytes(24))],
            "data-type is 'INT32', but model",
        ),
        ([Tensor("A", "JUNK", [1, 2, 3], bytes(24))], "data-type is '<invalid>'"),
        ([Tensor("A", "FP32", [1, 2, 3], bytes(23))], "Expected 24, got 23"),
        ([Tensor("A", "FP32", [1, 2, -3], bytes(24))], "All input dimensions should be specified"),
        ([Tensor("A", "FP32", [1, 2, 1 << 62], bytes(24))], "more elements than a tensor can have"),
        ([fp32("A", 1, 2, 3), text("T", [2, 1], b"x", b"y")], "does not match other inputs"),
        ([fp32("A", 1, 2, 3), text("T", [1, 1])], "expected 1 string elements"),
        ([fp32("A", 1, 2, 3), text("T", [1, 1], b"x", b"y")], "unexpected number of string elem"),
        ([fp32("A", 1, 2, 3), Tensor("T", "BYTES", [1, 1], b"\x01")], "only 1 bytes available"),
        ([fp32("A", 1, 2, 3), Tensor("T", "BYTES", [1, 1], b"\x05\0\0\0ab")], "only 2 bytes"),
    ],
)
def test_each_fault_is_refused_with_what_was_expected(tensors: list[Tensor], words: str) -> None:
    """Every kind of wrong input has a text that names it."""
    assert words in refusal(tensors)


def test_errors_about_one_request_carry_its_id() -> None:
    """The prefix shows the id, or that there is none."""
    assert refusal([fp32("A", 9, 2, 3)], id="r7").startswith("[request id: r7] ")
    assert refusal([fp32("A", 9, 2, 3)]).startswith("[request id: <id_unknown>] ")


def test_an_unknown_output_is_refused() -> None:
    """Asking for an output the model does not have names it."""
    assert "unexpected inference output 'Z'" in refusal([fp32("A", 1, 2, 3)], outputs=("Z",))


OPTIONAL = """
name: "m" max_batch_size: 4
input { name: "A" data_type: TYPE_FP32 dims: [ 1 ] optional: true }
"""
CONTROL = 'control_input { name: "S" control { kind: CONTROL_SEQUENCE_START } }'


def test_a_batch_needs_an_input_for_its_size() -> None:
    """Also where all inputs are optional, in Triton's words."""
    assert refusal([], OPTIONAL).startswith(
        "[request id: <id_unknown>] out of bounds index 0: request has 0 inputs"
    )
    assert refusal([], OPTIONAL + "dynamic_batching { }", id="7").startswith("[request id: 7]")
    assert "has 0 inputs" in refusal([], OPTIONAL + "sequence_batching { }")


@pytest.mark.parametrize(
    "config",
    [
        OPTIONAL.replace("max_batch_size: 4", ""),
        OPTIONAL + f"sequence_batching {{ {CONTROL} }}",
        OPTIONAL + 'sequence_batching { state { input_name: "I" output_name: "O" } }',
        OPTIONAL + "ensemble_scheduling { }",
    ],
)
def test_no_input_will_do_where_there_is_another_source_of_the_size(config: str) -> None:
    """No batches, tensors that the scheduler adds, or members with inputs of their own."""
    assert validator(config).check(request()) == 0


def test_a_client_cannot_make_the_shape_memory_grow() -> None:
    """Shapes that were seen are forgotten once there are many."""
    checks = validator()
    for width in range(1, 3000):
        checks.check(request(Tensor("A", "FP32", [1, 2, width], bytes(8 * width))))
    assert len(checks._known) <= 1024


def test_reshape_gives_the_backend_its_own_shape() -> None:
    """An input of dims [1] with an empty reshape reaches the backend as [batch]."""
    config = """name: "m" max_batch_size: 4
        input { name: "A" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } }"""
    asked = request(fp32("A", 3, 1))
    assert validator(config).check(asked) == 3
    assert list(asked.inputs["A"].shape) == [3]


def test_reshape_carries_variable_sizes_over_in_order() -> None:
    """The k-th -1 of the target takes the k-th variable size."""
    tensor = fp32("A", 2, 4, 7, 6)
    assert list(reshaped(tensor, [2, 4, -1, 6], [8, -1, 1, 6], False).shape) == [8, 7, 1, 6]


def test_a_valid_request_carries_a_proof() -> None:
    """A front end may put it on a request that is alike."""
    plain = validator(CONFIG.split('input { name: "T"')[0])
    asked = request(fp32("A", 2, 2, 5))
    plain.check(asked)
    assert asked.checked == Checked(plain, 2)
    assert plain.check_again(request(fp32("A", 2, 2, 5)), asked.checked) == 2


def test_a_proof_leaves_strings_to_be_looked_at() -> None:
    """As many bytes may hold more or fewer elements."""
    model, other = validator(), fp32("A", 1, 2, 3)
    asked = request(other, text("T", [1, 1], b"abcd"))
    model.check(asked)
    proof = asked.checked
    assert proof == Checked(model, 1, (("T", 1),))
    assert model.check_again(request(other, text("T", [1, 1], b"efgh")), proof) == 1
    with pytest.raises(InvalidArgumentError, match="unexpected number of string elements 2"):
        model.check_again(request(other, text("T", [1, 1], b"", b"")), proof)
