"""Memory and time of LoRA rounds over a frozen base of 100 million parameters.

The base is a transformer with random weights, of which the adapters are 0.1%. What a round takes
beyond the model is compared with the adapters and with what a bare loop of torch takes for one
step: its activations. Every measurement is a process of its own.

    python benchmarks/finetuning.py
    python benchmarks/finetuning.py --fedex    # FedEx-LoRA, where the base is not frozen
    python benchmarks/finetuning.py --layers 2 --width 128 --vocabulary 1000   # a quick look
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import peft
import torch
import transformers

from fedshuffle import Federation, LocalWork, Simulation, losses
from fedshuffle.finetuning import fedex

CLIENTS, EXAMPLES = 4, 2  # one step of two sequences each
MB = 2**20


def adapted(options: argparse.Namespace) -> Any:
    """A base with random weights, with adapters of rank 1 for queries and values."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        max_position_embeddings=options.time,
        use_cache=False,
    )
    base = transformers.AutoModelForCausalLM.from_config(config)
    targets = ["q_proj", "v_proj", "down_proj", "up_proj"]
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=options.rank, target_modules=targets)
    return peft.get_peft_model(base, lora).train()


def text(options: argparse.Namespace) -> list[torch.Tensor]:
    tokens = torch.randint(1, options.vocabulary, (CLIENTS * EXAMPLES, options.time))
    return [tokens, torch.ones_like(tokens), tokens]


def peak() -> float:
    """The largest resident memory of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 1024 if sys.platform != "darwin" else used / MB


def bare(options: argparse.Namespace) -> dict[str, float]:
    """A loop of torch: the same clients' steps, one after another, on one model."""
    model, fields = adapted(options), text(options)
    before, trained = peak(), [p for p in model.parameters() if p.requires_grad]
    start, seconds = [p.detach().clone() for p in trained], []
    for _ in range(options.rounds):
        begun, total = time.perf_counter(), [torch.zeros_like(p) for p in start]
        for client in range(CLIENTS):
            rows = slice(client * EXAMPLES, (client + 1) * EXAMPLES)
            with torch.no_grad():
                torch._foreach_copy_(trained, start)
            loss = losses.causal_lm(model, *(field[rows] for field in fields))
            for parameter, gradient in zip(
                trained, torch.autograd.grad(loss, trained), strict=True
            ):
                parameter.data.add_(gradient, alpha=-0.1)
            for mean, parameter, old in zip(total, trained, start, strict=True):
                mean.add_(parameter.detach() - old, alpha=1 / CLIENTS)
        torch._foreach_add_(start, total)
        seconds.append(time.perf_counter() - begun)
    return _facts(model, before, min(seconds))


def rounds(options: argparse.Namespace) -> dict[str, float]:
    """The same by fedshuffle."""
    model = adapted(options)
    federation = Federation.from_arrays(*text(options), sizes=[EXAMPLES] * CLIENTS)
    before, seconds = peak(), []
    settings: dict[str, Any] = {"transforms": [fedex(model)] if options.fedex else []}
    settings |= {"loss": losses.causal_lm, "work": LocalWork(batch_size=EXAMPLES)}
    with Simulation(model, federation, **settings) as sim:
        state = sim.init()
        for _ in range(options.rounds):
            state, record = sim.step(state)
            seconds.append(record["seconds"])
        sim.settings(options.rounds)  # hashes what is frozen
        sim.model(state)
    return _facts(model, before, min(seconds))


def _facts(model: Any, before: float, seconds: float) -> dict[str, float]:
    sizes = {name: p.nbytes / MB for name, p in model.named_parameters()}
    adapters, whole = sum(sizes[name] for name in sizes if "lora_" in name), sum(sizes.values())
    return {"model": whole, "adapters": adapters, "beyond": peak() - before, "seconds": seconds}


def main() -> None:
    """Measure both, and print what a round takes beyond the model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=704)
    parser.add_argument("--vocabulary", type=int, default=5000)
    parser.add_argument("--time", type=int, default=64)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fedex", action="store_true")
    parser.add_argument("--part", choices=["bare", "rounds"])
    options = parser.parse_args()
    if options.part:
        print(json.dumps({"bare": bare, "rounds": rounds}[options.part](options)))
        return
    found = {}
    for part in ("bare", "rounds"):
        command = [sys.executable, "-W", "ignore", *sys.argv, "--part", part]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=one_thread
        )
        found[part] = json.loads(done.stdout.splitlines()[-1])
    bare_, ours = found["bare"], found["rounds"]
    share = ours["adapters"] / ours["model"]
    print(f"model {ours['model']:.0f} MB, adapters {ours['adapters']:.2f} MB ({share:.2%})")
    print(f"{'':12} {'beyond the model':>18} {'seconds per round':>18}")
    for name, one in found.items():
        print(f"{name:12} {one['beyond']:15.0f} MB {one['seconds']:18.2f}")
    print(
        f"fedshuffle takes {ours['beyond'] / bare_['beyond']:.2f} times the memory"
        f" and {ours['seconds'] / bare_['seconds']:.2f} times the time of a bare loop"
    )


if __name__ == "__main__":
    main()
