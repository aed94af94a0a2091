"""Fits pictures into the detector's square."""

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
            images = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
            squares, placements = zip(*map(yolo_steps.letterbox, images), strict=True)
            responses.append(
                pb_utils.InferenceResponse(
                    [
                        pb_utils.Tensor("square", np.stack(squares)),
                        pb_utils.Tensor("placement", np.stack(placements)),
                    ]
                )
            )
        return responses
