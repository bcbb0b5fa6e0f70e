"""The seam between local training and aggregation, the same on every engine."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshuffle import Federation, FedShuffleError, LocalWork, losses
from fedshuffle.engines import Problem, ReferenceEngine, make
from fedshuffle.kernel import FullGradient, LocalTraining
from fedshuffle.methods import round as method_round
from fedshuffle.sampling import Independent
from fedshuffle.training.rounds import Run, run_round, simulate
from fedshuffle.transforms import Chain, ClientContext, Message, ServerContext, Transform
from tests.engines.models import ENGINES, SIZES, data
from tests.problems import Point, half_squared_distance
from tests.transforms.examples import MODELS, NEAR, Everything, Halved, Noise, Scaled, problem_of


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "transforms",
    [(), (Everything(),), (Halved(),), (Scaled(), Everything()), (Halved(), Scaled(), Noise())],
)
def test_engines_agree_with_the_reference(model: str, transforms: Any) -> None:
    problem = problem_of(model)
    work = LocalWork(epochs=2, batch_size=2, weight_decay=0.1)
    run = Run(problem.federation, "fedshuffle", "uniform:2", work, transforms=transforms, seed=3)
    wanted = list(simulate(ReferenceEngine(problem), [run], 3))
    for name in ENGINES[1:]:
        engine = make(name, problem)
        for (have,), (want,) in zip(simulate(engine, [run], 3), wanted, strict=True):
            torch.testing.assert_close(have.x, want.x, **NEAR)
            assert have.metrics.keys() == want.metrics.keys()
            for metric, values in want.metrics.items():
                np.testing.assert_allclose(have.metrics[metric], values, rtol=1e-9, err_msg=name)
            assert have.transform_state.keys() == want.transform_state.keys()
            for key, tensor in want.transform_state.items():
                torch.testing.assert_close(have.transform_state[key], tensor, **NEAR)
            if want.clients is not None and have.clients is not None:
                everyone = np.arange(len(SIZES))
                torch.testing.assert_close(
                    have.clients.rows(everyone), want.clients.rows(everyone), **NEAR
                )
        engine.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_reference_is_its_formula(engine: str) -> None:
    """Two clients with f_i(y) = |y - b_i|^2 / 2: all that a round does, written out by hand."""
    b = torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=torch.float64)
    rows = b.repeat_interleave(torch.tensor([2, 4]), dim=0)
    federation = Federation.from_arrays(rows, sizes=[2, 4])
    problem = Problem(Point(2), half_squared_distance, federation)
    run = Run(federation, "fedavg-rr", step_size=0.1, transforms=[Everything()], seed=5)
    runner = make(engine, problem)
    (state,) = run_round(runner, [run], [run.start(problem.start)])
    (state,) = run_round(runner, [run], [state])
    runner.close()

    x, h, mean = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2).double(), torch.zeros(2)
    w, tau, ramp = [1 / 3, 2 / 3], [2, 4], torch.tensor([0.5, 1.5], dtype=torch.float64)
    for r in range(2):
        total, firsts = torch.zeros(2, dtype=torch.float64), []
        for i in range(2):
            update = (b[i] - x) * (1 - 0.9 ** tau[i])
            context = ClientContext(5, r, np.array([i]), *(np.ones(1),) * 3)  # type: ignore[arg-type]
            (signs,) = [rng.choice([-1.0, 1.0], size=2) for rng in context.generators()]
            sent = update * ramp + 0.1 * torch.from_numpy(signs) + 0.5 * h[i] + mean
            sent += 0.01 * (x - b[i])
            h[i] = h[i] + update * tau[i] * 0.1 * w[i]
            total += w[i] * sent
            firsts.append(float(sent[0]))
        noise = ServerContext(5, r, {}, {}).generator().normal(size=2)
        mean = 0.1 * total * float(np.mean(firsts))
        x = x + total + 1e-3 * torch.from_numpy(noise)
    torch.testing.assert_close(state.x, x, **NEAR)
    torch.testing.assert_close(state.clients.rows(np.arange(2)), h, **NEAR)  # type: ignore[union-attr]
    np.testing.assert_array_equal(state.metrics["bytes_up"], [7, 8])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss", [losses.cross_entropy, losses.squared_error])
def test_metrics_are_those_of_the_local_steps(engine: str, loss: Any) -> None:
    """The mean over steps of the loss of each minibatch before its step, and |y - x|."""
    torch.manual_seed(1)
    federation = data((6,), 3, SIZES)
    if loss is losses.squared_error:
        inputs, labels = federation.tensors()
        targets = nn.functional.one_hot(labels, 3).double()
        federation = Federation.from_arrays(inputs, targets, sizes=SIZES)
    model = nn.Linear(6, 3).double()
    problem = Problem(model, loss, federation)
    run = Run(federation, "fedshuffle", work=LocalWork(epochs=2, batch_size=4), step_size=0.2)
    runner = make(engine, problem)
    (state,) = run_round(runner, [run], [run.start(problem.start)])
    runner.close()
    request = run.local_training(run.start(problem.start))
    assert request is not None
    for k, task in enumerate(request.tasks):
        local, found = problem.copy(problem.start), []
        for positions in task.minibatches:
            batch = problem.batch(problem.rows(task.minibatches.client, positions))
            value = loss(local, *batch)
            local.zero_grad()
            value.backward()
            found.append(float(value.detach()))
            with torch.no_grad():
                for p in local.parameters():
                    assert p.grad is not None
                    p.sub_(task.step_size * p.grad)
        move = torch.cat([p.detach().reshape(-1) for p in local.parameters()]) - problem.start
        assert state.metrics["train_loss"][k] == pytest.approx(np.mean(found), rel=1e-9)
        assert state.metrics["update_norm"][k] == pytest.approx(float(move.norm()), rel=1e-9)
    size = 21 * 8
    np.testing.assert_array_equal(state.metrics["bytes_up"], [size] * 3)
    np.testing.assert_array_equal(state.metrics["bytes_down"], [size] * 3)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_loss_that_overflows_by_hand_is_the_largest_that_can_be_told(engine: str) -> None:
    federation = Federation.from_arrays(torch.tensor([[1000.0]]), torch.tensor([0]), sizes=[1])
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [1.0]]))
    run = Run(federation, "fedshuffle", step_size=1e-6)
    problem = Problem(model, losses.cross_entropy, federation)
    (state,) = run_round(make(engine, problem), [run], [run.start(problem.start)])
    least = -math.log(torch.finfo(torch.float32).tiny)
    assert state.metrics["train_loss"][0] == pytest.approx(least, rel=1e-6)


def test_portions_of_clients_with_state_do_not_change_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = problem_of("linear")
    for name, transforms in [
        ("scaffold", ()),
        ("fedlin-sparse", ()),
        ("fedavg-rr", [Everything()]),
    ]:
        run = Run(problem.federation, name, transforms=transforms)
        *_, (want,) = simulate(ReferenceEngine(problem), [run], 3)
        with monkeypatch.context() as patch:
            patch.setattr(method_round, "_PORTION", 1)
            patch.setattr(method_round, "_FEWEST", 2)  # 2 clients, then 1
            *_, (have,) = simulate(ReferenceEngine(problem), [run], 3)
        torch.testing.assert_close(have.x, want.x, **NEAR)
        assert have.clients is not None
        assert want.clients is not None
        rows = [state.clients.rows(np.arange(3)) for state in (have, want)]  # type: ignore[union-attr]
        torch.testing.assert_close(*rows, **NEAR)
        for metric, values in want.metrics.items():
            np.testing.assert_allclose(have.metrics[metric], values, rtol=1e-9)


@pytest.mark.parametrize("method", ["scaffold", "fedlin-sparse"])
def test_requests_of_stateful_clients_are_small(method: str) -> None:
    """However large the cohort, a request holds the vectors of a portion of it."""
    n, d = 3000, 2
    federation = Federation.from_arrays(torch.randn(n, d, dtype=torch.float64), sizes=[1] * n)
    run = Run(federation, method)
    request = next(run.round(run.start(torch.zeros(d, dtype=torch.float64))))
    assert request.states is not None
    assert len(request.states) == method_round._MOST
    # No matrix of clients times clients.
    sums = request.sums if isinstance(request, LocalTraining) else request.weights.shape[1]
    assert sums == 1


def test_the_server_acts_in_empty_rounds_only_if_it_must() -> None:
    federation = Federation.from_arrays(torch.zeros(2, 2).double(), sizes=[1, 1])
    problem = Problem(Point(2), half_squared_distance, federation)
    rare = Independent([1e-9, 1e-9])
    for always in (True, False):
        run = Run(federation, "fedshuffle", rare, transforms=[Noise(always)], seed=1)
        (state,) = run_round(ReferenceEngine(problem), [run], [run.start(problem.start)])
        assert state.round == 1
        noise = ServerContext(1, 0, {}, {}).generator().normal(size=2)
        want = torch.from_numpy(noise) if always else torch.zeros(2).double()
        torch.testing.assert_close(state.x, want, **NEAR)


def test_the_server_acts_if_no_update_is_chosen() -> None:
    """Two-phase sampling selects nobody where all updates are zero."""
    federation = Federation.from_arrays(torch.zeros(2, 2).double(), sizes=[1, 1])
    problem = Problem(Point(2), half_squared_distance, federation)
    run = Run(federation, "fedshuffle", "optimal:1", transforms=[Noise()], seed=1)
    (state,) = run_round(ReferenceEngine(problem), [run], [run.start(problem.start)])
    assert state.sent == 0
    np.testing.assert_array_equal(state.metrics["bytes_up"], [8, 8])
    noise = ServerContext(1, 0, {}, {}).generator().normal(size=2)
    torch.testing.assert_close(state.x, torch.from_numpy(noise), **NEAR)


def test_the_down_link_sends_in_every_round() -> None:
    """Also if nobody takes part, so that what is sent does not tell; and it keeps its state."""
    federation = Federation.from_arrays(torch.zeros(2, 2).double(), sizes=[1, 1])
    problem = Problem(Point(2), half_squared_distance, federation)
    engine = ReferenceEngine(problem)
    rare = Independent([1e-9, 1e-9])
    run = Run(federation, "fedshuffle", rare, transforms=[Noise()], down_channel="topk:0.5", seed=1)
    states = [run.start(problem.start)]
    for _ in range(2):
        states += run_round(engine, [run], [states[-1]])
    known = [state.transform_state["down.known"] for state in states[1:]]
    sent = [int(state.transform_state["down.sent"]) for state in states[1:]]
    torch.testing.assert_close(known[0], problem.start, **NEAR)  # the model before any noise
    larger = int(states[1].x.abs().argmax())  # of two coordinates, half are sent
    assert known[1][larger] == states[1].x[larger]
    assert torch.count_nonzero(known[1]) == 1
    assert 0 < sent[0] < sent[1]
    assert states[-1].metrics == {}  # nobody received it


def test_random_numbers_have_an_address() -> None:
    context = ClientContext(3, 4, np.array([5, 6]), *(np.ones(2),) * 3)  # type: ignore[arg-type]
    drawn = [rng.random() for rng in context.generators()]
    assert drawn == [rng.random() for rng in context.generators()]
    others = [
        replace(context, seed=4),
        replace(context, round=5),
        replace(context, clients=np.array([7, 8])),
        replace(context, part=1),
    ]
    for other in others:
        assert not {*drawn} & {rng.random() for rng in other.generators()}
    server = ServerContext(3, 4, {}, {})
    assert server.generator().random() != replace(server, part=1).generator().random()


class _Signs(Transform):
    """Sends signs by chance, and keeps the gradient."""

    keeps_state = True

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        signs = [rng.choice([-1.0, 1.0], size=updates.shape[1]) for rng in context.generators()]
        return Message(updates.new_tensor(np.stack(signs)), updates.clone())


class LastUpdate(Transform):
    """Sends the update, and keeps the same tensor."""

    keeps_state = True

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates, updates, {"rows": updates[:, 0].bfloat16()})


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized"])
@pytest.mark.parametrize("after", [(), (Halved(),), (Scaled(), Halved())])
def test_what_a_client_keeps_is_not_overwritten_by_the_next_transform(
    engine: str, after: Any
) -> None:
    problem = problem_of("linear")
    run = Run(problem.federation, "fedshuffle", transforms=[LastUpdate(), *after])
    (state,) = run_round(make(engine, problem), [run], [run.start(problem.start)])
    assert state.clients is not None
    kept = state.clients.rows(np.arange(3))
    np.testing.assert_allclose(kept.norm(dim=1), state.metrics["update_norm"], rtol=1e-9)
    np.testing.assert_allclose(state.metrics["rows"], kept[:, 0], rtol=1e-2)


@pytest.mark.parametrize("engine", ENGINES)
def test_optimal_sampling_on_every_engine(engine: str) -> None:
    """Its first phase asks for no sums at all, also where weights are transposed."""
    problem = problem_of("linear")
    run = Run(problem.federation, "fedshuffle", "optimal:2", transforms=[Halved()], seed=1)
    *_, (want,) = simulate(ReferenceEngine(problem), [run], 2)
    runner = make(engine, problem)
    *_, (have,) = simulate(runner, [run], 2)
    runner.close()
    torch.testing.assert_close(have.x, want.x, **NEAR)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_fewer_clients_than_workers_go_through_a_chain(engine: str) -> None:
    """And a client of weight zero still keeps what it did not send."""
    problem = problem_of("linear")
    states = torch.zeros(1, 21, dtype=torch.float64)
    for weight in (1.0, 0.0):
        request = FullGradient(
            (problem.start,),
            np.array([1]),
            np.array([[weight]]),
            0,
            0.1,
            Chain((_Signs(),)),
            states,
        )
        want = ReferenceEngine(problem).full_gradients([request])[0]
        runner = make(engine, problem)
        have = runner.full_gradients([request])[0]
        runner.close()
        torch.testing.assert_close(have.sums, want.sums, **NEAR)
        assert have.states is not None
        assert have.states.any()
        torch.testing.assert_close(have.states, want.states, **NEAR)


def test_metrics_that_only_some_portions_have(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sometimes(LastUpdate):
        def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
            found = {f"of {i}": np.ones(1) for i in context.clients.tolist() if i}
            return Message(updates, state, found)

    monkeypatch.setattr(method_round, "_PORTION", 1)
    monkeypatch.setattr(method_round, "_FEWEST", 1)
    problem = problem_of("linear")
    run = Run(problem.federation, "fedshuffle", transforms=[Sometimes()])
    (state,) = run_round(ReferenceEngine(problem), [run], [run.start(problem.start)])
    np.testing.assert_array_equal(state.metrics["of 1"], [math.nan, 1, math.nan])
    np.testing.assert_array_equal(state.metrics["of 2"], [math.nan, math.nan, 1])


def test_a_full_gradient_with_a_chain_has_one_point() -> None:
    x = torch.zeros(2)
    with pytest.raises(FedShuffleError, match="2 points"):
        FullGradient((x, x), np.arange(1), np.ones((1, 1)), 0, chain=Chain((Halved(),)))


def test_optimal_sampling_sends_what_the_chain_makes_of_the_chosen_updates() -> None:
    """Two phases: norms first, without transforms; then only the chosen pass through the chain."""
    problem = problem_of("linear")
    run = Run(problem.federation, "fedshuffle", "optimal:2", transforms=[Everything()])
    requests = run.round(run.start(problem.start))
    first = next(requests)
    assert isinstance(first, LocalTraining)
    assert not first.chain
    assert first.sums == 0
    engine = ReferenceEngine(problem)
    second = requests.send(engine.local_training([first])[0])
    assert isinstance(second, LocalTraining)
    assert second.chain == run.chain
    assert 0 < len(second.tasks) < 3
    with pytest.raises(StopIteration) as end:
        requests.send(engine.local_training([second])[0])
    state = end.value.value
    assert state.sent == len(second.tasks)
    assert np.isfinite(state.metrics["update_norm"]).all()
    sent = np.isfinite(state.metrics["first"])
    assert sent.sum() == state.sent
    np.testing.assert_array_equal(state.metrics["bytes_up"][~sent], 8)


def test_chains_of_the_user_are_laid_out_flat() -> None:
    """So that no two transforms draw the same random numbers."""
    one, two, three = Halved(), Scaled(), Noise()
    run = Run(Federation.from_sizes([1]), "fedshuffle", transforms=[Chain((one, two)), three])
    assert run.chain.transforms == (one, two, three)
