"""What a comparison found, as one plain dictionary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from torch import nn

from fedshuffle.auditing import audit
from fedshuffle.comparison.plan import Curve, Plan
from fedshuffle.comparison.settings import Comparison, Pair
from fedshuffle.config import Config, Scheduled, imports, running, writing
from fedshuffle.config.running import Task
from fedshuffle.config.settings import at
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.evaluation import Evaluation, Evaluations
from fedshuffle.losses import IGNORED
from fedshuffle.methods import Method
from fedshuffle.report.comparison_numbers import Compared
from fedshuffle.report.comparison_warnings import warnings
from fedshuffle.report.look import label
from fedshuffle.rounds import Run
from fedshuffle.runs import versions


@final
@dataclass(frozen=True)
class Judge:
    """What is judged by, and which end of it is the good one."""

    metric: str
    higher_is_better: bool


@final
@dataclass(frozen=True)
class Facts:
    """What is known before anything is trained."""

    target: Judge
    """What is compared."""
    judge: Judge
    """What settings are chosen by."""
    methods: Mapping[Pair, Method]
    audits: Mapping[Pair, dict[str, Any]]
    step_scales: Mapping[Pair, tuple[float, float]]
    """The smallest and the largest step size of a client, as multiples of ``step_size``."""
    majority: dict[str, float] | None
    """What always predicting the commonest class comes to, where the accuracy is compared."""
    federation: dict[str, Any]
    parameters: int


def facts(comparison: Comparison) -> Facts:
    """Load everything once: what is wrong is said before the first run, and data are counted."""
    base = comparison.base
    with base.importable():
        methods = {
            pair: running._method(replace(base, method=pair[0], momentum=pair[1]))
            for pair in comparison.pairs
        }
        _check_names(methods)
        model = running.model(base)
        judge = Judge("loss", False)
        if comparison.tuned:
            short = comparison.trial(comparison.pairs[0], comparison.grid[0], None).config
            with at("compare.tune"):
                evaluate = _checked(short, short.task(), model)
                judge = _judge(evaluate, evaluate.names[0])
        task = base.task()
        evaluate = _checked(base, task, model)
        first = "accuracy" if "accuracy" in evaluate.names else evaluate.names[0]
        with at("compare"):
            target = _judge(evaluate, comparison.metric or first)
        sampling = running._sampling(base, task.federation)
        audits, scales = {}, {}
        for pair, method in methods.items():
            with imports.running(f"the audit of {method.name!r}", base.folder):
                found = audit(task.federation, method, sampling, base.work)
                scales[pair] = Run(task.federation, method, sampling, base.work).step_scales()
            audits[pair] = {
                "consistent": found.consistent,
                "effective_weights": found.effective_weights.tolist(),
                "objective_weights": found.objective_weights.tolist(),
            }
    sizes = task.federation.sizes.tolist()
    return Facts(
        target,
        judge,
        methods,
        audits,
        scales,
        _majority(evaluate, target.metric),
        {"clients": len(sizes), "examples": sum(sizes), "sizes": sizes},
        sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


def _check_names(methods: Mapping[Pair, Method]) -> None:
    """In the results a method goes by its name."""
    seen: dict[tuple[str, str], str] = {}
    for (path, _), method in methods.items():
        first = seen.setdefault((method.name, method.momentum), path)
        if first != path:
            raise FedShuffleError(
                f"compare.methods: both {first!r} and {path!r} are called {method.name!r}. Give one"
                " another name."
            )


def _checked(config: Config, task: Task, model: nn.Module) -> Evaluation | Evaluations:
    evaluate = task.evaluate
    assert isinstance(evaluate, Evaluation | Evaluations)
    with imports.running("the evaluation before training", config.folder):
        evaluate.check(model)
    return evaluate


def _judge(evaluate: Evaluation | Evaluations, metric: str) -> Judge:
    known = evaluate.higher_is_better
    if metric not in known:
        raise unknown("metric", metric, known)
    return Judge(metric, known[metric])


def _majority(evaluate: Evaluation | Evaluations, metric: str) -> dict[str, float] | None:
    """The accuracy of always predicting the commonest class, and its standard error.

    Clients count as in the evaluation: by weight, and within a client every target alike.
    """
    parts = evaluate.parts if isinstance(evaluate, Evaluations) else (evaluate,)
    own = [part for part in parts if metric in part.names]
    if metric.removeprefix(own[0].prefix) not in ("accuracy", "top-1"):
        return None
    data = own[0].data
    targets = np.asarray(data.fields[-1]).reshape(len(data.fields[-1]), -1)
    counted = (targets != IGNORED).sum(1)
    each = np.add.reduceat(counted, data.offsets[:-1])  # of every client
    weights = np.repeat(np.repeat(data.weights / each, data.sizes), counted)
    _, classes = np.unique(targets[targets != IGNORED], return_inverse=True)
    share = float(np.bincount(classes, weights).max())
    error = math.sqrt(share * max(0.0, 1 - share) * float(weights @ weights))
    return {"share": share, "standard_error": error}


def assembled(plan: Plan, facts: Facts, command: str, seconds: float) -> dict[str, Any]:
    """All that is known by now."""
    comparison = plan.comparison
    done = [plan.ended(trial) for trial in plan.trials()]
    found = {
        "title": comparison.title,
        "command": command,
        "config": comparison.text or writing.toml(comparison.tables),
        "complete": all(e and e.outcome != "failed" for e in done) and not plan.unknown(),
        "seconds": seconds,
        "rounds": comparison.base.rounds,
        "metric": facts.target.metric,
        "higher_is_better": facts.target.higher_is_better,
        "majority": facts.majority,
        "judge": vars(facts.judge),
        "federation": facts.federation,
        "settings": _settings(comparison, facts),
        "versions": versions(),
        "curves": [_curve(plan, facts, curve) for curve in plan.curves()],
    }
    plain: dict[str, Any] = _finite(found)
    plain["warnings"] = [vars(warning) for warning in warnings(Compared(plain))]
    return plain


def _curve(plan: Plan, facts: Facts, curve: Curve) -> dict[str, Any]:
    method, setting = facts.methods[curve.pair], curve.setting
    tuning = plan.tuning(curve.pair) if curve.group == "own" else []
    runs = []
    for seed, trial in zip(plan.comparison.seeds, curve.trials, strict=True):
        ended = plan.ended(trial)
        if ended is not None and ended.outcome != "failed":
            run = {"seed": seed, "folder": f"runs/{trial.name}"}
            runs.append({**run, "diverged": ended.outcome == "diverged", "history": ended.history})
    return {
        "method": method.name,
        "label": label(method),
        "momentum": method.momentum,
        "group": curve.group,
        "step_size": setting.step_size,
        "client_step_sizes": [setting.step_size * s for s in facts.step_scales[curve.pair]],
        "weight_decay": setting.weight_decay,
        "clip": setting.clip,
        "tuning": [
            {
                **vars(trial.setting),
                "added": trial.setting not in plan.comparison.grid,
                "value": plan.value(trial),
                "diverged": (ended := plan.ended(trial)) is not None
                and ended.outcome == "diverged",
            }
            for trial in tuning
        ],
        "audit": facts.audits[curve.pair],
        "runs": runs,
    }


def _settings(comparison: Comparison, facts: Facts) -> dict[str, Any]:
    base, tuning = comparison.base, comparison.tuning
    plain = writing.plain(base)
    told = {
        "sampling": base.sampling,
        "work": _words(plain["work"]),
        "engine": base.engine,
        "model": _words(plain["model"]),
        "parameters": facts.parameters,
        "loss": _words(plain["loss"]),
        "data": _words(plain["data"]),
        "evaluation": _words(plain["evaluation"]),
        "server_step_size": _words(plain["server_step_size"]),
        "seeds": list(comparison.seeds),
    }
    if isinstance(base.step_size, Scheduled):
        schedule = {k: v for k, v in plain["step_size"].items() if k != "step_size"}
        told["step_size"] = _words(schedule)
    if comparison.tuned:
        data = tuning.data if isinstance(tuning.data, str) else tuning.data.path
        clients = "" if tuning.clients is None else f", at most {tuning.clients} clients"
        told["tuning"] = (
            f"{facts.judge.metric} on {data} data{clients} after {tuning.rounds} rounds, seed"
            f" {tuning.seed}; step sizes up to {tuning.widen:g} times beyond the grid's ends"
        )
    return told


def _words(value: Any) -> str:
    """Plain data for a person.

    >>> _words({"use": "torch.nn:Linear", "sizes": [64, 10]})
    'use torch.nn:Linear, sizes 64 10'
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_words, value))
    return str(value)


def _finite(value: Any) -> Any:
    """The same with None where a number is not finite, for which JSON has no word."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
