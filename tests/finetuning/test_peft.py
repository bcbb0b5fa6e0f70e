"""LoRA by peft on models of transformers: tiny ones with random weights; nothing is downloaded."""

import copy
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedshuffle import Evaluation, Federation, FedShuffleError, LocalWork, losses, train
from fedshuffle.engines import Problem
from fedshuffle.finetuning import FedEx, fedex, ffa, flora
from fedshuffle.local_work import WHOLE_CLIENT
from fedshuffle.sampling import resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False.*:UserWarning"),  # of peft
]
VOCABULARY, TIME = 24, 7
SIZES = [1, 3, 5]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setitem(os.environ, name, "1")


def base(kind: str, classes: int = 0, time: int = TIME) -> Any:
    """A tiny model with random weights: the same at every call."""
    import transformers

    torch.manual_seed(1)
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "vocab_size": VOCABULARY}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_positions=time,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **ends,
        )
    else:
        config = transformers.LlamaConfig(
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=time,
            **ends,
        )
    if classes:
        config.num_labels = classes
        made = transformers.AutoModelForSequenceClassification.from_config(config)
    else:
        made = transformers.AutoModelForCausalLM.from_config(config)
    return made


def lora(kind: str = "gpt2", classes: int = 0, dropout: float = 0.0, warm: bool = True) -> Any:
    """The same with adapters, of which B is not zero if they are warm."""
    import peft

    targets = ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(
        task_type="SEQ_CLS" if classes else "CAUSAL_LM",
        r=2,
        lora_alpha=4,
        lora_dropout=dropout,
        target_modules=targets,
        fan_in_fan_out=kind == "gpt2",
    )
    model: Any = peft.get_peft_model(base(kind, classes), config)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and warm:
            with torch.no_grad():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def text(classes: int = 0) -> Federation:
    """Sequences of 3 to 7 tokens, padded; clients of 1, 3 and 5 of them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, TIME + 1, (sum(SIZES), 1), generator=generator)
    mask = (torch.arange(TIME) < lengths).long()
    tokens = torch.randint(2, VOCABULARY, mask.shape, generator=generator) * mask
    labels = tokens.masked_fill(mask == 0, -100)
    if classes:
        labels = torch.randint(classes, (sum(SIZES),), generator=generator)
    return Federation.from_arrays(tokens, mask, labels, sizes=SIZES)


class Plain(nn.Module):
    """A model that gives a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.embedding(input_ids)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {k: p.detach().clone() for k, p in model.named_parameters() if p.requires_grad}


def logits(model: Any) -> Tensor:
    tokens, mask, _ = map(torch.as_tensor, text().fields)
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=tokens, attention_mask=mask).logits
    return found


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_losses_are_those_of_transformers(kind: str) -> None:
    tokens, mask, labels = map(torch.as_tensor, text().fields)
    model = lora(kind)
    theirs = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(losses.causal_lm(model, tokens, mask, labels), theirs)
    assert losses.causal_lm.counted(model, tokens, mask, labels) == int(mask[:, 1:].sum())
    short = model.to(torch.bfloat16)
    assert losses.causal_lm(short, tokens, mask, labels).dtype == torch.float32
    classifier = lora(kind, classes=3)
    tokens, mask, labels = map(torch.as_tensor, text(classes=3).fields)
    theirs = classifier(input_ids=tokens, attention_mask=mask, labels=labels).loss
    ours = losses.sequence_classification(classifier, tokens, mask, labels)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("engine", ["sequential", "reference", "sequential:2:processes", "auto"])
def test_training_equals_a_bare_loop_of_peft(kind: str, engine: str) -> None:
    """FedShuffle by hand: every client takes two steps over all its tokens."""
    federation, step = text(), 0.5
    result = train(
        lora(kind),
        federation,
        loss=losses.causal_lm,
        rounds=2,
        work=LocalWork(epochs=2, batch_size=WHOLE_CLIENT),
        step_size=step,
        engine=engine,
        evaluate=Evaluation(federation, ["loss", "accuracy", "perplexity"], batch_size=4),
    )
    server = lora(kind)
    for _ in range(2):
        start = trainable(server)
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for client, weight in enumerate(federation.weights):
            mine = copy.deepcopy(server)
            rows = slice(*federation.offsets[client : client + 2].tolist())
            tokens, mask, labels = (torch.as_tensor(field)[rows] for field in federation.fields)
            optimiser = torch.optim.SGD([p for p in mine.parameters() if p.requires_grad], lr=step)
            for _ in range(2):
                optimiser.zero_grad()
                mine(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
                optimiser.step()
            for name, value in trainable(mine).items():
                total[name] += float(weight) * (value - start[name])
        server.load_state_dict({k: v + total[k] for k, v in start.items()}, strict=False)
    torch.testing.assert_close(trainable(result.model), trainable(server), rtol=1e-4, atol=1e-6)
    if engine == "auto":
        assert result.engine.startswith("sequential")
    # The metrics of the same model, by hand; clients count by their examples.
    found, wrong = logits(server)[:, :-1], 0.0
    labels = torch.as_tensor(federation.fields[2])[:, 1:]
    for client, weight in enumerate(federation.weights):
        rows = slice(*federation.offsets[client : client + 2].tolist())
        loss = functional.cross_entropy(found[rows].flatten(0, 1), labels[rows].flatten())
        wrong += float(weight * loss)
    assert result.history[-1]["loss"] == pytest.approx(wrong, rel=1e-4)
    assert result.history[-1]["perplexity"] == pytest.approx(
        torch.tensor(wrong).exp().item(), rel=1e-4
    )


def test_dropout_of_adapters_is_drawn_alike_by_every_engine() -> None:
    found = [
        trainable(
            train(
                lora(dropout=0.3),
                text(),
                loss=losses.causal_lm,
                rounds=2,
                work=LocalWork(batch_size=2),
                engine=engine,
            ).model
        )
        for engine in ("reference", "sequential", "sequential:2:processes", "auto")
    ]
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-4, atol=1e-6)
    with pytest.raises(FedShuffleError, match="draws random numbers"):
        train(lora(dropout=0.3), text(), loss=losses.causal_lm, rounds=1, engine="vectorized")


def test_what_vmap_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(FedShuffleError, match=r"cannot be vectorized .*Use the engine"):
        train(lora(), text(), loss=losses.causal_lm, rounds=1, engine="vectorized")


@pytest.mark.parametrize("classes", [0, 3])
def test_adapters_are_saved_and_loaded_by_peft(classes: int, tmp_path: Path) -> None:
    import peft

    model = lora(classes=classes)
    loss = losses.sequence_classification if classes else losses.causal_lm
    result = train(model, text(classes), loss=loss, rounds=2, step_size=0.5, out=tmp_path / "run")
    assert isinstance(result.model, peft.PeftModel)
    result.model.save_pretrained(tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
    fresh = peft.PeftModel.from_pretrained(base("gpt2", classes), tmp_path / "adapters")
    torch.testing.assert_close(logits(fresh), logits(result.model))
    assert not torch.allclose(logits(fresh), logits(model), atol=1e-3)
    # Only what is trained is in the checkpoints.
    sizes = [path.stat().st_size for path in (tmp_path / "run").rglob("*.safetensors")]
    numbers = sum(value.numel() for value in trainable(model).values())
    assert max(sizes) < 4 * numbers + 200
    # Loaded adapters are frozen unless peft is told otherwise.
    with pytest.raises(FedShuffleError, match=r"no trainable parameters.*is_trainable=True"):
        train(fresh, text(classes), loss=loss, rounds=1)
    again = peft.PeftModel.from_pretrained(
        base("gpt2", classes), tmp_path / "adapters", is_trainable=True
    )
    train(again, text(classes), loss=loss, rounds=1)


@pytest.mark.parametrize("variant", [fedex, flora])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("engine", ["sequential", "sequential:2:processes"])
def test_layers_average_exactly_and_are_saved_with_their_base(
    variant: Any, kind: str, engine: str, tmp_path: Path
) -> None:
    import peft
    import transformers

    federation, model, plain = text(), lora(kind), lora(kind)
    exact = variant(model)
    assert isinstance(exact, FedEx)
    assert exact.adapters == len([n for n, _ in plain.named_parameters() if "lora_A" in n])
    torch.testing.assert_close(logits(model), logits(plain))
    model.train()
    more: dict[str, Any] = {
        "loss": losses.causal_lm,
        "rounds": 1,
        "step_size": 0.5,
        "engine": engine,
    }
    more |= {"work": LocalWork(batch_size=WHOLE_CLIENT, epochs=2)}
    result = train(model, federation, transforms=[exact], **more)
    trained: Any = result.model
    merged = copy.deepcopy(trained).merge_and_unload().state_dict()
    # The dense average of the models of the clients, each trained alone and merged.
    dense = {k: v.clone().double() for k, v in lora(kind).merge_and_unload().state_dict().items()}
    start = {k: v.clone() for k, v in dense.items()}
    for client, weight in enumerate(federation.weights):
        rows = slice(*federation.offsets[client : client + 2].tolist())
        alone = Federation.from_arrays(*(f[rows] for f in federation.fields), sizes=[SIZES[client]])
        own: Any = train(lora(kind), alone, **(more | {"engine": "sequential"})).model
        for name, value in copy.deepcopy(own).merge_and_unload().state_dict().items():
            dense[name] += float(weight) * (value.double() - start[name])
    changed = [name for name in dense if not torch.allclose(dense[name], start[name], atol=1e-6)]
    assert len(changed) == exact.adapters
    for name, value in merged.items():
        torch.testing.assert_close(value.double(), dense[name], rtol=1e-5, atol=1e-6)
    assert 0 < result.history[0]["residual_share"] < 1

    # The base has changed, so it is saved as well; then peft loads both.
    wanted = logits(trained)
    trained.save_pretrained(tmp_path / "adapters")
    copy.deepcopy(trained).unload().save_pretrained(tmp_path / "base")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(found, tmp_path / "adapters")
    torch.testing.assert_close(logits(again), wanted)
    alone = peft.PeftModel.from_pretrained(base(kind), tmp_path / "adapters")
    assert not torch.allclose(logits(alone), wanted, atol=1e-6)


def test_ffa_trains_b_alone() -> None:
    model = ffa(lora())
    start, result = trainable(model), train(model, text(), loss=losses.causal_lm, rounds=1)
    assert start.keys() == trainable(result.model).keys()
    assert all("lora_B" in name for name in start)
    assert result.history[0]["bytes_up"] == 3 * 4 * sum(v.numel() for v in start.values())


def test_ffa_trains_the_factor_of_an_embedding_that_begins_with_zero() -> None:
    """There A begins with zero: frozen, it would keep the layer as it is for ever."""
    import peft

    def adapted() -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(4, 3)).double()
        return ffa(peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0"])))

    def table(model: Any) -> Tensor:
        layer = model.get_submodule("base_model.model.0")
        found: Tensor = layer.base_layer.weight + layer.get_delta_weight("default")
        return found.detach()

    tokens, labels = torch.arange(9) % 5, torch.arange(9) % 3
    settings: Any = {"loss": losses.cross_entropy, "rounds": 1, "step_size": 0.5}
    settings["work"] = LocalWork(steps=2, batch_size=WHOLE_CLIENT)
    together = Federation.from_arrays(tokens[:, None], labels, sizes=SIZES)
    found = table(train(adapted(), together, **settings).model)
    wanted = torch.zeros_like(found)
    for client, weight in enumerate(together.weights.tolist()):
        alone = train(adapted(), together.subset([client]), **settings)
        wanted += weight * table(alone.model)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert float((found - table(adapted())).abs().max()) > 0.01


def test_a_base_in_half_precision_is_fine_and_mixed_adapters_are_named() -> None:
    model = lora()
    model.get_base_model().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    assert Problem(model, losses.causal_lm, text()).dtype == torch.float32
    with pytest.raises(FedShuffleError, match=r"base of torch.bfloat16 and adapters of torch"):
        fedex(copy.deepcopy(model))
    first = next(p for name, p in model.named_parameters() if "lora_A" in name)
    first.data = first.data.to(torch.bfloat16)
    with pytest.raises(FedShuffleError, match=r"mixes trainable parameters: .*lora_.*bfloat16"):
        train(model, text(), loss=losses.causal_lm, rounds=1)


@pytest.mark.parametrize(
    ("changed", "value", "says"),
    [
        (0, VOCABULARY, rf"the token {VOCABULARY}, .*from 0 to 23.*resize_token_embeddings"),
        (0, -100, "the token -100, "),
        (2, VOCABULARY + 5, rf"the label {VOCABULARY + 5}, and the model gives 24 outputs"),
    ],
)
def test_tokens_that_a_model_does_not_know_are_named_before_training(
    changed: int, value: int, says: str
) -> None:
    """As that of padding, if it was added to the tokenizer only; labels of -100 do not count."""
    fields = [torch.as_tensor(field).clone() for field in text().fields]
    fields[changed][-1, -1] = value
    federation = Federation.from_arrays(*fields, sizes=SIZES)
    last = len(SIZES) - 1
    first = next(s for s in range(99) if last not in resolve("uniform:1", federation).draw(s, 0))
    more: dict[str, Any] = {"loss": losses.causal_lm, "rounds": 1, "sampling": "uniform:1"}
    with pytest.raises(FedShuffleError, match=f"^client 2 has {says}"):
        train(lora(), federation, seed=first, **more)


@pytest.mark.parametrize("prepare", [ffa, fedex])
def test_other_adapters_are_refused(prepare: Any) -> None:
    import peft

    config = partial(peft.LoraConfig, r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    dora = peft.get_peft_model(base("gpt2"), config(use_dora=True))
    with pytest.raises(FedShuffleError, match="use_dora"):
        prepare(dora)
    with pytest.raises(FedShuffleError, match=r"needs a model with LoRA adapters, and GPT2LM"):
        prepare(base("gpt2"))


@pytest.mark.parametrize("target", [{"target_modules": ["0"]}, {"target_parameters": ["1.weight"]}])
def test_layers_that_do_not_multiply_by_their_weight_are_refused(target: Any) -> None:
    """An embedding as square as a linear layer, and a wrapped parameter."""
    import peft

    square = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    model = peft.get_peft_model(square, peft.LoraConfig(**{"r": 2, "target_modules": []} | target))
    with pytest.raises(FedShuffleError, match=r"layer '.*' is no linear layer"):
        fedex(model)


def test_examples_without_a_mask_or_with_more_fields() -> None:
    tokens = torch.as_tensor(text().fields[0])
    pairs = Federation.from_arrays(tokens, tokens, sizes=SIZES)
    train(lora(), pairs, loss=losses.causal_lm, rounds=1)
    four = Federation.from_arrays(tokens, tokens, tokens, tokens, sizes=SIZES)
    with pytest.raises(FedShuffleError, match=r"4 fields.*input_ids, attention_mask and labels"):
        train(lora(), four, loss=losses.causal_lm, rounds=1)
    with pytest.raises(FedShuffleError, match="gives Tensor, which has no logits"):
        train(Plain(), text(), loss=losses.causal_lm, rounds=1)
    classes: dict[str, Any] = {"loss": losses.sequence_classification, "rounds": 1}
    several = lora(classes=3)
    several.config.problem_type = "multi_label_classification"
    with pytest.raises(FedShuffleError, match="is for multi_label_classification, and this loss"):
        train(several, text(classes=3), **classes)
    with pytest.raises(FedShuffleError, match=r"gives SequenceClassifierOutput.*causal_lm"):
        train(lora(classes=3), text(classes=3), **classes | {"loss": losses.cross_entropy})


def test_adapters_that_do_not_act_are_refused() -> None:
    merged = lora()
    merged.merge_adapter()
    with pytest.raises(FedShuffleError, match="adapters, they must be active, and not merged"):
        train(merged, text(), loss=losses.causal_lm, rounds=1)
    for prepare in (fedex, flora):
        with pytest.raises(FedShuffleError, match=r"no adapter trains .*is_trainable=True"):
            prepare(lora().requires_grad_(False))


EXAMPLE = Path(__file__).parents[2] / "examples" / "lora" / "train.py"


def checkpoint(folder: Path, kind: str) -> Path:
    """A model and a tokenizer in a folder, as save_pretrained writes them."""
    import tokenizers
    import transformers

    words = {word: k for k, word in enumerate(["<pad>", *"0123456789"])}
    by_word = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    by_word.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=by_word, pad_token="<pad>")
    fast.save_pretrained(folder)
    base(kind, time=16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("variant", "local"), [("fedex", ""), ("ffa", "llama"), ("fedex", "gpt2")])
def test_the_example_runs_offline(
    variant: str,
    local: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train.py", "--variant", variant, "--rounds", "5", "--out", str(tmp_path / "out")]
    words += ["--checkpoint", str(checkpoint(tmp_path / "model", local))] if local else []
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().out
    assert "perplexity" in said
    assert ("separate averages" in said) == (variant == "fedex")
    assert (tmp_path / "out" / "adapters" / "adapter_model.safetensors").exists()
    assert (tmp_path / "out" / "base").exists() == (variant == "fedex")


def test_the_example_names_a_folder_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--checkpoint", "nowhere"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "there is no folder 'nowhere'" in capsys.readouterr().err
