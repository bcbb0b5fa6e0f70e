"""The report of a comparison: figures, tables, every curve as CSV, and a page that needs no other.

out/figure-own.png, .pdf            the curves, one figure per group
out/weights.png, .pdf               the audits
out/table.md, table.tex             how the curves end
out/curves.csv                      every round of every run
out/report.html                     all of it, interactive
"""

from __future__ import annotations

from pathlib import Path

from fedshuffle._files import results_folder, write_file
from fedshuffle.comparison.results import Results
from fedshuffle.errors import error_context
from fedshuffle.reports.comparison import figures, tables
from fedshuffle.reports.comparison.details import audits, gains
from fedshuffle.reports.comparison.model import Compared
from fedshuffle.reports.comparison.page import render_page
from fedshuffle.reports.drawing import data_uri, save

__all__ = ["write"]


def write(results: Results, out: Path) -> list[Path]:
    """Write the whole report into a folder.

    Args:
        results: the ``results.json`` of a comparison, complete or not.
        out: the folder; it is made if it does not exist, and a report in it is replaced.

    Returns:
        The files written, the page last.
    """
    comparison = Compared(results)
    found = audits(comparison)
    out = results_folder(out)
    written: list[Path] = []
    with error_context(
        lambda error: (
            f"the report cannot be written to {str(out)!r} ({error.strerror or error})."
            " Make room, or choose another folder."
        ),
        OSError,
    ):
        pictures: dict[str, str] = {}
        for group in comparison.groups:
            figure = figures.curves(comparison, group)
            pictures[group] = data_uri(figure)
            written += save(figure, out / f"figure-{group.replace(':', '-')}")
        shown = None
        if (sheet := figures.weights(comparison, found)) is not None:
            shown = data_uri(sheet)
            written += save(sheet, out / "weights")
        texts = {
            "table.md": tables.markdown(comparison),
            "table.tex": tables.latex(comparison),
            "curves.csv": tables.csv_text(comparison),
        }
        names = [*(path.name for path in written), *texts]
        clients = gains(comparison, out)
        texts["report.html"] = render_page(comparison, found, pictures, shown, names, clients)
        for name, text in texts.items():
            write_file(out / name, text)
            written.append(out / name)
    return written
