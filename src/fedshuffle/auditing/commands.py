"""What the command line's audit of other people's code does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from fedshuffle.auditing.adapters import Aggregator, Flower, Function, read_log
from fedshuffle.auditing.blackbox import StepSizes, probe
from fedshuffle.auditing.verdict import BlackBoxAudit
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.sampling import Sampling


def audit_others(
    *,
    flower: str | None,
    function: str | None,
    log: Path | None,
    sizes: ArrayLike | None,
    weights: ArrayLike | None,
    sampling: Callable[[Federation], str | Sampling],
    work: LocalWork,
    step_sizes: str,
    confidence: float,
    seed: int,
    draws: int | None,
) -> tuple[BlackBoxAudit, Federation]:
    """The audit of a strategy, a function or a log, and the clients it speaks of."""
    if sum(given is not None for given in (flower, function, log)) > 1:
        raise FedShuffleError("give one of --flower, --callable and --log.")
    if log is not None:
        if sizes is not None:
            raise FedShuffleError("a log tells the sizes itself: leave out --sizes.")
        return read_log(log, weights=weights, confidence=confidence)
    if sizes is None:
        raise FedShuffleError("give --sizes, such as --sizes 1,2,3: the probes need clients.")
    federation = Federation.from_sizes(sizes, weights)
    chosen: StepSizes = "scaled" if step_sizes == "scaled" else "equal"
    if step_sizes not in ("equal", "scaled"):
        raise unknown("step sizes", step_sizes, ["equal", "scaled"])
    from fedshuffle.config import imports

    here = Path.cwd()
    with imports.importable(here):
        server = _server(imports.find(flower or function or "", here), flower, len(federation))
        audit = probe(
            server,
            federation,
            sampling(federation),
            work,
            step_sizes=chosen,
            draws=2000 if draws is None else draws,
            seed=seed,
            confidence=confidence,
        )
    return audit, federation


def _server(found: Any, flower: str | None, nodes: int) -> Aggregator:
    if isinstance(found, Aggregator):
        return found
    return Function(found) if flower is None else Flower(found, nodes)
