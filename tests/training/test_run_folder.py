"""What a run does with a folder that is damaged, is not its own, or is in use."""

import itertools
import json
import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import FedShuffleError, _files
from fedshuffle.state import State
from fedshuffle.training.run_folder import RunFolder
from tests.training.test_resume import Killed, go, vector, without_time

ROUNDS = 8
START = State(torch.tensor([1.0, 2.0]), {"m": torch.tensor([3.0])})
SETTINGS = {"rounds": 100, "engine": "sequential", "seed": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 rounds with checkpoints 3, 6 and 8."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    go(out, rounds=ROUNDS, checkpoint_every=3)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def longer() -> Any:
    """That run, two rounds longer and never interrupted."""
    return go(None, rounds=ROUNDS + 2)


def resumed(out: Path) -> Any:
    return go(out, rounds=ROUNDS + 2, checkpoint_every=3, resume=True)


def files(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


# Checkpoints


def small_run(folder: Path) -> RunFolder:
    """Three rounds, each with a checkpoint, of which two are kept."""
    run = RunFolder(folder, keep=2)
    run.begin(SETTINGS, START, resume=False)
    for state in states()[1:]:
        run.record({"round": state.round})
        run.save(state)
    return run


def states() -> list[State]:
    return [State(START.x + r, {"m": START.method_state["m"] * r}, round=r) for r in range(4)]


def parts(state: State) -> tuple[int, list[float], list[float]]:
    return state.round, state.x.tolist(), state.method_state["m"].tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    small_run(folder)
    return folder / "checkpoints" / "00000003"


@given(data=st.data())
def test_a_checkpoint_with_a_flipped_bit_is_never_taken_for_another(
    checkpoint: Path, data: st.DataObject
) -> None:
    file = checkpoint.with_suffix(data.draw(st.sampled_from([".json", ".safetensors"])))
    whole = file.read_bytes()
    place = data.draw(st.integers(0, 8 * len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place // 8] ^= 1 << place % 8
    file.write_bytes(damaged)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = RunFolder(checkpoint.parent.parent).latest()
    finally:
        file.write_bytes(whole)
    assert found is not None
    assert parts(found) in [parts(state) for state in states()[2:]]


def test_every_byte_of_the_facts_of_a_checkpoint_counts(checkpoint: Path) -> None:
    """All of the small file: the round, the run and the checksum itself."""
    file = checkpoint.with_suffix(".json")
    whole = file.read_bytes()
    known = [parts(state) for state in states()[2:]]
    try:
        for place in range(0, 8 * len(whole), 7):  # every byte, and its bits in turn
            damaged = bytearray(whole)
            damaged[place // 8] ^= 1 << place % 8
            file.write_bytes(damaged)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = RunFolder(checkpoint.parent.parent).latest()
            assert found is not None
            assert parts(found) in known, place
    finally:
        file.write_bytes(whole)


def test_a_checkpoint_under_the_name_of_another_round_is_skipped(out: Path, longer: Any) -> None:
    for suffix in (".json", ".safetensors"):
        old = out / "checkpoints" / f"00000006{suffix}"
        shutil.copy(old, old.with_name(f"00000008{suffix}"))
    with pytest.warns(UserWarning, match="00000008.json"):
        result = resumed(out)
    assert torch.equal(vector(result.model), vector(longer.model))
    assert without_time(result.history) == without_time(longer.history)


@pytest.mark.parametrize("other", [{"method": "fedavg"}, {"seed": 4}, {}], ids=str)
def test_a_checkpoint_of_another_run_is_skipped(
    out: Path, longer: Any, tmp_path: Path, other: dict[str, Any]
) -> None:
    """Also if it is of the same shape, and even of the same settings: its code may differ."""
    go(tmp_path / "other", rounds=ROUNDS, **other)
    for path in (tmp_path / "other" / "checkpoints").glob("00000008.*"):
        shutil.copy(path, out / "checkpoints")
    with pytest.warns(UserWarning, match=r"00000008.json is damaged \(its run"):
        result = resumed(out)
    assert torch.equal(vector(result.model), vector(longer.model))


def test_the_settings_of_another_run_are_refused(out: Path, tmp_path: Path) -> None:
    go(tmp_path / "other", rounds=ROUNDS)
    shutil.copy(tmp_path / "other" / "run.json", out)
    with (
        pytest.warns(UserWarning, match="its run"),
        pytest.raises(FedShuffleError, match="no valid checkpoint"),
    ):
        resumed(out)


def test_other_files_among_the_checkpoints_are_left_alone(out: Path, longer: Any) -> None:
    others = [out / "checkpoints" / name for name in ("notes.json", "zz.safetensors", "8.json")]
    for path in others:
        path.write_text("{}")
    assert torch.equal(vector(resumed(out).model), vector(longer.model))
    assert [path.read_text() for path in others] == ["{}"] * 3


# Metrics


@pytest.mark.parametrize("lines", [7, 6, 4, 3])
@pytest.mark.parametrize("cut", [0, 5])
def test_metrics_that_lost_their_end_are_written_again(
    out: Path, longer: Any, lines: int, cut: int
) -> None:
    """From the newest checkpoint before the loss: nothing is missing in the end."""
    file = out / "metrics.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole[:lines]) + whole[lines][:cut])
    with pytest.warns(UserWarning, match=f"metrics.jsonl.*round {lines + 1}"):
        result = resumed(out)
    assert torch.equal(vector(result.model), vector(longer.model))
    assert without_time(result.history) == without_time(longer.history)
    assert without_time(RunFolder(out).metrics()) == without_time(longer.history)


@pytest.mark.parametrize(
    "kept", [[], [1, 2], [1, 2, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8]], ids=str
)
def test_lost_records_are_named(out: Path, longer: Any, kept: list[int]) -> None:
    """No checkpoint is old enough to write them again: training continues with a warning."""
    file = out / "metrics.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(whole[r - 1] for r in kept))
    with pytest.warns(UserWarning, match=r"metrics.jsonl.*lost"):
        result = resumed(out)
    assert torch.equal(vector(result.model), vector(longer.model))
    assert [r["round"] for r in result.history] == [r for r in kept if r <= 8] + [9, 10]


def test_records_of_one_round_twice_are_refused(out: Path) -> None:
    file = out / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + file.read_bytes().splitlines(keepends=True)[-1])
    with pytest.raises(FedShuffleError, match=r"metrics.jsonl.*line 9"):
        resumed(out)


def test_fewer_rounds_than_checkpoints_have_are_refused(out: Path) -> None:
    (out / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(FedShuffleError, match="done 8"):
        go(out, rounds=5, resume=True)


# Files of another shape

VALUES = [b"", b"[]", b"7", b"null", b'"text"', b"{}", b"{", b"\xff\xfe", b"[" * 100_000, None]


def put(path: Path, value: bytes | None) -> None:
    """Put this in the place of a file; nothing stands for a folder."""
    path.unlink()
    if value is None:
        path.mkdir()
    else:
        path.write_bytes(value)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:12])
def test_a_malformed_settings_file_is_named(out: Path, value: bytes | None) -> None:
    put(out / "run.json", value)
    with pytest.raises(FedShuffleError, match=r"run.json") as caught:
        resumed(out)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["run", "rounds", "engine", "versions", "start_sha256", "seed"])
def test_a_malformed_setting_is_named(out: Path, key: str) -> None:
    made = json.loads((out / "run.json").read_text())
    others: list[Any] = [None, [], {"a": 1}, -1, 2.5, "text", ...]
    if key == "versions":
        others.remove({"a": 1})  # they are only for the record
    if key == "start_sha256":
        others.remove("text")  # a checkpoint is there
    for value in others:
        changed = {k: v for k, v in {**made, key: value}.items() if v is not ...}
        (out / "run.json").write_text(json.dumps(changed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the checkpoints of another id are skipped
            with pytest.raises(FedShuffleError, match=rf"{key}|run\.json|checkpoint") as caught:
                resumed(out)
        assert "\n" not in str(caught.value)


def test_a_malformed_schedule_is_named(tmp_path: Path) -> None:
    go(tmp_path, rounds=2, step_size=lambda r: 0.1)
    made = json.loads((tmp_path / "run.json").read_text())
    others: list[Any] = [{}, [], None, {"0": 0.1}, {"7": []}]
    for other in others:
        (tmp_path / "run.json").write_text(json.dumps(made | {"step_size": other}))
        with pytest.raises(FedShuffleError, match="step_size"):
            go(tmp_path, rounds=2, step_size=lambda r: 0.1, resume=True)


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:12])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_malformed_checkpoint_is_skipped(
    out: Path, longer: Any, suffix: str, value: bytes | None
) -> None:
    put(out / "checkpoints" / f"00000008{suffix}", value)
    with pytest.warns(UserWarning, match=r"00000008.json is damaged") as caught:
        result = resumed(out)
    assert all("\n" not in str(note.message) for note in caught)
    assert torch.equal(vector(result.model), vector(longer.model))


def test_a_folder_in_the_place_of_an_old_checkpoint_does_not_stop_a_run(
    out: Path, longer: Any
) -> None:
    for path in (out / "checkpoints").glob("00000003.*"):
        put(path, None)
        (path / "file").touch()
    assert torch.equal(vector(resumed(out).model), vector(longer.model))


RECORDS = [
    b'{"round": null}',
    b'{"round": "3"}',
    b'{"round": 3.0}',
    b'{"round": true}',
    b'{"round": 1e999}',
    b'{"round": [3]}',
    b'{"round": -3}',
    b'{"round": 0}',
    b'{"round": 99}',
]


@pytest.mark.parametrize("value", [*RECORDS, *VALUES[1:-1]], ids=lambda v: repr(v)[:20])
def test_a_malformed_record_is_named(out: Path, value: bytes) -> None:
    file = out / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[2] = value
    file.write_bytes(b"\n".join(lines))
    before = files(out)
    with pytest.raises(FedShuffleError, match=r"metrics.jsonl") as caught:
        resumed(out)
    assert "\n" not in str(caught.value)
    assert files(out) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_a_folder_or_a_file_in_the_place_of_the_other_is_named(out: Path, name: str) -> None:
    path = out / name
    if path.is_dir():
        shutil.rmtree(path)
        path.touch()
    else:
        put(path, None)
    with pytest.raises(FedShuffleError, match=name):
        resumed(out)


# Two at once


def test_only_one_may_write_to_a_run_at_a_time(out: Path, longer: Any) -> None:
    refused = []

    def second() -> None:
        try:
            resumed(out)
        except FedShuffleError as error:
            refused.append(str(error))

    def evaluate(model: Any) -> dict[str, float]:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        return {"norm": float(model.x.norm())}

    result = go(out, rounds=ROUNDS + 2, checkpoint_every=3, resume=True, evaluate=evaluate)
    assert len(refused) == 2
    assert "is being written" in refused[0]
    assert torch.equal(vector(result.model), vector(longer.model))
    assert without_time(RunFolder(out).metrics()) == without_time(longer.history)
    assert not (out / ".lock").exists()
    resumed(out)


def test_a_lock_may_be_nested(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    with folder.locked():
        with folder.locked():
            pass
        assert (tmp_path / "a" / ".lock").exists()
    assert not (tmp_path / "a").exists()


# Folders that are not a run's


@pytest.mark.parametrize("name", ["metrics.jsonl", "clients.rows", "tensorboard"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_run_overwrites_nothing_of_others(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    if kind == "folder":
        path.mkdir()
        path /= "events.out.tfevents.1"
    path.write_text("mine")
    with pytest.raises(FedShuffleError, match=name):
        go(tmp_path, rounds=2)
    assert path.read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_run_may_share_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    go(tmp_path, rounds=2)
    assert (tmp_path / "notes.txt").read_text() == "mine"


# A full disk


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_full_disk_before_the_first_round_gives_advice_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """The writes: the two files of the first checkpoint, and the settings."""
    done: list[Path] = []
    replace = _files.atomic_write

    def full(path: Path, data: bytes) -> None:
        if len(done) == writes:
            raise OSError(28, "No space left on device")
        done.append(path)
        replace(path, data)

    with monkeypatch.context() as patched:
        patched.setattr("fedshuffle.training.run_folder._files.atomic_write", full)
        with pytest.raises(FedShuffleError, match="No space left on device") as caught:
            go(tmp_path, rounds=3)
    assert "resume" not in str(caught.value)
    assert torch.equal(vector(go(tmp_path, rounds=3).model), vector(go(None, rounds=3).model))


# Killed around every write


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_killed_around_any_write_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Each file that is moved into place, and each line of the metrics, is the last in turn."""
    whole = go(None, rounds=4)
    writes = {os: os.replace, RunFolder: RunFolder.record}
    left = 0

    def killing(write: Any) -> Any:
        def killed(*args: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0 and when == "before":
                raise Killed
            write(*args)
            if left == 0:
                raise Killed

        return killed

    for stop in itertools.count(1):
        out, left = tmp_path / str(stop), stop
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", killing(writes[os]))
            patched.setattr(RunFolder, "record", killing(writes[RunFolder]))
            try:
                go(out, rounds=4, checkpoint_every=2)
            except Killed:
                pass
            else:
                break
        result = go(out, rounds=4, checkpoint_every=2, resume=(out / "run.json").exists())
        assert torch.equal(vector(result.model), vector(whole.model))
        assert without_time(RunFolder(out).metrics()) == without_time(whole.history)
    assert stop > 10
