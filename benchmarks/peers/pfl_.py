"""pfl: FederatedAveraging on its simulated backend, with updates weighted by data points.

pfl owns the loop. It is paused in the callback after each round. It evaluates the cohort in the
first round, which belongs to its start-up. It does not reshuffle examples between epochs.
"""

import sys

import torch
from models import model, tensors
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional
from turns import Turns, play
from work import BATCH, COHORT, EPOCHS, STEP_SIZE, cohort, load, steps


class Trained(nn.Module):
    """A model with the loss and the metrics that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.inner(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, object]:
        return {"loss": Weighted(self.loss(inputs, labels).item() * len(labels), len(labels))}


class Pause(TrainingProcessCallback):
    """Waits between rounds."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.round = 0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.round = self.turns.next()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.round = self.turns.next()
        return False, Metrics()


def contestant(turns: Turns) -> None:
    folder, work = sys.argv[1:]
    data = load(folder, work)
    inputs, labels = tensors(data)
    trained = Trained(model(work))
    pause = Pause(turns)
    waiting: list[int] = []

    def sampler() -> int:
        if not waiting:
            clients = cohort(pause.round)
            waiting.extend(clients.tolist())
            turns.steps += steps(data.sizes[clients])
        return waiting.pop()

    def dataset(client: int) -> Dataset:
        rows = data.rows(client)
        return Dataset([inputs[rows], labels[rows]], user_id=str(client))

    users = FederatedDataset(dataset, sampler)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9,
            evaluation_frequency=10**9,
            train_cohort_size=COHORT,
            val_cohort_size=None,
        ),
        SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(trained, torch.optim.SGD, torch.optim.SGD(trained.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=EPOCHS, local_learning_rate=STEP_SIZE
        ),
        NNEvalHyperParams(local_batch_size=None),
        [pause],
    )


if __name__ == "__main__":
    play(contestant)
