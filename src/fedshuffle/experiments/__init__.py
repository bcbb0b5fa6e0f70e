"""Experiments: the paper's figures and the demo, through the public API only."""

from __future__ import annotations

import os
from pathlib import Path

from fedshuffle.errors import FedShuffleError


def results_folder(out: Path) -> Path:
    """A folder that results can be written to, found out before any work is done."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("no permission to write")
    except OSError as error:
        raise FedShuffleError(
            f"results cannot be written to {str(folder)!r} ({error}). Choose another folder."
        ) from error
    return folder
