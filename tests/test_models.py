"""The paper's models have as many parameters as their layers say, at any width and depth."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from fedshuffle.models import CharLSTM, ResNet


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def lstm(vocabulary: int, embedding: int, hidden: int, layers: int) -> int:
    """Four gates a layer, each a matrix of inputs and of states, and torch's two biases."""
    inputs = [embedding] + [hidden] * (layers - 1)
    gates = sum(4 * hidden * (width + hidden + 2) for width in inputs)
    return vocabulary * embedding + gates + (hidden + 1) * vocabulary


def resnet(classes: int, width: int, blocks: Sequence[int]) -> int:
    """3x3 kernels without biases, two numbers a channel after each, projections between stages."""
    total, channels = 27 * width + 2 * width, width
    for stage, depth in enumerate(blocks):
        out = width * 2**stage
        for _ in range(depth):
            total += 9 * out * (channels + out) + 4 * out
            total += channels * out + 2 * out if channels != out else 0
            channels = out
    return total + (channels + 1) * classes


def test_the_models_of_the_paper() -> None:
    assert parameters(CharLSTM()) == lstm(90, 8, 512, 2) == 3_217_194
    assert parameters(ResNet()) == resnet(100, 64, (2, 2, 2, 2)) == 11_220_132


@pytest.mark.parametrize("hidden", [1, 16])
@pytest.mark.parametrize("layers", [1, 3])
def test_lstm_of_any_width_and_depth(hidden: int, layers: int) -> None:
    model = CharLSTM(vocabulary=11, embedding=3, hidden=hidden, layers=layers)
    assert parameters(model) == lstm(11, 3, hidden, layers)
    assert model(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 11, 7)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("blocks", [(1,), (1, 2), (2, 2, 2, 2)])
def test_resnet_of_any_width_and_depth(width: int, blocks: tuple[int, ...]) -> None:
    model = ResNet(classes=5, width=width, blocks=blocks)
    assert parameters(model) == resnet(5, width, blocks)
    assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 5)


def test_the_lstm_sees_only_what_came_before() -> None:
    torch.manual_seed(0)
    model = CharLSTM(vocabulary=11, hidden=8)
    text = torch.randint(11, (1, 6))
    other = text.clone()
    other[0, 4] = (text[0, 4] + 1) % 11
    first, second = model(text), model(other)
    torch.testing.assert_close(first[..., :4], second[..., :4])
    assert not torch.allclose(first[..., 4:], second[..., 4:])
