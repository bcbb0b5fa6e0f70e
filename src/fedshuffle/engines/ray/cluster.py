"""The Ray cluster to use: the program's own, the one at an address, or a local one."""

import contextlib
import math
import os
import secrets
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

from fedshuffle._terminal import restored_signals
from fedshuffle.engines.cpu_tuning import available_cores
from fedshuffle.errors import FedShuffleError, optional_import


def library(local: bool = False) -> Any:
    """Ray, imported on first use; ``local``: for a cluster of this machine alone."""
    if local and "ray" not in sys.modules:  # which reads these only once, when it is imported
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listen on loopback only
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    with restored_signals():  # Ray takes SIGTERM, which saves runs
        return optional_import("ray", "the engine 'ray'", "ray")


def current() -> str | None:
    """Identifies the cluster that this program is connected to; None if to none."""
    ray = library()
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


def join(address: str | None, cpus: float) -> bool:
    """Use a cluster; whether it was joined here, and is to be left in the end.

    If the program has initialised Ray, that cluster is used and stays. Otherwise the one at the
    address (or ``RAY_ADDRESS``), or else a new one on this machine with at least this many CPUs.
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    ray = library(local=wanted == "local")
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            raise FedShuffleError(
                f"this program is connected to a Ray cluster at {here!r} already, and address is"
                f" {address!r}. Leave the address out, or call ray.shutdown() first."
            )
        return False
    options: dict[str, Any] = {}
    if wanted == "local":
        _check_token_mode(ray.__version__)
        _create_token()
        cores = max(available_cores(), math.ceil(cpus))
        options = {"num_cpus": cores, "include_dashboard": False}
    else:
        _check(wanted)
    try:
        with restored_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", ResourceWarning)
            ray.init(wanted, log_to_driver=False, configure_logging=False, **options)
    except BaseException as error:
        ray.shutdown()
        if not isinstance(error, OSError | RuntimeError | ValueError):
            raise
        first = str(error).strip().partition("\n")[0].rstrip()  # of what is often a page
        said = f"{type(error).__name__}: {first}"[:300].rstrip(".")
        if wanted == "local":
            raise FedShuffleError(f"Ray cannot be started here: {said}.") from error
        raise FedShuffleError(
            f"the Ray cluster at {wanted!r} cannot be joined: {said}. Is it a Ray"
            f" {ray.__version__}, and do RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH name its token?"
        ) from error
    return True


def _check_token_mode(version: str) -> None:
    """Refuse to start a cluster that would ask for no token.

    Ray reads the mode when it is imported. From 2.59 on it also sets it when a cluster starts.
    """
    if "RAY_AUTH_MODE" not in os.environ and [int(n) for n in version.split(".")[:2]] < [2, 59]:
        raise FedShuffleError(
            f"Ray {version} was imported before fedshuffle could ask for a token, so every user of"
            " this machine could run code in the cluster. Set RAY_AUTH_MODE=token before the"
            " program starts, call ray.init() in it, or install Ray 2.59 or later."
        )


def _create_token() -> None:
    """Create Ray's token readable by this user only; Ray would let every user read it."""
    path = Path.home() / ".ray" / "auth_token"
    if os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} or path.exists():
        return
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w") as file:
            file.write(secrets.token_hex(32))


def _check(address: str) -> None:
    """Refuse an address at which no cluster can be joined; Ray itself would wait for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "://" in host:
        raise FedShuffleError(
            f"the address {address!r} cannot be read: run on a machine of the cluster, and write"
            " HOST:PORT of its head."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except OSError as error:
        raise FedShuffleError(
            f"no Ray cluster answers at {address!r}. Start one with 'ray start --head', or leave"
            " the address out for a local one."
        ) from error
