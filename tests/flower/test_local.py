"""A SuperLink and SuperNodes on this machine: their keys, and what they leave behind."""

import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedshuffle import FedShuffleError
from fedshuffle.flower.local import (
    Deployment,
    app_config,
    write_certificates,
)
from fedshuffle.templates import new_flower_app
from tests.cli.test_cli import run as command
from tests.processes import PATIENCE, wait_for, with_environment

# Certificates


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_private_files_are_private(tmp_path: Path) -> None:
    with ExitStack() as stack:
        Deployment(2, tmp_path)._make_folder(stack)
    keys = tmp_path / "keys"
    assert mode(keys) == 0o700
    private = ["server.key", "client-0.key", "client-1.key"]
    assert [mode(keys / name) for name in private] == [0o600] * 3
    text = b"".join(path.read_bytes() for path in keys.iterdir())
    assert text.count(b"PRIVATE KEY-----\n") == 2 * 3  # the authority's key is nowhere


def test_older_flower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshuffle.flower.local.version", lambda name: "1.30.0")
    with pytest.raises(FedShuffleError, match=r"needs Flower 1\.41 .* 1\.30\.0"):
        Deployment(2)


@pytest.mark.parametrize(("host", "welcome"), [("127.0.0.1", True), ("other.example", False)])
def test_clients_trust_this_machine_only(tmp_path: Path, host: str, welcome: bool) -> None:
    write_certificates(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    ends = [ssl.MemoryBIO() for _ in range(2)]
    here = client.wrap_bio(ends[0], ends[1], server_hostname=host)
    there = server.wrap_bio(ends[1], ends[0], server_side=True)

    def handshake() -> None:
        for _ in range(4):
            for side in (here, there):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue

    if welcome:
        handshake()
        assert here.version() == "TLSv1.3"
    else:
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake()


# New apps


@pytest.mark.parametrize("name", ["3x", "a b", "class", "torch", "json", "fedshuffle", "ä"])
def test_invalid_package_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FedShuffleError, match=re.escape(repr(name))):
        new_flower_app(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_new_app_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "my_app").mkdir()
    (tmp_path / "my_app" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name in ("my_app", "file"):
        with pytest.raises(FedShuffleError, match="empty"):
            new_flower_app(tmp_path / name)


def test_new_app_is_named_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "new", "flower-app", "My-first_app") == 0
    assert "flower up --clients 3 --app My-first_app" in capsys.readouterr().out
    made = tmp_path / "My-first_app"
    files = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    modules = {"__init__", "client_app", "data", "model", "server_app"}
    assert files == {"README.md", "pyproject.toml"} | {f"my_first_app/{m}.py" for m in modules}
    found = tomllib.loads((made / "pyproject.toml").read_text())
    assert found["project"]["name"] == "my-first-app"
    app = found["tool"]["flwr"]["app"]
    assert app["components"]["clientapp"] == "my_first_app.client_app:app"
    assert {"num-rounds", "method", "sampling", "step-size", "batch-size"} <= app["config"].keys()
    text = "".join(path.read_text() for path in made.rglob("*.*"))
    assert not re.search("flower_app|flower-app", text)
    assert app_config(made, {"seed": 1}) == app["config"]
    with pytest.raises(FedShuffleError, match="num-rounds"):
        app_config(made, {"rounds": 1})


def test_flower_builds_the_new_flower_app(tmp_path: Path) -> None:
    made = new_flower_app(tmp_path / "mine")
    words = [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(made)]
    env = os.environ | {"FLWR_HOME": str(tmp_path / "home"), "FLWR_DISABLE_UPDATE_CHECK": "1"}
    subprocess.run(words, check=True, cwd=tmp_path, env=env, capture_output=True)
    assert list(tmp_path.glob("*.fab"))


# Refused before anything starts


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--clients", "0"], "clients"),
        (["--app", "nowhere"], "nowhere"),
        (["--set", "a=1"], "--app"),
        (["--port", "70000"], "70000"),
        (["--dir", "full"], "full"),
    ],
)
def test_invalid_options_are_refused(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    assert command(monkeypatch, "flower", "up", *words) == 2
    assert said in capsys.readouterr().err


def test_proxies_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "corp.example")
    monkeypatch.delenv("NO_PROXY", raising=False)
    found = Deployment(1, tmp_path)._options()["env"]
    assert found["no_proxy"] == found["NO_PROXY"] == "127.0.0.1,localhost,corp.example"


def test_used_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(FedShuffleError, match=f"port {port}"):
            Deployment(1, tmp_path / "deployment", port=port)


def test_app_without_components_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    with pytest.raises(FedShuffleError, match="components"):
        app_config(tmp_path, {})


def test_missing_flower_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(FedShuffleError, match=r"pip install 'fedshuffle\[flower\]'"):
        Deployment(1, tmp_path / "deployment")


def test_ended_process_is_named_with_its_log(tmp_path: Path) -> None:
    deployment = Deployment(1, tmp_path)
    deployment.logs.mkdir()
    words = ["-c", "import sys; print('the reason'); sys.exit(3)"]
    deployment.start("superlink", sys.executable, *words).wait()
    with pytest.raises(FedShuffleError, match=r"superlink .*3(.|\n)*the reason"):
        deployment.wait()


def test_interrupt_waits_for_no_process_that_has_ended(tmp_path: Path) -> None:
    """Ctrl-C may come before a process that has just begun is known."""
    deployment = Deployment(1, tmp_path)
    deployment.logs.mkdir()
    words = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with (
        deployment.start("superlink", *words) as known,
        subprocess.Popen(words, stderr=subprocess.DEVNULL, **deployment._options()),
    ):
        deployment._interrupt()
        with pytest.raises(ProcessLookupError):
            os.killpg(known.pid, 0)


def test_two_deployments_in_one_folder_are_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        Deployment(1, tmp_path)._make_folder(stack)
        with pytest.raises(FedShuffleError, match=tmp_path.name), Deployment(1, tmp_path):
            pass


# A real deployment


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into Linux's /proc")
@pytest.mark.parametrize(
    ("line", "number", "codes"),
    [
        ("SuperNodes", signal.SIGINT, {130, 0}),  # while it starts, unless this test is late
        ("Ctrl-C ends it", signal.SIGINT, {0}),
    ],
)
def test_no_process_is_left(
    line: str, number: signal.Signals, codes: set[int], tmp_path: Path
) -> None:
    folder = tmp_path / "deployment"
    words = [sys.executable, "-m", "fedshuffle", "flower", "up", "--clients", "1"]
    with subprocess.Popen(
        [*words, "--dir", str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as up:
        assert up.stdout is not None
        said = ""
        while line not in said:
            more = up.stdout.readline()
            assert more, f"it ended early: {said}"
            said += more
        assert processes_of(folder)
        up.send_signal(number)
        said += up.communicate(timeout=PATIENCE)[0]
    assert up.returncode in codes, said
    assert not processes_of(folder)
    assert not [path for path in Path("/proc").glob("[0-9]*") if str(folder) in commanded(path)]
    assert (folder / "logs" / "superlink.log").exists()
    assert f"FLWR_HOME={folder / 'flower'}" in said or line == "SuperNodes"


@pytest.mark.slow
@pytest.mark.xdist_group("flower")
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks into Linux's /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_deployment_leaves_no_process_and_no_key(
    number: signal.Signals, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "fedshuffle", "flower", "up", "--clients", "1"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as up:
        assert up.stdout is not None
        while "Ctrl-C ends it" not in (line := up.stdout.readline()):
            assert line, "it ended early"
        (folder,) = tmp_path.glob("fedshuffle-flower-*")
        assert processes_of(folder)
        assert list(folder.glob("keys/*.key"))
        up.send_signal(number)
        up.wait()
        wait_for(lambda: not processes_of(folder), "the processes to end")
        wait_for(lambda: not list(folder.rglob("*.key")), "the keys to go")
    assert up.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    assert (folder / "logs" / "superlink.log").exists() == (number == signal.SIGKILL)


def test_unwritable_folder_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "app")
    for words in (["new", "flower-app", place], ["flower", "up", "--dir", place]):
        assert command(monkeypatch, *words) == 2
        (line,) = capsys.readouterr().err.strip().split("\n")
        assert "cannot write to" in line
        assert place in line


def test_ctrl_c_works_as_soon_as_it_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(text: str) -> None:
        assert text.endswith("Ctrl-C ends it.\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(Deployment, "_start", lambda deployment: None)
    monkeypatch.setattr("fedshuffle.cli.flower._show", impatient)
    assert command(monkeypatch, "flower", "up", "--dir", str(tmp_path)) == 0


def processes_of(folder: Path) -> list[int]:
    return with_environment(f"FLWR_HOME={folder}")


def commanded(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
