"""From settings to transforms and a budget, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle import Federation, LocalWork, methods
from fedshuffle._arrays import IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.local_work import Interruption
from fedshuffle.methods import Cohort, FedShuffleGen, InclusionProbability, Method
from fedshuffle.methods.averaging import own_steps
from fedshuffle.privacy import Clip, GaussianNoise, Mechanism, Privacy, TreeNoise, bind
from fedshuffle.sampling import Full, Independent, One, Sampling, Uniform, parse
from fedshuffle.sampling.base import EqualPairCorrelation
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform

FEDERATION = Federation.from_sizes([10, 20, 30, 40])
PRIVACY = Privacy(clip=1.0, noise=1.0)


def bound(
    privacy: Privacy = PRIVACY,
    method: str | Method = "fedshuffle",
    sampling: str | Sampling = "full",
    work: LocalWork | None = None,
    rounds: int | None = 10,
    transforms: tuple[Transform, ...] = (),
) -> Mechanism:
    own = methods.get(method)
    drawn = parse(sampling, FEDERATION) if isinstance(sampling, str) else sampling
    workload = own.local_work(work or LocalWork()).on(FEDERATION.sizes)
    return bind(privacy, own, FEDERATION, drawn, workload, rounds, transforms)


EPSILON = Privacy(clip=1.0, epsilon=1.0, delta=1e-3)


def own_weights(cohort: Cohort) -> Any:
    return cohort.weight * 2.0


OWN = replace(
    methods.get("fedshuffle"),
    name="own",
    averaging=FedShuffleGen(own_steps, own_weights, InclusionProbability()),
)


def share_of_the_cohort(cohort: Cohort) -> Any:
    return cohort.weight / cohort.weight.sum()


def longest_of_the_cohort(cohort: Cohort) -> Any:
    return np.full(len(cohort.clients), float(cohort.planned.max()))


class SlowestSetsThePace(Interruption):
    random = False

    def done(self, planned: IntArray, clients: IntArray, seed: int, round: int) -> IntArray:
        return np.full_like(planned, planned.min())


def own(**rules: Any) -> Method:
    method = methods.get("fedshuffle")
    return replace(method, name="own", averaging=replace(method.averaging, **rules))


WEIGHTED = Privacy(clip=1.0, noise=1.0, weighted=True)


class Remembers(Transform):
    def client(self, updates: torch.Tensor, state: object, context: ClientContext) -> Message:
        return Message(updates)

    def server(
        self, update: torch.Tensor, context: ServerContext
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return update, {"sum": update}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "fedavg"}, "fixed denominator.*use fedavg.fedshuffle"),
        ({"method": "fedadam"}, "depends on the cohort.*use fedadam.fedshuffle"),
        ({"method": "fednova-original"}, "EffectiveSteps.*use fednova-original.fedshuffle"),
        ({"method": "scaffold+fedshuffle"}, "keeps a vector at every client.*without noise"),
        ({"method": "mifa"}, "keeps a vector at every client.*such as fedshuffle"),
        ({"method": "fedlin+fedshuffle"}, "full gradients.*without noise"),
        ({"method": "mime+fedshuffle"}, "without noise"),
        ({"method": "fedshuffle-mvr"}, "full gradients.*without noise"),
        ({"sampling": "optimal:2"}, "norms of their updates"),
        ({"work": LocalWork(steps="min")}, "steps='min' depends on the cohort"),
        ({"method": OWN}, r"own weights clients by own_weights.*weighted=True"),
        (
            {"method": own(weight=share_of_the_cohort), "privacy": WEIGHTED},
            "own computes the weight.*from the whole cohort",
        ),
        ({"method": own(step_normalisation=longest_of_the_cohort)}, "from the whole cohort"),
        ({"work": LocalWork(interruption=SlowestSetsThePace())}, "from the whole cohort"),
        ({"transforms": (Remembers(),)}, "before it has noise"),
        ({"privacy": EPSILON, "rounds": 0}, "number of rounds is 0"),
        ({"privacy": EPSILON, "rounds": None}, "give rounds, or noise"),
        (
            {"privacy": Privacy(clip=1.0, noise=1.0, min_separation=4), "sampling": "uniform:2"},
            "uniform:2 may draw a client again after 1 round, but .*min_separation=4",
        ),
    ],
)
def test_what_is_not_private_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message) as raised:
        bound(**settings)
    assert "\n" not in str(raised.value)


def test_momentum_from_a_further_sum_is_refused() -> None:
    method = methods.get("fedshuffle").with_momentum(methods.GlobalMomentum())
    with pytest.raises(FedShuffleError, match="further sum of updates"):
        bound(method=method)


@pytest.mark.parametrize("method", methods.available(), ids=lambda method: method.name)
def test_a_method_is_private_or_refused(method: Method) -> None:
    """No method of the library that sends more than its update is accepted."""
    direction = method.direction
    more = direction.client_state or direction.trips > 1 or direction.full_gradients > 0
    fixed = method.averaging.normaliser == InclusionProbability() and not method.pooled
    try:
        bound(method=method)
    except FedShuffleError:
        assert more or not fixed
    else:
        assert not more
        assert fixed
        assert direction.up == 1


def test_weights_of_the_user_s_own_are_clipped_after_weighting() -> None:
    found = bound(Privacy(clip=3.0, noise=2.0, weighted=True), OWN)
    assert (found.sensitivity, found.noise_std) == (3.0, 6.0)
    assert found.transforms == (Clip(3.0, weighted=True), GaussianNoise(6.0))
    assert found.budget.contributions.tolist() == [1.0] * 4


def test_the_settings_describe_the_noise() -> None:
    found = bound(Privacy(clip=1.0, epsilon=5.0, delta=1e-3))
    assert found.describe() == {
        "privacy": repr(found.privacy),
        "privacy_noise": found.budget.noise,
        "privacy_sensitivity": pytest.approx(0.4),
        "privacy_delta": 1e-3,
    }
    assert found.budget.spent(10) == pytest.approx(5.0, rel=1e-6)
    assert found.budget.affordable() == 10


def test_without_a_delta_it_is_below_one_over_the_clients() -> None:
    assert bound().budget.delta == pytest.approx(4**-1.1)
    with pytest.warns(UserWarning, match=r"delta of privacy is 0.3.*well below 0.25"):
        bound(Privacy(clip=1.0, noise=1.0, delta=0.3))


class Rotation(EqualPairCorrelation):
    """Every client in every fourth round, in turn: nobody draws."""

    min_separation = 4
    rho = 0.0

    def __init__(self) -> None:
        self.p = np.full(4, 0.25)

    def __repr__(self) -> str:
        return "rotation"

    def draw(self, seed: int, round: int) -> IntArray:
        return np.array([round % 4])


def test_correlated_noise_where_nobody_draws() -> None:
    privacy = Privacy(clip=1.0, noise=2.0, min_separation=4)
    found = bound(privacy, sampling=Rotation())
    assert found.transforms == (Clip(1.0), TreeNoise(2.0 * 0.4 / 0.25, 4))
    assert found.budget.amplification == "none"
    every_round = bound(replace(privacy, min_separation=1), sampling=Rotation())
    assert found.budget.spent(12) < every_round.budget.spent(12)


@pytest.mark.parametrize(
    ("sampling", "amplification"),
    [
        ("full", "none"),
        ("uniform:2", "uniform"),
        ("uniform:4", "none"),
        ("importance:2", "poisson"),
        (Independent([0.1] * 4), "poisson"),
        (One([0.25] * 4), "none"),
        ("ais:2", "none"),
        ("stratified:2:2", "none"),
        (Rotation(), "none"),
        (Full(4), "none"),
    ],
    ids=str,
)
def test_amplification_is_claimed_for_two_samplings(
    sampling: str | Sampling, amplification: str
) -> None:
    assert bound(sampling=sampling).budget.amplification == amplification


@pytest.mark.parametrize("sampling", [Uniform(4, 2), Independent([0.1] * 4)], ids=str)
def test_no_amplification_where_the_server_does_not_draw(sampling: Sampling) -> None:
    here = bound(sampling=sampling).budget
    elsewhere = bound(replace(PRIVACY, server_draws=False), sampling=sampling).budget
    assert elsewhere.amplification == "none"
    assert elsewhere.spent(3) >= here.spent(3)


def test_a_subclass_may_draw_otherwise_so_nothing_is_claimed() -> None:
    class Mine(Independent):
        def draw(self, seed: int, round: int) -> IntArray:
            return np.arange(4)

    assert bound(sampling=Mine([0.5] * 4)).budget.amplification == "none"


def test_clients_that_may_not_reply_have_larger_weights() -> None:
    sampling, method = Independent([0.5] * 4), methods.get("fedshuffle")
    workload = method.local_work(LocalWork()).on(FEDERATION.sizes)
    replies = [1.0, 1.0, 1.0, 0.5]
    found = bind(PRIVACY, method, FEDERATION, sampling, workload, 10, (), replies)
    assert found.sensitivity == pytest.approx(0.4 / (0.5 * 0.5))
    assert found.budget.probabilities.tolist() == [0.5] * 4
