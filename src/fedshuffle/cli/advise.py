"""The command that advises on a run: the results of short runs, then what is proven."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from rich.padding import Padding
from typer import Argument, Option

from fedshuffle._terminal import plain_table
from fedshuffle.cli.shared import AsJson, Settings, alone, console, emit, overrides
from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    from fedshuffle.config.schema import Config
    from fedshuffle.privacy.advice import PrivacyAdvice
    from fedshuffle.theory.advice import Advice, StepSizeSearch
    from fedshuffle.theory.problem import AdvisedRun

_AMPLIFICATION = {
    "poisson": "amplified by sampling: every client is drawn independently, and secretly",
    "uniform": "amplified by a secret sample of fixed size; independent draws cost less",
    "none": "not amplified by sampling: every client counts as if it were in every round",
}


def advise(
    config: Annotated[Path, Argument(help="A TOML file that describes a run.")],
    clients: Annotated[int, Option(help="Largest number of clients to measure.")] = 50,
    points: Annotated[int, Option(help="Models to measure at: the start, and others.")] = 2,
    target: Annotated[float, Option(help="Predict rounds until this share is left.")] = 0.01,
    search_rounds: Annotated[
        int, Option(help="Rounds of each short run that tries a step size; 0 tries none.")
    ] = 10,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Try step sizes in short runs, then show what the theory advises, with sources."""
    from fedshuffle import config as configs
    from fedshuffle.theory.advice import advise as find_advice

    chosen = configs.load(config, overrides(settings))
    with alone(as_json), chosen.importable():
        found = find_advice(
            _advised_run(chosen),
            clients=clients,
            points=points,
            target=target,
            search_rounds=search_rounds,
            progress=not as_json,
        )
    emit(as_json, found.to_dict(), partial(_print_advice, found))


def _advised_run(config: "Config") -> "AdvisedRun":
    from fedshuffle.config import runner
    from fedshuffle.config.schema import step_size_by_round
    from fedshuffle.theory.problem import AdvisedRun

    if config.schedule != "wait":
        raise FedShuffleError(
            f"the theory is that of a server that waits, not of schedule {config.schedule!r}: add"
            " --set schedule=wait."
        )
    inputs = runner.inputs(replace(config, evaluation=None))
    return AdvisedRun(
        runner.initial_model(config),
        inputs.loss,
        inputs.federation,
        runner.method(config),
        runner.sampling(config, inputs.federation),
        config.work,
        config.rounds,
        step_size_by_round(config.step_size, config.rounds),
        step_size_by_round(config.server_step_size, config.rounds),
        config.seed,
        config.privacy,
    )


def _print_advice(advice: "Advice") -> None:
    setting, problem, proven = advice.setting, advice.problem, advice.largest_proven
    method, rounds = escape(str(setting["method"])), f"for {setting['rounds']} rounds"
    momentum = "" if setting["momentum"] == "none" else f", momentum {setting['momentum']}"
    console.print(
        f"[bold]{method}[/]{momentum} on {setting['clients']} clients with"
        f" {setting['examples']:,} examples, sampling {escape(str(setting['sampling']))},"
        f" {setting['rounds']} rounds"
    )
    if advice.step_size_search is not None:
        _print_search(advice.step_size_search, proven)
        console.print("\n[bold underline]What is proven[/]")

    rows: list[tuple[Any, ...]] = [
        (name, f"{one.value:.4g}", one.uncertainty or None, one.note)
        for name, one in problem.constants.items()
    ]
    title = f"The problem: {problem.what}"
    _section(title, "problem", "constant|value|+-|", rows, problem.notes)

    rows = []
    for row in advice.steps:
        sizes = (getattr(one, "step_size", None) for one in (row.theorem, row.proof, row.tuned))
        rest = row.proof.largest_client_step, getattr(row.target, "rounds", None)
        rows.append((row.method, row.regime, row.covered, *sizes, *rest))
    notes = [f"{row.method}: {note}" for row in advice.steps for note in row.notes]
    notes += [f"{name}: {reason}" for name, reason in advice.not_covered.items()]
    title = "Step sizes (the key step_size of the config)"
    sources = "steps.proof steps.tuned steps.target"
    columns = f"method|regime|covered|theorem|proof|{rounds}|client's largest|rounds to target"
    _section(title, sources, columns, rows, notes)
    if proven is not None:
        own = float(setting["step_size"])
        console.print(
            f"  Your step_size {own:g} is {own / proven:.3g} times the largest that the proof"
            " allows. What is proven holds for the worst case: larger steps often work, but"
            " nothing is promised for them."
        )
    if advice.step_ratios:
        notes = [
            "short clients may take larger steps; this is not proven to be faster",
            "FedNova with weights w_i tau_max / (tau_i p_i) has FedShuffle's limit and rate",
        ]
        title = "How many times as large FedShuffle's steps may be"
        columns = "than|regime|step_size|largest client step|distance per round"
        _section(title, "step_ratios", columns, map(astuple, advice.step_ratios), notes)

    rows = [
        (bound, step["limit"].step_size, step["tuned"].step_size, step["tuned"].a)
        for bound, step in advice.mvr.items()
    ]
    columns = f"by the|largest step_size|step_size {rounds}|a for these"
    _section("FedShuffleMVR", "mvr.proof", columns, rows, advice.mvr_notes)
    _print_sampling(advice)
    if advice.privacy is not None:
        _print_privacy(advice.privacy)
    _section("Objective", "total_variation")
    console.print(f"{method} is {escape(advice.conclusion)}")


def _print_search(search: "StepSizeSearch", proven: float | None) -> None:
    rows = []
    for size, loss in search.tried:
        words = [] if loss <= search.start else ["not stable"]
        words += ["best"] * (size == search.best)
        words += ["largest stable"] * (size == search.largest_stable)
        shown = f"{loss:.4g}" if math.isfinite(loss) else "diverged"
        rows.append((f"{size:g}", shown, ", ".join(words)))
    notes = [
        f"stable: the loss is no higher than at the start, {search.start:.4g}, on"
        f" {search.clients} clients' training data",
        f"it cost {search.local_steps:,} local steps; over many rounds smaller step sizes may"
        " do better: tune tries the best ones for longer",
    ]
    title = "What can be measured: step sizes tried in short runs"
    columns = f"step_size|loss after {search.rounds} rounds|"
    _section(title, "step_size_search", columns, rows, notes)
    if search.best is None:
        console.print("  None of these step sizes lowers the loss: try smaller ones.")
        return
    times = f", {search.best / proven:.3g} times the largest that is proven" if proven else ""
    console.print(
        f"  Try step_size {search.best:g}{times}. They differ because a proof holds for the worst"
        f" problem with the same constants and for every round, and these are {search.rounds}"
        " rounds of yours."
    )


def _print_sampling(advice: "Advice") -> None:
    title = f"Sampling: proven rounds until {advice.setting['target']:g} of the start"
    sources, found = "sampling sampling.rounds", advice.sampling
    if isinstance(found, str):
        _section(title, sources, notes=[found])
        return
    rows = []
    for row in sorted({*found.sizes, found.options}, key=lambda row: row[0].cohort):
        yours = " (yours)" if row == found.options else ""
        cells = (f"{option.M:.3g}, {_cell(option.rounds)}" for option in row)
        rows.append((f"{row[0].cohort}{yours}", *cells))
    rows.append(("pays until", *map(_cell, found.pays_until.values())))
    columns = "|".join(["clients per round", *(f"{kind}: M, rounds" for kind in found.pays_until)])
    notes = [
        f"for {found.regime} losses",
        "a cohort pays while it is at least half as fast as a linear speed-up over one client",
        "for fedshuffle; the numbers for best also hold for optimal:B",
    ]
    _section(title, sources, columns, rows, notes)


def _print_privacy(advice: "PrivacyAdvice") -> None:
    _section("Privacy of one client", "privacy")
    console.print(
        f"  {advice.rounds} rounds cost epsilon {advice.epsilon:.3g} at delta {advice.delta:.3g}"
        f" for the worst client, {advice.median_epsilon:.3g} for the median one. The noise"
        f" multiplier is {advice.noise:.3g}, the sensitivity {advice.sensitivity:.3g}, the standard"
        f" deviation of the noise {advice.noise_std:.3g}."
    )
    if advice.stops_after is not None:
        console.print(f"  The run stops after round {advice.stops_after}: its epsilon is spent.")
    notes = [_AMPLIFICATION[advice.amplification]]
    after, noise = advice.epsilon_after.items(), advice.noise_for.items()
    _table("after rounds|epsilon", after)
    _table(f"epsilon of {advice.rounds} rounds|noise multiplier", noise, notes)


def _section(
    title: str,
    sources: str,
    columns: str = "",
    rows: Iterable[Sequence[Any]] = (),
    notes: Iterable[str] = (),
) -> None:
    """A title with where its numbers are derived, a table unless it is empty, and notes."""
    from fedshuffle.theory.advice import SOURCES

    console.print(f"\n[bold]{escape(title)}[/]")
    for source in dict.fromkeys(SOURCES[part][0] for part in sources.split()):
        console.print(f"[dim]{source}[/]", soft_wrap=True)
    _table(columns, rows, notes)


def _table(columns: str, rows: Iterable[Sequence[Any]], notes: Iterable[str] = ()) -> None:
    """A table unless it is empty, and notes."""
    names = columns.split("|")
    align = "".join("r" if k and name else "l" for k, name in enumerate(names))
    table = plain_table(*names, align=align, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    if table.rows:
        console.print(Padding(table, (0, 0, 0, 2)))
    for note in dict.fromkeys(notes):
        console.print(Padding(f"[dim]- {escape(note)}[/]", (0, 0, 0, 2)))


def _cell(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return "-" if value is None else escape(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value < 10**7 else f"{value:.3g}"
