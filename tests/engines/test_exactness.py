"""Trajectories against closed forms.

Client i owns copies of one point b_i, so f_i(x) = |x - b_i|^2 / 2 and local training of tau steps
of size gamma is a geometric series: with direction alpha g(y) - beta g(x) + v,

    y - x = - u (1 - (1 - alpha gamma)^tau) / alpha,      u = (alpha - beta) (x - b_i) + v.

Everything below is written from the formulas, in numpy, without the library.
"""

import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedshuffle import MVR, GlobalMomentum, LocalWork, MissLast, methods
from fedshuffle.engines import ReferenceEngine, VectorizedEngine
from fedshuffle.methods import Direction
from fedshuffle.sampling import Sampling, parse
from fedshuffle.training.rounds import Run, simulate
from tests.problems import copies, quadratic, targets

Floats = NDArray[np.float64]

SIZES = [1, 2, 3, 7]
EPOCHS = [3, 1, 2, 1]
BATCH = 2
WEIGHTS = [0.1, 0.3, 0.4, 0.2]
ROUNDS = 25
SEED = 11


def rule(name: str, w: Floats, p: Floats, planned: Floats, done: Floats) -> tuple[Floats, Floats]:
    """Step sizes relative to the longest client's, and aggregation weights, of a cohort."""
    longest = max(e * -(-s // BATCH) for e, s in zip(EPOCHS, SIZES, strict=True))
    equal, scaled = np.ones(len(w)), longest / planned
    if name.startswith("fedavg"):
        return equal, w / w.sum()
    if name.startswith("fednova-original"):
        share = w / w.sum()
        return equal, share / done * (share @ done)
    if name.startswith("fednova"):
        return equal, (w / done) / (w / done).sum()
    if name == "fedshuffle-so":
        return scaled, w / w.sum()
    if name == "fedshuffle-gen":
        return scaled, w / p * planned / done
    return scaled, w / p


def closed_form(
    name: str,
    direction: Direction,
    sampling: Sampling,
    b: Floats,
    step: float,
    server: float,
    interrupted: bool,
) -> Floats:
    """The models after each round, from the formulas."""
    w_all = np.array(WEIGHTS)
    tau = np.array([e * -(-s // BATCH) for e, s in zip(EPOCHS, SIZES, strict=True)], dtype=float)
    x = np.zeros(b.shape[1])
    previous = x
    m: Floats | None = None
    trajectory = []
    for r in range(ROUNDS):
        i = sampling.draw(SEED, r)
        if len(i):
            w, p, planned = w_all[i], sampling.p[i], tau[i]
            if name == "fedavg-min":
                planned = np.full(len(i), planned.min())
            if name == "fedavg-mean":
                planned = np.full(len(i), np.round(planned.mean()))
            done = np.maximum(planned - 1, 1) if interrupted else planned
            scale, a = rule(name, w, p, planned, done)
            gamma = step * scale

            alpha, beta, v = 1.0, 0.0, np.zeros_like(x)
            if isinstance(direction, MVR):
                now = (w / p) @ (x - b[i])
                if m is None:
                    m = now
                else:
                    before = (w / p) @ (previous - b[i])
                    m = direction.a * now + (1 - direction.a) * (m + now - before)
                beta, v = 1 - direction.a, (1 - direction.a) * m
            if isinstance(direction, GlobalMomentum):
                m = np.zeros_like(x) if m is None else m
                alpha, v = direction.a, (1 - direction.a) * m

            u = (alpha - beta) * (x - b[i]) + v
            walked = (1 - (1 - alpha * gamma) ** done) / alpha
            delta = -u * walked[:, None]
            if isinstance(direction, GlobalMomentum):
                by_p = name in ("fedshuffle", "fedshuffle-gen", "fedshuffle-mvr")
                c = w / p if by_p else w / w.sum()
                assert m is not None
                gradient = (-delta / (gamma * done)[:, None] - v) / alpha
                m = direction.a * c @ gradient + (1 - direction.a) * m
            previous = x
            x = x + server * a @ delta
        trajectory.append(x)
    return np.stack(trajectory)


NAMES = [  # whose rules are written out above; baselines and other methods have tests of their own
    "fedavg",
    "fedavg-rr",
    "fedavg-min",
    "fedavg-mean",
    "fednova",
    "fednova-rr",
    "fednova-original",
    "fednova-original-rr",
    "fedshuffle",
    "fedshuffle-so",
    "fedshuffle-gen",
    "fedshuffle-mvr",
]
DIRECTIONS = [None, MVR(0.2), GlobalMomentum(0.3)]
SAMPLINGS = ["full", "uniform:2", "independent:0.5,0.9,0.2,0.4", "one", "ais:2"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("interrupted", [False, True])
def test_every_method_follows_its_closed_form(sampling: str, interrupted: bool) -> None:
    """All methods and momenta at once, in lockstep; they must not disturb each other."""
    points = targets(len(SIZES), 3)
    federation = copies(SIZES, points, WEIGHTS)
    work = LocalWork(
        epochs=EPOCHS, batch_size=BATCH, interruption=MissLast() if interrupted else None
    )
    cases = list(itertools.product(NAMES, DIRECTIONS))
    chosen = [
        methods.get(name) if momentum is None else methods.get(name).with_momentum(momentum)
        for name, momentum in cases
    ]
    runs = [
        Run(federation, method, sampling, methods.get(method).drop_fixed(work), 0.02, 0.7, SEED)
        for method in chosen
    ]
    have = torch.stack(
        [
            torch.stack([state.x for state in states])
            for states in simulate(VectorizedEngine(quadratic(federation)), runs, ROUNDS)
        ],
        dim=1,
    ).numpy()
    for k, method in enumerate(chosen):
        want = closed_form(
            method.name,
            method.direction,
            parse(sampling, federation),
            points.numpy(),
            0.02,
            0.7,
            interrupted,
        )
        np.testing.assert_allclose(have[k], want, rtol=0, atol=1e-10, err_msg=method.name)
        assert np.abs(want[-1] - want[0]).max() > 1e-3  # it moved


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("momentum", DIRECTIONS, ids=["plain", "mvr", "global"])
def test_the_reference_engine_follows_it_too(name: str, momentum: Direction | None) -> None:
    points = targets(len(SIZES), 3)
    federation = copies(SIZES, points, WEIGHTS)
    method = methods.get(name)
    if momentum is not None:
        method = method.with_momentum(momentum)
    work = LocalWork(epochs=EPOCHS, batch_size=BATCH)
    work = methods.get(method).drop_fixed(work)
    run = Run(federation, method, "uniform:2", work, 0.02, 0.7, SEED)
    engine = ReferenceEngine(quadratic(federation))
    have = [states[0].x.numpy() for states in simulate(engine, [run], 20)]
    sampling = parse("uniform:2", federation)
    want = closed_form(name, method.direction, sampling, points.numpy(), 0.02, 0.7, False)
    np.testing.assert_allclose(have, want[:20], rtol=0, atol=1e-10)


def test_fedavg_stops_where_the_audit_says() -> None:
    """The fixed point under full participation, in the limit of small steps."""
    sizes = [1, 2, 3]
    points = targets(3, 2)
    federation = copies(sizes, points)
    run = Run(federation, "fedavg-rr", "full", LocalWork(), 1e-4, 1000.0, 0)
    *_, (state,) = simulate(VectorizedEngine(quadratic(federation)), [run], 200)
    wrong = (points * torch.tensor([[1.0], [4.0], [9.0]])).sum(0) / 14
    right = (points * torch.tensor([[1.0], [2.0], [3.0]])).sum(0) / 6
    assert torch.allclose(state.x, wrong, atol=1e-3)
    assert not torch.allclose(state.x, right, atol=1e-1)
