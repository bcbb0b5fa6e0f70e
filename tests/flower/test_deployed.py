"""Runs on real clients in separate processes, over TLS, some of them killed; and the same app in
Flower's own simulator.
"""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedshuffle import Federation, losses, train
from fedshuffle.engines import Problem
from fedshuffle.engines.sequential import SequentialEngine
from fedshuffle.flower.local import COMPLETED, Deployment, available_port, write_node_key
from fedshuffle.training.rounds import Run, simulate
from fedshuffle.training.run_folder import RunFolder
from fedshuffle.transforms import channel
from tests.flower.deployment import CLIENTS, restart_killed_node
from tests.flower.quickstart_app import BEFORE, counted, migrate, shares
from tests.processes import LOOPBACK, PATIENCE, listening, wait_for, with_environment

APP = Path(__file__).parent / "app"

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looks into Linux's /proc"
)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(APP))
    yield importlib.import_module("under_test.task")
    for name in [name for name in sys.modules if name.startswith("under_test")]:
        del sys.modules[name]


def simulated(task: Any, rounds: int, method: str, engine: str = "sequential") -> nn.Module:
    federation = Federation.from_arrays(*task.everything(), sizes=task.SIZES)
    settings = {**task.SETTINGS, "method": method, "engine": engine}
    loss = losses.cross_entropy
    return train(task.model(), federation, loss=loss, rounds=rounds, **settings).model


def assert_same(out: Path, expected: nn.Module) -> None:
    """Bit for bit."""
    found = load_file(out / "model.safetensors")
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


def test_killed_client_is_asked_again(deployment: Deployment, task: Any, tmp_path: Path) -> None:
    """Exact MVR; the node of client 1 dies in the local training of the second round."""
    out = tmp_path / "out"
    config = {"method": "fedshuffle-mvr", "retries": 2, "waits": 1}
    with ThreadPoolExecutor() as pool:
        run = pool.submit(deployment.run, APP, {**config, "marks": str(tmp_path), "out": str(out)})
        wait_for(lambda: (tmp_path / "waiting").exists() or run.done(), "the client to wait")
        assert not run.done()
        restart_killed_node(deployment, 1)
        assert run.result(PATIENCE) == COMPLETED
    deployment.await_online(CLIENTS)
    assert_same(out, simulated(task, 2, "fedshuffle-mvr"))
    assert [record["missing"] for record in RunFolder(out).metrics()] == [{}, {}]
    for name, value in simulated(task, 2, "fedshuffle-mvr", "reference").state_dict().items():
        found = load_file(out / "model.safetensors")[name]
        assert torch.allclose(found, value, rtol=1e-4, atol=1e-6)


def test_killed_server_resumes(deployment: Deployment, task: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = {"dies": True, "marks": str(tmp_path), "out": str(out)}
    deployment.submit(APP, config)
    wait_for(lambda: (tmp_path / "died").exists(), "the server to die")
    assert deployment.run(APP, {**config, "resume": True}) == COMPLETED
    assert_same(out, simulated(task, 2, "fedshuffle"))
    assert [record["round"] for record in RunFolder(out).metrics()] == [1, 2]


def test_clients_keep_their_state(deployment: Deployment, task: Any, tmp_path: Path) -> None:
    """Error feedback: what a node keeps lasts until its next round, in another process."""
    out, link = tmp_path / "out", channel("topk:0.1+ef")
    assert link is not None
    config = {"channel": str(link), "marks": str(tmp_path), "out": str(out)}
    assert deployment.run(APP, config) == COMPLETED
    federation = Federation.from_arrays(*task.everything(), sizes=task.SIZES)
    run = Run(federation, "fedshuffle", **task.SETTINGS, transforms=[link])
    first, second = (run.cohort(k).clients.tolist() for k in range(2))
    assert {*first} & {*second}
    problem = Problem(task.model(), losses.cross_entropy, federation)
    *_, (state,) = simulate(SequentialEngine(problem), [run], 2)
    assert_same(out, problem.load(state.x))


def test_secure_aggregation(deployment: Deployment, task: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = {"secure": True, "rounds": 1, "marks": str(tmp_path), "out": str(out)}
    assert deployment.run(APP, config) == COMPLETED
    (record,) = RunFolder(out).metrics()
    assert (record["replied"], record["missing"]) == (2, {})
    found = load_file(out / "model.safetensors")
    for name, value in simulated(task, 1, "fedshuffle").state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


COUNTED_AFTER = [8 / 96, 24 / 96, 64 / 96]
"""How much each client counts in the app of docs/how-to/migrate-a-flower-app.md."""


def test_the_migrated_quickstart_is_right(deployment: Deployment, tmp_path: Path) -> None:
    config = {"num-server-rounds": 1, "out": str(tmp_path / "out")}
    assert deployment.run(migrate(tmp_path / "app"), config) == COMPLETED
    assert shares(tmp_path / "out") == pytest.approx(COUNTED_AFTER, rel=1e-5)


def invalid_nodes(deployment: Deployment) -> dict[str, tuple[list[str], str]]:
    """Commands of nodes that must not get in, and the error of each."""

    def node(without: Sequence[str] = (), *instead: str) -> list[str]:
        command = deployment.node_command(0)  # each with its own port
        for option in without:
            at = command.index(option)
            del command[at : at + 2]
        return [*command, *instead]

    authority, key = "--root-certificates", "--auth-supernode-private-key"
    other = str(deployment.keys / "other.key")
    write_node_key(Path(other))
    return {
        "unregistered": (node([key], key, other), "Failed to activate SuperNode"),
        "keyless": (node([key]), "must be registered"),
        "plaintext": (node([authority, key], "--insecure"), "Connection reset|disconnected"),
        "without-authority": (node([authority]), "CERTIFICATE_VERIFY_FAILED"),
        "twin": (node(), "Failed to activate SuperNode"),
    }


def test_invalid_nodes_are_refused(deployment: Deployment) -> None:
    tried = {
        name: (deployment.start(name, *words, "--max-retries", "1"), error)
        for name, (words, error) in invalid_nodes(deployment).items()
    }
    for name, (process, error) in tried.items():
        assert process.wait(PATIENCE) != 0
        said = (deployment.logs / f"{name}.log").read_text()
        assert re.search(error, said), said
        del deployment.processes[name]
    deployment.await_online(CLIENTS)
    assert len(deployment.flwr("supernode", "list", "local")["nodes"]) == CLIENTS


@needs_proc
def test_processes_listen_on_this_machine_only(deployment: Deployment) -> None:
    heard = listening(with_environment(f"FLWR_HOME={deployment.folder}"))
    assert int(deployment.address.split(":")[1]) in {port for _, port in heard}
    assert len(heard) == 1 + CLIENTS
    assert {address for address, _ in heard} <= LOOPBACK


@needs_proc
def test_flowers_simulator_gives_the_same_model(
    simulator: Callable[[Path, str], str], task: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    said = simulator(APP, f'method="fedshuffle-mvr" marks="{tmp_path}" out="{out}"')
    assert (out / "model.safetensors").exists(), said
    assert_same(out, simulated(task, 2, "fedshuffle-mvr"))


@needs_proc
@pytest.mark.parametrize("migrated", [False, True])
def test_quickstart_is_biased_before_and_right_after(
    simulator: Callable[[Path, str], str], migrated: bool, tmp_path: Path
) -> None:
    app, out = migrate(tmp_path / "app") if migrated else BEFORE, tmp_path / "out"
    said = simulator(app, f'num-server-rounds=1 out="{out}"')
    assert out.exists(), said
    assert shares(out) == pytest.approx(COUNTED_AFTER if migrated else counted(), rel=1e-5)


@needs_proc
def test_quickstart_trains_without_rounds(
    simulator: Callable[[Path, str], str], tmp_path: Path
) -> None:
    """Flower's own grid suffices; who comes when is not fixed, and so neither are the shares."""
    app, out = migrate(tmp_path / "app"), tmp_path / "out"
    server = app / "quickstart" / "server_app.py"
    text = server.read_text(encoding="utf-8")
    text = text.replace("ConsistentFedAvg(fraction_train=fraction_train", 'FedBuff("fedbuff:K=3"')
    text = text.replace("ConsistentFedAvg", "ConsistentFedBuff as FedBuff")
    server.write_text(text, encoding="utf-8")
    said = simulator(app, f'num-server-rounds=4 out="{out}"')
    assert out.exists(), said
    assert re.findall(r"server step (\d):", said) == ["1", "2", "3", "4"]


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, str], str]]:
    """Flower's simulator: a function that runs an app and returns what it printed."""
    folder = tmp_path_factory.mktemp("simulator")
    scripts = Path(sys.executable).parent
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(available_port()),
        "RAY_ADDRESS": "local",  # or it would join another cluster of this machine
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]]),
    }
    (folder / "token").write_text("5e" * 32)
    (folder / "token").chmod(0o600)

    def run(app: Path, config: str) -> str:
        words = [str(scripts / "flwr"), "run", str(app), "local", "--stream"]
        words += ["--federation-config", f"num-supernodes={CLIENTS}", "-c", config]
        for _ in range(5):  # Flower gives its SuperLink 15 seconds, too few on a busy machine
            done = subprocess.run(
                words, env=environment, cwd=folder, text=True, capture_output=True, timeout=PATIENCE
            )
            said = done.stdout + done.stderr
            if "Failed to start local SuperLink" not in said:
                break
        return said

    try:
        yield run
    finally:
        home = f"FLWR_HOME={folder}"
        for pid in with_environment(home):  # Flower leaves a SuperLink behind
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not with_environment(home), "the SuperLink to end")
