"""The demo: its data, its optima, its files, and words that follow the numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor

from fedshuffle import FedShuffleError, audit
from fedshuffle.engines.cpu_tuning import one_thread
from fedshuffle.experiments.demo import demo, words
from fedshuffle.experiments.demo.experiment import (
    METHODS,
    MethodSummary,
    Settings,
    Spread,
    Summary,
    predicted_level,
)
from fedshuffle.experiments.demo.figures import PICTURES
from fedshuffle.experiments.demo.page import print_summary
from fedshuffle.experiments.demo.problem import Objective, split
from fedshuffle.reports.page import number, percent
from fedshuffle.reports.style import luminance
from tests.chromium import Browser

pytestmark = pytest.mark.xdist_group("demo")  # what they share is made once

ROUNDS = 3


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """A demo of a few rounds, in silence and in a folder whose name must be escaped."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        made = demo(tmp_path_factory.mktemp("a <b> & 'c'"), rounds=ROUNDS, seed=5, progress=False)
    assert said.getvalue() == ""
    return made


@pytest.fixture(scope="module")
def objective() -> Objective:
    return Objective(split(0).federation, Settings().l2)


@pytest.fixture(scope="module")
def optimum(objective: Objective) -> Tensor:
    return objective.optimum(objective.problem.federation.weights)


# The split


def test_split_is_a_function_of_the_seed() -> None:
    first, again, other = split(1), split(1), split(2)
    assert (first.rows == again.rows).all()
    assert (first.test_rows == again.test_rows).all()
    assert (first.federation.sizes == again.federation.sizes).all()
    assert torch.equal(first.federation.fields[0], again.federation.fields[0])
    assert (first.test_rows != other.test_rows).any()


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 2**64 - 1])
def test_split_covers_every_example_once_with_very_different_clients(seed: int) -> None:
    digits = split(seed)
    pixels, labels = load_digits(return_X_y=True)
    assert sorted([*digits.rows, *digits.test_rows]) == list(range(len(labels)))
    assert (digits.federation.fields[1].numpy() == labels[digits.rows]).all()
    assert (digits.test_labels.numpy() == labels[digits.test_rows]).all()
    shifted = torch.tensor(pixels[digits.test_rows] / 16) - digits.test_images
    assert torch.allclose(shifted, shifted[0].expand_as(shifted))  # centred, otherwise as they were

    sizes = digits.federation.sizes
    assert sizes.max() >= 20 * sizes.min()
    assert sizes[digits.small].max() < sizes[~digits.small].min()
    counts = digits.label_counts
    assert (counts.sum(1) == sizes).all()
    assert 0 < len(digits.rare_digits) < counts.shape[1]
    mixes = [counts[group].sum(0) / counts[group].sum() for group in (digits.small, ~digits.small)]
    assert 0.5 * np.abs(mixes[0] - mixes[1]).sum() > 0.3


# The optima


def test_client_losses_are_the_losses_of_the_clients(objective: Objective) -> None:
    x = torch.linspace(-1, 1, len(objective.problem.start), dtype=torch.float64)
    found = objective.client_losses(x)
    offsets = objective.problem.federation.offsets
    for i in range(len(found)):
        batch = objective.problem.batch(np.arange(offsets[i], offsets[i + 1]))
        assert found[i].item() == pytest.approx(objective.problem.loss_at(x, batch).item())


def test_optimum_minimises_the_objective(objective: Objective, optimum: Tensor) -> None:
    weights = objective.problem.federation.weights
    assert objective.gradient(optimum, weights).abs().max() < 1e-7
    value = objective.value(optimum, weights)
    for seed in range(3):
        away = torch.randn(len(optimum), generator=torch.Generator().manual_seed(seed)).double()
        assert objective.value(optimum + 1e-3 * away, weights) > value


@pytest.mark.parametrize("method", METHODS)
def test_predicted_level_is_that_of_the_effective_optimum(
    method: str, objective: Objective, optimum: Tensor
) -> None:
    federation, settings = objective.problem.federation, Settings()
    found = audit(federation, method, settings.sampling, settings.work)
    effective = objective.optimum(found.effective_weights)
    assert objective.gradient(effective, found.effective_weights).abs().max() < 1e-7
    values = [objective.value(x, federation.weights) for x in (effective, optimum)]
    level = predicted_level(objective, found, optimum)
    assert level == pytest.approx(values[0] - values[1], abs=1e-10)
    assert (level == 0) == (found.consistent is True)


# The run


def test_demo_writes_consistent_results(short: Summary) -> None:
    assert [method.method for method in short.methods] == list(METHODS)
    assert short.files.picture.read_bytes().startswith(b"\x89PNG")
    results = json.loads(short.files.results.read_text())
    assert results["rounds"] == list(range(ROUNDS + 1))
    assert results["settings"]["seed"] == short.seed == 5
    assert sum(results["federation"]["sizes"]) == np.sum(results["federation"]["label_counts"])
    for method, found in zip(short.methods, results["methods"], strict=True):
        curves = np.array(found["suboptimality"])
        assert curves.shape == (short.runs, ROUNDS + 1)
        assert (curves > 0).all()
        assert method.reached == Spread.of(curves[:, -1])
        assert method.predicted == found["predicted"]
        assert method.total_variation == found["audit"]["total_variation"]
        assert method.accuracy.mean == pytest.approx(np.mean(found["accuracy"]))
        excess = np.array(found["excess"])
        assert excess.shape == (short.runs, short.clients)
        # The clients' losses, weighed as meant, add up to what is left to gain.
        weights = found["audit"]["objective_weights"]
        assert excess @ weights == pytest.approx(curves[:, -1])
        assert str(method.step_size) == min(found["pilots"], key=found["pilots"].__getitem__)
    assert json.loads(json.dumps(short.to_dict()))["files"]["page"] == str(short.files.page)


def test_demo_is_reproducible_and_shows_progress_on_stderr(
    short: Summary, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    again = demo(tmp_path / "deep" / "down", rounds=ROUNDS, seed=5)
    shown = capfd.readouterr()
    assert shown.out == ""
    for text in ("Audit", "Choosing step sizes", "Training"):
        assert text in shown.err
    assert again.methods == short.methods
    assert again.files.results.read_bytes() == short.files.results.read_bytes()
    assert again.files.picture.read_bytes() == short.files.picture.read_bytes()


def test_page_is_self_contained_and_escaped(short: Summary) -> None:
    page = short.files.page.read_text(encoding="utf-8")
    assert "://" not in page
    assert "<script" not in page
    assert "<link" not in page
    sources = re.findall(r'src(?:set)?="([^"]*)"', page)
    assert len(set(sources)) == 2 * len(PICTURES)  # one for light, one for dark pages
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "a <b>" not in page
    assert "a &lt;b&gt;" in page
    assert f"--seed {short.seed} --rounds {short.rounds}" in page
    for method in short.methods:
        assert words.settled(method).replace("'", "&#39;") in page


@pytest.mark.parametrize(
    ("rounds", "seed", "message"),
    [(0, 0, "rounds"), (-1, 0, "rounds"), (1.5, 0, "rounds"), (1, -1, "seed"), (1, 2**64, "seed")],
)
def test_bad_numbers_are_refused_before_any_work(
    rounds: int, seed: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        demo(tmp_path / "out", rounds=rounds, seed=seed)
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedshuffle.experiments.demo.audit_and_train",
        lambda *_: pytest.fail("worked already"),
    )
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FedShuffleError, match="another folder"):
        demo(tmp_path / "out", progress=False)
    assert (tmp_path / "out").read_text() == "mine"


def test_pilots_and_runs_have_different_seeds() -> None:
    pilots, runs = Settings(seed=2**64 - 1).seeds()
    assert len({*pilots, *runs}) == len(pilots) + len(runs)
    assert all(0 <= seed < 2**64 for seed in pilots + runs)


# The words


def change(summary: Summary, k: int, **changes: object) -> Summary:
    """The summary with one method's numbers changed."""
    methods = list(summary.methods)
    methods[k] = dataclasses.replace(methods[k], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(summary, methods=tuple(methods))


def with_reached(summary: Summary, *means: float, std: float = 0.0) -> Summary:
    for k, mean in enumerate(means):
        summary = change(summary, k, reached=Spread(mean, std))
    return summary


def test_the_headline_follows_the_digits_of_small_clients(short: Summary) -> None:
    def read(*shares: float, std: float = 0.0) -> str:
        found = with_reached(short, 0.3, 0.2, 0.1)
        for k, share in enumerate(shares):
            found = change(found, k, accuracy_rare=Spread(share, std))
        return words.headline(found)

    assert "86% right with FedAvgRR, 95% with FedShuffle" in read(0.856, 0.947, 0.947)
    assert "70% right with FedNovaRR, 90% with FedShuffle" in read(0.8, 0.7, 0.9)
    assert "no method reads them better than FedShuffle" in read(0.9, 0.9, 0.8)
    assert "no method reads them better" in read(0.86, 0.9, 0.9, std=0.03)
    assert "which objective" in words.headline(dataclasses.replace(short, rare_digits=()))


def test_the_reason_gives_the_weight_of_small_clients(short: Summary) -> None:
    results = json.loads(short.files.results.read_text())
    small = np.array(results["federation"]["small"])
    sizes = np.array(results["federation"]["sizes"])
    assert short.small_weight == pytest.approx(sizes[small].sum() / sizes.sum())
    for method, found in zip(short.methods, results["methods"], strict=True):
        weights = np.array(found["audit"]["effective_weights"])
        assert method.small_weight == pytest.approx(weights[small].sum())
    assert short.methods[2].small_weight == pytest.approx(short.small_weight)
    assert percent(short.small_weight) in words.reason(short)


def test_the_answer_names_the_closest_method(short: Summary) -> None:
    assert "FedShuffle is closest" in words.answer(with_reached(short, 0.3, 0.2, 0.1))
    text = words.answer(with_reached(short, 0.1, 0.4, 2.0))
    assert "FedAvgRR is closest" in text
    assert "4.0 times as much with FedNovaRR and 20 times as much with FedShuffle" in text
    assert "spread" not in text
    close = words.answer(with_reached(short, 0.5, 0.11, 0.10, std=0.02))
    assert "Between FedShuffle and FedNovaRR the gap is within the spread" in close


def test_the_audit_is_credited_only_for_the_right_order(short: Summary) -> None:
    order = sorted(range(3), key=lambda k: short.methods[k].predicted)
    means = [0.0] * 3
    for place, k in enumerate(order):
        means[k] = 0.1 * (place + 1)
    assert "in this order" in words.ranking(with_reached(short, *means))
    assert "another order" in words.ranking(with_reached(short, *[1 - m for m in means]))


@pytest.mark.parametrize(
    ("predicted", "reached", "said"),
    [
        (0.0, 0.01, "no bias"),
        (0.1, 0.11, "settled where the audit said"),
        (0.1, 0.09, "settled where the audit said"),
        (0.1, 0.3, "not there yet"),
        (0.1, 0.01, "still below"),
    ],
)
def test_settled_compares_the_numbers(
    short: Summary, predicted: float, reached: float, said: str
) -> None:
    method: MethodSummary = dataclasses.replace(
        short.methods[0], predicted=predicted, reached=Spread(reached, 0.0)
    )
    text = words.settled(method)
    assert said in text
    assert number(reached) in text


def test_the_objectives_follow_the_audit(short: Summary) -> None:
    assert "FedShuffle minimises the objective you meant." in words.objectives(short)
    assert "FedAvgRR and FedNovaRR minimise another" in words.objectives(short)
    turned = change(change(short, 0, consistent=True), 2, consistent=False, total_variation=0.25)
    assert "FedAvgRR minimises the objective you meant." in words.objectives(turned)
    assert "25.0%" in words.objectives(turned)
    assert "as far as the audit can tell" in words.objectives(change(short, 1, consistent=None))


def test_who_pays_follows_the_losses(short: Summary) -> None:
    small = change(short, 1, excess_small=9.0, excess_large=-1.0)
    assert "under FedNovaRR, by the small clients" in words.who_pays(small)
    assert "9 higher than at the optimum" in words.who_pays(small)
    assert "large clients 1 lower" in words.who_pays(small)
    assert "by the large clients" in words.who_pays(change(short, 0, excess_large=9.0))


def test_early_and_late_name_the_leaders(short: Summary) -> None:
    late = with_reached(short, 0.3, 0.2, 0.1)
    for k, early in enumerate((0.1, 0.2, 0.3)):
        late = change(late, k, early=Spread(early, 0.0))
    assert "FedAvgRR was closest; " in words.early_and_late(late)
    assert "it is FedShuffle" in words.early_and_late(late)
    assert "still is" in words.early_and_late(with_reached(late, 0.1, 0.2, 0.3))


def test_summary_prints_every_method_and_file(short: Summary) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_summary(console, short)
    text = console.export_text()
    for method in short.methods:
        assert percent(method.total_variation) in text
        assert number(method.predicted) in text
    assert str(short.files.page) in text
    assert words.objectives(short)[:40] in text
    assert text.startswith(words.headline(short)[:60])


# The page in a browser


@pytest.mark.slow
@pytest.mark.parametrize("width", [420, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_and_can_be_read(
    browser: Browser, short: Summary, width: int, dark: bool
) -> None:
    browser.window(width, 800, dark=dark, phone=width == 420)
    browser.open(short.files.page)
    assert browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    # The message and a bar for every method and the optimum stand on the first screen.
    bottoms = browser.run(
        "[...document.querySelectorAll('.bar')].map(b => b.getBoundingClientRect().bottom)"
    )
    assert len(bottoms) == len(short.methods) + 1
    assert max(bottoms) <= 800
    assert browser.run("document.querySelector('h1').textContent") == words.headline(short)
    # Ink and page differ as people with weak eyes need it (WCAG AA).
    parts = "getComputedStyle(document.querySelector('{}')).{}"
    ink, page = (
        contrast_part(browser.run(parts.format(*where)))
        for where in (("p.quiet", "color"), ("main", "backgroundColor"))
    )
    assert (max(ink, page) + 0.05) / (min(ink, page) + 0.05) >= 4.5
    assert (page < 0.1) == dark
    # Headings go down one level at a time.
    levels = browser.run(
        "[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    # Pictures follow the colour scheme.
    shown = browser.run("[...document.images].map(i => i.currentSrc)")
    other = browser.run("[...document.querySelectorAll('source')].map(s => s.srcset)")
    assert (shown == other) == dark


def contrast_part(colour: str) -> float:
    """The relative luminance of ``rgb(r, g, b)``."""
    return luminance(np.array([int(part) for part in re.findall(r"\d+", colour)[:3]]))
