"""FLSim: its SyncTrainer with FedAvg by examples.

FLSim owns the loop. It is paused where it asks for the clients of the next round. It does not
reshuffle examples between epochs. Its configurations stand as defaults of other configurations,
which since Python 3.11 must be hashable: while it is imported, dataclasses are.
"""

# ruff: noqa: E402
import dataclasses
import functools
import sys
from typing import Any

import hydra.utils
import omegaconf
import opacus  # noqa: F401  # before the patch, which is for FLSim alone
import pandas as pd  # noqa: F401
import sklearn.cluster  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

plain = dataclasses.dataclass
dataclasses.dataclass = functools.partial(plain, unsafe_hash=True)
import flsim.configs  # noqa: F401
from flsim.clients.base_client import ClientConfig
from flsim.data.data_provider import FLDataProviderFromList
from flsim.interfaces.model import IFLModel
from flsim.optimizers.local_optimizers import LocalOptimizerSGDConfig
from flsim.optimizers.server_optimizers import FedAvgOptimizerConfig
from flsim.servers.sync_servers import SyncServerConfig
from flsim.trainers.sync_trainer import SyncTrainerConfig
from flsim.utils.simple_batch_metrics import FLBatchMetrics

dataclasses.dataclass = plain

from models import model, tensors
from torch import Tensor, nn, split
from torch.nn import functional
from turns import Turns, play
from work import BATCH, COHORT, EPOCHS, STEP_SIZE, cohort, load, steps


class Trained(IFLModel):
    """A model in the shape that FLSim asks for."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def fl_forward(self, batch: tuple[Tensor, Tensor]) -> FLBatchMetrics:
        inputs, labels = batch
        logits = self.inner(inputs)
        return FLBatchMetrics(
            loss=functional.cross_entropy(logits, labels),
            num_examples=len(labels),
            predictions=logits.detach(),
            targets=labels,
            model_inputs=inputs,
        )

    def fl_create_training_batch(self, **kwargs: Any) -> Any:
        return kwargs["batch"]

    def fl_get_module(self) -> nn.Module:
        return self.inner

    def fl_cuda(self) -> None:
        raise NotImplementedError

    def get_eval_metrics(self, batch: tuple[Tensor, Tensor]) -> FLBatchMetrics:
        return self.fl_forward(batch)

    def get_num_examples(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])


def contestant(turns: Turns) -> None:
    folder, work = sys.argv[1:]
    data = load(folder, work)
    inputs, labels = tensors(data)
    trained = Trained(model(work))

    class Selector:
        """Gives FLSim the cohorts, and waits between rounds."""

        def get_user_indices(self, **kwargs: Any) -> list[int]:
            clients = cohort(turns.next())
            turns.steps += steps(data.sizes[clients])
            return [int(client) for client in clients]

    users = [
        list(zip(split(inputs[rows], BATCH), split(labels[rows], BATCH), strict=True))
        for rows in map(data.rows, range(len(data.sizes)))
    ]
    config = SyncTrainerConfig(
        epochs=1e9,
        do_eval=False,
        report_train_metrics=False,
        users_per_round=COHORT,
        client=ClientConfig(epochs=EPOCHS, optimizer=LocalOptimizerSGDConfig(lr=STEP_SIZE)),
        server=SyncServerConfig(server_optimizer=FedAvgOptimizerConfig()),
    )
    trainer = hydra.utils.instantiate(omegaconf.OmegaConf.structured(config), model=trained)
    trainer.server._active_user_selector = Selector()
    trainer.train(FLDataProviderFromList(users, [], [], trained), None, len(users), 1)


if __name__ == "__main__":
    play(contestant)
