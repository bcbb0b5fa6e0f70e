"""Experiment: the demo."""

from __future__ import annotations

import json
from pathlib import Path

from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from fedshuffle._files import results_folder, write_file
from fedshuffle._terminal import progress_bar
from fedshuffle.engines.cpu_tuning import one_thread
from fedshuffle.experiments.demo.experiment import (
    ROUNDS,
    Files,
    Settings,
    Summary,
    audit_and_train,
    summarise,
)
from fedshuffle.experiments.demo.figures import write_picture
from fedshuffle.experiments.demo.page import render_page


def demo(out: Path, *, rounds: int = ROUNDS, seed: int = 0, progress: bool = True) -> Summary:
    """Audit and train three methods; write a report, a picture and the numbers to ``out``."""
    settings = Settings(rounds, seed)
    files = Files.under(results_folder(out))
    columns = (MofNCompleteColumn(), "rounds", TimeRemainingColumn())
    with one_thread(), progress_bar(progress, *columns) as bars:
        results = audit_and_train(settings, bars)
    summary = summarise(results, files)
    write_picture(results, summary, files.picture)
    write_file(files.page, render_page(settings, results, summary))
    write_file(files.results, json.dumps(results, indent=1) + "\n")
    return summary
