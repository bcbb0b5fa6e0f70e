r"""FedAvgM, FedAdagrad, FedAdam, FedYogi: an optimiser at the server, FedAvg at the clients.

The server takes FedAvg's aggregated update for (minus) a gradient and gives it to an optimiser. The
objective is the one of the averaging rule, FedAvg's unless another is given
(``fedadam+fedshuffle``). The adaptive ones want a small server step size, such as 0.01: it is about
the distance that each parameter moves in a round.

Reference: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019 (FedAvgM); Reddi et al., Adaptive Federated Optimization, 2021.
"""

from fedshuffle.methods import fedavg
from fedshuffle.methods.method import Family, Method
from fedshuffle.methods.servers import Adagrad, Adam, Momentum, ServerOptimiser, Yogi

_STYLES = {
    "fedavgm": ("FedAvgM", "#E69F00"),
    "fedadagrad": ("FedAdagrad", "#CC79A7"),
    "fedadam": ("FedAdam", "#0072B2"),
    "fedyogi": ("FedYogi", "#D55E00"),
}
_FAMILY = Family("adaptive", "Optimisers at the server", _STYLES)


def _method(name: str, summary: str, server: ServerOptimiser, reference: str) -> Method:
    return Method(name, summary, fedavg.RULE, server=server, reference=reference, family=_FAMILY)


METHODS = (
    _method("fedavgm", "momentum at the server", Momentum(), "Hsu et al. 2019"),
    _method("fedadagrad", "Adagrad at the server", Adagrad(), "Reddi et al. 2021"),
    _method("fedadam", "Adam at the server", Adam(), "Reddi et al. 2021"),
    _method("fedyogi", "Yogi at the server", Yogi(), "Reddi et al. 2021"),
)
