"""Fine-tune a small language model by LoRA, over clients that hold different amounts of text.

    python train.py                              # a tiny model with random weights
    python train.py --checkpoint ./my-model      # a model and tokenizer in a local folder
    python train.py --variant fedex --out ./adapters

Nothing is downloaded. The adapters are saved in the format of peft.
"""

import argparse
import copy
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
import transformers

from fedshuffle import Evaluation, Federation, LocalWork, audit, losses, train
from fedshuffle.finetuning import fedex, ffa, flora

LINES = {  # each client counts from elsewhere, and has its own amount of text
    f"client {start}": [
        " ".join(str((start + step * k) % 10) for k in range(12)) for step in range(1, many + 1)
    ]
    for start, many in enumerate([1, 2, 3, 5, 8])
}


class Characters:
    """Text as numbers, one per character; 0 is padding."""

    pad_token_id = 0

    def __call__(self, lines: list[str], **options: Any) -> dict[str, torch.Tensor]:
        ids = [torch.tensor([1 + "0123456789 ".index(one) for one in line]) for line in lines]
        tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}


def pretrained(checkpoint: Path | None) -> tuple[Any, Any]:
    """The model and the tokenizer of a local folder, or tiny ones with random weights."""
    if checkpoint is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        return model.float(), tokenizer  # the base in the precision of its adapters, for fedex
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        vocab_size=12, num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, **sizes
    )
    return transformers.AutoModelForCausalLM.from_config(config), Characters()


def clients(tokenizer: Any) -> Federation:
    """All lines of all clients; padding does not count."""
    lines = [line for own in LINES.values() for line in own]
    ids = [client for client, own in LINES.items() for _ in own]
    batch = tokenizer(lines, padding=True, return_tensors="pt")
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    labels = tokens.masked_fill(mask == 0, -100)
    return Federation.from_arrays(tokens, mask, labels, client_ids=ids)


def main() -> None:
    """Train the adapters, say what was measured, and save them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="a folder with a model and a tokenizer")
    parser.add_argument("--variant", choices=["lora", "ffa", "fedex", "flora"], default="fedex")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--step-size", type=float, default=0.5)
    parser.add_argument("--out", type=Path, help="a folder for the adapters")
    chosen = parser.parse_args()
    if chosen.checkpoint is not None and not chosen.checkpoint.is_dir():
        parser.error(f"there is no folder {str(chosen.checkpoint)!r}")

    base, tokenizer = pretrained(chosen.checkpoint)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    model = peft.get_peft_model(base, config).train()
    transforms = []
    if chosen.variant == "ffa":
        ffa(model)
    elif chosen.variant != "lora":
        transforms = [{"fedex": fedex, "flora": flora}[chosen.variant](model)]

    federation, work = clients(tokenizer), LocalWork(epochs=1, batch_size=2)
    sampling = "uniform:3"
    found = audit(federation, "fedshuffle", sampling, work)
    print(f"by the audit, the averages are those of the objective: {found.consistent}")
    result = train(
        model,
        federation,
        loss=losses.causal_lm,
        rounds=chosen.rounds,
        sampling=sampling,
        work=work,
        step_size=chosen.step_size,
        transforms=transforms,
        evaluate=Evaluation(federation, ["loss", "perplexity"], batch_size=8),
        evaluate_every=5,
    )
    first, last = result.history[0], result.history[-1]
    print(f"perplexity {last['perplexity']:.2f} after {last['round']} rounds")
    if "residual_share" in last:
        shares = [record["residual_share"] for record in result.history]
        print(f"separate averages would miss up to {max(shares):.1%} of a round's change")
    print(f"a round sends {first['bytes_up'] / first['clients'] / 1e3:.1f} kB per client")
    if chosen.out is not None:
        trained: Any = copy.deepcopy(result.model)
        trained.save_pretrained(chosen.out / "adapters")
        if transforms:  # the base has changed as well
            trained.unload().save_pretrained(chosen.out / "base")
        print(f"saved in {chosen.out}")


if __name__ == "__main__":
    main()
