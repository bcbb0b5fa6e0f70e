import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshuffle import (
    MVR,
    AtMost,
    EpochRange,
    Federation,
    FedShuffleError,
    FedShuffleGen,
    GlobalMomentum,
    LocalWork,
    Method,
    MissLast,
    RandomStop,
    audit,
    methods,
)
from fedshuffle.auditing.effective_weights import monte_carlo
from fedshuffle.auditing.subject import Subject
from fedshuffle.methods import Cohort, Custom, InclusionProbability
from fedshuffle.methods.averaging import objective_weight, own_steps
from fedshuffle.sampling import Independent, One, Sampling, Uniform, parse
from tests import brute
from tests.brute import Floats
from tests.sampling.test_sampling import samplings

THREE = Federation.from_sizes([1, 2, 3])


def normalised(values: object) -> Floats:
    array = np.array(values, dtype=np.float64)
    return array / float(array.sum())


@pytest.mark.parametrize(
    ("method", "sampling", "want"),
    [
        # The numbers of the reading of the paper.
        ("fedavg-rr", "full", [1, 4, 9]),
        ("fedavg", "full", [1, 4, 9]),
        ("fedshuffle", "full", [1, 2, 3]),
        ("fednova", "full", [1, 2, 3]),
        ("fednova-rr", "full", [1, 2, 3]),
        ("fednova-original", "full", [1, 2, 3]),
        ("fedavg-min", "full", [1, 2, 3]),
        ("fedavg-mean", "full", [1, 2, 3]),
        ("fedshuffle-so", "uniform:2", [7 / 36, 16 / 45, 9 / 20]),
        ("fedavg-rr", "uniform:2", [1 * 7 / 36, 2 * 16 / 45, 3 * 9 / 20]),
        # One client uniformly removes FedAvg's bias for batches of one; one by size restores it.
        ("fedavg-rr", "uniform:1", [1, 2, 3]),
        ("fedavg-rr", "one", [1, 4, 9]),
        ("fedshuffle", "uniform:2", [1, 2, 3]),
        ("fedshuffle", "importance:2", [1, 2, 3]),
        ("fedshuffle", "one", [1, 2, 3]),
        ("fedshuffle", "ais:2", [1, 2, 3]),
        ("fedshuffle", "independent:0.5,0.2,0.9", [1, 2, 3]),
        # By hand: cohorts {0,1}, {0,2}, {1,2} take 1, 1 and 2 steps.
        ("fedavg-min", "uniform:2", [1 / 3 + 1 / 4, 2 / 3 + 2 * 2 / 5, 3 / 4 + 2 * 3 / 5]),
    ],
)
def test_known_numbers(method: str, sampling: str, want: list[float]) -> None:
    result = audit(THREE, method, sampling)
    np.testing.assert_allclose(result.effective_weights, normalised(want), rtol=1e-9)
    assert result.exact
    assert result.consistent == np.allclose(normalised(want), THREE.weights)
    assert result.inclusion_probabilities.tolist() == parse(sampling, THREE).p.tolist()


def enumerated(
    federation: Federation, method: Method, sampling: Sampling, work: LocalWork
) -> Floats:
    """Effective weights from the definition of each rule, written out again."""
    sizes, w, p = federation.sizes, federation.weights, sampling.p
    work = method.local_work(work)
    per_epoch = np.ceil(sizes / work.on(sizes).batch_size)
    total = np.zeros(len(w))
    joint = np.zeros(len(w))
    momentum = np.zeros(len(w))
    empty = 0.0
    for cohort, probability in brute.cohorts(sampling):
        if not cohort:
            empty += probability
            continue
        i = list(cohort)
        planned = per_epoch[i] * np.broadcast_to(np.asarray(work.epochs), sizes.shape)[i]
        if work.steps == "min":
            planned = np.full(len(i), planned.min())
        if work.steps == "mean":
            planned = np.full(len(i), np.round(planned.mean()))
        done = planned
        if isinstance(work.interruption, MissLast):
            done = np.maximum(planned - 1, 1)
        w_sum = w[i].sum()
        match method.name:
            case "fedavg" | "fedavg-rr" | "fedavg-min" | "fedavg-mean":
                contribution = w[i] / w_sum * done
            case "fednova" | "fednova-rr":
                contribution = (w[i] / done) / (w[i] / done).sum() * done
            case "fednova-original" | "fednova-original-rr":
                contribution = w[i] / w_sum / done * ((w[i] / w_sum) @ done) * done
            case "fedshuffle" | "fedshuffle-mvr":
                contribution = w[i] / p[i] * done / planned
            case "fedshuffle-so":
                contribution = w[i] / w_sum * done / planned
            case "fedshuffle-gen" | "fedshuffle-capped":
                contribution = w[i] / p[i] * np.ones(len(i))
        total[i] += probability * contribution
        joint[i] += probability * w[i] / p[i] * contribution.sum()
        by_p = "fedshuffle" in method.name and method.name != "fedshuffle-so"
        momentum[i] += probability * (w[i] / p[i] if by_p else w[i] / w_sum)
    match method.direction:
        case MVR(a):
            steady = total.sum() * w / (1 - empty)
            total = a * total + (1 - a) * ((1 - a) * steady + a * joint)
        case GlobalMomentum(a):
            total = a * total + (1 - a) * total.sum() / (1 - empty) * momentum
    return normalised(total)


NAMES = [  # the averaging methods; others are held against it in tests/testing
    *("fedavg", "fedavg-rr", "fedavg-min", "fedavg-mean", "fednova", "fednova-rr"),
    *("fednova-original", "fednova-original-rr", "fedshuffle", "fedshuffle-so", "fedshuffle-gen"),
    *("fedshuffle-mvr", "fedshuffle-capped"),
]


@settings(max_examples=120)
@given(samplings(), st.sampled_from(NAMES), st.data())
def test_random_cases_equal_enumeration(sampling: Sampling, name: str, data: st.DataObject) -> None:
    n = len(sampling)
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    weights = data.draw(st.none() | st.lists(st.floats(0.1, 9), min_size=n, max_size=n))
    epochs = data.draw(st.integers(1, 3) | st.lists(st.integers(1, 3), min_size=n, max_size=n))
    work = LocalWork(
        epochs=epochs,
        batch_size=data.draw(st.integers(1, 8)),
        interruption=data.draw(st.sampled_from([None, MissLast()])),
    )
    method = methods.get(name)
    momentum = data.draw(st.sampled_from([None, MVR(0.3), GlobalMomentum(0.2)]))
    if momentum is not None:
        method = method.with_momentum(momentum)
    federation = Federation.from_sizes(sizes, weights)
    result = audit(federation, method, sampling, work)
    want = enumerated(federation, method, sampling, work)
    np.testing.assert_allclose(result.effective_weights, want, rtol=1e-9)
    assert result.exact
    variation = 0.5 * np.abs(want - federation.weights).sum()
    assert result.total_variation == pytest.approx(variation, abs=1e-9)
    assert result.consistent == (np.abs(want / federation.weights - 1).max() < 1e-8)
    assert bool(result.findings) == (not result.consistent)


def test_epochs_at_random() -> None:
    """FedNova with epochs from 1..3, two of three clients: all cohorts times all epochs."""
    sizes = np.array([2, 3, 7])
    federation = Federation.from_sizes(sizes)
    w = federation.weights
    total = np.zeros(3)
    averaged = np.zeros(3)
    for i, j in [(0, 1), (0, 2), (1, 2)]:
        pair = [i, j]
        for e in np.ndindex(3, 3):
            tau = sizes[pair] * (np.array(e) + 1)
            share = (w[pair] / tau) / (w[pair] / tau).sum()
            total[pair] += share * tau
            averaged[pair] += w[pair] / w[pair].sum() * tau
    work = LocalWork(epochs=EpochRange(1, 3))
    nova = audit(federation, "fednova-rr", "uniform:2", work)
    np.testing.assert_allclose(nova.effective_weights, normalised(total), rtol=1e-9)
    plain = audit(federation, "fedavg-rr", "uniform:2", work)
    np.testing.assert_allclose(plain.effective_weights, normalised(averaged), rtol=1e-9)
    assert nova.exact
    assert plain.exact
    assert audit(federation, "fedshuffle", "uniform:2", work).consistent


def test_monte_carlo_says_so_and_is_right_within_its_error() -> None:
    federation = Federation.from_sizes([1, 2, 3, 3, 8, 20])
    for work, name in [
        (LocalWork(interruption=RandomStop(0.5)), "fedavg-rr"),
        (LocalWork(epochs=EpochRange(1, 2)), "fedavg-mean"),
    ]:
        result = audit(federation, name, "uniform:2", work, draws=640)
        assert not result.exact
        assert result.how == "Monte Carlo, 640 draws"
        assert result.standard_errors is not None
        assert result.consistent is not True
    # Where the answer is known: the same estimator against quadrature, within five errors.
    method, sampling = methods.get("fedavg-rr"), Uniform(6, 3)
    workload = LocalWork().on(federation.sizes)
    raw, errors = monte_carlo(Subject(federation, method, sampling, workload), 7, 6400)
    exact = audit(federation, method, sampling).effective_weights
    assert (np.abs(raw / raw.sum() - exact) < 5 * errors).all()
    assert (errors > 0).all()
    assert (errors < 0.05 * exact).all()


def test_sampling_cannot_prove_consistency() -> None:
    work = LocalWork(interruption=RandomStop(0.5))
    federation = Federation.from_sizes([4, 4, 4])
    assert audit(federation, "fedshuffle", "uniform:2", work, draws=320).consistent is None


def test_clients_that_are_hardly_drawn_accuse_nobody() -> None:
    """A consistent method on many clients, most of which no draw has seen."""
    federation = Federation.from_sizes(np.arange(1, 2001))
    work = LocalWork(interruption=RandomStop(0.5))
    result = audit(federation, "fedshuffle-gen", "uniform:2", work, draws=320)
    assert result.consistent is None
    assert not result.findings
    assert np.isfinite(result.largest_ratio)
    never = Independent([1e-9, 1e-9])
    with pytest.raises(FedShuffleError, match="draws"):
        audit(Federation.from_sizes([1, 2]), "fedavg-rr", never, work, draws=320)


def test_own_rules_are_audited() -> None:
    """Aggregation by cohort size: exact by enumeration on few clients, sampled on many."""

    def by_size_of_cohort(weights: Floats, cohort: Cohort) -> Floats:
        return np.full(len(weights), len(weights) / 10)

    rule = FedShuffleGen(own_steps, objective_weight, Custom(by_size_of_cohort))
    method = Method("mine", "by cohort size", rule)
    few = audit(THREE, method, Independent([0.5, 0.9, 0.2]))
    want = np.zeros(3)
    for cohort, q in brute.independent(np.array([0.5, 0.9, 0.2])):
        for i in cohort:
            want[i] += q * THREE.weights[i] / len(cohort)
    np.testing.assert_allclose(few.effective_weights, normalised(want), rtol=1e-12)
    assert few.exact
    assert few.how == "enumeration"
    many = Federation.from_sizes(np.arange(1, 41))
    assert not audit(many, method, Independent(np.full(40, 0.3)), draws=320).exact
    unbiased = FedShuffleGen(own_steps, objective_weight, InclusionProbability())
    assert audit(many, Method("ours", "", unbiased), "uniform:3").consistent


def test_rules_must_give_positive_numbers() -> None:
    def nothing(weights: Floats, cohort: Cohort) -> Floats:
        return np.full(len(weights), np.inf)

    method = Method("bad", "", FedShuffleGen(own_steps, objective_weight, Custom(nothing)))
    with pytest.raises(FedShuffleError, match="aggregation weight"):
        audit(THREE, method, "uniform:2")


def test_who_gains_and_who_loses() -> None:
    result = audit(THREE, "fedavg-rr")
    assert result.gaining.tolist() == [2]
    assert result.losing.tolist() == [0, 1]
    assert result.largest_ratio == pytest.approx((1 / 6) / (1 / 14))
    assert result.total_variation == pytest.approx(9 / 14 - 1 / 2)
    assert any("fedshuffle" in finding.fix for finding in result.findings)


@pytest.mark.parametrize(
    ("method", "sampling", "work", "word"),
    [
        ("fedavg-rr", "full", LocalWork(), "at one step size"),
        ("fedshuffle-so", "uniform:2", LocalWork(), "normalised over the cohort"),
        ("fedshuffle", "full", LocalWork(interruption=AtMost(2)), "do not finish"),
        ("fedshuffle-mvr", "uniform:2", LocalWork(), "Exact MVR"),
        ("fedavg-min", "uniform:2", LocalWork(), "min over each cohort"),
    ],
)
def test_findings_name_the_cause(method: str, sampling: str, work: LocalWork, word: str) -> None:
    findings = audit(THREE, method, sampling, work).findings
    assert any(word in finding.what for finding in findings)
    assert all(finding.why and finding.fix for finding in findings)


def test_mvr_is_consistent_where_all_cohorts_weigh_the_same() -> None:
    assert audit(THREE, "fedshuffle-mvr", "full").consistent
    assert audit(THREE, "fedshuffle-mvr", "one").consistent
    assert not audit(THREE, "fedshuffle-mvr", One([0.2, 0.3, 0.5])).consistent
    cheap = methods.get("fedshuffle").with_momentum(GlobalMomentum(0.1))
    assert audit(THREE, cheap, "uniform:1").consistent


def test_balanced_methods_refuse_the_rest() -> None:
    equal = Federation.from_sizes([4, 4])
    assert audit(equal, "fedrr").consistent
    assert audit(equal, "nastya").consistent
    with pytest.raises(FedShuffleError, match="full participation"):
        audit(equal, "fedrr", "uniform:1")
    with pytest.raises(FedShuffleError, match="Use fedshuffle"):
        audit(THREE, "nastya")


def test_a_sampling_for_other_clients_is_refused() -> None:
    with pytest.raises(FedShuffleError, match="4 clients"):
        audit(THREE, "fedshuffle", Uniform(4, 2))
