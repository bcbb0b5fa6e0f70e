"""From Python: registered methods by name, with options; a sampling as an object."""

import feddyn  # noqa: F401 - registers the method
import people
import torch
from windows import Windows

from fedshuffle import audit, losses, train

clients = people.clients()
sampling = Windows([0, 1, 2] * 4, b=2)
for method in ("fedavg-rr", "feddyn", "feddyn:strength=0.2"):
    model = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    result = train(
        model,
        clients,
        loss=losses.squared_error,
        method=method,
        sampling=sampling,
        step_size=0.02,
        rounds=40,
    )
    wrong = audit(clients, method, sampling).total_variation
    inputs, targets = clients.fields
    loss = losses.squared_error(result.model, inputs, targets).item()
    print(f"{method}: {wrong:.1%} of the objective in the wrong place, loss {loss:.3f}")
