"""Turns sentences into token numbers for the encoder."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from wordpiece import WordPiece

MULTIPLE = 16


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        self.tokenizer = WordPiece(folder / "vocab.txt")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        try:
            rows = [self.tokenizer.encode(text.decode()) for text in texts[:, 0]]
        except UnicodeDecodeError as error:
            code = pb_utils.TritonError.INVALID_ARG
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"'text' is no UTF-8: {error}", code)
            )
        length = -(-max(map(len, rows)) // MULTIPLE) * MULTIPLE
        ids = np.zeros((len(rows), length), np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("attention_mask", mask)]
        )
