"""A Flower deployment on this machine: a SuperLink and its SuperNodes, with TLS and node keys.

    with Deployment(clients=3) as deployment:
        run = deployment.run("my-app", {"num-rounds": 2})
        print(run.status, run.log)

Everything listens on 127.0.0.1 only, authenticates nodes by their keys, and uses a separate Flower
configuration, so that the user's is neither read nor changed. However it ends, no process is left,
and no key in a temporary folder; the logs stay.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import os
import shlex
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshuffle._arrays import count
from fedshuffle.errors import FedShuffleError, one_line
from fedshuffle.flower.certificates import Certificates, certificates
from fedshuffle.flower.new_app import app_config
from fedshuffle.flower.processes import (
    HOST,
    KEYS,
    MARK,
    Process,
    Watcher,
    checked_port,
    forget_keys,
    free_port,
    marked,
    scripts,
    sweep,
    tail,
    tool,
)

CONNECTION = "local"  # the deployment's name in its Flower configuration
_START = 300.0  # seconds until all must be up
_POLL = 0.2
_POLL_COMMAND = 2.0  # a flwr command takes a second of computing


@dataclass(frozen=True)
class AppRun:
    """A finished run of an app: how Flower says it ended, and what its server printed."""

    id: str
    status: str
    details: str
    log: str

    @property
    def completed(self) -> bool:
        return self.status == "finished:completed"


class Deployment:
    """A SuperLink and a SuperNode for each client on this machine, while the ``with`` block runs.

    Client ``i`` runs with ``partition-id=i num-partitions=clients`` in its node config.

    Attributes:
        folder: certificates, keys, Flower's own files, and ``logs``. A temporary folder if none is
            given: it is removed at the end, except after an error.
        address: of the SuperLink, as ``host:port``.
        environment: variables that a ``flwr`` command needs to reach this deployment.
        superlink, nodes: the processes; nodes by client.
        node_ids: Flower's ids of the nodes of clients 0, 1, ...
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
        _need_flower()
        self._port = free_port() if port is None else checked_port(port)
        self._progress = progress
        self._temporary = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="fedshuffle-flower-")).absolute()
        self.address = f"{HOST}:{self._port}"
        self.logs = self.folder / "logs"
        self.environment = {
            "FLWR_HOME": str(self.folder / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        self.certificates: Certificates
        self.superlink: Process
        self.nodes: dict[int, Process] = {}
        self.node_ids: list[str] = []
        self._processes: list[Process] = []
        self._watcher: Watcher | None = None

    def __enter__(self) -> Deployment:
        try:
            self._start()
        except BaseException:
            self._close(keep=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._close(keep=kind is not None)

    def _start(self) -> None:
        try:
            self._make_folder()
            self._watcher = Watcher(self.folder, self._temporary)
            self._progress(f"certificates and keys in {self.folder / KEYS}")
            self.certificates = certificates(self.folder / KEYS, self.clients)
            self._configure()
        except OSError as error:
            raise FedShuffleError(
                f"cannot write to {str(self.folder)!r}: {one_line(error)}. Choose another folder."
            ) from error
        self._progress(f"SuperLink on https://{self.address}")
        self.superlink = self._process("superlink", self._superlink_command())
        self._await("the SuperLink to answer", self._healthy)
        self._progress(f"registering {self.clients} node keys")
        with ThreadPoolExecutor() as pool:  # most of the time is starting Python
            self.node_ids = list(pool.map(self._register, range(self.clients)))
        self._progress(f"{self.clients} SuperNodes")
        for client in range(self.clients):
            self._start_node(client)
        self.await_online()
        self._progress(f"all {self.clients} nodes are online")

    # Nodes

    def online(self) -> list[int]:
        """The clients whose nodes are online."""
        listed = self.flwr("supernode", "list", CONNECTION)["nodes"]
        there = {node["node-id"] for node in listed if node["status"] == "online"}
        return [client for client, node in enumerate(self.node_ids) if node in there]

    def await_online(self) -> None:
        """Wait until all nodes are online."""
        everyone = list(range(self.clients))
        self._await("all nodes to be online", lambda: self.online() == everyone, poll=_POLL_COMMAND)

    def _register(self, client: int) -> str:
        key, name = str(self.certificates.nodes[client].public), f"client-{client}"
        answer = self.flwr("supernode", "register", key, CONNECTION, "--name", name)
        return str(answer["node-id"])

    def _start_node(self, client: int) -> None:
        self.nodes[client] = self._process(f"client-{client}", self._node_command(client))

    def _node_command(self, client: int) -> list[str]:
        files = self.certificates
        return [
            tool("flower-supernode"),
            *("--root-certificates", str(files.authority)),
            *("--auth-supernode-private-key", str(files.nodes[client].private)),
            *("--superlink", self.address),
            *("--host", HOST, "--port", str(free_port())),
            *("--node-config", f"partition-id={client} num-partitions={self.clients}"),
        ]

    # Apps

    def command(self, app: str | Path, config: Mapping[str, Any] | None = None) -> str:
        """The shell command that runs an app here."""
        flwr = "flwr" if shutil.which("flwr") == tool("flwr") else tool("flwr")
        words = [flwr, "run", str(app), CONNECTION, *_overrides(config), "--stream"]
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(words)])

    def run(
        self,
        app: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        seconds: float = math.inf,
        show: Callable[[str], None] = lambda text: None,
    ) -> AppRun:
        """Run an app to its end, with changes to its config; ``show`` receives what its server
        prints.
        """
        return self._follow(self._submit(app, config), seconds, show)

    def _submit(self, app: str | Path, config: Mapping[str, Any] | None) -> str:
        """Submit an app; returns the id of its run."""
        app_config(Path(app), config or {})
        return str(self.flwr("run", str(app), CONNECTION, *_overrides(config))["run-id"])

    def _log_stream(self, run: str) -> Process:
        """A process that prints the log of a run, and ends with it."""
        return self._process(f"run-{run}", [tool("flwr"), "log", run, CONNECTION, "--stream"])

    def _follow(
        self, run: str, seconds: float, show: Callable[[str], None] = lambda text: None
    ) -> AppRun:
        """Wait for the end of a run."""
        limit, shown = time.monotonic() + seconds, 0
        stream = self._log_stream(run)
        while True:
            ended = stream.exit_code is not None
            log = stream.output()
            show(log[shown:])
            shown = max(shown, len(log))
            self.superlink.check()
            if ended:
                listed = self.flwr("ls", CONNECTION, "--run-id", run)["runs"][0]
                if listed["status"].startswith("finished"):
                    details = listed["status-details"]
                    return AppRun(run, listed["status"], "" if details == "N/A" else details, log)
                stream = self._log_stream(run)  # the connection broke: Flower repeats the log
            if time.monotonic() > limit:
                raise FedShuffleError(f"run {run} is not done after {seconds:g} s. {tail(stream)}")
            time.sleep(_POLL)

    def flwr(self, *words: str) -> Any:
        """The JSON output of a ``flwr`` command; raises its error."""
        done = subprocess.run(
            [tool("flwr"), *words, "--format", "json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self._environment("flower"),
            timeout=_START,
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

    def wait(self) -> None:
        """Wait forever; raises an error if a process ends."""
        self._await("Ctrl-C", lambda: False, math.inf)

    def _process(self, name: str, command: Sequence[str]) -> Process:
        """Start a process that ends with the deployment."""
        home = f"flower-{name}" if name.startswith("client") else "flower"
        process = Process(name, command, self.logs / f"{name}.log", self._environment(home))
        self._processes.append(process)
        return process

    def _environment(self, home: str) -> dict[str, str]:
        """The user's environment, without Flower's variables."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        known = [os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")]
        direct = ",".join([HOST, "localhost", *filter(None, known)])
        return {
            **kept,
            **self.environment,
            "FLWR_HOME": str(self.folder / home),  # each site has its own Flower home
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # by default 1 s for each message
            "NO_PROXY": direct,
            "no_proxy": direct,
            "PATH": os.pathsep.join([scripts(), os.environ.get("PATH", os.defpath)]),
            "PYTHONUNBUFFERED": "1",
            MARK: str(self.folder),
        }

    def _superlink_command(self) -> list[str]:
        files = self.certificates
        return [
            tool("flower-superlink"),
            *("--ssl-ca-certfile", str(files.authority)),
            *("--ssl-certfile", str(files.certificate)),
            *("--ssl-keyfile", str(files.key)),
            *("--host", HOST, "--port", str(self._port)),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        ]

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (self.folder / KEYS).is_dir() and any(self.folder.iterdir()):
            raise FedShuffleError(
                f"{str(self.folder)!r} holds other things than a deployment. Choose a new folder."
            )
        if marked(self.folder):
            raise FedShuffleError(f"a deployment is up in {str(self.folder)!r} already.")

    def _configure(self) -> None:
        home = Path(self.environment["FLWR_HOME"])
        home.mkdir(exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        # JSON's strings are TOML's.
        address, authority = json.dumps(self.address), json.dumps(str(self.certificates.authority))
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f"address = {address}\nroot-certificates = {authority}\n",
            encoding="utf-8",
        )

    def _healthy(self) -> bool:
        trust = ssl.create_default_context(cafile=str(self.certificates.authority))
        connection = http.client.HTTPSConnection(HOST, self._port, timeout=5, context=trust)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _await(
        self,
        what: str,
        condition: Callable[[], bool],
        seconds: float = _START,
        poll: float = _POLL,
    ) -> None:
        limit = time.monotonic() + seconds
        while True:
            running = [self.superlink, *self.nodes.values()]
            for process in running:
                process.check()
            if condition():
                return
            if time.monotonic() > limit:
                tails = "\n".join(map(tail, running))
                raise FedShuffleError(f"waited {seconds:g} s for {what}. {tails}")
            time.sleep(poll)

    def _close(self, keep: bool) -> None:
        try:
            for group in (self._processes[1:], self._processes[:1]):  # the SuperLink last
                for process in group:
                    process.ask_to_end()
                for process in group:
                    process.end()
        except BaseException:  # a second Ctrl-C
            keep = True
            raise
        finally:
            for process in self._processes:
                process.kill()
            sweep(self.folder, 5.0)  # processes that the SuperLink started in other sessions
            if self._temporary:
                forget_keys(self.folder)
            if self._watcher:
                self._watcher.dismiss()
        if self._temporary and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def _need_flower() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise FedShuffleError(
            "Flower is not installed. Install it with pip install 'fedshuffle[flower]'."
        )
    if os.name != "posix":
        raise FedShuffleError("a local deployment needs Linux or macOS.")


def _overrides(config: Mapping[str, Any] | None) -> list[str]:
    """Values for keys of an app's config, as ``flwr run`` takes them.

    >>> _overrides({"num-rounds": 2, "out": "here", "resume": False})
    ['-c', 'num-rounds=2 out="here" resume=false']
    """
    words = [f"{name}={json.dumps(value)}" for name, value in (config or {}).items()]
    return ["-c", " ".join(words)] if words else []
