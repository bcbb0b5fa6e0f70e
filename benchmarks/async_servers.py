"""The black-box audit of the asynchronous servers of NVFlare, APPFL and FLSim, as tables.

    python benchmarks/async_servers.py nvflare          # print one; or appfl, or flsim
    python benchmarks/async_servers.py nvflare --write  # put it in docs/research/async-servers.md

Install one framework at a time with ``pip install --no-deps``, each in an environment of its own:
their requirements conflict. Besides, APPFL needs omegaconf, FLSim hydra-core, and both need opacus
and opt-einsum.
"""

import argparse
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshuffle import Federation, FedShuffleError, LocalWork, engines, losses, schedules
from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.async_adapters import appfl_server, flsim_server, nvflare_server
from fedshuffle.auditing.async_servers import MakeServer, audit_async_server, staleness_weights
from fedshuffle.engines import Problem
from fedshuffle.experiments import digits, stragglers
from fedshuffle.experiments.pages import fill
from fedshuffle.kernel import ClientTask, LocalTraining, StepCoefficients
from fedshuffle.timing import Asynchronous, Clock, LogNormal
from fedshuffle.training.rounds import Run, simulate

PAGE = Path(__file__).parent.parent / "docs" / "research" / "async-servers.md"
RATES = [4.0, 2.0, 1.0, 0.5]
ARRIVALS, SIZES, BUFFER = [0, 1, 0, 2, 3, 0, 4, 1], [1, 2, 3, 4, 5], 2
"""A short run: the clients in order of arrival, which all download at first; their examples; K."""


def nvflare() -> dict[str, MakeServer]:
    """NVFlare's model manager, by its settings."""
    manager = _get("nvflare.edge.assessors.buff_model_manager", "BuffModelManager")
    settings = {
        "BuffModelManager, K = 1": (1, False),
        "BuffModelManager, K = 1, staleness_weight": (1, True),
        "BuffModelManager, K = 3": (3, False),
        "BuffModelManager, K = 3, staleness_weight": (3, True),
    }
    return {
        name: nvflare_server(functools.partial(manager, k, staleness_weight=weight), 4)
        for name, (k, weight) in settings.items()
    }


def appfl() -> dict[str, MakeServer]:
    """APPFL's aggregators: as its server sets them up for four clients, and without that."""
    old = {"staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}}
    four, update = {"num_clients": 4}, {"num_clients": 4, "gradient_based": True}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "FedAsync, updates": ("FedAsync", update),
        "FedAsync, updates, a = 0.5": ("FedAsync", {**update, **old}),
        "FedAsync, models": ("FedAsync", four),
        "FedAsync, models, a = 0.5": ("FedAsync", {**four, **old}),
        "FedBuff, K = 3, updates": ("FedBuff", {"K": 3, **update}),
        "FedBuff, K = 3, updates, a = 0.5": ("FedBuff", {"K": 3, **update, **old}),
        "FedBuff, K = 3, models, a = 0.5": ("FedBuff", {"K": 3, **four, **old}),
        "FedBuff, K = 3, models, no num_clients": ("FedBuff", {"K": 3}),
        "FedCompass, single, models, a = 0.5": ("FedCompass", {**four, **old}),
    }
    config = _get("omegaconf", "DictConfig")

    def server(kind: str, settings: dict[str, Any]) -> MakeServer:
        aggregator = _get("appfl.algorithm.aggregator", f"{kind}Aggregator")
        # Without its memory optimisation, which collects garbage at every upload.
        told = config({"optimize_memory": False, **settings})
        return appfl_server(lambda model: aggregator(model, told))

    return {name: server(*setting) for name, setting in settings.items()}


def flsim() -> dict[str, MakeServer]:
    """FLSim's asynchronous aggregators, at a server step size of one."""
    return {
        "Async, updates": flsim_trainer([1] * 4),
        "Async, updates, a = 0.5": flsim_trainer([1] * 4, exponent=0.5),
        "Async, models, lr = 0.5, a = 0.5": flsim_trainer(
            [1] * 4, exponent=0.5, aggregation_type=2, lr=0.5
        ),
        "Async, models, lr = 1": flsim_trainer([1] * 4, aggregation_type=2),
        "FedBuff, K = 3": flsim_trainer([1] * 4, buffer=3),
        "FedBuff, K = 3, a = 0.5": flsim_trainer([1] * 4, buffer=3, exponent=0.5),
    }


def flsim_trainer(
    sizes: list[int],
    *,
    buffer: int = 0,
    exponent: float = 0.0,
    by_examples: bool = False,
    reduction: str = "",
    aggregation_type: int = 1,
    lr: float = 1.0,
) -> MakeServer:
    """FLSim's trainer with one of its aggregators."""
    _let_flsim_import()
    tools, part = "flsim.utils.async_trainer.async", importlib.import_module
    aggregators = part("flsim.optimizers.async_aggregators")
    reducers, trainers = (
        part("flsim.reducers.base_round_reducer"),
        part("flsim.trainers.async_trainer"),
    )
    kind = aggregators.AsyncAggregationType(aggregation_type)
    aggregator = aggregators.FedAvgWithLRAsyncAggregatorConfig(lr=lr, aggregation_type=kind)
    if buffer:
        aggregator = aggregators.FedAvgWithLRFedBuffAggregatorConfig(lr=lr, buffer_size=buffer)
    if reduction:
        kind = reducers.ReductionType[reduction]
        aggregator.reducer = reducers.RoundReducerConfig(reduction_type=kind)
    stale = part(f"{tools}_staleness_weights").PolynomialStalenessWeightConfig(exponent=exponent)
    rule = "LinearExampleWeightConfig" if by_examples else "EqualExampleWeightConfig"
    size = _get(f"{tools}_example_weights", rule)()
    weight = part(f"{tools}_weights").AsyncWeightConfig(staleness_weight=stale, example_weight=size)
    config = trainers.AsyncTrainerConfig(aggregator=aggregator, async_weight=weight)
    told = _get("omegaconf", "OmegaConf").structured(config)
    return flsim_server(lambda model: trainers.AsyncTrainer(model=model, **told), sizes)


def flsim_arrivals() -> str:
    """What FLSim's FedBuff makes of a few arrivals, step by step and with other settings."""
    plain: dict[str, Any] = {"buffer": BUFFER, "exponent": 0.5}
    models, started = _models_after_arrivals(flsim_trainer(SIZES, **plain)), [0] * len(SIZES)
    lines = [_line(["upload", "client", "staleness", "weight", "model"]), _line(["---"] * 5)]
    for k, client in enumerate(ARRIVALS):
        made = k // BUFFER
        before, after = (models[BUFFER * m] for m in (made, made + 1))
        shown = _numbers(after, 4) if (k + 1) % BUFFER == 0 else ""
        weight = f"{(after - before)[client]:.4f}"
        lines.append(_line([str(k + 1), str(client), str(made - started[client]), weight, shown]))
        started[client] = (k + 1) // BUFFER
    lines += ["", _line(["reduction", "examples", "last model"]), _line(["---"] * 3)]
    for reduction in ("WEIGHTED_SUM", "SUM", "WEIGHTED_AVERAGE", "AVERAGE"):
        for by in (False, True):
            make = flsim_trainer(SIZES, **plain, reduction=reduction, by_examples=by)
            last = _numbers(_models_after_arrivals(make)[-1], 4)
            lines.append(_line([reduction, "linear" if by else "equal", last]))
    return "\n".join(lines)


def _models_after_arrivals(make: MakeServer) -> list[FloatArray]:
    """The first model, and those after each upload of a unit vector."""
    server, n = make(len(SIZES)), len(SIZES)
    models = [np.array([server.download(client) for client in range(n)])[0]]
    for client in ARRIVALS:
        server.upload(client, np.eye(n)[client])
        models.append(np.array(server.download(client)))
    return models


def flsim_training(steps: int = 255, every: int = 85) -> str:
    """Our FedBuff, and FLSim's with our clients, in the study of stragglers; all clients loop."""
    buffer, exponent, step_size, server_step_size = 10, 0.5, 3.2, 2.0
    clients, tests = stragglers.clients(), stragglers.clients("test")
    problem = Problem(digits.model(), losses.cross_entropy, clients)
    run = Run(
        clients,
        "fedavg-rr",
        work=LocalWork(batch_size=8),
        step_size=schedules.resolve(f"cosine:{step_size}", steps),
        server_step_size=server_step_size,
        schedule=Asynchronous(buffer, staleness=exponent),
        clock=Clock(stragglers.seconds(), jitter=LogNormal(0.7), latency=1.0),
    )
    assert run.asynchronous is not None
    engine = engines.make("reference", problem)
    lr = server_step_size / buffer * 2**-exponent
    planned = run.workload.possible_steps[0][:, 0].tolist()
    trainer = flsim_trainer(clients.sizes.tolist(), buffer=buffer, exponent=exponent, lr=lr)
    server, models = trainer(len(problem.start)), [problem.start] * len(clients)
    for client in range(len(clients)):
        server.download(client)

    def accuracy(x: Tensor) -> str:
        images, labels = tests.fields
        return f"{(problem.copy(x)(images).argmax(1) == labels).double().mean():.4f}"

    head = ["server step", "accuracy, ours", "FLSim", "largest parameter", "largest difference"]
    lines = [_line(head), _line(["---"] * len(head))]
    for step, (state,) in enumerate(simulate(engine, [run], steps)):
        found = run.asynchronous.arrivals(step)
        updates = (part.tolist() for part in (found.clients, found.versions, found.addresses))
        for i, begun, address in zip(*updates, strict=True):
            batches = run.workload.minibatches(i, planned[i], run.seed, address)
            size = schedules.value(run.step_size, begun, "step size")
            task = ClientTask(batches, size, StepCoefficients(), [1.0])
            (answer,) = engine.local_training([LocalTraining(models[i], [task], 1)])
            server.upload(i, answer.sums[0].double().numpy())
            models[i] = torch.from_numpy(np.array(server.download(i))).float()
        if (step + 1) % every == 0:
            last = models[i]
            largest, apart = state.x.abs().max(), (state.x - last).abs().max()
            shown = [accuracy(state.x), accuracy(last), f"{largest:.2f}", f"{apart:.0e}"]
            lines.append(_line([str(step + 1), *shown]))
    return "\n".join(lines)


def table(package: str, servers: dict[str, MakeServer], uploads: int) -> str:
    """One line per server."""
    head = ["server", "weight at staleness 0, 1, 2, 3", "clients count", "±", "and"]
    lines = [f"{package} {version(package)}, {uploads} uploads.", ""]
    lines += [_line(head), _line(["---"] * len(head))]
    federation = Federation.from_sizes([1] * len(RATES))
    for name, make in servers.items():
        weights = _numbers(staleness_weights(make)[:4])
        try:
            result = audit_async_server(make, federation, RATES, uploads=uploads, name=name)
        except FedShuffleError as error:
            told = [word for word in ("diverges", "clients train apart") if word in str(error)]
            lines.append(_line([name, weights, "", "", *told]))
            continue
        errors = np.zeros(4) if result.standard_errors is None else result.standard_errors
        more = [_SHORT[key] for key in _SHORT for f in result.findings if key in f.what]
        really = _numbers(result.effective_weights)
        lines.append(_line([name, weights, really, f"{2 * errors.max():.3f}", ", ".join(more)]))
    return "\n".join(lines)


_SHORT = {"undoes": "undoes work of others", "times what it should": "loses updates"}


def nvflare_lost(uploads: int, buffer: int = 3) -> str:
    """The shares of the clients' updates that NVFlare drops together with an old model."""
    lost, sent = np.zeros(4), np.zeros(4)
    manager = _get("nvflare.edge.assessors.buff_model_manager", "BuffModelManager")(buffer)
    prune = manager.prune_model_versions

    def watched(versions_to_keep: set[int], fl_ctx: Any) -> None:
        for old, state in manager.updates.items():
            if old not in versions_to_keep and state.aggregator.count:
                lost[:] += state.aggregator.dict["x"]
        prune(versions_to_keep, fl_ctx)

    manager.prune_model_versions = watched
    server = nvflare_server(lambda: manager, 4)(4)
    chance = np.array(RATES) / sum(RATES)
    for client in np.random.default_rng(0).choice(4, uploads, p=chance).tolist():
        server.upload(client, np.eye(4)[client])
        sent[client] += 1
    shares = ", ".join(f"{share:.1%}" for share in lost / sent)
    return (
        f"Of the updates, with K = {buffer}, these shares are lost: {shares} ({uploads} uploads)."
    )


def _let_flsim_import() -> None:
    """Allow default values of dataclasses that are objects of dataclasses, as before Python 3.11.

    FLSim 0.1.0 has them.
    """
    original = dataclasses._get_field  # type: ignore[attr-defined]

    def patched(cls: type, name: str, *more: Any) -> Any:
        value = cls.__dict__.get(name, dataclasses.MISSING)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            setattr(cls, name, dataclasses.field(default_factory=lambda: value))
        return original(cls, name, *more)

    if original.__name__ != "patched":
        dataclasses._get_field = patched  # type: ignore[attr-defined]


def _get(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _numbers(values: FloatArray, digits: int = 3) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print a table, or write it."""
    known: dict[str, Callable[[], dict[str, MakeServer]]] = {
        "nvflare": nvflare,
        "appfl": appfl,
        "flsim": flsim,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=list(known))
    parser.add_argument("--uploads", type=int, default=100_000, help="to simulate for each server")
    parser.add_argument("--write", action="store_true", help=f"put it in {PAGE.name}")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # they have lines for every upload
    made = {given.framework: table(given.framework, known[given.framework](), given.uploads)}
    if given.framework == "nvflare":
        made["nvflare lost"] = nvflare_lost(given.uploads)
    if given.framework == "flsim":
        made |= {"flsim arrivals": flsim_arrivals(), "flsim training": flsim_training()}
    if given.write:
        fill(PAGE, made)
    else:
        print(*made.values(), sep="\n\n")


if __name__ == "__main__":
    main()
