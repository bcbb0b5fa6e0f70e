"""The messages: what is written is read, and nothing else."""

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import protocol
from tests.flower.helpers import change

pytestmark = pytest.mark.usefixtures("server_process")


def _written(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def _zipped() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(2))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 no archive",
        _zipped(),
        _written(np.zeros(43, np.float32)).replace(b"(43,), }".ljust(20), b"(43000000000000,), }"),
        _written(np.zeros(43, np.float32)).replace(b"{'descr'", b"{{{descr"),
        _written(np.zeros(43, np.longdouble)),
        _written(np.zeros(43, ">f4")),
    ],
)
def test_invalid_array_bytes_are_refused(data: bytes) -> None:
    record = ArrayRecord({"update": Array("float32", (43,), "numpy.ndarray", data)})
    message = Message(RecordDict({"arrays": record}), 1, "train")
    with pytest.raises(FedShuffleError, match="update"):
        protocol.vectors(message, torch.float32, update=[43])


def test_arrays_are_never_unpickled() -> None:
    class Marker:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was unpickled",))

    buffer = io.BytesIO()
    np.save(buffer, np.array([0]))
    head = buffer.getvalue()[:128].replace(b"'<i8'", b"'|O' ")
    record = ArrayRecord(
        {"x": Array("object", (1,), "numpy.ndarray", head + pickle.dumps(Marker()))}
    )
    message = Message(RecordDict({"arrays": record}), 1, "train")
    with pytest.raises(FedShuffleError, match="'x'"):
        protocol.vectors(message, torch.float32, x=[1])


def test_other_protocol_versions_are_refused() -> None:
    content = protocol.content(protocol.Query(0, 0))
    content.config_records["fedshuffle"]["protocol"] = 99
    with pytest.raises(FedShuffleError, match="99"):
        protocol.read(Message(content, 1, protocol.FULL_GRADIENT), protocol.Query)


@pytest.mark.parametrize(
    ("key", "value"),
    [("client", "zero"), ("client", -1), ("client", 2**63), ("round", True), ("more", 1)],
)
def test_fields_are_checked(key: str, value: object) -> None:
    content = protocol.content(protocol.Query(0, 0))
    change(content, **{key: value})
    with pytest.raises(FedShuffleError, match=key):
        protocol.read(Message(content, 1, protocol.FULL_GRADIENT), protocol.Query)


LOADING = "Error(s) in loading state_dict for Net:\n\tMissing key(s): a. \n\tUnexpected key(s): b."


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (None, "no reason given"),
        (" \n", "no reason given"),
        (
            f"<class 'RuntimeError'>:<'{LOADING}'>",  # of a SuperNode
            "<class 'RuntimeError'>:<'Error(s) in loading state_dict for Net: Missing key(s): a."
            " Unexpected key(s): b.'>",
        ),
        (  # of Ray, in Flower's simulator
            f"Traceback (most recent call last):\n  File 'a.py', line 1\nRuntimeError: {LOADING}",
            "RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): a. Unexpected"
            " key(s): b.",
        ),
    ],
)
def test_reason_of_an_error_is_all_that_the_exception_says(reason: str | None, said: str) -> None:
    message = Message(RecordDict({}), 1, "train")
    error = Message(Error(2, reason), reply_to=message)
    assert protocol.reason_of(error) == said
