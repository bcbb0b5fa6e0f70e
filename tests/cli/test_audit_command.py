"""The command ``fedshuffle audit``: where clients come from, names, and the exit code."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedshuffle import Federation, audit
from tests.cli.test_cli import audit as audited
from tests.cli.test_cli import run

Monkey = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]

CONFIG = """
rounds = 3
method = "fedavg-rr"
sampling = "uniform:2"
loss = "squared_error"
model = "torch.nn:Identity"

[data]
store = "people"

[work]
epochs = 2
batch_size = 2
interruption = "at-most:2"
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    names = ["<b>zoe</b>", "ann", "ann", "bob", "bob", "bob", "bob"]
    people = Federation.from_arrays(np.arange(7.0), client_ids=names, weights=[1, 1, 2])
    people.save(tmp_path / "people")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path / "people"


def test_the_clients_of_a_store(store: Path, monkeypatch: Monkey, capsys: Printed) -> None:
    clients = Federation.open(store)
    result = audited(monkeypatch, capsys, "--data", str(store), "--method", "fedavg-rr")
    want = audit(clients, "fedavg-rr")
    assert result["effective_weights"] == want.effective_weights.tolist()
    assert result["objective_weights"] == [0.25, 0.25, 0.5]
    assert result["client_ids"] == ["<b>zoe</b>", "ann", "bob"]
    words = ["--data", str(store), "--weights", "1,2,4"]
    assert audited(monkeypatch, capsys, *words)["objective_weights"] == [1 / 7, 2 / 7, 4 / 7]


def test_a_config_gives_data_method_sampling_and_work(
    store: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    from fedshuffle import AtMost, LocalWork

    config = str(store.parent / "run.toml")
    work = LocalWork(epochs=2, batch_size=2, interruption=AtMost(2))
    clients = Federation.open(store)
    result = audited(monkeypatch, capsys, "--config", config)
    assert result == audit(clients, "fedavg-rr", "uniform:2", work).to_dict()
    other = audited(
        monkeypatch, capsys, "--config", config, "--method", "fedshuffle", "--sampling", "full"
    )
    assert other == audit(clients, "fedshuffle", "full", work).to_dict()


@pytest.mark.parametrize("rule", ["estimate", "estimate:fedau:3", "estimate:ewma:0.1"])
def test_estimated_probabilities(
    rule: str, store: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    """On the command line, and from a config: what the run minimises in a long run."""
    clients, there = Federation.open(store), "independent:0.9,0.5,0.2"
    want = audit(clients, "fedshuffle", availability=there, probabilities=rule)
    p = np.array([0.9, 0.5, 0.2])
    limit = {"estimate": p, "estimate:fedau:3": p / (1 - (1 - p) ** 3)}.get(rule)
    if limit is not None:
        raw = clients.weights * p / limit
        np.testing.assert_allclose(want.effective_weights, raw / raw.sum(), atol=1e-12)
    assert want.consistent is (rule == "estimate")
    words = ["--method", "fedshuffle", "--probabilities", rule, "--availability", there]
    told = audited(monkeypatch, capsys, "--data", str(store), *words)
    assert told == want.to_dict()
    assert told.keys() == audited(monkeypatch, capsys, "--data", str(store)).keys()
    config = store.parent / "estimated.toml"
    config.write_text(
        'rounds = 3\nmethod = "fedshuffle"\nloss = "squared_error"\nmodel = "torch.nn:Identity"\n'
        f'availability = "{there}"\nprobabilities = "{rule}"\n[data]\nstore = "people"\n'
    )
    assert audited(monkeypatch, capsys, "--config", str(config)) == told
    known = audited(monkeypatch, capsys, "--config", str(config), "--probabilities", "estimate")
    assert known["consistent"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "fedavg"], "fedavg does not divide by inclusion probabilities"),
        (["--callable", "math:fsum"], "--probabilities changes nothing"),
    ],
)
def test_probabilities_that_are_not_used(
    words: list[str], message: str, monkeypatch: Monkey, capsys: Printed
) -> None:
    assert run(monkeypatch, "audit", "--sizes", "1,2", "--probabilities", "estimate", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--sizes", "1,2"], ["--epochs", "2"], ["--data", "people"]])
def test_what_a_config_says_is_not_said_twice(
    more: list[str], store: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    assert run(monkeypatch, "audit", "--config", str(store.parent / "run.toml"), *more) == 2
    assert more[0] in capsys.readouterr().err


def test_a_server_is_audited_with_the_clients_of_a_store_or_a_config(
    store: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    (store.parent / "servers.py").write_text(
        "def mean(clients, sizes, updates):\n    return updates.mean(axis=0)\n"
    )
    monkeypatch.chdir(store.parent)
    by_data = audited(
        monkeypatch, capsys, "--data", "people", "--callable", "servers:mean",
        *["--sampling", "uniform:2", "--epochs", "1"],
    )  # fmt: skip
    by_config = audited(monkeypatch, capsys, "--config", "run.toml", "--callable", "servers:mean")
    assert by_data["client_ids"] == by_config["client_ids"] == ["<b>zoe</b>", "ann", "bob"]
    # Steps 1, 2 and 4; with the config's batches of two, two epochs and the limit: 2, 2 and 2.
    np.testing.assert_allclose(by_data["effective_weights"], np.array([1, 2, 4]) / 7)
    np.testing.assert_allclose(by_config["effective_weights"], np.full(3, 1 / 3))


@pytest.mark.parametrize("words", [["--sizes", "1,2", "--data", "people"], []])
def test_clients_come_from_one_place(
    words: list[str], store: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    monkeypatch.chdir(store.parent)
    assert run(monkeypatch, "audit", *words) == 2
    assert "--data" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "code"), [("fedavg-rr", 1), ("fedshuffle", 0)])
def test_the_exit_code_of_a_check(
    method: str, code: int, monkeypatch: Monkey, capsys: Printed
) -> None:
    words = ["--sizes", "1,2,3", "--method", method]
    assert run(monkeypatch, "audit", *words) == 0
    assert run(monkeypatch, "audit", *words, "--check") == code
    capsys.readouterr()
    assert run(monkeypatch, "audit", *words, "--check", "--json") == code
    assert json.loads(capsys.readouterr().out)["consistent"] == (code == 0)


@pytest.mark.parametrize("more", [[], ["--callable", "math:fsum"]])
def test_no_draws_are_refused(more: list[str], monkeypatch: Monkey, capsys: Printed) -> None:
    assert run(monkeypatch, "audit", "--sizes", "1,2,3", "--draws", "0", *more) == 2
    assert "draws is 0" in capsys.readouterr().err


def test_names_stand_in_the_table(store: Path, monkeypatch: Monkey, capsys: Printed) -> None:
    assert run(monkeypatch, "audit", "--data", str(store)) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ["<b>zoe</b>", "ann", "bob"])


def test_the_client_that_is_furthest_off_is_named_also_among_many(
    tmp_path: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    names = np.repeat([f"site {i:03}" for i in range(100)], np.arange(1, 101))
    Federation.from_arrays(np.zeros(len(names)), client_ids=names).save(tmp_path / "sites")
    assert run(monkeypatch, "audit", "--data", str(tmp_path / "sites")) == 0
    assert "client site 000 counts 0.0149 times" in " ".join(capsys.readouterr().out.split())


def test_a_function_is_audited(monkeypatch: Monkey, capsys: Printed, tmp_path: Path) -> None:
    (tmp_path / "my_server_under_audit.py").write_text(
        "def mean(clients, sizes, updates):\n    return updates.mean(axis=0)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["--callable", "my_server_under_audit:mean", "--sizes", "1,2,3", "--batch-size", "9"]
    assert run(monkeypatch, "audit", *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(told["effective_weights"], [1 / 3] * 3)
    assert told["consistent"] is False
    assert run(monkeypatch, "audit", *words, "--sampling", "uniform:2") == 0
    text = capsys.readouterr().out
    assert "weighted all alike" in text
    assert "how many examples" in text


def test_a_log_is_audited(monkeypatch: Monkey, capsys: Printed, tmp_path: Path) -> None:
    path = tmp_path / "rounds.csv"
    rows = [f"{r},{client},1,1,1" for r, client in enumerate("abab")]
    path.write_text("\n".join(["round,client,size,steps,weight", *rows]))
    assert run(monkeypatch, "audit", "--log", str(path)) == 0
    text = capsys.readouterr().out
    assert "a log of 4 rounds" in text
    assert "±" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--callable", "json:dumps"], "--sizes"),
        (["--callable", "json:dumps", "--log", "x.csv"], "one of"),
        (["--log", "x.csv", "--sizes", "1,2"], "--sizes"),
        (["--log", "no-such.csv"], "no-such.csv"),
        (["--callable", "json:dmps", "--sizes", "1,2"], "'dumps'"),
        (["--callable", "json:dumps", "--sizes", "1", "--step-sizes", "x"], "step-sizes"),
        (["--callable", "json:dumps", "--sizes", "1", "--method", "fedavg"], "--method"),
        (["--log", "x.csv", "--sampling", "full"], "--sampling"),
        (["--log", "x.csv", "--batch-size", "1"], "--batch-size"),
        (["--sizes", "1,2", "--step-sizes", "scaled"], "--step-sizes"),
        (["--flower", "", "--sizes", "1,2"], "import path"),
        ([], "--sizes"),
    ],
)
def test_unsuitable_options_are_refused(
    monkeypatch: Monkey,
    capsys: Printed,
    words: list[str],
    message: str,
) -> None:
    assert run(monkeypatch, "audit", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_flower_strategy_is_audited(monkeypatch: Monkey, capsys: Printed) -> None:
    words = ["--flower", "flwr.serverapp.strategy:FedAvg", "--sizes", "1,2,3"]
    assert run(monkeypatch, "audit", *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(told["effective_weights"], np.array([1, 4, 9]) / 14)


SERVER = """
import numpy as np
def server(clients, sizes, updates):
    updates = updates / np.maximum(1, np.linalg.norm(updates, axis=1, keepdims=True))
    return sizes / sizes.sum() @ updates + np.random.normal(0, 1 / 3, updates.shape[1])
"""


@pytest.mark.parametrize(("sizes", "code"), [("1,2,6", 1), ("2,2,2", 0)])
def test_the_privacy_of_a_server(
    sizes: str, code: int, tmp_path: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    (tmp_path / "private_server.py").write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    words = ["audit", "--privacy", "--callable", "private_server:server", "--sizes", sizes]
    words += ["--clip", "1", "--noise-multiplier", "1", "--check"]
    assert run(monkeypatch, *words) == code
    shown = capsys.readouterr().out
    assert ("does not hold" in shown) == bool(code)
    assert run(monkeypatch, *words[:-1], "--json") == 0
    assert json.loads(capsys.readouterr().out)["holds"] is not bool(code)


def test_whose_weight_was_cut_in_a_run(store: Path, monkeypatch: Monkey, capsys: Printed) -> None:
    folder = store.parent
    rows = {"client": [0, 1, 2], "update_norm": [1.0, 1.0, 2.0]}
    (folder / "metrics.jsonl").write_text(json.dumps({"round": 1, "per_client": rows}))
    words = ["audit", "--clipping", str(folder), "--clip", "1", "--json"]
    assert run(monkeypatch, *words, "--sizes", "1,1,1") == 0
    assert json.loads(capsys.readouterr().out)["effective_weights"] == [0.4, 0.4, 0.2]
    (folder / "run.toml").rename(folder / "config.toml")
    monkeypatch.chdir(folder)
    assert run(monkeypatch, *words) == 0  # the clients are those of the run's config
    assert json.loads(capsys.readouterr().out)["client_ids"] == ["<b>zoe</b>", "ann", "bob"]


TRAINED = """
rounds = 6
sampling = "uniform:2"
step_size = 0.05
record_clients = true
loss = "squared_error"

[model]
use = "torch.nn:Linear"
in_features = 3
out_features = 1

[data]
use = "own_clients:clients"

[privacy]
clip = 0.5
noise = 1.0
"""
OWN_CLIENTS = """
import torch
from fedshuffle import Federation

def clients():
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(10, 3, generator=rng)
    return Federation.from_arrays(inputs, 2 + inputs.sum(1, keepdim=True), sizes=[1, 3, 6])
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: Monkey, capsys: Printed) -> Path:
    (tmp_path / "own_clients.py").write_text(OWN_CLIENTS)
    (tmp_path / "run.toml").write_text(TRAINED)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "run", "run.toml", "--out", "out") == 0
    capsys.readouterr()
    return tmp_path / "out"


def test_whose_weight_was_cut_in_a_trained_run(
    trained: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    """By hand from the norms that the run recorded, which agree with what it clipped."""
    found = audited(monkeypatch, capsys, "--clipping", str(trained), "--clip", "0.5")
    kept: dict[int, list[float]] = {}
    for line in (trained / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        rows = record["per_client"]
        for client, norm, clipped in zip(
            record["cohort"], rows["update_norm"], rows["clipped"], strict=True
        ):
            assert clipped == (norm > 0.5)
            kept.setdefault(client, []).append(min(1.0, 0.5 / norm))
    raw = np.array([1, 3, 6]) * [np.mean(kept[client]) for client in range(3)]
    assert found["effective_weights"] == pytest.approx((raw / raw.sum()).tolist())
    assert found["times"] == [len(kept[client]) for client in range(3)]
    assert 0 < sum(found["clipped"]) <= 3
    assert run(monkeypatch, "audit", "--clipping", str(trained), "--clip", "0.5") == 0
    assert "of the updates were clipped" in capsys.readouterr().out


def test_the_norms_of_weighted_clipping_are_not_those_recorded(
    trained: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    config = trained / "config.toml"
    config.write_text(config.read_text().replace("weighted = false", "weighted = true"))
    assert run(monkeypatch, "audit", "--clipping", str(trained), "--clip", "0.5") == 2
    assert "times their weights" in capsys.readouterr().err


def test_a_config_gives_channel_and_privacy(
    trained: Path, monkeypatch: Monkey, capsys: Printed
) -> None:
    words = ["--config", str(trained / "config.toml")]
    found = audited(monkeypatch, capsys, *words)
    assert found["consistent"] is None
    assert "Clip(threshold=0.5" in found["findings"][0]["what"]
    found = audited(monkeypatch, capsys, *words, "--channel", "topk:0.5")
    assert found["consistent"] is False
    assert "TopK" in found["findings"][0]["what"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--clipping", "run", "--clip", "1"], "no config.toml that names the clients"),
        (["--clipping", "run", "--clip", "1", "--weights", "1,2"], "--weights changes nothing"),
        (["--privacy", "--sizes", "1,2", "--clip", "1"], "give --flower or --callable"),
        (["--privacy", "--callable", "a:b", "--sizes", "1,2"], "give --clip"),
        (["--clip", "1", "--sizes", "1,2"], "--clip changes nothing"),
        (["--noise-multiplier", "1", "--sizes", "1,2"], "--noise-multiplier changes nothing"),
        (["--clipping", "run", "--clip", "1", "--method", "fedavg"], "--method changes nothing"),
        (["--clipping", "run", "--sizes", "1"], "give --clip"),
    ],
)
def test_options_of_privacy_that_do_not_fit(
    words: list[str], error: str, monkeypatch: Monkey, capsys: Printed
) -> None:
    assert run(monkeypatch, "audit", *words) == 2
    assert error in capsys.readouterr().err
