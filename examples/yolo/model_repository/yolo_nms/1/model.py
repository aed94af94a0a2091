"""Turns the detector's predictions into boxes: threshold and non-maximum suppression."""

import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.append(str(Path(__file__).resolve().parents[3]))
import yolo_steps


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            predictions = pb_utils.get_input_tensor_by_name(request, "predictions").as_numpy()
            placements = pb_utils.get_input_tensor_by_name(request, "placement").as_numpy()
            boxes = np.stack(list(map(yolo_steps.find_boxes, predictions, placements)))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("boxes", boxes)]))
        return responses
