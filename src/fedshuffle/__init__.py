"""fedshuffle: federated learning that optimises the objective you meant.

Names are imported when they are first used, so ``import fedshuffle`` is fast and needs no torch.
"""

from typing import TYPE_CHECKING, Any

from fedshuffle._lazy import attach, exports

if TYPE_CHECKING:
    from fedshuffle import losses as losses
    from fedshuffle import methods as methods
    from fedshuffle import models as models
    from fedshuffle import sampling as sampling
    from fedshuffle import schedules as schedules
    from fedshuffle.auditing.audit import audit as audit
    from fedshuffle.auditing.blackbox import audit_server as audit_server
    from fedshuffle.auditing.result import Audit as Audit
    from fedshuffle.config.saved_model import load_model as load_model
    from fedshuffle.engines import Ray as Ray
    from fedshuffle.errors import FedShuffleError as FedShuffleError
    from fedshuffle.errors import TrainingError as TrainingError
    from fedshuffle.evaluation import ClientTable as ClientTable
    from fedshuffle.evaluation import Evaluation as Evaluation
    from fedshuffle.evaluation import Evaluations as Evaluations
    from fedshuffle.evaluation import Metric as Metric
    from fedshuffle.evaluation import SetMetric as SetMetric
    from fedshuffle.federation import Federation as Federation
    from fedshuffle.local_work import AtMost as AtMost
    from fedshuffle.local_work import EpochRange as EpochRange
    from fedshuffle.local_work import LocalWork as LocalWork
    from fedshuffle.local_work import MissLast as MissLast
    from fedshuffle.local_work import RandomStop as RandomStop
    from fedshuffle.losses import MeanLoss as MeanLoss
    from fedshuffle.methods import MVR as MVR
    from fedshuffle.methods import FedShuffleGen as FedShuffleGen
    from fedshuffle.methods import GlobalMomentum as GlobalMomentum
    from fedshuffle.methods import Method as Method
    from fedshuffle.privacy import Privacy as Privacy
    from fedshuffle.sampling import Sampling as Sampling
    from fedshuffle.training import Result as Result
    from fedshuffle.training import Simulation as Simulation
    from fedshuffle.training import callbacks as callbacks
    from fedshuffle.training import train as train
    from fedshuffle.tuning import tune as tune

    __all__: list[str]
    __version__: str

_load = attach(__name__)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted([*exports(__name__), "__version__"])
    if name == "__version__":
        from importlib.metadata import version

        return version("fedshuffle")
    return _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
