"""Sentence embeddings with m3e on an NPU, a GPU or the CPU; hashed n-grams without the model."""

import importlib.util
import json
import zlib

import numpy as np
import triton_python_backend_utils as pb_utils

SIZE = 768


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        path = config["parameters"].get("model_path", {}).get("string_value", "")
        device_id = args["model_instance_device_id"]
        if path:
            self.encode = load_sentence_transformer(path, device_id)
        else:
            pb_utils.Logger.log_warn("no model_path: embeddings are hashed n-grams, not m3e's")
            self.encode = encode_ngrams

    def execute(self, requests):
        texts = []
        counts = []
        for request in requests:
            column = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            texts += [text.decode("utf-8") for text in column.reshape(-1)]
            counts.append(len(column))
        embeddings = self.encode(texts)
        parts = np.split(embeddings, np.cumsum(counts)[:-1])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("embeddings", part)]) for part in parts]


def load_sentence_transformer(path, device_id):
    """The model's encode function, on the best device there is."""
    import torch
    from sentence_transformers import SentenceTransformer

    if importlib.util.find_spec("torch_npu"):
        import torch_npu  # noqa: F401  (adds the device type "npu" to torch)

        device = f"npu:{device_id}"
    else:
        device = f"cuda:{device_id}" if torch.cuda.is_available() else "cpu"
    model = SentenceTransformer(path, device=device)

    def encode(texts):
        return np.asarray(model.encode(texts, normalize_embeddings=True), np.float32)

    return encode


def encode_ngrams(texts):
    """[len(texts), 768], length 1: signs of hashed character n-grams, added up."""
    embeddings = np.zeros((len(texts), SIZE), np.float32)
    for row, text in zip(embeddings, texts):
        marked = f"^{text.lower()}$"
        for length in (1, 2, 3):
            for start in range(len(marked) - length + 1):
                digest = zlib.crc32(marked[start : start + length].encode("utf-8"))
                row[digest % SIZE] += 1 if digest & 0x10000 else -1
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings / np.maximum(norms, 1e-12)
