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
    "fedshuffle-capped": "FedShuffle, capped",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "scaffold-i": "SCAFFOLD, option I",
    "vrl-sgd": "VRL-SGD",
    "fedlin": "FedLin",
    "fedlin-sparse": "FedLin, sparse",
    "mime": "Mime",
    "mime-sgd": "Mime, SGD",
    "mime-adam": "Mime, Adam",
    "mime-lite": "MimeLite",
    "mime-lite-adam": "MimeLite, Adam",
    "mime-mvr": "MimeMVR",
    "fedavgm": "FedAvgM",
    "fedadagrad": "FedAdagrad",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "pooled-sgd": "Pooled SGD",
    "pooled-rr": "Pooled RR",
    "distributed-gd": "Distributed GD",
    "non-local-mvr": "Non-local MVR",
}

# Okabe and Ito's palette, which people with colour-blindness can tell apart. There are more methods
# than colours: those of one family differ.
_COLOURS = {
    "fedavg": "#999999",
    "fedavg-rr": "#D55E00",
    "fedavg-min": "#E69F00",
    "fedavg-mean": "#CC79A7",
    "fednova": "#56B4E9",
    "fednova-rr": "#0072B2",
    "fednova-original": "#E69F00",
    "fednova-original-rr": "#D55E00",
    "fedshuffle": "#009E73",
    "fedshuffle-so": "#D55E00",
    "fedshuffle-uniform": "#0072B2",
    "fedshuffle-importance": "#009E73",
    "fedshuffle-gen": "#CC79A7",
    "fedshuffle-mvr": "#0072B2",
    "fedrr": "#56B4E9",
    "nastya": "#0072B2",
    "fedshuffle-capped": "#CC79A7",
    "fedprox": "#0072B2",
    "scaffold": "#0072B2",
    "scaffold-i": "#E69F00",
    "vrl-sgd": "#CC79A7",
    "fedlin": "#0072B2",
    "fedlin-sparse": "#E69F00",
    "mime": "#0072B2",
    "mime-sgd": "#56B4E9",
    "mime-adam": "#009E73",
    "mime-lite": "#D55E00",
    "mime-lite-adam": "#E69F00",
    "mime-mvr": "#CC79A7",
    "fedavgm": "#E69F00",
    "fedadagrad": "#CC79A7",
    "fedadam": "#0072B2",
    "fedyogi": "#D55E00",
    "pooled-sgd": "#E69F00",
    "pooled-rr": "#D55E00",
    "distributed-gd": "#0072B2",
    "non-local-mvr": "#CC79A7",
}


def label(method: str | Method) -> str:
    """What a method is called in a figure."""
    name = method if isinstance(method, str) else method.name
    return _LABELS.get(name, name)


def colour(method: str | Method) -> str:
    """The colour of a method in a figure."""
    name = method if isinstance(method, str) else method.name
    return _COLOURS.get(name, "#000000")
