"""The noise is as large as promised: a mechanism with too little fails these tests."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from fedshuffle import Federation, LocalWork, methods
from fedshuffle._arrays import FloatArray
from fedshuffle.privacy import (
    AdaptiveClip,
    AdaptiveClipping,
    GaussianNoise,
    Mechanism,
    Privacy,
    TreeNoise,
    bind,
)
from fedshuffle.privacy.noise import squared_sensitivity, tree_nodes, with_noise
from fedshuffle.sampling import Full, Independent
from fedshuffle.transforms import Chain, ClientContext, Message, ServerContext, Transform

WIDTH, ROUNDS = 500, 8
SIZES, P = [10, 20, 60], [0.5, 0.25, 1.0]
CASES = {
    "fixed": Privacy(clip=0.5, noise=1.5),
    "weighted": Privacy(clip=0.5, noise=1.5, weighted=True),
    "adaptive": Privacy(clip=0.5, noise=1.5, adaptive=AdaptiveClipping(count_noise=1.0)),
}


def mechanism(privacy: Privacy) -> Mechanism:
    federation, method = Federation.from_sizes(SIZES), methods.get("fedshuffle")
    workload = method.local_work(LocalWork()).on(federation.sizes)
    return bind(privacy, method, federation, Independent(P), workload, ROUNDS)


def noise_of(transforms: Sequence[Transform], seed: int) -> FloatArray:
    """What a chain adds to the sums of rounds in which nobody takes part, a row per round."""
    chain, zeros = Chain(tuple(transforms)), torch.zeros(WIDTH, dtype=torch.float64)
    assert chain.every_round
    contexts = [ServerContext(seed, round, state={}, metrics={}) for round in range(ROUNDS)]
    return np.array([chain.server(zeros, context)[0].numpy() for context in contexts])


def assert_unit_variance(values: FloatArray) -> None:
    """Fails by chance once in a million seeds; the seeds are fixed."""
    squares = float((values**2).sum())
    assert chi2.ppf(5e-7, values.size) < squares < chi2.isf(5e-7, values.size)


def assert_private(transforms: Sequence[Transform], std: float) -> None:
    """No less noise than promised, nor much more, on every coordinate; new in every round."""
    noise = np.array([noise_of(transforms, seed) for seed in range(10)]) / std
    for values in (
        noise,
        noise[:, :, ::2],
        noise[:, :, 1::2],
        noise.cumsum(1)[:, -1] / ROUNDS**0.5,
    ):
        assert_unit_variance(values)


@pytest.mark.parametrize("name", CASES)
def test_the_noise_has_the_promised_size(name: str) -> None:
    private = mechanism(CASES[name])
    largest = 1.0 if name == "weighted" else max(20 / 90 / 0.25, 60 / 90 / 1.0)
    assert private.sensitivity == pytest.approx(0.5 * largest)
    std = 1.5 * 0.5 * largest
    if name == "adaptive":
        std *= (1 - (1.5 / 2.0) ** 2) ** -0.5  # the count takes its share of the budget
    assert_private(private.transforms, std)


def test_the_real_noise_multiplier_is_the_one_claimed() -> None:
    """Sizes 1, 2, 6, weighted by size: what one client moves, and the noise, both measured."""
    federation, method = Federation.from_sizes([1, 2, 6]), methods.get("fedshuffle")
    workload = method.local_work(LocalWork()).on(federation.sizes)
    clip, noise = bind(
        Privacy(clip=0.3, noise=1.0), method, federation, Full(3), workload, ROUNDS
    ).transforms
    ones = np.ones(3)
    context = ClientContext(0, 0, np.arange(3), ones.astype(int), ones, federation.weights)
    long = torch.full((3, 4), 100.0, dtype=torch.float64)
    sent = clip.client(long, None, context).values.numpy() * federation.weights[:, None]
    moved = np.linalg.norm(sent, axis=1).max()
    assert noise_of([noise], 0).std() / moved == pytest.approx(1.0, abs=0.05)


class SameNoise(Transform):
    """A planted defect: the noise of all rounds is the same."""

    every_round = True

    def client(self, updates: torch.Tensor, state: object, context: ClientContext) -> Message:
        raise NotImplementedError

    def server(
        self, update: torch.Tensor, context: ServerContext
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        same = replace(context, round=0)
        return with_noise(update, 1.0, same.generator()), {}


class HalfOfTheCoordinates(Transform):
    """A planted defect: every second coordinate has no noise."""

    every_round = True

    def client(self, updates: torch.Tensor, state: object, context: ClientContext) -> Message:
        raise NotImplementedError

    def server(
        self, update: torch.Tensor, context: ServerContext
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        noised = with_noise(update, 2**0.5, context.generator())
        noised[::2] = update[::2]
        return noised, {}


@pytest.mark.parametrize(
    "planted",
    [GaussianNoise(0.95), GaussianNoise(0.5), SameNoise(), HalfOfTheCoordinates()],
    ids=["0.95", "half", "same", "every second"],
)
def test_too_little_noise_is_found(planted: Transform) -> None:
    assert_private([GaussianNoise(1.0)], 1.0)
    with pytest.raises(AssertionError):
        assert_private([planted], 1.0)


def test_too_little_adaptive_noise_is_found() -> None:
    (transform,) = mechanism(CASES["adaptive"]).transforms
    assert isinstance(transform, AdaptiveClip)
    std = transform.noise * transform.start * transform.largest_weight
    assert_private([transform], std)
    with pytest.raises(AssertionError):  # the multiplier of sum and count together
        assert_private([replace(transform, noise=1.5)], std)


def test_noise_is_a_function_of_seed_and_round() -> None:
    for one in (GaussianNoise(1.0), TreeNoise(1.0, 4)):
        assert np.array_equal(noise_of([one], 3), noise_of([one], 3))
        assert not np.array_equal(noise_of([one], 3), noise_of([one], 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_keeps_the_type_of_the_update(dtype: torch.dtype) -> None:
    update = torch.ones(3, dtype=dtype)
    context = ServerContext(0, 0, {}, {})
    assert GaussianNoise(1.0).server(update, context)[0].dtype == dtype
    assert update.tolist() == [1.0] * 3


TREES = list(itertools.product([1, 5, 8, 9], [1, 2, 3, 4, 8]))

# The tree ----------------------------------------------------------------------------------------


def nodes(rounds: int, separation: int) -> list[tuple[int, int, int]]:
    """All nodes (tree, level, index) of complete intervals of the trees."""
    return [
        (tree, level, index)
        for tree in range(-(-rounds // separation))
        for level in range(separation.bit_length())
        for index in range(separation >> level)
    ]


def encoder(rounds: int, separation: int) -> FloatArray:
    """Which rounds a node sums."""
    rows = []
    for tree, level, index in nodes(rounds, separation):
        first = tree * separation + (index << level)
        rows.append([first <= round < first + (1 << level) for round in range(rounds)])
    return np.array(rows, dtype=np.float64)


def decoder(rounds: int, separation: int) -> FloatArray:
    """How the noise of nodes enters the updates of rounds."""
    place = {node: k for k, node in enumerate(nodes(rounds, separation))}
    found = np.zeros((rounds, len(place)))
    for round in range(rounds):
        tree, before = divmod(round, separation)
        for sign, level, index in tree_nodes(before + 1):
            found[round, place[tree, level, index]] += sign
    return found


@pytest.mark.parametrize(("rounds", "separation"), TREES)
def test_the_tree_noises_the_sums_of_nodes(rounds: int, separation: int) -> None:
    """Updates with noise are the decoded sums of nodes with noise: D (E U + n) = U + D n."""
    D, E = decoder(rounds, separation), encoder(rounds, separation)  # noqa: N806
    assert np.array_equal(D @ E, np.eye(rounds))


@pytest.mark.parametrize(("rounds", "separation"), TREES)
def test_the_sensitivity_of_the_tree_by_enumeration(rounds: int, separation: int) -> None:
    """Over all ways to take part, at least ``separation`` rounds apart, and any signs."""
    used = decoder(rounds, separation).any(axis=0)  # noise of other nodes is never added
    E = encoder(rounds, separation)[used]  # noqa: N806
    found = 0.0
    for pattern in itertools.product([0.0, 1.0], repeat=rounds):
        if (np.diff(np.flatnonzero(pattern)) < separation).any():
            continue
        # Within a tree a client is in one round, so signs do not matter.
        found = max(found, float(np.array(pattern) @ E.T @ E @ np.array(pattern)))
    assert found == squared_sensitivity(rounds, separation)


@pytest.mark.parametrize("separation", [1, 3, 4, 8])
def test_the_sums_of_rounds_have_the_noise_of_the_tree(separation: int) -> None:
    noise = np.array([noise_of([TreeNoise(2.0, separation)], seed) for seed in range(20)]) / 2.0
    D = decoder(ROUNDS, separation)  # noqa: N806
    for t in range(ROUNDS):
        variance = float((D[: t + 1].sum(0) ** 2).sum())
        trees, rest = divmod(t + 1, separation)
        assert variance == trees * separation.bit_count() + rest.bit_count()
        values = noise[:, : t + 1].sum(1) / variance**0.5
        assert_unit_variance(values)


def test_a_tree_of_one_round_is_independent_noise() -> None:
    assert_private([TreeNoise(1.0, 1)], 1.0)


def test_two_trees_of_a_chain_are_independent() -> None:
    tree = TreeNoise(1.0, 4)
    assert not np.allclose(noise_of([tree, tree], 0), 2 * noise_of([tree], 0))
