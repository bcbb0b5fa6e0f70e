"""What runs at each client: local training, as the server's plan says."""

from fedshuffle import losses
from fedshuffle.flower import client_app

from .data import load_data
from .model import make_model

app = client_app(model=make_model, data=load_data, loss=losses.cross_entropy)
