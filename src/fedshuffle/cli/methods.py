"""The commands about methods: audit them, list them, and check one."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from typer import Argument, Option

from fedshuffle import auditing
from fedshuffle._arrays import FloatArray, number
from fedshuffle._terminal import plain_table
from fedshuffle.cli.shared import AsJson, console, emit, refuse_unused, was_given
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork

if TYPE_CHECKING:
    from fedshuffle.testing import Report

_Text = str | None
_Path = Path | None
_Count = int | None
_SAMPLINGS = (
    "full, uniform:B, importance:B, independent:p1,p2,..., one, ais:B, stratified:B:K, optimal:B,"
    " optimal:B:of:SAMPLING."
)
_OUTCOMES = {"failed": "[bold red]failed[/]", "passed": "[green]passed[/]", "skipped": "[dim]-[/]"}
_COLOURS = {True: "green", False: "red", None: "dim"}


def audit(
    context: typer.Context,
    sizes: Annotated[_Text, Option(help="Examples per client: 1,2,3, or @file by lines.")] = None,
    data: Annotated[_Path, Option(help="Audit on the clients of this store, not --sizes.")] = None,
    config: Annotated[
        _Path, Option(help="Take data, method, sampling and local work from a run's config.")
    ] = None,
    method: Annotated[str, Option(help="Of 'fedshuffle methods', or module:METHOD.")] = "fedavg-rr",
    sampling: Annotated[str, Option(help=_SAMPLINGS)] = "full",
    epochs: Annotated[_Text, Option(help="2 for all, 1,2,3 per client, or 2..5 drawn; 1.")] = None,
    batch_size: Annotated[_Count, Option(help="Examples per local step; 1.")] = None,
    weights: Annotated[_Text, Option(help="Objective weights, as --sizes; else by size.")] = None,
    momentum: Annotated[
        _Text, Option(help="none, mvr:A (exact) or global:A (cheap); 0.9 is A = 0.1.")
    ] = None,
    flower: Annotated[
        _Text, Option(help="Audit a Flower strategy instead: module:STRATEGY, or what makes one.")
    ] = None,
    function: Annotated[
        _Text, Option("--callable", help="Audit module:FUNCTION(clients, sizes, updates) instead.")
    ] = None,
    log: Annotated[
        _Path, Option(help="Audit a log: CSV or JSONL of round,client,size,steps,weight.")
    ] = None,
    step_sizes: Annotated[str, Option(help="For --flower, --callable: equal or scaled.")] = "equal",
    confidence: Annotated[float, Option(help="Of intervals: --flower, --callable, --log.")] = 0.95,
    seed: Annotated[int, Option(help="For audits that have to sample.")] = 0,
    draws: Annotated[_Count, Option(help="To sample, if needed: 32000, others' code 2000.")] = None,
    rounds: Annotated[
        _Count, Option(help="For rules that depend on the round: how many to average over, 100.")
    ] = None,
    check: Annotated[bool, Option("--check", help="Exit with 1 if not consistent.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say which objective a method, or other people's code, really minimises."""
    from fedshuffle.auditing.adapters import Aggregator, FlowerAggregator, read_log
    from fedshuffle.auditing.result import print_audit
    from fedshuffle.config import imports, loader

    server = flower if flower is not None else function
    if sum(one is not None for one in (flower, function, log)) > 1:
        raise FedShuffleError("give one of --flower, --callable and --log.")
    rules = ["method", "momentum", "rounds"]
    if log is not None:
        inputs = ["sizes", "data", "config", "sampling", "epochs", "batch_size"]
        refuse_unused(context, [*rules, *inputs, "step_sizes", "seed", "draws"], "--log")
    elif server is not None:
        refuse_unused(context, rules, "--flower, --callable")
    else:
        refuse_unused(context, ["step_sizes", "confidence"], "--method")
    if config is not None:
        refuse_unused(context, ["sizes", "data", "weights", "epochs", "batch_size"], "--config")
    objective = None if weights is None else _numbers(weights, "--weights")
    if log is not None:
        result, _ = read_log(log, weights=objective, confidence=confidence)
    else:
        counts = {"draws": draws, "rounds": rounds}
        given: dict[str, Any] = {key: value for key, value in counts.items() if value is not None}
        here = Path.cwd()
        with imports.importable(here):
            if config is not None:
                from fedshuffle.config import runner

                names = {"method": method, "sampling": sampling, "momentum": momentum}
                changes = {key: value for key, value in names.items() if was_given(context, key)}
                chosen = loader.load(config, changes)
                with chosen.importable():
                    federation = runner.federation(chosen)
                    rule, drawn = runner.method(chosen), runner.sampling(chosen, federation)
                work = chosen.work
            else:
                federation = _clients(sizes, data, objective)
                rule = imports.method(method, here, momentum)
                drawn = imports.sampling(sampling, federation, here)
                passes = None if epochs is None else loader.epochs(epochs, "--epochs")
                work = LocalWork(passes, batch_size=batch_size)
            if server is None:
                result = auditing.audit(federation, rule, drawn, work, seed=seed, **given)
            else:
                found = imports.find(server, here)
                if flower is not None and not isinstance(found, Aggregator):
                    found = FlowerAggregator(found, len(federation))
                given |= {"step_sizes": step_sizes, "confidence": confidence, "seed": seed}
                result = auditing.audit_server(found, federation, drawn, work, **given)
    emit(as_json, result.to_dict(), partial(print_audit, console, result))
    if check and result.consistent is False:
        raise typer.Exit(1)


def _clients(sizes: str | None, data: Path | None, weights: Any) -> Federation:
    if data is not None and sizes is None:
        return Federation.open(data, weights)
    if sizes is None or data is not None:
        raise FedShuffleError(
            "name the clients: give --sizes, such as --sizes 1,2,3, or --data and a store, or"
            " --config and a run's config."
        )
    return Federation.from_sizes(_numbers(sizes, "--sizes"), weights)


def _numbers(text: str, option: str) -> FloatArray:
    """Numbers from ``1,2,3`` or from ``@file`` with one per line."""
    if text.startswith("@"):
        fails = f"{option}: cannot read {text[1:]!r}"
        with error_context(lambda error: f"{fails}: {error}.", (OSError, UnicodeDecodeError)):
            lines = Path(text[1:]).read_text(encoding="utf-8-sig").split("\n")
        words = [(f"line {k}", line.strip()) for k, line in enumerate(lines, 1) if line.strip()]
    else:
        words = [(f"entry {k}", word.strip()) for k, word in enumerate(text.split(","), 1)]
    return np.array([number(word, f"{option}: {where}") for where, word in words])


def methods(as_json: AsJson = False) -> None:
    """List the methods: what each is and costs, its options, and when it is consistent."""
    from fedshuffle.reports.methods import everything

    rows = everything()
    emit(as_json, rows, partial(print_methods, console, rows))


def print_methods(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print all methods, family by family, two or three lines each."""
    from fedshuffle.methods import available
    from fedshuffle.reports.methods import MARKS, family, options_text

    titles = dict(family(method)[:2] for method in available())
    width = max(len(row["name"]) for row in rows) + 1
    lines = [
        f"[dim]{'':{width}}         vectors  keeps  consistent if[/]",
        f"[dim]{'method':{width}} msgs  down   up  state  all  some  cut[/]",
    ]
    for page, members in itertools.groupby(rows, key=lambda row: row["family"]):
        lines += ["", f"[bold underline]{titles[page]}[/]"]
        for row in members:
            down, up = row["costs"]["vectors_down"], row["costs"]["vectors_up"]
            marks = "".join(
                f"[{_COLOURS[found]}]{MARKS[found]:>{gap}}[/]"
                for found, gap in zip(row["consistent"].values(), (5, 6, 5), strict=True)
            )
            lines += [
                f"[bold]{escape(row['name'].ljust(width))}[/]{row['costs']['messages']:5g}"
                f"  {down:4g}  {up:3g}  {'yes' if row['client_state'] else 'no':>5}{marks}"
                f"  [dim]{escape(row['reference'])}[/]",
                f"    {escape(row['summary'])}",
            ]
            if row["options"]:
                lines.append(f"    [dim]options: {escape(options_text(row))}[/]")
    console.print("\n".join(lines), soft_wrap=True, highlight=False)
    console.print(
        "\n[dim]Messages (both ways) and vectors of the model's size are per client of the cohort"
        " and round. Consistent: the audit, on clients of unequal sizes, finds the objective you"
        " meant if all take part, if some do (two of four, uniformly), or if work is cut short"
        " (clients miss their last step); '-' means not defined there. Options follow the name:"
        " fedprox:mu=0.1. scaffold+fedshuffle is scaffold with fedshuffle's averaging. Methods"
        " without a direction of their own also take --momentum mvr:A or global:A.[/]"
    )


def conformance(
    method: Annotated[str, Argument(help="A name, or module:METHOD for one of your own.")],
    as_json: AsJson = False,
) -> None:
    """Check that a method does what every method must; ends with 1 if anything fails."""
    from fedshuffle.config import imports
    from fedshuffle.testing import check

    here = Path.cwd()
    with imports.importable(here):
        report = check(imports.method(method, here))
    emit(as_json, [result._asdict() for result in report], partial(_print_report, report))
    if not report.passed:
        raise typer.Exit(1)


def _print_report(report: Report) -> None:
    """Print each check; samplings with the same result share a line."""
    table = plain_table("check", "outcome", "under, or why")
    for column in table.columns[:2]:
        column.no_wrap = True
    together: dict[tuple[str, str, str], list[str]] = {}
    for result in report:
        name, _, under = result.check.partition(" under ")
        together.setdefault((name, result.outcome, result.message), []).append(under)
    for (name, outcome, message), samplings in together.items():
        words = [", ".join(samplings)] if any(samplings) else []
        words += [escape(message)] if message else []
        table.add_row(f"[bold]{name}[/]", _OUTCOMES[outcome], ": ".join(words))
    console.print(table)
    number = Counter(result.outcome for result in report)
    console.print(
        f"\n{escape(report.subject)}: {number['passed']} passed, {number['failed']} failed,"
        f" {number['skipped']} do not apply."
    )
