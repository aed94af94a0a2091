"""The models of test_both_executions.py: small files that together do all that a model.py may."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.e2e.models.configurations import (
    BATCHING,
    CONFIG,
    DECOUPLED,
    ITERATIVE,
    PAIRED,
    SEQUENCES,
)
from tests.e2e.models.executions import (
    ASYNC,
    BATCHES,
    INHERITED_ASYNC,
    ITERATES,
    LOOPS,
    PAIRS,
    SEQUENCE,
    STREAM,
)
from tests.e2e.models.preamble import PREAMBLE
from tests.e2e.models.requests import FAILING, PLAIN, READY, STATE, TYPES
from tests.e2e.models.services import (
    CALLS,
    HELPED,
    HELPERS,
    LIBRARY,
    LOGS,
    METRICS,
    PRINTS,
    SHARES,
)

DATATYPES = {
    "BOOL": "BOOL", "INT8": "INT8", "UINT16": "UINT16", "INT64": "INT64", "FP16": "FP16",
    "BF16": "BF16", "FP64": "FP64", "STRING": "BYTES",
}  # fmt: skip

MODELS: dict[str, tuple[str, str]] = {
    "plain": (PLAIN, CONFIG),
    "state": (STATE, CONFIG),
    "stream": (STREAM, DECOUPLED),
    "async": (ASYNC, CONFIG),
    "inherited_async": (INHERITED_ASYNC, CONFIG),
    "calls": (CALLS, CONFIG),
    "metrics": (METRICS, CONFIG),
    "logs": (LOGS, CONFIG),
    "loops": (LOOPS, CONFIG),
    "prints": (PRINTS, CONFIG),
    "sequences": (SEQUENCE, SEQUENCES),
    "iterates": (ITERATES, ITERATIVE),
    "batches": (BATCHES, BATCHING),
    "pairs": (PAIRS, PAIRED),
    "no_execute": ("class TritonPythonModel:\n    pass\n", CONFIG),
    "helped": (HELPED, CONFIG),
    "shares_a": (SHARES, CONFIG),
    "shares_b": (SHARES, CONFIG),
    "loaded": (PLAIN, CONFIG),
    "unready": (READY.replace("ANSWER", "return False"), CONFIG),
    **{
        f"type_{name.lower()}": (TYPES, CONFIG.replace("TYPE_FP32", f"TYPE_{name}"))
        for name in DATATYPES
    },
    **{
        f"ready_{name}": (READY.replace("ANSWER", answer), CONFIG)
        for name, answer in {
            "yes": "return True", "no": "return False", "text": "return 'yes'",
            "raises": "raise ValueError('语')", "leaves": "sys.exit(2)",
        }.items()
    },
    "ready_async": (
        READY.replace("    def is", "    async def is").replace("ANSWER", "return True"), CONFIG
    ),
    **{f"fails_{name}": (code, CONFIG) for name, code in FAILING.items()},
}  # fmt: skip


def write_models(root: Path) -> None:
    """The repository of both servers, and a library beside it."""
    library = root.parent / "library"
    library.mkdir()
    (library / "shared_by_models.py").write_text(LIBRARY)
    for name, (code, config) in MODELS.items():
        version = root / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(PREAMBLE + textwrap.dedent(code))
        (version.parent / "config.pbtxt").write_text(config)
    for path, text in HELPERS.items():
        file = root / "helped" / "1" / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
