"""Whether a method is reproducible: after a resume, on any engine or workers, with a seed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedshuffle import engines
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method
from fedshuffle.state import State
from fedshuffle.testing.clients import make_run
from fedshuffle.testing.problems import partial_sampling, regression, states, trained
from fedshuffle.testing.report import ensure, equal
from fedshuffle.training.rounds import Run, run_round

_WORK = LocalWork(epochs=2, batch_size=2)
_STEP_SIZE = 0.05
_ROUNDS = 6


def resume(method: Method) -> None:
    """Stopped in the middle and resumed from the checkpoint, it ends with the same bits."""

    def final(rounds: int, out: Path, resume: bool = False) -> Tensor:
        model = trained(method, rounds, _WORK, seed=3, out=out, resume=resume).model
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    with tempfile.TemporaryDirectory() as folder:
        whole = final(_ROUNDS, Path(folder, "whole"))
        final(_ROUNDS // 2, Path(folder, "parts"))
        parts = final(_ROUNDS, Path(folder, "parts"), resume=True)
    equal(parts, whole, 0.0, "resumed in the middle, the model after the last round")


def workers(method: Method) -> None:
    """Split over two threads or two processes, it gives the same model up to rounding."""
    _agree(method, "sequential", ("sequential:2", "sequential:2:processes"), "full")


def agreement(method: Method) -> None:
    """Every engine agrees with the reference, with sampled clients and unequal steps."""
    others = ("sequential", "vectorized", "sequential:2")
    _agree(method, "reference", others, partial_sampling(method))


def _agree(method: Method, reference: str, others: tuple[str, ...], sampling: str) -> None:
    problem, clients = regression(method)
    run = make_run(method, sampling, clients, work=_WORK, step_size=_STEP_SIZE, seed=1)

    def final(engine: str) -> dict[str, Tensor]:
        return _parts(states(problem, run, _ROUNDS, engines.make(engine, problem))[-1])

    expected = final(reference)
    for name in others:
        found = final(name)
        for part, value in expected.items():
            what = f"{part} after {_ROUNDS} rounds by the engine {name}, against {reference}"
            equal(found.get(part, torch.nan), value, 1e-10 * (1 + float(value.abs().max())), what)


def _parts(state: State) -> dict[str, Tensor]:
    """All tensors of a state."""
    parts = {"the model": state.x}
    owners = {"direction": state.method_state, "server optimiser": state.optimiser_state}
    for owner, tensors in owners.items():
        parts |= {f"the {owner}'s {name!r}": tensor for name, tensor in tensors.items()}
    if state.clients is not None:
        parts["the clients' state"] = state.clients.rows(np.arange(len(state.clients)))
    return parts


def purity(method: Method) -> None:
    """The same seed gives the same bits, another seed another model if anything is random; and a
    round leaves the state before it as it was.
    """
    problem, clients = regression(method)

    def trajectory(seed: int, elsewhere: int) -> tuple[Tensor, list[object]]:
        given = {"work": _WORK, "step_size": _STEP_SIZE, "seed": seed}
        run = make_run(method, partial_sampling(method), clients, **given)
        with torch.random.fork_rng([]):
            torch.manual_seed(elsewhere)  # must not matter
            found = states(problem, run, _ROUNDS)
        return torch.stack([state.x for state in found]), _drawn(run)

    first, drawn = trajectory(0, 1)
    other, others = trajectory(1, 1)
    equal(trajectory(0, 2)[0], first, 0.0, "the models of another run with the same seed")
    if drawn == others:
        equal(other, first, 0.0, "nothing is random, but with another seed the models")
    else:
        ensure(
            not torch.equal(first, other),
            "another seed draws other clients or minibatches: expected another model, found the"
            " same.",
        )
    run = make_run(method, partial_sampling(method), clients, work=_WORK)
    before = states(problem, run, 2)[-1]
    copies = {name: tensor.clone() for name, tensor in _parts(before).items()}
    run_round(engines.make("sequential", problem), [run], [before])
    for name, tensor in _parts(before).items():
        equal(tensor, copies[name], 0.0, f"a round must not change the state before it: {name}")


def _drawn(run: Run) -> list[object]:
    """All cohorts, and the minibatches of their clients."""
    drawn: list[object] = []
    for round in range(_ROUNDS):
        cohort = run.cohort(round)
        for client, steps in zip(cohort.clients.tolist(), cohort.done.tolist(), strict=True):
            stream = run.workload.minibatches(client, steps, run.seed, round)
            drawn.append((client, [batch.tolist() for batch in stream]))
    return drawn
