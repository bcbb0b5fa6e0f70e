"""Running a config: find the user's parts, train, and leave a folder that says it all.

To what :mod:`fedshuffle.runs` keeps there come

    DIR/config.toml           the config as it was run; enough to go on from
    DIR/model.safetensors     the final model, by the names of its state_dict
"""

from __future__ import annotations

import contextlib
import functools
import random
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

import fedshuffle
from fedshuffle import devices, engines, losses, methods, sampling
from fedshuffle._arrays import count, expect
from fedshuffle.config import begun, imports, writing
from fedshuffle.config.reading import load
from fedshuffle.config.settings import Config, Scheduled, Store, Use, at
from fedshuffle.engines import Loss
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.methods import Method
from fedshuffle.randomness import Purpose, generator
from fedshuffle.runs import RunFolder
from fedshuffle.sampling import Sampling
from fedshuffle.training import Evaluate, Result, train


def command(folder: Path, address: str | None = None) -> str:
    """The words that go on with the run in a folder, on the Ray cluster at an address if any."""
    where = "" if address is None else f" --address {shlex.quote(address)}"
    return f"fedshuffle run --resume {shlex.quote(str(folder))}{where}"


@final
@dataclass(frozen=True)
class Task:
    """What runs share that differ only in their settings: data, loss and evaluation."""

    federation: Federation
    loss: Loss
    evaluate: Evaluate | None = None


def task(config: Config) -> Task:
    """The data, the loss and the evaluation of a config."""
    with imports.importable(config.folder):
        _check_names(config)
        loss = _loss(config)
        federation = _federation(config, config.data, "data")
        return Task(federation, loss, _evaluate(config, federation, loss))


def model(config: Config) -> nn.Module:
    """The model at its start: a pure function of the config's seed."""
    with imports.importable(config.folder), at("model"), _seeded(config.seed, Purpose.START):
        made: nn.Module = imports.call(config.model.path, config.model.arguments, config.folder)
        expect(made, nn.Module, f"what {config.model.path!r} returns")
        for name, value in made.state_dict().items():
            expect(value, torch.Tensor, f"entry {name!r} of the model's state_dict")
    return made


def run(
    config: Config,
    out: Path | str | None = None,
    *,
    progress: bool = False,
    task: Task | None = None,
    address: str | None = None,
) -> Result:
    """Train as a config says, into the folder ``out``, or else the config's own, or none.

    Args:
        config: the run.
        out: a folder for the config, metrics, checkpoints and the final model.
        progress: show a bar.
        task: what :meth:`Config.task` gave, to share it between runs that vary other settings.
        address: where the Ray cluster is, if the engine is to work on one. It changes nothing in
            the result, so it is no setting of the run.
    """
    folder = config.out if out is None else Path(out)
    if folder is None:
        return _train(config, None, False, progress, task, address)
    config = config.pinned().override({})  # as it will be read again
    with RunFolder(folder).writing(), _claimed(folder, config):
        return _train(config, folder, False, progress, task, address)


def resume(
    folder: Path,
    rounds: int | None = None,
    *,
    progress: bool = False,
    task: Task | None = None,
    address: str | None = None,
) -> Result:
    """Go on with the run in a folder, as the config in it says; the rest as for :func:`run`."""
    file = folder / "config.toml"
    if not file.exists():
        raise FedShuffleError(
            f"{str(folder)!r} holds no config.toml, so no run of a config to go on with."
        )
    with RunFolder(folder).writing():
        config = load(file)
        with at("engine"):
            engines.at_address(config.engine, address)  # before the config says otherwise
        rounds = config.rounds if rounds is None else count(rounds, "rounds")
        if rounds != config.rounds:
            if begun(folder):
                RunFolder(folder).check_rounds(rounds)  # likewise
            config = replace(config, rounds=rounds)
            lines = file.read_text(encoding="utf-8").split("\n")
            notes = [line.removeprefix("# ") for line in lines if line[:1] == "#"]
            writing.copy(config, folder, [*notes, f"Resumed with rounds = {rounds}."])
        return _train(config, folder, begun(folder), progress, task, address)


@contextmanager
def _claimed(folder: Path, config: Config) -> Iterator[None]:
    """Put the config into a folder of its own, and take it away if no run begins there."""
    RunFolder(folder, how_to_resume=f"run: {command(folder)}").check(resume=False)
    if (folder / "config.toml").exists():
        raise FedShuffleError(
            f"{str(folder)!r} holds a config.toml already. If a run was stopped there before its"
            f" first round, run: {command(folder)}; or else choose another folder."
        )
    writing.copy(config, folder, [f"A run of fedshuffle {fedshuffle.__version__}.", *config.origin])
    try:
        yield
    except BaseException:
        if not begun(folder):
            with contextlib.suppress(OSError):
                (folder / "config.toml").unlink()
        raise


def _train(
    config: Config,
    out: Path | None,
    resume: bool,
    progress: bool,
    shared: Task | None,
    address: str | None,
) -> Result:
    with at("engine"):
        engine = engines.at_address(config.engine, address)
    with imports.importable(config.folder):
        parts = task(config) if shared is None else shared
        chosen = _sampling(config, parts.federation)
        result = train(
            model(config),
            parts.federation,
            loss=parts.loss,
            rounds=config.rounds,
            method=_method(config),
            sampling=chosen,
            work=config.work,
            step_size=_schedule(config, config.step_size),
            server_step_size=_schedule(config, config.server_step_size),
            seed=config.seed,
            engine=engine,
            device=config.device,
            evaluate=parts.evaluate,
            evaluate_every=config.evaluation.every if config.evaluation else 1,
            out=out,
            resume=resume,
            checkpoint_every=config.checkpoints.every,
            keep=config.checkpoints.keep,
            tensorboard=config.tensorboard,
            progress=progress,
            how_to_resume=None if out is None else f"run: {command(out, address)}",
        )
    if out is not None:
        tensors = {
            name: value.detach().cpu().contiguous().clone()
            for name, value in result.model.state_dict().items()
        }
        writing.write(out / "model.safetensors", save(tensors))
    return result


# The parts --------------------------------------------------------------------------------------


def _check_names(config: Config) -> None:
    """Find all that is named before anything is loaded, which may take long."""
    with at("engine"):
        engines.check(config.engine)
    with at("device"):
        devices.check(config.device)
    with at("sampling"):
        if sampling.is_import_path(config.sampling):
            imports.function(config.sampling, {}, config.folder)
        else:
            sampling.check(config.sampling)
    with at("model"):
        imports.maker(config.model.path, config.model.arguments, config.folder)
    _method(config)
    sources = {"data": config.data}
    if config.evaluation and not isinstance(config.evaluation.data, str):
        sources["evaluation.data"] = config.evaluation.data
    for key, source in sources.items():
        if isinstance(source, Use):
            with at(key):
                imports.maker(source.path, source.arguments, config.folder)


def _method(config: Config) -> Method:
    method: Method
    if methods.is_import_path(config.method):
        with at("method"):
            method = imports.find(config.method, config.folder)
            expect(method, Method, repr(config.method))
    else:
        method = methods.get(config.method)
    if config.momentum is None:
        return method
    return method.with_momentum(methods.parse_momentum(config.momentum))


def _sampling(config: Config, federation: Federation) -> Sampling:
    with at("sampling"):
        path = config.sampling
        if not sampling.is_import_path(path):
            return sampling.resolve(path, federation)
        made = imports.given(path, federation, config.folder)
        expect(made, Sampling, f"what {path!r} returns")
        return sampling.resolve(made, federation)


def _loss(config: Config) -> Loss:
    path = config.loss.path
    with at("loss"):
        if ":" not in path:
            own = [k for k, value in vars(losses).items() if isinstance(value, losses.MeanLoss)]
            if path not in own:
                raise unknown("loss", path, [*own, "module:function"])
            path = f"{losses.__name__}:{path}"
        loss = imports.function(path, config.loss.arguments, config.folder)
    return functools.partial(loss, **config.loss.arguments) if config.loss.arguments else loss


def _federation(config: Config, source: Use | Store, key: str) -> Federation:
    if isinstance(source, Store):
        with at(f"{key}.store"):
            return Federation.open(config.folder / source.path)
    # Loading must give the same data whenever a run goes on, and for every seed of the run.
    with at(key), _seeded(0, Purpose.SPLIT):
        made: Federation = imports.call(source.path, source.arguments, config.folder)
        expect(made, Federation, f"what {source.path!r} returns")
    return made


def _evaluate(config: Config, federation: Federation, loss: Loss) -> Evaluate | None:
    from fedshuffle.evaluation import Evaluation, Evaluations

    evaluation, data = config.evaluation, federation
    if evaluation is None:
        return None
    if not isinstance(evaluation.data, str):
        data = _federation(config, evaluation.data, "evaluation.data")
    with at("evaluation.metrics"):
        metrics = [
            imports.find(metric, config.folder) if ":" in metric else metric
            for metric in evaluation.metrics
        ]
    with at("evaluation"):
        size = evaluation.batch_size
        main = Evaluation(
            data if evaluation.clients is None else data.sample(evaluation.clients),
            metrics,
            loss=loss,
            per_client=evaluation.per_client,
            batch_size=size,
        )
        if evaluation.training is None:
            return main
        part = federation.sample(evaluation.training)
        trained = Evaluation(
            part, ["loss"], loss=loss, per_client=False, batch_size=size, prefix="train_"
        )
        return Evaluations(main, trained)


def _schedule(config: Config, size: float | Scheduled) -> float | Callable[[int], float]:
    return size.over(config.rounds) if isinstance(size, Scheduled) else size


@contextmanager
def _seeded(seed: int, purpose: Purpose) -> Iterator[None]:
    """Let what is drawn from the global generators follow from a seed, and disturb nobody's."""
    words = generator(seed, purpose).integers(1 << 32, size=3).tolist()
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(words[0])
        np.random.seed(words[1])
        torch.manual_seed(words[2])
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
