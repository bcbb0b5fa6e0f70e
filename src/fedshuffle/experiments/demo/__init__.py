"""The demo: three methods on real data, and the objective that each of them really minimises."""

from __future__ import annotations

import json
from pathlib import Path

from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from fedshuffle._arrays import count
from fedshuffle._files import results_folder, write_file
from fedshuffle._terminal import progress_bar
from fedshuffle.engines.cpu_tuning import one_thread
from fedshuffle.experiments.demo.experiment import ROUNDS, DemoResult, audit_and_train
from fedshuffle.experiments.demo.figures import write_picture
from fedshuffle.experiments.demo.page import FILES, headline, render_page
from fedshuffle.randomness import check_seed


def demo(out: Path, *, rounds: int = ROUNDS, seed: int = 0, progress: bool = True) -> DemoResult:
    """Audit and train three methods; write a report, a picture and the numbers to ``out``."""
    rounds, seed = count(rounds, "rounds"), check_seed(seed)
    out = results_folder(out)
    columns = (MofNCompleteColumn(), "rounds", TimeRemainingColumn())
    with one_thread(), progress_bar(progress, *columns) as bars:
        result = audit_and_train(rounds, seed, bars)
    write_picture(result, headline(result), out / FILES["picture"])
    write_file(out / FILES["page"], render_page(result, out))
    write_file(out / FILES["results"], json.dumps(result.to_dict(), indent=1) + "\n")
    return result
