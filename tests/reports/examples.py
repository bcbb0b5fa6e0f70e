"""Results of comparisons that never ran, for the tests of their report."""

from typing import Any

ROUNDS = 4
EVIL = "<script>document.title='owned'</script>"
NASTY = f"""A & B | 50% of $x$ _{{i}}_ "'`*~^#\\ {EVIL}"""


def run(seed: int, *values: float | None, rounds: int = ROUNDS, **facts: Any) -> dict[str, Any]:
    """A run evaluated in its last rounds, with these accuracies."""
    history: list[dict[str, Any]] = [
        {"round": k, "total_steps": 5 * k * seed} for k in range(1, rounds + 1)
    ]
    for record, value in zip(history[rounds - len(values) :], values, strict=True):
        loss = None if value is None else 2 - value
        record.update(accuracy=value, loss=loss, training_loss=loss and loss - 0.25)
    rest = {"folder": f"runs/{seed}", "diverged": False, "small_decile": {}}
    return {"seed": seed, **rest, "history": history, **facts}


def curve(method: str, *runs: dict[str, Any], **facts: Any) -> dict[str, Any]:
    label = {"fedavg": "FedAvg", "fedshuffle": "FedShuffle", "fednova": "FedNova"}.get(
        method, method
    )
    consistent = method == "fedshuffle"
    return {
        "method": method,
        "label": label,
        "settings": {},
        "momentum": "none",
        "group": "own",
        "step_size": facts.get("step_size", 0.3),
        "server_step_size": 1.0,
        "client_step_sizes": [facts.get("step_size", 0.3)] * 2,
        "weight_decay": 0.0,
        "clip": None,
        "tuning": [],
        "audit": {
            "consistent": consistent,
            "objective_weights": [1 / 6, 2 / 6, 3 / 6],
            "effective_weights": [1 / 6, 2 / 6, 3 / 6] if consistent else [1 / 14, 4 / 14, 9 / 14],
        },
        "runs": list(runs),
        **facts,
    }


def results(*curves: dict[str, Any], **facts: Any) -> Any:
    seeds = sorted({run["seed"] for curve in curves for run in curve["runs"]})
    metric = facts.get("metric", "accuracy")
    return {
        "title": "A comparison",
        "command": "fedshuffle compare compare.toml --out out",
        "config": "[compare]\nseeds = [1, 2]\n",
        "complete": True,
        "seconds": 61.0,
        "rounds": ROUNDS,
        "metric": metric,
        "higher_is_better": metric == "accuracy",
        "majority": None,
        "judge": {"metric": metric, "higher_is_better": metric == "accuracy"},
        "federation": {"clients": 3, "examples": 6, "sizes": [1, 2, 3]},
        "settings": {"work": "batch_size 32", "seeds": seeds, "tuning": "loss"},
        "versions": {"fedshuffle": "0.1.0"},
        "curves": list(curves),
        "warnings": [],
        **facts,
    }


def trial(step_size: float, value: float | None, diverged: bool = False, **facts: Any) -> Any:
    rest = {"server_step_size": 1.0, "weight_decay": 0.0, "clip": None, "added": False}
    facts = {**rest, **facts}
    return {"step_size": step_size, "value": value, "diverged": diverged, **facts}


def misleading() -> Any:
    """One method at an edge of the grid, one that diverged, one no better than guessing."""
    tried = [trial(0.1, 0.4), trial(0.3, 0.5)]
    return results(
        curve("fedavg", run(1, 0.9), tuning=tried, client_step_sizes=[0.3, 0.3]),
        curve("fednova", run(1, 0.9, diverged=True)),
        curve("fedshuffle", run(1, 0.73), client_step_sizes=[0.3, 13.2]),
        majority={"share": 0.72, "standard_error": 0.02},
    )


def whole() -> Any:
    """Three methods, two momenta, two groups, two seeds, and texts that want to break out."""
    rounds = 20
    curves = []
    for group in ("own", "common:0.1"):
        for momentum in ("none", "global:0.1"):
            for k, method in enumerate(("fedavg", "fedshuffle", f"mine,{EVIL}")):
                base = 0.3 + 0.1 * k + 0.05 * (momentum != "none")
                runs = [
                    run(
                        seed,
                        *(base * (1 - 0.8**r) + 0.01 * seed for r in range(1, rounds + 1)),
                        rounds=rounds,
                        folder=f"runs/{EVIL}",
                        small_decile={"accuracy": base - 0.01 * seed},
                    )
                    for seed in (1, 2)
                ]
                if k == 0 and momentum != "none":
                    runs[1] = run(2, 0.2, 0.1, None, rounds=10, diverged=True)
                label = NASTY if k == 2 else ("FedAvg", "_FedShuffle$")[k]
                tried = [trial(0.1, 0.2), trial(0.3, 0.3, clip=5.0), trial(1.0, None, True)]
                tried += [trial(0.3, 0.25, server_step_size=size) for size in (0.5, 2.0)]
                facts = {"momentum": momentum, "group": group, "label": label, "tuning": tried}
                own = {"method": "fedavg", EVIL: EVIL} if k == 2 else {}
                curves.append(curve(method, *runs, settings=own, **facts))
    return results(
        *curves,
        title=f"Everything {EVIL}",
        command=f"fedshuffle compare '{EVIL}'",
        config=f"# {EVIL}\n</code></pre></script>",
        settings={EVIL: EVIL, "seeds": [1, 2], "tuning": EVIL},
        versions={EVIL: EVIL},
        rounds=rounds,
        complete=False,
    )
