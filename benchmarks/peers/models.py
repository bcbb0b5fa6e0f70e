"""The models in PyTorch, for all contestants that use it, and their local work by hand."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from work import BATCH, CLASSES, EPOCHS, STEP_SIZE, VOCABULARY, Data


class Lstm(nn.Module):
    """Predicts the next character at every position; the classes are the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 256, 2, batch_first=True)
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(text))
        logits: Tensor = self.head(states)
        return logits.transpose(1, 2)


def model(work: str) -> nn.Module:
    """The model of a work, always with the same weights; torch is held to one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if work == "logreg":
        return nn.Linear(784, CLASSES)
    if work == "mlp":
        return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, CLASSES))
    if work == "lstm":
        return Lstm()
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


def tensors(data: Data) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(data.inputs), torch.from_numpy(data.labels)


def train_client(model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """The local work of one client with torch.optim, as one writes it by hand."""
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP_SIZE)
    for _ in range(EPOCHS):
        for batch in torch.split(torch.randperm(len(labels)), BATCH):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def train_client_in_place(model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """The same without torch.optim: the update in place."""
    parameters = list(model.parameters())
    for _ in range(EPOCHS):
        for batch in torch.split(torch.randperm(len(labels)), BATCH):
            loss = functional.cross_entropy(model(inputs[batch]), labels[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for p in parameters:
                    if p.grad is not None:
                        p.sub_(p.grad, alpha=STEP_SIZE)
                    p.grad = None
