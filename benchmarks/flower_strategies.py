"""The black-box audit of the strategies that ship with Flower, as a table.

    python benchmarks/flower_strategies.py            # print it
    python benchmarks/flower_strategies.py --write    # put it in docs/audit-others.md

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
from fedshuffle.auditing import Audit, audit_server
from fedshuffle.auditing.adapters import FlowerAggregator

PAGE = Path(__file__).parent.parent / "docs" / "audit-others.md"
BEGIN, END = "<!-- begin: flower -->", "<!-- end: flower -->"

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
    head = ["strategy", "weighted sum", "weighs clients", *SETTINGS, "and"]
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


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it in docs/audit-others.md")
    made = table()
    if not parser.parse_args().write:
        print(made)
        return
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
