"""fedshuffle: rounds of plain FedAvg on one of its engines (the last argument)."""

import sys

import numpy as np
import torch
from models import model, tensors
from turns import Turns, play
from work import CLIENTS, COHORT, load
from work import cohort as drawn

from fedshuffle import Federation, LocalWork, losses
from fedshuffle._arrays import IntArray
from fedshuffle.engines import Engine, Problem, choose, make
from fedshuffle.sampling.base import Cohorts, EqualPairCorrelation
from fedshuffle.state import State
from fedshuffle.training.rounds import Run
from fedshuffle.training.rounds import run_round as play_round


class Drawn(EqualPairCorrelation):
    """Uniform cohorts, drawn beforehand: the same as those of the bare loop."""

    def __init__(self) -> None:
        self.p = np.full(CLIENTS, COHORT / CLIENTS)
        self.rho = (COHORT - 1) * CLIENTS / (COHORT * (CLIENTS - 1))

    def draw(self, seed: int, round: int) -> IntArray:
        return drawn(round)

    def cohorts(self, limit: int) -> Cohorts | None:
        return None


def engine(name: str, problem: Problem, run: Run) -> Engine:
    """The engine of that name, or the one that ``auto`` chooses for the first round."""
    request = run.local_training(State(problem.start))
    if name != "auto" or request is None:
        return make(name, problem)
    return choose(problem, request).engine


def contestant(turns: Turns) -> None:
    folder, work, name = sys.argv[1:]
    data = load(folder, work)
    torch.set_num_threads(1)
    clients = Federation.from_arrays(*tensors(data), sizes=data.sizes)
    problem = Problem(model(work), losses.cross_entropy, clients)
    settings = LocalWork(epochs=2, batch_size=32)
    run = Run(clients, "fedavg-rr", Drawn(), settings, step_size=0.05)
    chosen = engine(name, problem, run)
    turns.note = f"engine {chosen.name}."
    states = [State(problem.start)]
    for round in turns:
        states = play_round(chosen, [run], states)
        turns.steps += int(run.cohort(round).done.sum())


if __name__ == "__main__":
    play(contestant)
