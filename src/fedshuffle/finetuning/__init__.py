r"""Fine-tuning of pretrained models by LoRA adapters, as peft makes them.

A layer with adapters computes with :math:`W + s B A`; :math:`W` is frozen. :func:`fedshuffle.train`
averages the trained :math:`B` and :math:`A` separately, and the product of averages is not the
average of products. :func:`ffa` makes it so; :func:`fedex` and :func:`flora` add what is missing.
"""

from fedshuffle.finetuning.adapters import ffa
from fedshuffle.finetuning.exact import FedEx, fedex, flora
from fedshuffle.finetuning.layer import LoRALinear

__all__ = [
    "FedEx",
    "LoRALinear",
    "fedex",
    "ffa",
    "flora",
]
