"""What is missing is named with the command that installs it, before any work."""

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


def test_a_broken_package_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('built for another machine')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(MissingPackageError, match=r"needs wandb \(built for another machine\)\."):
        optional_import("wandb", "WandB", "wandb")


def test_an_unknown_package_is_left_to_python() -> None:
    assert missing_known(ModuleNotFoundError("No module named 'x'", name="x"), "this") is None
    assert missing_known(ModuleNotFoundError("somewhere"), "this") is None


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
