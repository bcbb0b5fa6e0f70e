"""FedJAX: its federated averaging with haiku models, compiled for the CPU.

Its batches go on across epochs and are always full: a client of n examples takes ceil(2 n / 32)
steps. As for all contestants its work counts as 2 ceil(n / 32) steps. The LSTM is unrolled by a
loop: haiku's other way, which FedJAX's own model takes, compiles for minutes and is slower here.
"""

import sys

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from turns import Turns, play
from work import BATCH, CLASSES, EPOCHS, STEP_SIZE, VOCABULARY, cohort, load, steps

jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 calls it by its former name


def forward(work: str, x: jax.Array) -> jax.Array:
    if work == "logreg":
        return hk.Linear(CLASSES)(x)
    if work == "mlp":
        return hk.Linear(CLASSES)(jax.nn.relu(hk.Linear(200)(x)))
    if work == "cnn":
        x = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID")(x))
        x = jax.nn.relu(hk.Conv2D(64, 3, padding="VALID")(x))
        x = hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "VALID")(x)
        return hk.Linear(CLASSES)(jax.nn.relu(hk.Linear(128)(hk.Flatten()(x))))
    embedded = hk.Embed(VOCABULARY, 8)(x.T)  # time comes first
    core = hk.DeepRNN([hk.LSTM(256), hk.LSTM(256)])
    states, _ = hk.dynamic_unroll(core, embedded, core.initial_state(x.shape[0]))
    return jnp.swapaxes(hk.Linear(VOCABULARY)(states), 0, 1)


def loss(batch: dict[str, jax.Array], logits: jax.Array) -> jax.Array:
    each = fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)
    return each.reshape(len(each), -1).mean(axis=1)


def contestant(turns: Turns) -> None:
    folder, work = sys.argv[1:]
    data = load(folder, work)
    inputs = np.moveaxis(data.inputs, 1, -1) if work == "cnn" else data.inputs
    if work == "lstm":
        inputs = inputs.astype(np.int32)
    inputs, labels = np.ascontiguousarray(inputs), data.labels.astype(np.int32)
    clients = {
        client: {"x": inputs[data.rows(client)], "y": labels[data.rows(client)]}
        for client in range(len(data.sizes))
    }
    federated = fedjax.InMemoryFederatedData(clients)
    model = fedjax.create_model_from_haiku(
        hk.transform(lambda batch: forward(work, batch["x"])),
        {"x": inputs[:1], "y": labels[:1]},
        loss,
    )
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(STEP_SIZE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=EPOCHS),
    )
    key = jax.random.PRNGKey(0)
    state = algorithm.init(model.init(key))
    for round in turns:
        drawn = cohort(round)
        keys = jax.random.split(jax.random.fold_in(key, round), len(drawn))
        chosen = federated.get_clients(drawn.tolist())
        state, _ = algorithm.apply(
            state, [(client, owned, k) for (client, owned), k in zip(chosen, keys, strict=True)]
        )
        jax.block_until_ready(state.params)
        turns.steps += steps(data.sizes[drawn])


if __name__ == "__main__":
    play(contestant)
