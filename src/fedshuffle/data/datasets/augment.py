"""Random crops and flips, as a layer before the model."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Augment(nn.Module):
    """Moves every image by up to ``padding`` pixels and mirrors every other one, in training.

    What enters at the edges is 0, the mean colour of normalised images. Evaluation sees images as
    they are. The draws come from torch's generator, which the engines set from (seed, round,
    client) before each step; and from that of the processor, so that they are the same on a GPU.

        >>> model = nn.Sequential(Augment(padding=1), nn.Flatten(), nn.Linear(12, 2))
        >>> model(torch.zeros(5, 3, 2, 2)).shape
        torch.Size([5, 2])
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        super().__init__()
        self.padding = padding
        self.flip = flip

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return images
        many, colours, height, width = images.shape
        shifts = torch.randint(2 * self.padding + 1, (2, many, 1))
        rows = torch.arange(height) + shifts[0]
        columns = torch.arange(width) + shifts[1]
        if self.flip:
            columns = torch.where(torch.rand(many, 1) < 0.5, columns.flip(1), columns)
        padded = functional.pad(images, [self.padding] * 4)
        rows, columns = rows.to(images.device), columns.to(images.device)
        each = torch.arange(many, device=images.device).view(-1, 1, 1, 1)
        colour = torch.arange(colours, device=images.device).view(-1, 1, 1)
        return padded[each, colour, rows.view(many, 1, -1, 1), columns.view(many, 1, 1, -1)]
