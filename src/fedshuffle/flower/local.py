"""A Flower deployment on this machine: a SuperLink and its SuperNodes, with TLS and node keys.

    with Deployment(clients=3) as deployment:
        run = deployment.run("my-app", {"num-rounds": 2})
        print(run.status, run.log)

All of it listens on 127.0.0.1 only, knows its nodes by their keys, and has a Flower configuration
of its own, so that the user's is neither read nor changed. At the end no process is left, whatever
ended it, and no key in a temporary folder; the logs stay.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import shlex
import shutil
import ssl
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from fedshuffle._arrays import count
from fedshuffle.errors import FedShuffleError, one_line, unknown
from fedshuffle.flower.certificates import Certificates, NodeKey, certificates
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
_POLL_BY_COMMAND = 2.0  # a flwr command takes a second of computing


@final
@dataclass(frozen=True)
class Run:
    """A finished run of an app: how Flower says it ended, and what its server printed."""

    id: str
    status: str
    details: str
    log: str

    @property
    def completed(self) -> bool:
        return self.status == "finished:completed"


@final
class Deployment:
    """A SuperLink and a SuperNode for each client on this machine, up while the ``with`` lasts.

    Client ``i`` runs with ``partition-id=i num-partitions=clients`` in its node config.

    Attributes:
        folder: certificates, keys, Flower's own files, and ``logs``. A temporary folder if none is
            given: it is removed at the end, unless something went wrong.
        address: of the SuperLink, as ``host:port``.
        environment: what a ``flwr`` command needs to reach this deployment.
        superlink, nodes: the processes; of the nodes, those that ought to run, by client.
        node_ids: what Flower calls the nodes of clients 0, 1, ...
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
        self._others: list[Process] = []
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

    def close(self) -> None:
        """Stop the nodes, then the SuperLink; see that nothing is left."""
        self._close(keep=False)

    def _start(self) -> None:
        try:
            self._made_folder()
            self._watcher = Watcher(self.folder, self._temporary)
            self._progress(f"certificates and keys in {self.folder / KEYS}")
            self.certificates = certificates(self.folder / KEYS, self.clients)
            self._configure()
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise FedShuffleError(
                f"cannot write to {str(self.folder)!r}: {one_line(error)}. Choose another folder."
            ) from error
        self._progress(f"SuperLink on https://{self.address}")
        self.superlink = self._process("superlink", self._superlink_command())
        self._await("the SuperLink to answer", self._answers)
        self._progress(f"registering {self.clients} node keys")
        self.node_ids = self._register(self.certificates.nodes)
        self._progress(f"{self.clients} SuperNodes")
        self.nodes = {i: self._node(i) for i in range(self.clients)}
        self.await_online()
        self._progress(f"all {self.clients} nodes are online")

    # Nodes

    def online(self) -> list[int]:
        """The clients whose nodes are online."""
        listed = self.flwr("supernode", "list", CONNECTION, "--format", "json")["nodes"]
        there = {node["node-id"] for node in listed if node["status"] == "online"}
        return [client for client, node in enumerate(self.node_ids) if node in there]

    def await_online(self, seconds: float = _START) -> None:
        """Wait until all nodes are online."""
        self._await(
            "all nodes to be online",
            lambda: len(self.online()) == self.clients,
            seconds,
            _POLL_BY_COMMAND,
        )

    def kill_node(self, client: int) -> None:
        """End a client's node at once, as when its machine fails."""
        self.nodes.pop(client).kill()

    def restart_node(self, client: int) -> None:
        """Start a client's node again, with the same key; it is online a little later.

        Flower lets nobody in under a name that it believes to be online, which it does for about a
        minute after a node was killed: this waits for as long.
        """
        if client in self.nodes:
            self.nodes[client].ask_to_end()
            self.nodes.pop(client).end()
        gone = f"client {client} to be gone"
        self._await(gone, lambda: client not in self.online(), poll=_POLL_BY_COMMAND)
        self.nodes[client] = self._node(client)

    def node_command(self, client: int, key: Path | None, *, tls: bool = True) -> list[str]:
        """The command that starts a node: with this private key, or without any."""
        trust = ["--root-certificates", str(self.certificates.authority)] if tls else ["--insecure"]
        known = [] if key is None else ["--auth-supernode-private-key", str(key)]
        where = ["--superlink", self.address, "--host", HOST, "--port", str(free_port())]
        config = f"partition-id={client} num-partitions={self.clients}"
        return [tool("flower-supernode"), *trust, *known, *where, "--node-config", config]

    def start(self, name: str, command: Sequence[str]) -> Process:
        """Start any other process; it ends with the deployment."""
        process = self._process(name, command)
        self._others.append(process)
        return process

    def _node(self, client: int) -> Process:
        key = self.certificates.nodes[client].private
        return self._process(f"client-{client}", self.node_command(client, key))

    # Apps

    def command(self, app: str | Path, config: Mapping[str, Any] | None = None) -> str:
        """What to type in a shell to run an app here."""
        flwr = "flwr" if shutil.which("flwr") == tool("flwr") else tool("flwr")
        words = [flwr, "run", str(app), CONNECTION, *_overrides(config), "--stream"]
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(words)])

    def run(
        self,
        app: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        seconds: float = float("inf"),
        show: Callable[[str], None] = lambda text: None,
    ) -> Run:
        """Run an app to its end; ``show`` is given what its server prints, as it comes."""
        return self.follow(self.begin(app, config), seconds=seconds, show=show)

    def begin(self, app: str | Path, config: Mapping[str, Any] | None = None) -> str:
        """Submit an app, with other values for keys of its config; the id of its run."""
        app_config(Path(app), config or {})
        answer = self.flwr("run", str(app), CONNECTION, *_overrides(config), "--format", "json")
        return str(answer["run-id"])

    def stream(self, run: str) -> Process:
        """What prints the log of a run as it comes, and ends with the run."""
        return self.start(f"run-{run}", [tool("flwr"), "log", run, CONNECTION, "--stream"])

    def follow(
        self,
        run: str,
        *,
        seconds: float = float("inf"),
        show: Callable[[str], None] = lambda text: None,
    ) -> Run:
        """Wait for the end of a run."""
        limit, shown, log = time.monotonic() + seconds, 0, ""
        stream = self.stream(run)
        while True:
            ended = stream.exit_code is not None
            log = stream.output()
            show(log[shown:])
            shown = max(shown, len(log))
            self.superlink.check()
            if ended and (listed := self._listed(run))["status"].startswith("finished"):
                details = listed["status-details"]
                return Run(run, listed["status"], "" if details == "N/A" else details, log)
            if ended:  # the connection broke: Flower tells all again
                stream = self.stream(run)
            if time.monotonic() > limit:
                raise FedShuffleError(f"run {run} is not done after {seconds:g} s. {tail(stream)}")
            time.sleep(_POLL)

    def _listed(self, run: str) -> dict[str, str]:
        listed = self.flwr("ls", CONNECTION, "--run-id", run, "--format", "json")["runs"]
        found: dict[str, str] = listed[0]
        return found

    def flwr(self, *words: str) -> Any:
        """What a ``flwr`` command answers, as JSON."""
        return _answer(self._flwr(*words))

    # Processes

    def processes(self) -> list[int]:
        """The ids of all processes of this deployment that run. Knows those of Linux only."""
        return marked(self.folder)

    def wait(self) -> None:
        """Wait for as long as all is well; an error if a process ends."""
        while True:
            for process in [self.superlink, *self.nodes.values()]:
                process.check()
            time.sleep(_POLL)

    def _flwr(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [tool("flwr"), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment("flower"),
        )

    def _process(self, name: str, command: Sequence[str]) -> Process:
        home = f"flower-{name}" if name.startswith("client") else "flower"
        return Process(name, command, self.logs / f"{name}.log", self._environment(home))

    def _environment(self, home: str) -> dict[str, str]:
        """The user's environment, but with nothing in it that would change Flower's ways."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
        known = [os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")]
        direct = ",".join([HOST, "localhost", *filter(None, known)])
        return {
            **kept,
            **self.environment,
            "FLWR_HOME": str(self.folder / home),  # each site has a Flower home of its own
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # 1 s if not set: once a message
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

    def _made_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (self.folder / KEYS).is_dir() and any(self.folder.iterdir()):
            raise FedShuffleError(
                f"{str(self.folder)!r} holds other things than a deployment. Choose a new folder."
            )
        if self.processes():
            raise FedShuffleError(f"a deployment is up in {str(self.folder)!r} already.")

    def _configure(self) -> None:
        home = Path(self.environment["FLWR_HOME"])
        home.mkdir(exist_ok=True)
        # JSON's strings are TOML's.
        address, authority = json.dumps(self.address), json.dumps(str(self.certificates.authority))
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f"address = {address}\nroot-certificates = {authority}\n",
            encoding="utf-8",
        )

    def _register(self, keys: Sequence[NodeKey]) -> list[str]:
        """Register all keys at once: most of the time is that of starting Python."""
        begun = [
            self._flwr(
                *("supernode", "register", str(key.public), CONNECTION),
                *("--name", f"client-{i}", "--format", "json"),
            )
            for i, key in enumerate(keys)
        ]
        return [str(_answer(command)["node-id"]) for command in begun]

    def _answers(self) -> bool:
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
            for process in [self.superlink, *self.nodes.values()]:
                process.check()
            if condition():
                return
            if time.monotonic() > limit:
                tails = "\n".join(map(tail, [self.superlink, *self.nodes.values()]))
                raise FedShuffleError(f"waited {seconds:g} s for {what}. {tails}")
            time.sleep(poll)

    def _close(self, keep: bool) -> None:
        begun = [*self._others, *self.nodes.values()]
        link = [self.superlink] if hasattr(self, "superlink") else []
        try:
            for group in (begun, link):
                for process in group:
                    process.ask_to_end()
                for process in group:
                    process.end()
        except BaseException:  # somebody is in a hurry
            keep = True
            raise
        finally:
            for process in [*begun, *link]:
                process.kill()
            sweep(self.folder, 5.0)  # what the SuperLink put into sessions of their own
            if self._temporary:
                forget_keys(self.folder)
            if self._watcher:
                self._watcher.dismiss()
        if self._temporary and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def app_config(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the app in a folder; refuses other folders, and keys that it does not have."""
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


def _answer(command: subprocess.Popen[str]) -> Any:
    """The JSON that a ``flwr`` command answers, or the error that it tells."""
    try:
        out, err = command.communicate(timeout=_START)
    except BaseException:
        command.kill()
        command.communicate()
        raise
    try:
        answer = json.loads(out)
    except ValueError:
        answer = {}
    if command.returncode != 0 or not answer.get("success"):
        words = shlex.join(map(str, list(command.args)[1:]))  # type: ignore[arg-type]
        why = answer.get("error-message") or f"{out}{err}"
        raise FedShuffleError(f"flwr {words} failed: {str(why).strip()}")
    return answer
