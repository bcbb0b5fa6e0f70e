"""The command that advises on a run: the results of short runs, then what is proven."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.padding import Padding

from fedshuffle._terminal import plain_table
from fedshuffle.cli.shared import AsJson, Settings, alone, console, overrides

if TYPE_CHECKING:
    from fedshuffle.config.schema import Config
    from fedshuffle.theory.advice import Advice
    from fedshuffle.theory.problem import AdvisedRun
    from fedshuffle.theory.sampling_advice import SamplingAdvice
    from fedshuffle.theory.step_size_search import StepSizeSearch

Cell = str | float | None

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
    from fedshuffle.theory.problem import AdvisedRun

    inputs = runner.inputs(replace(config, evaluation=None))
    return AdvisedRun(
        method=runner.method(config),
        sampling=runner.sampling(config, inputs.federation),
        model=runner.model(config),
        loss=inputs.loss,
        federation=inputs.federation,
        work=config.work,
        rounds=config.rounds,
        step_size=runner.schedule(config.step_size, config.rounds),
        server_step_size=runner.schedule(config.server_step_size, config.rounds),
        seed=config.seed,
    )


def _print_advice(advice: Advice) -> None:
    setting, problem, proven = advice.setting, advice.problem, advice.largest_proven
    momentum = "" if setting.momentum == "none" else f", momentum {setting.momentum}"
    _line(
        f"[bold]{escape(setting.method)}[/]{momentum} on {setting.clients} clients with"
        f" {setting.examples:,} examples, sampling {escape(setting.sampling)},"
        f" {setting.rounds} rounds"
    )
    if advice.step_size_search is not None:
        _print_search(advice.step_size_search, proven)
        _line("\n[bold underline]What is proven[/]")

    _section(f"The problem: {problem.what}", "problem")
    constants = []
    for name, one in problem.constants.items():
        error = f"+- {one.uncertainty:.2g}" if one.uncertainty else ""
        remark = "; ".join(filter(None, (error, one.note)))
        constants.append((name, f"{one.value:.4g}", remark))
    _table(["constant", "value", ""], constants)
    _notes(problem.notes)

    _section("Step sizes (the key step_size of the config)", "steps.proof")
    rounds = f"for {setting.rounds} rounds"
    columns = ["method", "regime", "covered", "theorem", "proof", rounds]
    rows: list[tuple[Cell, ...]] = []
    for row in advice.steps:
        limits = row.theorem, row.proof, row.tuned
        sizes = (None if one is None else one.step_size for one in limits)
        target = None if row.target is None else row.target.rounds
        largest = row.proof.largest_client_step
        rows.append((row.method, row.regime, row.covered, *sizes, largest, target))
    if rows:
        _table([*columns, "client's largest", "rounds to target"], rows)
        _notes([f"{rounds}: {_anchor('steps.tuned')}"])
        _notes([f"rounds to target: {_anchor('steps.target')}"])
    _notes(f"{row.method}: {note}" for row in advice.steps for note in row.notes)
    _notes(f"{name}: {reason}" for name, reason in advice.not_covered.items())
    if proven is not None:
        _line(
            f"  Your step_size {setting.step_size:g} is {setting.step_size / proven:.3g} times the"
            " largest that the proof allows. What is proven holds for the worst case: larger steps"
            " often work, but nothing is promised for them."
        )

    if advice.step_ratios:
        _section("How many times as large FedShuffle's steps may be", "step_ratios")
        columns = ["than", "regime", "step_size", "largest client step", "distance per round"]
        _table(columns, map(astuple, advice.step_ratios))
        _notes(
            [
                "short clients may take larger steps; this is not proven to be faster",
                "FedNova with weights w_i tau_max / (tau_i p_i) has FedShuffle's limit and rate",
            ]
        )

    _section("FedShuffleMVR", "mvr.proof")
    if advice.mvr:
        _table(
            ["by the", "largest step_size", f"step_size {rounds}", "a for these"],
            [
                (bound, one.limit.step_size, one.tuned.step_size, one.tuned.a)
                for bound, one in advice.mvr.items()
            ],
        )
    _notes(advice.mvr_notes)

    title = f"Sampling: proven rounds until {setting.target:g} of the start"
    _section(title, "sampling", "sampling.rounds")
    if isinstance(advice.sampling, str):
        _notes([advice.sampling])
    else:
        _print_sampling(advice.sampling)

    _section("Objective", "objective")
    _line(f"{escape(setting.method)} is {advice.objective.conclusion}.")


def _print_search(search: StepSizeSearch, proven: float | None) -> None:
    _section("What can be measured: step sizes tried in short runs", "step_size_search")
    rows = []
    for size, loss in search.tried:
        words = [] if loss <= search.start else ["not stable"]
        words += ["best"] * (size == search.best)
        words += ["largest stable"] * (size == search.largest_stable)
        shown = f"{loss:.4g}" if math.isfinite(loss) else "diverged"
        rows.append((f"{size:g}", shown, ", ".join(words)))
    _table(["step_size", f"loss after {search.rounds} rounds", ""], rows)
    if search.best is None:
        _line("  None of these step sizes lowers the loss: try smaller ones.")
    else:
        times = f", {search.best / proven:.3g} times the largest that is proven" if proven else ""
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


def _print_sampling(sampling: SamplingAdvice) -> None:
    sizes = {row[0].cohort: row for row in sampling.sizes} | {sampling.cohort: sampling.options}
    rows: list[tuple[Cell, ...]] = []
    for cohort, options in sorted(sizes.items()):
        yours = " (yours)" if cohort == sampling.cohort else ""
        cells = (f"{option.M:.3g}, {_cell(option.rounds)}" for option in options)
        rows.append((f"{cohort}{yours}", *cells))
    rows.append(("pays until", *sampling.pays_until.values()))
    _table(["clients per round", *(f"{kind}: M, rounds" for kind in sampling.pays_until)], rows)
    _notes(
        [
            f"for {sampling.regime} losses",
            "a cohort pays while it is at least half as fast as a linear speed-up over one client",
            "for fedshuffle; the numbers for best also hold for optimal:B",
        ]
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    align = "l" + "".join("r" if column else "l" for column in columns[1:])
    table = plain_table(*columns, align=align, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    console.print(Padding(table, (0, 0, 0, 2)))


def _cell(value: Cell) -> str:
    if value is None or isinstance(value, str):
        return "-" if value is None else escape(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value < _MANY else f"{value:.3g}"


def _section(title: str, *parts: str) -> None:
    _line(f"\n[bold]{escape(title)}[/]  [dim]{', '.join(map(_anchor, parts))}[/]")


def _anchor(part: str) -> str:
    from fedshuffle.theory.advice import SOURCES

    return SOURCES[part][0]


def _notes(notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        console.print(Padding(f"[dim]- {escape(note)}[/]", (0, 0, 0, 2)), highlight=False)


def _line(text: str) -> None:
    console.print(text, highlight=False)
