"""Bad settings of privacy have one clear error each."""

from typing import Any

import pytest

from fedshuffle.errors import FedShuffleError
from fedshuffle.privacy import AdaptiveClipping, Clip, GaussianNoise, Privacy, TreeNoise


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"noise": 1.0}, "has no clip"),
        ({"clip": 0.0, "noise": 1.0}, "clip of privacy is 0.0"),
        ({"clip": -1.0, "noise": 1.0}, "clip of privacy is -1.0"),
        ({"clip": float("inf"), "noise": 1.0}, "must be positive and finite"),
        ({"clip": "much", "noise": 1.0}, "must be a number"),
        ({"clip": 1.0}, "neither noise nor epsilon"),
        ({"clip": 1.0, "noise": 0.0}, "noise of privacy is 0.0.*use the transform Clip"),
        ({"clip": 1.0, "epsilon": 1.0}, "without delta"),
        ({"clip": 1.0, "epsilon": 0.0, "delta": 1e-5}, "epsilon of privacy is 0.0"),
        ({"clip": 1.0, "noise": 1.0, "delta": 1.0}, r"delta of privacy is 1.0.*\(0, 1\)"),
        ({"clip": 1.0, "noise": 1.0, "min_separation": 0}, "min_separation of privacy is 0"),
        ({"clip": 1.0, "noise": 1.0, "adaptive": True}, "adaptive of privacy must be of type"),
        (
            {"clip": 1.0, "noise": 1.0, "adaptive": AdaptiveClipping(), "min_separation": 2},
            "both adaptive and min_separation",
        ),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message) as raised:
        Privacy(**settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveClipping(quantile=1.5),
        lambda: AdaptiveClipping(rate=0.0),
        lambda: AdaptiveClipping(count_noise=0.0),
        lambda: Clip(0.0),
        lambda: GaussianNoise(0.0),
        lambda: TreeNoise(1.0, 0),
    ],
)
def test_bad_parts_are_refused(make: Any) -> None:
    with pytest.raises(FedShuffleError, match="must be"):
        make()
