"""Traces from what devices recorded, in Python and at the command line."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshuffle import Federation, FedShuffleError
from fedshuffle.availability import Trace, convert_device_trace
from tests.cli.test_cli import run

DEVICES: dict[str, Any] = {
    "a": {"active": [0, 100, 130], "inactive": [60, 110, 300], "finish_time": 600},
    "b": {"active": [61], "inactive": [119]},  # between the beginnings of two rounds of 60 seconds
    "c": {"active": [480], "inactive": [600], "model": "phone"},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "devices.json"
    file.write_text(json.dumps(DEVICES))
    return file


def test_devices_are_there_if_they_are_when_a_round_begins(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "trace.csv"
    trace = convert_device_trace(source, target, seconds_per_round=60)
    assert target.read_text().splitlines() == ["client,begin,end", "a,0,1", "a,3,5", "c,8,10"]
    read = Trace.read(target, ["a", "c"], allow_gaps=True)
    for time in range(10):
        second, there = 60 * time, trace.probability(time)
        want = [
            any(x <= second < y for x, y in zip(d["active"], d["inactive"], strict=True))
            for d in (DEVICES["a"], DEVICES["c"])
        ]
        assert there.tolist() == read.probability(time).tolist() == want


def test_the_command(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, store = tmp_path / "trace.csv", tmp_path / "people"
    words = ["data", "trace", str(source), "--out", str(out), "--seconds-per-round", "60"]
    assert run(monkeypatch, *words, "--clients", "2", "--json") == 0
    facts = {"out": str(out), "clients": 2, "intervals": 3, "rounds": 10}
    assert json.loads(capsys.readouterr().out) == facts | {"rounds_without_clients": 5}
    assert out.read_text().splitlines()[1:] == ["0,0,1", "0,3,5", "1,8,10"]
    there = f"trace:{out}+gaps"
    assert run(monkeypatch, "audit", "--sizes", "1,2", "--availability", there, "--json") == 0
    np.testing.assert_allclose(
        json.loads(capsys.readouterr().out)["inclusion_probabilities"], [0.3, 0.2]
    )
    Federation.from_arrays(np.arange(3.0), client_ids=["ann", "bob, jr", "bob, jr"]).save(store)
    assert run(monkeypatch, *words, "--data", str(store)) == 0
    assert "In 5 of them nobody is there" in capsys.readouterr().out
    assert out.read_text().splitlines()[-1] == '"bob, jr",8,10'
    assert len(Trace.read(out, ["ann", "bob, jr"], allow_gaps=True)) == 2
    assert run(monkeypatch, *words, "--clients", "3") == 2
    assert "2 devices are there" in capsys.readouterr().err
    for wrong in (["--clients", "0"], ["--clients", "1", "--data", str(store)]):
        assert run(monkeypatch, *words, *wrong) == 2
        assert "--clients" in capsys.readouterr().err
    assert run(monkeypatch, *words[:-1], "-1") == 2
    assert "--seconds-per-round is -1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "cannot read"),
        ("", "cannot read"),
        (pickle.dumps(DEVICES), "it is a pickle.*Save it as JSON"),
        ("[]", "one JSON object"),
        ("{}", "one JSON object"),
        ('{"a": 3}', "device 'a': give the lists"),
        ('{"a": {"active": [1]}}', "device 'a': give the lists"),
        ('{"a": {"active": [1], "inactive": []}}', "same length"),
        ('{"a": {"active": 1, "inactive": 2}}', "must be lists"),
        ('{"a": {"active": [-1], "inactive": [2]}}', r"active\[0\] is -1"),
        ('{"a": {"active": [1], "inactive": ["noon"]}}', r"inactive\[0\] is 'noon'"),
        ('{"a": {"active": [1], "inactive": [NaN]}}', r"inactive\[0\] is nan"),
        ('{"a": {"active": [1], "inactive": [2]}}', "no devices are there.*shorter rounds"),
    ],
    ids=str,
)
def test_what_cannot_be_read_leaves_the_target_as_it_was(
    tmp_path: Path, data: str | bytes, words: str
) -> None:
    source, target = tmp_path / "devices.json", tmp_path / "trace.csv"
    source.write_bytes(data.encode() if isinstance(data, str) else data)
    target.write_text("before")
    with pytest.raises(FedShuffleError, match=words):
        convert_device_trace(source, target, seconds_per_round=60)
    assert target.read_text() == "before"
