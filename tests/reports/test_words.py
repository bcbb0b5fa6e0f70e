"""Names and numbers as people read them, in reports of comparisons and elsewhere."""

from typing import Any

import numpy as np
import pytest

from fedshuffle.comparison.results import _words
from fedshuffle.reports.comparison import model, tables
from fedshuffle.reports.comparison.figures import where_lost
from fedshuffle.reports.rendering import duration, joined, number, on_dark, round_numbers


@pytest.mark.parametrize(
    ("found", "want"),
    [
        (model.momentum_title("none"), "no momentum"),
        (model.momentum_title("global:0.1"), "momentum 0.9"),
        (model.momentum_title("mvr:0.1"), "exact momentum (MVR) 0.9"),
        (model.group_title("own"), "own best step size"),
        (model.group_title("common:0.1"), "common step size 0.1"),
        (model.metric_title("accuracy", trained=True), "test accuracy"),
        (model.metric_title("training_loss", trained=True), "train loss"),
        (
            model.metric_title("accuracy_worst_decile", trained=False),
            "accuracy, worst tenth of the clients",
        ),
        (model.is_share("test_top-5_mean"), True),
        (model.is_share("training_loss"), False),
        (model.value_text(0.59571, "accuracy"), "59.57"),
        (model.value_text(1.23456, "loss"), "1.235"),
        (model.value_text(0.01, "loss", 1.2), "0.010"),
        (model.spread_text(0.42, 0.0283, "accuracy"), "42.00 ± 2.83"),
        (model.spread_text(0.42, None, "accuracy"), "42.00"),
        (tables._md("a|b <i> *c*"), r"a\|b \<i\> \*c\*"),
        (tables._tex("50% of a_b ± 1"), r"50\% of a\_b $\pm$ 1"),
        (_words({"use": "torch.nn:Linear", "sizes": [64, 10]}), "use torch.nn:Linear, sizes 64 10"),
        (number(0.000789), "0.00079"),
        (number(-0.25), "-0.25"),
        (number(0.0), "0"),
        (number(3e-9), "3.0e-09"),
        (duration(42.4), "42 s"),
        (duration(605), "10 min"),
        (duration(12_345), "3 h 26 min"),
        (joined(["a", "b", "c"]), "a, b and c"),
        (joined([1]), "1"),
        (on_dark("#E69F00"), "#e69f00"),
        (on_dark("#332288"), "#9d95c6"),
        (round_numbers((0.4, 30)), [0.5, 1.0, 2.0, 5.0, 10.0, 20.0]),
        (where_lost(np.array([10, 20]), np.array([1.0, 5.0]), (0.0, 3.0)), (15.0, 3.0)),
    ],
)
def test_words(found: Any, want: Any) -> None:
    assert found == want
