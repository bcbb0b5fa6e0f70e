"""Data for the examples: twelve clients of different sizes, each with a line of its own."""

import torch

from fedshuffle import Federation

SIZES = [2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30]


def clients(seed: int = 0) -> Federation:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sum(SIZES), 3, generator=random)
    slopes = torch.randn(len(SIZES), 3, generator=random)
    owner = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    targets = (inputs * slopes[owner]).sum(1, keepdim=True)
    return Federation.from_arrays(inputs, targets, sizes=SIZES)
