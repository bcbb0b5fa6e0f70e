"""Run a config: import the user's parts, train, and write a folder to resume from.

Beside the files of :mod:`fedshuffle.training.run_folder` the folder holds

    DIR/config.toml           the config as it was run
    DIR/model.safetensors     the final model without frozen parameters, by its state_dict's names
"""

import functools
import math
import random
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

import fedshuffle
from fedshuffle import _files, devices, engines, fingerprint, losses, schedules, tuning
from fedshuffle import sampling as samplings
from fedshuffle._arrays import expect
from fedshuffle.config import imports, loader, writer
from fedshuffle.config.schema import Config, DataSpec, ImportSpec, StorePath, at, step_size_by_round
from fedshuffle.engines import Loss
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.methods import Method
from fedshuffle.randomness import Purpose, generator, restored_generators
from fedshuffle.sampling import Sampling
from fedshuffle.schedules import Schedule
from fedshuffle.timing import resolve_clock
from fedshuffle.training import Evaluate, Result, train
from fedshuffle.training.message_sizes import message_sizes
from fedshuffle.training.run_folder import RunFolder
from fedshuffle.transforms import Transform
from fedshuffle.tuning.step_sizes import check as check_tuning


@dataclass(frozen=True)
class RunInputs:
    """The parts that runs with different settings can share: data, loss and evaluation."""

    federation: Federation
    loss: Loss
    evaluate: Evaluate | None = None


def run(
    config: Config,
    out: Path | str | None,
    progress: bool,
    inputs: RunInputs | None,
    address: str | None,
) -> Result:
    """Start the run of a config; the arguments are those of :meth:`Config.run`."""
    if out is None:
        return _train(config, None, progress, inputs, address)
    config = config.pinned().override({})  # exactly as it will be read again
    notes = [f"A run of fedshuffle {fedshuffle.__version__}.", *config.origin]
    folder = _folder(config, Path(out), address, notes)
    check_free(folder.path, address)
    return _train(config, folder, progress, inputs, address)


def check_free(out: Path, address: str | None = None) -> None:
    """Refuse a folder in which no run can start."""
    RunFolder(out, resume_hint=f"run: {command(out, address)}").check(resume=False)
    if (out / "config.toml").exists():
        raise FedShuffleError(
            f"{str(out)!r} holds a config.toml, but no run. Choose another folder, or start"
            f" the run of that config: {command(out)}."
        )


def resume(
    out: Path | str,
    *,
    rounds: int | None = None,
    progress: bool = False,
    inputs: RunInputs | None = None,
    address: str | None = None,
) -> Result:
    """Resume the run in a folder as its config says, if you like for more rounds in all.

    The other arguments are those of :meth:`Config.run`.
    """
    file = Path(out) / "config.toml"
    if not file.exists():
        raise FedShuffleError(f"{str(out)!r} holds no config.toml, so no run to resume.")
    config, notes = loader.load(file), []
    if rounds is not None and rounds != config.rounds:
        config = replace(config, rounds=rounds)
        lines = file.read_text(encoding="utf-8").split("\n")
        notes = [line.removeprefix("# ") for line in lines if line[:1] == "#"]
        notes.append(f"Resumed with rounds = {rounds}.")
    folder = _folder(config, file.parent, address, notes)
    if folder.begun:
        folder.check_rounds(config.rounds)  # before data are loaded
    return _train(config, folder, progress, inputs, address)


def tune(
    config: Config,
    out: Path | str | None,
    share: float,
    progress: bool,
    shared: RunInputs | None,
    address: str | None,
) -> tuning.TunedStepSizes:
    """Find step sizes for a config; the arguments are those of :meth:`Config.tune`."""
    check_tuning(share, config.privacy)
    with at("engine"):
        engine = engines.at_address(config.engine, address)
    with config.importable():
        parts = inputs(replace(config, evaluation=None)) if shared is None else shared
        server = step_size_by_round(config.server_step_size, config.rounds)
        return tuning.tune(
            initial_model(config),
            parts.federation,
            loss=parts.loss,
            **_settings(config, parts.federation),
            server_step_size=None if server == 1.0 else server,  # from what is usual for the method
            engine=engine,
            share=share,
            out=out,
            progress=progress,
        )


def _folder(config: Config, out: Path, address: str | None, notes: list[str]) -> RunFolder:
    """The folder of a run, which also gets the config unless there is nothing to note in it."""
    save = functools.partial(writer.save, config, out, notes) if notes else None
    return RunFolder(out, config.checkpoints.keep, f"run: {command(out, address)}", save)


def command(folder: Path, address: str | None = None) -> str:
    """The command that resumes the run in a folder, on a Ray cluster if an address is given."""
    where = "" if address is None else f" --address {shlex.quote(address)}"
    return f"fedshuffle run --resume {shlex.quote(str(folder))}{where}"


def _settings(config: Config, federation: Federation) -> dict[str, Any]:
    """What a run is, and what short runs that tune it share with it."""
    return {
        "rounds": config.rounds,
        "method": method(config),
        "sampling": sampling(config, federation),
        "work": config.work,
        "step_size": step_size_by_round(config.step_size, config.rounds),
        "down_channel": config.down_channel,
        **on_the_way(config),
        **timing(config, federation),
        "seed": config.seed,
        "device": config.device,
    }


def _train(
    config: Config,
    folder: RunFolder | None,
    progress: bool,
    shared: RunInputs | None,
    address: str | None,
) -> Result:
    """Train as a config says, from the state in the folder if the run has begun."""
    with at("engine"):
        engine = engines.at_address(config.engine, address)
    with folder.locked() if folder else nullcontext(), config.importable():
        parts = inputs(config) if shared is None else shared
        result = train(
            initial_model(config),
            parts.federation,
            loss=parts.loss,
            **_settings(config, parts.federation),
            server_step_size=step_size_by_round(config.server_step_size, config.rounds),
            engine=engine,
            evaluate=parts.evaluate,
            evaluate_every=config.evaluation.every if config.evaluation else 1,
            out=folder,
            resume=folder is not None and folder.begun,
            checkpoint_every=config.checkpoints.every,
            record_cohorts=config.record_cohorts,
            record_clients=config.record_clients,
            tensorboard=config.tensorboard,
            progress=progress,
        )
        if folder:
            left_out, state = fingerprint.frozen_names(result.model), result.model.state_dict()
            tensors = {
                name: t.detach().cpu().contiguous().clone()
                for name, t in state.items()
                if name not in left_out
            }
            _files.write_file(folder.path / "model.safetensors", safetensors.torch.save(tensors))
    return result


# The parts of a config ----------------------------------------------------------------------------


def inputs(config: Config) -> RunInputs:
    """The data, the loss and the evaluation of a config."""
    with config.importable():
        _check_names(config)
        loss = _loss(config)
        data = federation(config)
        return RunInputs(data, loss, _evaluate(config, data, loss))


def initial_model(config: Config) -> nn.Module:
    """The initial model: a pure function of the config's seed."""
    with config.importable(), at("model"), _seeded(config.seed, Purpose.START):
        made = imports.call(config.model.path, config.model.arguments, config.folder, nn.Module)
        for name, value in made.state_dict().items():
            expect(value, torch.Tensor, f"entry {name!r} of the model's state_dict")
    return made


def method(config: Config) -> Method:
    """The method of a config, with its momentum, and with probabilities to estimate."""
    with at("method"):
        found = imports.method(config.method, config.folder, config.momentum)
    with at("probabilities"):
        return found.with_probabilities(config.probabilities)


def sampling(config: Config, federation: Federation) -> Sampling:
    """The sampling of a config, for its federation, among the clients that are there."""
    with at("sampling"):
        drawn = imports.sampling(config.sampling, federation, config.folder)
    with at("availability"):
        there = config.availability, federation, config.rounds, config.folder
        return samplings.among_available(drawn, *there)


def transforms(config: Config) -> list[Transform]:
    """The transforms of the user's that a config names."""
    with config.importable(), at("transforms"):
        kind: Any = Transform
        return [
            imports.call(spec.path, spec.arguments, config.folder, kind)
            for spec in config.transforms
        ]


def on_the_way(config: Config) -> dict[str, Any]:
    """What happens to updates, as arguments of ``train`` and ``audit``."""
    return {"transforms": transforms(config), "channel": config.channel, "privacy": config.privacy}


def timing(config: Config, federation: Federation) -> dict[str, Any]:
    """For whom the server waits and how long clients take, as arguments of ``train``."""
    with at("clock"):
        clock = resolve_clock(config.clock, federation, config.folder)
    return {"schedule": config.schedule, "clock": clock}


def audited_timing(config: Config, federation: Federation) -> dict[str, Any]:
    """The same as arguments of ``audit`` and ``Run``, which do not know the model."""
    found = timing(config, federation)
    if found["clock"] is None or not found["clock"].has_bandwidths:
        return found
    sizes = message_sizes(initial_model(config), method(config), transforms(config), config.channel)
    return {**found, "message_sizes": sizes}


def step_sizes(config: Config) -> dict[str, Any]:
    """What rounds count by where clients come and go, as arguments of ``audit``."""
    if config.availability is None:
        return {}
    both = [
        step_size_by_round(size, config.rounds)
        for size in (config.step_size, config.server_step_size)
    ]
    if not any(map(callable, both)):
        return {"rounds": config.rounds}
    return {"step_size": functools.partial(_product, both), "rounds": config.rounds}


def _product(sizes: list[Schedule], round: int) -> float:
    return math.prod(schedules.value(size, round, "step size") for size in sizes)


def federation(config: Config, source: DataSpec | None = None, key: str = "data") -> Federation:
    """The data of a config, or of another source; ``key`` is named in errors."""
    source = config.data if source is None else source
    if not isinstance(source, ImportSpec):
        with at(f"{key}.store"):
            stored = Federation.open(config.folder / source.path)
        if source.transform is None:
            return stored
        with config.importable(), at(f"{key}.transform"):
            return stored.with_transform(imports.function(source.transform, {}, config.folder))
    # The data must be the same whenever a run is resumed, and for every seed of the run.
    with config.importable(), at(key), _seeded(0, Purpose.SPLIT):
        return imports.call(source.path, source.arguments, config.folder, Federation)


def _check_names(config: Config) -> None:
    """Check all names before data are loaded, which may take long."""
    with at("engine"):
        engines.check(config.engine)
    with at("device"):
        devices.check(config.device)
    with at("sampling"):
        if samplings.is_import_path(config.sampling):
            imports.function(config.sampling, {}, config.folder)
        else:
            samplings.check(config.sampling)
    method(config)
    specs: dict[str, object] = {"model": config.model, "data": config.data}
    specs |= {"evaluation.data": config.evaluation.data} if config.evaluation else {}
    named = [*specs.items(), *(("transforms", spec) for spec in config.transforms)]
    for key, spec in named:
        if isinstance(spec, ImportSpec):
            with at(key):
                imports.function(spec.path, spec.arguments, config.folder, complete=True)
        elif isinstance(spec, StorePath) and spec.transform is not None:
            with at(f"{key}.transform"):
                imports.function(spec.transform, {}, config.folder)


def _loss(config: Config) -> Loss:
    path, arguments = config.loss.path, config.loss.arguments
    with at("loss"):
        if ":" not in path:
            own = [k for k, value in vars(losses).items() if isinstance(value, losses.MeanLoss)]
            if path not in own:
                raise unknown("loss", path, [*own, "module:function"])
            path = f"{losses.__name__}:{path}"
        loss = imports.function(path, arguments, config.folder)
    return functools.partial(loss, **arguments) if arguments else loss


def _evaluate(config: Config, train_data: Federation, loss: Loss) -> Evaluate | None:
    from fedshuffle.evaluation import Evaluation, Evaluations

    spec, data = config.evaluation, train_data
    if spec is None:
        return None
    if not isinstance(spec.data, str):
        data = federation(config, spec.data, "evaluation.data")
    with at("evaluation.metrics"):
        metrics = [imports.find(m, config.folder) if ":" in m else m for m in spec.metrics]
    with at("evaluation"):
        part = data if spec.clients is None else data.sample(spec.clients)
        make = functools.partial(Evaluation, loss=loss, batch_size=spec.batch_size)
        main = make(part, metrics, per_client=spec.per_client)
        if spec.training is None:
            return main
        part = train_data.sample(spec.training)
        trained = make(part, ["loss"], per_client=False, prefix="training_")
        return Evaluations(main, trained)


@contextmanager
def _seeded(seed: int, purpose: Purpose) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch; restore their states afterwards."""
    words = generator(seed, purpose).integers(1 << 32, size=3).tolist()
    with restored_generators():
        random.seed(words[0])
        np.random.seed(words[1])
        torch.manual_seed(words[2])
        yield
