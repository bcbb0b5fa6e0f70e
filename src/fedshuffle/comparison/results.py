"""The results of a comparison: the types of ``results.json``, and what is known before training."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import (
    Any,
    NamedTuple,
    NotRequired,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np
from torch import nn

from fedshuffle._arrays import IGNORED, FloatArray, expect
from fedshuffle.auditing import audit
from fedshuffle.comparison.small_clients import training_sizes
from fedshuffle.comparison.spec import Comparison, Criterion
from fedshuffle.comparison.variants import Variant
from fedshuffle.config import Config, imports, writer
from fedshuffle.config import runner as config_runner
from fedshuffle.config.runner import RunInputs
from fedshuffle.config.schema import at
from fedshuffle.errors import FedShuffleError, NotAuditableError, check_known
from fedshuffle.evaluation import Evaluation, Evaluations
from fedshuffle.federation import Federation
from fedshuffle.fingerprint import versions
from fedshuffle.methods import Method, label
from fedshuffle.training.rounds import Run


class TrialRecord(TypedDict):
    """A tuned point: the mean of its tuning runs, None if one has no finite value."""

    step_size: float
    server_step_size: float
    weight_decay: float
    clip: float | None
    added: bool
    value: float | None
    diverged: bool


class RunRecord(TypedDict):
    """A full run that has ended, with its evaluations."""

    seed: int
    folder: str
    diverged: bool
    history: list[dict[str, Any]]
    small_decile: dict[str, float | None]
    """After the last round, the mean of each metric over the tenth of clients with the fewest
    training examples; empty if clients were not measured.
    """


class AuditRecord(TypedDict):
    """The audit of a method."""

    consistent: bool | None
    effective_weights: list[float] | None
    objective_weights: list[float]
    unknown: NotRequired[str]
    """Why there are no effective weights, if there are none."""


def effective_weights(audited: AuditRecord) -> FloatArray:
    """The effective weights of an audit, not a number (NaN) where they are unknown."""
    found = audited["effective_weights"]
    return np.full(len(audited["objective_weights"]), np.nan) if found is None else np.array(found)


class Curve(TypedDict):
    """A method with a momentum at a point of the grid, over all seeds."""

    method: str
    label: str
    settings: dict[str, str]
    """Its method and what else sets it apart, if an entry of ``compare.methods`` is a table."""
    momentum: str
    client_step_sizes: list[float]
    audit: AuditRecord
    group: str
    step_size: float
    server_step_size: float
    weight_decay: float
    clip: float | None
    tuning: list[TrialRecord]
    runs: list[RunRecord]


class Results(TypedDict):
    """The content of ``results.json``; JSON has neither NaN nor infinity, None stands for them."""

    title: str
    config: str
    command: str
    complete: bool
    seconds: float
    rounds: int
    metric: str
    higher_is_better: bool
    majority: dict[str, float] | None
    judge: dict[str, Any]
    federation: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    curves: list[Curve]
    warnings: list[dict[str, str]]
    """Those that ``annotate`` added, see :func:`fedshuffle.comparison.runner.run`."""


def check_results(found: Any, kind: Any = Results, what: str = "the results") -> None:
    """Refuse anything but the results of a comparison; name the first thing that is missing."""
    expect(found, Mapping, what)
    for key, hint in get_type_hints(kind).items():
        if key not in found:
            if key not in kind.__required_keys__:
                continue
            raise FedShuffleError(
                f"{key!r} is missing from {what}: is this the results.json of a comparison?"
            )
        part = get_args(hint)[0] if get_origin(hint) is list else hint
        if is_typeddict(part):
            for entry in [found[key]] if part is hint else found[key]:
                check_results(entry, part, f"{key!r} of {what}")


Facts = dict[str, Any]
"""A part of the results that is known before training."""


class KnownFacts(NamedTuple):
    """What is known before training."""

    judge: Criterion  # ranks tuning runs
    common: Facts
    variants: dict[Variant, Facts]
    training_sizes: dict[str, int]  # of the clients that are evaluated


def collect_facts(comparison: Comparison) -> KnownFacts:
    """Load everything once, so that mistakes are reported before the first run."""
    base = comparison.base
    with base.importable():
        methods = {one: config_runner.method(comparison.config(one)) for one in comparison.variants}
        _check_names(methods)
        for variant, method in methods.items():
            comparison.check_work(variant, method)
        model = config_runner.initial_model(base)
        judge = Criterion("loss", False)
        if any(map(comparison.tuned, comparison.variants)):
            with at("compare.tune"):
                evaluate = _evaluation(comparison.short, comparison.short.inputs(), model)
                judge = _criterion(evaluate, evaluate.names[0])
        inputs = base.inputs()
        evaluate = _evaluation(base, inputs, model)
        first = "accuracy" if "accuracy" in evaluate.names else evaluate.names[0]
        with at("compare"):
            target = _criterion(evaluate, comparison.metric or first)
        found = {
            variant: _variant_facts(comparison.config(variant), variant, method, inputs)
            for variant, method in methods.items()
        }
    sizes = inputs.federation.sizes.tolist()
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    common = {
        "title": comparison.title,
        "config": comparison.text,
        "rounds": base.rounds,
        **target._asdict(),
        "majority": majority(evaluate, target.metric),
        "judge": judge._asdict(),
        "federation": {"clients": len(sizes), "examples": sum(sizes), "sizes": sizes},
        "settings": _settings(comparison, judge, parameters),
        "versions": versions(),
    }
    measured = (part.data for part in _parts(evaluate) if part.per_client)
    known = training_sizes(inputs.federation, next(measured, inputs.federation))
    return KnownFacts(judge, common, found, known)


def _variant_facts(config: Config, variant: Variant, method: Method, inputs: RunInputs) -> Facts:
    """What is known of a variant before training."""
    with at(variant.place) if variant.named else nullcontext():
        sampling = config_runner.sampling(config, inputs.federation)
    given = inputs.federation, method, sampling, config.work
    on_the_way = config_runner.on_the_way(config)
    on_the_way |= config_runner.audited_timing(config, inputs.federation)
    with at(variant.place):  # some do not go with privacy or a channel
        run = Run(*given, rounds=config.rounds, **on_the_way)
    with imports.running(f"the audit of {method.name!r}", config.folder):
        audited, scales = _audit(*given, **on_the_way), run.step_scales()
    own = {"method": method.name, **dict(variant.changes)} if variant.named else {}
    return {
        "method": variant.named or method.name,
        "label": variant.named or label(method),
        "settings": {key: _words(value) for key, value in own.items()},
        "momentum": method.momentum,
        "client_step_sizes": scales,  # the smallest and the largest, for a step size of 1
        "audit": audited,
    }


def _audit(federation: Federation, *given: Any, **on_the_way: Any) -> AuditRecord:
    """The audit of a method, or why it cannot be audited: that is no reason not to compare it."""
    record = AuditRecord(
        consistent=None, effective_weights=None, objective_weights=federation.weights.tolist()
    )
    try:
        found = audit(federation, *given, **on_the_way)
    except NotAuditableError as error:
        return {**record, "unknown": str(error)}
    weights = found.effective_weights.tolist()
    return {**record, "consistent": found.consistent, "effective_weights": weights}


def _check_names(methods: Mapping[Variant, Method]) -> None:
    """Refuse two methods of one name, which identifies a method in the results."""
    seen: dict[tuple[str, str], Variant] = {}
    for variant, method in methods.items():
        name = variant.named or method.name
        first = seen.setdefault((name, method.momentum), variant)
        if first != variant:
            raise FedShuffleError(
                f"compare.methods: both {first.name!r} and {variant.name!r} are called {name!r}."
                " Give one another name."
            )


def _evaluation(config: Config, inputs: RunInputs, model: nn.Module) -> Evaluation | Evaluations:
    """The evaluation of a run, tried once on its model."""
    evaluate = inputs.evaluate
    assert isinstance(evaluate, Evaluation | Evaluations)
    with imports.running("the evaluation before training", config.folder):
        evaluate.check(model)
    return evaluate


def _criterion(evaluate: Evaluation | Evaluations, metric: str) -> Criterion:
    known = evaluate.higher_is_better
    check_known("metric", metric, known)
    return Criterion(metric, known[metric])


def _parts(evaluate: Evaluation | Evaluations) -> tuple[Evaluation, ...]:
    return evaluate.parts if isinstance(evaluate, Evaluations) else (evaluate,)


def majority(evaluate: Evaluation | Evaluations, metric: str) -> dict[str, float] | None:
    """The accuracy of always predicting the most common class, and its standard error.

    Clients count as in the evaluation: by weight, and every target of a client equally.
    """
    part = next(part for part in _parts(evaluate) if metric in part.names)
    if metric.removeprefix(part.prefix) not in ("accuracy", "top-1"):
        return None
    data = part.data
    if data.transform is not None:  # which may change the targets
        return None
    targets = np.asarray(data.fields[-1]).reshape(len(data.fields[-1]), -1)
    counted = (targets != IGNORED).sum(1)
    per_client = np.add.reduceat(counted, data.offsets[:-1])
    weights = np.repeat(np.repeat(data.weights / per_client, data.sizes), counted)
    _, classes = np.unique(targets[targets != IGNORED], return_inverse=True)
    share = float(np.bincount(classes, weights).max())
    error = math.sqrt(share * max(0.0, 1 - share) * float(weights @ weights))
    return {"share": share, "standard_error": error}


def _settings(comparison: Comparison, judge: Criterion, parameters: int) -> dict[str, Any]:
    short, tables = comparison.short, writer.plain(comparison.base)
    names = ["sampling", "work", "engine", "model", "loss", "data", "evaluation"]
    found: dict[str, Any] = {name: _words(tables[name]) for name in names}
    for name in ("step_size", "server_step_size"):
        size = tables[name]
        if name == "step_size" or comparison.server_step_sizes:  # tuned, but for its schedule
            size = size if isinstance(size, dict) else {}
            size = {key: value for key, value in size.items() if key != "step_size"}
        if size:
            found[name] = _words(size)
    for name in ("schedule", "clock", "transforms", "channel", "down_channel", "privacy"):
        if tables.get(name, "none") not in ("none", "wait"):
            found[name] = _words(tables[name])
    found |= {"parameters": parameters, "seeds": list(comparison.seeds)}
    if any(map(comparison.tuned, comparison.variants)) and short.evaluation is not None:
        data, clients = short.evaluation.data, short.evaluation.clients
        found["tuning"] = (
            f"{judge.metric} on {data if isinstance(data, str) else data.path} data"
            + ("" if clients is None else f", at most {clients} clients")
            + f" after {short.rounds} rounds, seed {short.seed}"
        )
        if (widen := comparison.tune.widen) > 1:
            found["tuning"] += f"; step sizes up to {widen:g} times beyond the grid's ends"
    return found


def _words(value: Any) -> str:
    """Plain data as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    return str(value)
