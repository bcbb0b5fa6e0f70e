"""Clients that step by an optimiser of torch: every engine equals a bare loop of torch."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedshuffle import FedShuffleError, LocalWork, losses, methods, train
from fedshuffle.engines import Problem, ReferenceEngine, SequentialEngine, VectorizedEngine
from fedshuffle.engines.serialization import pack
from fedshuffle.kernel import ClientTask, LocalTraining, StepCoefficients
from fedshuffle.local_optimisers import LocalOptimiser
from fedshuffle.training import Simulation
from fedshuffle.training.rounds import Run, simulate
from tests.engines.models import ENGINES, SIZES, data

FEDERATION = data((6,), 3, SIZES)
STEP_SIZE, ROUNDS, BATCH = 0.03, 2, 4
STEPS = [2 * -(-size // BATCH) for size in SIZES]  # of two epochs
SLOW = pytest.mark.slow
WORK: dict[str, Any] = {"epochs": 2, "batch_size": BATCH}

USUAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd:momentum=0.9": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd:momentum=0.8,nesterov=true": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    "sgd:momentum=0.7,dampening=0.4": (torch.optim.SGD, {"momentum": 0.7, "dampening": 0.4}),
    "adam:beta1=0.8,amsgrad=true": (torch.optim.Adam, {"betas": (0.8, 0.999), "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw:weight_decay=0.2,beta2=0.9,eps=0.001": (
        torch.optim.AdamW,
        {"weight_decay": 0.2, "betas": (0.9, 0.9), "eps": 1e-3},
    ),
}
OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rmsprop:alpha=0.9": (torch.optim.RMSprop, {"alpha": 0.9}),
    "adafactor": (torch.optim.Adafactor, {}),
    "muon:ns_steps=3": (torch.optim.Muon, {"ns_steps": 3}),
}


class Signs(torch.optim.Optimizer):
    """A class of the user's, which sees whole parameters: a step of one length each."""

    def __init__(self, params: Any, lr: float, power: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.sub_(p.grad / p.grad.norm() ** group["power"], alpha=group["lr"])


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4, bias=bias), nn.Tanh(), nn.Linear(4, 3, bias=bias)).double()


def lengths(kind: Any, options: dict[str, Any]) -> list[float]:
    """How far each client's steps go along a gradient of one."""
    if kind in (torch.optim.Adam, torch.optim.AdamW):  # a step each: decay does not count
        return [float(steps) for steps in STEPS]
    found = []
    for steps in STEPS:
        y = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
        optimiser = kind([y], lr=2.0**-20, **options)
        for _ in range(steps):
            y.grad = torch.ones_like(y)
            optimiser.step()
        found.append(float(-y.detach().mean() * 2**20))
    return found


def bare(
    model: nn.Module,
    kind: Any,
    options: dict[str, Any],
    weight_decay: float = 0.0,
) -> Tensor:
    """FedShuffle at full participation, written out: no line of the library but minibatches."""
    workload = LocalWork(**WORK).on(np.array(SIZES))
    x, y = (torch.as_tensor(field) for field in FEDERATION.fields)
    x = x.to(next(model.parameters()).dtype)
    far, start = lengths(kind, options), parameters_to_vector(model.parameters()).detach()
    for r in range(ROUNDS):
        total = torch.zeros_like(start)
        for i, size in enumerate(SIZES):
            local = copy.deepcopy(model)
            vector_to_parameters(start.clone(), local.parameters())
            optimiser = kind(local.parameters(), lr=STEP_SIZE * far[-1] / far[i], **options)
            first = sum(SIZES[:i])
            for positions in workload.minibatches(i, STEPS[i], 5, r):
                optimiser.zero_grad()
                batch = torch.from_numpy(positions) + first
                loss = nn.functional.cross_entropy(local(x[batch]), y[batch])
                decay = sum(p.square().sum() for p in local.parameters())
                (loss + weight_decay / 2 * decay).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            after = parameters_to_vector(local.parameters()).detach()
            total += size / sum(SIZES) * (after - start)
        start = start + total
    return start


def trained(model: nn.Module, optimiser: Any, engine: str, **work: Any) -> Tensor:
    result = train(
        model,
        FEDERATION,
        loss=losses.cross_entropy,
        rounds=ROUNDS,
        work=LocalWork(**WORK, optimiser=optimiser, **work),
        step_size=STEP_SIZE,
        engine=engine,
        seed=5,
    )
    return parameters_to_vector(result.model.parameters()).detach()


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", USUAL)
@pytest.mark.parametrize("engine", [e for e in ENGINES if "processes" not in e])
def test_every_engine_equals_a_bare_loop(engine: str, text: str) -> None:
    wanted = bare(network(), *USUAL[text])
    moved = (wanted - parameters_to_vector(network().parameters())).norm()
    assert moved > 0.1
    assert_same(trained(network(), text, engine), wanted)


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize("engine", ["reference", "sequential"])
def test_other_optimisers_see_the_shapes_of_the_parameters(engine: str, text: str) -> None:
    model = network(bias=False)  # Muon is for matrices only
    assert_same(trained(model, text, engine), bare(model, *OTHERS[text]))


def test_an_optimiser_that_does_not_fit_the_model_is_refused_before_training() -> None:
    work = LocalWork(optimiser="muon")
    with pytest.raises(FedShuffleError, match=r"muon cannot be made.*use another, such as"):
        Simulation(network(), FEDERATION, loss=losses.cross_entropy, work=work)


def test_processes_know_classes_of_the_user() -> None:
    optimiser = LocalOptimiser(Signs, {"power": 0.5})
    wanted = bare(network(), Signs, {"power": 0.5})
    for engine in ("reference", "sequential:2:processes"):
        assert_same(trained(network(), optimiser, engine), wanted)


def test_a_class_without_a_module_travels_with_its_code() -> None:
    class Local(Signs):
        pass

    tasks = [{"optimiser": LocalOptimiser(Local)}] * 3
    shared, (packed,) = pack([tasks])
    found = packed.unpack(shared, torch.device("cpu"))
    assert found[0]["optimiser"] is found[2]["optimiser"]
    assert found[0]["optimiser"].kind.__name__ == "Local"
    assert len(packed.requests) < 2 * len(pack([tasks[:1]])[1][0].requests)  # its code only once


@pytest.mark.parametrize(
    "engine",
    [
        *("reference", "sequential", "vectorized", "sequential:2"),
        *(pytest.param(f"{e}:2:processes", marks=SLOW) for e in ("sequential", "vectorized")),
    ],
)
def test_single_precision_is_within_1e_6_of_a_bare_loop(engine: str) -> None:
    wanted = bare(network().float(), torch.optim.AdamW, {})
    found = trained(network().float(), "adamw", engine)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_half_precision_is_named_where_its_range_is_too_small() -> None:
    """Adam divides by the root of a mean square plus 1e-8, which is zero in float16."""
    with pytest.raises(FedShuffleError, match=r"not finite.*in torch\.float16.*by \.float\(\)"):
        trained(nn.Sequential(network(), nn.ReLU(), nn.Linear(3, 3)).half(), "adamw", "sequential")


def test_weight_decay_of_the_local_work_is_part_of_the_gradient() -> None:
    wanted = bare(network(), torch.optim.Adam, {}, weight_decay=0.1)
    assert_same(trained(network(), "adam", "sequential", weight_decay=0.1), wanted)


@pytest.mark.parametrize("text", ["sgd:momentum=0.9", "adamw"])
def test_the_optimiser_gets_the_whole_direction_on_every_engine(text: str) -> None:
    """All terms of the kernel, with clipping and a scale, by hand and through autograd."""
    opaque = lambda m, *batch: losses.cross_entropy(m, *batch)  # noqa: E731
    for loss in (losses.cross_entropy, opaque):
        problem = Problem(network(), loss, FEDERATION)
        draw = torch.Generator().manual_seed(1)
        d, optimiser = len(problem.start), LocalOptimiser.read(text)
        v = 0.1 * torch.randn(d, dtype=torch.float64, generator=draw)
        scale = 0.5 + torch.rand(d, dtype=torch.float64, generator=draw)
        plans = [
            StepCoefficients(0.7, 0.2, 0.3, v, scale, own_gradient=True),
            StepCoefficients(alpha=0.0, v=v),
            StepCoefficients(alpha=0.0, beta=-1.0),
        ]
        workload = LocalWork(**WORK).on(np.array(SIZES))
        tasks = [
            ClientTask(
                workload.minibatches(i, STEPS[i], 5, 0), 0.02, plan, [1.0], 0.5, 0.1, optimiser
            )
            for i, plan in enumerate(plans)
        ]
        tasks.append(ClientTask(workload.minibatches(2, 3, 6, 0), 0.02, plans[0], [1.0]))
        request = LocalTraining(problem.start, tasks, 1)
        wanted = ReferenceEngine(problem).local_training([request])[0]
        for kind in (SequentialEngine, VectorizedEngine):
            found = kind(problem).local_training([request])[0]
            assert_same(found.sums, wanted.sums)
            for name, values in wanted.metrics.items():
                np.testing.assert_allclose(found.metrics[name], values, rtol=1e-9)


def test_runs_with_different_optimisers_train_in_lockstep() -> None:
    problem = Problem(network(), losses.cross_entropy, FEDERATION)
    works = [LocalWork(**WORK, optimiser=text) for text in ("sgd", "adamw", "sgd:momentum=0.9")]
    runs = [Run(FEDERATION, "fedshuffle", work=work, seed=5) for work in works]
    (together,) = simulate(VectorizedEngine(problem), runs, 1)
    for run, state in zip(runs, together, strict=True):
        ((alone,),) = simulate(ReferenceEngine(problem), [run], 1)
        assert_same(state.x, alone.x)


def test_sgd_by_name_is_the_kernel_itself() -> None:
    request = Run(FEDERATION, "fedshuffle", work=LocalWork(optimiser="sgd:momentum=0"))
    state = request.start(torch.zeros(3))
    training = request.local_training(state)
    assert training is not None
    assert all(task.optimiser is None for task in training.tasks)


def test_vectorized_refuses_what_it_cannot_and_auto_finds_another() -> None:
    with pytest.raises(FedShuffleError, match=r"not with rmsprop\. Use the engine 'sequential'"):
        trained(network(), "rmsprop", "vectorized")
    wanted = bare(network(), torch.optim.RMSprop, {})
    assert_same(trained(network(), "rmsprop", "auto"), wanted)


def test_diloco_is_a_bare_loop_with_nesterov_momentum() -> None:
    """Three rounds, so that the server's momentum counts."""
    model, steps, rounds, outer = network(), 3, 3, 0.7
    workload = LocalWork(steps=steps, batch_size=BATCH).on(np.array(SIZES))
    x, y = (torch.as_tensor(field) for field in FEDERATION.fields)
    server = copy.deepcopy(model)
    nesterov = torch.optim.SGD(server.parameters(), lr=outer, momentum=0.9, nesterov=True)
    for r in range(rounds):
        for p in server.parameters():
            p.grad = torch.zeros_like(p)
        for i, size in enumerate(SIZES):
            local = copy.deepcopy(server)
            inner = torch.optim.AdamW(local.parameters(), lr=0.01, weight_decay=0.1)
            for positions in workload.minibatches(i, steps, 5, r):
                inner.zero_grad()
                batch = torch.from_numpy(positions) + sum(SIZES[:i])
                loss = nn.functional.cross_entropy(local(x[batch]), y[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                inner.step()
            for p, after in zip(server.parameters(), local.parameters(), strict=True):
                assert p.grad is not None
                p.grad -= size / sum(SIZES) * (after.detach() - p.detach())
        nesterov.step()
    result = train(
        model,
        FEDERATION,
        loss=losses.cross_entropy,
        rounds=rounds,
        method="diloco",
        work=LocalWork(steps=steps, batch_size=BATCH),
        step_size=0.01,
        server_step_size=outer,
        seed=5,
    )
    found = parameters_to_vector(result.model.parameters()).detach()
    assert_same(found, parameters_to_vector(server.parameters()).detach())


def test_diloco_lets_options_of_adamw_vary_and_nothing_else() -> None:
    method = methods.get("diloco")
    assert str(method.local_work(LocalWork()).optimiser) == "adamw:weight_decay=0.1"
    own = LocalWork(optimiser="adamw:beta2=0.95")
    assert method.local_work(own).optimiser == own.optimiser
    with pytest.raises(FedShuffleError, match="diloco needs optimiser"):
        method.local_work(LocalWork(optimiser="adam"))
    with pytest.raises(FedShuffleError, match=r"2 to 6 steps.*LocalWork\(steps=...\)"):
        Run(FEDERATION, "diloco", work=LocalWork(**WORK))
    with pytest.raises(FedShuffleError, match="full participation"):
        Run(FEDERATION, "diloco", "uniform:2", LocalWork(steps=2))
