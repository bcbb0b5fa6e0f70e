"""The layers of docs/explanation/architecture.md are true: nothing imports from a higher layer."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedshuffle

ROOT = Path(fedshuffle.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md"


def _layers() -> dict[str, int]:
    """The rank of each package or module, as the table of the page gives it from the ground up."""
    table = PAGE.read_text(encoding="utf-8").split("## Layers")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return {name: rank for rank, row in enumerate(rows) for name in re.findall(r"`([\w.]+)`", row)}


LAYERS = _layers()
MODULES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py" and not {"template", "run"} & set(path.parent.parts)
]


def _layer(module: str) -> str:
    """The longest name of the table that a module's name begins with."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((name for name in names if name in LAYERS), "")


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> Iterator[str]:
    """All modules of the package that a file imports, also late and for types."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("fedshuffle."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedshuffle":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_a_layer() -> None:
    assert [_name(path) for path in MODULES if not _layer(_name(path))] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: _name(path))
def test_a_module_imports_lower_layers_only(path: Path) -> None:
    own = _layer(_name(path))
    for module in _imports(path):
        other = _layer(module)
        allowed = not other or LAYERS[other] <= LAYERS[own]
        assert allowed, f"{own} imports {module}, which is of a higher layer"


def test_only_the_command_line_imports_experiments() -> None:
    for path in MODULES:
        if _layer(_name(path)) not in ("experiments", "cli"):
            assert not any(_layer(module) == "experiments" for module in _imports(path)), path


def test_classes_are_abstract_or_final() -> None:
    """Composition over inheritance: nothing derives from a class that can be used as it is."""
    classes: dict[str, ast.ClassDef] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node

    def bases(name: str) -> set[str]:
        found = {ast.unparse(base).split("[")[0] for base in classes[name].bases}
        return found if name not in found else set()  # a class of a library with the same name

    def abstract(name: str) -> set[str]:
        """The methods that a class leaves to others."""
        if name not in classes:
            return set()
        own = [part for part in classes[name].body if isinstance(part, ast.FunctionDef)]
        marked = {part.name for part in own if "abstractmethod" in ast.unparse(part)}
        inherited = set().union(*map(abstract, bases(name)))
        return marked | inherited - {part.name for part in own}

    for name in classes:
        for base in bases(name) & classes.keys():
            kinds = bases(base) & {"Exception", "FedShuffleError", "Protocol"}
            methods = [part for part in classes[base].body if isinstance(part, ast.FunctionDef)]
            mixin = all(method.name.startswith("__") for method in methods)
            assert kinds or mixin or abstract(base), f"{name} derives from {base}"
