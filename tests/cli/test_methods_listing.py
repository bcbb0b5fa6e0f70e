"""`fedshuffle methods` and docs/explanation/methods: what they say follows from the code."""

import dataclasses
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedshuffle import Method, audit, cli, methods
from fedshuffle.cli.methods import print_methods
from fedshuffle.experiments import method_pictures
from fedshuffle.experiments.method_pictures import PICTURES, Curve, blocks
from fedshuffle.experiments.pages import filled
from fedshuffle.methods import Direction, LocalPlan, RoundContext, Steps
from fedshuffle.reports import methods as listing

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "explanation" / "methods").glob("*.md"))
FAMILIES = {
    page: list(members)
    for page, members in itertools.groupby(methods.available(), lambda m: listing.family(m).page)
}
NAMES = [method.name for method in methods.available()]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in listing.everything()}


@pytest.fixture
def registered() -> Iterator[list[Method]]:
    """Methods put in here are known during the test."""
    added: list[Method] = []
    yield added
    for method in added:
        methods._REGISTRY.pop(method.name)


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    monkeypatch.setattr(sys, "argv", ["fedshuffle", "methods", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    return capsys.readouterr().out


# The facts -----------------------------------------------------------------------------------


def test_every_method_is_in_one_family() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert set(NAMES) == {method.name for method in methods.available()}


def test_costs_are_those_of_the_algorithms(rows: dict[str, dict[str, Any]]) -> None:
    """Messages, vectors down and up, counted by hand in the papers' algorithm boxes."""
    want = {
        "fedavg-rr": (2, 1, 1),
        "fedshuffle": (2, 1, 1),
        "fedshuffle-mvr": (4, 3, 3),
        "scaffold": (2, 2, 2),
        "fedlin": (4, 2, 2),
        "fedlin-sparse": (4, 2, 1.2),
        "mime": (4, 3, 2),
        "mime-lite": (2, 2, 2),
        "fedadam": (2, 1, 1),
        "mifa": (2, 1, 1),
        "fedvarp": (2, 1, 1),
        "fedawe": (2, 1, 1),
        "amplified": (2, 1, 1),
        "pooled-rr": (0, 0, 0),
        "non-local-mvr": (2, 2, 2),
    }
    for name, costs in want.items():
        found = rows[name]["costs"]
        assert (found["messages"], found["vectors_down"], found["vectors_up"]) == costs, name


def test_who_keeps_client_state(rows: dict[str, dict[str, Any]]) -> None:
    keeping = {name for name, row in rows.items() if row["client_state"]}
    remembering = {"mifa", "fedvarp", "fedawe"}
    assert keeping == {"scaffold", "scaffold-i", "vrl-sgd", "fedlin-sparse", *remembering}


def test_pairs_written_out_are_uniform_sampling() -> None:
    sampling, work = listing.CONDITIONS["client_sampling"]
    for name in ("fedavg-rr", "fednova-original", "fedshuffle", "fedshuffle-mvr", "fedavg-mean"):
        written = audit(listing.CLIENTS, name, sampling, work)
        named = audit(listing.CLIENTS, name, "uniform:2", work)
        np.testing.assert_allclose(written.effective_weights, named.effective_weights, rtol=1e-8)


def test_options_are_what_a_name_takes(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["fedprox"]["options"] == {"mu": 0.01}
    assert rows["fedshuffle-capped"]["options"] == {"rho": 2.0}
    assert rows["fedadam"]["options"] == {"b1": 0.9, "b2": 0.99, "epsilon": 1e-3}
    assert rows["mime-lite"]["options"]["corrected"] is False
    for name, row in rows.items():
        for option, value in row["options"].items():
            text = f"{name}:{option}={listing._plain(value)}"
            same = methods.get(text)
            assert same.direction == methods.get(name).direction, text
            assert same.server == methods.get(name).server, text


class Sideways(Direction):
    """No formula for its audit; half the gradient, from a direction the audit cannot know."""

    def round(self, context: RoundContext) -> Steps:
        from fedshuffle.kernel import StepCoefficients

        yield LocalPlan(StepCoefficients(alpha=0.5))
        return {}


@pytest.mark.slow
def test_a_method_of_the_users_own_is_listed_too(registered: list[Method]) -> None:
    rule = methods.get("fedavg-rr").averaging
    registered.append(methods.register(Method("mine", "half steps", rule, Sideways())))
    row = listing.everything()[-1]
    assert (row["name"], row["family"]) == ("mine", listing.OWN.page)
    assert row["consistent"]["uneven_steps"] is False  # it was played, and FedAvg's bias was seen
    text = "\n".join(_printed(100))
    assert "Your own" in text
    assert "half steps" in text


# The listing ---------------------------------------------------------------------------------


def _printed(width: int) -> list[str]:
    file = io.StringIO()
    print_methods(Console(width=width, file=file), listing.everything())
    return file.getvalue().splitlines()


def test_json_has_everything(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rows: dict[str, dict[str, Any]],
) -> None:
    assert json.loads(command(monkeypatch, capsys, "--json")) == list(rows.values())


def test_the_listing_fits_a_terminal(rows: dict[str, dict[str, Any]]) -> None:
    lines = _printed(100)
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for row in rows.values():
        for part in (row["name"], row["summary"], row["reference"]):
            assert part in text
    (scaffold,) = [line for line in lines if line.startswith("scaffold ")]
    assert scaffold.split()[:8] == ["scaffold", "2", "2", "2", "yes", "yes", "yes", "yes"]
    (mvr,) = [line for line in lines if line.startswith("fedshuffle-mvr ")]
    assert mvr.split()[:8] == ["fedshuffle-mvr", "4", "3", "3", "no", "yes", "no", "no"]
    assert "    options: mu=0.01" in lines
    assert all(listing.family(members[0]).title in lines for members in FAMILIES.values())


# The pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_not_stale(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text, blocks()) == text, "run 'make docs-pictures'"


def test_every_family_has_a_page_with_its_methods_options_and_picture(
    rows: dict[str, dict[str, Any]],
) -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
    assert set(pages) == {"index", "momentum", *FAMILIES}
    assert set(pages) == {"index", *PICTURES}
    assert "<!-- generated: table all -->" in pages["index"]
    for page, text in pages.items():
        if page != "index":
            assert f"<!-- generated: picture {page} -->" in text
            for word in ("Objective", "When to use", "When not", "Paper", ">>> "):
                assert word in text, f"{page} lacks {word}"
    for name, row in rows.items():
        assert f"[`{name}`](" in pages["index"]
        for option in row["options"]:
            assert re.search(rf"[`:]{option}[`=]", pages[row["family"]]), f"{name} lacks {option}"


def test_every_method_is_in_its_familys_picture() -> None:
    for page, members in FAMILIES.items():
        shown = {re.split("[:+]", curve.name)[0] for curve in PICTURES[page].curves}
        assert {method.name for method in members} <= shown


def test_every_method_has_a_label_and_a_colour_unlike_its_family() -> None:
    for members in FAMILIES.values():
        labels, colours = zip(*(method.style for method in members), strict=True)
        assert len(set(colours)) == len(colours)
        assert "#000000" not in colours
        assert not {method.name for method in members} & set(labels)


def test_a_renamed_copy_goes_by_its_name() -> None:
    copy = dataclasses.replace(methods.get("fedavg"), name="mine")
    assert (methods.label(copy), methods.colour(copy)) == ("mine", "#000000")
    assert listing.family(copy) is listing.OWN
    assert methods.label(methods.get("fedprox:mu=0.5")) == "fedprox:mu=0.5"
    assert methods.label("unknown") == "unknown"


# The pictures --------------------------------------------------------------------------------


def test_pictures_are_small() -> None:
    for page in PICTURES:
        assert (DOCS / "images" / "methods" / f"{page}.png").stat().st_size < 60_000


def test_all_runs_of_a_picture_move_equally_far() -> None:
    """One round of tiny steps from 0 moves along the mean gradient, 1/6 in every coordinate."""
    import torch

    from fedshuffle.engines import ReferenceEngine
    from fedshuffle.experiments.method_pictures import Picture, run
    from fedshuffle.experiments.toy_problems import toy
    from fedshuffle.training.rounds import run_round

    for name in ("fedshuffle", "fednova-rr", "fedlin", "distributed-gd", "non-local-mvr"):
        picture = Picture((Curve(name),), pace=1e-4)
        one = run(Curve(name), picture, "full", seed=0)
        assert one is not None
        engine = ReferenceEngine(toy(picture.sizes).problem)
        (state,) = run_round(engine, [one], [one.start(engine.problem.start)])
        torch.testing.assert_close(state.x, torch.full_like(state.x, 1e-4 / 6), rtol=1e-3, atol=0)


def test_curves_are_those_of_training() -> None:
    """A curve, again through the public function; and pooled data converge to the optimum."""
    import torch

    from fedshuffle import train
    from fedshuffle.experiments.quadratic import SEEDS
    from fedshuffle.experiments.toy_problems import half_squares, toy
    from fedshuffle.testing.problems import Point

    found = {n: method_pictures.compute(PICTURES[n], rounds=6) for n in ("scaffold", "baselines")}
    (curve,) = [c for c in PICTURES["scaffold"].curves if c.name == "scaffold"]
    distances = []
    for seed in SEEDS:
        one = method_pictures.run(curve, PICTURES["scaffold"], "uniform:2", seed)
        assert one is not None
        result = train(
            Point(torch.zeros(6, dtype=torch.float64)),
            toy((1, 2, 3)).problem.federation,
            loss=half_squares,
            method="scaffold",
            sampling="uniform:2",
            step_size=one.step_size,
            rounds=6,
            seed=seed,
        )
        (x,) = result.model.parameters()
        distances.append(float((x.detach() - 1 / 6).square().sum()))
    got = found["scaffold"]["uniform:2"][curve]
    np.testing.assert_allclose(got[-1], np.mean(distances), rtol=1e-6)
    baselines = {c.name: values for c, values in found["baselines"]["full"].items()}
    # Full steps over all data: the distance shrinks by (1 - pace)^2 a round.
    shrink = (1 - method_pictures.PACE) ** (2 * np.arange(1, 7)) / 6
    np.testing.assert_allclose(baselines["distributed-gd"], shrink, rtol=1e-9)
    np.testing.assert_allclose(baselines["pooled-rr"], shrink, rtol=1e-2)
    assert {c.name for c in found["baselines"]["uniform:2"]} == {
        "fedavg-rr",
        "fedshuffle",
        "distributed-gd",
        "non-local-mvr",
    }


def test_it_draws_and_refreshes(tmp_path: Path) -> None:
    (tmp_path / "explanation" / "methods").mkdir(parents=True)
    page = tmp_path / "explanation" / "methods" / "vrl-sgd.md"
    page.write_text("before\n<!-- generated: picture vrl-sgd -->\nold\n<!-- end -->\nafter\n")
    method_pictures.write(tmp_path, ["vrl-sgd"], rounds=5)
    assert (tmp_path / "images" / "methods" / "vrl-sgd.png").stat().st_size > 1000
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "(../../images/methods/vrl-sgd.png)" in text
    assert "old" not in text
