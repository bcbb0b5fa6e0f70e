"""The trained model of a run, from the run's folder."""

from __future__ import annotations

import copy
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import vector_to_parameters

from fedshuffle import _identity
from fedshuffle._arrays import expect
from fedshuffle.config.reading import load
from fedshuffle.config.running import model as start
from fedshuffle.errors import FedShuffleError, one_line
from fedshuffle.runs import RunFolder


def load_model(folder: Path | str, model: nn.Module | None = None) -> nn.Module:
    """The model of a run as it was last saved, in evaluation mode and on the CPU.

    The architecture is made by what the run's config names, and so by the user's own modules; a run
    that was started by :func:`fedshuffle.train` has no config, and needs a model. The parameters
    come from safetensors files: nothing is unpickled.

    Args:
        folder: the folder of the run.
        model: the architecture, with whatever parameters; it is left as it is.
    """
    path = Path(folder)
    run = RunFolder(path)
    settings = run.settings()
    found = _made(path) if model is None else copy.deepcopy(model).cpu()
    expect(found, nn.Module, "model")
    if _identity.architecture(found) != settings.get("model_sha256"):
        raise FedShuffleError(
            f"the model has other layers than the one that {str(path)!r} trained. Give the same as"
            " model=..., or put the modules of the run back as they were."
        )
    whole = path / "model.safetensors"
    if whole.exists():  # also holds what is not trained
        try:
            found.load_state_dict(load_file(whole))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise FedShuffleError(
                f"{str(whole)!r} cannot be read: {one_line(error)}. Put back a copy of it."
            ) from error
    elif _identity.frozen(found) != settings.get("frozen_sha256"):
        raise FedShuffleError(
            f"the frozen parameters or buffers of the model are not those of {str(path)!r}, and its"
            " checkpoints have only what is trained. Give a model with the same."
        )
    state = run.latest()
    if state is not None:  # a run that went on may have come further than its last end
        trained = [p for p in found.parameters() if p.requires_grad]
        vector_to_parameters(state.x, trained)
        for parameter in trained:  # no memory shared between them
            parameter.data = parameter.data.clone()
    elif not whole.exists():
        raise FedShuffleError(
            f"{str(path)!r} holds neither a model nor a whole checkpoint: run it again."
        )
    return found.eval()


def _made(path: Path) -> nn.Module:
    """The model that the run's config makes."""
    file = path / "config.toml"
    if not file.exists():
        raise FedShuffleError(
            f"{str(path)!r} has no config.toml, so its model cannot be made from there: give the"
            " architecture as model=..."
        )
    try:
        return start(load(file))
    except FedShuffleError as error:
        raise FedShuffleError(
            f"the model of {str(path)!r} cannot be made: {one_line(error)}. Mend that, or give the"
            " architecture as model=..."
        ) from error
