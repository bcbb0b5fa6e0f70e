"""A client app of the user's own, with fedshuffle in one call."""

import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedshuffle import losses
from fedshuffle.flower import Client
from fedshuffle.flower.secure_aggregation import MODS

from .task import model, own


def if_secure(mod: Mod) -> Mod:
    """The mod, in runs that ask for secure aggregation."""

    def chosen(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        used = context.run_config["secure"]
        return mod(message, context, call_next) if used else call_next(message, context)

    return chosen


app = ClientApp(mods=[if_secure(mod) for mod in MODS])


@app.query("info")
@app.train()
@app.train("full_gradient")
def answer(message: Message, context: Context) -> Message:
    number = int(context.node_config["partition-id"])
    second = message.metadata.message_type == "train" and message.metadata.group_id == "2"
    mark = Path(str(context.run_config["marks"])) / "waiting"
    if second and number == context.run_config["waits"] and not mark.exists():
        mark.touch()
        while True:
            time.sleep(1)
    secure = bool(context.run_config["secure"])
    client = Client(number, model(), own(number), losses.cross_entropy, secure_aggregation=secure)
    return client.handle(message, context)
