"""The server app: a run of the strategy, whose final model is left in ``out``."""

import os
import signal
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from fedshuffle.flower import FedShuffleStrategy, SecureAggregation
from fedshuffle.transforms import channel

from .task import SETTINGS, SIZES, model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    out, mark = Path(str(config["out"])), Path(str(config["marks"])) / "died"

    def after(round: int, arrays: ArrayRecord) -> None:
        if round == 2 and config["dies"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    strategy = FedShuffleStrategy(
        len(SIZES),
        str(config["method"]),
        retries=int(config["retries"]),
        out=out,
        resume=bool(config["resume"]),
        transforms=[] if (link := channel(str(config["channel"]))) is None else [link],
        secure_aggregation=SecureAggregation() if config["secure"] else None,
        **SETTINGS,
    )
    start = ArrayRecord(model().state_dict())
    result = strategy.start(grid, start, int(config["rounds"]), evaluate_fn=after)
    save_file(result.arrays.to_torch_state_dict(), out / "model.safetensors")
