"""The command that audits."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, IntArray, expect
from fedshuffle.auditing import Audit, BlackBoxAudit
from fedshuffle.auditing import audit as run_audit
from fedshuffle.cli.shared import AsJson, console, refuse_unused, was_given
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling, is_import_path


def audit(
    context: typer.Context,
    sizes: Annotated[
        str | None, typer.Option(help="Examples per client: 1,2,3 or @file, one a line.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Audit on the clients of this store instead of --sizes.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Take data, method, sampling and local work from a run's config."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="See 'fedshuffle methods'; or module:METHOD.")
    ] = "fedavg-rr",
    sampling: Annotated[
        str,
        typer.Option(
            help="full, uniform:B, importance:B, independent:p1,p2,..., one, ais:B,"
            " stratified:B:K, optimal:B, optimal:B:of:SAMPLING."
        ),
    ] = "full",
    epochs: Annotated[
        str, typer.Option(help="2 for all, 1,2,3 per client, or 2..5 at random.")
    ] = "1",
    batch_size: Annotated[int, typer.Option(help="Examples per local step.")] = 1,
    weights: Annotated[
        str | None, typer.Option(help="Objective weights as for --sizes; by size if not given.")
    ] = None,
    momentum: Annotated[
        str | None, typer.Option(help="none, mvr:A (exact) or global:A (cheap); 0.9 is A = 0.1.")
    ] = None,
    flower: Annotated[
        str | None,
        typer.Option(help="Audit a Flower strategy instead: module:STRATEGY, or what makes one."),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            "--callable", help="Audit your server: module:FUNCTION(clients, sizes, updates)."
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Audit a log: CSV or JSONL of round,client,size,steps,weight."),
    ] = None,
    step_sizes: Annotated[
        str, typer.Option(help="Of clients under --flower or --callable: equal, or scaled.")
    ] = "equal",
    confidence: Annotated[
        float, typer.Option(help="Of intervals, under --flower, --callable and --log.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="For audits that have to sample.")] = 0,
    draws: Annotated[
        int | None, typer.Option(help="For audits that have to sample: 32000, others' code 2000.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="For rules that depend on the round: the mean over so many, 100."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if the objective is not the one you meant.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which objective a method, or other people's code, really minimises."""
    from fedshuffle.auditing import commands

    rules = ["method", "momentum", "rounds"]
    others = flower is not None or function is not None or log is not None
    if log is not None:
        unused = ["sampling", "epochs", "batch_size", "step_sizes", "seed", "draws"]
        refuse_unused(context, [*rules, *unused, "data", "config"], "--log")
    elif others:
        refuse_unused(context, rules, "--flower, --callable")
    else:
        refuse_unused(context, ["step_sizes", "confidence"], "--method")
    objective = None if weights is None else _numbers(weights, "--weights")
    if log is not None:
        commands.one_of(flower, function, log)
        if sizes is not None:
            raise FedShuffleError("a log tells the sizes itself: leave out --sizes.")
        _show(commands.audit_log(log, objective, confidence), check, as_json)
        return
    if config is not None:
        refuse_unused(context, ["sizes", "data", "weights", "epochs", "batch_size"], "--config")
        given = {"method": method, "sampling": sampling, "momentum": momentum}
        subject = commands.subject_of_config(
            config, {key: value for key, value in given.items() if was_given(context, key)}
        )
    else:
        federation = commands.clients(
            None if sizes is None else _numbers(sizes, "--sizes"), data, objective
        )
        chosen, drawn = _own(method, sampling, federation)
        if momentum is not None:
            chosen = chosen.with_momentum(methods.parse_momentum(momentum))
        work = LocalWork(epochs=_epochs(epochs), batch_size=batch_size)
        subject = commands.Subject(federation, chosen, drawn, work)
    if others:
        _show(
            commands.audit_others(
                subject,
                flower=flower,
                function=function,
                step_sizes=step_sizes,
                confidence=confidence,
                seed=seed,
                draws=2000 if draws is None else draws,
            ),
            check,
            as_json,
        )
        return
    numbers = {"draws": draws, "rounds": rounds}
    counts = {key: value for key, value in numbers.items() if value is not None}
    result = functools.partial(run_audit, *subject, seed=seed)(**counts)
    _show(result, check, as_json)


def _show(result: Audit | BlackBoxAudit, check: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    else:
        from fedshuffle.report.audit import print_audit

        print_audit(console, result)
    if check and result.consistent is False:
        raise typer.Exit(1)


def _own(method: str, sampling: str, federation: Federation) -> tuple[Method, str | Sampling]:
    """The method and the sampling, also where these are import paths, from this folder."""
    if not (methods.is_import_path(method) or is_import_path(sampling)):
        return methods.get(method), sampling
    from fedshuffle.config import imports

    here = Path.cwd()
    with imports.importable(here):
        found: Method | str = method
        if methods.is_import_path(method):
            found = imports.find(method, here)
            expect(found, Method, repr(method))
        drawn: str | Sampling = sampling
        if is_import_path(sampling):
            drawn = imports.given(sampling, federation, here)
            expect(drawn, Sampling, f"what {sampling!r} returns")
        return methods.get(found), drawn


def _numbers(text: str, option: str) -> FloatArray | IntArray:
    """Numbers from ``1,2,3`` or from ``@file`` with one a line."""
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise FedShuffleError(f"{option}: cannot read {str(path)!r}: {error}.") from error
        words = [(f"line {k}", line.strip()) for k, line in enumerate(lines, 1) if line.strip()]
    else:
        words = [(f"entry {k}", word.strip()) for k, word in enumerate(text.split(","), 1)]
    numbers = []
    for where, word in words:
        try:
            numbers.append(float(word))
        except ValueError:
            raise FedShuffleError(
                f"{option}: {where} is {word!r}, which is not a number."
            ) from None
    return np.array(numbers)


def _epochs(text: str) -> int | list[int] | EpochRange:
    try:
        if ".." in text:
            low, high = text.split("..")
            return EpochRange(int(low), int(high))
        epochs = [int(word) for word in text.split(",")]
    except FedShuffleError:
        raise
    except ValueError:
        raise FedShuffleError(
            f"--epochs: cannot read {text!r}. Write 2 for all, 1,2,3 per client, or 2..5."
        ) from None
    return epochs[0] if len(epochs) == 1 else epochs
