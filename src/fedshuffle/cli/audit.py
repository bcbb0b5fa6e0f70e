"""The command that audits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedshuffle import methods
from fedshuffle._arrays import FloatArray, IntArray, expect
from fedshuffle.auditing import Audit, BlackBoxAudit
from fedshuffle.auditing import audit as run_audit
from fedshuffle.cli.shared import AsJson, console
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
    as_json: AsJson = False,
) -> None:
    """Say which objective a method, or other people's code, really minimises."""
    if flower is not None or function is not None or log is not None:
        from fedshuffle.auditing import commands

        unused = ["method", "momentum"]
        if log is not None:
            unused += ["sampling", "epochs", "batch_size", "step_sizes", "seed", "draws"]
        _unused(context, unused, "--flower, --callable" if log is None else "--log")
        black_box, federation = commands.audit_others(
            flower=flower,
            function=function,
            log=log,
            sizes=None if sizes is None else _numbers(sizes, "--sizes"),
            weights=None if weights is None else _numbers(weights, "--weights"),
            sampling=lambda federation: _own("fedavg", sampling, federation)[1],
            work=LocalWork(epochs=_epochs(epochs), batch_size=batch_size),
            step_sizes=step_sizes,
            confidence=confidence,
            seed=seed,
            draws=draws,
        )
        _show_audit(black_box, federation, as_json)
        return
    _unused(context, ["step_sizes", "confidence"], "--method")
    if sizes is None:
        raise FedShuffleError("give --sizes, such as --sizes 1,2,3, or --log and a file.")
    federation = Federation.from_sizes(
        _numbers(sizes, "--sizes"), None if weights is None else _numbers(weights, "--weights")
    )
    chosen, drawn = _own(method, sampling, federation)
    if momentum is not None:
        chosen = chosen.with_momentum(methods.parse_momentum(momentum))
    work = LocalWork(epochs=_epochs(epochs), batch_size=batch_size)
    result = run_audit(federation, chosen, drawn, work, seed=seed, draws=draws or 32_000)
    _show_audit(result, federation, as_json)


def _unused(context: typer.Context, names: list[str], under: str) -> None:
    """Refuse options that would change nothing, lest somebody thinks that they do."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise FedShuffleError(f"{option} changes nothing under {under}: leave it out.")


def _show_audit(result: Audit | BlackBoxAudit, federation: Federation, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    from fedshuffle.report.audit import print_audit

    print_audit(console, result, federation)


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
