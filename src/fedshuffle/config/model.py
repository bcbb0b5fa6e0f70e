"""The trained model of a run, from the run's folder."""

from __future__ import annotations

import copy
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import vector_to_parameters

from fedshuffle import fingerprint
from fedshuffle._arrays import expect
from fedshuffle.config import loader, runner
from fedshuffle.errors import FedShuffleError, one_line
from fedshuffle.training.run_folder import RunFolder


def load_model(folder: Path | str, model: nn.Module | None = None) -> nn.Module:
    """The model of a run as it was last saved, in evaluation mode and on the CPU.

    The run's config makes the architecture, with the user's own modules; a run that was started by
    :func:`fedshuffle.train` has no config, and needs a model. The parameters come from safetensors
    files: nothing is unpickled.

    Args:
        folder: the folder of the run.
        model: the architecture, with any parameters; it is not changed.

    >>> import tempfile, torch
    >>> from fedshuffle import Federation, losses, train
    >>> data, out = Federation.from_arrays(torch.eye(3), sizes=[1, 2]), tempfile.mkdtemp() + "/run"
    >>> loss = lambda model, x: (model(x) - x).square().mean()
    >>> trained = train(nn.Linear(3, 3), data, loss=loss, rounds=2, out=out).model
    >>> bool(torch.equal(load_model(out, nn.Linear(3, 3)).weight, trained.weight))
    True
    """
    path = Path(folder)
    run = RunFolder(path)
    settings = run.settings()
    found = _initial_model(path) if model is None else copy.deepcopy(model).cpu()
    expect(found, nn.Module, "model")
    if fingerprint.architecture(found) != settings.get("model_sha256"):
        raise FedShuffleError(
            f"the model has other layers than the one that {str(path)!r} trained. Give the same as"
            " model=..., or put the modules of the run back as they were."
        )
    whole = path / "model.safetensors"
    if whole.exists():  # also holds frozen parameters and buffers
        try:
            found.load_state_dict(load_file(whole))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise FedShuffleError(
                f"{str(whole)!r} cannot be read: {one_line(error)}. Put back a copy of it."
            ) from error
    elif fingerprint.frozen(found) != settings.get("frozen_sha256"):
        raise FedShuffleError(
            f"the frozen parameters or buffers of the model are not those of {str(path)!r}, and its"
            " checkpoints hold only trained parameters. Give a model with the same."
        )
    state = run.latest()
    if state is not None:  # a resumed run may be ahead of the last final model
        trained = [p for p in found.parameters() if p.requires_grad]
        vector_to_parameters(state.x, trained)
        for parameter in trained:  # do not share memory
            parameter.data = parameter.data.clone()
    elif not whole.exists():
        raise FedShuffleError(
            f"{str(path)!r} holds neither a model nor a complete checkpoint: run it again."
        )
    return found.eval()


def _initial_model(path: Path) -> nn.Module:
    try:
        return runner.model(loader.load(path / "config.toml"))
    except FedShuffleError as error:
        raise FedShuffleError(
            f"the model of {str(path)!r} cannot be made: {one_line(error)}. Fix that, or give the"
            " architecture as model=..."
        ) from error
