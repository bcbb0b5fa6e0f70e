"""A small Flower app to begin with, in a folder of one's own."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

from fedshuffle import templates
from fedshuffle.errors import FedShuffleError

_TEMPLATE = Path(__file__).parent / "template"
_NAME = "flower_app"


def new_app(folder: str | Path) -> Path:
    """Write an app into a new or empty folder; its package is named as the folder."""
    name = _package(Path(folder).absolute().name)

    def rename(text: str) -> str:
        text = text.replace(_NAME, name)
        return text.replace(_NAME.replace("_", "-"), name.replace("_", "-"))

    return templates.write(_TEMPLATE, folder, rename)


def _package(folder: str) -> str:
    """The name of a package for a folder: a valid one that hides no other.

    >>> _package("my-app")
    'my_app'
    """
    name = folder.replace("-", "_").lower()
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name):
        raise FedShuffleError(
            f"{folder!r} cannot name a Python package. Take letters, digits, - and _, a letter"
            " first, such as my-app."
        )
    found = None if name == _NAME else importlib.util.find_spec(name)
    if name in sys.stdlib_module_names or (found is not None and found.origin is not None):
        raise FedShuffleError(
            f"{folder!r} would hide the Python module {name!r}. Choose another name."
        )
    return name
