"""The model of a run, loaded from its folder."""

import copy
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.utils import vector_to_parameters

from fedshuffle import fingerprint
from fedshuffle._arrays import expect
from fedshuffle.config import loader
from fedshuffle.config.runner import initial_model
from fedshuffle.config.schema import at
from fedshuffle.errors import FedShuffleError, error_context
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
    run, path = RunFolder(folder), repr(str(folder))
    settings = run.settings()
    if model is None:
        with at(f"the model of {path} cannot be made; fix that, or give it as model=..."):
            found = initial_model(loader.load(run.path / "config.toml"))
    else:
        expect(model, nn.Module, "model")
        found = copy.deepcopy(model).cpu()
    if fingerprint.architecture(found) != settings.get("model_sha256"):
        raise FedShuffleError(
            f"the model has other layers than the one that {path} trained. Give the same as"
            " model=..., or put the modules of the run back as they were."
        )
    whole = run.path / "model.safetensors"
    if whole.exists():  # also holds buffers
        unreadable = f"{str(whole)!r} cannot be read; put back a copy of it"
        with error_context(unreadable, (OSError, RuntimeError, SafetensorError)):
            state = found.state_dict()
            fixed = {name: state[name] for name in fingerprint.frozen_names(found)}
            found.load_state_dict({**fixed, **safetensors.torch.load_file(whole)})
    if fingerprint.frozen(found) != settings.get("frozen_sha256"):
        raise FedShuffleError(
            f"the frozen parameters or buffers of the model are not those of {path}, which holds"
            " only trained parameters. Give a model with the same."
        )
    latest = run.latest()
    if latest is not None:  # a resumed run may be ahead of the last final model
        trained = [p for p in found.parameters() if p.requires_grad]
        vector_to_parameters(latest.x, trained)
        for parameter in trained:  # do not share memory
            parameter.data = parameter.data.clone()
    elif not whole.exists():
        raise FedShuffleError(
            f"{path} holds neither a model nor a complete checkpoint: run it again."
        )
    return found.eval()
