"""A starter that runs at once, and the trained model of a run's folder."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedshuffle import (
    Federation,
    FedShuffleError,
    cli,
    config,
    load_model,
    losses,
    templates,
    train,
)

DATA = Federation.from_arrays(torch.eye(6), torch.arange(6) % 2, sizes=[1, 2, 3])


def equal(one: nn.Module, other: nn.Module) -> bool:
    states = one.state_dict(), other.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][k], states[1][k]) for k in states[0]
    )


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedshuffle", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_a_new_run_trains_at_once_and_its_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "new", "run", "mine") == 0
    said = capsys.readouterr().out
    assert "fedshuffle run mine/config.toml" in said
    assert command(monkeypatch, "run", "mine/config.toml", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["accuracy"] > 0.9
    worst = found["worst_clients"]
    assert [client["accuracy"] for client in worst] == sorted(c["accuracy"] for c in worst)
    assert str(worst[0]["client"]).startswith("clinic")
    assert (tmp_path / "mine/out/clients.csv").read_text().startswith("client,examples,loss,")

    # The model is the one that was evaluated last.
    model = load_model(found["out"])
    assert not model.training
    chosen = config.load("mine/config.toml")
    with chosen.importable():
        evaluate = chosen.inputs().evaluate
    assert evaluate is not None
    assert evaluate(model)["loss"] == pytest.approx(found["metrics"]["loss"])


def test_a_new_run_shows_who_is_served_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(templates.new_run(tmp_path / "mine") / "config.toml")
    assert command(monkeypatch, "run", file, "--rounds", "5") == 0
    shown = capsys.readouterr().out
    assert "worst accuracy" in shown
    assert "clinic" in shown
    assert "load_model" in shown


def test_a_folder_in_use_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "note").touch()
    with pytest.raises(FedShuffleError, match="not an empty folder"):
        templates.new_run(tmp_path)
    with pytest.raises(FedShuffleError, match="cannot write"):
        templates.new_run(tmp_path / "note" / "mine")


def made(frozen: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_without_a_config_needs_the_architecture(tmp_path: Path, frozen: bool) -> None:
    out, model = tmp_path / "run", made(frozen)
    result = train(model, DATA, loss=losses.cross_entropy, rounds=2, out=out)
    with pytest.raises(FedShuffleError, match="model="):
        load_model(out)
    other = made(frozen)
    if frozen:  # a checkpoint has only what is trained
        other.load_state_dict(model.state_dict())
    before = {k: v.clone() for k, v in other.state_dict().items()}
    assert equal(load_model(out, other), result.model)
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())
    with pytest.raises(FedShuffleError, match="other layers"):
        load_model(out, nn.Linear(6, 2))
    with pytest.raises(FedShuffleError, match="frozen" if frozen else "holds no run"):
        load_model(*(out, made(frozen)) if frozen else (tmp_path, made()))


def test_the_newest_parameters_are_loaded_where_a_run_was_stopped(tmp_path: Path) -> None:
    file = templates.new_run(tmp_path / "mine") / "config.toml"
    out = tmp_path / "out"
    config.load(file, {"rounds": 2}).run(out)
    old = (out / "model.safetensors").read_bytes()
    result = config.resume(out, rounds=4)
    (out / "model.safetensors").write_bytes(old)  # as if it had been killed before its end
    assert equal(load_model(out), result.model)
    (out / "model.safetensors").write_bytes(b"no model")
    with pytest.raises(FedShuffleError, match="cannot be read"):
        load_model(out)
    file.with_name("task.py").unlink()
    with pytest.raises(FedShuffleError, match=r"model=.*task"):
        load_model(out)


def test_a_frozen_base_is_not_stored_with_the_model(tmp_path: Path) -> None:
    file = templates.new_run(tmp_path / "mine") / "config.toml"
    task = file.with_name("task.py")
    returned = "    return nn.Sequential("
    frozen = "    made = nn.Sequential("
    text = task.read_text().replace(returned, frozen, 1)
    head, line, rest = text.partition("nn.Linear(hidden, 2))\n")
    task.write_text(f"{head}{line}    made[0].requires_grad_(False)\n    return made\n{rest}")
    out = tmp_path / "out"
    result = config.load(file, {"rounds": 2}).run(out)
    assert sorted(load_file(out / "model.safetensors")) == ["2.bias", "2.weight"]
    assert equal(load_model(out), result.model)
    task.write_text(
        task.read_text().replace("made[0].r", "nn.init.zeros_(made[0].weight); made[0].r")
    )
    with pytest.raises(FedShuffleError, match="frozen parameters or buffers"):
        load_model(out)
