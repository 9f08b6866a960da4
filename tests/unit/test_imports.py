"""The modules of the packages stand in layers: none imports another that, through whatever others, imports it."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
PACKAGES = ("plugin_abi", "flagos_backend", "tools")


def _module(path: Path) -> str:
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_for_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(tree: ast.AST, modules: Container[str]) -> Iterator[str]:
    """What a module imports while it runs, also within its functions: a package where it asks for a name of the package
    itself, not for one of ``modules``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            named = ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
            yield from (inner if inner in modules else outer for inner, outer in named)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif _is_for_checkers(node):
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield from imported(ast.Module([other], []), modules)
        else:
            yield from imported(node, modules)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan, 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            place = stack.index(node)
            if len(stack) - place > 1:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for node in graph:
        if node not in order:
            visit(node)
    return found


def test_modules_stand_in_layers() -> None:
    paths = {_module(path): path for package in PACKAGES for path in (_ROOT / package).rglob("*.py")}
    assert len(paths) > 300
    graph = {
        name: {other for other in imported(ast.parse(path.read_text()), paths) if other in paths} - {name}
        for name, path in paths.items()
    }
    assert circles(graph) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from a.b import c, d", ["a.b.c", "a.b"]),
        ("def f():\n    import a.b", ["a.b"]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", ["b"]),
    ],
)
def test_imports_are_seen(text: str, names: list[str]) -> None:
    assert list(imported(ast.parse(text), {"a.b.c"})) == names


def test_circles_are_seen() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"f"}, "f": {"e", "a"}}
    assert sorted(circles(graph)) == [["a", "b", "c"], ["e", "f"]]


def modules_of_tests(tree: ast.AST) -> list[str]:
    """What a file imports, also within its functions and for type checkers, of pytest's own: test modules, conftest."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            # The last part may be a name in a module, and a function that tests is no module.
            is_file = (_ROOT / "tests" / Path(*parts)).with_suffix(".py").is_file()
            modules = parts if is_file or isinstance(node, ast.Import) or not node.module else parts[:-1]
            if any(part == "conftest" or part.startswith("test_") for part in modules):
                found.append(name)
    return found


def test_no_test_file_imports_another() -> None:
    files = sorted((_ROOT / "tests").rglob("*.py"))
    assert len(files) > 400
    found = {str(path.relative_to(_ROOT)): modules_of_tests(ast.parse(path.read_text())) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from conftest import fresh", ["conftest.fresh"]),
        ("from cpu.native.test_rows import softmax", ["cpu.native.test_rows.softmax"]),
        ("from unit import test_imports", ["unit.test_imports"]),
        ("from . import test_imports", ["test_imports"]),
        ("def f():\n    import unit.test_imports", ["unit.test_imports"]),
        ("if TYPE_CHECKING:\n    from cpu.replay.conftest import driver", ["cpu.replay.conftest.driver"]),
        ("from jax._src.internal_test_util import test_harnesses", []),
        ("from support.seeds import fresh\nimport latest_numbers", []),
    ],
)
def test_imports_of_tests_are_seen(text: str, names: list[str]) -> None:
    assert modules_of_tests(ast.parse(text)) == names
