"""The privacy audit against servers whose sensitivity and noise are known."""

import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedshuffle import Federation, FedShuffleError
from fedshuffle.auditing import audit_privacy
from fedshuffle.auditing.adapters import FlowerAggregator
from fedshuffle.auditing.method_server import MethodAggregator
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform

THREE = Federation.from_sizes([1, 2, 6])
TWENTY = Federation.from_sizes([1] * 20)
Server = Callable[..., Any]


def clipped(updates: Any, norm: float = 1.0) -> Any:
    return updates / np.maximum(1, np.linalg.norm(updates, axis=1, keepdims=True) / norm)


def by_size(noise: float, clip: float = 1.0) -> Server:
    """A fixed denominator: all nine examples, whoever replies."""

    def server(clients: Any, sizes: Any, updates: Any) -> Any:
        return sizes / 9 @ clipped(updates, clip) + np.random.normal(0, noise, updates.shape[1])

    return server


def normalised(noise: float) -> Server:
    def server(clients: Any, sizes: Any, updates: Any) -> Any:
        mean = sizes / sizes.sum() @ clipped(updates)
        return mean + np.random.normal(0, noise, updates.shape[1])

    return server


def adaptive(inverted: bool = False, count_noise: float = 0.0) -> type:
    """Andrew et al. 2021, with target quantile 0.5 and rate 0.2, or with the wrong count."""

    class Adaptive:
        def __init__(self) -> None:
            self.clip = 1.0

        def __call__(self, clients: Any, sizes: Any, updates: Any) -> Any:
            clip, within = self.clip, np.mean(np.linalg.norm(updates, axis=1) <= self.clip)
            within = 1 - within if inverted else within
            self.clip *= np.exp(-0.2 * (within + np.random.normal(0, count_noise) - 0.5))
            step = clipped(updates, clip).sum(axis=0) / 20
            return step + np.random.normal(0, clip / 20, updates.shape[1])

    return Adaptive


def whats(result: Any) -> list[str]:
    return [finding.what for finding in result.findings]


def test_a_server_that_keeps_its_claim() -> None:
    result = audit_privacy(by_size(noise=6 / 9), THREE, clip=1, noise_multiplier=1)
    assert result.holds is True
    assert result.findings == ()
    assert result.client == 2
    assert result.threshold is None
    want = {"zero-out": 6 / 9, "remove": 6 / 9, "replace": 12 / 9}
    assert dict(result.sensitivity) == pytest.approx(want, rel=1e-9)
    assert (result.weight, result.clip) == pytest.approx((6 / 9, 1.0), rel=1e-9)
    assert result.noise_multiplier == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("share", [0.6, 0.9, 0.97])
def test_noise_planted_too_small_is_found(share: float) -> None:
    result = audit_privacy(by_size(share * 6 / 9), THREE, clip=1, noise_multiplier=1)
    assert result.holds is False
    low, high = result.interval
    assert low < share < high
    assert whats(result) == ["The noise is too small for what one client can do."]


def test_noise_by_the_number_of_clients_is_found_with_its_cause() -> None:
    result = audit_privacy(normalised(1 / 3), THREE, clip=1, noise_multiplier=1)
    assert result.holds is False
    low, high = result.interval
    assert low < 0.5 < high
    # Without client 2, which had two thirds, the others move the model from C/3 to C the other way.
    want = {"zero-out": 6 / 9, "remove": 12 / 9, "replace": 12 / 9}
    assert dict(result.sensitivity) == pytest.approx(want, rel=1e-9)
    assert whats(result) == [
        "The noise is made for 3 clients that count alike.",
        "The weights are normalised over the replies.",
    ]


def test_equal_clients_keep_the_claim_unless_one_is_removed() -> None:
    equal = Federation.from_sizes([2, 2, 2])
    settings: dict[str, Any] = {"clip": 1, "noise_multiplier": 1}
    result = audit_privacy(normalised(1 / 3), equal, **settings)
    assert result.holds is True
    assert whats(result) == ["The weights are normalised over the replies."]
    removed = audit_privacy(normalised(1 / 3), equal, neighbours="remove", **settings)
    assert removed.holds is False
    assert removed.noise_multiplier == pytest.approx(0.5, rel=0.02)


def test_clipping_at_another_norm_than_claimed_is_found() -> None:
    result = audit_privacy(by_size(6 / 9, clip=3.0), THREE, clip=1, noise_multiplier=1)
    assert result.clip == pytest.approx(3.0, rel=1e-9)
    assert result.noise_multiplier == pytest.approx(1 / 3, rel=0.02)
    assert result.holds is False


def test_a_server_that_does_not_clip() -> None:
    def server(clients: Any, sizes: Any, updates: Any) -> Any:
        return sizes / 9 @ updates + np.random.normal(0, 1, updates.shape[1])

    result = audit_privacy(server, THREE, clip=1, noise_multiplier=1)
    assert result.holds is False
    assert (result.noise_multiplier, result.interval) == (0.0, (0.0, 0.0))
    assert whats(result) == ["An update counts in full, however long it is."]


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_no_noise_and_the_same_noise_in_every_round_are_found(noise: float) -> None:
    def server(clients: Any, sizes: Any, updates: Any) -> Any:
        same = np.random.default_rng(5).normal(0, noise, updates.shape[1])
        return sizes / 9 @ clipped(updates) + same

    result = audit_privacy(server, THREE, clip=1, noise_multiplier=1)
    assert result.holds is False
    assert whats(result) == ["No noise is added, or the same in every round."]


def test_a_generator_of_its_own_that_starts_again_with_the_server() -> None:
    class Own:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(3)

        def __call__(self, clients: Any, sizes: Any, updates: Any) -> Any:
            return sizes / 9 @ clipped(updates) + self.rng.normal(0, 6 / 9, updates.shape[1])

    result = audit_privacy(Own, THREE, clip=1, noise_multiplier=1)
    assert result.holds is True
    assert result.sensitivity["zero-out"] == pytest.approx(6 / 9, rel=1e-9)


@pytest.mark.parametrize(("noise", "holds"), [(6 / 9, None), (3 / 9, False)])
def test_noise_that_cannot_be_repeated_is_averaged(noise: float, holds: bool | None) -> None:
    rng = np.random.default_rng(0)

    def server(clients: Any, sizes: Any, updates: Any) -> Any:
        return sizes / 9 @ clipped(updates) + rng.normal(0, noise, updates.shape[1])

    result = audit_privacy(server, THREE, clip=1, noise_multiplier=1, repeats=60)
    low, high = result.interval
    assert low < noise / (6 / 9) < high
    assert result.holds is holds
    assert "60 measurements averaged" in result.how


def test_the_interval_holds_as_often_as_it_says() -> None:
    server = by_size(6 / 9)
    intervals = [audit_privacy(server, THREE, clip=1, seed=seed).interval for seed in range(40)]
    assert 34 <= sum(low < 1 < high for low, high in intervals) < 40


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_right_adaptive_threshold_settles_at_its_quantile(noise: float) -> None:
    result = audit_privacy(adaptive(count_noise=noise), TWENTY, clip=1, noise_multiplier=1)
    found = result.threshold
    assert result.holds is True
    assert result.findings == ()
    assert found is not None
    # All clipped: C exp(0.2 * 0.5); none clipped: C exp(-0.2 * 0.5).
    assert (found.after_clipping, found.after_none) == pytest.approx(
        (0.1, -0.1), abs=1e-9 + 0.4 * noise
    )
    np.testing.assert_allclose(found.values[0], 1.0, rtol=1e-9)
    assert found.unclipped[50:].mean() == pytest.approx(0.5, abs=0.05)
    middle = np.sort(found.norms)[9:11]
    assert middle[0] * 0.9 < found.values[-1] < middle[1] * 1.1


def test_the_threshold_that_is_followed_is_the_server_s_own() -> None:
    result = audit_privacy(adaptive(), TWENTY, clip=1, rounds=30)
    found = result.threshold
    assert found is not None
    clip, want = 1.0, []
    for _ in range(30):
        want.append(clip)
        clip *= np.exp(-0.2 * (np.mean(found.norms <= clip) - 0.5))
    np.testing.assert_allclose(found.values, want, rtol=1e-9)


def test_a_threshold_that_counts_clipped_clients_runs_away() -> None:
    result = audit_privacy(adaptive(inverted=True), TWENTY, clip=1, noise_multiplier=1)
    assert result.holds is False
    assert whats(result) == [
        "The threshold falls when updates are clipped, and rises when none is."
    ]
    assert result.threshold is not None
    assert result.threshold.inverted
    assert result.threshold.runs_away
    assert result.threshold.values[-1] < 1e-3
    assert "does not settle" in result.conclusion[1]


def test_momentum_is_no_adaptive_threshold() -> None:
    class Momentum:
        velocity: Any = 0.0

        def __call__(self, clients: Any, sizes: Any, updates: Any) -> Any:
            noise = np.random.normal(0, 6 / 9, updates.shape[1])
            self.velocity = 0.9 * self.velocity + sizes / 9 @ clipped(updates) + noise
            return self.velocity

    result = audit_privacy(Momentum, THREE, clip=1, noise_multiplier=1)
    assert result.threshold is None
    assert result.holds is True


def test_under_sampling_the_worst_cohort_counts() -> None:
    # Alone in its cohort of one a client has the whole weight.
    result = audit_privacy(normalised(1 / 3), THREE, "uniform:1", clip=1, noise_multiplier=1)
    assert result.sensitivity == {"zero-out": pytest.approx(1), "remove": None, "replace": 2}
    pairs = audit_privacy(normalised(1 / 3), THREE, "uniform:2", clip=1, noise_multiplier=1)
    assert pairs.sensitivity["zero-out"] == pytest.approx(6 / 7)
    assert pairs.cohort.tolist() == [0, 2]


def test_global_generators_are_restored() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    audit_privacy(by_size(1.0), THREE, clip=1)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), before[2])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip": 0}, "clip is 0"),
        ({"clip": 1, "noise_multiplier": 0}, "noise_multiplier is 0"),
        ({"clip": 1, "neighbours": "swap"}, "neighbours"),
        ({"clip": 1, "rounds": 1}, "rounds is 1"),
        ({"clip": 1, "confidence": 1}, "confidence"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedShuffleError, match=words):
        audit_privacy(by_size(1.0), THREE, **settings)


def test_steps_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(FedShuffleError, match="one finite number per column"):
        audit_privacy(lambda clients, sizes, updates: updates, THREE, clip=1)


def test_a_server_that_ignores_updates_and_a_sampling_that_reads_them() -> None:
    def server(clients: Any, sizes: Any, updates: Any) -> Any:
        return np.zeros(updates.shape[1])

    with pytest.raises(FedShuffleError, match="ignores all updates"):
        audit_privacy(server, THREE, clip=1)
    with pytest.raises(FedShuffleError, match="give its pool"):
        audit_privacy(server, THREE, "optimal:2", clip=1)


@pytest.mark.slow
def test_large_cohorts_are_probed_with_fewer_coordinates() -> None:
    def server(clients: Any, sizes: Any, updates: Any) -> Any:
        noise = np.random.normal(0, 1 / 700, updates.shape[1])
        return clipped(updates).sum(axis=0) / 700 + noise

    result = audit_privacy(server, Federation.from_sizes([1] * 700), clip=1, noise_multiplier=1)
    assert result.holds is True
    with pytest.raises(FedShuffleError, match="at most 2000"):
        audit_privacy(server, Federation.from_sizes([1] * 2001), clip=1)


def test_it_prints_itself_and_is_data() -> None:
    result = audit_privacy(adaptive(inverted=True), TWENTY, clip=1, noise_multiplier=1)
    text, data = str(result), result.to_dict()
    assert "does not hold: the real noise multiplier is 1" in text
    assert "Fix: Count the updates whose norm is at most the threshold." in text
    assert data["holds"] is False
    assert len(data["threshold"]["values"]) == 100
    assert "does not hold" in repr(result)


class ClipAndNoise(Transform):
    """User-level privacy for the sum of ``a_i u_i``."""

    any_layout = True

    def __init__(self, clip: float, noise: float) -> None:
        self.clip, self.noise = clip, noise

    def client(self, updates: Any, state: Any, context: ClientContext) -> Message:
        return Message(updates * (self.clip / updates.norm(dim=1, keepdim=True)).clamp(max=1))

    def server(self, update: Any, context: ServerContext) -> Any:
        noise = context.generator().normal(0, self.noise, len(update))
        return update + torch.from_numpy(noise), context.state


@pytest.mark.parametrize("sampling", ["uniform:2", "independent:0.5,0.5,0.9"])
def test_one_of_our_methods_with_transforms(sampling: str) -> None:
    from fedshuffle.sampling import resolve

    p = resolve(sampling, THREE).p
    sensitivity = 2.0 * (THREE.weights / p).max()
    for share, holds in ((1.0, True), (0.8, False)):
        transforms = [ClipAndNoise(2.0, share * sensitivity)]
        server = MethodAggregator(THREE, "fedshuffle", transforms=transforms)
        result = audit_privacy(server, THREE, sampling, clip=2, noise_multiplier=1)
        assert result.holds is holds
        assert result.sensitivity["zero-out"] == pytest.approx(sensitivity)
        assert result.sensitivity["remove"] in (None, pytest.approx(sensitivity))


@pytest.fixture
def flower() -> Any:
    return importlib.import_module("flwr.serverapp.strategy")


@pytest.mark.slow
@pytest.mark.parametrize("side", ["ServerSide", "ClientSide"])
def test_flowers_fixed_clipping_adds_too_little_noise(flower: Any, side: str) -> None:
    wrapper = getattr(flower, f"DifferentialPrivacy{side}FixedClipping")
    server = FlowerAggregator(lambda: wrapper(flower.FedAvg(), 1.0, 1.0, 3), 3)
    result = audit_privacy(server, THREE, clip=1, noise_multiplier=1)
    assert result.holds is False
    assert result.sensitivity["zero-out"] == pytest.approx(6 / 9)
    low, high = result.interval
    assert low < 0.5 < high
    assert "The noise is made for 3 clients that count alike." in whats(result)
    equal = audit_privacy(server, Federation.from_sizes([2, 2, 2]), clip=1, noise_multiplier=1)
    assert equal.holds is True


@pytest.mark.slow
@pytest.mark.parametrize("side", ["ServerSide", "ClientSide"])
def test_flowers_adaptive_threshold_runs_away(flower: Any, side: str) -> None:
    wrapper = getattr(flower, f"DifferentialPrivacy{side}AdaptiveClipping")
    server = FlowerAggregator(lambda: wrapper(flower.FedAvg(), 1.0, 20), 20)
    result = audit_privacy(server, TWENTY, clip=0.1, noise_multiplier=1, rounds=50)
    assert result.holds is False
    assert result.threshold is not None
    assert result.threshold.inverted
    assert result.threshold.runs_away
