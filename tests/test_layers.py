"""Imports point down only, as ARCHITECTURE.md says; read from the source, nothing is run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import npuserve

ROOT = Path(npuserve.__file__).parent

LEAVES = {
    "npuserve",  # __init__: the version
    "npuserve._proto",
    "npuserve.buffer_pool",
    "npuserve.clock",
    "npuserve.environment",
    "npuserve.errors",
    "npuserve.flag_values",
    "npuserve.model_config",
    "npuserve.options",
    "npuserve.request",
    "npuserve.response",
    "npuserve.temporary",
    "npuserve.tensor",
    "npuserve.text_table",
}

# Prefix → prefixes it may import besides itself and the leaves. The first prefix that fits counts.
ALLOWED: list[tuple[str, set[str]]] = [
    ("npuserve.backends", set()),
    ("npuserve.model_repository", set()),
    (
        "npuserve.server",
        {
            "npuserve.backends.base",
            "npuserve.backends.registry",
            "npuserve.log",
            "npuserve.model_repository",
        },
    ),
    ("npuserve.protocol.http", {"npuserve.protocol", "npuserve.server", "npuserve.log"}),
    ("npuserve.protocol.grpc", {"npuserve.protocol", "npuserve.server", "npuserve.log"}),
    ("npuserve.protocol", {"npuserve.server"}),
    ("npuserve.log", {"npuserve.server"}),
]
# The composition root, what embeds it, and what tests it.
UNRESTRICTED = {"npuserve.app", "npuserve.cli", "npuserve.embedded", "npuserve.testing"}

WIRE_MODULES = {"fastapi", "grpc", "httptools", "starlette", "uvicorn"}


def module_name(path: Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> Iterator[str]:
    """Every module a file names in an import statement, `from x import y` as x.y too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            base = ROOT.parent.joinpath(*node.module.split("."))
            for alias in node.names:
                is_module = (base / alias.name).is_dir() or (base / f"{alias.name}.py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def within(module: str, prefixes: set[str]) -> bool:
    """Whether the module is one of these packages or lies in one."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_down(module: str) -> None:
    """A module imports its own package, leaves, and the layers below it."""
    if within(module, UNRESTRICTED) or module in {"npuserve", "npuserve.__main__"}:
        return
    for prefix, allowed in ALLOWED:
        if within(module, {prefix}):
            may_import = {prefix} | allowed
            break
    else:
        assert within(module, LEAVES - {"npuserve"}), f"{module} has no place in the layers"
        may_import = set()
    for imported in imports(SOURCES[module]):
        if within(imported, {"npuserve"}) and imported not in LEAVES:
            assert within(imported, may_import | (LEAVES - {"npuserve"})), (
                f"{module} imports {imported}"
            )


def test_the_map_has_every_file() -> None:
    """ARCHITECTURE.md names each source file (the simulator lists its own), and no other one."""
    document = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+\.py\b", document)) - {"test_layers.py", "model.py"}
    simulator = ROOT / "testing" / "simulator"
    files = {
        path.name
        for path in SOURCES.values()
        if not path.is_relative_to(simulator) and not path.name.endswith("_pb2.py")
    }
    assert files - {"__init__.py", "model.py"} == named - {"__init__.py"}


def test_the_front_ends_know_nothing_of_each_other() -> None:
    """HTTP never imports gRPC, nor the other way round."""
    for module, path in SOURCES.items():
        for one, other in (("http", "grpc"), ("grpc", "http")):
            if within(module, {f"npuserve.protocol.{one}"}):
                bad = [i for i in imports(path) if within(i, {f"npuserve.protocol.{other}"})]
                assert not bad, f"{module} imports {bad}"


def test_the_core_knows_no_wire() -> None:
    """Neither server, nor backends, nor the repository import a protocol library."""
    core = {"npuserve.server", "npuserve.backends", "npuserve.model_repository"}
    for module, path in SOURCES.items():
        if within(module, core):
            bad = {name for name in imports(path) if name.split(".")[0] in WIRE_MODULES}
            assert not bad, f"{module} imports {bad}"


def test_a_worker_process_pays_for_no_front_end() -> None:
    """Importing the package, as every worker does, loads neither uvicorn nor grpc nor fastapi."""
    code = "import sys, npuserve; sys.exit(bool({'uvicorn', 'grpc', 'fastapi'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Evaluated(ast.NodeVisitor):
    """Finds `tuple[int]` and the like where Python evaluates it: outside annotations."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Note the line of one."""
        generic = {"dict", "frozenset", "list", "set", "tuple", "type", "np.ndarray"}
        if ast.unparse(node.value) in generic:
            self.found.append(node.lineno)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Skip the annotation of a variable."""
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Skip the annotations of a function."""
        for part in (*node.decorator_list, *node.args.defaults, *node.body):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If) -> None:
        """Skip what only type checkers see."""
        for part in (
            node.orelse
            if ast.unparse(node.test) == "TYPE_CHECKING"
            else (node.test, *node.body, *node.orelse)
        ):
            self.visit(part)


def test_a_worker_runs_in_python_3_8() -> None:
    """The modules of a worker process have no newer syntax and evaluate no newer types."""
    code = "import sys, npuserve.backends.worker.child; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    mine = [module for module in loaded if module in SOURCES] + [
        "npuserve.backends.worker.fork_server"
    ]
    assert len(mine) > 10
    for module in mine:
        evaluated = Evaluated()
        evaluated.visit(
            ast.parse(SOURCES[module].read_text(encoding="utf-8"), feature_version=(3, 8))
        )
        assert not evaluated.found, f"{module}, lines {evaluated.found}"


@pytest.mark.parametrize("name", npuserve.__all__)
def test_public_names_exist(name: str) -> None:
    """Every name in __all__ can be imported."""
    assert getattr(npuserve, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    """The lazy module behaves like any other."""
    with pytest.raises(AttributeError, match="no_such_name"):
        npuserve.no_such_name  # noqa: B018  (the access is the test)
