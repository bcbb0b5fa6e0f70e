"""What clients with a ``train`` of their own are sent: the model, and a config of their own."""

from flwr.app import ConfigRecord

from fedshuffle.errors import FedShuffleError
from fedshuffle.flower.population import Report
from fedshuffle.randomness import Purpose, generator

ROUND, PLANNED, SEED = "server-round", "planned-steps", "seed"
"""What the strategy adds to the config that clients get."""


def check_keys(config: ConfigRecord) -> None:
    """Refuse a ``train_config`` with keys of the strategy's own."""
    for key in (PLANNED, SEED):
        if key in config:
            raise FedShuffleError(
                f"train_config has a key {key!r}, under which the strategy itself tells clients"
                " something. Rename yours."
            )


def client_config(
    config: ConfigRecord,
    server_round: int,
    local_steps: int | None,
    known: Report | None,
    seed: tuple[int, int, int],
) -> ConfigRecord:
    """The config of one client: the steps asked for, or those that it reported last; and a seed,
    which follows from that of the strategy, the number of the round or task, and the node.
    """
    own = ConfigRecord(dict(config))
    own[ROUND] = server_round
    own[PLANNED] = local_steps or round(known.steps if known else 0)
    first, task, node = seed
    draw = generator(first, Purpose.ORDER, round=task, client=node % 2**63)
    own[SEED] = int(draw.integers(2**31))
    return own
