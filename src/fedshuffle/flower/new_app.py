"""Flower apps: write a starter app into a new folder, and read the config of an app."""

from __future__ import annotations

import importlib.util
import keyword
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshuffle import templates
from fedshuffle.errors import FedShuffleError, unknown

_TEMPLATE = Path(__file__).parent / "template"
_NAME = "flower_app"


def new_app(folder: str | Path) -> Path:
    """Write an app into a new or empty folder; its package is named as the folder."""
    name = _package(Path(folder).absolute().name)

    def rename(text: str) -> str:
        text = text.replace(_NAME, name)
        return text.replace(_NAME.replace("_", "-"), name.replace("_", "-"))

    return templates.write(_TEMPLATE, folder, rename)


def app_config(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the app in a folder; refuses other folders and unknown keys."""
    try:
        found = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FedShuffleError(
            f"{str(folder)!r} is not a Flower app: its pyproject.toml cannot be read ({error})."
            " 'fedshuffle new flower-app DIR' writes one."
        ) from error
    app = found.get("tool", {}).get("flwr", {}).get("app", {})
    if "components" not in app:
        raise FedShuffleError(
            f"{str(folder)!r} is not a Flower app: its pyproject.toml has no section"
            " [tool.flwr.app.components]. 'fedshuffle new flower-app DIR' writes one."
        )
    config: dict[str, Any] = app.get("config", {})
    for key in changes:
        if key.split(".")[0] not in config:
            raise unknown(f"key of the app's config in {str(folder)!r},", key, config)
    return config


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
