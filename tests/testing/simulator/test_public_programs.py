"""Whole programs of Ascend/samples, unmodified, on the simulator, with stand-ins for their models.

Not part of a usual run: needs OpenCV and a checkout, `ASCEND_SAMPLES=<directory>`. The outputs of a
stand-in model are the means of red, green and blue, in classes 7, 8 and 9, and the picture is red.
So a program prints 7 first if each of its steps keeps the picture, and 9 if red and blue change.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from npuserve.testing.simulator import simulate, video_stream
from npuserve.testing.simulator.atc import compile_model
from tests.backends import onnx_models
from tests.backends.npu_models import SOC
from tests.testing.simulator.media import jpeg, noise

SAMPLES = os.environ.get("ASCEND_SAMPLES", "")

pytestmark = [
    pytest.mark.skipif(not SAMPLES, reason="ASCEND_SAMPLES is not set"),
    pytest.mark.skipif(importlib.util.find_spec("cv2") is None, reason="needs OpenCV"),
]

ACLLITE = "python/common"
CLASSES = "python/level2_simple_inference/1_classification"
RESNET = "inference/modelInference"
YUV = (
    "input_format: YUV420SP_U8 csc_switch: true matrix_r0c0: 256 matrix_r0c1: 0 matrix_r0c2: 359 "
    "matrix_r1c0: 256 matrix_r1c1: -88 matrix_r1c2: -183 matrix_r2c0: 256 matrix_r2c1: 454 "
    "matrix_r2c2: 0 input_bias_0: 0 input_bias_1: 128 input_bias_2: 128"
)
RGB = "input_format: RGB888_U8"
RED = np.zeros((1536, 1024, 3), np.uint8) + np.array([230, 60, 20], np.uint8)


@dataclass(frozen=True)
class Model:
    """A stand-in model: its file, what a program feeds it, and how many classes it has."""

    file: str = "model/resnet50.om"
    aipp: str = ""
    height: int = 224
    width: int = 224
    batch: int | str = 1
    classes: int = 1000
    data_type: int = TensorProto.FLOAT
    channels_last: bool = False
    flags: tuple[str, ...] = ()

    def compile(self, directory: Path, work: Path) -> None:
        """Write the file below `directory`."""
        weights = np.zeros((3, self.classes), np.float32)
        weights[[0, 1, 2], [7, 8, 9] if self.classes > 9 else [1, 0, 0]] = 0.05
        shape = [self.batch, 3, self.height, self.width]
        if self.channels_last:
            shape = [self.batch, "height", "width", 3]
        constant = numpy_helper.from_array(weights)
        nodes = [
            helper.make_node("Constant", [], ["weights"], value=constant),
            helper.make_node("Cast", ["data"], ["pixels"], to=TensorProto.FLOAT),
            helper.make_node(
                "ReduceMean",
                ["pixels"],
                ["mean"],
                axes=[1, 2] if self.channels_last else [2, 3],
                keepdims=0,
            ),
            helper.make_node("MatMul", ["mean", "weights"], ["prob"]),
        ]
        onnx_models.save(
            work, nodes, [onnx_models.value("data", self.data_type, shape)],
            [onnx_models.value("prob", TensorProto.FLOAT, [self.batch, self.classes])],
            opset=13,
        )  # fmt: skip
        flags = list(self.flags)
        if self.aipp:
            (work / "aipp.cfg").write_text(
                f"aipp_op {{ aipp_mode: static src_image_size_w: {self.width} "
                f"src_image_size_h: {self.height} {self.aipp} }}"
            )
            flags.append(f"--insert_op_conf={work / 'aipp.cfg'}")
        target = directory / self.file
        target.parent.mkdir(parents=True, exist_ok=True)
        compile_model(
            "--framework=5", f"--model={work / '1/model.onnx'}",
            f"--output={target.with_suffix('')}", f"--soc_version={SOC}", *flags,
        )  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A program of the repository, what it needs and which class it has to find."""

    directory: str
    file: str
    label: int | None = None
    model: Model | None = None
    arguments: tuple[str, ...] = ()
    prepare: Callable[[Path], None] = lambda directory: None


def _video(directory: Path) -> None:
    frame = video_stream.access_unit(jpeg(RED[:720].repeat(2, 1)[:, :1280]), 0)
    (directory / "data/vdec_h265_1frame_rabbit_1280x720.h265").write_bytes(frame)


def _frames(directory: Path) -> None:
    (directory / "data/dvpp_venc_128x128_nv12.yuv").write_bytes(noise(192, 128).tobytes())


def _operators(directory: Path) -> None:
    def nd(kind: str, count: int, **more: object) -> dict[str, object]:
        return {"format": "ND", "shape": [count], "type": kind, **more}

    cast = {"op": "Cast", "input_desc": [nd("float", 1000)], "output_desc": [nd("float16", 1000)],
            "attr": [{"name": "dst_type", "type": "int", "value": 1}]}  # fmt: skip
    axis = nd("int32", 1, is_const=True, const_value=[0])
    largest = {"op": "ArgMaxV2", "output_desc": [nd("int32", 1)],
               "input_desc": [nd("float16", 1000), axis]}  # fmt: skip
    (directory / "operators.json").write_text(json.dumps([cast, largest]))
    compile_model(
        f"--singleop={directory / 'operators.json'}", f"--output={directory / 'op_models'}",
        f"--soc_version={SOC}",
    )  # fmt: skip


def _addition(directory: Path) -> None:
    compile_model(
        f"--singleop={directory / 'test_data/config/add_op.json'}",
        f"--output={directory / 'test_data/op_models'}", f"--soc_version={SOC}",
    )  # fmt: skip


_HALF = TensorProto.FLOAT16
_AIPP_224 = Model("model/resnet50_aipp.om", YUV)
_GOOGLENET = Model("model/googlenet_yuv.om", YUV)
_GEARS = ("--input_shape=data:-1,3,224,224", "--dynamic_batch_size=1,2,4,8")
_SIZES = (
    "--input_shape=data:1,-1,-1,3",
    "--dynamic_image_size=224,224;448,448",
    "--input_format=NHWC",
)

PROGRAMS = [
    Program("python/level2_simple_inference/0_data_process/venc_image", "acl_venc.py",
            prepare=_frames),
    Program("python/level1_single_api/1_acl/4_blas/acl_operator_add", "acl_execute_add.py",
            prepare=_addition),
    Program(f"{CLASSES}/vdec_resnet50_classification", "acl_sample.py",  # decodes to NV21
            9, _AIPP_224, prepare=_video),
    Program(f"{CLASSES}/vpc_resnet50_imagenet_classification", "acl_sample.py",
            7, _AIPP_224, prepare=_operators),
    *(
        # 0 scales, 1 crops; the others do not give the model a whole picture, or no picture at all.
        Program(f"{CLASSES}/vpc_jpeg_resnet50_imagenet_classification", "main.py",
                7 if kind < 2 else None, _AIPP_224,
                ("--dvpp_type", str(kind), "--images_path", "../data/dog0_1024_1536_283.jpg"))
        for kind in (0, 1, 2, 4, 5, 6, 7)
    ),
    Program(f"{CLASSES}/resnet50_imagenet_classification", "acl_net.py",
            9, Model(data_type=_HALF)),
    Program(f"{CLASSES}/resnet50_async_imagenet_classification", "acl_net.py",
            9, Model(data_type=_HALF)),
    # It copies as many bytes as the largest gear has, so smaller pictures are read past their end.
    Program(f"{CLASSES}/resnet50_imagenet_dynamic_hw", "acl_net.py", 7,
            Model("model/tf_resnet50.om", data_type=TensorProto.UINT8, channels_last=True,
                  flags=_SIZES),
            ("--h", "448", "--w", "448")),
    Program(f"{CLASSES}/googlenet_imagenet_dynamic_batch", "classify.py", 7,
            Model("model/googlenet_dynamic_batch.om", YUV, batch="n", flags=_GEARS), ("../data",)),
    Program(f"{CLASSES}/googlenet_imagenet_multi_batch", "classify.py", 7,
            Model("model/googlenet_yuv.om", YUV, batch=10), ("../data",)),
    Program(f"{CLASSES}/googlenet_imagenet_picture", "classify.py", 7, _GOOGLENET, ("../data",)),
    Program(f"{CLASSES}/googlenet_onnx_picture", "classify.py", 7, _GOOGLENET, ("../data",)),
    Program(f"{CLASSES}/googlenet_mindspore_picture", "classify.py", 9,
            Model("model/googlenet.om", classes=10), ("../data",)),
    Program(f"{CLASSES}/resnet50_mindspore_picture", "classify.py", 9,
            Model(classes=10), ("../data",)),
    Program(f"{CLASSES}/inceptionv3_picture", "classify.py", 7,
            Model("model/InceptionV3.om", YUV, 336, 336), ("../data",)),
    Program(f"{CLASSES}/vgg16_cat_dog_picture", "main.py", None,
            Model("model/vgg16_cat_dog.om", YUV, 256, classes=2)),
    Program("python/contrib/garbage_picture", "classify_test.py", None,
            Model("model/garbage_yuv.om", YUV, classes=40), ("../data",)),
    Program(f"{RESNET}/sampleResnetQuickStart/python", "sampleResnetQuickStart.py", 7, Model()),
    # It calls a copy inside the card one from the host, which the simulator refuses (107000).
    Program(f"{RESNET}/sampleResnetDVPP/python", "sampleResnetDVPP.py", None, Model(aipp=YUV)),
    Program(f"{RESNET}/sampleResnetDVPP/pyAcllite", "sampleResnetDVPP.py", 7, Model(aipp=YUV)),
    Program(f"{RESNET}/sampleResnetAIPP/python", "sampleResnetAIPP.py", 7, Model(aipp=RGB)),
]  # fmt: skip


def _name(program: Program) -> str:
    parts = Path(program.directory).parts
    return "-".join(
        [parts[-1] if parts[0] == "python" else "/".join(parts[-2:]), *program.arguments[1:2]]
    )


@pytest.mark.parametrize("program", PROGRAMS, ids=_name)
def test_a_public_program_runs(program: Program, tmp_path: Path) -> None:
    """To its end, with the right answer."""
    shutil.copytree(Path(SAMPLES, ACLLITE), tmp_path / ACLLITE)
    directory = tmp_path / program.directory
    shutil.copytree(Path(SAMPLES, program.directory), directory)
    for file in ("data", "model", "op_models", "out"):
        (directory / file).mkdir(exist_ok=True)
    for number in range(10):
        Image.fromarray(RED).save(directory / f"data/dog{number}_1024_1536_283.jpg")
    if program.model:
        program.model.compile(directory, tmp_path / "work")
    program.prepare(directory)
    with simulate(cards=1, soc_name=SOC):
        path = [
            os.environ["PYTHONPATH"],
            *(str(tmp_path / ACLLITE / name) for name in ("", "acllite")),
        ]
        result = subprocess.run(
            [sys.executable, program.file, *program.arguments], cwd=directory / "src", text=True,
            capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    if program.label is not None:
        first = re.search(r"^(?:label:|\[)(\d+)", result.stdout, re.MULTILINE)
        assert first, result.stdout + result.stderr
        assert int(first[1]) == program.label
