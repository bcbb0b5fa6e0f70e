"""The demo: its data, its optima, its files, and words that follow the numbers."""

import contextlib
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from fedshuffle import FedShuffleError, audit
from fedshuffle._arrays import FloatArray
from fedshuffle.engines.cpu_tuning import one_thread
from fedshuffle.experiments.demo.experiment import (
    L2,
    METHODS,
    RARE,
    RUNS,
    SAMPLING,
    WORK,
    DemoResult,
    Digits,
    predicted_level,
    seeds,
    split,
)
from fedshuffle.experiments.demo.report import (
    FILES,
    PICTURES,
    answer,
    demo,
    headline,
    print_summary,
    reason,
    who_pays,
)
from fedshuffle.reports.rendering import number, percent
from tests.accessibility import problems, unseen_focus
from tests.chromium import Browser

pytestmark = pytest.mark.xdist_group("demo")  # what they share is made once

ROUNDS = 3


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name must be escaped."""
    return tmp_path_factory.mktemp("a <b> & 'c'")


@pytest.fixture(scope="module")
def short(folder: Path) -> DemoResult:
    """A demo of a few rounds, in silence."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        made = demo(folder, rounds=ROUNDS, seed=5, progress=False)
    assert said.getvalue() == ""
    return made


@pytest.fixture(scope="module")
def digits() -> Digits:
    return split(0)


@pytest.fixture(scope="module")
def optimum(digits: Digits) -> Tensor:
    return digits.optimum(digits.federation.weights)


# The split


def test_split_is_a_function_of_the_seed() -> None:
    first, again, other = split(1), split(1), split(2)
    assert (first.federation.sizes == again.federation.sizes).all()
    assert torch.equal(first.federation.fields[0], again.federation.fields[0])
    assert torch.equal(first.test_images, again.test_images)
    assert not torch.equal(first.test_images, other.test_images)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 2**64 - 1])
def test_split_covers_every_example_once_with_very_different_clients(seed: int) -> None:
    digits = split(seed)
    pixels, labels = load_digits(return_X_y=True)
    mine, targets = digits.federation.fields
    images = torch.cat([mine, digits.test_images]).numpy()
    assert (images[:, -1] == 1).all()  # for the bias
    assert mine[:, :-1].mean(0).abs().max() < 1e-12  # centred, otherwise as they were
    found = (images[:, :-1] - images[:, :-1].min(0)) * 16 + pixels.min(0)
    both = np.column_stack([found.round(), torch.cat([targets, digits.test_labels])])
    assert sorted(both.tolist()) == sorted(np.column_stack([pixels, labels]).tolist())

    sizes = digits.federation.sizes
    assert sizes.max() >= 20 * sizes.min()
    assert sizes[digits.small].max() < sizes[~digits.small].min()
    counts = digits.label_counts
    assert (counts.sum(1) == sizes).all()
    assert 0 < len(digits.rare_digits) < counts.shape[1]
    mixes = [counts[group].sum(0) / counts[group].sum() for group in (digits.small, ~digits.small)]
    assert 0.5 * np.abs(mixes[0] - mixes[1]).sum() > 0.3


# The optima


def test_client_losses_are_the_losses_of_the_clients(digits: Digits) -> None:
    problem, d = digits.problem, len(digits.problem.start)
    models = torch.stack([torch.linspace(-1, 1, d), torch.linspace(0, 2, d)]).double()
    offsets = digits.federation.offsets
    for x, found in zip(models, digits.client_losses(models), strict=True):
        for i in range(len(found)):
            batch = problem.batch(np.arange(offsets[i], offsets[i + 1]))
            loss = problem.loss_at(x, batch) + L2 / 2 * x.square().sum()
            assert found[i] == pytest.approx(loss.item())


def gradient(digits: Digits, x: Tensor, weights: FloatArray) -> Tensor:
    """That of ``sum_i weights_i f_i``, by automatic differentiation."""
    x = x[0].clone().requires_grad_()
    images, labels = digits.federation.fields
    sizes = digits.federation.sizes
    share = torch.tensor(np.repeat(weights / sizes, sizes))
    logits = images @ x.view(10, -1).T
    value = share @ functional.cross_entropy(logits, labels, reduction="none")
    (found,) = torch.autograd.grad(value + L2 / 2 * x.square().sum(), [x])
    return found


def test_optimum_minimises_the_objective(digits: Digits, optimum: Tensor) -> None:
    assert gradient(digits, optimum, digits.federation.weights).abs().max() < 1e-7
    away = torch.randn(3, optimum.shape[1], generator=torch.Generator().manual_seed(0)).double()
    assert (digits.suboptimality(optimum + 1e-3 * away, optimum) > 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_predicted_level_is_that_of_the_effective_optimum(
    method: str, digits: Digits, optimum: Tensor
) -> None:
    found = audit(digits.federation, method, SAMPLING, WORK)
    effective = digits.optimum(found.effective_weights)
    assert gradient(digits, effective, found.effective_weights).abs().max() < 1e-7
    values = [digits.client_losses(x)[0] @ digits.federation.weights for x in (effective, optimum)]
    level = predicted_level(digits, found, optimum)
    assert level == pytest.approx(values[0] - values[1], abs=1e-10)
    assert (level == 0) == (found.consistent is True)


# The run


def test_demo_writes_consistent_results(short: DemoResult, folder: Path) -> None:
    assert [method.name for method in short.methods] == list(METHODS)
    assert (folder / FILES["picture"]).read_bytes().startswith(b"\x89PNG")
    results = json.loads((folder / FILES["results"]).read_text())
    assert results == json.loads(json.dumps(short.to_dict()))
    assert results["evaluated"] == list(range(ROUNDS + 1))
    assert results["seed"] == short.seed == 5
    assert sum(results["digits"]["sizes"]) == np.sum(results["digits"]["label_counts"])
    for method, found in zip(short.methods, results["methods"], strict=True):
        assert method.suboptimality.shape == (RUNS, ROUNDS + 1)
        assert (method.suboptimality > 0).all()
        assert found["suboptimality"] == method.suboptimality.tolist()
        assert found["audit"]["total_variation"] == method.audit.total_variation
        assert method.excess.shape == (RUNS, len(short.digits.federation))
        # The clients' losses, weighted as meant, add up to what is left to gain.
        weights = method.audit.objective_weights
        assert method.excess @ weights == pytest.approx(method.left)
        assert method.step_size == min(method.pilots, key=method.pilots.__getitem__)
        assert method.rare.shape == (RUNS,)


def test_demo_is_reproducible_and_shows_progress_on_stderr(
    short: DemoResult, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    again = demo(tmp_path / "deep" / "down", rounds=ROUNDS, seed=5)
    shown = capfd.readouterr()
    assert shown.out == ""
    for text in ("Audit", "Choosing step sizes", "Training"):
        assert text in shown.err
    assert again.to_dict() == short.to_dict()
    for name in (FILES["results"], FILES["picture"]):
        assert (tmp_path / "deep" / "down" / name).read_bytes() == (folder / name).read_bytes()


def test_page_is_self_contained_and_escaped(short: DemoResult, folder: Path) -> None:
    page = (folder / FILES["page"]).read_text(encoding="utf-8")
    assert "://" not in page
    assert "<script" not in page
    assert "<link" not in page
    sources = re.findall(r'src(?:set)?="([^"]*)"', page)
    assert len(set(sources)) == 2 * len(PICTURES)  # one for light, one for dark pages
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "a <b>" not in page
    assert "a &lt;b&gt;" in page
    assert f"--seed {short.seed} --rounds {short.rounds}" in page
    for sentence in (headline, reason, answer, who_pays):
        assert escape(sentence(short)) in page


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
        "fedshuffle.experiments.demo.experiment.audit_and_train",
        lambda *_: pytest.fail("worked already"),
    )
    (tmp_path / "out").write_text("mine")
    with pytest.raises(FedShuffleError, match="another folder"):
        demo(tmp_path / "out", progress=False)
    assert (tmp_path / "out").read_text() == "mine"


def test_pilots_and_runs_have_different_seeds() -> None:
    pilots, runs = seeds(2**64 - 1)
    assert len({*pilots, *runs}) == len(pilots) + len(runs)
    assert all(0 <= seed < 2**64 for seed in pilots + runs)


# The words


def change(result: DemoResult, k: int, **changes: Any) -> DemoResult:
    """The result with one method's numbers changed."""
    methods = list(result.methods)
    methods[k] = dataclasses.replace(methods[k], **changes)
    return dataclasses.replace(result, methods=tuple(methods))


def runs(mean: float, std: float) -> FloatArray:
    """Two runs with this mean and standard deviation."""
    return mean + std * np.array([1, -1]) / math.sqrt(2)


def with_left(result: DemoResult, *means: float, std: float = 0.0) -> DemoResult:
    for k, mean in enumerate(means):
        result = change(result, k, suboptimality=runs(mean, std)[:, None])
    return result


def with_rare(result: DemoResult, *shares: float, std: float = 0.0, bias: float = 0.3) -> Any:
    """The methods read these shares of the digits of small clients; the first has this bias."""
    result = change(with_left(result, 0.3, 0.2, 0.1), 0, predicted=bias)
    for k, share in enumerate(shares):
        result = change(result, k, accuracies={RARE: runs(share, std)})
    return result


def test_the_headline_gives_the_numbers_of_the_run(short: DemoResult) -> None:
    found = with_rare(short, 0.856, 0.947, 0.947)
    seen = "FedAvg gets 86% of the small clients' digits right, FedShuffle 95%"
    assert headline(found) == f"{seen}: FedAvg minimised another objective"
    # Of those that read them alike, the one nearest the optimum is named.
    assert headline(with_left(found, 0.3, 0.1, 0.2)).endswith(
        "right, FedNova 95%: FedAvg minimised another objective"
    )


def test_the_headline_blames_the_objective_only_where_the_audit_explains_it(
    short: DemoResult,
) -> None:
    noisy = with_rare(short, 0.856, 0.947, 0.947, bias=0.1)  # of 0.3 that are left
    assert headline(noisy) == "FedAvg gets 86% of the small clients' digits right, FedShuffle 95%"
    assert reason(noisy).startswith("Bias alone does not explain it: you meant")
    consistent = with_rare(short, 0.9, 0.9, 0.7)
    assert headline(consistent).startswith("FedShuffle gets 70%")
    assert "objective" not in headline(consistent)


def test_the_headline_says_so_where_nothing_is_to_be_seen(short: DemoResult) -> None:
    alike = with_rare(short, 0.86, 0.9, 0.9, std=0.03)
    seen = "FedAvg 86%, FedNova 90%, FedShuffle 90% right"
    assert headline(alike) == f"No clear difference on the small clients' digits: {seen}"
    assert reason(alike).startswith("You meant the small clients to count")


def test_the_reason_gives_the_weight_of_small_clients(short: DemoResult) -> None:
    sizes, small = short.digits.federation.sizes, short.digits.small
    found = with_rare(short, 0.856, 0.947, 0.947)
    first, _, last = (percent(m.count_of(small)) for m in found.methods)
    meant = percent(sizes[small].sum() / sizes.sum())
    told = f"You meant the small clients to count for {meant} of the objective"
    assert reason(found) == f"{told}; FedAvg gives them {first}, FedShuffle {last}."


def test_the_answer_names_the_closest_method(short: DemoResult) -> None:
    assert "FedShuffle is closest" in answer(with_left(short, 0.3, 0.2, 0.1))
    text = answer(with_left(short, 0.1, 0.4, 2.0))
    assert "FedAvg is closest" in text
    assert "4.0 times as much with FedNova and 20 times as much with FedShuffle" in text
    assert "spread" not in text
    close = answer(with_left(short, 0.5, 0.11, 0.10, std=0.02))
    assert "Between FedShuffle and FedNova the gap is within the spread" in close


def test_the_audit_is_credited_only_for_the_right_order(short: DemoResult) -> None:
    order = sorted(range(3), key=lambda k: short.methods[k].predicted)
    means = [0.0] * 3
    for place, k in enumerate(order):
        means[k] = 0.1 * (place + 1)
    assert "in this order" in answer(with_left(short, *means))
    assert "another order" in answer(with_left(short, *[1 - m for m in means]))


def test_who_pays_follows_the_losses(short: DemoResult) -> None:
    small = short.digits.small
    costly = change(short, 1, excess=np.where(small, 9.0, -1.0)[None])
    assert "under FedNova, by the small clients" in who_pays(costly)
    assert "9 higher than at the optimum" in who_pays(costly)
    assert "large clients 1 lower" in who_pays(costly)
    costly = change(short, 0, excess=np.where(small, 0.0, 9.0)[None])
    assert "by the large clients" in who_pays(costly)


def test_summary_prints_every_method_and_file(short: DemoResult, folder: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_summary(console, short, folder)
    text = console.export_text()
    for method in short.methods:
        assert percent(method.audit.total_variation) in text
        assert number(method.predicted) in text
    assert all(str(folder / name) in text for name in FILES.values())
    # It ends with the message and where the page is.
    *_, last = text.rstrip().splitlines()
    assert last.split(maxsplit=1) == ["page", str(folder / FILES["page"])]
    plain = " ".join(text.split())
    assert plain.index(headline(short)) > plain.index(who_pays(short))
    assert plain.index(reason(short)) > plain.index(headline(short))


# The page in a browser


@pytest.mark.slow
@pytest.mark.parametrize("width", [420, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_and_can_be_read(
    browser: Browser, short: DemoResult, folder: Path, width: int, dark: bool
) -> None:
    browser.window(width, 800, dark=dark, phone=width == 420)
    browser.open(folder / FILES["page"])
    assert problems(browser) == []
    # The message is on the first screen: headline, reason, and bars for each method and the aim.
    assert browser.run("document.querySelector('.message').getBoundingClientRect().bottom") <= 800
    assert browser.run("document.querySelector('h1').textContent") == headline(short)
    assert browser.run("document.querySelector('.reason').textContent") == reason(short)
    bars = browser.run("document.querySelectorAll('.message .bar').length")
    assert bars == 2 * (len(short.methods) + 1)
    page = browser.run("getComputedStyle(document.querySelector('main')).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", page))) < 150) == dark
    # Pictures follow the colour scheme.
    shown = browser.run("[...document.images].map(i => i.currentSrc)")
    other = browser.run("[...document.querySelectorAll('source')].map(s => s.srcset)")
    assert (shown == other) == dark


@pytest.mark.slow
def test_the_focus_is_seen(browser: Browser, short: DemoResult, folder: Path) -> None:
    browser.window(420, 800, phone=True)
    browser.open(folder / FILES["page"])
    assert unseen_focus(browser) == []
