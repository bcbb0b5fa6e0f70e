"""The commands about data: import a store or a trace, download a data set, show a store."""

from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.filesize import decimal
from rich.markup import escape
from typer import Argument, Option

from fedshuffle._arrays import count, histogram
from fedshuffle._terminal import plain_table
from fedshuffle.cli.shared import AsJson, Command, DataFolder, Group, console, emit
from fedshuffle.errors import FedShuffleError

if TYPE_CHECKING:
    from fedshuffle.data import Store

app = typer.Typer(
    help="Data: import federations and device traces, download data sets, show a store.",
    no_args_is_help=True,
    cls=Group,
)

Text = str | None


@app.command(cls=Command, name="import")
def import_data(
    source: Annotated[Path, Argument(help="A file, or a folder of files.")],
    out: Annotated[Path, Option(help="Folder for the store; made at the end.")],
    client: Annotated[Text, Option(help="For tables: the column of the clients.")] = None,
    fields: Annotated[Text, Option(help="Fields a,b as the loss takes them.")] = None,
    input: Annotated[Text, Option(help="Columns a,b; by default all other numbers.")] = None,
    label: Annotated[Text, Option(help="The column of the label.")] = None,
    standardise: Annotated[
        bool, Option("--standardise", "--standardize", help="Give inputs mean 0 and deviation 1.")
    ] = False,
    standardise_like: Annotated[
        Path | None,
        Option(
            "--standardise-like",
            "--standardize-like",
            metavar="STORE",
            help="For held-out rows: scale them as the training rows in this store.",
        ),
    ] = None,
    format: Annotated[Text, Option(help="parquet, csv, tsv, leaf or hdf5.")] = None,
    dtype: Annotated[Text, Option(help="Types: input=float64,label=int32.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a store.")] = False,
    as_json: AsJson = False,
) -> None:
    """Import examples and their clients into a store that training maps instead of reading."""
    from fedshuffle.data import import_file

    if standardise and standardise_like is not None:
        raise FedShuffleError("give either --standardise or --standardise-like, not both.")
    import_file(
        source,
        out,
        client=client,
        fields=_names(fields),
        input=_names(input),
        label=label,
        standardise=standardise if standardise_like is None else standardise_like,
        dtype=_dtypes(dtype),
        format=format,
        overwrite=overwrite,
        progress=not as_json,
    )
    show_data(out, as_json)


@app.command(cls=Command, name="get")
def get_data(
    name: Annotated[str, Argument(help="shakespeare, cifar100 or femnist.")],
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
    folder: Annotated[Path, Argument(help="The folder of a store.")], as_json: AsJson = False
) -> None:
    """Show what a store holds: clients, examples, fields, and the distribution of sizes."""
    from fedshuffle.data import open_store

    store = open_store(folder)
    facts = _describe(store)
    emit(as_json, facts, partial(_print_store, store.path.name, facts))


@app.command(cls=Command, name="trace")
def import_trace(
    source: Annotated[Path, Argument(help="JSON of when each device came and went.")],
    out: Annotated[Path, Option(help="The trace to write, for --availability trace:FILE.")],
    seconds_per_round: Annotated[float, Option(help="How long a round takes.")],
    data: Annotated[
        Path | None, Option(metavar="STORE", help="Name devices by the clients of this store.")
    ] = None,
    clients: Annotated[int | None, Option(help="Take this many devices, named 0, 1, ...")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a device trace, in seconds, to an availability trace, in rounds.

    The JSON is {"DEVICE": {"active": [SECONDS, ...], "inactive": [SECONDS, ...]}, ...}.
    """
    from fedshuffle.availability import convert_device_trace
    from fedshuffle.data import open_store

    if data is not None and clients is not None:
        raise FedShuffleError("give either --data or --clients, not both.")
    ids: Sequence[Hashable] = () if data is None else open_store(data).ids
    if clients is not None:
        ids = range(count(clients, "clients"))
    trace = convert_device_trace(source, out, seconds_per_round=seconds_per_round, ids=ids)
    empty = sum(map(len, trace.gaps))
    facts = {"out": str(out), "clients": len(trace), "intervals": trace.intervals}
    facts |= {"rounds": trace.period, "rounds_without_clients": empty}
    emit(as_json, facts, partial(_print_trace, facts))


def _print_trace(facts: dict[str, Any]) -> None:
    empty, file = facts["rounds_without_clients"], facts["out"] + "+gaps"
    units = ("intervals", "clients", "rounds")
    intervals, clients, rounds = (
        f"{facts[unit]:,} {unit if facts[unit] != 1 else unit[:-1]}" for unit in units
    )
    lines = [f"{facts['out']}: {intervals} of {clients} over {rounds}."]
    if empty:
        lines.append(f"In {empty:,} of them nobody is there: write --availability trace:{file}")
    console.print(escape("\n".join(lines)), soft_wrap=True)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def _dtypes(text: str | None) -> dict[str, str]:
    pairs = [word.partition("=") for word in _names(text) or []]
    if not all(name and kind for name, _, kind in pairs):
        raise FedShuffleError(f"--dtype: cannot read {text!r}. Write input=float64,label=int32.")
    return {name: kind for name, _, kind in pairs}


def _describe(store: "Store") -> dict[str, Any]:
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
            dict(zip(("from", "to", "clients"), bar, strict=True))
            for bar in histogram(sizes.tolist(), most=12)
        ],
        "weights": "by size" if store.weights is None else "given",
        "source": store.origin,
    }


def _print_store(name: str, facts: dict[str, Any]) -> None:
    origin, sizes = facts["source"], facts["sizes"]
    console.print(
        f"[bold]{escape(name)}[/]: {facts['clients']:,} clients, {facts['examples']:,} examples,"
        f" {decimal(facts['bytes'])} on disk, objective weights {facts['weights']}",
        soft_wrap=True,
    )
    columns = origin.get("columns", {})
    table = plain_table("field", "dtype", "shape of an example", *["columns"] * bool(columns))
    for field in facts["fields"]:
        shape = " x ".join(map(str, field["shape"])) or "one number"
        source = [_listed(columns.get(field["name"], []))] if columns else []
        table.add_row(escape(field["name"]), field["dtype"], shape, *source)
    console.print(table)
    if "standardised" in origin:
        console.print("[dim]the input is standardised: federation.json holds means, deviations[/]")
    if origin.get("left_out"):
        console.print(f"[dim]columns left out: {_listed(origin['left_out'])}[/]")
    console.print(
        f"\nexamples per client: min {sizes['min']:,}, median {sizes['median']:,g},"
        f" mean {sizes['mean']:,.1f}, max {sizes['max']:,}"
    )
    bars = plain_table("examples", "clients", "", align="rr")
    most = max(bar["clients"] for bar in facts["histogram"])
    for bar in facts["histogram"]:
        low, high, clients = bar.values()
        size = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        bars.add_row(size, f"{clients:,}", f"[blue]{'#' * -(-clients * 40 // most)}")
    console.print(bars)


def _listed(names: str | list[str]) -> str:
    names = [names] if isinstance(names, str) else names
    shown = ", ".join(names[:6])
    return escape(shown if len(names) <= 6 else f"{shown}, ... ({len(names)} in all)")
