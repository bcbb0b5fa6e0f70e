"""Names that people bring from other libraries, and what they are called here."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Collection
from pathlib import Path

_TWO_OUTPUTS = "It takes one output for each of the two classes."
_REMARKS = {
    "mse": "It is half the squared distance, the mean over examples.",
    "bce": _TWO_OUTPUTS,
    "binary_cross_entropy": _TWO_OUTPUTS,
    "bce_with_logits": _TWO_OUTPUTS,
}


@functools.cache
def _synonyms() -> dict[str, str]:
    """Our names, each with those of other libraries, separated by spaces."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that somebody may have meant, if there is one.

    >>> nearest("lr", ["rounds", "step_size"]), nearest("fedavgg", ["fedavg"]), nearest("x", [])
    ('step_size', 'fedavg', None)
    """
    word = name.lower().replace("-", "_")
    for ours, theirs in _synonyms().items():
        if ours in known and word in theirs.split():
            return ours
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def hint(name: str, known: Collection[str]) -> str:
    """The question whether the nearest known name was meant, or nothing."""
    near = nearest(name, known)
    remark = _REMARKS.get(name.lower(), "") if near in ("squared_error", "cross_entropy") else ""
    return f" Did you mean {near!r}? {remark}".rstrip() if near else ""
