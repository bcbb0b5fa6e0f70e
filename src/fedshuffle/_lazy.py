"""Packages that import a name when it is first used, so that they load fast and without extras."""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def attach(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package, for what its ``if TYPE_CHECKING`` block imports.

    The block alone says where each name comes from, to type checkers and at run time. Submodules
    need not be listed.
    """

    def load(name: str) -> Any:
        try:
            if (place := exports(package).get(name, package)) != package:
                found = getattr(import_module(place), name)
                setattr(sys.modules[package], name, found)
                return found
            if not name.startswith("_") and find_spec(f"{package}.{name}"):
                return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            from fedshuffle.errors import missing_known

            if (known := missing_known(error, f"{package}.{name}")) is None:
                raise
            raise known from error
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load


@cache
def exports(package: str) -> dict[str, str]:
    """The modules of the names that the ``if TYPE_CHECKING`` block of a package imports.

    >>> exports("fedshuffle")["train"]
    'fedshuffle.training'
    """
    import ast
    from pathlib import Path

    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    lines = [line for node in blocks for line in node.body if isinstance(line, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in lines for alias in line.names}
