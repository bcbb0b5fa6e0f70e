"""The command that audits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

from fedshuffle import auditing, methods
from fedshuffle._arrays import FloatArray, number
from fedshuffle.cli.shared import AsJson, console, refuse_unused, was_given
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling

_Text = str | None
_Path = Path | None
_Count = int | None
_Subject = tuple[Federation, Method, Sampling, LocalWork]
_SAMPLINGS = (
    "full, uniform:B, importance:B, independent:p1,p2,..., one, ais:B, stratified:B:K, optimal:B,"
    " optimal:B:of:SAMPLING."
)


def audit(
    context: typer.Context,
    sizes: Annotated[
        _Text, Option(help="Examples per client: 1,2,3 or @file, a line each.")
    ] = None,
    data: Annotated[_Path, Option(help="Audit on the clients of this store, not --sizes.")] = None,
    config: Annotated[
        _Path, Option(help="Take data, method, sampling and local work from a run's config.")
    ] = None,
    method: Annotated[
        str, Option(help="See 'fedshuffle methods'; or module:METHOD.")
    ] = "fedavg-rr",
    sampling: Annotated[str, Option(help=_SAMPLINGS)] = "full",
    epochs: Annotated[
        _Text, Option(help="2 for all, 1,2,3 per client, or 2..5 at random; 1.")
    ] = None,
    batch_size: Annotated[_Count, Option(help="Examples per local step; 1.")] = None,
    weights: Annotated[
        _Text, Option(help="Objective weights as for --sizes; by size if not given.")
    ] = None,
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
    step_sizes: Annotated[
        str, Option(help="Of clients under --flower or --callable: equal, or scaled.")
    ] = "equal",
    confidence: Annotated[
        float, Option(help="Of intervals, under --flower, --callable and --log.")
    ] = 0.95,
    seed: Annotated[int, Option(help="For audits that have to sample.")] = 0,
    draws: Annotated[
        _Count, Option(help="For audits that have to sample: 32000, others' code 2000.")
    ] = None,
    rounds: Annotated[
        _Count, Option(help="For rules that depend on the round: how many to average over, 100.")
    ] = None,
    check: Annotated[
        bool, Option("--check", help="Exit with 1 if the objective is not the one you meant.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which objective a method, or other people's code, really minimises."""
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
        from fedshuffle.auditing.adapters import read_log

        result, _ = read_log(log, weights=objective, confidence=confidence)
    else:
        from fedshuffle.config import imports

        here = Path.cwd()
        with imports.importable(here):
            if config is not None:
                names = {"method": method, "sampling": sampling, "momentum": momentum}
                changes = {key: value for key, value in names.items() if was_given(context, key)}
                subject = _subject_of_config(config, changes)
            else:
                federation = _clients(sizes, data, objective)
                chosen = imports.method(method, here)
                if momentum is not None:
                    chosen = chosen.with_momentum(methods.parse_momentum(momentum))
                work = LocalWork(None if epochs is None else _epochs(epochs), batch_size=batch_size)
                drawn = imports.sampling(sampling, federation, here)
                subject = federation, chosen, drawn, work
            counts = {"draws": draws, "rounds": rounds}
            given: dict[str, Any] = {
                k: number for k, number in counts.items() if number is not None
            }
            if server is None:
                result = auditing.audit(*subject, seed=seed, **given)
            else:
                given |= {"step_sizes": step_sizes, "confidence": confidence, "seed": seed}
                federation, _, drawn, work = subject
                found = imports.find(server, here)
                if flower is not None:
                    found = _aggregator(found, len(federation))
                result = auditing.audit_server(found, federation, drawn, work, **given)
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    else:
        from fedshuffle.auditing.result import print_audit

        print_audit(console, result)
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


def _subject_of_config(file: Path, changes: dict[str, Any]) -> _Subject:
    from fedshuffle import config as configs
    from fedshuffle.config import runner

    config = configs.load(file, changes)
    with config.importable():
        federation = runner.federation(config)
        sampling = runner.sampling(config, federation)
        return federation, runner.method(config), sampling, config.work


def _aggregator(strategy: Any, clients: int) -> auditing.adapters.Aggregator:
    from fedshuffle.auditing.adapters import Aggregator, FlowerAggregator

    return strategy if isinstance(strategy, Aggregator) else FlowerAggregator(strategy, clients)


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


def _epochs(text: str) -> Any:
    if ".." in text:
        from fedshuffle.config import loader

        return loader.epochs(text, "--epochs")
    remedy = "Write 2 for all, 1,2,3 per client, or 2..5."
    with error_context(lambda _: f"--epochs: cannot read {text!r}. {remedy}", ValueError):
        epochs = [int(word) for word in text.split(",")]
    return epochs[0] if len(epochs) == 1 else epochs
