"""What is printed to a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from fedshuffle.errors import visible


@final
class Console(rich.console.Console):
    """Rich's console, but control characters in names from data are shown and not obeyed."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The pieces of what is printed; rich marks those that are its own control codes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
