"""The Ray cluster to work on: the program's own, the one at an address, or one started here.

A cluster runs whatever its members send it. So the one that is started here listens on the loopback
address only, asks for a token that only this user can read, and ends with the program.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedshuffle.engines.machine import cores_here
from fedshuffle.errors import FedShuffleError

_ANSWERS_WITHIN = 10.0
"""Seconds in which a cluster must answer at its address."""

_made: ExitStack | None = None
"""How to leave the cluster, if it was joined here and not by the program itself."""
_members = 0
_joined: str | None = None
"""Which cluster that is."""
_lock = threading.RLock()


def identity() -> str | None:
    """Which cluster this program is connected to; None if to none."""
    ray = library()
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


def library() -> Any:
    """Ray itself, imported only where it is used."""
    try:
        with _signals_kept():
            import ray
    except ImportError as error:
        raise FedShuffleError(
            f"the engine 'ray' needs Ray ({error}). Install it with pip install 'fedshuffle[ray]'."
        ) from error
    return ray


def join(address: str | None, cpus: float) -> Callable[[], None]:
    """Be a member of a cluster, and get what leaves it.

    If the program has initialised Ray, that is the cluster, and it stays. Without an address
    (``RAY_ADDRESS`` counts, too) one with so many CPUs, or all of this machine, is started here.
    The last member to leave shuts down what was started here.
    """
    with _lock:
        return _join(address, cpus)


def _join(address: str | None, cpus: float) -> Callable[[], None]:
    global _made, _members
    ray = library()
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    if identity() != _joined:
        _leave_all()  # the program has shut it down in the meantime
    if ray.is_initialized():
        _refuse_another(ray, address)
        if _made is None:
            return lambda: None
    else:
        with ExitStack() as undo:
            if wanted == "local":
                _start(ray, undo, cpus)
            else:
                _connect(ray, undo, wanted)
            _made = undo.pop_all()
    _members += 1
    mine, left = _made, False

    def leave() -> None:
        global _members
        nonlocal left
        with _lock:
            if not left and mine is _made:
                _members -= 1
                if not _members:
                    _leave_all()
            left = True

    return leave


def _leave_all() -> None:
    global _made, _members
    made, _made, _members = _made, None, 0
    if made is not None:
        made.close()


def _initialise(ray: Any, undo: ExitStack, *words: Any, **options: Any) -> None:
    """Start or join a cluster, and note which it is: only that one is ended here."""
    global _joined
    began = False

    def shutdown() -> None:
        global _joined
        if not began or identity() == _joined:  # or else the program has joined another
            ray.shutdown()
        _joined = None

    undo.callback(shutdown)
    ray.init(*words, log_to_driver=False, configure_logging=False, **options)
    began, _joined = True, identity()


def _refuse_another(ray: Any, address: str | None) -> None:
    if address in (None, "auto"):
        return
    here = ray.get_runtime_context().gcs_address
    same = address == here or (
        _loopback_host(address) and address.rpartition(":")[2] == here.rpartition(":")[2]
    )
    if not same:
        raise FedShuffleError(
            f"this program is connected to a Ray cluster at {here!r} already, and address is"
            f" {address!r}. Leave the address out, or call ray.shutdown() first."
        )


def _start(ray: Any, undo: ExitStack, cpus: float) -> None:
    home = short_folder()
    undo.callback(shutil.rmtree, home, ignore_errors=True)
    token = home / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    undo.callback(_reread_token)
    undo.enter_context(_environment(settings))
    _reread_token()
    try:
        with _quietly(), loopback():
            _initialise(
                ray,
                undo,
                "local",
                num_cpus=max(cores_here(), math.ceil(cpus)),
                include_dashboard=False,
                _temp_dir=str(home / "ray"),  # Ray lets all users into it, but not into home
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise FedShuffleError(f"Ray cannot be started here: {_short(error)}") from error
    for node in ray.nodes():
        if not ipaddress.ip_address(node["NodeManagerAddress"]).is_loopback:
            raise FedShuffleError(
                f"this Ray ({ray.__version__}) listens to other machines, so it was stopped. Start"
                " a cluster yourself, and give its address."
            )


def short_folder() -> Path:
    """A new temporary folder for Ray, whose sockets' names may have at most about 100 letters."""
    place = tempfile.gettempdir()
    short = len(place) < 24 or os.name == "nt"
    return Path(tempfile.mkdtemp(prefix="fs-", dir=place if short else "/tmp"))


def _connect(ray: Any, undo: ExitStack, address: str) -> None:
    if "://" in address:
        raise FedShuffleError(
            f"the address {address!r} is one for Ray's client. Run on a machine of the cluster, and"
            " give HOST:PORT of its head."
        )
    alone = False
    if address != "auto":
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdecimal()):
            raise FedShuffleError(f"the address {address!r} cannot be read: write HOST:PORT.")
        if not _answers(host, int(port)):
            raise FedShuffleError(
                f"no Ray cluster answers at {address!r}. Start one with 'ray start --head', or"
                " leave the address out for one of your own."
            )
        # Ray takes loopback for the machine's own address; a cluster may listen on the first only.
        alone = _loopback_host(address) and not _answers(_own_address(), int(port))
    _reread_token()
    try:
        with _quietly(), loopback() if alone else contextlib.nullcontext():
            _initialise(ray, undo, address)
    except (OSError, RuntimeError, ValueError) as error:
        raise FedShuffleError(
            f"the Ray cluster at {address!r} cannot be joined: {_short(error)} Is it a Ray"
            f" {ray.__version__}, and do RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH name its token?"
        ) from error


@contextmanager
def loopback() -> Iterator[None]:
    """Let a cluster that is started or joined inside use the loopback address alone.

    Ray does so by itself where it knows no clusters of several machines, and has no other switch.
    """
    from ray._private import ray_constants

    known = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = known


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _reread_token() -> None:
    """Ray keeps the first token that it reads, which is that of another cluster."""
    with contextlib.suppress(ImportError, AttributeError):
        inside: Any = importlib.import_module("ray._raylet")
        inside.Config.initialize("")
        inside.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _quietly() -> Iterator[None]:
    with _signals_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", ResourceWarning)
        yield


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and runs want to save their state first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), _ANSWERS_WITHIN).close()
    except OSError:
        return False
    return True


def _own_address() -> str:
    from ray.util import get_node_ip_address

    found: str = get_node_ip_address()
    return found


def _loopback_host(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _short(error: Exception) -> str:
    """The first line of what Ray says, which is often a page."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300].rstrip(".") + "."
