"""Runs on real clients: processes of their own, over TLS, some of which are killed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedshuffle import Federation, losses, train
from fedshuffle.flower.local import Deployment
from fedshuffle.runs import RunFolder
from tests.processes import PATIENCE, wait_for

APP = Path(__file__).parent / "flower_app"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(APP))
    yield importlib.import_module("under_test.task")
    for name in [name for name in sys.modules if name.startswith("under_test")]:
        del sys.modules[name]


def simulated(task: Any, rounds: int, method: str, engine: str = "lean") -> nn.Module:
    federation = Federation.from_arrays(*task.everything(), sizes=task.SIZES)
    settings = {**task.SETTINGS, "method": method, "engine": engine}
    loss = losses.cross_entropy
    return train(task.model(), federation, loss=loss, rounds=rounds, **settings).model


def assert_same(out: Path, expected: nn.Module) -> None:
    """Bit for bit."""
    found = load_file(out / "model.safetensors")
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


def wait_for_mark(deployment: Deployment, run: str, mark: Path) -> None:
    """Wait until the app of a run says by a file that it is there."""
    stream = deployment.stream(run)
    wait_for(lambda: mark.exists() or stream.exit_code is not None, mark.name)
    assert mark.exists(), stream.output()
    stream.kill()


def test_a_client_killed_in_the_middle_is_asked_again_when_it_is_back(
    deployment: Deployment, task: Any, tmp_path: Path
) -> None:
    """Exact MVR, with its probes; the node of client 1 dies in the walk of the second round."""
    out = tmp_path / "out"
    config = {"method": "fedshuffle-mvr", "retries": 2, "waits": 1}
    run = deployment.begin(APP, {**config, "marks": str(tmp_path), "out": str(out)})
    wait_for_mark(deployment, run, tmp_path / "waiting")
    deployment.kill_node(1)
    deployment.restart_node(1)
    ended = deployment.follow(run, seconds=PATIENCE)
    assert ended.completed, ended.log
    deployment.await_online()
    assert_same(out, simulated(task, 2, "fedshuffle-mvr"))
    assert [record["missing"] for record in RunFolder(out).metrics()] == [{}, {}]
    for name, value in simulated(task, 2, "fedshuffle-mvr", "loop").state_dict().items():
        found = load_file(out / "model.safetensors")[name]
        assert torch.allclose(found, value, rtol=1e-4, atol=1e-6)


def test_a_server_killed_in_the_middle_goes_on(
    deployment: Deployment, task: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    config = {"dies": True, "marks": str(tmp_path), "out": str(out)}
    run = deployment.begin(APP, config)
    wait_for_mark(deployment, run, tmp_path / "died")
    again = deployment.run(APP, {**config, "resume": True}, seconds=PATIENCE)
    assert again.completed, again.log
    assert_same(out, simulated(task, 2, "fedshuffle"))
    assert [record["round"] for record in RunFolder(out).metrics()] == [1, 2]
