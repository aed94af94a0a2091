"""Letterbox, detector and suppression in one model; the detector runs through ais_bench."""

import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from ais_bench.infer.interface import InferSession

sys.path.append(str(Path(__file__).resolve().parents[3]))
import yolo_steps

BATCHES = (1, 2, 4, 8)  # what the detector was compiled for


class TritonPythonModel:
    def initialize(self, args):
        device_id = int(args["model_instance_device_id"])
        repository = Path(args["model_repository"]).parent
        self.session = InferSession(device_id, str(repository / "yolo_detector/1/model.om"))

    def execute(self, requests):
        responses = []
        for request in requests:
            images = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
            squares, placements = zip(*map(yolo_steps.letterbox, images), strict=True)
            predictions = self.detect(np.stack(squares))
            boxes = np.stack(list(map(yolo_steps.find_boxes, predictions, placements)))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("boxes", boxes)]))
        return responses

    def detect(self, squares):
        """ais_bench pads nothing: fill up to the next batch size, and cut back."""
        count = len(squares)
        batch = min(size for size in BATCHES if size >= count)
        padded = np.zeros((batch, *squares.shape[1:]), np.float32)
        padded[:count] = squares
        return self.session.infer([padded], mode="dymbatch")[0][:count]

    def finalize(self):
        self.session.free_resource()
