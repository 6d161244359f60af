"""The import law: which folder may know of which. docs/layout.md has it as a table, and why."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gapless

ROOT = Path(gapless.__file__).parent
PACKAGE = "gapless"
LEAVES = ("errors", "config", "garbage", "progress", "child")
VALUES = (
    "core.params",
    "core.processor",
    "core.structured",
    "core.choices",
    "core.outcome",
    "core.request",
    "core.limits",
    "core.prefix_hashes",
)
FILES_OF_RUN = (
    *("prompt_file", "formats", "shape_flags", "part_file", "run_identity", "file_lock", "result_file"),
    *("line_work", "console"),
)
TOP_LEVEL = ("client", "llm", "async_llm", "report", *FILES_OF_RUN, "chat", "distributed", "commands", "cli")
BENCH = ("bench",)
PROOF = ("proof",)

# who -> what of the package it may import, besides itself; a name stands for all below it
LAW: dict[str, tuple[str, ...]] = {
    "errors": (),
    "config": ("errors",),
    "garbage": (),
    "progress": (),
    "child": (),
    "core": ("errors",),
    "device": ("errors",),
    "kernels": ("core.guide", "core.params", "core.plan", "core.row_fields"),
    "native": ("config", "errors"),
    "trace": ("errors",),
    "attention": ("kernels", "models.spec"),
    "models": ("errors", "kernels"),
    "text": ("errors", "child", "models.source", "models.files", "models.gguf_file"),
    "guides": ("core", "errors", "native", "text", "models.source"),
    "runner": (
        *(
            "core.baggage",
            "core.guide",
            "core.plan",
            "core.limits",
            "core.params",
            "core.processor",
            "core.request",
            "core.row_fields",
            "core.windows",
        ),
        *("device", "attention", "models", "kernels", "native", "config", "errors", "garbage"),
    ),
    "ranks": (
        *("core.baggage", "core.limits", "core.plan", "core.request", "core.row_fields", "child", "errors"),
        "distributed.cluster",
    ),
    "pipeline": (
        "core",
        "guides",
        "device",
        "runner",
        "trace.columns",
        "trace.null_recorder",
        "trace.recorder",
        "trace.timeline",
        "models.source",
        "models.rank_group",
        "ranks",
        "child",
        "config",
        "errors",
    ),
    **dict.fromkeys(TOP_LEVEL, ("pipeline.engine", "models.source", "text", "trace", *VALUES, *TOP_LEVEL, *LEAVES)),
    "server": ("pipeline.engine", "models.source", "text", "trace.files", *VALUES, *LEAVES),
    "cli": ("pipeline.engine", "models.source", "text", "trace", *VALUES, *TOP_LEVEL, *LEAVES),
    "formats": ("server", "text", *VALUES, *TOP_LEVEL, *LEAVES),  # server: the types of OpenAI's bodies
    "distributed": (
        "pipeline.engine",
        "core.params",
        "core.prefix_hashes",
        "core.structured",
        "server",
        "trace",
        *FILES_OF_RUN,
        "llm",
        "__init__",
        *LEAVES,
    ),
    "ray": ("distributed",),  # the public door
    "sim": ("core", "errors", "garbage", "bench.chart", "distributed.router"),
    "__main__": ("cli",),
    "commands": (
        *("pipeline.engine", "models.source", "text", "trace", "server", "sim"),
        *(*VALUES, *TOP_LEVEL, *LEAVES, *PROOF, *BENCH),
    ),
    "__init__": ("async_llm", "client", "core.params", "core.processor", "errors", "llm"),
}
FREE = BENCH + PROOF  # take the engine apart, to measure it and to check it
NO_TORCH = ("errors", "config", "garbage", "progress", "child", "core", "native", "guides", "text", "trace", "sim")
MAY_SAY_CUDA = ("device/cuda", "runner/capture.py", "runner/graphs.py", "kernels/")
MAY_NAME_CUDA = ("config.py", "device/", "runner/kits/", "kernels/", "bench/")  # bench: peers and GPU workloads

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def owner(path: Path) -> str:
    """The folder, or the file at the top level, that a file belongs to."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in a file, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide who is meant"
            yield from (origin(node.module or "", alias.name) for alias in node.names)


def origin(module: str, name: str) -> str:
    """The module that `from module import name` depends on."""
    if module == PACKAGE and name in gapless._HOME:
        return gapless._HOME[name]
    return f"{module}.{name}" if is_module(f"{module}.{name}") else module


def is_module(name: str) -> bool:
    if not name.startswith(f"{PACKAGE}."):
        return False
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").exists()


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"))


def allowed(who: str, module: str) -> bool:
    names = (who, *LAW[who])
    return any(module == name or module.startswith(f"{name}.") for name in names)


def of_package(tree: ast.AST) -> set[str]:
    """What a file imports of the package, without the package's name."""
    found = {name for name in imports(tree) if name.split(".")[0] == PACKAGE}
    return {name.removeprefix(PACKAGE).removeprefix(".") or "__init__" for name in found}


@pytest.mark.parametrize("path", [p for p in FILES if owner(p) not in FREE], ids=str)
def test_a_file_imports_what_its_folder_may(path: Path) -> None:
    who = owner(path)
    assert who in LAW, f"{who} is new: give it a line in LAW and in docs/layout.md"
    forbidden = {name for name in of_package(parse(path)) if not allowed(who, name) and name != "__init__"}
    assert not forbidden, f"{path} imports {sorted(forbidden)}; {who} may import {LAW[who]}"


@pytest.mark.parametrize("path", [p for p in FILES if owner(p) in NO_TORCH], ids=str)
def test_no_torch(path: Path) -> None:
    assert "torch" not in {name.split(".")[0] for name in imports(parse(path))}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_cuda_is_said_in_few_places(path: Path) -> None:
    if path.as_posix().startswith(MAY_SAY_CUDA):
        return
    tree = parse(path)
    said = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node.value) == "torch"
    ]
    imported = {name for name in imports(tree) if name.startswith("torch.cuda")}
    assert not said, f"{path}: torch.cuda in line {said}"
    assert not imported
    assert not any(
        isinstance(node, ast.ImportFrom) and node.module == "torch" and "cuda" in {alias.name for alias in node.names}
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_kind_of_device_is_asked_in_few_places(path: Path) -> None:
    """Elsewhere the kit has the answer."""
    if path.as_posix().startswith(MAY_NAME_CUDA):
        return
    named = [node.lineno for node in ast.walk(parse(path)) if isinstance(node, ast.Constant) and node.value == "cuda"]
    assert not named, f"{path}: line {named} asks for the kind of device; the kit knows (runner/kits)"


def test_everybody_has_a_line_in_the_law() -> None:
    assert {owner(path) for path in FILES} <= {*LAW, *FREE}


@pytest.mark.parametrize(
    ("who", "source", "found"),
    [
        ("core", "import gapless.runner.fill", {"runner.fill"}),
        ("core", "from gapless import device", {"device"}),
        ("core", "from gapless import LLM", {"llm"}),
        ("device", "from gapless.core.plan import Plan", {"core.plan"}),
        ("runner", "def f():\n    from gapless.core.scheduler import Scheduler", {"core.scheduler"}),
        ("pipeline", "from gapless.text.tokenizer import Tokenizer", {"text.tokenizer"}),
        ("text", "if X:\n    from gapless.pipeline.engine import Engine", {"pipeline.engine"}),
        ("llm", "from gapless.core import scheduler", {"core.scheduler"}),
        ("runner", "from gapless.core.plan import Plan\nfrom gapless.core import limits", set()),
    ],
)
def test_the_law_is_applied(who: str, source: str, found: set[str]) -> None:
    assert {name for name in of_package(ast.parse(source)) if not allowed(who, name)} == found


@pytest.mark.parametrize(
    "modules",
    [
        ["gapless", "gapless.config", "gapless.errors", "gapless.cli", "gapless.console", "gapless.result_file"],
        [f"gapless.core.{path.stem}" for path in FILES if path.parts[0] == "core" and path.stem != "__init__"],
        [
            f"gapless.{'.'.join(path.with_suffix('').parts)}"
            for path in FILES
            if path.parts[0] == "text" and path.stem != "__init__"
        ],
        ["gapless.server.run"],  # the whole API process; only `engine_process` knows the engine
    ],
    ids=["top", "core", "text", "server"],
)
def test_torch_is_not_loaded_by(modules: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_exports_what_it_says() -> None:
    for name in gapless.__all__:
        assert getattr(gapless, name) is not None
    assert set(gapless._HOME) | {"__version__"} == set(gapless.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = gapless.Nonsense


def test_the_cpu_path_needs_no_triton() -> None:
    """Triton comes with torch's CUDA builds only; a plain installation does without."""
    code = (
        "import sys; sys.modules['triton'] = None; import gapless.runner.build, gapless.llm, gapless.async_llm;"
        "import gapless.runner.kits.cpu, gapless.attention.reference, gapless.models.loader, gapless.bench.host"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_public_type_name_has_one_meaning() -> None:
    """Classes and type aliases, over all modules: a reader who knows a name from one file knows it in all."""
    where: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if (name := _type_name(node)) is not None and not name.startswith("_"):
                where.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(where) > 300
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def _type_name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        return name if name[0].isupper() and not name.isupper() else None
    return None
