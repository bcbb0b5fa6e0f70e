"""What the command line's audits need: whom to audit, and other people's code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import ArrayLike

from fedshuffle.auditing.adapters import Aggregator, Flower, Function, read_log
from fedshuffle.auditing.blackbox import StepSizes, probe
from fedshuffle.auditing.verdict import BlackBoxAudit
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling


class Subject(NamedTuple):
    """What an audit is about."""

    federation: Federation
    method: Method
    sampling: str | Sampling
    work: LocalWork


def clients(sizes: ArrayLike | None, data: Path | None, weights: ArrayLike | None) -> Federation:
    """The clients by their sizes, or those of a store."""
    if (sizes is None) == (data is None):
        raise FedShuffleError(
            "say whom to audit: give --sizes, such as --sizes 1,2,3, or --data and a store, or"
            " --config and a run's config."
        )
    if data is not None:
        return Federation.open(data, weights)
    assert sizes is not None
    return Federation.from_sizes(sizes, weights)


def subject_of_config(file: Path, changes: Mapping[str, Any]) -> Subject:
    """What the config of a run says of data, method, sampling and work."""
    from fedshuffle import config as configs
    from fedshuffle.config import imports, running

    config = configs.load(file, changes)
    with imports.importable(config.folder):
        federation = running._federation(config, config.data, "data")
        sampling = running._sampling(config, federation)
        return Subject(federation, running._method(config), sampling, config.work)


def one_of(*given: object) -> None:
    """Refuse more than one of the three ways to name other people's code."""
    if sum(one is not None for one in given) > 1:
        raise FedShuffleError("give one of --flower, --callable and --log.")


def audit_log(log: Path, weights: ArrayLike | None, confidence: float) -> BlackBoxAudit:
    """The audit of a log of rounds."""
    return read_log(log, weights=weights, confidence=confidence)[0]


def audit_others(
    subject: Subject,
    *,
    flower: str | None,
    function: str | None,
    step_sizes: str,
    confidence: float,
    seed: int,
    draws: int,
) -> BlackBoxAudit:
    """The audit of a strategy or a function with the clients, sampling and work of a subject."""
    one_of(flower, function)
    chosen: StepSizes = "scaled" if step_sizes == "scaled" else "equal"
    if step_sizes not in ("equal", "scaled"):
        raise unknown("step sizes", step_sizes, ["equal", "scaled"])
    from fedshuffle.config import imports

    here = Path.cwd()
    with imports.importable(here):
        found = imports.find(flower or function or "", here)
        return probe(
            _server(found, flower, len(subject.federation)),
            subject.federation,
            subject.sampling,
            subject.work,
            step_sizes=chosen,
            draws=draws,
            seed=seed,
            confidence=confidence,
        )


def _server(found: Any, flower: str | None, nodes: int) -> Aggregator:
    if isinstance(found, Aggregator):
        return found
    return Function(found) if flower is None else Flower(found, nodes)
