"""Imports point one way: the modules of `attnres` import one another in no circle, and packages only what lies below.

Imports inside functions count; those under TYPE_CHECKING, which never run, do not.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnres

ROOT = Path(attnres.__file__).parent

ORDER = """
    errors loss_kernel savings
    device files folders head hub imports progress reading stats text typed
    ops
    residuals
    streams
    data
    models
    inspect
    scale
    training
    figures
    report
    evals
    inspect.texts inspect.tables inspect.look inspect.corpus figures.draw
    app
    comparison
    flags
    commands
    cli
    __main__
"""
"""From bottom to top, as in docs/explanation/architecture.md: a line may import itself and the lines above it here.

Modules with a line of their own are what a command does: they lie above the rest of their package.
"""

LAYERS = {name: level for level, line in enumerate(ORDER.strip().splitlines()) for name in line.split()}


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    paths = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below `node` but those of `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from running(child)


def imported(path: Path, names: set[str]) -> set[str]:
    """The modules of the package that a file imports; a package's __init__ where a name is no module of it."""
    out = set()
    for node in running(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                out.add(inner if inner in names else node.module)
                # What `attnres` hands out lazily would hide where it comes from.
                assert inner in names or node.module != "attnres" or alias.name == "__version__", f"{path}: {inner}"
    return out & names


MODULES = modules()


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Which modules of the package each imports; every collecting process would parse them all outside a fixture."""
    return {name: imported(path, set(MODULES)) - {name} for name, path in MODULES.items()}


def place(module: str) -> str | None:
    """The part of the dotted name that `ORDER` has, the module's or its package's; None for `attnres` itself."""
    name = module.removeprefix("attnres").removeprefix(".")
    return name if name in LAYERS else name.split(".")[0] or None


def test_the_graph_has_imports_of_functions_too_and_those_of_type_checkers_not(graph):
    assert "attnres.residuals.layout" in graph["attnres.residuals.mechanisms.full"]
    assert "attnres.comparison.compare" in graph["attnres.commands.compare"]
    assert "attnres.evals.generate" not in graph["attnres"]


def test_the_package_imports_nothing_of_the_rest_of_the_repository():
    rest = {path.name for path in ROOT.parent.iterdir() if path.is_dir()} - {ROOT.name}
    assert "lab" in rest
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not rest & {name.split(".")[0] for name in names}, path


def test_every_package_has_its_place(graph):
    assert {place(name) for name in graph} - {None} <= set(LAYERS)


def test_no_module_imports_itself_by_way_of_others(graph):
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_packages_import_only_what_lies_below_them(graph):
    up = [
        f"{name} -> {other}"
        for name, others in graph.items()
        for other in others
        if name != "attnres" and other != "attnres" and LAYERS[place(other)] > LAYERS[place(name)]
    ]
    assert not up
