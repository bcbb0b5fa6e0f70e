"""How methods look in every figure: one label and one colour each, everywhere the same."""

from __future__ import annotations

from fedshuffle.methods import Method

_LABELS = {
    "fedavg": "FedAvg",
    "fedavg-rr": "FedAvgRR",
    "fedavg-min": "FedAvgMin",
    "fedavg-mean": "FedAvgMean",
    "fednova": "FedNova",
    "fednova-rr": "FedNovaRR",
    "fednova-original": "FedNova (original)",
    "fednova-original-rr": "FedNovaRR (original)",
    "fedshuffle": "FedShuffle",
    "fedshuffle-so": "FedShuffle w/ SO",
    "fedshuffle-uniform": "FedShuffle, uniform",
    "fedshuffle-importance": "FedShuffle w/ IS",
    "fedshuffle-gen": "FedShuffleGen",
    "fedshuffle-mvr": "FedShuffleMVR",
    "fedrr": "FedRR",
    "nastya": "NASTYA",
}

# Okabe and Ito's palette, which people with colour-blindness can tell apart.
_COLOURS = {
    "fedavg": "#999999",
    "fedavg-rr": "#D55E00",
    "fedavg-min": "#E69F00",
    "fedavg-mean": "#CC79A7",
    "fednova": "#56B4E9",
    "fednova-rr": "#0072B2",
    "fedshuffle": "#009E73",
    "fedshuffle-so": "#D55E00",
    "fedshuffle-uniform": "#0072B2",
    "fedshuffle-importance": "#009E73",
    "fedshuffle-gen": "#CC79A7",
}


def label(method: str | Method) -> str:
    """What a method is called in a figure."""
    name = method if isinstance(method, str) else method.name
    return _LABELS.get(name, name)


def colour(method: str | Method) -> str:
    """The colour of a method in a figure."""
    name = method if isinstance(method, str) else method.name
    return _COLOURS.get(name, "#000000")
