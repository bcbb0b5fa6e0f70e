"""The commands about data: import a store, download a data set, show a store."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.filesize import decimal
from rich.markup import escape

from fedshuffle._terminal import Console, plain_table
from fedshuffle.cli.shared import AsJson, Command, DataFolder, Group, console
from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    from fedshuffle.data import Store

app = typer.Typer(help="Federations on disk: import, show.", no_args_is_help=True, cls=Group)


@app.command(cls=Command, name="import")
def import_data(
    source: Annotated[Path, typer.Argument(help="A file, or a folder of files.")],
    out: Annotated[Path, typer.Option(help="Folder for the store; made at the end.")],
    client: Annotated[
        str | None, typer.Option(help="For tables: the column that names the client of each row.")
    ] = None,
    fields: Annotated[
        str | None, typer.Option(help="Fields a,b in the order in which the loss takes them.")
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option("--input", help="Columns a,b of one input; by default all other numbers."),
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
        str | None, typer.Option(help="parquet, csv, tsv, leaf or hdf5; by default by the suffix.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Types: input=float64,label=int32.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a store.")] = False,
    as_json: AsJson = False,
) -> None:
    """Import examples and their clients into a store that training maps instead of reading."""
    from fedshuffle.data import import_file

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
    stream = Console(stderr=True) if as_json else console
    for note in notes:
        stream.print(f"[bold yellow]![/] {escape(str(note.message))}", highlight=False)
    show_data(out, as_json)


@app.command(cls=Command, name="get")
def get_data(
    name: Annotated[str, typer.Argument(help="shakespeare, cifar100 or femnist.")],
    data: DataFolder = None,
) -> None:
    """Download a data set, or resume the download; check it if it is complete."""
    from fedshuffle.data import datasets

    folder = datasets.get(name, data, progress=True)
    for file, holds in datasets.ARCHIVES[name].files.items():
        what = "clients" if file.endswith(".h5") else "images"
        print(f"{folder / file}: {holds:,} {what}")


@app.command(cls=Command, name="show")
def show_data(
    folder: Annotated[Path, typer.Argument(help="The folder of a store.")], as_json: AsJson = False
) -> None:
    """Show what a store holds: clients, examples, fields, and the distribution of sizes."""
    from fedshuffle.data import open_store

    store = open_store(folder)
    if as_json:
        print(json.dumps(_describe(store)))
    else:
        _print_store(store)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def _dtypes(text: str | None) -> dict[str, str]:
    pairs = [word.partition("=") for word in _names(text) or []]
    if not all(name and kind for name, _, kind in pairs):
        raise FedShuffleError(f"--dtype: cannot read {text!r}. Write input=float64,label=int32.")
    return {name: kind for name, _, kind in pairs}


# A store on the terminal ------------------------------------------------------------------------


def _describe(store: Store) -> dict[str, Any]:
    from fedshuffle.reports.comparison.details import histogram

    sizes = store.sizes
    return {
        "clients": len(sizes),
        "examples": int(sizes.sum()),
        "bytes": store.bytes,
        "fields": [
            {"name": name, "dtype": field.dtype.name, "shape": list(field.shape[1:])}
            for name, field in zip(store.names, store.fields, strict=True)
        ],
        "sizes": {
            "min": int(sizes.min()),
            "median": float(np.median(sizes)),
            "mean": float(sizes.mean()),
            "max": int(sizes.max()),
        },
        "histogram": [
            {"from": low, "to": high, "clients": clients}
            for low, high, clients in histogram(sizes.tolist(), most=12)
        ],
        "weights": "by size" if store.weights is None else "given",
        "source": store.origin,
    }


def _print_store(store: Store) -> None:
    facts = _describe(store)
    console.print(
        f"[bold]{escape(store.path.name)}[/]: {facts['clients']:,} clients,"
        f" {facts['examples']:,} examples, {decimal(facts['bytes'])} on disk,"
        f" objective weights {facts['weights']}",
        highlight=False,
        soft_wrap=True,
    )
    columns = store.origin.get("columns", {})
    titles = ["field", "dtype", "shape of an example", *(["columns"] if columns else [])]
    table = plain_table(*titles)
    for field in facts["fields"]:
        shape = " x ".join(map(str, field["shape"])) or "one number"
        cells = [escape(field["name"]), field["dtype"], shape]
        table.add_row(*cells, *([_listed(columns.get(field["name"], []))] if columns else []))
    console.print(table)
    if "standardised" in store.origin:
        console.print("[dim]the input is standardised: federation.json holds means, deviations[/]")
    if store.origin.get("left_out"):
        console.print(f"[dim]columns left out: {_listed(store.origin['left_out'])}[/]")
    spread = facts["sizes"]
    console.print(
        f"\nexamples per client: min {spread['min']:,}, median {spread['median']:,g},"
        f" mean {spread['mean']:,.1f}, max {spread['max']:,}",
        highlight=False,
    )
    bars = plain_table("examples", "clients", "", align="rr")
    most = max(bin["clients"] for bin in facts["histogram"])
    for bin in facts["histogram"]:
        low, high = bin["from"], bin["to"]
        name = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        bars.add_row(name, f"{bin['clients']:,}", f"[blue]{'#' * -(-bin['clients'] * 40 // most)}")
    console.print(bars)


def _listed(names: str | list[str]) -> str:
    names = [names] if isinstance(names, str) else names
    shown = ", ".join(names[:6])
    return escape(shown if len(names) <= 6 else f"{shown}, ... ({len(names)} in all)")
