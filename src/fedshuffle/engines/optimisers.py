"""A local optimiser of torch over the parameters of one client."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from fedshuffle.kernel import ClientTask


def over(
    task: ClientTask,
    flat: tuple[Tensor, Tensor],
    parameters: tuple[Sequence[Tensor], Sequence[Tensor]],
) -> Optimizer | None:
    """The optimiser of a task: its steps change the parameters in place along their gradients.

    Parameters and gradients are given as pairs, flat and as views in their own shapes, for
    optimisers that see more than single numbers. None if the task steps by the kernel.
    """
    if task.optimiser is None:
        return None
    pairs = [flat] if task.optimiser.elementwise else list(zip(*parameters, strict=True))
    leaves = []
    for parameter, gradient in pairs:
        leaves.append(leaf := parameter.detach())
        leaf.grad = gradient.detach()
    return task.optimiser.make(leaves, task.step_size)
