"""A store for a person: how many clients, which fields, how the sizes are spread."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedshuffle._arrays import IntArray
from fedshuffle.populations import Store

_BINS = 12
_WIDTH = 40


def describe(store: Store) -> dict[str, Any]:
    """Plain data about a store."""
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
            {"from": low, "to": high, "clients": count} for low, high, count in histogram(sizes)
        ],
        "weights": "by size" if store.weights is None else "given",
        "source": store.source,
    }


def histogram(sizes: IntArray) -> list[tuple[int, int, int]]:
    """How many clients have from so many to so many examples, in bins that grow.

    >>> histogram(np.array([1, 1, 2, 3, 9]))
    [(1, 1, 2), (2, 2, 1), (3, 3, 1), (4, 4, 0), (5, 5, 0), (6, 6, 0), (7, 7, 0), (8, 9, 1)]
    """
    spread = np.geomspace(sizes.min(), sizes.max() + 1, _BINS + 1)
    edges = np.unique(spread.round().astype(np.int64))
    counts, _ = np.histogram(sizes, edges)
    bins = zip(edges[:-1].tolist(), (edges[1:] - 1).tolist(), counts.tolist(), strict=True)
    return list(bins)


def print_store(console: Console, store: Store) -> None:
    """Print what a store holds."""
    facts = describe(store)
    console.print(
        f"[bold]{escape(store.path.name)}[/]: {facts['clients']:,} clients,"
        f" {facts['examples']:,} examples, {_bytes(facts['bytes'])} on disk,"
        f" objective weights {facts['weights']}",
        highlight=False,
        soft_wrap=True,
    )
    columns = store.source.get("columns", {})
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("field", "dtype", "shape of an example", "columns"):
        if title != "columns" or columns:
            table.add_column(title)
    for field in facts["fields"]:
        shape = " x ".join(map(str, field["shape"])) or "one number"
        cells = [escape(field["name"]), field["dtype"], shape]
        table.add_row(*cells, *([_listed(columns.get(field["name"], []))] if columns else []))
    console.print(table)
    if "standardised" in store.source:
        console.print("[dim]the input is standardised: federation.json holds means, deviations[/]")
    if store.source.get("left_out"):
        console.print(f"[dim]columns left out: {_listed(store.source['left_out'])}[/]")
    spread = facts["sizes"]
    console.print(
        f"\nexamples of a client: min {spread['min']:,}, median {spread['median']:,g},"
        f" mean {spread['mean']:,.1f}, max {spread['max']:,}",
        highlight=False,
    )
    console.print(_bars(facts["histogram"]))


def _bars(bins: list[dict[str, int]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("examples", justify="right")
    table.add_column("clients", justify="right")
    table.add_column("")
    most = max(bin["clients"] for bin in bins)
    for bin in bins:
        low, high = bin["from"], bin["to"]
        name = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        bar = "#" * -(-bin["clients"] * _WIDTH // most)
        table.add_row(name, f"{bin['clients']:,}", f"[blue]{bar}[/]")
    return table


def _listed(names: str | list[str]) -> str:
    names = [names] if isinstance(names, str) else names
    shown = ", ".join(names[:6])
    return escape(shown if len(names) <= 6 else f"{shown}, ... ({len(names)} in all)")


def _bytes(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
