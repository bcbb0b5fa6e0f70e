"""The entries of ``compare.methods``: a method by name, or a table with settings of its own."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fedshuffle.config import loader
from fedshuffle.config.schema import at
from fedshuffle.errors import FedShuffleError

SHORT = "tune_"  # what the names of tuning runs begin with


@dataclass(frozen=True)
class Variant:
    """A method of the comparison with a momentum, and with settings of its own.

    >>> Variant("fedshuffle").name, Variant("fedavg-rr", named="two epochs").folder
    ('fedshuffle', 'two-epochs')
    """

    method: str
    momentum: str | None = None
    """None is the method's own."""
    named: str | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    """Values that differ from those of the comparison's run, by dotted key."""
    grid: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """The step sizes that its search starts from, where they differ from the comparison's."""

    @property
    def name(self) -> str:
        """What identifies it, together with its momentum."""
        return self.named or self.method

    @property
    def folder(self) -> str:
        """What the names of its runs' folders begin with."""
        return "_".join(map(file_name, filter(None, [self.name, self.momentum])))

    @property
    def place(self) -> str:
        """Where the file gives it, for errors."""
        return f"compare.methods: {self.name!r}" if self.named else "compare.methods"


def check_names(variants: Sequence[Variant]) -> None:
    """Refuse names that give two variants the same folders, or one of them those of tuning runs."""
    seen: dict[str, str] = {}
    for variant in variants:
        name, other = variant.name, seen.get(variant.folder)
        if other is not None:
            raise FedShuffleError(
                f"compare.methods: the runs of {other!r} and {name!r} would share their folders."
                " Give one another name."
            )
        if name.startswith(SHORT):
            raise FedShuffleError(
                f"compare.methods: {name!r} begins as the folders of tuning runs do. Give it"
                ' another name: { name = "...", method = "..." }.'
            )
        seen[variant.folder] = name


def file_name(text: str) -> str:
    """A text as part of the name of a folder."""
    return re.sub(r"[^\w.+-]+", "-", text)


def check_distinct(values: tuple[Any, ...], key: str) -> None:
    """Refuse a list that has an entry twice."""
    if twice := [value for value in values if values.count(value) > 1]:
        raise FedShuffleError(f"{key} has {twice[0]!r} twice: drop one of them.")


@dataclass(frozen=True)
class _Keys:
    """The keys of a table; what changes the run is read with the run."""

    name: str = field(metadata={"add": 'a name of your choice, such as name = "by size"'})
    method: str = field(metadata={"add": 'the method, such as method = "fedshuffle"'})
    step_sizes: tuple[float, ...] = ()
    server_step_sizes: tuple[float, ...] = ()
    sampling: str = ""
    availability: str = ""
    probabilities: str = ""
    schedule: str = ""
    clock: str = ""
    work: Annotated[Any, lambda value, key: value] = None
    channel: str = ""
    down_channel: str = ""


def read(value: Any, key: str) -> str | Variant:
    """An entry of ``compare.methods``."""
    if not isinstance(value, Mapping):
        return str(loader.read_text(value, key))
    with at(f"{key}: {value.get('name', 'a table')!r}"):
        fields = loader.read_fields(_Keys, value, "")
        name, method = fields.pop("name"), fields.pop("method")
        grid = {k: fields.pop(k) for k in ("step_sizes", "server_step_sizes") if k in fields}
        for sizes in grid:
            check_distinct(grid[sizes], sizes)
        return Variant(method, None, name, tuple(_dotted(fields)), tuple(grid.items()))


def _dotted(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by dotted key, in types that can be hashed."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{before}{name}.")
        else:
            yield before + name, tuple(value) if isinstance(value, list) else value


Entry = Annotated[str | Variant, read]
