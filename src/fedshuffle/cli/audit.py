"""The command that audits methods, servers and logs."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

from fedshuffle import auditing
from fedshuffle._arrays import FloatArray, number
from fedshuffle.cli.shared import (
    AsJson,
    Count,
    File,
    Text,
    console,
    emit,
    refuse_unused,
    was_given,
)
from fedshuffle.errors import FedShuffleError, error_context, require_training
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork

_SAMPLINGS = (
    "full, uniform:B, importance:B, independent:p1,p2,..., one, ais:B, stratified:B:K, optimal:B,"
    " optimal:B:of:SAMPLING."
)


def audit(
    context: typer.Context,
    sizes: Annotated[Text, Option(help="Examples per client: 1,2,3, or @file by lines.")] = None,
    data: Annotated[File, Option(help="Audit on the clients of this store, not --sizes.")] = None,
    config: Annotated[
        File, Option(help="Take data, method, sampling and local work from a run's config.")
    ] = None,
    method: Annotated[str, Option(help="Of 'fedshuffle methods', or module:METHOD.")] = "fedavg-rr",
    sampling: Annotated[str, Option(help=_SAMPLINGS)] = "full",
    epochs: Annotated[Text, Option(help="2 for all, 1,2,3 per client, or 2..5 drawn; 1.")] = None,
    batch_size: Annotated[Count, Option(help="Examples per local step; 1.")] = None,
    weights: Annotated[Text, Option(help="Objective weights, as --sizes; else by size.")] = None,
    momentum: Annotated[
        Text, Option(help="none, mvr:A (exact) or global:A (cheap); 0.9 is A = 0.1.")
    ] = None,
    flower: Annotated[
        Text, Option(help="Audit a Flower strategy instead: module:STRATEGY, or what makes one.")
    ] = None,
    function: Annotated[
        Text, Option("--callable", help="Audit module:FUNCTION(clients, sizes, updates) instead.")
    ] = None,
    log: Annotated[
        File, Option(help="Audit a log: CSV or JSONL of round,client,size,steps,weight.")
    ] = None,
    step_sizes: Annotated[str, Option(help="For --flower, --callable: equal or scaled.")] = "equal",
    confidence: Annotated[float, Option(help="Of intervals: --flower, --callable, --log.")] = 0.95,
    privacy: Annotated[
        bool, Option("--privacy", help="Of --flower or --callable: how private is it really?")
    ] = False,
    clipping: Annotated[
        File, Option(help="Whose weight was cut by --clip in the run in this folder?")
    ] = None,
    clip: Annotated[
        float | None, Option(help="For --privacy, --clipping: the norm to which updates are cut.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, Option(help="For --privacy: the one that the server claims.")
    ] = None,
    neighbours: Annotated[
        str, Option(help="For --privacy, what one client may do: zero-out, remove or replace.")
    ] = "zero-out",
    channel: Annotated[
        str | None, Option(help="How updates are compressed, such as topk:0.01+ef.")
    ] = None,
    seed: Annotated[int, Option(help="For audits that have to sample.")] = 0,
    draws: Annotated[Count, Option(help="To sample, if needed: 32000, others' code 2000.")] = None,
    rounds: Annotated[
        Count, Option(help="For rules that depend on the round: how many to average over, 100.")
    ] = None,
    check: Annotated[
        bool, Option("--check", help="Exit with 1 if not consistent, or not as private as claimed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which objective a method, or other people's code, really minimises."""
    from fedshuffle.auditing.adapters import Aggregator, FlowerAggregator, read_log
    from fedshuffle.auditing.privacy import print_privacy
    from fedshuffle.auditing.result import print_audit
    from fedshuffle.auditing.transforms import print_clipping
    from fedshuffle.config import imports, loader

    result: auditing.Audit | auditing.PrivacyAudit
    server = flower if flower is not None else function
    private = ["noise_multiplier", "neighbours"]
    if clip is None and (privacy or clipping is not None):
        raise FedShuffleError("give --clip and the norm to which updates are cut.")
    if clipping is not None:
        known = ["clipping", "clip", "sizes", "data", "as_json"]
        known += ["weights"] * (sizes is not None or data is not None)
        refuse_unused(context, [name for name in context.params if name not in known], "--clipping")
        federation = _clients_of_run(clipping, sizes, data, weights)
        report = auditing.clipping_report(clipping, federation, number(clip, "--clip"))
        emit(as_json, report.to_dict(), partial(print_clipping, console, report))
        return
    if not privacy:
        refuse_unused(context, [*private, "clip"], "an audit without --privacy")
    elif server is None:
        raise FedShuffleError("--privacy probes a server: give --flower or --callable.")
    else:
        unused = ["weights", "epochs", "batch_size", "step_sizes", "draws"]
        refuse_unused(context, unused, "--privacy")
    if sum(one is not None for one in (flower, function, log)) > 1:
        raise FedShuffleError("give one of --flower, --callable and --log.")
    rules = ["method", "momentum", "rounds", "channel"]
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
        counts = {"draws": draws, "rounds": rounds, "channel": channel}
        given: dict[str, Any] = {key: value for key, value in counts.items() if value is not None}
        on_the_way: dict[str, Any] = {}
        here = Path.cwd()
        with imports.importable(here):
            if config is not None:
                require_training("fedshuffle audit --config")
                from fedshuffle.config import runner

                names = {"method": method, "sampling": sampling, "momentum": momentum}
                changes = {key: value for key, value in names.items() if was_given(context, key)}
                chosen = loader.load(config, changes)
                with chosen.importable():
                    federation = runner.federation(chosen)
                    rule, drawn = runner.method(chosen), runner.sampling(chosen, federation)
                    on_the_way = runner.on_the_way(chosen)
                work = chosen.work
            else:
                federation = _clients(sizes, data, objective)
                rule = imports.method(method, here, momentum)
                drawn = imports.sampling(sampling, federation, here)
                passes = None if epochs is None else loader.epochs(epochs, "--epochs")
                work = LocalWork(passes, batch_size=batch_size)
            if server is None:
                given = on_the_way | given
                result = auditing.audit(federation, rule, drawn, work, seed=seed, **given)
            else:
                found = imports.find(server, here)
                if flower is not None and not isinstance(found, Aggregator):
                    found = FlowerAggregator(found, len(federation))
                given |= {"confidence": confidence, "seed": seed}
                if privacy:
                    given |= {"clip": clip, "noise_multiplier": noise_multiplier}
                    given["neighbours"] = neighbours
                    result = auditing.audit_privacy(found, federation, drawn, **given)
                else:
                    given["step_sizes"] = step_sizes
                    result = auditing.audit_server(found, federation, drawn, work, **given)
    if isinstance(result, auditing.PrivacyAudit):
        show, right = partial(print_privacy, console, result), result.holds
    else:
        show, right = partial(print_audit, console, result), result.consistent
    emit(as_json, result.to_dict(), show)
    if check and right is False:
        raise typer.Exit(1)


def _clients_of_run(
    folder: Path, sizes: str | None, data: Path | None, weights: str | None
) -> Federation:
    """The clients of a recorded run: its config names them, unless they are given."""
    if sizes is not None or data is not None:
        return _clients(sizes, data, None if weights is None else _numbers(weights, "--weights"))
    if not (folder / "config.toml").exists():
        raise FedShuffleError(
            f"{str(folder)!r} has no config.toml that names the clients: give --sizes or --data."
        )
    require_training(repr(str(folder / "config.toml")))
    from fedshuffle.config import loader, runner

    config = loader.load(folder / "config.toml", {})
    if config.privacy is not None and config.privacy.weighted:
        raise FedShuffleError(
            f"the run in {str(folder)!r} clips updates times their weights, and its records hold"
            " the norms of updates. Use auditing.measured_clipping in Python, with the norms times"
            " the weights."
        )
    with config.importable():
        return runner.federation(config)


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
