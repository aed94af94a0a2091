"""A slow reader of a stream slows the model down, on the whole server with a real model."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from npuserve._proto import grpc_service_pb2 as pb
from npuserve.testing.serve import serve
from tests.protocol.grpc.conftest import SERVICE

TOTAL = 900
MODEL = f"""
import numpy as np
import triton_python_backend_utils as pb_utils
from pathlib import Path

class TritonPythonModel:
    def initialize(self, args):
        self.sent = open(Path(__file__).with_name("sent"), "w")

    def finalize(self):
        self.sent.close()

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range({TOTAL}):
                data = pb_utils.Tensor("OUT", np.full(1 << 18, number % 256, np.uint8))
                sender.send(pb_utils.InferenceResponse([data]))
                self.sent.write(".")
                self.sent.flush()
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "IN" data_type: TYPE_UINT8 dims: 1 }
output { name: "OUT" data_type: TYPE_UINT8 dims: -1 }
model_transaction_policy { decoupled: true }
parameters { key: "execution" value { string_value: "EXECUTION" } }
"""


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("execution", ["process", "thread"])
def test_a_slow_reader_slows_the_model_down(tmp_path: Path, execution: str, kind: str) -> None:
    """With a bounded response pool a model is not far ahead of the client that reads it."""
    version = tmp_path / "many" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL.replace("def execute", f"{kind} execute"))
    (version.parent / "config.pbtxt").write_text(CONFIG.replace("EXECUTION", execution))
    request = pb.ModelInferRequest(model_name="many", raw_input_contents=[b"x"])
    request.inputs.add(name="IN", datatype="UINT8", shape=[1])
    with (
        serve(tmp_path, grpc_max_response_pool_size=2) as server,
        grpc.insecure_channel(server.grpc_url) as channel,
    ):
        stream = channel.stream_stream(SERVICE + "ModelStreamInfer")
        live = channel.unary_unary(SERVICE + "ServerLive")
        answers = stream(iter([request.SerializeToString()]))
        next(answers)
        for _ in range(300):  # time in which a model that is not held would run on
            live(b"")
        ahead = (version / "sent").stat().st_size
        assert ahead < TOTAL // 2
        numbers = [0]
        for data in answers:
            response = pb.ModelStreamInferResponse.FromString(data).infer_response
            numbers.append(response.raw_output_contents[0][0])
        assert numbers == [number % 256 for number in range(TOTAL)]
