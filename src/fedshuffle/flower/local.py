"""A Flower deployment on this machine: a SuperLink and its SuperNodes, with TLS and node keys.

    with Deployment(clients=3) as deployment:
        assert deployment.run("my-app", {"num-rounds": 2}) == COMPLETED

Everything listens on 127.0.0.1 only, authenticates nodes by their keys, and uses a separate Flower
configuration, so that the user's is neither read nor changed. However it ends, no process is left,
and no key in a temporary folder; the logs stay.
"""

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedshuffle._arrays import count
from fedshuffle._files import atomic_write, one_writer
from fedshuffle.errors import FedShuffleError, error_context, one_line, unknown

__all__ = ["COMPLETED", "Deployment"]

HOST = "127.0.0.1"
CONNECTION = "local"
"""The deployment's name in its Flower configuration."""
COMPLETED = "finished:completed"
"""The status of a run that went well."""
_FLOWER = (1, 41)  # the first version whose programs take the options below
_START = 300.0  # seconds until all must be up
_STOP = 15.0  # seconds between asking processes to end and killing them
_GUARD = """
import os, shutil, signal, sys
group = sys.stdin.readline()
sys.stdin.read()
try:
    os.killpg(int(group), signal.SIGKILL)
finally:
    for folder in sys.argv[1:]:
        shutil.rmtree(folder)
"""
"""A process that kills what is left of a deployment, and removes its keys, when the pipe from its
program closes: at its end, however that comes.
"""


class Deployment:
    """A SuperLink and a SuperNode for each client on this machine, while the ``with`` block runs.

    Client ``i`` runs with ``partition-id=i num-partitions=clients`` in its node config.

    Attributes:
        folder: keys, Flower's own files, and ``logs``. A temporary folder if none is given: it is
            removed at the end, except for the logs after an error.
        address: of the SuperLink, as ``host:port``.
        environment: variables that a ``flwr`` command needs to reach this deployment.
        processes: by name: ``superlink``, ``superexec``, ``client-0``, ``client-1``, ...
    """

    def __init__(
        self,
        clients: int = 3,
        folder: str | Path | None = None,
        *,
        port: int | None = None,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.clients = count(clients, "clients")
        if os.name != "posix":
            raise FedShuffleError("a local deployment needs Linux or macOS.")
        if shutil.which("flower-superlink", path=_path()) is None:
            raise FedShuffleError(
                "flower-superlink, a program of Flower, is neither beside this Python nor on the"
                " PATH. Install it with pip install 'fedshuffle[flower]'."
            )
        if tuple(map(int, version("flwr").split(".")[:2])) < _FLOWER:
            raise FedShuffleError(
                f"a local deployment needs Flower {'.'.join(map(str, _FLOWER))} or newer, and here"
                f" is {version('flwr')}. Upgrade it: pip install -U 'fedshuffle[flower]'."
            )
        self._port = available_port(port or 0)
        self._progress = progress
        self._temporary = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="fedshuffle-flower-")).absolute()
        self.address = f"{HOST}:{self._port}"
        self.logs, self.keys = self.folder / "logs", self.folder / "keys"
        self._authority = str(self.keys / "ca.crt")
        self.environment = {
            "FLWR_HOME": str(self.folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Deployment":
        cannot, remedy = f"cannot write to {str(self.folder)!r}", "Choose another folder"
        keys = [str(self.keys)] if self._temporary else []
        with contextlib.ExitStack() as stack:
            stack.push(self._remove_folder)
            self._guard = subprocess.Popen(
                [sys.executable, "-c", _GUARD, *keys],
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.enter_context(self._guard)
            stack.callback(self._interrupt)
            with error_context(lambda error: f"{cannot}: {one_line(error)}. {remedy}.", OSError):
                self._make_folder(stack)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _start(self) -> None:
        self._progress(f"SuperLink on https://{self.address}")
        certificate, key = str(self.keys / "server.crt"), str(self.keys / "server.key")
        self.start(
            "superlink",
            "flower-superlink",
            *("--ssl-ca-certfile", self._authority),
            *("--ssl-certfile", certificate, "--ssl-keyfile", key),
            *("--host", HOST, "--port", str(self._port)),
            "--enable-supernode-auth",
            # Otherwise it starts a SuperExec itself, in another session, beyond our signals.
            *("--isolation", "process"),
        )
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{self.processes['superlink'].pid}\n".encode())
        self._guard.stdin.flush()
        self._await("the SuperLink to answer", self._listens)
        runtime = ("--runtime-api-address", self.address, "--root-certificates", self._authority)
        self.start("superexec", "flower-superexec", *runtime)
        self._progress(f"registering {self.clients} node keys")
        with ThreadPoolExecutor() as pool:  # most of the time is starting Python
            list(pool.map(self._register, range(self.clients)))
        self._progress(f"{self.clients} SuperNodes")
        for client in range(self.clients):
            self.start(f"client-{client}", *self.node_command(client))
        self.await_online(self.clients)
        self._progress(f"all {self.clients} nodes are online")

    def _make_folder(self, stack: contextlib.ExitStack) -> None:
        """Create the folder, with new keys, and the configuration for ``flwr``."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self.keys.is_dir() and any(self.folder.iterdir()):
            raise FedShuffleError(
                f"{str(self.folder)!r} holds other things than a deployment. Choose a new folder."
            )
        stack.enter_context(one_writer(self.folder))
        self._progress(f"certificates and keys in {self.keys}")
        home = Path(self.environment["FLWR_HOME"])
        for folder in (self.keys, self.logs, home):
            folder.mkdir(mode=0o700, exist_ok=True)
        write_certificates(self.keys)
        for client in range(self.clients):
            write_node_key(self.keys / f"client-{client}.key")
        # JSON's strings are TOML's.
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f"address = {json.dumps(self.address)}\n"
            f"root-certificates = {json.dumps(self._authority)}\n",
            encoding="utf-8",
        )

    # Nodes

    def await_online(self, nodes: int) -> None:
        """Wait until exactly this many nodes are online."""

        def online() -> bool:
            listed = self.flwr("supernode", "list", CONNECTION)["nodes"]
            return bool(nodes == sum(node["status"] == "online" for node in listed))

        self._await(f"{nodes} nodes to be online", online)

    def node_command(self, client: int) -> list[str]:
        """The command of a client's node, with a free port."""
        return [
            "flower-supernode",
            *("--root-certificates", self._authority),
            *("--auth-supernode-private-key", str(self.keys / f"client-{client}.key")),
            *("--superlink", self.address),
            *("--host", HOST, "--port", str(available_port())),
            *("--node-config", f"partition-id={client} num-partitions={self.clients}"),
        ]

    def _register(self, client: int) -> None:
        key = str(self.keys / f"client-{client}.pub")
        self.flwr("supernode", "register", key, CONNECTION, "--name", f"client-{client}")

    # Apps

    def command(self, app: str | Path) -> str:
        """The shell command that runs an app here."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words = [str(shutil.which("flwr", path=_path())), "run", str(app), CONNECTION, "--stream"]
        return " ".join([*settings, shlex.join(words)])

    def run(self, app: str | Path, config: Mapping[str, Any] | None = None) -> str:
        """Run an app to its end, with changes to its config; shows what its server prints.

        Returns Flower's status, :data:`COMPLETED` if all went well.
        """
        run, status = self.submit(app, config), ""
        subprocess.run(["flwr", "log", run, CONNECTION, "--stream"], **self._options())
        while not status.startswith("finished"):  # the log may end earlier
            self._check()
            status = str(self.flwr("ls", CONNECTION, "--run-id", run)["runs"][0]["status"])
        return status

    def submit(self, app: str | Path, config: Mapping[str, Any] | None = None) -> str:
        """Start a run of an app; returns its id."""
        changes = " ".join(f"{name}={json.dumps(value)}" for name, value in (config or {}).items())
        overrides = ["-c", changes] if changes else []
        return str(self.flwr("run", str(app), CONNECTION, *overrides)["run-id"])

    def flwr(self, *words: str) -> Any:
        """The JSON output of a ``flwr`` command; raises its error."""
        command = ["flwr", *words, "--format", "json"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_START, **self._options()
        )
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = {}
        if done.returncode != 0 or not answer.get("success"):
            why = answer.get("error-message") or f"{done.stdout}{done.stderr}"
            raise FedShuffleError(f"flwr {shlex.join(words)} failed: {str(why).strip()}")
        return answer

    # Processes

    def start(self, name: str, tool: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a process that ends with the deployment, and logs to ``logs/NAME.log``."""
        with (self.logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [tool, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                **self._options("flower" if name.startswith("super") else f"flower-{name}"),
            )
        self.processes[name] = process
        return process

    def _options(self, home: str = "flower") -> dict[str, Any]:
        """Options of a process: all are in one group, which the SuperLink, the first, leads.

        So one signal reaches them all, but Ctrl-C in a terminal does not.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        known = [os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")]
        direct = ",".join([HOST, "localhost", *filter(None, known)])
        environment = {
            **kept,
            **self.environment,
            "FLWR_HOME": str(self.folder / home),  # each site has its own Flower home
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # by default 1 s for each message
            "NO_PROXY": direct,
            "no_proxy": direct,
            "PATH": _path(),
            "PYTHONUNBUFFERED": "1",
        }
        leader = self.processes.get("superlink")
        group = leader.pid if leader else 0
        return {"stdin": subprocess.DEVNULL, "env": environment, "process_group": group}

    def wait(self) -> None:
        """Wait forever; raises an error if a process ends."""
        self._await("Ctrl-C", lambda: False, math.inf)

    def _await(self, what: str, condition: Callable[[], bool], seconds: float = _START) -> None:
        limit = time.monotonic() + seconds
        self._check()
        while not condition():
            if time.monotonic() > limit:
                raise FedShuffleError(f"waited {seconds:g} s for {what}: see {str(self.logs)!r}.")
            time.sleep(0.5)
            self._check()

    def _check(self) -> None:
        """Raise an error with the end of its log if a process has ended."""
        for name, process in self.processes.items():
            if (code := process.poll()) is not None:
                log = self.logs / f"{name}.log"
                lines = log.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")[-15:]
                end = "\n".join([f"The end of {str(log)!r}:", *lines])
                raise FedShuffleError(f"{name} ended with exit code {code}. {end}")

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HOST, self._port), timeout=5):
            return True
        return False

    def _interrupt(self) -> None:
        """Interrupt all processes, so that an app can save its state, and wait for their end."""
        limit, number = time.monotonic() + _STOP, int(signal.SIGINT)
        with contextlib.suppress(OSError, KeyError):  # nobody is left
            while time.monotonic() < limit:
                group = self.processes["superlink"].pid
                os.killpg(group, number)
                number = 0  # from now on this only asks whether anybody is left
                time.sleep(0.05)
                # One that has ended would count; also one whose start Ctrl-C has cut short.
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-group, os.WNOHANG)[0]:
                        pass

    def _remove_folder(self, kind: type[BaseException] | None, *rest: object) -> None:
        for process in self.processes.values():
            process.wait()
        if self._temporary and kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)


def app_config(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the app in a folder; refuses other folders and unknown keys."""
    try:
        found = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FedShuffleError(
            f"{str(folder)!r} is not a Flower app: its pyproject.toml cannot be read ({error})."
            " 'fedshuffle new flower-app DIR' writes one."
        ) from error
    app = found.get("tool", {}).get("flwr", {}).get("app", {})
    if "components" not in app:
        raise FedShuffleError(
            f"{str(folder)!r} is not a Flower app: its pyproject.toml has no section"
            " [tool.flwr.app.components]. 'fedshuffle new flower-app DIR' writes one."
        )
    config: dict[str, Any] = app.get("config", {})
    for key in changes:
        if key.split(".")[0] not in config:
            raise unknown(f"key of the app's config in {str(folder)!r},", key, config)
    return config


def write_certificates(folder: Path) -> None:
    """Write a certificate for this machine, its key, and the authority that signed it.

    The authority's private key is never written, so nobody can sign with it later. For real servers
    use certificates of your own authority (docs/how-to/deploy.md).
    """
    import trustme

    authority = trustme.CA(organization_name="fedshuffle local authority", path_length=0)
    server = authority.issue_cert("localhost", HOST)
    atomic_write(folder / "server.key", server.private_key_pem.bytes(), private=True)
    atomic_write(folder / "server.crt", server.cert_chain_pems[0].bytes())
    atomic_write(folder / "ca.crt", authority.cert_pem.bytes())


def write_node_key(private: Path) -> None:
    """Write a node's key pair, on the curve P-384 and in OpenSSH's format."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    ours = form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()
    theirs = form.Encoding.OpenSSH, form.PublicFormat.OpenSSH
    atomic_write(private, key.private_bytes(*ours), private=True)
    atomic_write(private.with_suffix(".pub"), key.public_key().public_bytes(*theirs))


def available_port(port: int = 0) -> int:
    """This port of the machine, or any free one; an error if it is taken."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise FedShuffleError(
            f"port {port} of {HOST} is not available: {error}. Choose another, or leave it out for"
            " a free one."
        ) from error


def _path() -> str:
    """Where to look for commands: first beside this Python."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
