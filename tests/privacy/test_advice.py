"""What advise says about privacy."""

import pytest

from fedshuffle import Federation, LocalWork, methods
from fedshuffle.cli.advise import _print_privacy
from fedshuffle.privacy import AdaptiveClipping, Mechanism, Privacy, bind
from fedshuffle.privacy.accounting import gaussian_epsilon
from fedshuffle.privacy.advice import TARGETS, advise
from fedshuffle.sampling import Full


def mechanism(privacy: Privacy) -> Mechanism:
    federation, method = Federation.from_sizes([10] * 19 + [20]), methods.get("fedshuffle")
    workload = method.local_work(LocalWork()).on(federation.sizes)
    return bind(privacy, method, federation, Full(20), workload, rounds=40)


def test_the_cost_of_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    found = advise(mechanism(Privacy(clip=1.0, noise=8.0, delta=1e-3)), 40)
    assert found.epsilon == pytest.approx(gaussian_epsilon(8.0 / 40**0.5, 1e-3))
    assert found.median_epsilon == pytest.approx(gaussian_epsilon(16.0 / 40**0.5, 1e-3))
    assert list(found.epsilon_after) == [4, 20, 40, 80, 400]
    assert found.epsilon_after[40] == found.epsilon
    for epsilon in TARGETS:
        spent = mechanism(Privacy(clip=1.0, noise=found.noise_for[epsilon], delta=1e-3)).budget
        assert spent.spent(40) == pytest.approx(epsilon, rel=1e-5)
    _print_privacy(found)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"40 rounds cost epsilon {found.epsilon:.3g} at delta 0.001" in shown
    assert "not amplified by sampling" in shown


def test_adaptive_clipping_does_not_reach_every_epsilon() -> None:
    # A noise multiplier of 9 would need a count_noise above 4.5.
    privacy = Privacy(clip=1.0, noise=2.0, adaptive=AdaptiveClipping(count_noise=4.0))
    assert list(advise(mechanism(privacy), 40).noise_for) == [2.0, 4.0, 8.0]


def test_advice_says_when_the_budget_ends(capsys: pytest.CaptureFixture[str]) -> None:
    privacy = Privacy(clip=1.0, noise=8.0, epsilon=2.0, delta=1e-3)
    last = mechanism(privacy).max_rounds
    assert last is not None
    assert last < 40
    found = advise(mechanism(privacy), 40)
    assert found.stops_after == last
    _print_privacy(found)
    assert f"stops after round {last}" in capsys.readouterr().out
    assert advise(mechanism(privacy), last).stops_after is None
