"""What is missing is named with the command that installs it, before any work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedshuffle.errors import (
    EXTRAS,
    FedShuffleError,
    MissingPackageError,
    missing_known,
    optional_import,
    require,
    require_training,
)


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    for module in EXTRAS[extra]:
        monkeypatch.setitem(sys.modules, module, None)
    message = rf"^this needs [\w-]+\. Install it with pip install 'fedshuffle\[{extra}\]'\.$"
    with pytest.raises(FedShuffleError, match=message):
        require(extra, "this")
    with pytest.raises(ImportError, match=message):
        optional_import(EXTRAS[extra][0], "this", extra)


@pytest.mark.parametrize("problem", ["ImportError('another machine')", "ValueError('old numpy')"])
def test_a_broken_package_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    (tmp_path / "wandb.py").write_text(f"raise {problem}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    why = re.escape(problem.replace("('", ": ").replace("')", ""))
    message = rf"^this needs wandb, which is installed but cannot be imported \({why}\)\. Try pip"
    with pytest.raises(MissingPackageError, match=message):
        optional_import("wandb", "this", "wandb")
    with pytest.raises(MissingPackageError, match=message):
        require("wandb", "this")


def test_a_package_that_lacks_a_part_is_not_missing() -> None:
    error = ModuleNotFoundError("No module named 'matplotlib.none'", name="matplotlib.none")
    known = missing_known(error, "this")
    assert "matplotlib, which is installed but cannot be imported (No module named" in str(known)


def test_what_training_needs_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch", "cloudpickle"):
        monkeypatch.setitem(sys.modules, module, None)
    message = r"^this needs torch, cloudpickle\. Install them with pip install torch cloudpickle\.$"
    with pytest.raises(MissingPackageError, match=message):
        require_training("this")


def test_an_unknown_package_is_left_to_python() -> None:
    assert missing_known(ModuleNotFoundError("No module named 'x'", name="x"), "this") is None
    assert missing_known(ModuleNotFoundError("somewhere"), "this") is None


WITHOUT = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
sys.argv = ["fedshuffle", *{words!r}]
from fedshuffle.cli import main
main()
"""
TRAINING = "torch safetensors cloudpickle"
CONFIG = """
rounds = 2
step_size = 0.1
out = "out"
model = "nothing:model"
loss = "cross_entropy"
data = "nothing:clients"
[evaluation]
data = "training"
metrics = ["loss"]
[compare]
methods = ["fedavg-rr", "fedshuffle"]
seeds = [0]
step_sizes = [0.1]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "words", "remedy"),
    [
        *(
            (TRAINING, words, TRAINING)
            for words in (
                "run a.toml",
                "advise a.toml",
                "compare a.toml",
                "conformance fedavg",
                "audit --config a.toml",
                "reproduce shakespeare --out never",
                "demo --out never",
                "reproduce theory --out never",
                "reproduce compression --out never",
            )
        ),
        *(
            (hidden, "demo --out never", "'fedshuffle[demo]'")
            for hidden in (
                "sklearn",
                "matplotlib",
                "jinja2",
            )
        ),
        *(
            (hidden, "compare a.toml --out never", "'fedshuffle[report]'")
            for hidden in (
                "matplotlib",
                "jinja2",
            )
        ),
        ("pyarrow", "data import a.parquet --client a --out never", "'fedshuffle[data]'"),
        ("h5py", "data import a.h5 --client a --out never", "'fedshuffle[data]'"),
        ("trustme", "flower up", "'fedshuffle[flower]'"),
        ("flwr", "audit --sizes 1,2 --flower flwr.server:S", "'fedshuffle[flower]'"),
    ],
)
def test_a_command_says_in_one_line_what_is_missing(
    tmp_path: Path, hidden: str, words: str, remedy: str
) -> None:
    (tmp_path / "a.toml").write_text(CONFIG)
    (tmp_path / "a.parquet").write_text("")
    (tmp_path / "a.h5").write_text("")
    code = WITHOUT.format(hidden=hidden.split(), words=words.split())
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.rstrip().endswith(f"with pip install {remedy}."), done.stderr
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", ["methods", "audit --sizes 1,2,3", "audit --log log.csv"])
def test_audits_run_without_torch(tmp_path: Path, words: str) -> None:
    (tmp_path / "log.csv").write_text("round,client,size,steps,weight\n0,a,1,1,0.3\n0,b,2,2,0.7\n")
    code = WITHOUT.format(hidden=TRAINING.split(), words=words.split())
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from fedshuffle import train", "fedshuffle.train needs torch. Install it with pip"),
        ("import fedshuffle; fedshuffle.models", "fedshuffle.models needs torch."),
        (
            "from fedshuffle.cli import main; sys.argv[1:] = ['run', 'a.toml']; main()",
            "error: fedshuffle run needs torch. Install it with pip install torch.",
        ),
    ],
)
def test_training_without_torch_names_it(code: str, message: str) -> None:
    blocked = f"import sys; sys.modules['torch'] = None; sys.argv[0] = 'fedshuffle'; {code}"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
