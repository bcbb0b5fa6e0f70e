"""The picture of the README shows the demo's numbers."""

import pytest
from matplotlib.patches import Rectangle

from fedshuffle._terminal import progress_bar
from fedshuffle.engines.cpu_tuning import one_thread
from fedshuffle.experiments import message_picture
from fedshuffle.experiments.demo import experiment


def test_bars_are_what_the_demo_found() -> None:
    with one_thread(), progress_bar(False) as bars:
        result = experiment.audit_and_train(rounds=3, seed=0, bars=bars)
    figure = message_picture.draw(result)
    small, (fedavg, _, fedshuffle) = result.digits.small, result.methods
    weights = (
        result.digits.federation.weights,
        fedavg.audit.effective_weights,
        fedshuffle.audit.effective_weights,
    )
    accuracies = [result.optimal_accuracies[experiment.RARE], fedavg.rare, fedshuffle.rare]
    wanted = [[one[small].sum() for one in weights], [one.mean() for one in accuracies]]
    for axes, shares in zip(figure.axes, wanted, strict=True):
        bars_drawn = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        assert [bar.get_width() for bar in bars_drawn] == pytest.approx(shares)
        assert [text.get_text() for text in axes.texts] == [f"{s:.0%}" for s in shares]
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert names[1:] == ["FedAvg", "FedShuffle"]
    assert "37 of 40 clients are small" in figure.get_suptitle()
