"""Generated tables and pictures on the pages of the docs."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedshuffle._files import results_folder, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLOCK = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, blocks: Mapping[str, str]) -> str:
    r"""A page with generated blocks in their places, by name; others stay.

    >>> filled("<!-- generated: table -->\nold\n<!-- end -->", {"table": "| new |"})
    '<!-- generated: table -->\n| new |\n<!-- end -->'
    """

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        return f"{begin}{blocks[name]}\n{end}" if name in blocks else match[0]

    return _BLOCK.sub(block, text)


def fill(page: Path, blocks: Mapping[str, str]) -> None:
    """Put generated blocks in their places in a file."""
    write_file(page, filled(page.read_text(encoding="utf-8"), blocks))


def markdown_table(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Rows of cells, the first of them the head; columns after the first ``texts`` hold numbers.

    >>> print(markdown_table([["method", "accuracy"], ["FedAvg", "45.5"]]))
    | method | accuracy |
    | --- | ---: |
    | FedAvg | 45.5 |
    """
    head, *body = rows
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))


def write_picture(figure: "Figure", path: Path, dpi: int = 110) -> None:
    """Write a small PNG file: a palette of 256 colours is enough."""
    from PIL import Image

    from fedshuffle.reports.rendering import encoded

    results_folder(path.parent)
    with Image.open(io.BytesIO(encoded(figure, "png", dpi=dpi))) as image:
        image.convert("RGB").quantize(256).save(path, optimize=True)
