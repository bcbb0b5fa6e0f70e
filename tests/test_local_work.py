import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import AtMost, EpochRange, FedShuffleError, LocalWork, MissLast, RandomStop
from fedshuffle.local_work import Minibatches
from fedshuffle.randomness import Purpose, generator


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(0, 99))
def test_every_example_once_per_reshuffled_epoch(
    size: int, batch: int, epochs: int, seed: int
) -> None:
    per_epoch = -(-size // batch)
    stream = list(Minibatches(3, size, epochs * per_epoch, batch, "reshuffled", seed, 7))
    assert len(stream) == epochs * per_epoch
    for e in range(epochs):
        epoch = stream[e * per_epoch : (e + 1) * per_epoch]
        assert sorted(np.concatenate(epoch).tolist()) == list(range(size))
        assert all(len(b) == batch for b in epoch[:-1])


def test_reshuffled_orders_differ_between_epochs_rounds_and_clients() -> None:
    def order(client: int, round: int) -> list[list[int]]:
        stream = Minibatches(client, 20, 2, 20, "reshuffled", 1, round)
        return [b.tolist() for b in stream]

    orders = [*order(0, 0), *order(0, 1), *order(1, 0)]
    assert len({tuple(o) for o in orders}) == 6


def test_every_order_of_three_examples_is_equally_likely() -> None:
    counts = dict.fromkeys(itertools.permutations(range(3)), 0)
    rounds = 6000
    for r in range(rounds):
        (order,) = Minibatches(0, 3, 1, 3, "reshuffled", 5, r)
        counts[tuple(order.tolist())] += 1
    # Fixed seed; five standard deviations of a binomial.
    spread = 5 * np.sqrt(rounds * (1 / 6) * (5 / 6))
    assert all(abs(c - rounds / 6) < spread for c in counts.values())


def test_shuffled_once_repeats_its_order_in_every_epoch_and_round() -> None:
    first = [b.tolist() for b in Minibatches(2, 9, 6, 3, "once", 1, 0)]
    later = [b.tolist() for b in Minibatches(2, 9, 3, 3, "once", 1, 8)]
    assert first[:3] == first[3:] == later
    assert sorted(itertools.chain(*later)) == list(range(9))


def test_in_order_and_with_replacement() -> None:
    assert [b.tolist() for b in Minibatches(0, 3, 3, 2, "sequential", 1, 0)] == [
        [0, 1],
        [2],
        [0, 1],
    ]
    drawn = np.concatenate(list(Minibatches(0, 3, 3000, 1, "replacement", 1, 0)))
    assert len(drawn) == 3000
    assert set(drawn.tolist()) == {0, 1, 2}
    # An epoch of three draws with replacement is a permutation in 2 of 9 cases only.
    epochs = drawn.reshape(-1, 3)
    complete = np.mean([len(set(e.tolist())) == 3 for e in epochs])
    assert abs(complete - 2 / 9) < 5 * np.sqrt(2 / 9 * 7 / 9 / 1000)


def test_a_client_smaller_than_the_batch_takes_one_step_per_epoch() -> None:
    workload = LocalWork(epochs=2, batch_size=32).on(np.array([5, 33]))
    plan = workload.plan(np.array([0, 1]), seed=0, round=0)
    assert plan.planned.tolist() == [2, 4]
    assert [len(b) for b in workload.minibatches(0, 2, 0, 0)] == [5, 5]


SIZES = np.array([1, 2, 3, 10])
EVERYONE = np.arange(4)


@pytest.mark.parametrize(
    ("work", "planned"),
    [
        (LocalWork(), [1, 2, 3, 10]),
        (LocalWork(epochs=3), [3, 6, 9, 30]),
        (LocalWork(epochs=[4, 3, 2, 1]), [4, 6, 6, 10]),
        (LocalWork(batch_size=3), [1, 1, 1, 4]),
        (LocalWork(steps=5), [5, 5, 5, 5]),
        (LocalWork(steps=np.int64(3)), [3, 3, 3, 3]),  # type: ignore[arg-type]
        (LocalWork(epochs=np.int64(2)), [2, 4, 6, 20]),  # type: ignore[arg-type]
        (LocalWork(batch_size=10**25), [1, 1, 1, 1]),
        (LocalWork(steps="min"), [1, 1, 1, 1]),
        (LocalWork(steps="mean"), [4, 4, 4, 4]),
    ],
)
def test_planned_steps(work: LocalWork, planned: list[int]) -> None:
    plan = work.on(SIZES).plan(EVERYONE, seed=3, round=4)
    assert plan.planned.tolist() == plan.done.tolist() == planned


def test_minimum_and_mean_are_over_the_cohort() -> None:
    workload = LocalWork(steps="min").on(SIZES)
    assert workload.plan(np.array([2, 3]), 0, 0).planned.tolist() == [3, 3]
    assert LocalWork(steps="mean").on(SIZES).plan(np.array([0, 2]), 0, 0).planned.tolist() == [2, 2]


def test_a_range_of_epochs_is_drawn_per_client_and_round() -> None:
    workload = LocalWork(epochs=EpochRange(2, 5)).on(np.ones(50, dtype=np.int64))
    plans = np.stack([workload.plan(np.arange(50), 1, r).planned for r in range(40)])
    assert set(plans.ravel().tolist()) == {2, 3, 4, 5}
    assert abs(plans.mean() - 3.5) < 5 * np.sqrt(1.25 / plans.size)
    # Pure in (seed, round, client): the company a client keeps does not matter.
    alone = workload.plan(np.array([7]), 1, 3).planned
    assert alone[0] == plans[3, 7]
    assert workload.max_steps == 5


def test_interruptions() -> None:
    def done(interruption: MissLast | AtMost | RandomStop, round: int = 0) -> list[int]:
        work = LocalWork(interruption=interruption)
        steps: list[int] = work.on(SIZES).plan(EVERYONE, 1, round).done.tolist()
        return steps

    assert done(MissLast()) == [1, 1, 2, 9]
    assert done(MissLast(2)) == [1, 1, 1, 8]
    assert done(AtMost(2)) == [1, 2, 2, 2]
    assert done(RandomStop(0.0)) == [1, 2, 3, 10]
    many = np.array([done(RandomStop(1.0), r) for r in range(500)])
    assert many.min(axis=0).tolist() == [1, 1, 1, 1]
    assert many.max(axis=0).tolist() == [1, 2, 3, 10]
    assert done(RandomStop(0.5), 3) == done(RandomStop(0.5), 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalWork(batch_size=0), "batch size is 0"),
        (lambda: LocalWork(batch_size=2.5), "batch size is 2.5"),  # type: ignore[arg-type]
        (lambda: LocalWork(epochs=0), "epochs is 0"),
        (lambda: LocalWork(epochs=[1, 0]), "client 1 has 0"),
        (lambda: LocalWork(steps=0), "steps is 0"),
        (lambda: LocalWork(steps="median"), "unknown number of steps 'median'"),  # type: ignore[arg-type]
        (lambda: LocalWork(order="shuffled"), "unknown order 'shuffled'"),  # type: ignore[arg-type]
        (lambda: LocalWork(epochs=[1, 2]).on(SIZES), "2 numbers for 4 clients"),
        (lambda: EpochRange(3, 2), "most epochs is 2"),
        (lambda: EpochRange(0, 2), "fewest epochs is 0"),
        (lambda: AtMost(0), "is 0"),
        (lambda: LocalWork(clip=0.0), "clip is 0"),
        (lambda: LocalWork(clip=float("nan")), "clip is nan"),
        (lambda: LocalWork(weight_decay=-1.0), "weight_decay is -1"),
        (lambda: RandomStop(1.5), "1.5"),
        (lambda: RandomStop("often"), "must be a number"),  # type: ignore[arg-type]
        (lambda: EpochRange(1, 2.5), "most epochs is 2.5"),  # type: ignore[arg-type]
        (lambda: LocalWork(interruption="x"), "must be of type Interruption"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_named(make: object, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        make()  # type: ignore[operator]


def test_an_interruption_must_leave_a_step() -> None:
    class Nothing(MissLast.__base__):  # type: ignore[misc, name-defined]
        random = False

        def done(self, planned: object, *_: object) -> object:
            return np.zeros_like(planned)

    work = LocalWork(interruption=Nothing())
    with pytest.raises(FedShuffleError, match="0 steps done"):
        work.on(SIZES).plan(EVERYONE, 0, 0)


def test_a_client_with_only_its_own_data_draws_the_same() -> None:
    among_all = Minibatches(7, 9, 6, 2, "reshuffled", 5, 3)
    alone = Minibatches(0, 9, 6, 2, "reshuffled", 5, 3, stream_id=7)
    for mine, theirs in zip(alone, among_all, strict=True):
        assert (mine == theirs).all()
    assert alone.model_seed() == among_all.model_seed()


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 30))
def test_a_client_that_stops_ends_after_whole_minibatches(size: int, batch: int, most: int) -> None:
    batch = min(batch, size)
    asked = iter(range(1000))
    full = Minibatches(1, size, 20, batch, "reshuffled", 5, 3)
    some = Minibatches(
        1, size, 20, batch, "reshuffled", 5, 3, should_stop=lambda: next(asked) % 31 >= most
    )
    expected = [b.tolist() for b in full][:most]
    assert [b.tolist() for b in some] == expected
    asked = iter(range(1000))
    assert [positions.tolist() for positions, _ in some.portions(4096)] == expected


def test_numbers_of_numpy_are_numbers() -> None:
    assert type(LocalWork(batch_size=np.int64(3)).batch_size) is int  # type: ignore[arg-type]


def test_a_plan_draws_epochs_for_the_cohort_only() -> None:
    """A table of all clients and all numbers of epochs would not fit for a million clients."""
    sizes = np.arange(1, 101)
    workload = LocalWork(epochs=EpochRange(3, 900), batch_size=4).on(sizes)
    cohort = np.array([2, 30, 99])
    planned = workload.plan(cohort, seed=5, round=7).planned
    epochs = [
        3 + int(generator(5, Purpose.EPOCHS, round=7, client=client).integers(898))
        for client in cohort.tolist()
    ]
    assert planned.tolist() == [1 * epochs[0], 8 * epochs[1], 25 * epochs[2]]
    assert workload.max_steps == 25 * 900
    assert "alone" not in vars(workload)
