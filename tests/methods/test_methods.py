import re
from typing import Any

import numpy as np
import pytest

from fedshuffle import (
    MVR,
    EpochRange,
    Federation,
    FedShuffleError,
    GlobalMomentum,
    LocalWork,
    Method,
    MissLast,
    RandomStop,
    audit,
    methods,
)
from fedshuffle.methods import Cohort, Plain, parse_momentum
from fedshuffle.training.rounds import Run


def test_the_methods_of_the_paper_are_there() -> None:
    names = {method.name for method in methods.available()}
    assert {
        "fedavg",
        "fedavg-rr",
        "fedavg-min",
        "fedavg-mean",
        "fednova",
        "fednova-rr",
        "fedshuffle",
        "fedshuffle-so",
        "fedshuffle-gen",
        "fedshuffle-mvr",
        "fedrr",
        "nastya",
    } <= names
    assert methods.get("fedshuffle-mvr").momentum == "mvr:0.1"


def test_the_table_of_all_clients_steps_is_not_made_for_nothing() -> None:
    clients = Federation.from_sizes([3, 4, 5])
    run = Run(clients, "fedshuffle", "uniform:2", LocalWork(epochs=EpochRange(1, 900)))
    run.cohort(0)
    assert "possible_steps" not in vars(run.workload)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("fedavg", {"order": "sequential"}),
        ("fedavg", {"order": "reshuffled"}),  # the default, but set
        ("fedavg-min", {"steps": 5}),
        ("pooled-sgd", {"order": "once"}),
        ("distributed-gd", {"epochs": 2}),
        ("distributed-gd", {"epochs": [1, 1, 2]}),
        ("distributed-gd", {"batch_size": 1}),
        ("distributed-gd", {"interruption": MissLast()}),
        ("non-local-mvr", {"epochs": EpochRange(1, 2)}),
        ("fedrr", {"interruption": RandomStop(0.5)}),
        ("nastya", {"interruption": RandomStop(0.5)}),
        ("scaffold+fedavg", {"order": "once"}),
    ],
)
def test_a_fixed_part_of_local_work_cannot_be_set_otherwise(
    name: str, setting: dict[str, Any]
) -> None:
    (part,) = setting
    clients = Federation.from_sizes([3, 3, 3])
    with pytest.raises(FedShuffleError, match=rf"^{re.escape(name)} .*\b{part}"):
        Run(clients, name, work=LocalWork(**setting))
    with pytest.raises(FedShuffleError, match=part):
        audit(clients, name, work=LocalWork(**setting))


def test_unset_parts_of_local_work_are_the_methods_own() -> None:
    clients = Federation.from_sizes([3, 3, 3])
    for method in methods.available():
        for work in (None, LocalWork(), LocalWork(**method.work)):
            resolved = Run(clients, method, work=work).workload.work
            assert None not in (resolved.epochs, resolved.batch_size, resolved.order)
            fixed = LocalWork(**method.work)
            assert all(getattr(resolved, part) == getattr(fixed, part) for part in method.work)
    set_where_open = LocalWork(epochs=2, batch_size=2, clip=1.0)
    assert Run(clients, "fedavg", work=set_where_open).workload.work.order == "replacement"
    assert Run(clients, "fedrr", work=LocalWork(interruption=MissLast())).workload.max_steps == 3


def cohort(n: int = 3, seed: int = 0) -> Cohort:
    rng = np.random.default_rng(seed)
    planned = rng.integers(2, 9, size=n)
    return Cohort(
        clients=np.arange(n),
        weight=rng.dirichlet(np.ones(n + 2))[:n],
        probability=rng.uniform(0.2, 1, n),
        planned=planned,
        done=np.maximum(1, planned - rng.integers(0, 3, size=n)),
        max_steps=12,
    )


@pytest.mark.parametrize("seed", range(5))
def test_sum_one_weights_sum_to_one(seed: int) -> None:
    for name in ("fedavg", "fednova", "fedshuffle-so"):
        weights = methods.get(name).averaging.aggregation_weights(cohort(seed=seed))
        assert weights.sum() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_original_fednova_moves_the_mean_number_of_steps(seed: int) -> None:
    """sum_i a_i tau_i = tau_eff, the weighted mean of the steps."""
    clients = cohort(seed=seed)
    weights = methods.get("fednova-original").averaging.aggregation_weights(clients)
    share = clients.weight / clients.weight.sum()
    assert (weights * clients.done).sum() == pytest.approx(share @ clients.done, rel=1e-12)


def test_fedshuffle_clients_all_move_equally_far() -> None:
    clients = cohort()
    scale = methods.get("fedshuffle").averaging.step_scale(clients)
    np.testing.assert_allclose(scale * clients.planned, clients.max_steps)


def test_names_are_taken_once() -> None:
    method = Method("fedavg", "again", methods.get("fedavg").averaging)
    with pytest.raises(FedShuffleError, match="exists already"):
        methods.register(method)


def test_momentum_from_text() -> None:
    assert parse_momentum("mvr:0.3") == MVR(0.3)
    assert parse_momentum("global") == GlobalMomentum(0.1)
    assert parse_momentum("none") == Plain()
    for text, message in [
        ("mrv:0.1", "Known: global:A, mvr:A, none"),
        ("mvr:x", "mvr:x"),
        ("mvr:0", "parameter a"),
        ("global:1.5", "parameter a"),
        ("none:1", "unknown momentum 'none:1'"),
    ]:
        with pytest.raises(FedShuffleError, match=message):
            parse_momentum(text)
