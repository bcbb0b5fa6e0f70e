"""Flower's ClientApp, in a module of its own as in Flower's own templates."""

import functools

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from models import model, tensors, train_client
from torch import Tensor, nn
from work import Data, load, steps

app = ClientApp()


@functools.cache
def prepared(folder: str, work: str) -> tuple[nn.Module, Data, Tensor, Tensor]:
    """Once in every process: Flower keeps its workers between rounds."""
    data = load(folder, work)
    return (model(work), data, *tensors(data))


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    trained, data, inputs, labels = prepared(config["folder"], config["work"])
    trained.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    rows = data.rows(client)
    train_client(trained, inputs[rows], labels[rows])
    taken = steps(data.sizes[client : client + 1])
    metrics = MetricRecord({"num-examples": int(data.sizes[client]), "steps": taken})
    content = RecordDict({"arrays": ArrayRecord(trained.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
