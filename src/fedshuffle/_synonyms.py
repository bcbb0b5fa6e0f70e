"""Words that people bring from other libraries, and what is called so here."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_WORDS = {
    # Settings
    "step_size": "lr learning_rate eta gamma stepsize client_lr client_learning_rate local_lr",
    "server_step_size": "server_lr server_learning_rate global_lr eta_g",
    "method": "algorithm algo strategy optimizer optimiser aggregator",
    "rounds": "num_rounds n_rounds comm_rounds iterations max_rounds num_server_rounds",
    "epochs": "local_epochs num_epochs n_epochs",
    "steps": "local_steps local_iterations num_steps tau",
    "batch_size": "bs batch batchsize minibatch minibatch_size local_batch_size",
    "weight_decay": "wd l2 l2_reg decay",
    "clip": "clip_norm max_norm grad_clip gradient_clip gradient_clipping max_grad_norm",
    "order": "shuffle shuffling",
    "seed": "random_seed random_state rng",
    "data": "dataset datasets train_data training_data import download get show",
    "loss": "criterion objective loss_fn loss_function mse",
    "model": "network net arch architecture",
    "out": "output output_dir out_dir save_dir log_dir logdir dir",
    "engine": "backend runner simulator",
    "device": "gpu cuda accelerator",
    "sampling": "sampler participation client_sampling fraction fraction_fit cohort_size",
    "evaluation": "eval test validation",
    # Losses
    "squared_error": "mse mse_loss l2_loss mean_squared_error squared_loss",
    "cross_entropy": "ce crossentropy cross_entropy_loss nll nll_loss bce binary_cross_entropy"
    " bce_with_logits categorical_crossentropy softmax",
    # Metrics
    "accuracy": "acc categorical_accuracy",
    "auc": "auroc roc_auc roc rocauc",
    "f1": "f1_score binary_f1",
    "f1-macro": "macro_f1 f1_macro",
    "perplexity": "ppl",
    "top-1": "top1 top_1",
    "top-5": "top5 top_5",
    # Methods
    "fedavg": "federated_averaging fed_avg avg local_sgd localsgd",
    "fedadam": "adam fedopt",
    "fedadagrad": "adagrad",
    "fedyogi": "yogi",
    "fedavgm": "momentum fedmom",
    "fedprox": "prox fed_prox",
    "fednova": "nova fed_nova",
    "distributed-gd": "fedsgd gd",
    "pooled-sgd": "sgd centralized centralised",
    # Samplings
    "full": "all everyone",
    "uniform": "random",
    "independent": "bernoulli poisson",
    "importance": "weighted by_size",
    # Engines and devices
    "lean": "sequential serial threads multiprocessing parallel processes",
    "lanes": "vectorized vectorised vmap batched",
    "loop": "reference python",
    "cuda": "gpu",
    "mps": "metal",
    # Schedules
    "cosine": "cos cosine_annealing",
    "drops": "step multistep step_decay",
    "constant": "none fixed",
    "warmup:ROUNDS+SCHEDULE": "warmup warm_up linear_warmup",
    # Commands
    "run": "train fit start launch resume simulate",
    "new": "init create startproject",
    "methods": "list ls algorithms",
    "compare": "benchmark bench tune sweep grid",
    "audit": "check verify inspect weights",
    "conformance": "test validate",
    "get": "download fetch",
    "show": "ls list info describe",
    "import": "add load convert",
    "advise": "theory suggest recommend",
    "flower": "up deploy serve flwr",
    "reproduce": "paper figures experiment",
}
_REMARKS = {
    "mse": "It is half the squared distance, the mean over examples.",
    "bce": "It takes one output for each of the two classes.",
    "binary_cross_entropy": "It takes one output for each of the two classes.",
    "bce_with_logits": "It takes one output for each of the two classes.",
}


def nearest(name: str, known: Collection[str]) -> str | None:
    """What somebody may have meant by a name, among those that are known.

    >>> nearest("lr", ["rounds", "step_size"]), nearest("fedavgg", ["fedavg"]), nearest("x", [])
    ('step_size', 'fedavg', None)
    """
    word = name.lower().replace("-", "_")
    for ours, theirs in _WORDS.items():
        if ours in known and word in theirs.split():
            return ours
    near = difflib.get_close_matches(name, list(known), n=1)
    return near[0] if near else None


def hint(name: str, known: Collection[str]) -> str:
    """A sentence that asks whether the nearest of the known names was meant, or nothing.

    >>> hint("mse", ["cross_entropy", "squared_error"])
    " Did you mean 'squared_error'? It is half the squared distance, the mean over examples."
    """
    near = nearest(name, known)
    if near is None:
        return ""
    remark = _REMARKS.get(name.lower(), "") if near in ("squared_error", "cross_entropy") else ""
    return f" Did you mean {near!r}?" + (f" {remark}" if remark else "")
