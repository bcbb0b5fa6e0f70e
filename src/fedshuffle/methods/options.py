"""Parameters of a method, given as text: ``fedprox:mu=0.1``, ``mime:base=adam,b=0.9``."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fedshuffle.errors import FedShuffleError, check_known, error_context


def parsed(text: str) -> dict[str, str]:
    """The options in a text.

    >>> parsed("mu=0.1, keep=0.5")
    {'mu': '0.1', 'keep': '0.5'}
    """
    options: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise FedShuffleError(f"method option {part.strip()!r} cannot be read: write 'mu=0.1'.")
        if name in options:
            raise FedShuffleError(f"method option {name} is given twice: give one value.")
        options[name] = value
    return options


def values(parts: Sequence[Any]) -> dict[str, Any]:
    """The options of dataclasses, and of those inside them, by name with their values."""
    found: dict[str, Any] = {}
    for part in parts:
        if dataclasses.is_dataclass(part):
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                plain = isinstance(value, bool | int | float | str)
                found |= {field.name: value} if plain else values([value])
    return found


def replaced(parts: Mapping[str, Any], options: Mapping[str, str], method: str) -> dict[str, Any]:
    """The parts with the options in the fields of these names, wherever they are."""
    known = values(list(parts.values()))
    for name in options:
        if not known:
            raise FedShuffleError(f"{method} has no options, and so none named {name!r}.")
        check_known(f"option of {method}", name, known)
    return {name: _replaced(part, options) for name, part in parts.items()}


def _replaced(part: Any, options: Mapping[str, str]) -> Any:
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    changes = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        given = field.name in options and isinstance(value, bool | int | float | str)
        changes[field.name] = (
            _like(value, options[field.name], field.name) if given else _replaced(value, options)
        )
    return dataclasses.replace(part, **changes)


def _like(value: Any, text: str, name: str) -> Any:
    if isinstance(value, bool):
        if text not in ("true", "false"):
            raise FedShuffleError(f"method option {name} = {text!r}: write true or false.")
        return text == "true"
    with error_context(lambda _: f"method option {name} = {text!r} is not a number.", ValueError):
        return type(value)(text)
