"""Starter files for a new folder."""

import importlib.util
import keyword
import sys
from collections.abc import Callable
from pathlib import Path

from fedshuffle.errors import FedShuffleError, error_context

_HERE = Path(__file__).parent
_APP = "flower_app"
"""The name of the package in the template of a Flower app."""


def new_run(folder: str | Path) -> Path:
    """Write a small run: a config, and a module with its model and data."""
    return _write(_HERE / "run", folder)


def new_flower_app(folder: str | Path) -> Path:
    """Write a small Flower app; its package is named as the folder."""
    name = _package(Path(folder).absolute().name)

    def rename(text: str) -> str:
        text = text.replace(_APP, name)
        return text.replace(_APP.replace("_", "-"), name.replace("_", "-"))

    return _write(_HERE.parent / "flower" / "template", folder, rename)


def _write(
    template: Path, folder: str | Path, rename: Callable[[str], str] = lambda text: text
) -> Path:
    """Write the files of a template into a new or empty folder, with some names replaced."""
    target = Path(folder).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FedShuffleError(f"{str(folder)!r} exists and is not an empty folder. Choose another.")
    sources = [path for path in template.rglob("*") if path.suffix in {".py", ".toml", ".md"}]
    with error_context(f"choose another folder: cannot write to {str(folder)!r}", OSError):
        for source in sources:
            place = target / rename(str(source.relative_to(template)))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(rename(source.read_text(encoding="utf-8")), encoding="utf-8")
    return target


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
    found = None if name == _APP else importlib.util.find_spec(name)
    if name in sys.stdlib_module_names or (found is not None and found.origin is not None):
        raise FedShuffleError(
            f"{folder!r} would hide the Python module {name!r}. Choose another name."
        )
    return name
