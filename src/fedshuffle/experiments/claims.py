"""Claims of the paper or its theory, and the evidence for or against each."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshuffle._arrays import jsonable
from fedshuffle._files import write_file
from fedshuffle._terminal import Console, plain_table


@dataclass(frozen=True)
class Claim:
    """A sentence about a panel of a figure, whether it was seen, and the numbers that show it."""

    panel: str
    text: str
    seen: bool
    evidence: str


def markdown(claims: Sequence[Claim], title: str, reading: str) -> str:
    """The claims as a document; ``reading`` explains its terms."""
    items = [
        f"{c.panel}, seen: {'yes' if c.seen else '**no**'}. *{c.text}* {c.evidence}" for c in claims
    ]
    wrapped = [textwrap.fill(item, 98, break_on_hyphens=False) for item in items]
    lines = ["- " + textwrap.indent(item, "  ").lstrip() for item in wrapped]
    return "\n".join([f"# {title}", "", reading, "", *lines, ""])


def publish(
    claims: Sequence[Claim], results: Any, out: Path, title: str, reading: str, progress: bool
) -> None:
    """Write ``results.json`` and ``claims.md``; print the claims if progress is shown."""
    write_file(out / "results.json", json.dumps(jsonable(results)))
    write_file(out / "claims.md", markdown(claims, title, reading))
    if not progress:
        return
    table = plain_table("panel", "seen", "what the paper says", align="lc")
    table.columns[0].no_wrap = True
    for claim in claims:
        seen = "[green]yes[/]" if claim.seen else "[bold red]no[/]"
        reason = "" if claim.seen else f"\n[dim]{claim.evidence}[/]"
        table.add_row(claim.panel, seen, claim.text + reason)
    console = Console()
    console.print(table)
    console.print(f"\nFigures, numbers and the evidence for each claim are in {out}.")
