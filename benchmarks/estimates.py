"""How far off clients count if their inclusion probabilities are estimated.

    python benchmarks/estimates.py [ROUNDS] [SAMPLING]

For 200 clients, the root mean square over clients and seeds of the relative error of the total
weight ``sum over t of 1{i in S_t} / p-hat_i(t)``, normalised to mean one.
"""

import sys

import numpy as np

from fedshuffle import Federation
from fedshuffle._arrays import FloatArray
from fedshuffle.probabilities import Participation, parse
from fedshuffle.sampling import Sampling, among_available, resolve

CLIENTS, SEEDS = 200, 12
OFTEN = np.tile([0.05, 0.1, 0.2, 0.5, 0.9], CLIENTS // 5)
RULES = ("known", "estimate:bayes", "estimate:fedau:50", "estimate:ewma:0.05")


def listed(values: FloatArray) -> str:
    return ",".join(f"{value:.6g}" for value in values)


_ON = 0.04 * OFTEN / (1 - OFTEN)
POPULATIONS = {
    "independent": f"independent:{listed(OFTEN)}",
    "markov": f"markov:on={listed(_ON)},off=0.04",
    "day and night": "cyclic:24:0.3",
    "drifting": f"drifting:{listed(OFTEN)}:{listed(OFTEN[::-1])}",
}


def error(sampling: Sampling, rule: str, rounds: int) -> float:
    """The error of a rule over all seeds."""
    squares = []
    for seed in range(SEEDS):
        cohorts = [sampling.draw(seed, round) for round in range(rounds)]
        total = np.zeros(CLIENTS)
        past = None
        if rule != "known":
            past = Participation(CLIENTS, parse(rule), cohorts.__getitem__)
        for round, cohort in enumerate(cohorts):
            p = past.probabilities(round, cohort) if past else sampling.p[cohort]
            total[cohort] += 1 / p
        squares.append((total / total.mean() - 1) ** 2)
    return float(np.sqrt(np.mean(squares)))


def main(rounds: int, text: str) -> None:
    clients = Federation.from_sizes([1] * CLIENTS)
    for name, there in POPULATIONS.items():
        sampling = among_available(resolve(text, clients), there, clients, rounds)
        print(name, {rule: round(error(sampling, rule, rounds), 3) for rule in RULES}, flush=True)


if __name__ == "__main__":
    given = [*sys.argv[1:], *("1000", "uniform:20")[len(sys.argv) - 1 :]]
    main(int(given[0]), given[1])
