"""A linear layer with a LoRA adapter, without peft."""

import math

from torch import Tensor, nn

from fedshuffle._arrays import count, expect


class LoRALinear(nn.Module):
    r"""A frozen linear layer with a low-rank adapter: :math:`(W + s B A) x + b`, where :math:`s` is
    ``alpha / rank``.

    It has the parts of peft's layers by the same names, so all that works for those works for it.
    Hu et al. 2022, *LoRA: Low-Rank Adaptation of Large Language Models*, arXiv:2106.09685.

    >>> import torch
    >>> layer = LoRALinear(nn.Linear(3, 2), rank=1)
    >>> [name for name, p in layer.named_parameters() if p.requires_grad]
    ['lora_A.default.weight', 'lora_B.default.weight']
    >>> layer(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float = 1.0) -> None:
        super().__init__()
        expect(base_layer, nn.Linear, "base_layer")
        count(rank, "rank")
        inputs, outputs = base_layer.in_features, base_layer.out_features
        kind = {"dtype": base_layer.weight.dtype, "device": base_layer.weight.device}
        self.base_layer = base_layer.requires_grad_(False)
        a = nn.Linear(inputs, rank, bias=False, **kind)
        b = nn.Linear(rank, outputs, bias=False, **kind)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": a}), nn.ModuleDict({"default": b})
        self.scaling = {"default": alpha / rank}
        nn.init.kaiming_uniform_(a.weight, a=math.sqrt(5))
        nn.init.zeros_(b.weight)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.lora_B["default"](self.lora_A["default"](x))
        base: Tensor = self.base_layer(x)
        return base + self.scaling["default"] * adapted
