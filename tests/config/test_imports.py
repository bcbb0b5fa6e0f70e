"""Modules of the user: how they are found, loaded once and forgotten."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedshuffle import FedShuffleError, config, losses
from fedshuffle.config import imports
from tests.config.project import CONFIG, MODULE


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import not_there",
            "cannot be imported: ModuleNotFoundError: No module named 'not_there'",
        ),
        ("x = (", "cannot be imported: SyntaxError"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(bad.py, line 1\)"),
    ],
)
def test_a_module_that_cannot_be_imported(project: Path, code: str, message: str) -> None:
    (project / "bad.py").write_text(code)
    changed = config.load(project / "config.toml", {"model": "bad:model"})
    with pytest.raises(FedShuffleError, match=f"model: 'bad:model' {message}|{message}"):
        changed.inputs()


@pytest.mark.parametrize("file", ["json.py", "json/__init__.py", "json/decoder.py"])
def test_a_module_with_the_name_of_a_loaded_one(project: Path, file: str) -> None:
    (project / file).parent.mkdir(exist_ok=True)
    (project / file).touch()
    with pytest.raises(FedShuffleError, match=re.escape(file)):
        imports.find("json.decoder:JSONDecoder", project)


def test_a_folder_without_modules_is_no_module(project: Path) -> None:
    (project / "fedshuffle" / "seed0").mkdir(parents=True)  # runs of the method of that name
    assert imports.find("fedshuffle.losses:cross_entropy", project) is losses.cross_entropy


def test_modules_are_forgotten_after_a_run(project: Path, tmp_path: Path) -> None:
    path, modules = list(sys.path), set(sys.modules)
    other = tmp_path / "other"
    other.mkdir()
    (other / "helper").mkdir()
    (other / "helper" / "parts.py").write_text("WIDTH = 5\n")
    code = MODULE.replace("width=2", "width=WIDTH")
    (other / "mine.py").write_text("from helper.parts import WIDTH\n" + code)
    (other / "config.toml").write_text(CONFIG)
    first = config.load(project / "config.toml").run()
    second = config.load(other / "config.toml").run()
    shapes = [dict(run.model.named_parameters())["weight"].shape for run in (first, second)]
    assert shapes == [(2, 3), (5, 3)]
    assert sys.path == path
    new = sys.modules.keys() - modules
    assert not {name for name in new if name.partition(".")[0] in ("mine", "helper")}


def test_a_module_is_loaded_once_per_run(project: Path) -> None:
    log = project / "log.txt"
    line = f"with open({str(log)!r}, 'a') as log:\n    log.write('loaded ')\n"
    (project / "mine.py").write_text(line + MODULE)
    chosen = config.load(project / "config.toml")
    chosen.run()
    assert log.read_text() == "loaded "
    with chosen.importable():
        inputs = chosen.inputs()
        for size in (0.1, 0.2):
            replace(chosen, out=None, step_size=size).run(inputs=inputs)
    assert log.read_text() == "loaded loaded "


def test_modules_are_forgotten_after_a_failure(project: Path) -> None:
    path = list(sys.path)
    with pytest.raises(FedShuffleError):
        config.load(project / "config.toml", {"data": "mine:failing"}).inputs()
    assert sys.path == path
    assert "mine" not in sys.modules
