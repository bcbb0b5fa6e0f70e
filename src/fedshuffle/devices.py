"""The devices that train a model: the CPU, or a GPU that torch finds."""

import torch

from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError, unknown

NAMES = ("cpu", "cuda", "cuda:1", "mps")
"""Some names; any number may follow ``cuda:``."""


def check(name: str | torch.device | None) -> torch.device | None:
    """The device of that name, or an error if this machine has no such device.

    >>> check("cpu"), check(None)
    (device(type='cpu'), None)
    """
    if name is None or isinstance(name, torch.device):
        return name
    expect(name, str, "device")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (number and not number.isdecimal()):
        raise unknown("device", name, NAMES)
    problem = ""
    if kind == "cuda" and not torch.cuda.is_available():
        problem = (
            f"torch {torch.__version__} finds no CUDA GPU here. Install a torch with CUDA on a"
            " machine that has one, or use 'cpu'"
        )
    elif kind == "cuda" and int(number or 0) >= (gpus := torch.cuda.device_count()):
        problem = f"there are {gpus} CUDA GPUs here, counted from 0"
    elif kind == "mps" and not torch.backends.mps.is_available():
        problem = "it needs a Mac with Apple's GPU. Use 'cpu'"
    if problem:
        raise FedShuffleError(f"the device {name!r} is not available: {problem}.")
    return torch.device(name)
