"""What happens to updates on their way, from a config: transforms, channels, privacy."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fedshuffle import FedShuffleError, Privacy, config
from fedshuffle.config import ImportSpec
from fedshuffle.training.run_folder import RunFolder
from tests.cli.test_cli import run as command
from tests.config.project import CONFIG, MODULE, equal, metrics, weights

OWN = """
from dataclasses import dataclass
from fedshuffle.transforms import Message, Transform

@dataclass(frozen=True)
class Freeze(Transform):
    count: int = 2
    mean = "biased"

    def client(self, updates, state, context):
        updates[:, : self.count] = 0.0
        return Message(updates, metrics={"frozen": [self.count] * len(updates)})
"""
WAY = """
transforms = ["mine:Freeze", { use = "mine:Freeze", count = 1 }]
channel = "topk:0.5+ef"
down_channel = "qsgd:8"
"""
PRIVACY = """
[privacy]
clip = 0.5
noise = 1.5

[privacy.adaptive]
quantile = 0.25
count_noise = 2.0
"""


@pytest.fixture
def file(project: Path) -> Path:
    """The config of the project, with something on the way and without momentum."""
    (project / "mine.py").write_text(MODULE + OWN)
    text = CONFIG.replace('momentum = "mvr:0.5"', WAY) + PRIVACY
    (project / "config.toml").write_text(text)
    return project / "config.toml"


def test_a_run_is_saved_with_what_is_on_the_way(file: Path) -> None:
    found = config.load(file)
    assert found.transforms == (ImportSpec("mine:Freeze"), ImportSpec("mine:Freeze", {"count": 1}))
    result = found.run(file.parent / "a")
    out = file.parent / "a"
    assert config.load(out / "config.toml") == replace(found, out=None)
    saved = tomllib.loads((out / "config.toml").read_text())
    assert saved["privacy"]["adaptive"] == {"quantile": 0.25, "rate": 0.2, "count_noise": 2.0}
    kinds = [one.partition("(")[0] for one in RunFolder(out).settings()["transforms"]]
    assert kinds == ["Freeze", "Freeze", "ErrorFeedback", "AdaptiveClip"]
    record = result.history[-1]
    assert record["frozen"] == 1  # the second, under the same name
    assert 0 < record["epsilon"] == result.frame()["epsilon"].iloc[-1]
    assert record["bytes_up"] < 2 * 4 * 8  # two clients, eight parameters


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    file: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the channel, the down-link and the threshold are part of checkpoints."""
    folder = file.parent
    words = ["run", str(file), "--engine", engine]
    assert command(monkeypatch, *words, "--rounds", "10", "--out", str(folder / "whole")) == 0
    assert command(monkeypatch, *words, "--rounds", "4", "--out", str(folder / "part")) == 0
    assert command(monkeypatch, "run", "--resume", str(folder / "part"), "--rounds", "10") == 0
    assert equal(weights(folder / "part"), weights(folder / "whole"))
    part, whole = metrics(folder / "part"), metrics(folder / "whole")
    evaluated = ("loss", "accuracy")  # round 4 was the last one of the first part
    assert [{k: v for k, v in r.items() if not k.startswith(evaluated)} for r in part] == [
        {k: v for k, v in r.items() if not k.startswith(evaluated)} for r in whole
    ]
    plain = ["--set", "privacy.adaptive.quantile=0.75"]
    assert command(monkeypatch, *words, *plain, "--rounds", "10", "--out", str(folder / "b")) == 0
    assert not equal(weights(folder / "b"), weights(folder / "whole"))  # it is not ignored


def test_a_run_stops_at_its_budget(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spent = Privacy(clip=0.5, noise=4.0, epsilon=1.0, delta=0.1)
    result = replace(config.load(file), rounds=100, privacy=spent).run(file.parent / "a")
    done = len(result.history)
    assert 1 < done < 100
    assert result.history[-1]["epsilon"] <= 1.0
    assert result.stopped == f"the privacy budget, epsilon 1, is spent after round {done}"
    assert command(monkeypatch, "run", "--resume", str(file.parent / "a")) == 0
    printed = capsys.readouterr().out
    assert f"Stopped early: the privacy budget, epsilon 1, is spent after round {done}." in printed
    assert "For more rounds" not in printed


def test_a_channel_on_the_command_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(file), "--channel", "sign+ef", "--out", str(file.parent / "a")]
    assert command(monkeypatch, *words) == 0
    assert config.load(file.parent / "a" / "config.toml").channel == "sign+ef"
    # Per client a sign for each of eight parameters, and a scale.
    assert {record["bytes_up"] for record in metrics(file.parent / "a")} == {2 * (1 + 4)}
    words = ["run", "--resume", str(file.parent / "a"), "--channel", "none"]
    assert command(monkeypatch, *words) == 2
    assert "a run keeps its settings" in capsys.readouterr().err


def test_transforms_are_checked_before_data_are_loaded(file: Path) -> None:
    code = file.with_name("mine.py")
    code.write_text(code.read_text().replace("def data(n=3):", "def data(n=3):\n    1 / 0"))
    for path in ("mine:Freezer", "mine:OWN"):
        found = config.load(file, {"transforms": [path]})
        with pytest.raises(FedShuffleError, match=f"^transforms: '{path}'"):
            found.run()
