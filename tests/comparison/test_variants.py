"""Entries of compare.methods that bring settings of their own."""

import math
from pathlib import Path
from typing import Any

import pytest

from fedshuffle import FedShuffleError, comparison
from fedshuffle.comparison import Comparison, GridPoint, Variant
from fedshuffle.comparison.results import collect_facts
from fedshuffle.config.writer import toml
from tests.comparison.project import project

pytestmark = pytest.mark.xdist_group("comparison")  # they share one comparison

BY_SIZE = {
    "name": "by size",
    "method": "fedshuffle",
    "sampling": "importance:2",
    "work": {"clip": math.inf, "batch_size": 3},
    "step_sizes": [0.5, 5],
    "server_step_sizes": [1, 2],
}


def loaded(folder: Path, *entries: Any, **changes: Any) -> Comparison:
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return comparison.load(project(folder), {"compare.methods": list(entries), **changes})


def test_a_variant_has_its_own_settings_and_grid(tmp_path: Path) -> None:
    compared = loaded(
        tmp_path, "fedshuffle", BY_SIZE, compare__clip=[1, 5], compare__step_sizes=[0.1, 0.2]
    )
    plain, own = compared.variants
    assert [plain.name, own.name] == ["fedshuffle", "by size"]
    assert {point.clip for point in compared.grid(plain)} == {1, 5}
    assert compared.grid(own) == [  # its own clipping is not varied
        GridPoint(step, server, 0.0, math.inf) for step in (0.5, 5.0) for server in (1.0, 2.0)
    ]
    config = compared.trial(own, compared.grid(own)[3], 7).config
    assert (config.method, config.sampling, config.seed) == ("fedshuffle", "importance:2", 7)
    assert (config.work.clip, config.work.batch_size) == (math.inf, 3)
    assert (config.step_size, config.server_step_size) == (5.0, 2.0)
    short = compared.trial(own, compared.grid(own)[0], None).config
    assert (short.sampling, short.rounds, short.evaluation) == (
        *("importance:2", 6),
        compared.short.evaluation,
    )
    other = compared.trial(plain, compared.grid(plain)[0], 7).config
    assert (other.sampling, other.work.batch_size) == ("full", compared.base.work.batch_size)
    assert compared.common_point(own, 4.0) == GridPoint(4.0, 1.0, 0.0, math.inf)


def test_a_variant_is_the_same_when_the_comparison_is_read_again(tmp_path: Path) -> None:
    compared = loaded(tmp_path, BY_SIZE, {**BY_SIZE, "name": "b", "work": {"epochs": [1, 2, 1, 2]}})
    again = tmp_path / "again.toml"
    again.write_text(toml(compared.tables))
    assert comparison.load(again) == compared
    assert compared.config(compared.variants[1]).work.epochs == (1, 2, 1, 2)


def test_a_variant_alone_may_have_a_grid(tmp_path: Path) -> None:
    """The others are run at common step sizes only."""
    text = (project(tmp_path)).read_text()
    text = text.replace("step_sizes = [0.1, 1.9, 1.0, 4.0, 1e200]\ncommon_", "common_")
    entry = {"name": "own", "method": "fedavg", "server_step_sizes": [1, 2]}
    compared = comparison.load(
        project(tmp_path, text), {"compare.methods": ["fedshuffle", entry], "step_size": 0.3}
    )
    plain, own = compared.variants
    assert compared.grid(plain) == []
    assert [(p.step_size, p.server_step_size) for p in compared.grid(own)] == [(0.3, 1), (0.3, 2)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{**BY_SIZE, "smapling": "full"}], r"compare.methods: 'by size': .*mean 'sampling'"),
        ([{**BY_SIZE, "seeds": [1]}], "compare.methods: 'by size': unknown key 'seeds'"),
        ([{"method": "fedavg"}], "compare.methods: .*name is missing"),
        ([{"name": "a"}], "compare.methods: 'a': method is missing"),
        ([{**BY_SIZE, "name": ""}], "name is ''"),
        ([{**BY_SIZE, "name": 3}], "compare.methods: 3: name is 3"),
        ([{**BY_SIZE, "method": ["fedavg"]}], "'by size': method is"),
        ([{**BY_SIZE, "method": "fedavgg"}], "compare.methods: 'by size': .*'fedavgg'"),
        ([{**BY_SIZE, "step_sizes": 0.1}], "'by size': step_sizes is 0.1, but must be a list"),
        ([{**BY_SIZE, "step_sizes": ["a"]}], "'by size': step_sizes is 'a'"),
        ([{**BY_SIZE, "step_sizes": [1, 0]}], "compare.methods: 'by size': step_size: "),
        ([{**BY_SIZE, "server_step_sizes": [1, 1]}], "server_step_sizes has 1 twice"),
        ([{**BY_SIZE, "sampling": 3}], "'by size': sampling is 3"),
        ([{**BY_SIZE, "channel": "topk:7"}], "compare.methods: 'by size': channel: "),
        ([{**BY_SIZE, "work": {"batch_size": 0}}], "'by size': work: batch size is 0"),
        ([{**BY_SIZE, "work": {"batch": 3}}], "'by size': .*'work.batch_size'"),
        ([{**BY_SIZE, "work": 3}], "'by size': work is 3"),
        ([3], "compare.methods is 3"),
        (["fedavg", "fedavg"], "'fedavg' and 'fedavg' would share"),
        ([BY_SIZE, {**BY_SIZE, "method": "fedavg"}], "'by size' and 'by size' would share"),
        ([BY_SIZE, {**BY_SIZE, "name": "by-size"}], "'by size' and 'by-size' would share"),
        ([BY_SIZE, {**BY_SIZE, "name": "fedavg"}, "fedavg"], "'fedavg' and 'fedavg' would share"),
        ([{**BY_SIZE, "name": "tune_it"}], "'tune_it' begins as the folders of tuning runs do"),
    ],
)
@pytest.mark.parametrize("search", ["grid", "descent"])
def test_mistakes_are_reported_with_their_place(
    tmp_path: Path, entries: list[Any], message: str, search: str
) -> None:
    with pytest.raises(FedShuffleError, match=message) as error:
        loaded(tmp_path, *entries, compare__tune__search=search)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({**BY_SIZE, "sampling": "uniform:9"}, "compare.methods: 'by size': sampling: "),
        ({**BY_SIZE, "name": "fedshuffle"}, "'mine:MINE' and 'fedshuffle' are called 'fedshuffle'"),
    ],
)
def test_mistakes_that_need_the_data_are_reported_before_any_run(
    tmp_path: Path, entry: Any, message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        loaded(tmp_path, "mine:MINE", entry).run(jobs=1)
    assert not (tmp_path / "out" / "runs").exists()


def test_names_of_folders_are_unique_and_stable(tmp_path: Path) -> None:
    compared = loaded(
        tmp_path,
        *("fedshuffle", "fedavg-rr", BY_SIZE),
        compare__momentum=["none", "global:0.1"],
        compare__server_step_sizes=[1, 0.5],
        compare__clip=[5, "none"],
        compare__weight_decay=[0, 1e-4],
    )
    trials = [
        compared.trial(one, point, seed)
        for one in compared.variants
        for point in compared.grid(one)
        for seed in (None, 0, 1)
    ]
    names = {trial.name: trial.config for trial in trials}
    assert len(names) == len(trials) == 3 * 2 * (2 * 5 * 2 * 4 + 4 * 2)
    assert names.keys() >= {
        "tune_fedshuffle_none_step0.1",
        "fedshuffle_none_step0.1_seed0",
        "tune_fedavg-rr_global-0.1_step1e+200_server0.5_decay0.0001_clip5.0",
        "by-size_global-0.1_step5.0_server2.0_decay0.0001_seed1",
    }


def test_results_say_what_sets_a_variant_apart(tmp_path: Path) -> None:
    compared = loaded(tmp_path, "fedshuffle", BY_SIZE)
    found = collect_facts(compared)
    plain, own = found.variants.values()
    assert (plain["method"], plain["label"], plain["settings"]) == ("fedshuffle", "FedShuffle", {})
    assert (own["method"], own["label"]) == ("by size", "by size")
    assert own["settings"] == {
        "method": "fedshuffle",
        "sampling": "importance:2",
        "work.clip": "inf",
        "work.batch_size": "3",
    }
    assert found.common["settings"]["server_step_size"] == "1.0"


def test_variants_of_one_method_differ_by_momentum_and_name() -> None:
    one, other = Variant("fedavg", "none"), Variant("fedavg", "none", "slow")
    assert (one.name, one.folder, other.name, other.folder) == (
        *("fedavg", "fedavg_none"),
        *("slow", "slow_none"),
    )
