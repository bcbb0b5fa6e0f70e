"""The models of the paper's experiments, with width and depth as options."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "CharLSTM",
    "ResNet",
]


class CharLSTM(nn.Module):
    """Next-character model: embedding, LSTM, and a linear layer over the vocabulary.

    Takes whole numbers (batch, time); gives logits (batch, vocabulary, time), as torch's
    cross-entropy expects them.

        >>> import torch
        >>> CharLSTM(vocabulary=90, hidden=16)(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 90, 5])
    """

    def __init__(
        self, vocabulary: int = 90, embedding: int = 8, hidden: int = 512, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(characters))
        logits: Tensor = self.out(hidden)
        return logits.transpose(1, 2)


class ResNet(nn.Module):
    """A residual network for small images: 3x3 stem, group normalisation, two blocks a stage.

    ``ResNet(classes=100)`` is ResNet-18 (He et al. 2016) with the batch normalisation replaced
    (Wu and He 2018).

        >>> import torch
        >>> ResNet(classes=10, width=8)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 100,
        width: int = 64,
        blocks: Sequence[int] = (2, 2, 2, 2),
        groups: int = 2,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.GroupNorm(groups, width), nn.ReLU()
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(blocks):
            for block in range(depth):
                out = width << stage
                stages.append(_Block(channels, out, 2 if stage and not block else 1, groups))
                channels = out
        self.stages = nn.Sequential(*stages)
        self.out = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.out(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Two 3x3 convolutions around which the input passes, projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(groups, outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(groups, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.around(x))
