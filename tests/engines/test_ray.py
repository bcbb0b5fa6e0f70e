"""Work on a Ray cluster: several machines (here, nodes of one) give what one process gives.

Within this file, threads are what Ray is compared with, and worker processes only where they have a
program of their own: to fork a process that has Ray's threads in it is asking for trouble.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedshuffle import (
    Federation,
    FedShuffleError,
    LocalWork,
    Privacy,
    TrainingError,
    losses,
    train,
)
from fedshuffle._terminal import restored_signals
from fedshuffle.engines import Engine, Problem, Ray, RayEngine, at_address, check, make
from fedshuffle.engines.ray import cluster as clusters
from fedshuffle.engines.serialization import pack
from fedshuffle.local_optimisers import LocalOptimiser
from fedshuffle.training.rounds import Run, simulate
from tests.processes import LOOPBACK, PATIENCE, alive, listening, wait_for

ray = clusters.library(local=True)  # before anybody else imports it, so it uses loopback only

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SIZES = [5, 12, 3, 20, 8]
WORK = LocalWork(epochs=2, batch_size=4)


class Nodes:
    """A cluster of two nodes on this machine, with room for one worker each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._few = {"num_cpus": 1, "object_store_memory": 150 << 20}
        self._cluster: Any = Cluster(
            initialize_head=True, head_node_args={**self._few, "include_dashboard": False}
        )
        self.address = self._cluster.address
        ray.init(self.address, log_to_driver=False, configure_logging=False)  # on the head
        self.add()

    def add(self) -> None:
        self._second = self._cluster.add_node(**self._few)
        self._cluster.wait_for_nodes()
        self.second = self._second.node_id

    def lose(self) -> None:
        """The second node is gone at once."""
        self._cluster.remove_node(self._second, allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text("5e" * 32)
    token.chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        with restored_signals():  # a node handles SIGTERM itself
            made = Nodes()
        yield made
        ray.shutdown()
        made.shutdown()


def federation(sizes: list[int] = SIZES) -> Federation:
    rng = np.random.default_rng(0)
    n = sum(sizes)
    return Federation.from_arrays(
        rng.normal(size=(n, 6)).astype(np.float32), rng.integers(3, size=n), sizes=sizes
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def problem(loss: Callable[..., Tensor] = losses.cross_entropy) -> Problem:
    return Problem(network().double(), loss, federation())


def trained(
    engine: Engine, method: str = "fedshuffle", rounds: int = 3, **on_the_way: Any
) -> Tensor:
    run = Run(engine.problem.federation, method, "full", WORK, 0.1, seed=3, **on_the_way)
    *_, (state,) = simulate(engine, [run], rounds)
    return state.x


# Names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("ray", Ray()),
        ("ray:4", Ray(4)),
        ("ray:4:vectorized", Ray(4, "vectorized")),
        ("ray:vectorized", Ray(None, "vectorized")),
        ("ray:4:sequential:gpus=0.5", Ray(4, gpus=0.5)),
        ("ray:2:vectorized:gpus=1:cpus=4", Ray(2, "vectorized", gpus=1, cpus=4)),
    ],
)
def test_names_are_read_and_written_in_one_way(text: str, wanted: Ray) -> None:
    check(text)
    check(wanted)
    assert Ray.read(text) == wanted
    assert str(wanted) == text


@pytest.mark.parametrize(
    "text", ["ray:x", "ray:", "ray:2:reference", "ray:sequential:2", "ray:2:gpu=1"]
)
def test_names_that_cannot_be_read_are_named(text: str) -> None:
    with pytest.raises(FedShuffleError, match=f"engine '{text}' cannot be read: write 'ray'"):
        check(text)


def test_impossible_workers_are_refused() -> None:
    for options in (
        {"workers": 0},
        {"workers": 1_000_000},
        {"kind": "reference"},
        {"gpus": 1.5},
        {"gpus": -1},
        {"cpus": 0},
    ):
        with pytest.raises(FedShuffleError):
            Ray(**options)


def test_an_address_is_for_ray_and_no_part_of_the_name() -> None:
    assert at_address("ray:2", "head:6379") == Ray(2, address="head:6379")
    assert str(at_address("ray:2", "head:6379")) == "ray:2"
    assert at_address("sequential", None) == "sequential"
    with pytest.raises(FedShuffleError, match="the engine is 'sequential', which needs none"):
        at_address("sequential", "head:6379")


def test_ray_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FedShuffleError, match=r"pip install 'fedshuffle\[ray\]'"):
        make("ray:2", problem())


@pytest.mark.parametrize(
    ("version", "starts"), [("2.55.1", False), ("2.59.0", True), ("3.0", True)]
)
def test_a_local_cluster_without_a_token_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, starts: bool
) -> None:
    """Before 2.59, Ray asks for a token only if it was told so before it was imported."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = list[str]()
    monkeypatch.setattr(ray, "__version__", version)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_: started.append(address))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "5e" * 32)
    if starts:
        assert clusters.join(None, 1)
    else:
        with pytest.raises(FedShuffleError, match="RAY_AUTH_MODE=token"):
            clusters.join(None, 1)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        assert clusters.join(None, 1)
    assert started == ["local"]


def test_what_all_workers_need_is_packed_once() -> None:
    x, y = torch.arange(3, dtype=torch.bfloat16), torch.tensor(2.0)
    shared, packed = pack([[x, y], [x], [x, x]])
    assert [len(shared), *(len(one.own) for one in packed)] == [1, 1, 0, 0]
    first, _, third = (one.unpack(shared, torch.device("cpu")) for one in packed)
    assert torch.equal(first[0], x)
    assert first[0].dtype == torch.bfloat16
    assert first[1].shape == ()
    assert third[0] is third[1]


def test_a_loss_that_equals_everything_is_still_its_own() -> None:
    """Losses are compared by value, since workers have copies; but not by the user's equality."""

    class Twice:
        def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return 2 * losses.cross_entropy(model, x, y)

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    for name in ("sequential", "vectorized"):
        torch.testing.assert_close(
            trained(make(name, problem(Twice()))), trained(make("reference", problem(Twice())))
        )


# On two nodes -----------------------------------------------------------------------------------


def on_both(
    nodes: Nodes, loss: Callable[..., Tensor] = losses.cross_entropy, wanted: str = "ray:2"
) -> RayEngine:
    """An engine with as many workers on each of the two nodes."""
    engine = make(wanted, problem(loss))
    assert isinstance(engine, RayEngine)
    ready(engine)
    found = [place.rpartition(" ")[2] for place in engine._ready.values()]
    assert sorted(map(found.count, set(found))) == [engine.workers / 2] * 2
    return engine


def ready(engine: RayEngine) -> None:
    """Let it work until all workers are there."""
    wait_for(
        lambda: len(trained(engine, rounds=1)) > 0 and len(engine._ready) == engine.workers,
        "all workers",
    )


def shaken(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + torch.randn_like(x) * np.random.rand(), y


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_transformed_examples_are_the_same_on_two_nodes(nodes: Nodes, kind: str) -> None:
    data = federation().with_transform(shaken)
    own = Problem(network().double(), losses.cross_entropy, data)
    with contextlib.closing(make(f"ray:2:{kind}", own)) as engine:
        for method in ("fedshuffle", "fedlin"):
            have = trained(engine, method)
            assert torch.equal(have, trained(make(f"{kind}:2", own), method))
            torch.testing.assert_close(have, trained(make("reference", own), method))


@pytest.mark.slow
def test_local_optimisers_equal_a_bare_loop(nodes: Nodes) -> None:
    from tests.engines import test_local_optimisers as bare

    wanted = bare.bare(bare.network(), *bare.USUAL["adamw"])
    bare.assert_same(bare.trained(bare.network(), "adamw", "ray:2"), wanted)
    wanted = bare.bare(bare.network(), bare.Signs, {})
    own = LocalOptimiser(bare.Signs)
    bare.assert_same(bare.trained(bare.network(), own, "ray:2"), wanted)


def test_two_nodes_give_bit_for_bit_what_two_workers_give_here(nodes: Nodes) -> None:
    engine = on_both(nodes)
    for method in ("fedshuffle", "fedshuffle-mvr", "scaffold", "mime-adam"):
        have = trained(engine, method)
        assert torch.equal(have, trained(make("sequential:2", problem()), method))
        torch.testing.assert_close(have, trained(make("reference", problem()), method))
    private = {"privacy": Privacy(clip=0.1, noise=1.0), "channel": "qsgd:4"}
    for on_the_way in ({"channel": "topk:0.1+ef"}, {"channel": "diana"}, private):
        have = trained(engine, **on_the_way)
        assert torch.equal(have, trained(make("sequential:2", problem()), **on_the_way))

    one, two = (ray.get(engine._held[1])[0].tensor() for _ in range(2))
    assert torch.equal(one, engine.problem.fields[0])
    assert one.data_ptr() == two.data_ptr()  # data lie in the cluster's memory once
    engine.close()
    assert ray.is_initialized()  # it was the program's own


def test_other_kinds_precisions_and_places_of_data(nodes: Nodes, tmp_path: Path) -> None:
    """Too many workers for the room, other engines, bfloat16, data on disk, a frozen layer."""
    federation().save(tmp_path / "people")
    stored = Federation.open(tmp_path / "people")
    short = network().to(torch.bfloat16)

    def after(model: nn.Module, engine: str | Ray, **options: Any) -> Tensor:
        settings: dict[str, Any] = {"federation": stored, "loss": losses.cross_entropy, "rounds": 2}
        result = train(model, engine=engine, work=WORK, **settings | options)
        assert result.engine == str(engine)
        return parameters_to_vector(result.model.parameters()).detach()

    assert torch.equal(after(network(), Ray(3)), after(network(), "sequential:3"))
    frozen = network()
    next(frozen.parameters()).requires_grad_(False)  # travels as the data do
    assert torch.equal(after(frozen, Ray(2)), after(frozen, "sequential:2"))
    in_memory = federation()
    have, want = (
        after(short, name, federation=in_memory) for name in ("ray:2:vectorized", "vectorized:2")
    )
    assert have.dtype == torch.bfloat16
    assert torch.equal(have, want)


def test_a_store_that_is_another_for_workers_is_named(nodes: Nodes, tmp_path: Path) -> None:
    federation().save(tmp_path / "people")
    engine = make(
        "ray:1", Problem(network(), losses.cross_entropy, Federation.open(tmp_path / "people"))
    )
    shutil.rmtree(tmp_path / "people")
    federation(SIZES[::-1]).save(tmp_path / "people")
    with pytest.raises(FedShuffleError, match=r"people' holds other data for a worker"):
        trained(engine)
    engine.close()


def test_the_number_of_workers_found_is_recorded_and_used_again(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a resumed run ends as one that was not interrupted, with the same random examples."""

    def go(rounds: int, engine: str, out: str, resume: bool = False) -> Tensor:
        result = train(
            network(),
            federation().with_transform(shaken),
            loss=losses.cross_entropy,
            rounds=rounds,
            engine=engine,
            out=tmp_path / out,
            resume=resume,
        )
        return parameters_to_vector(result.model.parameters()).detach()

    go(1, "ray", "a")
    assert json.loads((tmp_path / "a" / "run.json").read_text())["engine"] == "ray:2"
    monkeypatch.setattr("fedshuffle.engines.ray.engine._room", lambda *_: 5)
    assert torch.equal(go(3, "ray", "a", resume=True), go(3, "sequential:2", "b"))


def test_a_killed_worker_is_replaced_and_its_clients_are_trained_again(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "killed"

    def once(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(x) == 3 and not marker.exists():  # only client 2 has three examples
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return losses.cross_entropy(model, x, y)

    engine = make("ray:2", problem(once))
    assert isinstance(engine, RayEngine)
    have = trained(engine)
    assert marker.exists()
    assert torch.equal(have, trained(make("sequential:2", problem(once))))
    (said,) = [r.getMessage() for r in caplog.records if r.name == "fedshuffle"]
    assert "was lost" in said
    assert "of round 0" in said
    assert "2" in said.partition("clients (")[2].partition(")")[0]
    ready(engine)
    engine.close()


def test_a_lost_node_changes_nothing(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it had as many workers as may be lost over one share."""
    armed, reached, second = tmp_path / "armed", tmp_path / "reached", nodes.second

    def waits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if armed.exists() and ray.get_runtime_context().get_node_id() == second:
            try:
                reached.touch(exist_ok=False)  # one works, and the others are idle
            except FileExistsError:
                pass
            else:
                time.sleep(PATIENCE)  # it is killed before
        return losses.cross_entropy(model, x, y)

    def lose() -> None:
        wait_for(reached.exists, "nobody works on the second node")
        nodes.lose()

    def plain(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return losses.cross_entropy(model, x, y)

    engine = on_both(nodes, waits, "ray:6:sequential:cpus=0.3")
    armed.touch()
    thread = threading.Thread(target=lose)
    thread.start()
    have = trained(engine)
    thread.join()
    engine.close()
    nodes.add()
    assert reached.exists()
    assert f"node {second[:8]}) was lost" in caplog.text
    assert torch.equal(have, trained(make("sequential:6", problem(plain))))


def test_clients_that_kill_every_worker_are_named(nodes: Nodes) -> None:
    def fatal(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(x) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses.cross_entropy(model, x, y)

    sizes = [3, 20]
    doomed = Problem(network(), fatal, federation(sizes))
    with pytest.raises(TrainingError, match="3 workers that trained it were lost") as error:
        trained(make("ray:2", doomed))
    assert (error.value.client, error.value.round, error.value.stage) == ("0", 0, "local training")


def test_errors_of_the_users_code_arrive_and_the_engine_recovers(
    nodes: Nodes, tmp_path: Path
) -> None:
    marker = tmp_path / "failed"

    def once(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if len(x) == 3 and not marker.exists():
            marker.touch()
            raise KeyError("oops")
        return losses.cross_entropy(model, x, y)

    engine = make("ray:2", problem(once))
    with pytest.raises(TrainingError, match="client 2, local training: KeyError: 'oops'"):
        trained(engine)
    assert torch.equal(trained(engine), trained(make("sequential:2", problem(once))))
    engine.close()
    with pytest.raises(FedShuffleError, match="make a new engine"):
        trained(engine)


def test_a_module_that_workers_cannot_import_is_named(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("only_here")
    source = "def loss(model, x, y):\n    return (model(x)[:, 0] - y).square().mean()"
    exec(compile(source, "only_here.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    engine = make("ray:2", problem(module.loss))
    with pytest.raises(FedShuffleError, match=r"cannot import.*'only_here'.*every machine"):
        trained(engine)
    engine.close()


def test_workers_that_never_come_to_life_are_named(nodes: Nodes, tmp_path: Path) -> None:
    from fedshuffle.engines.ray.engine import _Worker

    (tmp_path / "fedshuffle").mkdir()
    (tmp_path / "fedshuffle" / "__init__.py").write_text("raise ImportError('an old one')")
    engine = RayEngine(problem(), Ray(1))
    there = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    engine._worker = ray.remote(runtime_env=there)(_Worker)
    with pytest.raises(FedShuffleError, match="ImportError: an old one"):
        trained(engine)
    engine.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_leaves_the_engine_to_its_parent(nodes: Nodes) -> None:
    engine = on_both(nodes)
    child = multiprocessing.get_context("fork").Process(target=engine.close)
    child.start()
    child.join(PATIENCE)
    code = child.exitcode
    child.kill()
    assert code == 0
    assert len(engine._ready) == 2
    trained(engine)
    engine.close()


def test_what_does_not_fit_into_the_clusters_memory_is_said(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(thing: object) -> None:
        raise ray.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(ray, "put", full)
    with pytest.raises(FedShuffleError, match="do not fit into the Ray cluster's memory"):
        make("ray:2", problem())


def test_workers_that_fit_nowhere_are_refused(nodes: Nodes) -> None:
    with pytest.raises(FedShuffleError, match=r"1 CPUs and 0.5 GPUs, but no machine of the Ray"):
        make("ray:2:sequential:gpus=0.5", problem())
    with pytest.raises(FedShuffleError, match=r"a worker needs 4 CPUs, but no machine"):
        make("ray:2:sequential:cpus=4", problem())
    with pytest.raises(FedShuffleError, match="already, and address is 'elsewhere:6379'"):
        make(Ray(2, address="elsewhere:6379"), problem())


def test_a_worker_without_cuda_is_named() -> None:
    from fedshuffle.engines.ray.engine import _device

    if not torch.cuda.is_available():
        with pytest.raises(FedShuffleError, match="no CUDA device"):
            _device(0.5)


# From the command line --------------------------------------------------------------------------

CONFIG = """
rounds = 8
step_size = 0.1
loss = "parts:loss"
model = "parts:network"
data = "parts:clients"
work = { epochs = 2, batch_size = 4 }
checkpoints = { every = 1 }
"""

PARTS = """
import time
from pathlib import Path
import numpy as np
import torch
from fedshuffle import Federation, losses

HERE = Path(__file__).parent

def network():
    return torch.nn.Linear(6, 3)

def clients():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(48, 6)).astype(np.float32)
    return Federation.from_arrays(rows, rng.integers(3, size=48), sizes=[5, 12, 3, 20, 8])

def loss(model, x, y):
    hold, lines = HERE / "hold", HERE / "out" / "metrics.jsonl"
    while hold.exists() and lines.exists():
        wanted = hold.read_text()
        if not wanted or lines.read_text().count(chr(10)) < int(wanted):
            break
        (HERE / "held").write_text(wanted)
        time.sleep(0.02)
    return losses.cross_entropy(model, x, y)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path)


def write_project(folder: Path) -> Path:
    (folder / "config.toml").write_text(CONFIG)
    (folder / "parts.py").write_text(PARTS)
    return folder


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A folder for Ray's files: the names of its sockets may have about 100 letters."""
    folder = tempfile.mkdtemp(prefix="fs-", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # its agents may still write


def command(*words: str | Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedshuffle", "run", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        | {"RAY_worker_niceness": "0"}
        | environment,
    )


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The model of the same run, never interrupted, on worker processes without Ray."""
    place = write_project(tmp_path_factory.mktemp("plain"))
    words: list[Any] = ["--engine", "sequential:2:processes", "--out", place / "plain"]
    driver = command(place / "config.toml", *words)
    _, said = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 0, said
    return (place / "plain" / "model.safetensors").read_bytes()


def children(pid: int) -> set[int]:
    """All that descend from a process, and itself."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(status[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def wait_until_gone(pids: set[int]) -> None:
    wait_for(lambda: not any(map(alive, pids)), "processes of the cluster live on")


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks into /proc")
def test_a_run_survives_whatever_happens_to_it(
    project: Path, ray_folder: str, wanted: bytes
) -> None:
    """Killed, interrupted and terminated in the middle of rounds, it ends as if it never was."""
    hold, out = project / "hold", project / "out"
    first: list[str | Path] = [project / "config.toml", "--engine", "ray:2", "--out", out]
    again: list[str | Path] = ["--resume", out]

    def until_round(lines: int, words: list[Any]) -> tuple[subprocess.Popen[str], set[int]]:
        """Start it, and wait until it hangs in the round after this many."""
        hold.write_text(str(lines))
        driver = command(*words, HOME=str(project), RAY_TMPDIR=ray_folder)

        def reached() -> bool:
            assert driver.poll() is None, driver.communicate()
            held = project / "held"  # a worker waits, so the next round has begun
            return held.exists() and held.read_text() == str(lines)

        wait_for(reached, f"round {lines} was not reached")
        return driver, children(driver.pid)

    driver, all_of_it = until_round(2, first)
    heard = listening(all_of_it)
    assert len(heard) > 3
    assert {address for address, _ in heard} <= LOOPBACK
    token = project / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    driver.kill()
    driver.communicate()
    killed = all_of_it  # Ray's own agents notice it after a minute: looked at in the end

    for lines, number in ((4, signal.SIGINT), (6, signal.SIGTERM)):
        driver, all_of_it = until_round(lines, again)
        driver.send_signal(number)
        _, said = driver.communicate(timeout=PATIENCE)
        assert driver.returncode == 130
        assert f"Stopped after round {lines}, which is saved. To resume, run: fedshuffle" in said
        wait_until_gone(all_of_it)

    hold.unlink()
    driver = command(*again, HOME=str(project), RAY_TMPDIR=ray_folder)
    _, said = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 0, said
    assert (out / "model.safetensors").read_bytes() == wanted
    assert json.loads((out / "run.json").read_text())["engine"] == "ray:2"
    wait_until_gone(killed)


def test_a_run_goes_to_the_cluster_at_an_address(
    nodes: Nodes, project: Path, wanted: bytes
) -> None:
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    settings = {name: os.environ[name] for name in names}
    words: list[Any] = [project / "config.toml", "--engine", "ray:2", "--out", project / "out"]
    driver = command(*words, "--address", nodes.address, "--rounds", "3", **settings)
    _, said = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 0, said
    driver = command(
        "--resume", project / "out", "--rounds", "8", RAY_ADDRESS=nodes.address, **settings
    )
    _, said = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 0, said
    assert (project / "out" / "model.safetensors").read_bytes() == wanted
    assert "127.0.0.1" not in (project / "out" / "run.json").read_text()

    driver = command(*words[:-1], project / "b", "--address", "127.0.0.1:1")
    _, said = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 2
    assert "no Ray cluster answers at '127.0.0.1:1'" in said
