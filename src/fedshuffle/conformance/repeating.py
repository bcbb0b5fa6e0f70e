"""Whether a method does the same again: resumed, by another engine or workers, with a seed."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedshuffle import engines, losses
from fedshuffle.conformance.clients import bound
from fedshuffle.conformance.problems import regression, sampled, states
from fedshuffle.conformance.report import ConformanceError, equal
from fedshuffle.engines import Problem
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.rounds import Run, play
from fedshuffle.state import State
from fedshuffle.training import train

_WORK = LocalWork(epochs=2, batch_size=2)
_STEP_SIZE = 0.05
_ROUNDS = 6


def resume(method: Method) -> None:
    """Stopped in the middle and gone on from the checkpoint, it ends with the same bits."""
    problem, clients = regression(method)
    bound(method, sampled(method), clients, work=_WORK)

    def trained(rounds: int, out: Path, resume: bool) -> Tensor:
        result = train(
            problem.replica(),
            clients,
            loss=losses.squared_error,
            rounds=rounds,
            method=copy.deepcopy(method),  # a new process knows nothing of the old one's objects
            sampling=sampled(method),
            work=_WORK,
            step_size=_STEP_SIZE,
            seed=3,
            out=out,
            resume=resume,
        )
        return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])

    with tempfile.TemporaryDirectory() as folder:
        whole = trained(_ROUNDS, Path(folder, "whole"), resume=False)
        trained(_ROUNDS // 2, Path(folder, "parts"), resume=False)
        parts = trained(_ROUNDS, Path(folder, "parts"), resume=True)
    equal(parts, whole, 0.0, "resumed in the middle, the model after the last round")


def workers(method: Method) -> None:
    """Split over two threads or two processes, it gives the same model but for rounding."""
    _agree(method, "lean", ("lean:2", "lean:2:processes"), "full")


def agreement(method: Method) -> None:
    """Every engine gives what the reference gives, with sampled clients and unequal steps."""
    _agree(method, "loop", ("lean", "lanes", "lean:2"), sampled(method))


def _agree(method: Method, reference: str, others: tuple[str, ...], sampling: str) -> None:
    problem, clients = regression(method)
    run = bound(method, sampling, clients, work=_WORK, step_size=_STEP_SIZE, seed=1)
    expected = _final(problem, run, reference)
    for name in others:
        found = _final(problem, run, name)
        for part, value in expected.items():
            what = f"{part} after {_ROUNDS} rounds by the engine {name}, beside {reference}"
            equal(found.get(part, torch.nan), value, 1e-10 * (1 + float(value.abs().max())), what)


def _final(problem: Problem, run: Run, engine: str) -> dict[str, Tensor]:
    return _parts(states(problem, run, _ROUNDS, engines.make(engine, problem))[-1])


def _parts(state: State) -> dict[str, Tensor]:
    """All that a state holds."""
    parts = {"the model": state.x}
    parts |= {f"the memory {name!r}": tensor for name, tensor in state.memory.items()}
    if state.clients is not None:
        parts["what clients keep"] = state.clients.rows(np.arange(len(state.clients)))
    return parts


def purity(method: Method) -> None:
    """The same seed gives the same bits, another seed another model if anything is random; and a
    round leaves the state before it as it was.
    """
    problem, clients = regression(method)

    def trajectory(seed: int, elsewhere: int) -> tuple[Tensor, list[object]]:
        given = {"work": _WORK, "step_size": _STEP_SIZE, "seed": seed}
        run = bound(method, sampled(method), clients, **given)
        with torch.random.fork_rng([]):
            torch.manual_seed(elsewhere)  # of no concern to a method
            found = states(problem, run, _ROUNDS)
        return torch.stack([state.x for state in found]), _drawn(run)

    (first, drawn), (again, _), (other, others) = (
        trajectory(0, 1),
        trajectory(0, 2),
        trajectory(1, 1),
    )
    equal(again, first, 0.0, "the models of another run with the same seed")
    if drawn == others:
        equal(other, first, 0.0, "nothing is random, and yet with another seed the models")
    elif torch.equal(first, other):
        raise ConformanceError(
            "another seed draws other clients or minibatches: expected another model, found the"
            " same."
        )
    _leaves_alone(problem, bound(method, sampled(method), clients, work=_WORK))


def _drawn(run: Run) -> list[object]:
    """All cohorts, and the minibatches of their clients."""
    drawn: list[object] = []
    for round in range(_ROUNDS):
        cohort = run.cohort(round)
        for client, steps in zip(cohort.clients.tolist(), cohort.done.tolist(), strict=True):
            stream = run.workload.stream(client, steps, run.seed, round)
            drawn.append((client, [batch.tolist() for batch in stream]))
    return drawn


def _leaves_alone(problem: Problem, run: Run) -> None:
    before = states(problem, run, 2)[-1]
    kept = {name: tensor.clone() for name, tensor in _parts(before).items()}
    play(engines.make("lean", problem), [run], [before])
    for name, tensor in _parts(before).items():
        equal(tensor, kept[name], 0.0, f"a round must not change the state before it: {name}")
