"""Models that do more than compute: every engine honours them as a bare loop would, or refuses."""

import copy
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from fedshuffle import Evaluation, Federation, FedShuffleError, LocalWork, losses, train
from fedshuffle.engines import (
    Problem,
    ReferenceEngine,
    SequentialEngine,
    VectorizedEngine,
    choose,
    make,
)
from fedshuffle.engines.gradients import SlowerWarning, by_hand
from fedshuffle.state import State
from fedshuffle.training.rounds import Run, simulate

ENGINES = ["sequential", "sequential:2", "vectorized"]
SIZES = [3, 5, 8]
METHODS = ["fedshuffle-mvr", "mime"]


def rows(shape: tuple[int, ...] = (6,), seed: int = 0) -> Federation:
    rng = np.random.default_rng(seed)
    n = sum(SIZES)
    return Federation.from_arrays(
        rng.normal(size=(n, *shape)), rng.integers(3, size=n), sizes=SIZES
    )


def tokens(seed: int = 0) -> Federation:
    """Texts of 4 words from 1 to 6, the last of every client with padding (0) at its end."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(1, 7, size=(sum(SIZES), 4))
    texts[np.cumsum(SIZES) - 1, 2:] = 0
    return Federation.from_arrays(texts, rng.integers(3, size=len(texts)), sizes=SIZES)


class Words(nn.Module):
    """The mean of embeddings, whose matrix may also make the output."""

    def __init__(self, tied: bool = False, **options: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, **options)  # type: ignore[arg-type]
        self.out = nn.Linear(3, 3)
        self.tied = tied

    def forward(self, texts: Tensor) -> Tensor:
        hidden = self.embedding(texts).mean(1)
        if self.tied:
            hidden = hidden + (hidden @ self.embedding.weight.T) @ self.embedding.weight
        logits: Tensor = self.out(hidden)
        return logits


class Padding(Words):
    """Names the padding itself, where no layer shows it."""

    def forward(self, texts: Tensor) -> Tensor:
        found = functional.embedding(texts, self.embedding.weight, padding_idx=0)
        logits: Tensor = self.out(found.mean(1))
        return logits


class Warm(nn.Module):
    """Logits over a learnable temperature, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x) / self.temperature
        return logits


class Shrinking(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        logits: Tensor = self.layer(x.tanh())
        return logits


class InMemory(nn.Module):
    """Takes its activations as they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layers(x)
        logits: Tensor = self.out(found.as_strided((len(x), 16), (16, 1)))
        return logits


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def own_forward() -> nn.Module:
    model = mlp()

    def doubled(self: nn.Linear, x: Tensor) -> Tensor:
        return 2 * functional.linear(x, self.weight, self.bias)

    model[0].forward = types.MethodType(doubled, model[0])
    return model


def backward_hook() -> nn.Module:
    model = mlp()
    model[2].register_full_backward_hook(lambda layer, into, out: (0.5 * into[0],))  # type: ignore[index]
    return model


def backward_pre_hook() -> nn.Module:
    model = mlp()
    model[2].register_full_backward_pre_hook(lambda layer, out: (3 * out[0],))  # type: ignore[index]
    return model


def forward_hook() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return model


def dropped_planes() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Federation]]] = {
    "padding": (lambda: Words(padding_idx=0), tokens),
    "tied padding": (lambda: Words(tied=True, padding_idx=0), tokens),
    "padding within": (Padding, tokens),
    "by frequency": (lambda: Words(scale_grad_by_freq=True), tokens),
    "largest norm": (lambda: Words(max_norm=0.5), tokens),
    "tied largest norm": (lambda: Words(tied=True, max_norm=0.5), tokens),
    "temperature": (Warm, rows),
    "shrinking": (Shrinking, rows),
    "in memory": (InMemory, lambda: rows((2, 6, 6))),
    "own forward": (own_forward, rows),
    "backward hook": (backward_hook, rows),
    "backward pre-hook": (backward_pre_hook, rows),
    "forward hook": (forward_hook, rows),
    "dropped planes": (dropped_planes, lambda: rows((2, 6, 6))),
}


REFUSES = {
    "padding": ["vectorized"],
    "tied padding": ["vectorized"],
    "padding within": ["vectorized"],
    "by frequency": ["vectorized"],
    "largest norm": ["vectorized"],
    "tied largest norm": ["vectorized"],
    "backward hook": ["vectorized"],
    "backward pre-hook": ["vectorized"],
    "dropped planes": ["vectorized", "sequential:2"],
}
"""Which engines refuse a model."""


ELSEWHERE = ["largest norm", "backward hook", "dropped planes"]
"""What is tried in worker processes, too."""


def made(case: str) -> tuple[nn.Module, Federation]:
    make_model, make_data = CASES[case]
    torch.manual_seed(0)
    return make_model().double(), make_data()


def flat(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().clone()


def bare(model: nn.Module, federation: Federation, rounds: int, work: LocalWork) -> Tensor:
    """FedAvg by hand, as one would write it: SGD on each client from the global model."""
    run = Run(federation, "fedavg-rr", "full", work, 0.1)
    current = copy.deepcopy(model)
    for round in range(rounds):
        state = State(flat(current), round=round)
        request = run.local_training(state)
        assert request is not None
        total = torch.zeros_like(state.x)
        for task in request.tasks:
            local = copy.deepcopy(current)
            local.load_state_dict(current.state_dict())
            begin = int(federation.offsets[task.minibatches.client])
            for positions in task.minibatches:
                batch = [field[positions + begin].clone() for field in federation.tensors()]
                local.zero_grad()
                losses.cross_entropy(local, *batch).backward()  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    for p in local.parameters():
                        assert p.grad is not None
                        p.sub_(p.grad, alpha=task.step_size)
            total += task.weights[0] * (flat(local) - state.x)
        with torch.no_grad():
            nn.utils.vector_to_parameters(state.x + total, current.parameters())
    return flat(current)


WORK = LocalWork(epochs=2, batch_size=2)


@pytest.mark.parametrize("case", [case for case in CASES if case != "dropped planes"])
def test_the_reference_is_the_bare_loop(case: str) -> None:
    model, federation = made(case)
    before, data = flat(model), [field.clone() for field in federation.tensors()]
    settings = {"rounds": 2, "work": WORK, "method": "fedavg-rr", "engine": "reference"}
    have = train(model, federation, loss=losses.cross_entropy, **settings).model  # type: ignore[arg-type]
    torch.testing.assert_close(flat(have), bare(model, federation, 2, WORK), rtol=1e-12, atol=1e-13)
    assert torch.equal(flat(model), before)
    assert all(map(torch.equal, federation.tensors(), data))


@pytest.mark.filterwarnings("ignore::fedshuffle.engines.gradients.SlowerWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_every_engine_honours_the_model_or_refuses_it(case: str, method: str) -> None:
    model, federation = made(case)
    work = LocalWork(epochs=2, batch_size=2, weight_decay=0.1)

    def trained(engine: str) -> Tensor:
        settings = {"rounds": 2, "work": work, "method": method, "engine": engine}
        return flat(train(model, federation, loss=losses.cross_entropy, **settings).model)  # type: ignore[arg-type]

    want, data = trained("reference"), [field.clone() for field in federation.tensors()]
    some = (
        ["sequential:2:processes", "auto"]
        if case in ELSEWHERE and method == "fedshuffle-mvr"
        else []
    )
    for engine in ENGINES + some:
        if engine in REFUSES.get(case, ()):
            with pytest.raises(
                FedShuffleError, match=r"engine 'sequential|Use one worker"
            ) as error:
                trained(engine)
            assert len(str(error.value).splitlines()) == 1
        else:
            have = trained(engine)
            torch.testing.assert_close(have, want, rtol=1e-11, atol=1e-12, msg=engine)
    assert all(map(torch.equal, federation.tensors(), data))


@pytest.mark.parametrize("case", ["largest norm", "tied largest norm"])
def test_adaptive_methods_train_models_that_change_their_parameters(case: str) -> None:
    model, federation = made(case)
    work = LocalWork(batch_size=2, weight_decay=0.1)
    runs = [Run(federation, method, "full", work) for method in ("mime-adam", "fedprox", "mime")]
    problem = Problem(model, losses.cross_entropy, federation)
    *_, want = simulate(ReferenceEngine(problem), runs, 2)
    *_, have = simulate(SequentialEngine(problem), runs, 2)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a.x, b.x, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", ["own forward", "backward hook", "backward pre-hook"])
def test_layers_that_do_more_are_not_differentiated_by_hand(case: str) -> None:
    model, federation = made(case)
    assert by_hand(Problem(model, losses.cross_entropy, federation)) is None


@contextmanager
def everywhere(register: Callable[..., object], hook: Callable[..., object]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()  # type: ignore[attr-defined]


HOOKS = nn.modules.module
GLOBAL: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "forward": (
        HOOKS.register_module_forward_hook,
        lambda layer, x, y: 2 * y if type(layer) is nn.Linear else None,
    ),
    "forward pre": (
        HOOKS.register_module_forward_pre_hook,
        lambda layer, x: (2 * x[0],) if type(layer) is nn.Linear else None,
    ),
    "backward": (
        HOOKS.register_module_full_backward_hook,
        lambda layer, x, y: (2 * x[0],) if type(layer) is nn.Tanh else None,
    ),
    "backward pre": (
        HOOKS.register_module_full_backward_pre_hook,
        lambda layer, y: (2 * y[0],) if type(layer) is nn.Tanh else None,
    ),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", GLOBAL)
def test_hooks_of_all_modules_are_honoured_and_do_not_reach_other_processes(kind: str) -> None:
    federation = rows()
    torch.manual_seed(0)
    model = mlp().double()
    with everywhere(*GLOBAL[kind]):
        problem = Problem(model, losses.cross_entropy, federation)
        assert by_hand(problem) is None
        run = Run(federation, "fedshuffle", "full", WORK)
        *_, (want,) = simulate(ReferenceEngine(problem), [run], 2)
        *_, (have,) = simulate(SequentialEngine(problem), [run], 2)
        with pytest.raises(FedShuffleError, match="in another process"):
            list(simulate(make("sequential:2:processes", problem), [run], 1))
    torch.testing.assert_close(have.x, want.x, rtol=1e-12, atol=1e-13)
    *_, (plain,) = simulate(
        ReferenceEngine(Problem(model, losses.cross_entropy, federation)), [run], 2
    )
    assert not torch.allclose(plain.x, want.x)


def test_a_fast_way_that_disagrees_is_left_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no look at the layers can tell: torch's own linear layer was replaced."""
    plain = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * plain(self, x))
    federation = rows()
    torch.manual_seed(0)
    problem = Problem(mlp().double(), losses.cross_entropy, federation)
    assert by_hand(problem) is not None
    run = Run(federation, "fedshuffle", "full", WORK)
    *_, (want,) = simulate(ReferenceEngine(problem), [run], 2)
    with pytest.warns(SlowerWarning, match="by hand") as said:
        engines = [
            SequentialEngine(problem),
            SequentialEngine(problem),
            make("sequential:2", problem),
        ]
    assert len(said) == 1  # once for a problem
    with pytest.warns(SlowerWarning, match="many clients"):
        engines.append(VectorizedEngine(problem))
    for engine in engines:
        *_, (have,) = simulate(engine, [run], 2)
        torch.testing.assert_close(have.x, want.x, rtol=1e-12, atol=1e-13)


def test_memory_order_is_left_alone_with_a_line() -> None:
    model, federation = made("in memory")
    problem = Problem(model, losses.cross_entropy, federation)
    with pytest.warns(SlowerWarning, match="channels last"):
        SequentialEngine(problem)


@pytest.mark.parametrize("case", ["padding", "padding within", "by frequency", "largest norm"])
def test_vectorized_refuses_what_vmap_ignores_and_auto_takes_another(case: str) -> None:
    model, federation = made(case)
    problem = Problem(model, losses.cross_entropy, federation)
    with pytest.raises(FedShuffleError, match="vectorized"):
        VectorizedEngine(problem)
    request = Run(federation, "fedshuffle").local_training(State(problem.start))
    assert request is not None
    choice = choose(problem, request)
    assert choice.engine.name.startswith("sequential")
    assert "vectorized not (" in choice.why


def test_vectorized_refuses_padding_also_where_no_tried_example_has_it() -> None:
    """The padding is in an example that is neither the first nor the last of its client."""
    texts = np.random.default_rng(0).integers(1, 7, size=(sum(SIZES), 4))
    texts[1, 2:] = 0
    federation = Federation.from_arrays(texts, np.arange(len(texts)) % 3, sizes=SIZES)
    with pytest.raises(FedShuffleError, match="padding_idx"):
        VectorizedEngine(Problem(Words(padding_idx=0), losses.cross_entropy, federation))


def test_auto_takes_what_is_left_of_the_fast_ways() -> None:
    model, federation = made("in memory")
    problem = Problem(model, losses.cross_entropy, federation)
    request = Run(federation, "fedshuffle").local_training(State(problem.start))
    assert request is not None
    with pytest.warns(SlowerWarning, match="channels last"):
        choice = choose(problem, request)
    assert "sequential " in choice.why.split(" not (")[0]


def test_the_check_is_silent_and_draws_nothing_where_all_agrees() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in ("temperature", "shrinking"):
            model, federation = made(case)
            torch.set_rng_state(before)
            SequentialEngine(Problem(model, losses.cross_entropy, federation))
            VectorizedEngine(Problem(model, losses.cross_entropy, federation))
            assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_leaves_the_data_as_they_are() -> None:
    model, federation = made("shrinking")
    data = [field.clone() for field in federation.tensors()]
    own = Evaluation(federation, ["loss", "accuracy"], loss=losses.cross_entropy)
    opaque = Evaluation(
        federation, ["loss"], loss=lambda m, *batch: losses.cross_entropy(m, *batch)
    )
    assert own(model) == own(model)
    assert opaque(model) == opaque(model)
    assert all(map(torch.equal, federation.tensors(), data))


def test_the_global_model_is_not_renormalised() -> None:
    model, federation = made("largest norm")
    problem = Problem(model, losses.cross_entropy, federation)
    x = problem.start.clone()
    for engine in (ReferenceEngine(problem), SequentialEngine(problem)):
        request = Run(federation, "fedshuffle").local_training(State(x))
        assert request is not None
        engine.local_training([request])
        assert torch.equal(x, problem.start)


def refused(model: nn.Module, word: str, engine: str = "sequential") -> None:
    data = tokens() if any(isinstance(m, nn.Embedding) for m in model.modules()) else rows()
    with pytest.raises(FedShuffleError, match=word) as error:
        train(model, data, loss=losses.cross_entropy, rounds=1, engine=engine)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized", "auto"])
def test_what_cannot_be_trained_is_refused_in_one_line(engine: str) -> None:
    hooked = nn.Linear(6, 3)
    hooked.weight.register_hook(lambda grad: 2 * grad)  # type: ignore[no-untyped-call]
    refused(hooked, "'weight' has a gradient hook", engine)
    hooked = nn.Linear(6, 3)
    hooked.bias.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    refused(hooked, "'bias' has a gradient hook", engine)
    with pytest.warns(FutureWarning):
        old = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 3)))
    refused(old, "parametrizations.weight_norm", engine)
    refused(Words(sparse=True), "'embedding.weight' has sparse gradients.*sparse=False", engine)
    refused(nn.Sequential(nn.LazyLinear(3)), "'0.weight' is lazy", engine)
    refused(nn.Sequential(nn.Linear(6, 3), nn.LazyInstanceNorm1d(affine=True)), "lazy", engine)


def test_a_copy_that_still_uses_the_original_is_refused() -> None:
    layer = nn.Linear(6, 4)
    layer.forward = lambda x: 2 * functional.linear(x, layer.weight, layer.bias)  # type: ignore[method-assign, assignment]
    refused(nn.Sequential(layer, nn.Linear(4, 3)), "copy of the model still uses")
    layer = nn.Linear(6, 3)
    layer.register_forward_hook(lambda _, x, y: y + layer.bias)
    refused(layer, "copy of the model still uses")


def test_a_model_that_cannot_be_copied_is_named() -> None:
    model = mlp()
    model.seen = model[0](torch.ones(1, 6))
    refused(model, "cannot be copied")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_new_weight_norm_is_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))).double()
    problem = Problem(model, losses.cross_entropy, rows())
    run = Run(problem.federation, "fedshuffle", "full", WORK)
    *_, (want,) = simulate(ReferenceEngine(problem), [run], 2)
    for engine in (SequentialEngine(problem), VectorizedEngine(problem)):
        *_, (have,) = simulate(engine, [run], 2)
        torch.testing.assert_close(have.x, want.x, rtol=1e-12, atol=1e-13)
