"""The model, the data, and the loops over them.

A client's gradient is the same everywhere and has a coordinate of its own, so the model of the last
round shows how much each client counted.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SIZES = [8, 24, 64]
"""The numbers of examples of the clients."""


class Net(nn.Module):
    """One number for each client."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(len(SIZES), 1, bias=False)
        nn.init.zeros_(self.fc.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Minus the loss."""
        y: Tensor = self.fc(x)
        return y


def load_data(partition_id: int) -> tuple[Any, Any]:
    """A client's own examples, to train and to test with."""
    mine = torch.eye(len(SIZES))[partition_id].repeat(SIZES[partition_id], 1)
    data = TensorDataset(mine)
    return DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)


def train(net: nn.Module, loader: DataLoader[Any], epochs: int, lr: float) -> float:
    """Train with SGD and momentum, as Flower's quickstart does; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    running = 0.0
    for _ in range(epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            loss = -net(x).mean()
            loss.backward()
            optimizer.step()
            running += loss.item()
    return running / (epochs * len(loader))


def test(net: nn.Module, loader: DataLoader[Any]) -> float:
    """The mean loss."""
    with torch.no_grad():
        losses = [-net(x).mean().item() for (x,) in loader]
    return float(sum(losses)) / len(losses)
