"""examples/vad: eight speakers on one stream, against the file run directly."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import tritonclient.http

from npuserve.testing.serve import RunningServer
from tests.examples.conftest import EXAMPLES, load_program, need, session

detect_speech = load_program("vad/detect_speech.py")

SPEAKERS = 8


def run_directly(chunks: np.ndarray) -> np.ndarray:
    """Probabilities from Silero's own file, which leaves state and context to its caller."""
    model = session(".models/silero_vad_16k_op15.onnx")
    state = np.zeros((2, 1, 128), np.float32)
    context = np.zeros((1, 64), np.float32)
    rate = np.array(16_000, np.int64)
    probabilities = []
    for chunk in chunks:
        audio = np.concatenate([context, chunk[np.newaxis]], axis=1)
        output, state = model.run(None, {"input": audio, "state": state, "sr": rate})
        context = audio[:, -64:]
        probabilities.append(output.item())
    return np.array(probabilities, np.float32)


@pytest.fixture(scope="module")
def audio() -> list[np.ndarray]:
    need("vad/speech.wav")
    samples = detect_speech.read_wav(detect_speech.SPEECH)
    chunks: list[np.ndarray] = detect_speech.speakers_audio(samples, SPEAKERS)
    return chunks


@pytest.mark.timeout(60)  # twice 2,500 runs of the model, side by side with whatever else runs
def test_segments_equal_the_file_run_directly(
    vad_server: RunningServer, audio: list[np.ndarray]
) -> None:
    """For each of eight speakers who talk at the same time."""
    streamed = detect_speech.stream_speakers(vad_server.grpc_url, audio)
    for chunks, probabilities in zip(audio, streamed, strict=True):
        direct = run_directly(chunks)
        np.testing.assert_allclose(probabilities, direct, rtol=0, atol=1e-5)
        segments = detect_speech.find_segments(probabilities)
        assert segments == detect_speech.find_segments(direct)
        assert len(segments) >= 5


def test_chunks_of_several_speakers_share_batches(
    vad_server: RunningServer, audio: list[np.ndarray]
) -> None:
    """The sequence batcher executes fewer batches than there are chunks."""
    detect_speech.stream_speakers(vad_server.grpc_url, [chunks[:40] for chunks in audio])
    with tritonclient.http.InferenceServerClient(vad_server.http_url) as client:
        (statistics,) = client.get_inference_statistics("vad")["model_stats"]
    assert int(statistics["execution_count"]) < int(statistics["inference_count"]) / 2


def test_the_client_prints_segments(vad_server: RunningServer) -> None:
    """Started as the README says."""
    need("vad/speech.wav")
    command = [sys.executable, str(EXAMPLES / "vad/detect_speech.py"), "--speakers", "2"]
    command += ["--url", vad_server.grpc_url]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert re.match(r"speaker 0: \d+\.\d\d-\d+\.\d\d s, ", lines[0])
    assert lines[1].startswith("speaker 1: ")
    assert lines[2].startswith("20 s of audio in ")


def test_silence_has_no_segments() -> None:
    """The segmenter finds nothing where there is nothing, and closes what is open at the end."""
    assert detect_speech.find_segments(np.zeros(100, np.float32)) == []
    assert detect_speech.find_segments(np.ones(100, np.float32)) == [(0.0, 3.2)]
