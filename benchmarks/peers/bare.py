"""The bare loop: FedAvg by hand in PyTorch, the unit in which all others are measured.

It copies the weights in, indexes tensors in memory, calls ``loss.backward()``, updates in place and
averages by examples. With ``optim`` as its last argument it uses torch.optim.SGD instead.
"""

import sys

import torch
from models import model, tensors, train_client, train_client_in_place
from turns import Turns, play
from work import cohort, load, steps


def contestant(turns: Turns) -> None:
    folder, work, *optim = sys.argv[1:]
    data = load(folder, work)
    inputs, labels = tensors(data)
    trained = model(work)
    local_work = train_client if optim else train_client_in_place
    parameters = list(trained.parameters())
    x = [p.detach().clone() for p in parameters]
    for round in turns:
        clients = cohort(round)
        total = int(data.sizes[clients].sum())
        mean = [torch.zeros_like(p) for p in x]
        for client in clients.tolist():
            with torch.no_grad():
                for p, start in zip(parameters, x, strict=True):
                    p.copy_(start)
            rows = data.rows(client)
            local_work(trained, inputs[rows], labels[rows])
            with torch.no_grad():
                for sum, p in zip(mean, parameters, strict=True):
                    sum.add_(p, alpha=data.sizes[client] / total)
        x = mean
        turns.steps += steps(data.sizes[clients])


if __name__ == "__main__":
    play(contestant)
