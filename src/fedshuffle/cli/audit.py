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
    AVAILABILITIES,
    CLOCKS,
    PROBABILITIES,
    SCHEDULES,
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
from fedshuffle.timing import MessageSizes

_SAMPLINGS = (
    "How cohorts are drawn: full, uniform:B, importance:B, independent:p1,p2,..., one, ais:B,"
    " stratified:B:K, optimal:B, optimal:B:of:SAMPLING, reshuffled:B."
)

# The groups in which --help shows the options.
_clients_and_work = partial(Option, rich_help_panel="Clients and local work")
_method = partial(Option, rich_help_panel="Method")
_participation = partial(Option, rich_help_panel="Who takes part")
_instead = partial(Option, rich_help_panel="Instead of a method: other people's code, or a log")
_privacy = partial(Option, rich_help_panel="Privacy")


def audit(
    context: typer.Context,
    sizes: Annotated[
        Text, _clients_and_work(help="Examples per client: 1,2,3, or @FILE, one number per line.")
    ] = None,
    data: Annotated[
        File, _clients_and_work(help="A store that holds the clients, instead of --sizes.")
    ] = None,
    config: Annotated[
        File, _clients_and_work(help="A run's config: its data, method, sampling and local work.")
    ] = None,
    weights: Annotated[
        Text, _clients_and_work(help="Weights of the objective, as --sizes; else by size.")
    ] = None,
    epochs: Annotated[
        Text,
        _clients_and_work(help="Local epochs: 2 for all, 1,2,3 per client, or 2..5 drawn; else 1."),
    ] = None,
    steps: Annotated[
        Text,
        _clients_and_work(
            help="Equal local steps for all: 500, or the min or mean of those that epochs give."
        ),
    ] = None,
    batch_size: Annotated[Count, _clients_and_work(help="Examples per local step; else 1.")] = None,
    optimiser: Annotated[
        Text,
        _clients_and_work(
            help="Local optimiser: sgd, sgd:momentum=0.9, adamw, ... of torch.optim."
        ),
    ] = None,
    method: Annotated[
        str, _method(help="A name of 'fedshuffle methods', or module:METHOD for one of your own.")
    ] = "fedavg-rr",
    momentum: Annotated[
        Text, _method(help="none, mvr:A (exact) or global:A (cheap); momentum 0.9 is A = 0.1.")
    ] = None,
    channel: Annotated[
        Text, _method(help="How updates are compressed, such as topk:0.01+ef.")
    ] = None,
    step_size: Annotated[
        Text, _method(help="Schedule of step sizes, by which rounds count, such as cosine:0.1.")
    ] = None,
    sampling: Annotated[str, _participation(help=_SAMPLINGS)] = "full",
    availability: Annotated[Text, _participation(help=AVAILABILITIES)] = None,
    probabilities: Annotated[Text, _participation(help=PROBABILITIES)] = None,
    schedule: Annotated[Text, _participation(help=SCHEDULES)] = None,
    clock: Annotated[Text, _participation(help=CLOCKS)] = None,
    rates: Annotated[
        Text, _participation(help="Tasks per second of each client: short for --clock rates:4,2,1.")
    ] = None,
    message_bytes: Annotated[
        Text,
        _participation(
            help="For a clock with bandwidths: bytes of the model and an update, 4e6,1e5."
        ),
    ] = None,
    flower: Annotated[
        Text, _instead(help="A Flower strategy: module:STRATEGY, or a function that makes one.")
    ] = None,
    function: Annotated[
        Text, _instead("--callable", help="A server: module:FUNCTION(clients, sizes, updates).")
    ] = None,
    log: Annotated[
        File, _instead(help="A log of rounds: CSV or JSONL of round,client,size,steps,weight.")
    ] = None,
    step_sizes: Annotated[
        str,
        _instead(
            help="For --flower, --callable: clients' step sizes, equal, or scaled by 1/steps."
        ),
    ] = "equal",
    confidence: Annotated[float, _instead(help="The level of intervals.")] = 0.95,
    privacy: Annotated[
        bool, _privacy("--privacy", help="How private is --flower or --callable really?")
    ] = False,
    clipping: Annotated[
        File, _privacy(help="The folder of a run: whose updates did --clip cut, and how much?")
    ] = None,
    clip: Annotated[
        float | None, _privacy(help="For --privacy, --clipping: the largest norm of an update.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, _privacy(help="For --privacy: the one that the server claims.")
    ] = None,
    neighbours: Annotated[
        str, _privacy(help="For --privacy, what one client may do: zero-out, remove or replace.")
    ] = "zero-out",
    seed: Annotated[int, Option(help="Seed of audits that draw cohorts.")] = 0,
    draws: Annotated[
        Count, Option(help="Cohorts to draw, if needed; else 32000, of other people's code 2000.")
    ] = None,
    rounds: Annotated[
        Count,
        Option(
            help="Rounds of the run, if clients count differently from round to round; else 100."
        ),
    ] = None,
    check: Annotated[
        bool, Option("--check", help="Exit with 1 if not consistent, or not as private as claimed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say which objective a method, or other people's code, really minimises."""
    from fedshuffle.auditing.adapters import Aggregator, FlowerAggregator
    from fedshuffle.auditing.privacy import print_privacy
    from fedshuffle.auditing.result import print_audit
    from fedshuffle.auditing.subject import ROUNDS
    from fedshuffle.auditing.transforms import print_clipping
    from fedshuffle.config import imports, loader
    from fedshuffle.sampling import among_available
    from fedshuffle.timing import resolve_clock

    result: auditing.Audit | auditing.PrivacyAudit
    server = flower if flower is not None else function
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
    _check_options(context)
    clock = clock if rates is None else f"rates:{rates}"
    objective = None if weights is None else _numbers(weights, "--weights")
    if log is not None:
        result, _ = auditing.read_log(log, weights=objective, confidence=confidence)
    else:
        counts = {"draws": draws, "rounds": rounds, "channel": channel, "step_size": step_size}
        given: dict[str, Any] = {key: value for key, value in counts.items() if value is not None}
        on_the_way: dict[str, Any] = {}
        if message_bytes is not None:
            given["message_sizes"] = _message_sizes(message_bytes)
        here = Path.cwd()
        with imports.importable(here):
            if config is not None:
                require_training("fedshuffle audit --config")
                from fedshuffle.config import runner

                names = {"method": method, "sampling": sampling, "momentum": momentum}
                names |= {"availability": availability, "probabilities": probabilities}
                names["schedule"] = schedule
                changes = {key: value for key, value in names.items() if was_given(context, key)}
                changes |= {} if clock is None else {"clock": clock}
                chosen = loader.load(config, changes)
                with chosen.importable():
                    federation = runner.federation(chosen)
                    rule, drawn = runner.method(chosen), runner.sampling(chosen, federation)
                    on_the_way = runner.on_the_way(chosen) | runner.step_sizes(chosen)
                    on_the_way |= runner.audited_timing(chosen, federation)
                work = chosen.work
            else:
                federation = _clients(sizes, data, objective)
                rule = imports.method(method, here, momentum).with_probabilities(probabilities)
                drawn = imports.sampling(sampling, federation, here)
                drawn = among_available(drawn, availability, federation, rounds or ROUNDS, here)
                passes = None if epochs is None else loader.epochs(epochs, "--epochs")
                common: Any = int(steps) if steps is not None and steps.isdecimal() else steps
                work = LocalWork(passes, common, batch_size, optimiser=optimiser)
                on_the_way = {"schedule": schedule, "clock": resolve_clock(clock, federation)}
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


def _check_options(context: typer.Context) -> None:
    """Refuse options that exclude each other, and those that change nothing under the others."""
    given = context.params
    flower, function, log = (given[name] is not None for name in ("flower", "function", "log"))
    work = ["epochs", "steps", "batch_size", "optimiser"]
    if given["rates"] is not None and given["clock"] is not None:
        raise FedShuffleError("give --clock or --rates, not both.")
    if not given["privacy"]:
        unused = ["noise_multiplier", "neighbours", "clip"]
        refuse_unused(context, unused, "an audit without --privacy")
    elif not (flower or function):
        raise FedShuffleError("--privacy probes a server: give --flower or --callable.")
    else:
        refuse_unused(context, ["weights", *work, "step_sizes", "draws"], "--privacy")
    if flower + function + log > 1:
        raise FedShuffleError("give one of --flower, --callable and --log.")
    rules = ["method", "momentum", "rounds", "channel", "step_size", "probabilities"]
    rules += ["schedule", "clock", "rates", "message_bytes"]
    if log:
        inputs = ["sizes", "data", "config", "sampling", "availability", *work]
        refuse_unused(context, [*rules, *inputs, "step_sizes", "seed", "draws"], "--log")
    elif flower or function:
        refuse_unused(context, rules, "--flower, --callable")
    else:
        refuse_unused(context, ["step_sizes", "confidence"], "--method")
    if given["config"] is not None:
        refuse_unused(context, ["sizes", "data", "weights", *work], "--config")
    else:
        if given["availability"] is None:
            refuse_unused(context, ["step_size"], "an audit without --availability")
        if given["schedule"] in (None, "wait"):
            unused = ["clock", "rates", "message_bytes"]
            refuse_unused(context, unused, "schedule 'wait', as the server waits for all")
    if (given["steps"] or "").isdecimal():
        refuse_unused(context, ["epochs"], f"--steps {given['steps']}")


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


def _message_sizes(text: str) -> MessageSizes:
    """``DOWN,UP`` in bytes, or one number for both."""
    sizes = _numbers(text, "--message-bytes")
    if len(sizes) > 2 or not np.all((sizes >= 0) & (sizes < np.inf)):
        raise FedShuffleError(f"--message-bytes is {text!r}: give the bytes down and up, 4e6,1e5.")
    return MessageSizes(float(sizes[0]), float(sizes[-1]))


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
