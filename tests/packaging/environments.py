"""Virtual environments in which the built package is tried as a user has it."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


def run(*words: str | Path, folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, apart from this checkout and from the environment of the tests."""
    dropped = ("PYTHON", "VIRTUAL_ENV", "FEDSHUFFLE", "RAY_", "FLWR_", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    kept |= {"MPLBACKEND": "agg", "WANDB_MODE": "offline", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**kept, "HOME": str(Path.home()), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


class Environment:
    """A new virtual environment in a folder, in which further packages may be visible."""

    def __init__(self, folder: Path, python: str = sys.executable, on: "Environment | None" = None):
        self.folder = folder
        without_pip = ["--without-pip"] if on else []
        folder.parent.mkdir(parents=True, exist_ok=True)
        run(python, "-m", "venv", *without_pip, folder, folder=folder.parent)
        self.bin = folder / "bin"
        self.packages = next((folder / "lib").glob("python*/site-packages"))
        self._pip: list[str | Path] = [self.bin / "python", "-m", "pip"]
        if on is not None:
            (self.packages / "below.pth").write_text(f"{on.packages}\n")
        self.work = folder / "work"
        self.work.mkdir()

    def install(self, *what: str | Path) -> None:
        """Install packages as the constraints say; everything must agree in the end."""
        self._install(*what)
        run(*self._pip, "check", folder=self.work)

    def _install(self, *what: str | Path) -> None:
        words = ("install", "--quiet", "--no-compile", "-c", CONSTRAINTS)
        run(*self._pip, *words, *what, folder=self.work)

    def install_without(self, wheel: Path, absent: set[str]) -> None:
        """Install the package and its dependencies but for some, which it has to do without."""
        lines = zipfile.ZipFile(wheel).read(
            f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/METADATA"
        )
        named = re.findall(r"^Requires-Dist: ([^;\n]+)$", lines.decode(), re.MULTILINE)
        self._install("--no-deps", wheel)
        self._install(*(one for one in named if re.match(r"[\w-]+", one)[0] not in absent))  # type: ignore[index]

    def python(self, code: str) -> str:
        return run(self.bin / "python", "-W", "error", "-c", code, folder=self.work).stdout

    def command(self, *words: str | Path) -> str:
        """What ``fedshuffle`` prints; it must end well."""
        return run(*self._fedshuffle, *words, folder=self.work).stdout

    def error(self, *words: str | Path) -> str:
        """The one line with which ``fedshuffle`` ends."""
        done = run(*self._fedshuffle, *words, folder=self.work, check=False)
        assert done.returncode == 2, done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        return line.removeprefix("error: ")

    @property
    def _fedshuffle(self) -> list[str | Path]:
        own = self.bin / "fedshuffle"
        return [own] if own.exists() else [self.bin / "python", "-m", "fedshuffle.cli"]


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, or beside the one that runs the tests (pyenv)."""
    beside = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}"))
    for found in (shutil.which(f"python{version}"), *map(str, beside)):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None
