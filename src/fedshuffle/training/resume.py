"""The resume check: a run is resumed only with the settings it was started with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshuffle.errors import FedShuffleError

_DIGESTS = {
    "clients_sha256": ("client sizes, weights or sampling", "Use the same ones to resume"),
    "data_sha256": ("data", "Use the same examples in the same order to resume"),
    "response_probability_sha256": (
        "response probabilities",
        "Use the same response_probability to resume",
    ),
    "model_sha256": (
        "names, shapes or dtypes of the model's parameters",
        "Use the same architecture to resume",
    ),
    "frozen_sha256": (
        "values in the model's frozen parameters or buffers",
        "Checkpoints hold only trained parameters: seed the model's construction, or pass the same"
        " frozen parts, to resume",
    ),
}
"""Settings of which only a digest is stored: what differs, and the remedy."""


def check_same_settings(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Refuse settings that differ from those of the run in a folder; ``rounds`` may differ."""
    for name, value in new.items():
        if name == "rounds" or (name in old and old[name] == value):
            continue
        if name not in old:
            version = old.get("versions", {}).get("fedshuffle", "another version")
            raise FedShuffleError(
                f"the run in {str(path)!r} does not record its {name}, so it is of an older"
                f" fedshuffle ({version}). Resume with that version, or start a new run."
            )
        before, now = f"{name} {old[name]!r}", repr(value)
        remedy = "Use the same settings to resume"
        if name in _DIGESTS:
            what, remedy = _DIGESTS[name]
            before, now = f"other {what}", "these"
        elif isinstance(old[name], Mapping) and isinstance(value, Mapping):  # schedules
            at = next(r for r in {**old[name], **value} if old[name].get(r) != value.get(r))
            before, now = f"{name} {old[name].get(at)!r} in round {at}", repr(value.get(at))
        raise FedShuffleError(
            f"the run in {str(path)!r} was started with {before}, not {now}. {remedy}, or choose"
            " another folder for a new run."
        )
