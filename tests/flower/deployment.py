"""One Flower deployment for all tests of a file: to bring it up and to keep it up takes time."""

from collections.abc import Iterator

import pytest

from fedshuffle.flower.local import Deployment

CLIENTS = 3


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink and three SuperNodes, up until the tests of the file are done.

    A test that kills a node restarts it, and waits until all are online again.
    """
    with Deployment(CLIENTS, tmp_path_factory.mktemp("flower") / "deployment") as up:
        yield up


def restart_killed_node(deployment: Deployment, client: int) -> None:
    """Kill a client's node, as when its machine fails, and start it again with the same key.

    Flower believes a killed node to be online for about a minute, and refuses a second one: this
    waits as long.
    """
    node = deployment.processes.pop(f"client-{client}")
    node.kill()
    node.wait()
    deployment.await_online(CLIENTS - 1)
    deployment.start(f"client-{client}", *deployment.node_command(client))
