"""Advice for the run that a config describes: what short runs measure, then what is proved."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from fedshuffle._arrays import count, number
from fedshuffle.auditing import Audit, audit
from fedshuffle.config import imports, probing, running
from fedshuffle.config.knowing import Known, Measured, Start, know
from fedshuffle.config.probing import Probe
from fedshuffle.config.running import Task
from fedshuffle.config.settings import Config, Scheduled
from fedshuffle.errors import FedShuffleError, failing_at
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.methods import MVR, Method
from fedshuffle.sampling import Optimal, Sampling
from fedshuffle.theory.advice import (
    COMPARED,
    Setting,
    StepAdvice,
    compare_steps,
    method_setting,
    step_advice,
)
from fedshuffle.theory.mvr import MVRStep, mvr_limit, mvr_setting, mvr_tune
from fedshuffle.theory.rates import Recursion, Regime, Tuned
from fedshuffle.theory.sampling_advice import Option, SamplingAdvice, sampling_advice
from fedshuffle.theory.sources import (
    AUDIT,
    COHORT,
    LARGER,
    MEASURED,
    METHOD,
    MVR_PROOF,
    MVR_THEOREM,
    PROBLEM,
    PROOF,
    ROUNDS,
    SAMPLING,
    TARGET,
    THEOREM,
    Number,
    Source,
    plain,
)
from fedshuffle.theory.step_sizes import StepLimit

_DRAWS = 4000
"""For audits that have to sample."""


@final
@dataclass(frozen=True, eq=False)
class Advice:
    """What short runs and the theory say of a run; every number has a source."""

    setting: dict[str, Any]
    """What is run: clients, method, sampling, rounds, step sizes."""
    probe: dict[str, Any] | None
    """Step sizes tried in short runs: the largest stable one and the best; None if none were."""
    problem: dict[str, Any]
    """The constants of the losses, and how they were found."""
    steps: list[dict[str, Any]]
    """For each method and regime: constants, limits, the tuned step, rounds to the target."""
    larger: list[dict[str, Any]]
    """How many times as large FedShuffle's steps may be as each other method's."""
    mvr: dict[str, Any]
    """Step size and momentum for FedShuffleMVR."""
    yours: dict[str, Any]
    """The config's own step size beside the limit."""
    sampling: dict[str, Any]
    """Samplings and cohort sizes by M and by predicted rounds."""
    audit: dict[str, Any]
    """Whether the config's method minimises the objective that was meant."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        names = [part.name for part in dataclasses.fields(self)]
        return {name: plain(getattr(self, name)) for name in names}


def advise(
    config: Config,
    *,
    clients: int = 50,
    points: int = 2,
    target: float = 0.01,
    probe: int = 10,
    progress: bool = False,
) -> Advice:
    """What short runs and the theory advise for a run.

    Args:
        config: the run.
        clients: at most so many are measured, where constants are not known.
        points: at so many models: the start, and others on the way of the config's own training.
        target: rounds are predicted until the gap (for losses that are not convex the squared
            gradient) is this share of what it is at the start.
        probe: the rounds of each short run that tries a step size; 0 to try none.
        progress: show a bar while measuring.
    """
    count(clients, "clients")
    count(points, "points")
    if probe != 0:
        count(probe, "probe")
    if not 0.0 < number(target, "target") < 1.0:
        raise FedShuffleError(f"target is {target}, but must be a share between 0 and 1.")
    with imports.importable(config.folder):
        task = running.task(dataclasses.replace(config, evaluation=None))
        method = running._method(config)
        sampling = running._sampling(config, task.federation)
        model = running.model(config)
        with failing_at("trying step sizes"):
            tried = _probe(config, task, model, method, sampling, probe, clients) if probe else None
        with failing_at("measuring the problem"):
            found = know(
                config,
                task.federation,
                model,
                task.loss,
                method,
                sampling,
                clients=clients,
                points=points,
                progress=progress,
            )
        return _Adviser(config, task.federation, method, sampling, found, target, tried).all()


def _probe(
    config: Config,
    task: Task,
    model: nn.Module,
    method: Method,
    sampling: Sampling,
    rounds: int,
    clients: int,
) -> Probe:
    return probing.probe(
        model,
        task.federation,
        task.loss,
        method,
        sampling,
        config.work,
        step_size=_first(config.step_size, config.rounds),
        server_step_size=_first(config.server_step_size, config.rounds),
        seed=config.seed,
        rounds=min(rounds, config.rounds),
        clients=clients,
    )


class _Adviser:
    def __init__(
        self,
        config: Config,
        federation: Federation,
        method: Method,
        sampling: Sampling,
        found: Known | Measured,
        target: float,
        probe: Probe | None = None,
    ) -> None:
        self.config, self.federation = config, federation
        self.method, self.sampling = method, sampling
        self.found, self.target, self.probe = found, target, probe
        self.eta_g = _first(config.server_step_size, config.rounds)
        self.meant: Start = found.start()

    def all(self) -> Advice:
        steps, tables, refused = self._steps()
        mine = {advice.regime: advice for advice in steps if advice.method == "fedshuffle"}
        larger = [
            self._larger(mine[advice.regime], advice)
            for advice in steps
            if advice.method in COMPARED and advice.method != "fedshuffle" and advice.regime in mine
        ]
        mvr = self._mvr()
        yours = self._yours(steps, mvr)
        return Advice(
            setting=self._setting(),
            probe=None if self.probe is None else self._probed(self.probe, yours),
            problem=self._problem(),
            steps=[*tables, *refused],
            larger=larger,
            mvr=mvr,
            yours=yours,
            sampling=self._sampling(mine),
            audit=self._audit(),
        )

    def _setting(self) -> dict[str, Any]:
        return {
            "clients": len(self.federation),
            "examples": int(self.federation.sizes.sum()),
            "method": self.method.name,
            "momentum": self.method.momentum,
            "sampling": repr(self.sampling),
            "rounds": self.config.rounds,
            "server_step_size": self.eta_g,
            "target": self.target,
        }

    def _probed(self, probe: Probe, yours: dict[str, Any]) -> dict[str, Any]:
        best, times = probe.best, yours["times_the_limit"]
        ratio = None
        if best is not None and times is not None:  # of the best one to what is proved
            ratio = Number(times.value * best / yours["step_size"], MEASURED)
        return {
            "rounds": probe.rounds,
            "clients": probe.clients,
            "local_steps": probe.steps,
            "start": Number(probe.start, MEASURED),
            "tried": [
                {
                    "step_size": size,
                    "loss": Number(loss, MEASURED),
                    "stable": size in probe.stable,
                }
                for size, loss in probe.losses.items()
            ],
            "largest_stable": _measured(probe.largest),
            "best": _measured(best),
            "best_times_the_limit": ratio,
        }

    # The problem ------------------------------------------------------------------------------

    def _problem(self) -> dict[str, Any]:
        if isinstance(self.found, Known):
            named, what = self._known(self.found)
            notes = ["for the objective that was meant, in the form for convex losses"]
        else:
            named, what, notes = self._measured(self.found)
        start = {"gap": self.meant.gap, "gradient": self.meant.gradient}
        if math.isfinite(self.meant.distance):
            start["distance"] = self.meant.distance
        return {
            "how": self.found.how,
            "what": what,
            "regimes": list(self.found.regimes),
            "constants": named,
            "start": {name: Number(value, PROBLEM) for name, value in start.items()},
            "notes": notes,
        }

    def _known(self, found: Known) -> tuple[dict[str, Number], str]:
        exact = found.constants()
        w = exact.w_hat
        values = {
            "L": exact.L,
            "mu": exact.mu,
            "G": exact.G,
            "B": exact.B,
            "sigma": math.sqrt(float(w @ exact.sigma**2)),
            "P": float(exact.P.max()),
            "delta": exact.delta,
        }
        named = {
            name: Number(value, PROBLEM, note=str(exact.claims[name]))
            for name, value in values.items()
        }
        return named, found.kind.name

    def _measured(self, found: Measured) -> tuple[dict[str, Number], str, list[str]]:
        seen = found.estimate
        estimates = {
            "L": seen.L,
            "mu": seen.mu,
            "G": seen.G,
            "sigma": seen.sigma_rms,
            "delta": seen.delta,
        }
        named = {
            name: Number(one.value, PROBLEM, one.uncertainty, one.note)
            for name, one in estimates.items()
        }
        for name, value in (("B", 1.0), ("P", 0.0)):
            named[name] = Number(value, PROBLEM, note="chosen; G and sigma are the least for it")
        what = f"measured, since {found.why}"
        seen_by = f"{len(seen.clients)} of {len(self.federation)} clients, {seen.points} point(s)"
        return named, what, [seen_by, *found.notes, "f* is taken to be 0 or more"]

    # Step sizes -------------------------------------------------------------------------------

    def _steps(self) -> tuple[list[StepAdvice], list[dict[str, Any]], list[dict[str, Any]]]:
        names = [*COMPARED]
        own = self.method.name not in names and self.method.momentum == "none"
        methods: list[str | Method] = [*names, *([self.method] if own else [])]
        found, tables, refused = [], [], []
        for method in methods:
            name = method if isinstance(method, str) else method.name
            try:
                setting = method_setting(
                    self.federation, method, self.sampling, self.config.work, seed=self.config.seed
                )
                for regime in self.found.regimes:
                    advice = self._step(name, setting, regime)
                    found.append(advice)
                    tables.append(self._step_table(advice))
            except FedShuffleError as error:
                refused.append(
                    {"method": name, "regime": None, "covered": False, "notes": [str(error)]}
                )
        return found, tables, refused

    def _step(self, name: str, setting: Setting, regime: Regime) -> StepAdvice:
        w_hat = setting.constants.w_hat
        start, measured = self.found.start(w_hat).of(regime), self.meant.measured(regime)
        known = 0 < start < math.inf and measured > 0
        return step_advice(
            setting,
            self.found.problem(regime, w_hat),
            method=name,
            regime=regime,
            server_step_size=self.eta_g,
            rounds=self.config.rounds,
            epsilon=self.target * measured if known else None,
            start=start if known else None,
        )

    def _step_table(self, advice: StepAdvice) -> dict[str, Any]:
        found = advice.setting.constants
        table: dict[str, Any] = {
            "method": advice.method,
            "regime": advice.regime,
            "covered": advice.setting.covered,
            "notes": list(advice.setting.notes),
            "constants": {
                "W": Number(found.W, METHOD),
                "M_1": Number(found.M_1, METHOD, note=found.how),
                "M_2": Number(found.M_2, METHOD),
            },
            "theorem": None if advice.theorem is None else _limit(advice.theorem, THEOREM),
            "proof": _limit(advice.proof, PROOF),
            "tuned": None,
            "target": None,
        }
        if advice.tuned is not None:
            table["tuned"] = _tuned(advice.tuned, ROUNDS)
        if advice.target is not None:
            table["target"] = _tuned(advice.target, TARGET)
        return table

    def _larger(self, mine: StepAdvice, other: StepAdvice) -> dict[str, Any]:
        found = compare_steps(mine, other)
        names = ("step_size", "largest_client_step", "effective")
        ratios = {name: Number(getattr(found, name), LARGER) for name in names}
        return {"than": found.than, "regime": other.regime, **ratios}

    def _yours(self, steps: list[StepAdvice], mvr: dict[str, Any]) -> dict[str, Any]:
        size = _first(self.config.step_size, self.config.rounds)
        own = [advice for advice in steps if advice.method == self.method.name]
        limits = {advice.proof.step_size: PROOF for advice in own}
        if isinstance(self.method.direction, MVR):
            limits = {mvr["proof"]["limit"]["step_size"].value: MVR_PROOF} if "proof" in mvr else {}
        elif self.method.momentum != "none":
            limits = {}
        times = Number(size / max(limits), limits[max(limits)]) if limits else None
        return {"step_size": size, "times_the_limit": times}

    def _mvr(self) -> dict[str, Any]:
        notes = ["proven for one client a round, drawn with the probabilities w, and eta_g = 1"]
        work: LocalWork = self.config.work
        if isinstance(work.epochs, EpochRange):
            notes.append(f"epochs change: taken for {work.epochs.high}")
            work = dataclasses.replace(work, epochs=work.epochs.high)
        start = self.meant.gap
        try:
            problem, delta, where = self.found.mvr()
            setting = mvr_setting(self.federation, problem, delta, work)
            notes += [where] if where else []
            if setting.epochs * setting.delta < setting.L:
                notes.append("E < L / delta: no gain over momentum without local steps is shown")
            table: dict[str, Any] = {"covered": True, "notes": notes}
            for bound, source in (("theorem", MVR_THEOREM), ("proof", MVR_PROOF)):
                limit = mvr_limit(setting, bound=bound)  # type: ignore[arg-type]
                table[bound] = {"limit": _mvr_step(limit, source), "tuned": None}
                if start > 0:
                    tuned = mvr_tune(self.config.rounds, setting, start=start, bound=bound)  # type: ignore[arg-type]
                    table[bound]["tuned"] = _mvr_step(tuned, source)
        except FedShuffleError as error:
            return {"covered": False, "notes": [*notes, str(error)]}
        return table

    # Sampling ---------------------------------------------------------------------------------

    def _sampling(self, mine: dict[Regime, StepAdvice]) -> dict[str, Any]:
        if not mine:
            return {"covered": False, "notes": ["no step size is advised for fedshuffle"]}
        regime = next(regime for regime in self.found.regimes if regime in mine)
        start, measured = self.meant.of(regime), self.meant.measured(regime)
        if not (0 < start < math.inf and measured > 0):
            return {"covered": False, "notes": ["training starts at the optimum"]}
        setting = mine[regime].setting
        recursion = Recursion.of(
            setting.constants,
            self.found.problem(regime),
            regime=regime,
            server_step_size=self.eta_g,
        )
        expected = self.sampling.b if isinstance(self.sampling, Optimal) else None
        cohort = expected or max(1, round(float(self.sampling.p.sum())))
        advice = sampling_advice(
            self.federation, recursion, cohort, epsilon=self.target * measured, start=start
        )
        return self._sampling_table(advice, regime)

    def _sampling_table(self, advice: SamplingAdvice, regime: Regime) -> dict[str, Any]:
        return {
            "covered": True,
            "regime": regime,
            "cohort": advice.cohort,
            "fastest": advice.fastest.sampling,
            "options": [_option(option) for option in advice.options],
            "sizes": [[_option(option) for option in row] for row in advice.sizes],
            "pays_until": {kind: Number(b, COHORT) for kind, b in advice.pays_until.items()},
            "notes": ["for fedshuffle; what is said of best also holds for optimal:B"],
        }

    def _audit(self) -> dict[str, Any]:
        try:
            found: Audit = audit(
                self.federation, self.method, self.sampling, self.config.work, draws=_DRAWS
            )
        except FedShuffleError as error:
            return {"consistent": None, "verdict": str(error), "total_variation": None}
        wrong = found.total_variation
        said = {
            True: "consistent: it minimises the objective you meant",
            None: "undecided: no bias larger than the sampling error was seen",
            False: f"not consistent: {wrong:.2%} of the objective is in the wrong place",
        }
        return {
            "consistent": found.consistent,
            "verdict": said[found.consistent],
            "total_variation": Number(wrong, AUDIT),
        }


def _first(size: float | Scheduled, rounds: int) -> float:
    """A step size in the first round."""
    return float(size.over(rounds)(0) if isinstance(size, Scheduled) else size)


def _measured(size: float | None) -> Number | None:
    return None if size is None else Number(size, MEASURED)


def _limit(limit: StepLimit, source: Source) -> dict[str, Any]:
    names = ("step_size", "eta_l", "largest_client_step", "effective")
    numbers = {name: Number(getattr(limit, name), source) for name in names}
    return {**numbers, "binding": limit.binding}


def _tuned(tuned: Tuned, source: Source) -> dict[str, Any]:
    return {
        "step_size": Number(tuned.step_size, source),
        "rounds": Number(tuned.rounds, source),
        "bound": Number(tuned.value, source),
        "quantity": tuned.quantity,
    }


def _mvr_step(step: MVRStep, source: Source) -> dict[str, Any]:
    names = ("step_size", "eta_l", "a", "server_step_size")
    numbers = {name: Number(getattr(step, name), source) for name in names}
    return {**numbers, "bound": Number(step.value, source), "binding": step.binding}


def _option(option: Option) -> dict[str, Any]:
    return {
        "sampling": option.sampling,
        "cohort": option.cohort,
        "M": Number(option.M, SAMPLING),
        "rounds": Number(option.rounds, COHORT),
        "step_size": Number(option.step_size, COHORT),
    }
