"""A client's objective is its loss over all its examples at once, whatever counts in it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from fedshuffle import Evaluation, Federation, FedShuffleError, LocalWork, losses, train
from fedshuffle._arrays import IGNORED
from fedshuffle.engines import Loss, Problem, make
from fedshuffle.engines import problem as problems
from fedshuffle.kernel import FullGradient
from fedshuffle.theory import problem_constants

ENGINES = [
    *("reference", "sequential", "vectorized", "sequential:2", "vectorized:2"),
    pytest.param("sequential:2:processes", marks=pytest.mark.slow),
]
SIZES = [3, 40, 25]
PAD = 6


class Tagger(nn.Module):
    """A class for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.embedding(tokens).tanh())
        return logits.transpose(1, 2)


def text(pad: int, seed: int = 0) -> Federation:
    """Sequences of 5 tokens with 0 to 5 labels that count: more of them at a client's end."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(6, size=(sum(SIZES), 6))
    lengths = np.concatenate([np.sort(rng.integers(6, size=size)) for size in SIZES])
    labels = np.where(np.arange(5) < lengths[:, None], tokens[:, 1:], pad)
    return Federation.from_arrays(tokens[:, :-1], labels, sizes=SIZES)


def tagger() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().double()


class Padded:
    """A loss of one's own that says how many labels count."""

    def __call__(self, model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model(tokens), labels, ignore_index=PAD)

    def counted(self, model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return (labels != PAD).sum()


def each_token(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    values = functional.cross_entropy(outputs, labels, reduction="none", ignore_index=PAD)
    return values, 0.5 * (labels != PAD)


@dataclass(frozen=True)
class Case:
    loss: Loss
    pad: int


CASES = {
    "cross_entropy": Case(losses.cross_entropy, IGNORED),
    "of one's own": Case(Padded(), PAD),
    "value by value": Case(losses.MeanLoss(each_token), PAD),
}


def at_once(loss: Loss, federation: Federation, client: int) -> tuple[float, Tensor]:
    """The loss over all the client's examples at once, and its gradient."""
    model = tagger()
    begin, end = federation.offsets[client : client + 2]
    value = loss(model, *(field[begin:end] for field in federation.tensors()))
    parts = torch.autograd.grad(value, list(model.parameters()))
    return float(value.detach()), torch.cat([part.reshape(-1) for part in parts])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("problem", "vectorized"):
        monkeypatch.setattr(f"fedshuffle.engines.{module}.GRADIENT_ROWS", 7)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_a_full_gradient_is_that_of_all_examples_at_once(name: str, engine: str) -> None:
    case = CASES[name]
    federation = text(case.pad)
    problem = Problem(tagger(), case.loss, federation)
    probe = FullGradient((problem.start,), np.arange(3), np.eye(3), 0)
    for _ in range(2):  # the shares are remembered
        have = make(engine, problem).full_gradients([probe])[0].sums
        want = torch.stack([at_once(case.loss, federation, k)[1] for k in range(3)])
        torch.testing.assert_close(have[:, 0], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", ["reference", "sequential", "vectorized"])
@pytest.mark.parametrize("method", ["fedshuffle-mvr", "mime", "fedlin", "scaffold-i"])
def test_pieces_do_not_change_a_trajectory(
    method: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded text, with methods that need full gradients: in pieces and in one."""

    def trained() -> Tensor:
        model = train(
            tagger(),
            text(IGNORED),
            loss=losses.cross_entropy,
            rounds=3,
            method=method,
            sampling="uniform:2",
            work=LocalWork(batch_size=4),
            engine=engine,
        ).model
        return parameters_to_vector(model.parameters()).detach()

    want = trained()
    for module in ("problem", "vectorized"):
        monkeypatch.setattr(f"fedshuffle.engines.{module}.GRADIENT_ROWS", 7)
    torch.testing.assert_close(trained(), want, rtol=1e-12, atol=1e-14)


def test_pieces_are_of_1024_examples() -> None:
    federation = Federation.from_arrays(np.zeros((1500, 2)), np.arange(1500) % 3, sizes=[1500])
    problem = Problem(nn.Linear(2, 3), losses.cross_entropy, federation)
    assert [(len(piece.rows), piece.share) for piece in problem.pieces(0)] == [
        (1024, 1024 / 1500),
        (476, 476 / 1500),
    ]


@pytest.mark.parametrize("per_client", [True, False])
@pytest.mark.parametrize("batch_size", [7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_evaluation_gives_the_same_objective(name: str, batch_size: int, per_client: bool) -> None:
    case = CASES[name]
    federation = text(case.pad)
    want = np.array([at_once(case.loss, federation, k)[0] for k in range(3)])
    evaluation = Evaluation(
        federation, ["loss"], loss=case.loss, batch_size=batch_size, per_client=per_client
    )
    found = evaluation(tagger())
    assert found["loss"] == pytest.approx(float(federation.weights @ want), rel=1e-12)
    if per_client:
        assert found["loss_mean"] == pytest.approx(want.mean(), rel=1e-12)


@pytest.mark.usefixtures("small_pieces")
def test_constants_are_those_of_the_same_objective() -> None:
    federation = text(IGNORED)
    found = problem_constants(tagger(), federation, losses.cross_entropy, clients=3)
    slope = sum(
        w * at_once(losses.cross_entropy, federation, k)[1]
        for k, w in enumerate(federation.weights.tolist())
    )
    assert isinstance(slope, Tensor)
    assert float(found.gradient[0]) == pytest.approx(float(slope.square().sum()), rel=1e-9)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 9))
def test_batches_are_combined_by_their_counts(lengths: list[int], rows: int) -> None:
    """For any numbers of labels that count: sum of share times mean is the mean of all."""
    labels = np.where(np.arange(4) < np.array(lengths)[:, None], 1, IGNORED)
    values = np.random.default_rng(0).normal(size=labels.shape)
    federation = Federation.from_arrays(values, labels, sizes=[len(lengths)])
    problem = Problem(nn.Linear(4, 2), losses.cross_entropy, federation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "GRADIENT_ROWS", rows)
        pieces = problem.pieces(0)
    mean = sum(
        piece.share * values[piece.rows][labels[piece.rows] == 1].mean()
        for piece in pieces
        if len(pieces) > 1 or (labels == 1).any()
    )
    want = values[labels == 1].mean() if (labels == 1).any() else 0.0
    assert mean == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("loss", [losses.cross_entropy, CASES["value by value"].loss])
def test_a_minibatch_in_which_nothing_counts_has_no_gradient(loss: Loss, engine: str) -> None:
    tokens = torch.zeros(4, 3, dtype=torch.int64)
    nothing = IGNORED if loss is losses.cross_entropy else PAD
    labels = torch.full((4, 3), nothing)
    assert float(loss(tagger(), tokens, labels).detach()) == 0
    federation = Federation.from_arrays(tokens, labels, sizes=[3, 1])
    result = train(tagger(), federation, loss=loss, rounds=2, engine=engine, method="mime")
    have, want = (parameters_to_vector(m.parameters()) for m in (result.model, tagger()))
    assert torch.equal(have, want)
    with pytest.raises(FedShuffleError, match="no target that counts"):
        Evaluation(federation, ["loss"], loss=loss)(tagger())


@pytest.mark.parametrize("number", [-1.0, float("nan")])
def test_bad_counts_are_refused(number: float) -> None:
    class Odd(Padded):
        def counted(self, *_: object) -> Tensor:
            return torch.tensor(number)

    with pytest.raises(FedShuffleError, match="counted"):
        Evaluation(text(PAD), ["loss"], loss=Odd())(tagger())


def test_the_mean_is_torchs_bit_for_bit() -> None:
    torch.manual_seed(0)
    check: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    for outputs, targets in (
        (torch.randn(9, 4), torch.randint(4, (9,))),
        (torch.randn(9, 4, 3), torch.randint(4, (9, 3)).index_fill_(0, torch.arange(5), -100)),
        (torch.randn(9, 4), torch.rand(9, 4)),
    ):
        outputs.requires_grad_()
        have = losses.cross_entropy(nn.Identity(), outputs, targets)
        want = check(outputs, targets)
        assert torch.equal(have, want)
        slopes = (torch.autograd.grad(value, outputs)[0] for value in (have, want))
        assert torch.equal(*slopes)


@pytest.mark.parametrize("kind", [torch.uint8, torch.uint16])
def test_labels_of_few_bytes_count_as_any_others(kind: torch.dtype) -> None:
    """Among them torch takes 156 (or 65436) for -100, the class that does not count."""
    torch.manual_seed(0)
    outputs, classes = torch.randn(6, 200), torch.tensor([156, 156, 156, 1, 2, 3])
    found = [
        Evaluation(data, ["loss", "accuracy", "f1-macro"], loss=losses.cross_entropy)(nn.Identity())
        for labels in (classes, classes.to(kind))
        for data in [Federation.from_arrays(outputs, labels, sizes=[2, 4])]
    ]
    assert found[0] == found[1]
    batch = outputs, classes.to(kind)
    wanted = functional.cross_entropy(outputs, classes)
    torch.testing.assert_close(losses.cross_entropy(nn.Identity(), *batch), wanted)
    assert losses.cross_entropy.counted(nn.Identity(), *batch) == 6
    tokens = classes.to(kind).reshape(2, 3)
    assert losses.causal_lm.counted(nn.Identity(), tokens, tokens) == 4


def test_classes_in_a_column_of_their_own_are_named() -> None:
    for shape in ((9, 1), (8,)):
        targets = torch.zeros(shape, dtype=torch.long)
        with pytest.raises(
            FedShuffleError, match=r"do not fit outputs of shape \(9, 4\): give .*9"
        ):
            losses.cross_entropy(nn.Identity(), torch.randn(9, 4), targets)


@dataclass
class Output:
    """What a model of transformers gives."""

    logits: Tensor


class Speaker(nn.Module):
    """A language model of transformers' form, or a classifier of whole sequences."""

    def __init__(self, classes: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.out = nn.Linear(4, classes or 7)
        self.classes = classes

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        hidden = self.embedding(input_ids).tanh()
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return Output(self.out(hidden.sum(1) if self.classes else hidden.cumsum(1)))


def spoken(masked: bool, classes: int = 0) -> Federation:
    """Sequences of 2 to 6 tokens, padded."""
    rng = np.random.default_rng(0)
    mask = (np.arange(6) < rng.integers(2, 7, size=(sum(SIZES), 1))).astype(np.int64)
    tokens = rng.integers(1, 7, size=mask.shape) * mask
    labels = np.where(mask == 1, tokens, IGNORED)
    if classes:
        labels = rng.integers(classes, size=len(tokens))
    return Federation.from_arrays(tokens, *([mask] if masked else []), labels, sizes=SIZES)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("masked", [True, False])
def test_a_language_model_is_trained_on_the_mean_over_all_tokens(engine: str, masked: bool) -> None:
    """The gradient by hand, token by token; then the metrics that follow from the same outputs."""
    federation, model = spoken(masked), Speaker().double()
    problem = Problem(model, losses.causal_lm, federation)
    probe = FullGradient((problem.start,), np.arange(3), np.eye(3), 0)
    have = make(engine, problem).full_gradients([probe])[0].sums[:, 0]
    found, means = Evaluation(federation, ["loss", "perplexity", "accuracy"], batch_size=9), []
    for client in range(3):
        rows = slice(*federation.offsets[client : client + 2].tolist())
        tokens, *mask, labels = (field[rows] for field in federation.tensors())
        logits = model(input_ids=tokens, attention_mask=mask[0] if mask else None).logits
        values = [
            functional.cross_entropy(logits[row, t - 1], labels[row, t])
            for row in range(len(tokens))
            for t in range(1, 6)
            if labels[row, t] != IGNORED
        ]
        means.append(torch.stack(values).mean())
        parts = torch.autograd.grad(means[-1], list(model.parameters()))
        want = torch.cat([part.reshape(-1) for part in parts])
        torch.testing.assert_close(have[client], want, rtol=1e-10, atol=1e-13)
    overall = float(federation.weights @ torch.stack(means).detach().numpy())
    metrics = found.with_loss(losses.causal_lm)(model)
    assert metrics["loss"] == pytest.approx(overall, rel=1e-10)
    assert metrics["perplexity"] == pytest.approx(np.exp(overall), rel=1e-10)
    assert 0 <= metrics["accuracy"] <= 1


def test_sequences_are_classified_by_the_cross_entropy_of_their_logits() -> None:
    federation, model = spoken(True, classes=3), Speaker(3).double()
    tokens, mask, labels = federation.tensors()
    want = functional.cross_entropy(model(input_ids=tokens, attention_mask=mask).logits, labels)
    assert torch.equal(losses.sequence_classification(model, tokens, mask, labels), want)
    left_out = labels.clone().index_fill(0, torch.tensor([0, 1]), IGNORED)
    counted = losses.counted(losses.sequence_classification, model, [tokens, mask, left_out])
    assert counted == len(labels) - 2
    evaluate = Evaluation(federation, ["accuracy"], loss=losses.sequence_classification)
    right = model(input_ids=tokens, attention_mask=mask).logits.argmax(1) == labels
    assert evaluate(model)["accuracy"] == pytest.approx(float(right.double().mean()))


def test_half_precision_is_not_the_precision_of_a_loss_over_tokens() -> None:
    tokens, mask, labels = spoken(True).tensors()
    assert (
        losses.causal_lm(Speaker().to(torch.bfloat16), tokens, mask, labels).dtype == torch.float32
    )


def test_what_is_no_language_model_or_has_other_fields_is_said() -> None:
    tokens, mask, labels = spoken(True).tensors()
    with pytest.raises(FedShuffleError, match=r"4 fields.*input_ids, attention_mask and labels"):
        losses.causal_lm(Speaker(), tokens, mask, mask, labels)
    with pytest.raises(FedShuffleError, match="1 field"):
        losses.causal_lm(Speaker(), tokens)
    with pytest.raises(FedShuffleError, match="gives Tensor, which has no logits"):
        losses.causal_lm(lambda input_ids: input_ids.double(), tokens, labels)  # type: ignore[arg-type]


def test_tokens_and_labels_that_the_model_does_not_know_are_said() -> None:
    tokens, mask, labels = spoken(True).tensors()
    with pytest.raises(FedShuffleError, match=r"look up the tokens from 0 to 9 .*own tokenizer"):
        losses.causal_lm(Speaker(), tokens.masked_fill(tokens == 3, 9), mask, labels)
    with pytest.raises(FedShuffleError, match="are no classes: convert them to whole numbers"):
        losses.causal_lm(Speaker(), tokens, mask, labels.float())


def test_labels_may_be_of_any_whole_numbers() -> None:
    tokens, mask, labels = spoken(True).tensors()
    torch.manual_seed(0)
    model = Speaker()
    want = losses.causal_lm(model, tokens, mask, labels)
    assert torch.equal(losses.causal_lm(model, tokens, mask, labels.int()), want)
    few = tokens.to(torch.uint8)  # cannot hold -100
    assert torch.equal(
        losses.causal_lm(model, tokens, mask, few), losses.causal_lm(model, tokens, mask, tokens)
    )


def test_heads_and_labels_that_do_not_fit_are_said() -> None:
    """A head with one output would have a loss of zero, and learn nothing."""
    tokens, mask, classes = spoken(True, classes=3).tensors()
    for labels in (torch.zeros(len(tokens), 1), torch.zeros_like(classes)):
        with pytest.raises(FedShuffleError, match=r"two classes or more.*num_labels"):
            losses.sequence_classification(Speaker(1), tokens, mask, labels)
    with pytest.raises(FedShuffleError, match="one class for each"):
        losses.sequence_classification(Speaker(3), tokens, mask, classes[:, None])
    for model in (Speaker(), Speaker(3)):
        with pytest.raises(FedShuffleError, match="a label per token"):
            losses.causal_lm(model, tokens, mask, classes)
