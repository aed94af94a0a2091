"""Compares sentences, and shows what dynamic batching does for the throughput.

    python examples/embedding/embed.py [SENTENCE …] [--url localhost:8000] [--seconds 3]

Needs tritonclient[http] and numpy.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time

import numpy as np
import tritonclient.http as triton

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "A woman is playing the violin.",
]
BEFORE, AFTER = "sentence_embedding_unbatched", "sentence_embedding"
CLIENTS = (1, 8, 32)


def embed(client: triton.InferenceServerClient, model: str, texts: list[str]) -> np.ndarray:
    """[len(texts), 384], each row of length 1."""
    column = np.array([[text.encode()] for text in texts], np.object_)
    tensor = triton.InferInput("text", list(column.shape), "BYTES")
    tensor.set_data_from_numpy(column)
    return client.infer(model, [tensor]).as_numpy("embedding")


def print_similarities(client: triton.InferenceServerClient, texts: list[str]) -> None:
    """The cosine of the angle between every two sentences."""
    vectors = embed(client, AFTER, texts)
    for (i, one), (j, other) in itertools.combinations(enumerate(texts), 2):
        print(f"{vectors[i] @ vectors[j]:6.3f}  {one} | {other}")


def throughput(url: str, model: str, clients: int, seconds: float) -> float:
    """Sentences a second that so many clients get, each asking for one at a time."""
    counts = [0] * clients
    everybody = threading.Barrier(clients + 1)

    def work(number: int) -> None:
        with triton.InferenceServerClient(url) as client:
            text = SENTENCES[number % len(SENTENCES)]
            embed(client, model, [text])
            everybody.wait()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                embed(client, model, [text])
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    everybody.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def print_table(url: str, seconds: float) -> None:
    """Throughput before and after dynamic batching."""
    print("clients | one by one (/s) | dynamic batching (/s) | ratio")
    for clients in CLIENTS:
        before, after = (throughput(url, model, clients, seconds) for model in (BEFORE, AFTER))
        print(f"{clients:7} | {before:15.1f} | {after:21.1f} | {after / before:5.2f}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sentence", nargs="*", default=SENTENCES)
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("--seconds", type=float, default=3, help="per measurement; 0 for none")
    arguments = parser.parse_args()
    with triton.InferenceServerClient(arguments.url) as client:
        print_similarities(client, arguments.sentence)
    if arguments.seconds:
        print_table(arguments.url, arguments.seconds)


if __name__ == "__main__":
    main()
