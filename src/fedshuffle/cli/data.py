"""The commands about data."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedshuffle._terminal import Console
from fedshuffle.cli.shared import AsJson, console
from fedshuffle.cli.words import Command, Group
from fedshuffle.errors import FedShuffleError

app = typer.Typer(
    help="Populations on disk: import them, look at them.", no_args_is_help=True, cls=Group
)


@app.command(cls=Command, name="import")
def import_data(
    source: Annotated[Path, typer.Argument(help="A file, or a folder of files.")],
    out: Annotated[Path, typer.Option(help="Folder for the store; made at the end.")],
    client: Annotated[
        str | None, typer.Option(help="For tables: the column that says whose row it is.")
    ] = None,
    fields: Annotated[
        str | None, typer.Option(help="Fields a,b in the order in which the loss takes them.")
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option("--input", help="Columns a,b that form one input; all other numbers if none."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    standardise: Annotated[
        bool,
        typer.Option(
            "--standardise",
            "--standardize",
            help="Give every input column mean 0 and standard deviation 1.",
        ),
    ] = False,
    standardise_like: Annotated[
        Path | None,
        typer.Option(
            "--standardise-like",
            "--standardize-like",
            metavar="STORE",
            help="For held-out rows: scale them as the training rows in this store.",
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="parquet, csv, tsv, leaf or hdf5; by the suffix if none.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="What to store fields as: input=float64,label=int32.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the store that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import examples and their clients into a store that training maps instead of reading."""
    from fedshuffle.populations import import_file

    if standardise and standardise_like is not None:
        raise FedShuffleError("give either --standardise or --standardise-like, not both.")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        import_file(
            source,
            out,
            client=client,
            fields=_names(fields),
            input=_names(inputs),
            label=label,
            standardise=standardise if standardise_like is None else standardise_like,
            dtype=_dtypes(dtype),
            format=format,
            overwrite=overwrite,
            progress=not as_json,
        )
    said = Console(stderr=True) if as_json else console
    for note in notes:
        said.print(f"[bold yellow]![/] {escape(str(note.message))}", highlight=False)
    show_data(out, as_json)


@app.command(cls=Command, name="get")
def get_data(
    name: Annotated[str, typer.Argument(help="shakespeare, cifar100 or femnist.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of data sets; that of FEDSHUFFLE_DATA, or a cache, if none."),
    ] = None,
) -> None:
    """Download a data set, or go on with it after an interruption; check it if it is there."""
    from fedshuffle import datasets

    folder = datasets.get(name, data, progress=True)
    for file, holds in datasets.SOURCES[name].files.items():
        what = "clients" if file.endswith(".h5") else "images"
        print(f"{folder / file}: {holds:,} {what}")


@app.command(cls=Command, name="show")
def show_data(
    folder: Annotated[Path, typer.Argument(help="The folder of a store.")], as_json: AsJson = False
) -> None:
    """Say what a store holds: clients, examples, fields, and how the sizes are spread."""
    from fedshuffle.populations import open_store
    from fedshuffle.report.population import describe, print_store

    store = open_store(folder)
    if as_json:
        print(json.dumps(describe(store)))
    else:
        print_store(console, store)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def _dtypes(text: str | None) -> dict[str, str]:
    pairs = [word.partition("=") for word in _names(text) or []]
    for name, _, kind in pairs:
        if not (name and kind):
            raise FedShuffleError(
                f"--dtype: cannot read {text!r}. Write input=float64,label=int32."
            )
    return {name: kind for name, _, kind in pairs}
