"""Advice for a person: first what short runs measured, then what is proved."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from fedshuffle.config.advising import Advice
from fedshuffle.theory.sources import Number

_MANY = 10**7
"""Rounds beyond this are shown as a power of ten."""


def print_advice(console: Console, advice: Advice) -> None:
    """What was measured, then constants, step sizes and sampling, each with where it comes from."""
    setting = advice.setting
    momentum = "" if setting["momentum"] == "none" else f", momentum {setting['momentum']}"
    console.print(
        f"[bold]{escape(setting['method'])}[/]{momentum} on {setting['clients']} clients with"
        f" {setting['examples']:,} examples, sampling {escape(setting['sampling'])},"
        f" {setting['rounds']} rounds",
        highlight=False,
    )
    if advice.probe is not None:
        _probe(console, advice.probe)
        console.print("\n[bold underline]What is proved[/]", highlight=False)
    _problem(console, advice.problem)
    _steps(console, advice)
    _mvr(console, advice.mvr, setting["rounds"])
    _sampling(console, advice.sampling, setting)
    _heading(console, "Objective", "docs/audit.md")
    console.print(f"{escape(setting['method'])} is {advice.audit['verdict']}.", highlight=False)


def _heading(console: Console, text: str, source: str) -> None:
    console.print(f"\n[bold]{text}[/]  [dim]{source}[/]", highlight=False)


def _notes(console: Console, notes: list[str]) -> None:
    for note in dict.fromkeys(notes):
        console.print(Padding(f"[dim]- {escape(note)}[/]", (0, 0, 0, 2)), highlight=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for k, column in enumerate(columns):
        table.add_column(column, justify="left" if k == 0 else "right", overflow="fold")
    return table


def _probe(console: Console, probe: dict[str, Any]) -> None:
    start: Number = probe["start"]
    _heading(console, "What can be measured: step sizes tried in short runs", _anchor(start))
    table = _table("step_size", f"loss after {probe['rounds']} rounds", "")
    best, largest = probe["best"], probe["largest_stable"]
    for row in probe["tried"]:
        size, loss = row["step_size"], row["loss"].value
        words = [] if row["stable"] else ["not stable"]
        words += ["best"] * (best is not None and size == best.value)
        words += ["largest stable"] * (largest is not None and size == largest.value)
        value = f"{loss:.4g}" if math.isfinite(loss) else "diverged"
        table.add_row(f"{size:g}", value, ", ".join(words))
    console.print(Padding(table, (0, 0, 0, 2)))
    if best is None:
        console.print("  None of these step sizes lowers the loss: try smaller ones.")
    else:
        ratio = probe["best_times_the_limit"]
        times = f", {ratio.value:.3g} times the largest that is proved" if ratio else ""
        console.print(
            f"  Try step_size {best.value:g}{times}. They differ because a proof holds for the"
            f" worst problem with the same constants and for every round, and these are"
            f" {probe['rounds']} rounds of yours.",
            highlight=False,
        )
    _notes(
        console,
        [
            f"stable: the loss is no higher than at the start, {start.value:.4g}, on"
            f" {probe['clients']} clients' training data",
            f"it cost {probe['local_steps']:,} local steps; over many rounds smaller step sizes may"
            " do better: compare tries them for longer",
        ],
    )


def _problem(console: Console, problem: dict[str, Any]) -> None:
    constants: dict[str, Number] = problem["constants"]
    _heading(console, f"The problem: {problem['what']}", _anchor(constants["L"]))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, number in constants.items():
        about = number.note
        if number.uncertainty is not None:
            about = f"+- {number.uncertainty:.2g}" + (f"; {about}" if about else "")
        table.add_row(name, f"{number.value:.4g}", escape(about))
    console.print(Padding(table, (0, 0, 0, 2)))
    _notes(console, problem["notes"])


def _steps(console: Console, advice: Advice) -> None:
    found = [row for row in advice.steps if row["regime"]]
    _heading(console, "Step sizes (the key step_size of the config)", "see below")
    best = f"for {advice.setting['rounds']} rounds"
    heads = ["theorem", "proof", "client's largest", best, "rounds to target"]
    table = _table("method", "regime", *heads)
    for row in found:
        theorem, tuned, target = row["theorem"], row["tuned"], row["target"]
        table.add_row(
            row["method"] + ("" if row["covered"] else " *"),
            row["regime"],
            "-" if theorem is None else _size(theorem["step_size"]),
            _size(row["proof"]["step_size"]),
            _size(row["proof"]["largest_client_step"]),
            "-" if tuned is None else _size(tuned["step_size"]),
            "-" if target is None else _rounds(target["rounds"]),
        )
    if found:
        console.print(Padding(table, (0, 0, 0, 2)))
        row = found[0]
        sources = {
            "theorem, proof, client's largest": row["proof"]["step_size"],
            best: row["tuned"] and row["tuned"]["step_size"],
            "rounds to target": row["target"] and row["target"]["rounds"],
        }
        places = [f"{name}: {_anchor(number)}" for name, number in sources.items() if number]
        _notes(console, places)
    notes = []
    for row in advice.steps:
        star = "* " if row["regime"] and not row["covered"] else ""
        notes += [f"{star}{row['method']}: {note}" for note in row["notes"]]
    _notes(console, notes)
    times = advice.yours["times_the_limit"]
    if times is not None:
        console.print(
            f"  Your step_size {advice.yours['step_size']:g} is {times.value:.3g} times the largest"
            " that the proof allows. What is proven holds for the worst case: larger steps often"
            " work, but nothing is promised for them.",
            highlight=False,
        )
    _larger(console, advice.larger)


def _larger(console: Console, larger: list[dict[str, Any]]) -> None:
    if not larger:
        return
    _heading(console, "How much larger FedShuffle's steps may be", _anchor(larger[0]["effective"]))
    table = _table("than", "regime", "step_size", "largest client step", "way of a round")
    for row in larger:
        names = ("step_size", "largest_client_step", "effective")
        table.add_row(row["than"], row["regime"], *(f"{row[name].value:.3g}x" for name in names))
    console.print(Padding(table, (0, 0, 0, 2)))
    _notes(
        console,
        [
            "short clients may take larger steps; that this is faster the theorem does not show",
            "FedNova with the weights w_i tau_max / (tau_i p_i) has FedShuffle's limit and rate",
        ],
    )


def _mvr(console: Console, mvr: dict[str, Any], rounds: int) -> None:
    source = _anchor(mvr["proof"]["limit"]["step_size"]) if "proof" in mvr else ""
    _heading(console, "FedShuffleMVR", source)
    if "proof" in mvr:
        table = _table("", "largest step_size", f"step_size for {rounds} rounds", "a for these")
        for bound in ("theorem", "proof"):
            limit, tuned = mvr[bound]["limit"], mvr[bound]["tuned"]
            table.add_row(
                bound,
                _size(limit["step_size"]),
                "-" if tuned is None else _size(tuned["step_size"]),
                "-" if tuned is None else _size(tuned["a"]),
            )
        console.print(Padding(table, (0, 0, 0, 2)))
    _notes(console, mvr["notes"])


def _sampling(console: Console, sampling: dict[str, Any], setting: dict[str, Any]) -> None:
    if not sampling["covered"]:
        _heading(console, "Sampling", "")
        _notes(console, sampling["notes"])
        return
    first = sampling["options"][0]
    _heading(
        console,
        f"Sampling: rounds until {setting['target']:g} of the start, by what is proven"
        f" ({sampling['regime']})",
        f"{_anchor(first['M'])}, {_anchor(first['rounds'])}",
    )
    kinds = [option["sampling"] for option in sampling["options"]]
    table = _table("clients a round", *(f"{kind}: M, rounds" for kind in kinds))
    rows = {row[0]["cohort"]: row for row in sampling["sizes"]}
    rows[sampling["cohort"]] = sampling["options"]
    for cohort, row in sorted(rows.items()):
        cells = [f"{option['M'].value:.3g}, {_rounds(option['rounds'])}" for option in row]
        yours = " (yours)" if cohort == sampling["cohort"] else ""
        table.add_row(f"{cohort}{yours}", *cells)
    pays = sampling["pays_until"]
    table.add_row("pays until", *(f"{pays[kind].value}" for kind in kinds), style="bold")
    console.print(Padding(table, (0, 0, 0, 2)))
    _notes(
        console,
        [
            *sampling["notes"],
            "a cohort pays while it is at least half as fast as a linear speed-up over one client",
        ],
    )


def _anchor(number: Number) -> str:
    return number.source.anchor


def _size(number: Number) -> str:
    return f"{number.value:.3g}"


def _rounds(number: Number) -> str:
    return f"{number.value:,}" if number.value < _MANY else f"{number.value:.1e}"
