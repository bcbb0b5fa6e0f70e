"""LoRA adapters over clients: what averaging them does to the layers that they make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedshuffle import (
    Federation,
    FedShuffleError,
    GlobalMomentum,
    LocalWork,
    Simulation,
    audit,
    losses,
    methods,
    train,
)
from fedshuffle.engines import make
from fedshuffle.finetuning import FedEx, LoRALinear, fedex, ffa, flora
from fedshuffle.local_work import WHOLE_CLIENT
from fedshuffle.training.message_sizes import message_sizes
from fedshuffle.training.rounds import Run, drive
from tests import brute

SIZES = [2, 3, 5]
WHOLE = LocalWork(epochs=2, batch_size=WHOLE_CLIENT)
ENGINES = [
    *("reference", "sequential", "vectorized", "sequential:2"),
    pytest.param("sequential:2:processes", marks=pytest.mark.slow),
]
MOMENTUM = methods.get("fedshuffle").with_momentum(GlobalMomentum(0.5))
Variant = Callable[[nn.Module], Any]


class Decaying(torch.optim.SGD):
    """Weight decay for one group of parameters: none that its defaults tell."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__([{"params": params, "weight_decay": 0.1}], lr)


def lora(inputs: int = 3, outputs: int = 4, rank: int = 2, seed: int = 0) -> LoRALinear:
    """A layer whose B is not zero, so that both halves of the adapter move at once."""
    torch.manual_seed(seed)
    layer = LoRALinear(nn.Linear(inputs, outputs).double(), rank, alpha=3.0)
    nn.init.normal_(layer.get_parameter("lora_B.default.weight"))
    return layer


def layer_weight(model: Any) -> Tensor:
    """What the layer computes with: W + s B A."""
    base = getattr(model.base_layer, "base_layer", model.base_layer)
    a, b = (model.get_parameter(f"lora_{half}.default.weight") for half in "AB")
    found: Tensor = base.weight + model.scaling["default"] * (b @ a)
    return found.detach().clone()


def clients(seed: int = 0) -> Federation:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(sum(SIZES), 3)), rng.normal(size=(sum(SIZES), 4))
    return Federation.from_arrays(x, y, sizes=SIZES)


def local_layer(model: LoRALinear, federation: Federation, client: int, step: float) -> Tensor:
    """The layer of one client after its steps over all its examples, by a bare loop."""
    mine = lora()
    mine.load_state_dict(model.state_dict())
    rows = slice(*federation.offsets[client : client + 2].tolist())
    x, y = (torch.as_tensor(field)[rows] for field in federation.fields)
    optimiser = torch.optim.SGD([p for p in mine.parameters() if p.requires_grad], lr=step)
    for _ in range(2):
        optimiser.zero_grad()
        losses.squared_error(mine, x, y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return layer_weight(mine)


@pytest.mark.parametrize("variant", [fedex, flora])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("sampling", "server"), [("full", 1.0), ("uniform:2", 0.7)])
def test_the_layer_is_the_dense_average_of_the_clients_layers(
    variant: Variant, engine: str, sampling: str, server: float
) -> None:
    """Also where the aggregation weights of a cohort do not sum to one."""
    federation, plain, model = clients(), lora(), lora()
    exact = variant(model)
    more: dict[str, Any] = {
        "work": WHOLE,
        "step_size": 0.05,
        "sampling": sampling,
        "server_step_size": server,
    }
    with Simulation(
        model, federation, loss=losses.squared_error, transforms=[exact], engine=engine, **more
    ) as sim:
        state, record = sim.step(sim.init())
        after = layer_weight(sim.model(state))
        cohort = sim.run.cohort(0)
    before, a = layer_weight(plain), sim.run.method.averaging.aggregation_weights(cohort)
    if sampling != "full":
        assert abs(a.sum() - 1) > 0.01
    own = [local_layer(plain, federation, client, 0.05) for client in cohort.clients]
    dense = sum(server * weight * (one - before) for weight, one in zip(a, own, strict=True))
    torch.testing.assert_close(after - before, dense, rtol=1e-10, atol=1e-13)
    # What separate averages leave out, as a share of the whole.
    averaged = train(
        plain, federation, loss=losses.squared_error, rounds=1, engine=engine, **more
    ).model
    left_out = dense - (layer_weight(averaged) - before)
    share = float(left_out.norm() / dense.norm())
    assert share > 1e-3
    assert record["residual_share"] == pytest.approx(share, rel=1e-8)
    # What is sent are the adapters, not their products.
    assert record["bytes_up"] == len(cohort.clients) * 8 * (2 * 3 + 4 * 2)


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.2, 0.8]])
def test_the_bias_of_separate_averages_is_minus_a_covariance(weights: list[float]) -> None:
    r"""Rank one, one step from a = b = 1 for :math:`(b a - t_i)^2 / 2`: both a and b move by
    :math:`\gamma (t_i - 1)`, and :math:`\bar a \bar b - \overline{a b} = -\gamma^2 \mathrm{Var} t`.
    """
    gamma, targets = 0.25, np.array([3.0, -1.0])

    def scalar() -> LoRALinear:
        layer = LoRALinear(nn.Linear(1, 1, bias=False).double(), rank=1)
        for parameter, value in zip(layer.parameters(), (0.0, 1.0, 1.0), strict=True):
            nn.init.constant_(parameter, value)
        return layer

    ones = torch.ones(2, 1, dtype=torch.float64)
    federation = Federation.from_arrays(ones, targets[:, None], sizes=[1, 1], weights=weights)
    model, exact = scalar(), scalar()
    more: dict[str, Any] = {
        "loss": losses.squared_error,
        "rounds": 1,
        "method": "fedavg",
        "step_size": gamma,
    }
    separate = float(layer_weight(train(model, federation, **more).model))
    corrected = train(exact, federation, transforms=[fedex(exact)], **more)
    moved = gamma * (targets - 1)
    mean_product = float(np.dot(weights, (1 + moved) ** 2))
    variance = float(np.dot(weights, targets**2) - np.dot(weights, targets) ** 2)
    assert float(layer_weight(corrected.model)) == pytest.approx(mean_product, rel=1e-12)
    assert separate - mean_product == pytest.approx(-(gamma**2) * variance, rel=1e-12)
    share = gamma**2 * variance / abs(mean_product - 1)
    assert corrected.history[0]["residual_share"] == pytest.approx(share, rel=1e-12)


def mean_change(variant: Variant, method: str, sampling: str) -> Tensor:
    """The expected change of the layer in a round, over all cohorts. Client i pushes output i, by
    the same gradient in every step.
    """
    model = lora(inputs=2, outputs=3)
    transforms = [one] if isinstance(one := variant(model), FedEx) else []
    x = torch.ones(sum(SIZES), 2, dtype=torch.float64)
    y = torch.eye(3, dtype=torch.float64).repeat_interleave(torch.tensor(SIZES), dim=0)
    federation = Federation.from_arrays(x, y, sizes=SIZES)
    run = Run(federation, method, sampling, LocalWork(), 0.05, transforms=transforms)
    sim = Simulation(model, federation, loss=lambda m, x, y: -(m(x) * y).sum(1).mean())
    engine, total = make("sequential", sim.problem), torch.zeros(3, 2, dtype=torch.float64)
    for members, probability in brute.cohorts(run.sampling):
        start = run.start(sim.problem.start)
        requests = run.round(start, run.cohort(0, np.array(members, dtype=int)))
        after = drive(requests, lambda request: engine.local_training([request])[0])  # type: ignore[list-item]
        change = layer_weight(sim.model(after)) - layer_weight(sim.model(start))
        total += probability * change
    return total


@pytest.mark.parametrize("sampling", ["full", "uniform:2", "independent:0.5,0.2,0.9"])
@pytest.mark.parametrize("method", ["fedavg-rr", "fedshuffle", "fednova"])
def test_the_audit_is_exact_for_the_layers_of_ffa_lora(method: str, sampling: str) -> None:
    """Each client changes its own row of the layer, by its effective weight."""
    found = audit(Federation.from_sizes(SIZES), method, sampling)
    rows = mean_change(ffa, method, sampling).norm(dim=1).numpy()
    np.testing.assert_allclose(rows / rows.sum(), found.effective_weights, rtol=1e-10)
    if method == "fedshuffle" and sampling != "full":
        # Separate averages of A and B are something else, and the residual makes it good.
        plain = mean_change(lambda model: None, method, sampling).norm(dim=1).numpy()
        assert np.abs(plain / plain.sum() - found.effective_weights).max() > 1e-3


@pytest.mark.parametrize("variant", [ffa, fedex, flora, lambda model: None])
def test_with_equal_steps_every_variant_is_the_same_by_fedavg_and_by_fedshuffle(
    variant: Variant,
) -> None:
    rng = np.random.default_rng(0)
    data = rng.normal(size=(9, 3)), rng.normal(size=(9, 4))
    federation = Federation.from_arrays(*data, sizes=[3, 3, 3])
    found = []
    for method in ("fedavg-rr", "fedshuffle", "fednova-rr"):
        model = lora()
        transforms = [one] if isinstance(one := variant(model), FedEx) else []
        result = train(
            model,
            federation,
            loss=losses.squared_error,
            rounds=3,
            method=method,
            step_size=0.05,
            transforms=transforms,
        )
        found.append(layer_weight(result.model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found[2], found[0], rtol=1e-12, atol=1e-14)


def test_there_is_no_residual_with_one_client_or_a_frozen_a() -> None:
    rng = np.random.default_rng(0)
    one = Federation.from_arrays(rng.normal(size=(4, 3)), rng.normal(size=(4, 4)), sizes=[4])
    model, plain = lora(), lora()
    more: dict[str, Any] = {"loss": losses.squared_error, "rounds": 2, "step_size": 0.05}
    exact = train(model, one, transforms=[fedex(model)], **more)
    assert exact.history[-1]["residual_share"] < 1e-12
    torch.testing.assert_close(
        layer_weight(exact.model), layer_weight(train(plain, one, **more).model)
    )
    with pytest.raises(FedShuffleError, match="averaging is exact as it is"):
        fedex(ffa(lora()))
    assert isinstance(fedex(model), FedEx)  # once more for the same model
    assert layer_weight(model).equal(layer_weight(plain))


@pytest.mark.parametrize("variant", [fedex, flora])
def test_a_run_is_resumed_with_its_base(variant: Variant, tmp_path: Path) -> None:
    def fit(rounds: int, out: Path, resume: bool = False) -> Tensor:
        model = lora()
        more: dict[str, Any] = {
            "transforms": [variant(model)],
            "out": out,
            "resume": resume,
            "step_size": 0.02,
        }
        result = train(
            model, clients(), loss=losses.squared_error, rounds=rounds, sampling="uniform:2", **more
        )
        return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])

    whole = fit(4, tmp_path / "whole")
    fit(2, tmp_path / "parts")
    assert fit(4, tmp_path / "parts", resume=True).equal(whole)


@pytest.mark.parametrize("variant", [fedex, flora])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "fedavgm"}, r"server optimiser Momentum"),
        ({"method": "fedadam+fedshuffle"}, r"server optimiser Adam"),
        ({"schedule": "fedbuff:K=2", "clock": "fixed:1"}, "asynchronous schedule"),
        ({"method": "fedawe", "sampling": "uniform:2"}, "keeps a model at every client"),
        ({"method": "mifa"}, "counts updates of earlier rounds"),
        ({"method": "fedvarp+fedshuffle"}, "counts updates of earlier rounds"),
        ({"method": MOMENTUM}, "has a momentum of such updates"),
        ({"down_channel": "qsgd:8"}, "compresses the model on its way to clients"),
    ],
)
def test_a_server_that_does_not_add_the_average_is_refused(
    variant: Variant, options: dict[str, Any], says: str
) -> None:
    """Adam would make steps of full length of a residual of second order, and momentum would merge
    the adapters of FLoRA again and again.
    """
    model = lora()
    with pytest.raises(FedShuffleError, match=f"FedEx needs a server that adds .* {says}"):
        Simulation(
            model, clients(), loss=losses.squared_error, transforms=[variant(model)], **options
        )


@pytest.mark.parametrize(
    "options",
    [
        *({"method": name} for name in ("scaffold", "mime", "fedshuffle-mvr", "vrl-sgd")),
        {"channel": "topk:0.5+ef"},
    ],
)
def test_new_adapters_do_not_fit_what_was_kept(options: dict[str, Any]) -> None:
    """A control variate, a momentum or an error is a vector for the A that it was made with."""
    model, same = lora(), lora()
    more: dict[str, Any] = {"loss": losses.squared_error, **options}
    with pytest.raises(FedShuffleError, match=r"new values in every round.* or fedex instead"):
        Simulation(model, clients(), transforms=[flora(model)], **more)
    Simulation(same, clients(), transforms=[fedex(same)], **more)


def test_a_proximal_term_changes_base_weights_only_by_rounding() -> None:
    for kind, engine in (
        (torch.float32, "sequential"),
        (torch.float32, "vectorized"),
        (torch.float64, "reference"),
    ):
        model = lora().to(kind)
        start = layer_weight(model)
        result = train(
            model,
            clients(),
            loss=losses.squared_error,
            rounds=3,
            method="fedprox:mu=0.3",
            work=LocalWork(epochs=8),
            step_size=0.01,
            transforms=[fedex(model)],
            engine=engine,
        )
        assert (layer_weight(result.model) - start).norm() > 0.1


def test_flora_starts_every_round_with_new_adapters() -> None:
    model = lora()
    transform = flora(model)
    with Simulation(
        model, clients(), loss=losses.squared_error, step_size=0.02, transforms=[transform]
    ) as sim:
        first, _ = sim.step(sim.init())
        second, _ = sim.step(first)
    halves = [
        [sim.model(state).get_parameter(f"lora_{half}.default.weight") for half in "AB"]
        for state in (first, second)
    ]
    assert all(b.abs().max() < 1e-15 for _, b in halves)
    assert not torch.allclose(halves[0][0], halves[1][0])
    assert float(halves[0][0].detach().abs().max()) <= 3**-0.5 + 1e-12


def test_what_cannot_be_averaged_exactly_is_refused() -> None:
    with pytest.raises(FedShuffleError, match=r"ffa needs a model with LoRA .*get_peft_model"):
        ffa(nn.Linear(2, 2))
    once = LocalWork(steps=1, optimiser="adamw")  # so little decay that no client would show it
    for options, says in (
        ({"work": LocalWork(weight_decay=0.1)}, "without weight decay"),
        ({"work": once, "step_size": 1e-4}, r"'adamw' is 0\.01 by default"),
        ({"work": LocalWork(optimiser=Decaying)}, "clients changed the base weights"),
    ):
        model = lora()
        with pytest.raises(FedShuffleError, match=says):
            train(
                model,
                clients(),
                loss=losses.squared_error,
                rounds=3,
                transforms=[fedex(model)],
                **({"step_size": 0.01} | options),
            )
    with pytest.raises(FedShuffleError, match=r"made for a model with 26 .* this one has 14"):
        train(lora(), clients(), loss=losses.squared_error, rounds=1, transforms=[fedex(lora())])
    for layer, rank in ((nn.Conv2d(2, 2, 1), 1), (nn.Linear(2, 2), 0)):
        with pytest.raises(FedShuffleError, match=r"base_layer must be|rank is 0"):
            LoRALinear(layer, rank)  # type: ignore[arg-type]
    mixed = lora()
    mixed.base_layer.float()
    for wrong in (mixed, lora().to(torch.bfloat16)):  # where most of a correction would be rounded
        with pytest.raises(FedShuffleError, match=r"need both in single precision.*float\(\)"):
            fedex(wrong)
    first, second = lora(), nn.Linear(3, 4)
    second.weight = first.base_layer.weight
    tied = nn.ModuleList([first, second])
    with pytest.raises(FedShuffleError, match=r"layer '0' shares its weight"):
        fedex(tied)
    fixed = lora()
    fixed.lora_A.requires_grad_(False)
    with pytest.raises(FedShuffleError, match="frozen A"):
        flora(fixed)


def test_a_prepared_model_is_not_averaged_without_its_transform() -> None:
    model = lora()
    fedex(model)
    with pytest.raises(FedShuffleError, match=r"prepared by fedex .* Give transforms=\[fedex"):
        train(model, clients(), loss=losses.squared_error, rounds=1)


def test_messages_are_planned_without_base_weights() -> None:
    """Clocks with bandwidths know the sizes before any message is sent."""
    model = lora()
    sizes = message_sizes(model, "fedshuffle", [fedex(model)])
    assert (sizes.down, sizes.up) == (8 * (14 + 4 * 3), 8 * 14)
