"""What runs at the server: sample clients, aggregate, evaluate, and save the model."""

from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from fedshuffle.flower import FedShuffleStrategy
from fedshuffle.local_work import LocalWork

from .data import load_test
from .model import make_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and leave the model in ``out``."""
    config = context.run_config
    seed = int(config["seed"])
    # Flower starts this in the folder in which the SuperLink was started.
    out = Path(str(config["out"])).expanduser().resolve()
    print(f"metrics, checkpoints and the model go to {out}", flush=True)
    strategy = FedShuffleStrategy(
        clients=int(config["clients"]),
        method=str(config["method"]),
        sampling=str(config["sampling"]),
        work=LocalWork(epochs=int(config["epochs"]), batch_size=int(config["batch-size"])),
        step_size=float(config["step-size"]),
        seed=seed,
        out=out,
        resume=bool(config["resume"]),
    )
    result = strategy.start(
        grid,
        initial_arrays=ArrayRecord(make_model(seed).state_dict()),
        num_rounds=int(config["num-rounds"]),
        evaluate_fn=evaluate,
    )
    save_file(result.arrays.to_torch_state_dict(), out / "model.safetensors")
    print(f"the model is in {out / 'model.safetensors'}", flush=True)


def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
    """How good the global model is on digits that no client has seen."""
    model = make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    images, labels = load_test()
    with torch.no_grad():
        scores = model(images)
    accuracy = (scores.argmax(1) == labels).double().mean().item()
    loss = torch.nn.functional.cross_entropy(scores, labels).item()
    return MetricRecord({"accuracy": accuracy, "loss": loss})
