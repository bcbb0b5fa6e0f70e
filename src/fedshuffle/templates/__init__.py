"""Starter files for a new folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedshuffle.errors import FedShuffleError, one_line


def new_run(folder: str | Path) -> Path:
    """Write a small run: a config, and a module with its model and data."""
    return write(Path(__file__).parent / "run", folder)


def write(
    template: Path, folder: str | Path, rename: Callable[[str], str] = lambda text: text
) -> Path:
    """Write the files of a template into a new or empty folder, with some names replaced."""
    target = Path(folder).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FedShuffleError(f"{str(folder)!r} exists and is not an empty folder. Choose another.")
    try:
        for source in sorted(template.rglob("*")):
            if source.suffix not in {".py", ".toml", ".md"}:
                continue
            place = target / rename(str(source.relative_to(template)))
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(rename(source.read_text(encoding="utf-8")), encoding="utf-8")
    except OSError as error:
        raise FedShuffleError(
            f"cannot write to {str(folder)!r}: {one_line(error)}. Choose another folder."
        ) from error
    return target
