"""One Flower deployment for all tests of a file: to bring it up and to keep it up takes time."""

import re
from collections.abc import Iterator

import pytest

from fedshuffle.flower.local import CONNECTION, Deployment, write_node_key

CLIENTS = 3


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink and three SuperNodes, up until the tests of the file are done.

    A test that kills a node replaces it, and waits until all are online again.
    """
    with Deployment(CLIENTS, tmp_path_factory.mktemp("flower") / "deployment") as up:
        yield up


def replace_killed_node(deployment: Deployment, client: int) -> None:
    """Kill a client's node, as when its machine fails, and start another with a new key.

    Flower believes a killed node to be online for about a minute, and refuses a second one with its
    key: unregistering it takes no time.
    """
    name = f"client-{client}"
    node = deployment.processes.pop(name)
    node.kill()
    node.wait()
    said = re.search(r"SuperNode ID: (\d+)", (deployment.logs / f"{name}.log").read_text())
    assert said
    deployment.flwr("supernode", "unregister", said[1], CONNECTION)
    write_node_key(deployment.keys / f"{name}.key")
    deployment._register(client)
    deployment.start(name, *deployment.node_command(client))
