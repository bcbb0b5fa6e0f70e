"""The methods of the field inside training: servers that remember, clients that keep state, those
who are asked only if their update matters, names with options, and every engine.
"""

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshuffle import (
    MVR,
    Federation,
    FedShuffleError,
    GlobalMomentum,
    LocalWork,
    Method,
    MissLast,
    methods,
    train,
)
from fedshuffle.engines import Engine, Problem, ReferenceEngine, make
from fedshuffle.kernel import FullGradient
from fedshuffle.methods import Plain
from fedshuffle.methods.fedprox import Proximal
from fedshuffle.methods.round import RoundSettings
from fedshuffle.methods.scaffold import ControlVariates
from fedshuffle.methods.servers import Adam
from fedshuffle.sampling import Independent, Optimal, Uniform, optimal_probabilities
from fedshuffle.sampling.optimal import approximate_probabilities
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, simulate
from fedshuffle.training.run_folder import RunFolder
from tests.kernel_requests import Kind, covering, kinds
from tests.problems import Point
from tests.regression import (
    SEED,
    Clients,
    Floats,
    kept,
    make_run,
    squared_residual,
    streams,
    trained,
)

CLIENTS = Clients.drawn([4, 5, 6, 7, 3, 2], [0.1, 0.4, 0.3, 0.2, 0.3, 0.1])
N = len(CLIENTS.w)
BATCHES = LocalWork(epochs=[1, 2, 1, 3, 1, 2], batch_size=2)
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}


def remembered(state: State) -> dict[str, Tensor]:
    return {f"direction {name}": tensor for name, tensor in state.method_state.items()} | {
        f"server {name}": tensor for name, tensor in state.optimiser_state.items()
    }


def same_state(have: State, want: State) -> None:
    torch.testing.assert_close(remembered(have), remembered(want), rtol=0, atol=0)


# Server optimisers ----------------------------------------------------------------------------


def fedavg_update(x: Floats, r: int, run: Run) -> Floats:
    cohort = run.cohort(r)
    ends = [CLIENTS.local_steps(x, b, 0.05, CLIENTS.gradient) for b in streams(run, cohort)]
    update: Floats = cohort.weight / cohort.weight.sum() @ (np.stack(ends) - x)
    return update


@pytest.mark.parametrize("name", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_server_optimisers_by_hand(name: str) -> None:
    lr, e, b1, b2 = 0.1, 1e-3, 0.9, 0.99
    run = make_run(CLIENTS, name, "uniform:2", BATCHES, server=lr)
    x, m = np.zeros(3), np.zeros(3)
    v = np.zeros(3) if name == "fedadam" else np.full(3, e**2)
    for r, state in enumerate(trained(CLIENTS, run, 4)):
        delta = fedavg_update(x, r, run)
        if name == "fedavgm":
            m = 0.9 * m + delta
            x = x + lr * m
        elif name == "fedadagrad":
            v = v + delta**2
            x = x + lr * delta / (np.sqrt(v) + e)
        else:
            m = b1 * m + (1 - b1) * delta
            if name == "fedadam":
                v = b2 * v + (1 - b2) * delta**2
                m_hat, v_hat = m / (1 - b1 ** (r + 1)), v / (1 - b2 ** (r + 1))
                x = x + lr * m_hat / (np.sqrt(v_hat) + e)
            else:
                v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
                x = x + lr * m / (np.sqrt(v) + e)
        np.testing.assert_allclose(state.x, x, **EXACT)


@pytest.mark.parametrize("name", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_the_state_holds_what_the_server_keeps(name: str) -> None:
    run = make_run(CLIENTS, name, "uniform:2", BATCHES, server=0.1)
    states = trained(CLIENTS, run, 6)
    engine = ReferenceEngine(CLIENTS.problem())
    assert states[2].optimiser_state
    assert not states[2].method_state
    *_, (again,) = simulate(
        engine, [make_run(CLIENTS, name, "uniform:2", BATCHES, server=0.1)], 3, [states[2]]
    )
    assert torch.equal(again.x, states[5].x)
    same_state(again, states[5])
    bare = type(states[2])(states[2].x, round=states[2].round)
    *_, (forgot,) = simulate(engine, [run], 3, [bare])
    assert not torch.allclose(forgot.x, states[5].x, rtol=1e-6)


@pytest.mark.parametrize("name", ["fedavgm", "fedadagrad", "fedadam", "fedyogi", "scaffold"])
def test_the_server_step_size_scales_the_servers_step(name: str) -> None:
    once, thrice = (
        trained(CLIENTS, make_run(CLIENTS, name, work=BATCHES, server=s), 1)[0].x
        for s in (0.1, 0.3)
    )
    torch.testing.assert_close(3 * once, thrice, rtol=1e-14, atol=0)


# Optimal client sampling ----------------------------------------------------------------------


def finished(engine: Engine, requests: Any) -> State:
    """The state after a round."""
    answer = None
    try:
        while True:
            request = requests.send(answer)
            serve: Any = (
                engine.full_gradients
                if isinstance(request, FullGradient)
                else engine.local_training
            )
            (answer,) = serve([request])
    except StopIteration as stop:
        state: State = stop.value
        return state


@pytest.mark.parametrize("how", ["exact", "approximate"])
@pytest.mark.parametrize(
    "name",
    [
        "fedshuffle",
        "fedshuffle-capped:rho=2",
        "fedprox+fedshuffle",
        "fedlin",
        "mime-adam",
        "fedshuffle-mvr",
    ],
)
def test_the_mean_over_selections_is_the_round_of_the_pool(name: str, how: Any) -> None:
    chances = optimal_probabilities if how == "exact" else approximate_probabilities
    run = make_run(CLIENTS, name, Optimal(Uniform(N, 4), 2, how), BATCHES, server=0.7)
    engine = ReferenceEngine(CLIENTS.problem())
    *_, (state,) = simulate(engine, [run], 2)  # so that there is something to remember
    cohort = run.cohort(2)
    assert len(cohort.clients) == 4

    def method_round(select: Any = None) -> Any:
        settings = RoundSettings(run.workload, SEED, 0.05, 0.7, select=select)
        return run.method.round(state, cohort, settings)

    pool = finished(engine, method_round()).x - state.x

    mean, total, expected = torch.zeros_like(pool), 0.0, 0.0
    for picks in itertools.product([False, True], repeat=4):
        asked = np.array(picks)
        seen: list[Floats] = []

        def select(norms: Floats, asked: Any = asked, seen: Any = seen) -> tuple[Any, Floats]:
            seen.append(chances(norms, 2))
            return asked, seen[-1]

        after = finished(engine, method_round(select=select))
        p = seen[0]
        chance = float(np.where(asked, p, 1 - p).prod())
        mean += chance * (after.x - state.x)
        total += chance
        expected += chance * asked.sum()
        assert after.sent == asked.sum()
        assert after.round == 3
        if not asked.any():  # as if nobody took part
            assert torch.equal(after.x, state.x)
            assert after.method_state is state.method_state
    assert total == pytest.approx(1, rel=1e-12)
    assert expected == pytest.approx(2, rel=1e-12) or how == "approximate"
    torch.testing.assert_close(mean, pool, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["fedshuffle", "fedshuffle-capped:rho=1"])
def test_clients_send_the_norm_of_their_weighted_update(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``u_i = a_i |y_i - x|`` with the weight by which the update would count."""
    said: list[Floats] = []
    select = Optimal.select

    def heard(self: Optimal, norms: Any, *rest: Any, **named: Any) -> Any:
        said.append(norms)
        return select(self, norms, *rest, **named)

    monkeypatch.setattr(Optimal, "select", heard)
    run = make_run(CLIENTS, name, "optimal:2:of:uniform:4", BATCHES)
    trained(CLIENTS, run, 1)
    cohort, steps = run.cohort(0), np.array([2, 6, 3, 12, 2, 2])
    for i, batches, u in zip(cohort.clients, streams(run, cohort), said[0], strict=True):
        scaled = name == "fedshuffle"
        gamma, factor = (0.05 * 12 / steps[i], 1) if scaled else (0.05, 12 / steps[i])
        y = CLIENTS.local_steps(np.zeros(3), batches, gamma, CLIENTS.gradient)
        assert u == pytest.approx(CLIENTS.w[i] * N / 4 * factor * np.linalg.norm(y), rel=1e-12)


@pytest.mark.parametrize(("name", "up", "down"), [("fedshuffle", 1, 1), ("fedshuffle-mvr", 3, 3)])
def test_only_what_is_sent_is_counted(
    name: str, up: int, down: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates of those asked, one number from everybody in the pool, and all of the rest."""
    asked: list[NDArray[np.bool_]] = []
    select = Optimal.select

    def counted(self: Optimal, *rest: Any, **named: Any) -> Any:
        answer = select(self, *rest, **named)
        asked.append(answer[0])
        return answer

    monkeypatch.setattr(Optimal, "select", counted)
    result = train(
        Point(3),
        CLIENTS.federation,
        loss=squared_residual,
        rounds=12,
        method=name,
        sampling="optimal:2:of:uniform:4",
        step_size=0.01,
    )
    sent = [int(mask.sum()) for mask in asked]
    assert len(set(sent)) > 1
    vector = 3 * 8
    for record, k in zip(result.history, sent, strict=True):
        assert record["clients"] == 4
        assert record["bytes_down"] == 4 * down * vector
        assert record["bytes_up"] == 4 * (up - 1) * vector + k * vector + 4 * 8


def test_an_empty_pool_sends_nothing() -> None:
    result = train(
        Point(3),
        CLIENTS.federation,
        loss=squared_residual,
        rounds=20,
        sampling=Optimal(Independent([0.15] * N), 2),
        step_size=0.01,
        seed=1,
    )
    pools = [record["clients"] for record in result.history]
    assert 0 in pools[1:]
    assert max(pools) > 1
    for record in result.history:
        bound = record["clients"] * (3 * 8 + 8)
        assert record["bytes_up"] <= bound
        assert (record["bytes_up"] == 0) == (record["clients"] == 0)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fedavg", r"fedavg normalises over the cohort.*fedshuffle"),
        ("fedadam:b1=0.5", "normalises over the cohort"),
        ("scaffold", "scaffold learns from what every client of the cohort sends"),
        ("scaffold+fedshuffle", "most send only a norm"),
        ("fedlin-sparse", "most send only a norm"),
        (methods.get("fedshuffle").with_momentum(GlobalMomentum()), "most send only a norm"),
    ],
)
def test_methods_that_need_every_update_refuse_optimal_sampling(
    method: str | Method, message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message):
        make_run(CLIENTS, method, "optimal:2:of:uniform:4")
    make_run(CLIENTS, "fedavg+fedshuffle", "optimal:2:of:uniform:4")


# Names ----------------------------------------------------------------------------------------


def test_options_and_other_rules_by_name() -> None:
    both = methods.get("scaffold+fedshuffle")
    assert both.name == "scaffold+fedshuffle"
    assert both.direction == ControlVariates("update")
    assert both.averaging == methods.get("fedshuffle").averaging
    adam = methods.get("fedadam:b1=0.5+fedshuffle")
    assert adam.server == Adam(b1=0.5)
    assert adam.averaging == methods.get("fedshuffle").averaging
    assert adam.name == "fedadam:b1=0.5+fedshuffle"
    assert methods.get(" fedprox: mu = 0.5 + fedavg ").direction == Proximal(0.5)
    assert methods.get("fedprox+fedavg").work == {"order": "replacement"}
    assert methods.get("scaffold:refresh=gradient").direction == ControlVariates("gradient")
    assert methods.get("fedprox").direction == Proximal()  # options change nothing for others
    lite = methods.get("mime:base=adam,b=0.5,corrected=false")
    assert lite.direction == methods.get("mime-lite-adam:b=0.5").direction
    capped = methods.get("scaffold+fedshuffle-capped:rho=2")
    assert capped.averaging == methods.get("fedshuffle-capped:rho=2").averaging
    assert methods.get(capped) is capped


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedporx", "fedprox"),
        ("fedprox:nu=1", "unknown option of fedprox 'nu'.*mu"),
        ("fedshuffle:rho=2", "fedshuffle has no options, and so none named 'rho'"),
        ("fedprox:mu=much", "much"),
        ("fedprox:mu", "cannot be read: write 'mu=0.1'"),
        ("fedprox:", "cannot be read"),
        ("fedprox:mu=1,", "cannot be read"),
        ("mime:corrected=maybe", "write true or false"),
        ("mime:base=rmsprop", "unknown base optimiser 'rmsprop'"),
        ("mime:b=1", "b is 1.0"),
        ("mime:epsilon=0", "epsilon"),
        ("scaffold:refresh=often", "often"),
        ("fedlin:keep=0", "keep"),
        ("fedadam:b2=1.5", "b2"),
        ("fedyogi:epsilon=-1", "epsilon"),
        ("non-local-mvr:a=0", "parameter a"),
        ("scaffold+fedshufle", "unknown method 'fedshufle'"),
        ("scaffold+", "unknown method ''"),
        ("+fedshuffle", "unknown method ''"),
        ("fedavg:mu=1", "fedavg has no options, and so none named 'mu'"),
        ("fedprox:mu=0.1,mu=0.2", "mu is given twice"),
        ("fedshuffle+fedadam", r"drop the server of fedadam \(Adam.*Write fedadam\+fedshuffle"),
        ("fedavg+mime", r"drop the direction of mime.*Write mime\+fedavg"),
        (
            "fedadam+scaffold",
            r"replace\(methods.get\('scaffold'\), server=methods.get\('fedadam'\)",
        ),
        ("scaffold+fedadam", r"\('fedadam'\), direction=methods.get\('scaffold'\).direction"),
        ("fedprox+pooled-rr", "pooled-rr has all data in one place"),
        ("scaffold+fedprox:mu=5", "option mu of 'fedprox:mu=5' would be dropped"),
    ],
)
def test_bad_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        methods.get(text)


def test_a_method_with_a_direction_can_give_its_averaging() -> None:
    both = methods.get("fedprox+scaffold")
    assert both.direction == Proximal()
    assert both.averaging == methods.get("scaffold").averaging


def test_a_method_with_a_direction_of_its_own_takes_no_momentum() -> None:
    for name in ("scaffold", "fedprox", "fedlin", "mime", "non-local-mvr"):
        method = methods.get(name)
        for momentum in (MVR(), GlobalMomentum()):
            with pytest.raises(FedShuffleError, match=f"{name} has a direction of its own"):
                method.with_momentum(momentum)
        assert method.with_momentum(None) is method
        assert method.momentum == "none"
    assert methods.get("fedadam").with_momentum(MVR(0.2)).momentum == "mvr:0.2"
    assert methods.get("mime-mvr").with_momentum(None).direction == Plain()


@pytest.mark.parametrize("name", ["", "a+b", "a:b", "a=b", "a,b", "a b"])
def test_names_with_reserved_characters_are_refused(name: str) -> None:
    with pytest.raises(FedShuffleError, match="cannot be named"):
        methods.register(Method(name, "a name", methods.get("fedavg").averaging))


# State ----------------------------------------------------------------------------------------


class Killed(BaseException):
    """As kill -9: no chance to save anything."""


def without_time(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if "seconds" not in k} for r in history]


@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed], ids=["saved", "killed"])
@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("method", ["scaffold", "mime-adam"])  # clients keep state, the server does
def test_a_resumed_run_is_the_same_bit_for_bit(
    tmp_path: Path, method: str, keep: int, how: type[BaseException]
) -> None:
    """Round 8 falls between the checkpoints; what clients kept after the last one is forgotten.

    That every method resumes to the same bits is a check of conformance.
    """
    rounds_seen = 0

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        nonlocal rounds_seen
        rounds_seen += 1
        if rounds_seen == 8:
            raise how
        return {}

    common: dict[str, Any] = {
        "loss": squared_residual,
        "rounds": 11,
        "method": method,
        "sampling": "uniform:3",
        "work": BATCHES,
        "step_size": 0.01,
        "checkpoint_every": 3,
        "keep": keep,
    }
    whole = train(Point(3), CLIENTS.federation, out=tmp_path / "whole", **common)
    cut = tmp_path / "cut"
    with pytest.raises(how):
        train(Point(3), CLIENTS.federation, out=cut, evaluate=evaluate, **common)
    begun = RunFolder(cut).latest()
    assert begun is not None
    assert begun.round == (6 if how is Killed else 7)
    resumed = train(Point(3), CLIENTS.federation, out=cut, resume=True, **common)
    assert without_time(resumed.history) == without_time(whole.history)
    ends = [RunFolder(tmp_path / name).latest() for name in ("whole", "cut")]
    want, have = (end for end in ends if end is not None)
    assert torch.equal(want.x, have.x)
    assert torch.equal(have.x, resumed.model.x.detach())  # type: ignore[operator]
    same_state(have, want)
    assert (want.clients is None) == (not methods.get(method).direction.client_state)
    if want.clients is not None:
        assert kept(want).any()
        assert (kept(want) == kept(have)).all()


def test_pooled_data_on_disk_can_be_given_to_another_process(tmp_path: Path) -> None:
    CLIENTS.federation.save(tmp_path / "people")
    pooled = Federation.open(tmp_path / "people", weights=[1, 2, 3, 4, 5, 6]).pooled()
    again = pickle.loads(pickle.dumps(pooled))
    for federation in (pooled, again, pickle.loads(pickle.dumps(again))):
        assert federation.sizes.tolist() == [27]
        assert federation.weights.tolist() == [1]
        assert federation.offsets.tolist() == [0, 27]
        assert federation.ids == ("everybody",)
        assert federation.path == tmp_path / "people"
        for have, want in zip(federation.fields, CLIENTS.federation.fields, strict=True):
            assert np.array_equal(have, want)
    ends = [
        train(
            Point(3), federation, loss=squared_residual, rounds=2, method="pooled-rr", engine=engine
        ).model.x
        for federation, engine in (
            (CLIENTS.federation, "sequential"),
            (Federation.open(tmp_path / "people"), "sequential:2:processes"),
        )
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=0)


# Everywhere -----------------------------------------------------------------------------------


def test_every_method_works_in_single_precision() -> None:
    federation = CLIENTS.federation
    for method in methods.available():
        if method.balanced_only:
            continue
        sampling = "full" if method.pooled else "uniform:3"
        run = make_run(CLIENTS, method, sampling, BATCHES if not method.pooled else None, 0.02, 0.1)
        single, double = (
            list(
                simulate(
                    ReferenceEngine(Problem(model, squared_residual, run.federation)), [run], 3
                )
            )
            for model in (Point(3).float(), Point(3))
        )
        state = single[-1][0]
        tensors = [state.x, *(t for key, t in remembered(state).items() if key != "server step")]
        if state.clients is not None:
            tensors.append(state.clients.rows(np.arange(len(federation))))
        assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}, method.name
        torch.testing.assert_close(
            state.x.double(), double[-1][0].x, rtol=1e-4, atol=1e-5, msg=method.name
        )


NAMES = covering(one.name for one in methods.available() if not (one.pooled or one.balanced_only))


def test_a_few_methods_cover_every_kind_of_request() -> None:
    """What the kernel can do is used by somebody, and tried with every engine. DiLoCo's local
    optimiser is beside the kernel: see tests/engines/test_local_optimisers.py.
    """
    used = frozenset[Kind]().union(*map(kinds, NAMES))
    others = [one.name for one in methods.available() if one.name != "diloco"]
    assert used == frozenset[Kind]().union(*map(kinds, others))
    parts = [part for name, *rest in used if name == "training" for part in rest[0]]
    assert {alpha for alpha, *_ in parts} == {0, 1, "other"}
    assert all(any(uses) for uses in zip(*(uses for _, *uses in parts), strict=True))
    assert {points for name, points, *_ in used if name == "gradients"} == {1, 2}
    assert len(NAMES) < len(methods.available()) / 2


@pytest.mark.parametrize(
    "engine", ["sequential", "sequential:2", "sequential:2:processes", "vectorized", "vectorized:2"]
)
def test_every_engine_agrees_with_the_reference(engine: str) -> None:
    """All in lockstep: different numbers of full gradients and sums in one round."""
    work = LocalWork(epochs=2, batch_size=2, interruption=MissLast(), clip=5.0, weight_decay=0.01)
    runs = [make_run(CLIENTS, name, "uniform:3", work, 0.02, 0.1) for name in NAMES]
    *_, want = simulate(ReferenceEngine(CLIENTS.problem()), runs, 4)
    *_, have = simulate(make(engine, CLIENTS.problem()), runs, 4)
    for name, expected, state in zip(NAMES, want, have, strict=True):
        torch.testing.assert_close(state.x, expected.x, rtol=1e-10, atol=1e-13, msg=name)
        torch.testing.assert_close(remembered(state), remembered(expected), rtol=1e-9, atol=1e-12)
        if expected.clients is not None:
            np.testing.assert_allclose(kept(state), kept(expected), rtol=1e-9, atol=1e-12)
