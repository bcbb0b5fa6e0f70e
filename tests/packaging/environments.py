"""Virtual environments in which the built package is tried as a user has it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
_OURS = sysconfig.get_path("purelib")


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
        folder.parent.mkdir(parents=True, exist_ok=True)
        run(python, "-m", "venv", "--without-pip", folder, folder=folder.parent)
        self.bin = folder / "bin"
        self.packages = next((folder / "lib").glob("python*/site-packages"))
        self._on = on
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

    @property
    def _pip(self) -> list[str | Path]:
        return [sys.executable, "-m", "pip", "--python", self.bin / "python"]

    def install_without(self, wheel: Path, absent: set[str]) -> None:
        """Install the package and its dependencies but for some, which it has to do without."""
        lines = zipfile.ZipFile(wheel).read(
            f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/METADATA"
        )
        named = re.findall(r"^Requires-Dist: ([^;\n]+)$", lines.decode(), re.MULTILINE)
        self._install("--no-deps", wheel)
        self._install(*(one for one in named if re.match(r"[\w-]+", one)[0] not in absent))  # type: ignore[index]

    def link(self, package: str, extra: str) -> None:
        """Have all that an extra of an installed package asks for, as links to what the tests have.

        This takes no time, and what is not asked for is missing as after an installation.
        """
        below = [] if self._on is None else [str(self._on.packages)]
        own = {one.name.lower(): one for one in distributions(path=below)}
        here = {canonicalize_name(one.name): one for one in distributions(path=[_OURS])}
        for name in _asked(own[package], extra, here) - {canonicalize_name(one) for one in own}:
            for file in here[name].files or ():
                place = self.packages / file
                if ".." not in file.parts:  # no scripts: they would start another Python
                    place.parent.mkdir(parents=True, exist_ok=True)
                    _link(Path(str(file.locate())), place)

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
        return [own] if own.exists() else [self.bin / "python", "-m", "fedshuffle"]


def _asked(
    package: Distribution, extra: str, here: Mapping[NormalizedName, Distribution]
) -> set[NormalizedName]:
    """The names of what an extra asks for, and of what that needs; each version must fit."""
    found, open_ = set[tuple[NormalizedName, str]](), [(package, extra)]
    while open_:
        one, wanted = open_.pop()
        for requirement in map(Requirement, one.requires or ()):
            name = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({"extra": wanted}):
                continue
            target = package if name == canonicalize_name(package.name) else here[name]
            assert requirement.specifier.contains(target.version, prereleases=True), requirement
            for key in ((name, within) for within in ("", *sorted(requirement.extras))):
                if key not in found:
                    found.add(key)
                    open_.append((target, key[1]))
    return {name for name, _ in found}


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # another file system
        shutil.copy2(file, place)


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, or beside the one that runs the tests (pyenv)."""
    beside = sorted(Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}"))
    for found in (shutil.which(f"python{version}"), *map(str, beside)):
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    return None
