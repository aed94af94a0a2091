"""Compile the `.proto` files: `python -m npuserve._proto.generate` (needs grpcio-tools).

Writes `descriptor_set.binpb`, which the package reads, and the `.pyi` stubs, which type
checkers read. Both are committed: users need no compiler.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROTOS = ("model_config.proto", "grpc_service.proto", "health.proto")


def main() -> int:
    """Run protoc over PROTOS and finish the stubs; protoc's exit code is returned."""
    folder = Path(__file__).parent
    root = folder.parent.parent
    arguments = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{root}",
        f"--descriptor_set_out={folder / 'descriptor_set.binpb'}",
        "--include_imports",
        f"--pyi_out={root}",
        *(str(folder / proto) for proto in PROTOS),
    ]
    code = subprocess.run(arguments, check=False).returncode
    for stub in folder.glob("*_pb2.pyi"):
        stub.write_text(_with_complete_types(stub.read_text()))
    return code


def _with_complete_types(stub: str) -> str:
    """Name the types protoc leaves open, which strict type checking refuses."""
    return stub.replace("_Mapping]", "_Mapping[str, object]]").replace(
        "**kwargs)", "**kwargs: object)"
    )


if __name__ == "__main__":
    sys.exit(main())
