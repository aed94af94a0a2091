"""Reads the text in a picture: detection, crop, direction, recognition.

The three models are called through the server, so that lines of several pictures share batches.
"""

import asyncio
import io
from pathlib import Path

import numpy as np
import ocr_steps
import triton_python_backend_utils as pb_utils
from PIL import Image

MAX_LINES_PER_REQUEST = 16  # max_batch_size of ocr_direction and ocr_recognition


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        self.characters = ocr_steps.read_characters(folder / "characters.txt")

    async def execute(self, requests):
        return await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        encoded = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
        try:
            picture = Image.open(io.BytesIO(encoded.tobytes())).convert("RGB")
        except OSError as error:
            message = f"the input 'image' is no picture: {error}"
            code = pb_utils.TritonError.INVALID_ARG
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
        lines = await self.read(picture)
        boxes = np.array([line.corners() for line in lines], np.float32).reshape(-1, 4, 2)
        texts = np.array([line.text.encode() for line in lines], np.object_)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("text", texts),
                pb_utils.Tensor("score", np.array([line.score for line in lines], np.float32)),
                pb_utils.Tensor("box", boxes),
            ]
        )

    async def read(self, picture):
        image = ocr_steps.detection_input(picture)
        probabilities = await infer("ocr_detection", image, "sigmoid_0.tmp_0")
        lines = ocr_steps.find_lines(probabilities[0, 0], picture.size)
        parts = [
            lines[start : start + MAX_LINES_PER_REQUEST]
            for start in range(0, len(lines), MAX_LINES_PER_REQUEST)
        ]
        await asyncio.gather(*(self.read_lines(picture, part) for part in parts))
        return [line for line in lines if line.text]

    async def read_lines(self, picture, lines):
        crops = [picture.crop(line.box) for line in lines]
        directions = await infer(
            "ocr_direction", ocr_steps.direction_input(crops), "save_infer_model/scale_0.tmp_1"
        )
        crops = ocr_steps.upright(crops, directions)
        classes = await infer(
            "ocr_recognition", ocr_steps.recognition_input(crops), "softmax_11.tmp_0"
        )
        for line, row in zip(lines, classes):
            line.text, line.score = ocr_steps.decode_text(row, self.characters)


async def infer(model, array, output):
    """The output of another model of this server."""
    request = pb_utils.InferenceRequest(
        model_name=model,
        inputs=[pb_utils.Tensor("x", array)],
        requested_output_names=[output],
    )
    response = await request.async_exec()
    if response.has_error():
        raise pb_utils.TritonModelException(f"{model}: {response.error().message()}")
    return pb_utils.get_output_tensor_by_name(response, output).as_numpy()
