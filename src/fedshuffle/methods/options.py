"""Parameters of a method, given as text: ``fedprox:mu=0.1``, ``mime:base=adam,b=0.9``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedshuffle.errors import FedShuffleError, unknown


def parsed(text: str) -> dict[str, str]:
    """The options in a text.

    >>> parsed("mu=0.1, keep=0.5")
    {'mu': '0.1', 'keep': '0.5'}
    """
    options = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise FedShuffleError(f"method option {part.strip()!r} cannot be read: write 'mu=0.1'.")
        if name in options:
            raise FedShuffleError(f"method option {name} is given twice: give one value.")
        options[name] = value
    return options


def replaced(parts: Mapping[str, Any], options: Mapping[str, str], method: str) -> dict[str, Any]:
    """The parts with the options in the fields of these names, wherever they are found."""
    found: set[str] = set()
    changed = {name: _replaced(part, options, found) for name, part in parts.items()}
    for name in options:
        if name not in found:
            known = sorted(values(list(parts.values())))
            if not known:
                raise FedShuffleError(f"{method} has no options, and so none named {name!r}.")
            raise unknown(f"option of {method}", name, known)
    return changed


def _replaced(part: Any, options: Mapping[str, str], found: set[str]) -> Any:
    """One part, and the parts inside it."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    changes = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if field.name in options and isinstance(value, (bool, int, float, str)):
            changes[field.name] = _like(value, options[field.name], field.name)
            found.add(field.name)
        else:
            changes[field.name] = _replaced(value, options, found)
    return dataclasses.replace(part, **changes)


def _like(value: Any, text: str, name: str) -> Any:
    """The text as a value of the same kind."""
    if isinstance(value, str):
        return text
    if isinstance(value, bool):
        if text not in ("true", "false"):
            raise FedShuffleError(f"method option {name} = {text!r}: write true or false.")
        return text == "true"
    try:
        return type(value)(text)
    except ValueError as error:
        raise FedShuffleError(f"method option {name} = {text!r} is no number.") from error


def values(parts: list[Any]) -> dict[str, Any]:
    """All options by name, with the values they have."""
    found: dict[str, Any] = {}
    for part in parts:
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if isinstance(value, (bool, int, float, str)):
                    found[field.name] = value
                found |= values([value])
    return found
