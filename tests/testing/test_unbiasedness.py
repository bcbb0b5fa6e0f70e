"""The audit against the mean over all cohorts, for local work and momentum that no check covers."""

from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle import MVR, GlobalMomentum, LocalWork, MissLast, audit, methods
from fedshuffle.methods import Plain
from fedshuffle.methods.servers import Average
from fedshuffle.sampling import Listed, Sampling, resolve
from fedshuffle.testing.problems import (
    OPTIMA,
    WORK,
    federation,
    limit_point,
    listed_cohorts,
    make_run,
    measured_weights,
    numbers,
    quadratic_clients,
)

NAMES = [  # the averaging methods; the conformance suite covers the others
    method.name
    for method in methods.available()
    if not (method.balanced_only or method.pooled)
    and isinstance(method.direction, Plain | MVR)
    and isinstance(method.server, Average)
    and "batch_size" not in method.work
]
SAMPLINGS: list[str | Sampling] = [
    "uniform:2",
    "independent:0.5,0.9,0.2,0.4",
    "one",
    Listed(4, [((0, 1), 0.25), ((2, 3), 0.5), ((1, 2, 3), 0.25)]),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    "work",
    [
        LocalWork(batch_size=2, interruption=MissLast()),
        LocalWork(batch_size=2, steps="min"),
        LocalWork(epochs=3, steps="mean"),
    ],
    ids=["unfinished", "min", "mean"],
)
def test_expected_update_has_the_weights_of_the_audit(
    name: str, sampling: str | Sampling, work: LocalWork
) -> None:
    method = methods.get(name).with_momentum(None)
    clients, work = federation(method), method.drop_fixed(work)
    found, _ = measured_weights(make_run(method, sampling, clients, work=work, step_size=2.0**-24))
    result = audit(clients, method, sampling, work)
    np.testing.assert_allclose(found, result.effective_weights, rtol=1e-5)


@pytest.mark.parametrize("momentum", [None, GlobalMomentum(0.3)], ids=["plain", "global"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", ["fedshuffle", "fedshuffle-gen"])
def test_expected_update_of_fedshuffle_is_that_of_full_participation_at_any_step_size(
    name: str, sampling: str | Sampling, momentum: GlobalMomentum | None
) -> None:
    method = methods.get(name).with_momentum(momentum)

    def after(sampling: str | Sampling, members: Any) -> torch.Tensor:
        run = make_run(method, sampling, federation(method), work=WORK, step_size=0.3)
        clients = quadratic_clients(run, np.ones(4), numbers(4, 3).numpy())
        full = make_run(method, "full", federation(method), work=WORK, step_size=0.3)
        settled = quadratic_clients(full, np.ones(4), numbers(4, 3).numpy())
        state = settled.run_round(full.start(numbers(3, seed=5)))  # the same for all, with momentum
        return clients.run_round(state, cohort=run.cohort(state.round, members)).x - state.x

    mean = torch.zeros(3, dtype=torch.float64)
    for members, probability in listed_cohorts(resolve(sampling, federation(method))):
        if len(members):
            mean += probability * after(sampling, members)
    everyone = after("full", np.arange(4))
    np.testing.assert_allclose(mean.numpy(), everyone.numpy(), rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("momentum", [MVR(0.3), GlobalMomentum(0.2)], ids=["mvr", "global"])
@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
def test_momentum_converges_where_the_audit_says(
    name: str, momentum: MVR | GlobalMomentum, sampling: str
) -> None:
    """Includes the shift that exact MVR brings under sampling."""
    method = methods.get(name).with_momentum(momentum)
    clients = federation(method)
    found = limit_point(method, sampling, np.ones(4), clients, WORK)
    weights = audit(clients, method, sampling, method.drop_fixed(WORK)).effective_weights
    assert found == pytest.approx(weights @ OPTIMA, abs=1e-3)
