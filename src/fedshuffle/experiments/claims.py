"""Claims of the paper or its theory, the evidence for or against each, and their publication."""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshuffle._arrays import jsonable
from fedshuffle._files import write_file
from fedshuffle._terminal import Console, plain_table
from fedshuffle.reports.rendering import clean, save


@dataclass(frozen=True)
class Claim:
    """A sentence about a panel of a figure, whether it was seen, and the numbers that show it."""

    panel: str
    text: str
    seen: bool
    evidence: str


def publish(
    out: Path,
    results: Mapping[str, Any],
    draw: Callable[[Axes, str, Any], None],
    sheets: Mapping[str, tuple[Sequence[str], tuple[int, int], tuple[float, float]]],
    claims: Sequence[Claim],
    title: str,
    reading: str,
    progress: bool,
) -> None:
    """Write the figures, ``results.json`` and ``claims.md``; print the claims if wanted.

    ``draw`` gets the name and the results of a panel; ``sheets`` has the panels, rows and columns,
    and size of each figure; ``reading`` follows the number of claims seen, and explains the terms.
    """
    for name, (panels, grid, size) in sheets.items():
        figure = Figure(figsize=size, layout="constrained")
        for axes, panel in zip(figure.subplots(*grid, squeeze=False).flat, panels, strict=True):
            draw(axes, panel, results[panel])
            clean(axes)
            columns = 2 if len(axes.get_lines()) > 3 else 1
            under: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15)}
            axes.legend(**under, ncols=columns, frameon=False, fontsize=10)
        save(figure, out / name)
    write_file(out / "results.json", json.dumps(jsonable(results)))
    table = plain_table("panel", "seen", "what the paper says", align="lc")
    table.columns[0].no_wrap = True
    seen = sum(claim.seen for claim in claims)
    lines = [f"# {title}", "", f"{seen} of {len(claims)} claims were seen{reading}", ""]
    for claim in claims:
        found, colour = ("yes", "green") if claim.seen else ("**no**", "bold red")
        item = f"{claim.panel}, seen: {found}. *{claim.text}* {claim.evidence}"
        lines.append("- " + "\n  ".join(textwrap.wrap(item, 98, break_on_hyphens=False)))
        missing = "" if claim.seen else f"\n[dim]{claim.evidence}[/]"
        table.add_row(claim.panel, f"[{colour}]{found.strip('*')}[/]", claim.text + missing)
    write_file(out / "claims.md", "\n".join([*lines, ""]))
    if progress:
        console = Console()
        console.print(table)
        console.print(f"\nFigures, numbers and the evidence for each claim are in {out}.")
