"""examples/embedding: the ensemble against the network in NumPy, and the m3e-style model.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from npuserve.testing.serve import RunningServer
from tests.examples.conftest import load_program, need, session

embed = load_program("embedding/embed.py")
build_models = load_program("embedding/build_models.py")
wordpiece = load_program("embedding/model_repository/minilm_tokenizer/1/wordpiece.py")

REPOSITORY = "embedding/model_repository"
TEXTS = [
    "A man is eating food.",
    "Inference servers batch requests that arrive at about the same time.",
    "深度学习 on an NPU: naïve, isn't it?",
    "",
]


@pytest.fixture
def client(embedding_server: RunningServer) -> Iterator[tritonclient.http.InferenceServerClient]:
    with tritonclient.http.InferenceServerClient(embedding_server.http_url) as http:
        yield http


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return wordpiece.WordPiece(need(f"{REPOSITORY}/minilm_tokenizer/1/vocab.txt"))


class Bert:
    """The network in plain NumPy, one sentence at a time: the reference for the ONNX file."""

    def __init__(self) -> None:
        self.weights = build_models.read_safetensors(need(".models/minilm/model.safetensors"))
        self.config = json.loads(need(".models/minilm/config.json").read_text())

    def embed(self, ids: list[int]) -> np.ndarray:
        """[384], length 1."""
        weights = self.weights
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
        x = self.norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings")
        for index in range(self.config["num_hidden_layers"]):
            layer = f"encoder.layer.{index}"
            attended = self.attend(x, f"{layer}.attention.self")
            attended = self.dense(attended, f"{layer}.attention.output.dense")
            x = self.norm(attended + x, f"{layer}.attention.output")
            inner = self.dense(x, f"{layer}.intermediate.dense")
            inner = inner / 2 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
            x = self.norm(self.dense(inner, f"{layer}.output.dense") + x, f"{layer}.output")
        mean = x.mean(axis=0)
        return mean / np.linalg.norm(mean)

    def attend(self, x: np.ndarray, name: str) -> np.ndarray:
        """Multi-head self-attention."""
        heads = self.config["num_attention_heads"]
        size = x.shape[1] // heads
        query, key, value = (
            self.dense(x, f"{name}.{part}").reshape(len(x), heads, size).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = np.exp(query @ key.swapaxes(1, 2) / math.sqrt(size))
        scores /= scores.sum(axis=2, keepdims=True)
        return (scores @ value).swapaxes(0, 1).reshape(x.shape)

    def dense(self, x: np.ndarray, name: str) -> np.ndarray:
        """A linear layer; PyTorch keeps W as [out, in]."""
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """Layer normalisation."""
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        scale, bias = (self.weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return x * scale + bias


def test_embeddings_equal_the_model_run_directly(
    client: tritonclient.http.InferenceServerClient, tokenizer: Any
) -> None:
    """Against the network in NumPy, from tokenizer to pooling."""
    bert = Bert()
    for text in TEXTS:
        served = embed.embed(client, "sentence_embedding", [text])[0]
        np.testing.assert_allclose(served, bert.embed(tokenizer.encode(text)), atol=1e-5)


def test_one_request_with_several_sentences(
    client: tritonclient.http.InferenceServerClient,
) -> None:
    """Padding to the longest sentence changes nothing."""
    together = embed.embed(client, "sentence_embedding", TEXTS)
    for text, row in zip(TEXTS, together, strict=True):
        alone = embed.embed(client, "sentence_embedding", [text])[0]
        np.testing.assert_allclose(row, alone, atol=1e-5)


def test_the_encoder_equals_its_file(client: tritonclient.http.InferenceServerClient) -> None:
    """Batched with others or alone, the encoder gives what onnxruntime gives."""
    ids = np.array([[101, 2158, 102] + [0] * 13], np.int64)
    mask = (ids > 0).astype(np.int64)
    feeds = {"input_ids": ids, "attention_mask": mask}
    model = session(f"{REPOSITORY}/minilm_encoder/1/model.onnx")
    inputs = []
    for name, array in feeds.items():
        inputs.append(tritonclient.http.InferInput(name, list(array.shape), "INT64"))
        inputs[-1].set_data_from_numpy(array)
    served = client.infer("minilm_encoder", inputs).as_numpy("hidden")
    np.testing.assert_allclose(served, model.run(None, feeds)[0], rtol=0, atol=1e-5)


def test_sentences_of_many_clients_share_batches(embedding_server: RunningServer) -> None:
    """16 clients at once: fewer executions of the encoder than sentences."""

    def ask(number: int) -> np.ndarray:
        with tritonclient.http.InferenceServerClient(embedding_server.http_url) as http:
            return embed.embed(http, "sentence_embedding", [embed.SENTENCES[number % 4]])

    with ThreadPoolExecutor(16) as pool:
        rows = list(pool.map(ask, range(64)))
    for number, row in enumerate(rows):
        np.testing.assert_allclose(row, rows[number % 4], atol=1e-5)
    with tritonclient.http.InferenceServerClient(embedding_server.http_url) as http:
        (statistics,) = http.get_inference_statistics("minilm_encoder")["model_stats"]
    assert statistics["execution_count"] < statistics["inference_count"]


def test_similar_sentences_are_near(client: tritonclient.http.InferenceServerClient) -> None:
    """The numbers that the model's own documentation shows: 0.76 and -0.10."""
    food, bread, baby = embed.embed(client, "sentence_embedding", embed.SENTENCES[:3])
    assert food @ bread == pytest.approx(0.755, abs=0.01)
    assert food @ baby == pytest.approx(-0.105, abs=0.01)


def test_the_client_prints_the_table(
    embedding_server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Throughput before and after dynamic batching, for 1, 8 and 32 clients."""
    embed.print_table(embedding_server.http_url, 0.1)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split(" | ")[0] == "clients"
    assert [int(row.split("|")[0]) for row in rows] == [1, 8, 32]
    assert all(float(cell) > 0 for row in rows for cell in row.split("|")[1:])


def test_text_that_is_no_utf8_is_refused(embedding_server: RunningServer) -> None:
    """The error of the member comes back through the ensemble."""
    tensor = tritonclient.http.InferInput("text", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"\xff\xfe"]], np.object_))
    with (
        tritonclient.http.InferenceServerClient(embedding_server.http_url) as http,
        pytest.raises(InferenceServerException, match="'text' is no UTF-8"),
    ):
        http.infer("sentence_embedding", [tensor])


def test_m3e_style_model(client: tritonclient.http.InferenceServerClient) -> None:
    """TYPE_STRING in, FP32 [768] out; equal texts are equal, near ones nearer than far ones."""
    texts = ["昇腾推理服务器", "昇腾推理服务", "quarterly report"]
    tensor = tritonclient.http.InferInput("text", [3, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], np.object_))
    vectors = client.infer("m3e", [tensor]).as_numpy("embeddings")
    assert vectors.shape == (3, 768)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert vectors[0] @ vectors[1] > 0.7 > vectors[0] @ vectors[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's 3.5 cm!", ["it", "'", "s", "3", ".", "5", "cm", "!"]),
        ("naïve\tCAFÉ\n", ["naive", "cafe"]),
        ("推理server", ["推", "理", "server"]),
        ("  ", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    """Lower case without accents; punctuation and Chinese characters stand alone."""
    assert wordpiece.split_words(text) == words


def test_pieces(tokenizer: Any) -> None:
    """BERT's numbers for a sentence, an unknown character and a text that is too long."""
    assert tokenizer.encode("the quick brown fox") == [101, 1996, 4248, 2829, 4419, 102]
    assert tokenizer.encode("\U0001f9f6") == [101, 100, 102]
    assert len(tokenizer.encode("word " * 500)) == wordpiece.MAX_TOKENS
