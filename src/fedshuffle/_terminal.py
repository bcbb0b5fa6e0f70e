"""Console, tables and progress bars that are safe for names from data; signals to the program."""

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.segment import Segment
from rich.table import Table

from fedshuffle.errors import visible


class Console(rich.console.Console):
    """Rich's console, but control characters in names from data are shown and not obeyed, and what
    looks like the name of an emoji (``cyclic:x:0.5``) stays as it is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"emoji": False, **options})

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The pieces of what is printed; rich marks those that are its own control codes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


def progress_bar(
    visible: bool, *columns: str | ProgressColumn, transient: bool = False, wide: bool = False
) -> Progress:
    """Rich's progress display on the error stream, or nothing if it is not visible.

    The columns follow the description and the bar; a text may name fields of the task, such as
    ``"{task.completed:,.0f} rows"``. A transient display vanishes, a wide one fills the terminal.
    """
    texts = [TextColumn(c, markup=False) if isinstance(c, str) else c for c in columns]
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(None if wide else 40),
        *texts,
        console=Console(stderr=True),
        disable=not visible,
        transient=transient,
        expand=wide,
    )


def plain_table(*columns: str, align: str = "", **options: Any) -> Table:
    """A table without lines; ``align`` has a letter per column: l (also if missing), c or r."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = {"l": "left", "c": "center", "r": "right"}
    for column, letter in zip(columns, align.ljust(len(columns), "l"), strict=True):
        table.add_column(column, justify=names[letter], **options)  # type: ignore[arg-type]
    return table


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of escaped texts for notebooks; all columns but the first are aligned to the right.

    >>> html_table(["client", "loss"], [["<a>", "0.5"]])
    '<table cellpadding="5" style="text-align:right"><thead><tr>\
<th style="text-align:left">client</th><th>loss</th></tr></thead>\
<tbody><tr><td style="text-align:left">&lt;a&gt;</td><td>0.5</td></tr></tbody></table>'
    """

    def row(tag: str, texts: Sequence[str]) -> str:
        style = ' style="text-align:left"'
        cells = (f"<{tag}{'' if k else style}>{escape(t)}</{tag}>" for k, t in enumerate(texts))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(row("td", texts) for texts in rows)
    table = '<table cellpadding="5" style="text-align:right">'
    return f"{table}<thead>{row('th', columns)}</thead><tbody>{body}</tbody></table>"


def _handlers() -> dict[int, Any]:
    """The handlers of SIGINT and SIGTERM; none outside the main thread, which sets them."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in numbers if main}
    return {k: handler for k, handler in found.items() if handler is not None}  # set by Python


@contextmanager
def restored_signals() -> Iterator[None]:
    """Handle SIGINT and SIGTERM after the context as before it."""
    before = _handlers()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted_once(*, ends: bool = False) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM raise KeyboardInterrupt, and later ones do nothing.

    So nothing interrupts what is done about the first, such as a save. Signals that the program
    handles itself are left alone. With ``ends`` the program is about to end: once interrupted, it
    ignores signals to the end.
    """
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    usual: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    mine = {number: old for number, old in _handlers().items() if old == usual[number]}
    for number in mine:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        if not (ends and interrupted):
            for number, handler in mine.items():
                signal.signal(number, handler)
