"""What the tuning runs of a method found: the best value at each step size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedshuffle.comparison.results import TrialRecord

SIZES = {"step_size": "step size", "server_step_size": "server step size"}
"""The step sizes that may be tuned, in words."""


@dataclass(frozen=True)
class Search:
    """What the trials of a method reached at each value of a step size, and the one that won."""

    key: str
    won: float
    tried: dict[float, float | str]
    """The best value of the trials there, or in words why there is none."""

    @property
    def name(self) -> str:
        """The step size in words."""
        return SIZES[self.key]

    @property
    def varied(self) -> bool:
        """Whether there was more than one value to choose from."""
        return len(self.tried) > 1

    @property
    def edge(self) -> str:
        """``smallest`` or ``largest`` where the best value is at that end of those tried."""
        if not self.varied or isinstance(self.tried.get(self.won, ""), str):
            return ""
        return {min(self.tried): "smallest", max(self.tried): "largest"}.get(self.won, "")


def tried_at(
    trials: Sequence[TrialRecord], keys: Sequence[str], higher_is_better: bool
) -> dict[Any, float | str]:
    """The best value of the trials at each value of some keys, or why there is none."""
    own: dict[Any, list[TrialRecord]] = {}
    for trial in trials:
        values = tuple(trial[key] for key in keys)  # type: ignore[literal-required]
        own.setdefault(values if len(keys) > 1 else values[0], []).append(trial)
    found: dict[Any, float | str] = {}
    for at, there in sorted(own.items()):
        known = [trial["value"] for trial in there if trial["value"] is not None]
        if known:
            found[at] = max(known) if higher_is_better else min(known)
        else:
            found[at] = "diverged" if all(trial["diverged"] for trial in there) else "unfinished"
    return found
