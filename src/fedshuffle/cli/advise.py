"""The command that advises on a run: the results of short runs, then what is proven."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from fedshuffle.cli.shared import AsJson, Settings, alone, console, overrides

if TYPE_CHECKING:
    from fedshuffle.config.schema import Config
    from fedshuffle.theory.advice import Advice
    from fedshuffle.theory.problem import AdvisedRun
    from fedshuffle.theory.sampling_advice import SamplingAdvice
    from fedshuffle.theory.step_size_search import StepSizeSearch

_MANY = 10**7
"""Larger counts are shown as a power of ten."""


def advise(
    config: Annotated[Path, typer.Argument(help="A TOML file that describes a run.")],
    clients: Annotated[int, typer.Option(help="Largest number of clients to measure.")] = 50,
    points: Annotated[
        int, typer.Option(help="Number of models to measure at: the start, and during training.")
    ] = 2,
    target: Annotated[
        float, typer.Option(help="Predict rounds until this share of the start is left.")
    ] = 0.01,
    search_rounds: Annotated[
        int, typer.Option(help="Rounds of each short run that tries a step size; 0 tries none.")
    ] = 10,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Try step sizes in short runs, then show what the theory advises; numbers name a source."""
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
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        _print_advice(found)


def _advised_run(config: Config) -> AdvisedRun:
    from fedshuffle.config import runner
    from fedshuffle.config.schema import step_size_by_round
    from fedshuffle.theory.problem import AdvisedRun

    inputs = runner.inputs(replace(config, evaluation=None))
    return AdvisedRun(
        method=runner.method(config),
        sampling=runner.sampling(config, inputs.federation),
        model=runner.initial_model(config),
        loss=inputs.loss,
        federation=inputs.federation,
        work=config.work,
        rounds=config.rounds,
        step_size=step_size_by_round(config.step_size, config.rounds),
        server_step_size=step_size_by_round(config.server_step_size, config.rounds),
        seed=config.seed,
    )


def _print_advice(advice: Advice) -> None:
    from fedshuffle.theory.advice import MVRAdvice, NotCovered

    setting, problem, mvr = advice.setting, advice.problem, advice.mvr
    momentum = "" if setting.momentum == "none" else f", momentum {setting.momentum}"
    _line(
        f"[bold]{escape(setting.method)}[/]{momentum} on {setting.clients} clients with"
        f" {setting.examples:,} examples, sampling {escape(setting.sampling)},"
        f" {setting.rounds} rounds"
    )
    if advice.step_size_search is not None:
        _print_search(advice.step_size_search)
        _line("\n[bold underline]What is proven[/]")
    rows = [(name, f"{one.value:.4g}", str(one)) for name, one in problem.constants.items()]
    _section(f"The problem: {problem.what}", "PROBLEM")
    _table(["constant", "value", ""], rows)
    _notes(problem.notes)
    _print_steps(advice)
    if advice.step_ratios:
        _section("How many times as large FedShuffle's steps may be", "LARGER")
        columns = {
            "than": "than",
            "regime": "regime",
            "step_size": "step_size",
            "largest client step": "largest_client_step",
            "distance per round": "effective",
        }
        _table(columns, advice.step_ratios)
        _notes(["short clients may take larger steps; this is not proven to be faster"])
        _notes(
            ["FedNova with the weights w_i tau_max / (tau_i p_i) has FedShuffle's limit and rate"]
        )
    _section("FedShuffleMVR", "MVR_PROOF")
    if isinstance(mvr, MVRAdvice):
        bounds = "theorem", "proof"
        columns = {
            "largest step_size": "limit.step_size",
            f"step_size for {setting.rounds} rounds": "tuned.step_size",
            "a for these": "tuned.a",
        }
        rows = [
            (name, *(_value(mvr, f"{b}.{path}") for b in bounds)) for name, path in columns.items()
        ]
        _table(["", *bounds], rows)
    _notes(mvr.notes)
    _section(f"Sampling: proven rounds until {setting.target:g} of the start", "SAMPLING", "COHORT")
    if not isinstance(advice.sampling, NotCovered):
        _print_sampling(advice.sampling)
    _notes(advice.sampling.notes)
    _section("Objective", "AUDIT")
    _line(f"{escape(setting.method)} is {advice.audit.conclusion}.")


def _print_search(search: StepSizeSearch) -> None:
    _section("What can be measured: step sizes tried in short runs", "MEASURED")
    rows = []
    for row in search.tried:
        words = [] if row.stable else ["not stable"]
        words += ["best"] * (row.step_size == search.best)
        words += ["largest stable"] * (row.step_size == search.largest_stable)
        loss = f"{row.loss:.4g}" if math.isfinite(row.loss) else "diverged"
        rows.append((f"{row.step_size:g}", loss, ", ".join(words)))
    _table(["step_size", f"loss after {search.rounds} rounds", ""], rows)
    if search.best is None:
        _line("  None of these step sizes lowers the loss: try smaller ones.")
    else:
        ratio = search.best_times_the_limit
        times = "" if ratio is None else f", {ratio:.3g} times the largest that is proven"
        _line(
            f"  Try step_size {search.best:g}{times}. They differ because a proof holds for the"
            f" worst problem with the same constants and for every round, and these are"
            f" {search.rounds} rounds of yours."
        )
    _notes(
        [
            f"stable: the loss is no higher than at the start, {search.start:.4g}, on"
            f" {search.clients} clients' training data",
            f"it cost {search.local_steps:,} local steps; over many rounds smaller step sizes may"
            " do better: compare tries them for longer",
        ]
    )


def _print_steps(advice: Advice) -> None:
    from fedshuffle.theory import StepAdvice

    _section("Step sizes (the key step_size of the config)", "PROOF")
    rounds, yours = f"for {advice.setting.rounds} rounds", advice.your_step_size
    covered = [row for row in advice.steps if isinstance(row, StepAdvice)]
    if covered:
        columns = {
            "method": "method",
            "regime": "regime",
            "covered": "covered",
            "theorem": "theorem.step_size",
            "proof": "proof.step_size",
            "client's largest": "proof.largest_client_step",
            rounds: "tuned.step_size",
            "rounds to target": "target.rounds",
        }
        _table(columns, covered)
        _notes([f"{rounds}: {_anchor('ROUNDS')}", f"rounds to target: {_anchor('TARGET')}"])
    _notes(f"{row.method}: {note}" for row in advice.steps for note in row.notes)
    if yours.times_the_limit is not None:
        _line(
            f"  Your step_size {yours.step_size:g} is {yours.times_the_limit.value:.3g} times the"
            " largest that the proof allows. What is proven holds for the worst case: larger steps"
            " often work, but nothing is promised for them."
        )


def _print_sampling(sampling: SamplingAdvice) -> None:
    kinds = [option.sampling for option in sampling.options]
    sizes = {row[0].cohort: row for row in sampling.sizes} | {sampling.cohort: sampling.options}
    rows: list[list[Any]] = [
        [
            f"{cohort}{' (yours)' * (cohort == sampling.cohort)}",
            *(f"{option.M:.3g}, {_cell(option.rounds)}" for option in options),
        ]
        for cohort, options in sorted(sizes.items())
    ]
    rows.append(["pays until", *(sampling.pays_until[kind] for kind in kinds)])
    _table(["clients per round", *(f"{kind}: M, rounds" for kind in kinds)], rows)
    _notes(
        [
            f"for {sampling.regime} losses",
            "a cohort pays while it is at least half as fast as a linear speed-up over one client",
        ]
    )


def _table(columns: Sequence[str] | Mapping[str, str], rows: Iterable[Any]) -> None:
    """Print rows of values, or of objects with a column for each of the dotted attributes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k and column else "left", overflow="fold")
    for row in rows:
        if isinstance(columns, Mapping):
            row = [_value(row, path) for path in columns.values()]
        table.add_row(*map(_cell, row))
    console.print(Padding(table, (0, 0, 0, 2)))


def _value(part: Any, path: str) -> Any:
    """An attribute of an attribute, or None where a part is missing."""
    return reduce(lambda found, name: found and getattr(found, name), path.split("."), part)


def _cell(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return "-" if value is None else escape(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value < _MANY else f"{value:.3g}"


def _section(title: str, *derivations: str) -> None:
    anchors = ", ".join(map(_anchor, derivations))
    _line(f"\n[bold]{escape(title)}[/]  [dim]{anchors}[/]")


def _anchor(derivation: str) -> str:
    from fedshuffle.theory.derivations import Derivation

    return Derivation[derivation].anchor


def _notes(notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        console.print(Padding(f"[dim]- {escape(note)}[/]", (0, 0, 0, 2)), highlight=False)


def _line(text: str) -> None:
    console.print(text, highlight=False)
