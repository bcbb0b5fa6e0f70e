"""A frozen base is held once: copies of the model share it, also across workers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshuffle import (
    Evaluation,
    Federation,
    FedShuffleError,
    Simulation,
    fingerprint,
    losses,
    train,
)
from fedshuffle.engines import Problem, make, serialization
from fedshuffle.engines.copies import shared_copy
from fedshuffle.engines.replica import Replica
from fedshuffle.finetuning import LoRALinear


def adapted(seed: int = 0) -> nn.Sequential:
    """A frozen base, one weight of which two layers share, with an adapter."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), LoRALinear(nn.Linear(6, 3), rank=1)
    ).double()
    model[2].weight = model[0].weight
    model[:3].requires_grad_(False)
    return model


def clients() -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    return Federation.from_arrays(x, torch.arange(9) % 3, sizes=[2, 3, 4])


def memory(model: nn.Module, frozen: bool) -> dict[str, int]:
    named = model.named_parameters()
    return {name: p.data_ptr() for name, p in named if p.requires_grad is not frozen}


def test_every_copy_shares_the_frozen_parameters_of_the_given_model_and_nothing_else() -> None:
    model = adapted()
    seen: list[nn.Module] = []

    def evaluate(found: nn.Module) -> dict[str, float]:
        seen.append(found)
        return {}

    problem = Problem(model, losses.cross_entropy, clients())
    replica = Replica(problem)
    result = train(model, clients(), loss=losses.cross_entropy, rounds=2, evaluate=evaluate)
    made = [problem.model, problem.copy(problem.start), problem.replica(), replica._model]
    every: list[Any] = [*made, *seen, result.model, shared_copy(model)]
    for one in every:
        assert memory(one, frozen=True) == memory(model, frozen=True)
        assert not set(memory(one, frozen=False).values()) & set(memory(model, False).values())
        assert one[2].weight is one[0].weight
        one.requires_grad_(True)  # and .to(...) concern the copy alone
        one.float()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert sum(p.requires_grad for p in model.parameters()) == 2


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "sequential:2"])
def test_training_writes_to_nothing_frozen(engine: str) -> None:
    model = adapted()
    before, versions = copy.deepcopy(model.state_dict()), [p._version for p in model.parameters()]
    evaluate = Evaluation(clients())
    train(model, clients(), loss=losses.cross_entropy, rounds=2, engine=engine, evaluate=evaluate)
    assert [p._version for p in model.parameters()] == versions
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_code_that_writes_to_the_base_is_refused() -> None:
    def merge(model: Any) -> dict[str, float]:
        model[3].base_layer.weight.data += 1  # as peft merges; torch counts no new version
        return {}

    more: dict[str, Any] = {"loss": losses.cross_entropy, "rounds": 2}
    with pytest.raises(FedShuffleError, match=r"after round 1: .*'3.base_layer.weight'.*deepcopy"):
        train(adapted(), clients(), evaluate=merge, **more)
    train(adapted(), clients(), evaluate=lambda model: merge(copy.deepcopy(model)), **more)

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
            self.out = nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Any:
            self.calls.add_(1)
            return self.out(x)

    with pytest.raises(FedShuffleError, match="forward pass changes the frozen parameter 'calls'"):
        train(Counts(), clients(), **more)


def test_a_frozen_embedding_that_rescales_itself_is_not_shared() -> None:
    embedding = nn.Embedding(9, 4, max_norm=0.1).requires_grad_(False)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(4, 3))
    before = embedding.weight.clone()
    federation = Federation.from_arrays(torch.arange(9)[:, None], torch.arange(9) % 3, sizes=[4, 5])
    train(model, federation, loss=losses.cross_entropy, rounds=1)
    assert torch.equal(embedding.weight, before)


def test_frozen_parameters_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[nn.Module] = []
    digest = fingerprint.frozen

    def counted(model: nn.Module) -> str:
        calls.append(model)
        return digest(model)

    monkeypatch.setattr(fingerprint, "frozen", counted)
    with Simulation(adapted(), clients(), loss=losses.cross_entropy) as sim:
        assert sim.settings(1)["frozen_sha256"] == sim.settings(2)["frozen_sha256"]
    assert len(calls) == 1
    train(adapted(), clients(), loss=losses.cross_entropy, rounds=2, out=tmp_path / "run")
    assert len(calls) == 2
    sizes = [
        path.stat().st_size for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors")
    ]
    assert max(sizes) < 400  # nine numbers of the adapter, not the base


def test_workers_get_the_base_once_and_share_it() -> None:
    problem = Problem(adapted(), losses.cross_entropy, clients())
    dumped, tensors = serialization.dump_problem(problem)
    frozen = [p for p in problem.model.parameters() if not p.requires_grad]
    assert [t.data_ptr() for t in tensors] == [t.data_ptr() for t in (*frozen, *problem.fields)]
    received = serialization.load_problem(dumped, tensors)
    assert memory(received.model, True) == memory(problem.model, True)
    assert received.model[2].weight is received.model[0].weight  # type: ignore[index]
    engine = make("sequential:2:processes", problem)
    large = Problem(
        nn.Sequential(nn.Linear(500, 500).requires_grad_(False), nn.Linear(500, 1)),
        losses.squared_error,
        Federation.from_arrays(torch.ones(2, 500), torch.ones(2, 1), sizes=[1, 1]),
    )
    assert len(serialization.dump_problem(large)[0]) < 50_000
    engine.close()


@pytest.mark.slow
def test_worker_processes_train_on_the_shared_base() -> None:
    found = [
        train(adapted(), clients(), loss=losses.cross_entropy, rounds=2, engine=engine).model
        for engine in ("sequential", "sequential:2:processes")
    ]
    for one, other in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)
