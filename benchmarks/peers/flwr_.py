"""Flower: a ServerApp with its FedAvg strategy on its simulation engine, Ray, with one worker.

Flower owns the loop. It is paused where it evaluates the model on the server, after each round.
Flower draws the cohorts itself.
"""

import sys

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from flwr_client import app as client_app
from models import model
from turns import Turns, play
from work import CLIENTS, COHORT


def contestant(turns: Turns) -> None:
    folder, work = sys.argv[1:]
    app = ServerApp()

    def pause(round: int, arrays: ArrayRecord) -> None:
        turns.next()

    def count(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        turns.steps += sum(int(reply["metrics"]["steps"]) for reply in replies)
        return MetricRecord({"clients": len(replies)})

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=COHORT / CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=COHORT,
            min_available_nodes=CLIENTS,
            train_metrics_aggr_fn=count,
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(model(work).state_dict()),
            num_rounds=10**9,
            train_config=ConfigRecord({"folder": folder, "work": work}),
            evaluate_fn=pause,
        )

    resources = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0}}
    run_simulation(app, client_app, num_supernodes=CLIENTS, backend_config=resources)


if __name__ == "__main__":
    play(contestant)
