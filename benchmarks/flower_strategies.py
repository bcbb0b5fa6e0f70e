"""The black-box audit of the strategies that ship with Flower, and of their privacy, as tables.

    python benchmarks/flower_strategies.py          # print them
    python benchmarks/flower_strategies.py --write  # put them in docs/research/flower-strategies.md

Needs Flower: ``pip install 'fedshuffle[flower]'``.
"""

import argparse
import gc
import importlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedshuffle import Federation, FedShuffleError, LocalWork
from fedshuffle.auditing import Audit, audit_privacy, audit_server
from fedshuffle.auditing.adapters import FlowerAggregator
from fedshuffle.experiments.pages import fill

PAGE = Path(__file__).parent.parent / "docs" / "research" / "flower-strategies.md"

SIZES = [1, 2, 3, 4, 5, 6]
SETTINGS = {
    "all, one epoch": ("full", LocalWork(epochs=1)),
    "3 of 6, one epoch": ("uniform:3", LocalWork(epochs=1)),
    "3 of 6, same steps": ("uniform:3", LocalWork(steps=4)),
}
RATE = 2.0**-6
"""The clients' step size, which QFedAvg needs."""


def strategies() -> dict[str, Callable[[], Any]]:
    """The strategies that average arrays, by name: functions that make them."""
    found = importlib.import_module("flwr.serverapp.strategy")
    clipping = found.DifferentialPrivacyServerSideFixedClipping
    return {
        "FedAvg": found.FedAvg,
        "FedProx": lambda: found.FedProx(proximal_mu=0.1),
        "FedAvgM, momentum 0.9": lambda: found.FedAvgM(server_momentum=0.9),
        "FedAdagrad": found.FedAdagrad,
        "FedAdam": found.FedAdam,
        "FedYogi": found.FedYogi,
        "QFedAvg, q = 0": lambda: found.QFedAvg(client_learning_rate=RATE, q=0.0),
        "QFedAvg, q = 0.1": lambda: found.QFedAvg(client_learning_rate=RATE, q=0.1),
        "FedMedian": found.FedMedian,
        "FedTrimmedAvg, 0.2": found.FedTrimmedAvg,
        "Krum": found.Krum,
        "MultiKrum, 2 of them": lambda: found.MultiKrum(num_nodes_to_select=2),
        "Bulyan": found.Bulyan,
        "FedAvg, clipped on the server": lambda: clipping(found.FedAvg(), 0.0, 0.001, 3),
    }


def audited(make: Callable[[], Any]) -> list[Audit | str]:
    """The audit in every setting, or the reason why there is none."""
    federation = Federation.from_sizes(SIZES)
    results: list[Audit | str] = []
    for sampling, work in SETTINGS.values():
        server = FlowerAggregator(make, len(federation))
        try:
            results.append(
                audit_server(server, federation, sampling, work, step_size=RATE, draws=1000, seed=0)
            )
        except FedShuffleError as error:
            results.append(str(error))
    return results


def table() -> str:
    """One line per strategy."""
    gc.freeze()  # some strategies collect garbage at every call: leave it little to look at
    head = ["strategy", "weighted sum", "weights clients", *SETTINGS, "and"]
    lines = [
        f"Measured with Flower {version('flwr')}.",
        "",
        _line(head),
        _line(["---"] * len(head)),
    ]
    lines += [row(name, make) for name, make in strategies().items()]
    return "\n".join(lines)


def row(name: str, make: Callable[[], Any]) -> str:
    """The line of one strategy."""
    results = audited(make)
    audits = [result for result in results if isinstance(result, Audit)]
    linear = {result.properties.linear for result in audits}
    forms = {result.properties.form for result in audits}
    optimiser = any(result.properties.optimiser for result in audits)
    kind = "yes" if linear == {True} else "its average" if optimiser else "no"
    if kind == "no" and True in linear:
        kind = "not always"
    form = forms.pop() if len(forms) == 1 else None
    return _line([name, kind, form or "otherwise", *map(_cell, results), _more(audits)])


def _cell(result: Audit | str) -> str:
    if isinstance(result, str):
        return "none"
    share = f"{result.total_variation:.1%}"
    cells = {True: "consistent", False: share, None: f"{share}, undecided"}
    return cells[result.consistent]


def _more(results: list[Audit]) -> str:
    """Further properties."""
    more = []
    if any(result.properties.stateful for result in results):
        gains = {result.properties.long_run_gain for result in results} - {None}
        gain = f", gain {max(g for g in gains if g is not None):.3g}" if gains else ""
        more.append(f"remembers{gain}")
    if any(result.properties.fails_on_zero_updates for result in results):
        more.append("fails where no client moves")
    if any(result.properties.ordered for result in results):
        more.append("order matters")
    if any(result.standard_errors is not None for result in results):
        error = max(
            float(r.standard_errors.max()) for r in results if r.standard_errors is not None
        )
        more.append(f"standard error up to {error:.1%}")
    return ", ".join(more)


PRIVATE = {"1, 2, 6": [1, 2, 6], "2, 2, 2": [2, 2, 2], "20 of 1": [1] * 20}
"""Sizes of the clients of private strategies; adaptive ones need many."""


def privacy_table() -> str:
    """One line per wrapper and federation."""
    head = ["wrapper", "clients", "noise multiplier", "if one is missing", "threshold", "claim"]
    lines = [
        f"Measured with Flower {version('flwr')}.",
        "",
        _line(head),
        _line(["---"] * len(head)),
    ]
    for side in ("server", "client"):
        lines += [privacy_row(side, "fixed", sizes) for sizes in ("1, 2, 6", "2, 2, 2")]
        lines.append(privacy_row(side, "adaptive", "20 of 1"))
    return "\n".join(lines)


def privacy_row(side: str, clipping: str, sizes: str) -> str:
    """The line of one wrapper around FedAvg."""
    found = importlib.import_module("flwr.serverapp.strategy")
    name = f"DifferentialPrivacy{side.title()}Side{clipping.title()}Clipping"
    n, clip = len(PRIVATE[sizes]), 0.1
    claims = (1.0, clip, n) if clipping == "fixed" else (1.0, n, clip)
    server = FlowerAggregator(lambda: getattr(found, name)(found.FedAvg(), *claims), n)
    federation = Federation.from_sizes(PRIVATE[sizes])
    result = audit_privacy(server, federation, clip=clip, noise_multiplier=1)
    (low, high), threshold, missing = result.interval, "fixed", result.sensitivity["remove"]
    if (adapts := result.threshold) is not None:
        threshold = (
            f"{adapts.values[0]:.2g} to {adapts.values[-1]:.1g} in {len(adapts.values)} rounds"
        )
        threshold += ", runs away" if adapts.runs_away else ""
    return _line(
        [
            f"clipping on the {side}, {clipping}",
            sizes,
            f"{result.noise_multiplier:.3f} ({low:.3f} to {high:.3f})",
            f"{result.noise / missing:.3f}" if missing else "?",
            threshold,
            result.conclusion[0],
        ]
    )


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="put them in docs/research/flower-strategies.md"
    )
    write = parser.parse_args().write
    made = {"flower": table(), "flower privacy": privacy_table()}
    if write:
        fill(PAGE, made)
    else:
        print(*made.values(), sep="\n\n")


if __name__ == "__main__":
    main()
