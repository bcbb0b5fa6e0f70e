"""The built package in new environments: alone, with each extra, without torch, on each Python."""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, Environment, interpreter, run

pytestmark = pytest.mark.slow
of_wheel, of_base = (pytest.mark.xdist_group(f"packaging-{k}") for k in ("wheel", "base"))

VERSIONS = ("3.11", "3.12", "3.13")
OTHERS = [one for one in VERSIONS if one != f"{sys.version_info[0]}.{sys.version_info[1]}"]

TASK = """
import numpy as np
import torch
from fedshuffle import Evaluation, Federation, losses, train

def model():
    return torch.nn.Linear(2, 2)

def clients():
    rng = np.random.default_rng(0)
    return Federation.from_arrays(
        rng.normal(size=(12, 2)).astype(np.float32), rng.integers(2, size=12), sizes=[2, 4, 6]
    )

def trained(rounds=2, **options):
    options = {"evaluate": Evaluation(clients(), ["loss"])} | options
    return train(model(), clients(), loss=losses.cross_entropy, rounds=rounds, **options)
"""
CONFIG = """
rounds = 2
step_size = 0.1
out = "out"
model = "task:model"
loss = "cross_entropy"
data = "task:clients"
[evaluation]
data = "training"
metrics = ["loss"]
"""
COMPARE = """
[compare]
methods = ["fedavg-rr", "fedshuffle"]
seeds = [0]
step_sizes = [0.1]
"""
LOG = "round,client,size,steps,weight\n0,a,1,1,0.3\n0,b,2,2,0.7\n1,a,1,1,0.3\n1,b,2,2,0.7\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel, built from the source distribution, and of the latter."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    assert "warning" not in (done.stdout + done.stderr).lower()
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    made = Environment(tmp_path_factory.mktemp("base") / "env")
    made.install(wheel)
    _write_task(made.work)
    yield made
    shutil.rmtree(made.folder)  # nearly a gigabyte


def _write_task(folder: Path) -> None:
    (folder / "task.py").write_text(TASK)
    (folder / "config.toml").write_text(CONFIG)
    (folder / "compare.toml").write_text(CONFIG + COMPARE)
    (folder / "log.csv").write_text(LOG)


def _tracked(folder: str) -> set[str]:
    words = ["git", "-C", str(ROOT), "ls-files", "-z", "--", folder]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


@of_wheel
def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert {f"src/{name}" for name in names} == _tracked("src")


@of_wheel
def test_the_source_distribution_has_what_builds_and_explains_it(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml"}
    assert files | _tracked("src") | _tracked("tests") <= names


@of_wheel
def test_the_readme_has_no_relative_links(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [one for one in archive.namelist() if one.endswith("METADATA")]
    text = archive.read(name).decode().partition("\n\n")[2]
    assert "](docs/" not in text
    assert 'src="docs/' not in text
    assert "](https://fedshuffle.github.io/fedshuffle/" in text


@of_base
def test_the_base_audits_and_trains(base: Environment) -> None:
    assert "audit" in base.command("--help")
    assert json.loads(base.command("audit", "--sizes", "1,2,3", "--json"))["consistent"] is False
    base.command("run", "config.toml")
    assert base.python("import task; print(len(task.trained().history))").strip() == "2"


@of_base
def test_the_base_has_nothing_that_is_not_declared(base: Environment) -> None:
    extras = "matplotlib sklearn pandas h5py pyarrow dp_accounting tensorboard mlflow wandb ray"
    extras += " flwr trustme sphinx pytest"
    code = "from importlib.util import find_spec as f\n"
    code += f"print([name for name in {extras.split()} if f(name)])"
    assert base.python(code).strip() == "[]"


@of_base
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("report", ["compare", "compare.toml", "--out", "never"]),
        ("report", ["reproduce", "quadratic", "--out", "never"]),
        ("demo", ["demo", "--out", "never"]),
        ("data", ["data", "import", "log.csv", "--client", "client", "--out", "never"]),
        ("ray", ["run", "config.toml", "--engine", "ray:2", "--out", "never"]),
        ("privacy", ["run", "config.toml", "--set", "privacy.clip=1", "--set", "privacy.noise=1"]),
        ("flower", ["flower", "up"]),
    ],
)
def test_a_command_names_the_missing_extra(base: Environment, extra: str, words: list[str]) -> None:
    out = [] if "--out" in words or words[0] == "flower" else ["--out", "never"]
    assert f"Install it with pip install 'fedshuffle[{extra}]'" in base.error(*words, *out)
    assert not (base.work / "never").exists()


@of_base
def test_python_names_the_missing_extra(base: Environment) -> None:
    code = """
import task
from fedshuffle import Federation, Privacy, audit, callbacks, methods, sampling
result = task.trained()
calls = {
    "report": [result.plot, audit(Federation.from_sizes([1, 2]), "fedavg-rr", "full").plot],
    "frame": [result.frame],
    "tensorboard": [callbacks.TensorBoard],
    "mlflow": [callbacks.MLflow],
    "wandb": [callbacks.WandB],
    "ray": [lambda: task.trained(engine="ray")],
    "privacy": [lambda: task.trained(privacy=Privacy(clip=1.0, noise=1.0))],
    "flower": [lambda: __import__("fedshuffle.flower").flower.FedShuffleStrategy],
}
for extra, tries in calls.items():
    for one in tries:
        try:
            one()
        except ImportError as error:
            assert f"pip install 'fedshuffle[{extra}]'" in str(error), (extra, error)
        else:
            raise AssertionError(f"{extra} is not missing")
"""
    base.python(code)


@of_base
def test_the_starter_says_what_its_data_need(base: Environment) -> None:
    assert "pip install 'fedshuffle[demo]'" in base.command("new", "run", "started")
    assert "pip install 'fedshuffle[demo]'" in base.error("run", "started/config.toml")


_EXTRAS = {
    "report": """
from pathlib import Path
from fedshuffle import Federation, audit
import task
task.trained().plot()
audit(Federation.from_sizes([1, 2]), "fedavg-rr", "full").plot().figure.savefig("audit.png")
assert Path("audit.png").exists()
""",
    "demo": "",
    "data": """
import pyarrow as pa
from pyarrow import parquet
columns = {"who": ["a", "b", "b"], "x": [1.0, 2.0, 4.0], "y": [0, 1, 1]}
parquet.write_table(pa.table(columns), "t.parquet")
""",
    "huggingface": """
import datasets, flwr_datasets.partitioner
from fedshuffle import Federation
rows = datasets.Dataset.from_dict({"who": ["a", "b"], "x": [[1.0], [2.0]]})
assert len(Federation.from_huggingface(rows, client="who", fields=["x"])) == 2
""",
    "polars": """
import polars
from fedshuffle import Federation
rows = polars.DataFrame({"who": ["a", "b"], "x": [1.0, 2.0]})
assert len(Federation.from_frame(rows, client="who", fields=["x"])) == 2
""",
    "frame": """
import task
assert list(task.trained().frame()["loss"].notna())
""",
    "privacy": """
import task
from fedshuffle import Privacy
assert task.trained(privacy=Privacy(clip=1.0, noise=1.0, delta=1e-3)).history[-1]["epsilon"] > 0
""",
    "tensorboard": """
from pathlib import Path
import task
from fedshuffle import callbacks
task.trained(callbacks=[callbacks.TensorBoard("board")])
assert list(Path("board").glob("events*"))
""",
    "mlflow": """
from pathlib import Path
import task
from fedshuffle import callbacks
task.trained(callbacks=[callbacks.MLflow("sqlite:///runs.db")])
assert Path("runs.db").exists()
""",
    "wandb": """
from pathlib import Path
import task
from fedshuffle import callbacks
task.trained(callbacks=[callbacks.WandB(folder=".")])
assert list(Path("wandb").glob("offline-run-*"))
""",
    "ray": """
import task
result = task.trained(engine="ray:1")
assert result.engine == "ray:1", result.engine
""",
    "flower": """
from flwr.serverapp.strategy import FedAvg
from fedshuffle.flower import FedShuffleStrategy, client_app
""",
}
_COMMANDS = {
    "report": "compare compare.toml --jobs 1",
    "demo": "demo --rounds 2",
    "data": "data import t.parquet --client who --label y --standardise --out store",
    "flower": "audit --sizes 1,2 --flower flwr.serverapp.strategy:FedAvg",
}


@of_base
@pytest.mark.parametrize("extra", _EXTRAS)
def test_an_extra_brings_what_its_feature_needs(
    base: Environment, extra: str, tmp_path: Path
) -> None:
    env = Environment(tmp_path / extra, on=base)
    env.link("fedshuffle", extra)
    _write_task(env.work)
    ignored = "import warnings; warnings.simplefilter('default')\n" if extra != "report" else ""
    env.python(ignored + _EXTRAS[extra])
    if extra in _COMMANDS:
        env.command(*_COMMANDS[extra].split())
    shutil.rmtree(env.folder)


@of_wheel
@pytest.mark.parametrize("version", OTHERS)
def test_audits_run_without_torch_on_other_pythons(
    wheel: Path, version: str, tmp_path: Path
) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    env = Environment(tmp_path / "env", python)
    env.install_without(wheel, {"torch", "safetensors", "cloudpickle"})
    _write_task(env.work)
    assert env.command("--version").strip() == wheel.name.split("-")[1]
    assert "fedshuffle" in env.command("methods")
    assert "not consistent" in env.command("audit", "--sizes", "1,2,3")
    sampled = ["--method", "fedshuffle", "--sampling", "uniform:2", "--channel", "topk:0.5"]
    assert json.loads(env.command("audit", "--sizes", "1,2,3", *sampled, "--json"))
    assert json.loads(env.command("audit", "--log", "log.csv", "--json"))["client_ids"]
    for words in (["run", "config.toml"], ["conformance", "fedavg"]):
        assert "with pip install torch safetensors cloudpickle." in env.error(*words)
    env.python(
        """
import fedshuffle, importlib, pkgutil
missing, loaded = {}, set()
for module in pkgutil.walk_packages(fedshuffle.__path__, "fedshuffle.", onerror=lambda name: None):
    if ".template" in module.name:
        continue
    try:
        importlib.import_module(module.name)
        loaded.add(module.name.split(".")[1])
    except ModuleNotFoundError as error:
        missing[module.name] = error.name.partition(".")[0]
    except fedshuffle.FedShuffleError as error:
        missing[module.name] = "flwr"
known = {"torch", "safetensors", "cloudpickle", "matplotlib", "jinja2", "markupsafe", "pyarrow"}
known |= {"flwr", "sklearn"}
assert set(missing.values()) <= known, missing
assert loaded >= {"auditing", "cli", "federation", "methods", "privacy", "sampling", "transforms"}
try:
    fedshuffle.train
except ImportError as error:
    assert str(error).startswith("fedshuffle.train needs torch, safetensors, cloudpickle.")
else:
    raise AssertionError
"""
    )


@of_wheel
def test_all_that_is_installed_here_agrees() -> None:
    done = run(sys.executable, "-m", "pip", "check", folder=ROOT, check=False)
    assert done.returncode == 0, done.stdout
