"""Streams a WAV file to the VAD model for several speakers at once and prints speech segments.

    python examples/vad/detect_speech.py [FILE.wav] [--speakers 8] [--url localhost:8001]

Each speaker is a sequence of requests with its own correlation id on one gRPC stream; the server
keeps the model's state between them. Speaker n starts n seconds into the file, so that all are
different. Needs tritonclient[grpc] and numpy.
"""

from __future__ import annotations

import argparse
import queue
import time
import wave
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

SPEECH = Path(__file__).resolve().with_name("speech.wav")
SAMPLE_RATE = 16_000
CHUNK = 512  # samples, 32 ms

SPEECH_THRESHOLD = 0.5  # speech begins
SILENCE_THRESHOLD = 0.35  # speech ends, if it stays below for MIN_SILENCE_S
MIN_SILENCE_S = 0.1
MIN_SPEECH_S = 0.25


def read_wav(path: Path) -> np.ndarray:
    """Samples between -1 and 1 of a 16 kHz mono file."""
    with wave.open(str(path)) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (SAMPLE_RATE, 1, 2):
            raise SystemExit(f"{path} has to be 16-bit mono at {SAMPLE_RATE} Hz")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def split(samples: np.ndarray) -> np.ndarray:
    """[chunks, 512], the last one filled up with silence."""
    chunks = -(-len(samples) // CHUNK)
    return np.pad(samples, (0, chunks * CHUNK - len(samples))).reshape(chunks, CHUNK)


def find_segments(probabilities: np.ndarray) -> list[tuple[float, float]]:
    """Begin and end of each stretch of speech in seconds, from one probability a chunk."""
    segments = []
    begin = silence = None
    for index, probability in enumerate([*probabilities, 0.0]):
        now = index * CHUNK / SAMPLE_RATE
        if probability >= SPEECH_THRESHOLD:
            begin, silence = now if begin is None else begin, None
        elif begin is not None and probability < SILENCE_THRESHOLD:
            silence = now if silence is None else silence
            if now - silence >= MIN_SILENCE_S or index == len(probabilities):
                if silence - begin >= MIN_SPEECH_S:
                    segments.append((begin, silence))
                begin = silence = None
    return segments


def stream_speakers(url: str, audio: list[np.ndarray]) -> list[np.ndarray]:
    """The probabilities of every speaker's chunks, all speakers talking at the same time."""
    answers: queue.Queue = queue.Queue()
    probabilities = [np.zeros(len(chunks), np.float32) for chunks in audio]
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for step in range(max(map(len, audio))):
            sent = 0
            for speaker, chunks in enumerate(audio):
                if step < len(chunks):
                    send(client, speaker, step, chunks)
                    sent += 1
            for _ in range(sent):
                result, error = answers.get(timeout=30)
                if error is not None:
                    raise SystemExit(f"the server answered: {error}")
                speaker = int(result.get_response().id)
                probabilities[speaker][step] = result.as_numpy("speech_probability").item()
        client.stop_stream()
    return probabilities


def send(client: triton.InferenceServerClient, speaker: int, step: int, chunks: np.ndarray) -> None:
    """One chunk of one speaker; correlation id 0 means no sequence, so they begin at 1."""
    tensor = triton.InferInput("audio", [1, CHUNK], "FP32")
    tensor.set_data_from_numpy(chunks[step : step + 1])
    client.async_stream_infer(
        "vad",
        [tensor],
        request_id=str(speaker),
        sequence_id=speaker + 1,
        sequence_start=step == 0,
        sequence_end=step == len(chunks) - 1,
    )


def speakers_audio(samples: np.ndarray, speakers: int) -> list[np.ndarray]:
    """The chunks of each speaker: the file, begun one second later than the one before."""
    return [split(np.roll(samples, -SAMPLE_RATE * speaker)) for speaker in range(speakers)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wav", nargs="?", type=Path, default=SPEECH)
    parser.add_argument("--speakers", type=int, default=8)
    parser.add_argument("--url", default="localhost:8001")
    arguments = parser.parse_args()
    audio = speakers_audio(read_wav(arguments.wav), arguments.speakers)
    begin = time.perf_counter()
    probabilities = stream_speakers(arguments.url, audio)
    seconds = time.perf_counter() - begin
    for speaker, row in enumerate(probabilities):
        segments = ", ".join(f"{start:.2f}-{end:.2f} s" for start, end in find_segments(row))
        print(f"speaker {speaker}: {segments or 'no speech'}")
    total = sum(chunks.size for chunks in audio) / SAMPLE_RATE
    print(f"{total:.0f} s of audio in {seconds:.1f} s")


if __name__ == "__main__":
    main()
