"""What clients keep: a file of rows against a plain dictionary, and runs that go on with it."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from fedshuffle import FedShuffleError
from fedshuffle.client_memory import _HEADER, ClientMemory, Shelf
from fedshuffle.runs import RunFolder
from fedshuffle.state import State

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2]


def ids(*clients: int) -> Any:
    return np.array(clients, dtype=np.int64)


def bits(rows: Tensor) -> list[list[int]]:
    found: list[list[int]] = rows.contiguous().view(torch.uint8).tolist()
    return found


N, WIDTH = 9, 3
CLIENTS = st.lists(st.integers(0, N - 1), unique=True, max_size=N)
KEYS = st.integers(0, 3)
WHICH = st.integers(0, 10**6)


class AgainstADictionary(RuleBasedStateMachine):
    """Whatever is done, every value that lives or is pinned has the rows that a dictionary has."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.shelf = Shelf(WIDTH, torch.float32, self.folder / "rows")
        self.values = [(ClientMemory.empty(N, self.shelf), dict[int, list[float]]())]
        self.saved: dict[int, tuple[dict[str, Tensor], dict[int, list[float]]]] = {}
        self.count = 0.0
        self.most = 0

    def slots_needed(self) -> int:
        slots = [m.slots for m, _ in self.values] + [
            i["slots"].numpy() for i, _ in self.saved.values()
        ]
        return len(set(np.concatenate([*slots, ids(-1)]).tolist())) - 1

    @precondition(lambda self: self.values)
    @rule(which=WHICH, clients=CLIENTS)
    def update(self, which: int, clients: list[int]) -> None:
        memory, known = self.values[which % len(self.values)]
        rows = [[self.count + k, -float(client), 0.5] for k, client in enumerate(clients)]
        self.count += len(clients)
        self.most = max(self.most, 2 * self.slots_needed(), self.slots_needed() + len(clients))
        after = memory.updated(ids(*clients), torch.tensor(rows).reshape(-1, WIDTH))
        self.values.append((after, known | dict(zip(clients, rows))))

    @precondition(lambda self: self.values)
    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        del self.values[which % len(self.values)]

    @rule()
    def drop_all_but_the_last(self) -> None:
        del self.values[:-1]

    @precondition(lambda self: self.values)
    @rule(which=WHICH, key=KEYS)
    def save(self, which: int, key: int) -> None:
        memory, known = self.values[which % len(self.values)]
        self.shelf.unpin(key)
        self.shelf.pin(key, memory.slots)
        self.saved[key] = memory.index(), known

    @rule(key=KEYS)
    def forget(self, key: int) -> None:
        self.shelf.unpin(key)
        self.saved.pop(key, None)

    @precondition(lambda self: self.saved)
    @rule(which=WHICH)
    def restore(self, which: int) -> None:
        index, known = list(self.saved.values())[which % len(self.saved)]
        self.values.append((ClientMemory.restore(self.shelf, index), known))

    @rule()
    def killed(self) -> None:
        """A new process has the file and what was saved."""
        self.values = []
        self.shelf = Shelf(WIDTH, torch.float32, self.folder / "rows")
        for key, (index, _) in self.saved.items():
            self.shelf.pin(key, index["slots"].numpy())
        self.values.append((ClientMemory.empty(N, self.shelf), {}))

    @invariant()
    def agrees(self) -> None:
        for memory, known in self.values:
            rows = memory.rows(np.arange(N))
            assert rows.tolist() == [known.get(client, [0.0] * WIDTH) for client in range(N)]
        for index, known in self.saved.values():
            kept = ClientMemory.restore(self.shelf, index).rows(np.arange(N))
            assert kept.tolist() == [known.get(client, [0.0] * WIDTH) for client in range(N)]

    @invariant()
    def is_no_larger_than_needed(self) -> None:
        file = self.folder / "rows"
        size = file.stat().st_size - _HEADER if file.exists() else 0
        assert size <= self.most * self.shelf.row_bytes

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """All patterns of bytes, so NaNs of every kind, infinities, -0 and subnormals."""
    rows = torch.arange(256, dtype=torch.uint8).reshape(2, 128).view(dtype)
    shelf = Shelf(rows.shape[1], dtype, tmp_path / "rows")
    kept = ClientMemory.empty(3, shelf).updated(ids(2, 0), rows)
    again = Shelf(rows.shape[1], dtype, tmp_path / "rows")
    for memory in (kept, ClientMemory.restore(again, kept.index())):
        found = memory.rows(ids(0, 1, 2, 0))
        assert (found.dtype, tuple(found.shape)) == (dtype, (4, rows.shape[1]))
        zero = [0] * 128
        assert bits(found) == [bits(rows)[1], zero, bits(rows)[0], bits(rows)[1]]


def test_rows_of_any_layout_and_for_any_device() -> None:
    wide = torch.arange(12.0).reshape(3, 4).requires_grad_()
    memory = ClientMemory.empty(5, Shelf(3, torch.float32)).updated(ids(1, 2, 3, 4), wide.T)
    assert memory.rows(ids(2)).tolist() == [[1, 5, 9]]
    assert not memory.rows(ids(2)).requires_grad
    assert memory.rows(ids(2), device="meta").device.type == "meta"


def test_nobody_asked_is_no_row(tmp_path: Path) -> None:
    memory = ClientMemory.empty(5, Shelf(3, torch.float32, tmp_path / "rows"))
    assert tuple(memory.rows(ids()).shape) == (0, 3)
    assert memory.updated(ids(), torch.zeros(0, 3)) is memory
    memory.shelf.settle()
    assert list(tmp_path.iterdir()) == []  # the file is made with the first row
    assert len(memory) == 5


def test_a_slot_is_used_again_when_nobody_needs_it(tmp_path: Path) -> None:
    shelf = Shelf(10, torch.float64, file := tmp_path / "rows")
    memory = ClientMemory.empty(100, shelf)
    clients = np.arange(0, 100, 5)
    for step in range(50):
        memory = memory.updated(clients, torch.full((20, 10), float(step), dtype=torch.float64))
        # only while it is replaced is the value before needed, so twice the rows are
        assert file.stat().st_size == _HEADER + (20 if step == 0 else 40) * 80
    assert bool((memory.rows(clients) == 49.0).all())


def test_growth_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file has a margin of the bound, not twice what is needed."""
    monkeypatch.setattr("fedshuffle.client_memory._GROWTH", 5 * 16)
    shelf = Shelf(4, torch.float32, file := tmp_path / "rows")
    memory = ClientMemory.empty(100, shelf)
    for client in [*range(100), *range(100)]:
        memory = memory.updated(ids(client), torch.full((1, 4), float(client)))
    assert file.stat().st_size <= _HEADER + (100 + 5) * 16
    assert memory.rows(np.arange(100))[:, 0].tolist() == list(range(100))


def test_a_temporary_shelf_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    memory = ClientMemory.empty(4, Shelf(2, torch.float32)).updated(ids(1), torch.ones(1, 2))
    memory.shelf.settle()
    assert memory.rows(ids(1)).tolist() == [[1, 1]]
    del memory
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_is_pinned_is_never_touched(tmp_path: Path) -> None:
    shelf = Shelf(2, torch.float32, file := tmp_path / "rows")
    everyone = np.arange(6)
    memory = ClientMemory.empty(6, shelf).updated(everyone, torch.arange(12.0).reshape(6, 2))
    shelf.pin(7, memory.slots)
    pinned = [_HEADER + slot * 8 for slot in memory.slots.tolist()]
    before = file.read_bytes()
    index = memory.index()
    for step in range(1, 40):
        memory = memory.updated(everyone, torch.full((6, 2), -float(step)))
        after = file.read_bytes()
        assert all(after[at : at + 8] == before[at : at + 8] for at in pinned)
    assert ClientMemory.restore(shelf, index).rows(everyone).flatten().tolist() == list(range(12))
    size = file.stat().st_size
    shelf.unpin(7)
    for _ in range(40):
        memory = memory.updated(everyone, torch.zeros(6, 2))
    assert file.stat().st_size == size  # the slots that were pinned serve again
    with pytest.raises(FedShuffleError, match="client 0 kept"):
        ClientMemory.restore(shelf, index).rows(everyone)


def test_pins_of_one_key_add_up(tmp_path: Path) -> None:
    """A checkpoint that is written again has the one before beside it until it is there."""
    shelf = Shelf(1, torch.float32, tmp_path / "rows")
    first = ClientMemory.empty(1, shelf).updated(ids(0), torch.ones(1, 1))
    second = first.updated(ids(0), 2 * torch.ones(1, 1))
    for memory in (first, second):
        shelf.pin(3, memory.slots)
    indices = [memory.index() for memory in (first, second)]
    del first, second, memory
    other = ClientMemory.empty(1, shelf)
    for _ in range(9):
        other = other.updated(ids(0), torch.zeros(1, 1))
    kept = [ClientMemory.restore(shelf, index).rows(ids(0)).item() for index in indices]
    assert kept == [1.0, 2.0]
    assert shelf.pins == {3}


@pytest.mark.parametrize("how", ["restored", "pinned"])
def test_what_was_free_is_not_overwritten_once_it_is_needed_again(tmp_path: Path, how: str) -> None:
    shelf = Shelf(1, torch.float32, tmp_path / "rows")
    base = ClientMemory.empty(4, shelf).updated(np.arange(4), torch.zeros(4, 1))
    index = base.updated(np.arange(4), torch.ones(4, 1)).index()  # and nobody keeps its slots
    other = base.updated(ids(0), torch.full((1, 1), 5.0))  # takes one of them
    assert other.slots[0] == index["slots"][0]
    index["slots"][0] = -1
    if how == "restored":
        restored = ClientMemory.restore(shelf, index)
    else:
        shelf.pin(1, index["slots"].numpy())
    for _ in range(9):
        other = other.updated(ids(1), torch.full((1, 1), 5.0))
    if how == "pinned":
        restored = ClientMemory.restore(shelf, index)
    assert restored.rows(np.arange(4)).flatten().tolist() == [0, 1, 1, 1]


def test_a_million_clients_cost_what_those_touched_cost(tmp_path: Path) -> None:
    n, width = 10**6, 1000
    clients = np.arange(0, n, n // 50)
    tracemalloc.start()
    shelf = Shelf(width, torch.float32, file := tmp_path / "rows")
    memory = ClientMemory.empty(n, shelf)
    for step in range(5):
        memory = memory.updated(clients, torch.full((50, width), float(step)))
    restored = ClientMemory.restore(Shelf(width, torch.float32, file), memory.index())
    assert bool((restored.rows(clients) == 4.0).all())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * 8 * n  # a few numbers a client; all rows would be 4000 bytes each
    assert file.stat().st_blocks * 512 < 4 * 50 * width * 4


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(bytes(data))


def test_a_damaged_row_names_its_client(tmp_path: Path) -> None:
    shelf = Shelf(2, torch.float32, file := tmp_path / "rows")
    memory = ClientMemory.empty(9, shelf).updated(ids(4, 7), torch.ones(2, 2))
    damage(file, _HEADER + int(memory.slots[7]) * 8 + 5)
    assert memory.rows(ids(4, 0)).tolist() == [[1, 1], [0, 0]]
    with pytest.raises(FedShuffleError, match=r"client 7 kept, row 1 of .*rows', is damaged.*Put"):
        memory.rows(ids(4, 7))


def test_a_file_that_lost_its_end_is_named(tmp_path: Path) -> None:
    shelf = Shelf(2, torch.float32, file := tmp_path / "rows")
    memory = ClientMemory.empty(9, shelf).updated(ids(4, 7), torch.ones(2, 2))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(FedShuffleError, match="client 7 kept"):
        memory.rows(ids(4, 7))
    with pytest.raises(FedShuffleError, match=r"has 143 bytes, but .* takes 144: it was cut short"):
        ClientMemory.restore(Shelf(2, torch.float32, file), memory.index())


def test_a_file_that_is_missing_or_another_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    index = (
        ClientMemory.empty(9, Shelf(2, torch.float32, file))
        .updated(ids(1), torch.ones(1, 2))
        .index()
    )
    whole = file.read_bytes()
    for width, dtype in [(3, torch.float32), (2, torch.float64), (2, torch.bfloat16)]:
        message = rf"has rows of 2 values of torch.float32, but .* needs {width} values of {dtype}"
        with pytest.raises(FedShuffleError, match=message):
            ClientMemory.restore(Shelf(width, dtype, file), index)
    for data in (b"", b"a text", whole[:-20], b"x" + whole[1:]):
        file.write_bytes(data)
        with pytest.raises(FedShuffleError, match=r"rows' (does not hold|has \d+ bytes).*Put back"):
            ClientMemory.restore(Shelf(2, torch.float32, file), index)
        assert file.read_bytes() == data
    file.unlink()
    with pytest.raises(
        FedShuffleError, match=r"rows', what the clients kept, is missing. Put back"
    ):
        ClientMemory.restore(Shelf(2, torch.float32, file), index)
    assert not file.exists()


def test_a_file_that_nobody_needs_is_made_anew_if_it_is_ours(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    ClientMemory.empty(9, Shelf(2, torch.float32, file)).updated(ids(1), torch.ones(1, 2))
    fresh = ClientMemory.empty(9, Shelf(5, torch.float64, file))
    fresh = fresh.updated(ids(3), torch.ones(1, 5, dtype=torch.float64))
    assert file.stat().st_size == _HEADER + 40
    file.write_bytes(b"somebody's")
    other = ClientMemory.empty(9, Shelf(2, torch.float32, file))
    with pytest.raises(FedShuffleError, match="does not hold what clients keep"):
        other.updated(ids(1), torch.ones(1, 2))
    assert file.read_bytes() == b"somebody's"


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    shelf = Shelf(1000, torch.float32, tmp_path / "rows")
    memory = ClientMemory.empty(99, shelf).updated(ids(1), torch.ones(1, 1000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(
            FedShuffleError, match=r"cannot write .* 4000 bytes each, in .*rows.*make room"
        ):
            memory.updated(np.arange(99), torch.zeros(99, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bool((memory.rows(ids(1)) == 1).all())
    after = memory.updated(np.arange(99), torch.full((99, 1000), 2.0))
    assert [m.rows(ids(1))[0, 999].item() for m in (memory, after)] == [1, 2]
    nowhere = ClientMemory.empty(9, Shelf(1, torch.float32, tmp_path / "no" / "rows"))
    with pytest.raises(FedShuffleError, match=r"cannot write .* No such file or directory"):
        nowhere.updated(ids(1), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("clients", "rows", "message"),
    [
        ([9], torch.zeros(1, 2), "from 0 to 8, got client 9"),
        ([-1], torch.zeros(1, 2), "from 0 to 8, got client -1"),
        ([[1]], torch.zeros(1, 2), r"got an array of shape \(1, 1\)"),
        ([1, 1], torch.zeros(2, 2), "name every client once"),
        (
            [1],
            torch.zeros(1, 3),
            r"1 clients keep 2 values of torch.float32 each, but got \(1, 3\)",
        ),
        ([1], torch.zeros(1, 2, dtype=torch.float64), "of torch.float64"),
    ],
)
def test_what_makes_no_sense_is_refused(clients: Any, rows: Tensor, message: str) -> None:
    memory = ClientMemory.empty(9, Shelf(2, torch.float32))
    with pytest.raises(FedShuffleError, match=message):
        memory.updated(np.array(clients), rows)


def test_shelves_and_indices_that_make_no_sense_are_refused() -> None:
    with pytest.raises(FedShuffleError, match="width is 0"):
        Shelf(0, torch.float32)
    with pytest.raises(FedShuffleError, match=r"floating point numbers, not torch.int64"):
        Shelf(1, torch.int64)
    shelf = Shelf(1, torch.float32)
    with pytest.raises(FedShuffleError, match="number of clients is 0"):
        ClientMemory.empty(0, shelf)
    for slots in (torch.zeros(3, 1), torch.zeros(2), torch.full((3,), -2)):
        with pytest.raises(FedShuffleError, match="index of what clients keep is damaged"):
            ClientMemory.restore(shelf, {"slots": slots.long(), "crc": torch.zeros(3).long()})


def test_a_value_never_changes_and_stays_in_its_process() -> None:
    memory = ClientMemory.empty(9, Shelf(2, torch.float32)).updated(ids(1), torch.ones(1, 2))
    with pytest.raises(ValueError, match="read-only"):
        memory.slots[0] = 3
    assert copy.copy(memory) is memory
    assert copy.deepcopy([memory])[0] is memory
    with pytest.raises(TypeError, match="neither pickled nor copied"):
        pickle.dumps(memory)
    memory.index()["slots"].zero_()  # a copy
    assert memory.rows(ids(1)).tolist() == [[1, 1]]


# Runs.

CLIENT_COUNT, START = 6, torch.zeros(2)
SETTINGS = {"rounds": 100, "seed": 1}


def begin(out: Path, resume: bool = False, keep: int = 2) -> tuple[RunFolder, State]:
    """As training begins or goes on."""
    folder = RunFolder(out, keep)
    clients = ClientMemory.empty(CLIENT_COUNT, folder.shelf(len(START), START.dtype))
    return folder, folder.begin(SETTINGS, State(START, clients=clients), resume)


def step(state: State) -> State:
    """A round in which three clients add the round's number to what they kept."""
    assert state.clients is not None
    cohort = np.arange(3) + state.round % 4
    rows = state.clients.rows(cohort) + state.round + 1
    clients = state.clients.updated(cohort, rows)
    return State(state.x + rows.sum(0), round=state.round + 1, clients=clients)


def kept(state: State | None) -> list[list[float]]:
    assert state is not None
    assert state.clients is not None
    rows: list[list[float]] = state.clients.rows(np.arange(CLIENT_COUNT)).tolist()
    return rows


def test_a_run_goes_on_from_every_checkpoint_on_disk(tmp_path: Path) -> None:
    """Abandoned after any round, checkpoints at odd moments: always the rows of that round."""
    folder, state = begin(tmp_path / "a")
    expected = {0: kept(state)}
    for _ in range(12):
        state = step(state)
        folder.record({"round": state.round})
        expected[state.round] = kept(state)
        if state.round % 3 == 0:
            folder.save(state)
        checkpoints = sorted(int(p.stem) for p in (tmp_path / "a/checkpoints").glob("*.json"))
        assert folder.shelf(2, torch.float32).pins == set(checkpoints)
        for newest in checkpoints:  # as if those after it were damaged
            copied = tmp_path / f"{state.round}-{newest}"
            shutil.copytree(tmp_path / "a", copied)
            for path in (copied / "checkpoints").glob("*"):
                if int(path.stem) > newest:
                    path.unlink()
            again, found = begin(copied, resume=True)
            assert (found.round, kept(found)) == (newest, expected[newest])
            while found.round < state.round:
                found = step(found)
                again.record({"round": found.round})
            assert kept(found) == expected[state.round]
            assert torch.equal(found.x, state.x)
    assert checkpoints == [9, 12]


def test_a_long_run_does_not_grow(tmp_path: Path) -> None:
    """Needed are the value before and two checkpoints, and their changes: 6 rows each at most."""
    folder, state = begin(tmp_path)
    sizes = []
    for _ in range(40):
        state = step(state)
        folder.save(state)
        sizes.append((tmp_path / "clients.rows").stat().st_size)
    assert sizes[-1] == sizes[19] <= _HEADER + 2 * 3 * CLIENT_COUNT * 8


def test_a_damaged_checkpoint_is_passed_over_with_its_rows(tmp_path: Path) -> None:
    folder, state = begin(tmp_path)
    expected = []
    for _ in range(4):
        state = step(state)
        folder.record({"round": state.round})
        folder.save(state)
        expected.append(kept(state))
    damage(tmp_path / "checkpoints/00000004.safetensors", 300)
    with pytest.warns(UserWarning, match=r"00000004.json is damaged"):
        again, found = begin(tmp_path, resume=True)
    assert (found.round, kept(found)) == (3, expected[2])
    assert again.shelf(2, torch.float32).pins == {3}
    again.save(found := step(found))
    assert kept(found) == kept(state)


def test_a_row_that_is_damaged_shows_when_it_is_read(tmp_path: Path) -> None:
    folder, state = begin(tmp_path)
    folder.record({"round": 1})
    folder.save(state := step(state))
    assert state.clients is not None
    damage(tmp_path / "clients.rows", _HEADER + int(state.clients.slots[1]) * 8)
    _, found = begin(tmp_path, resume=True)
    assert found.round == 1
    with pytest.raises(FedShuffleError, match="what client 1 kept"):
        step(found)


@pytest.mark.parametrize("harm", ["missing", "short", "other"])
def test_without_its_rows_a_run_is_refused_and_left_as_it_is(tmp_path: Path, harm: str) -> None:
    folder, state = begin(tmp_path)
    for _ in range(2):
        state = step(state)
        folder.record({"round": state.round})
    folder.save(state)
    rows = tmp_path / "clients.rows"
    whole = rows.read_bytes()
    if harm == "missing":
        rows.unlink()
    else:
        rows.write_bytes(whole[:-50] if harm == "short" else b"other")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    message = {"missing": "is missing", "short": "cut short", "other": "does not hold"}[harm]
    with pytest.raises(FedShuffleError, match=rf"clients.rows'.*{message}"):
        begin(tmp_path, resume=True)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    rows.write_bytes(whole)
    assert kept(begin(tmp_path, resume=True)[1]) == kept(state)


def test_a_folder_of_another_run_is_not_touched(tmp_path: Path) -> None:
    folder, state = begin(tmp_path)
    folder.save(step(state))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(FedShuffleError, match="holds a run already"):
        begin(tmp_path)
    (tmp_path / "run.json").rename(tmp_path / "elsewhere")
    with pytest.raises(FedShuffleError, match=r"without its run.json"):
        begin(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "run.json")
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_rows_elsewhere_cannot_be_saved(tmp_path: Path) -> None:
    folder, _ = begin(tmp_path)
    elsewhere = ClientMemory.empty(CLIENT_COUNT, Shelf(2, torch.float32))
    with pytest.raises(FedShuffleError, match=r"Take the shelf from RunFolder.shelf"):
        folder.save(State(START, clients=elsewhere, round=1))
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.json")] == ["00000000.json"]


def test_what_a_failed_save_pinned_is_given_free_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state = begin(tmp_path)
    shelf, first = folder.shelf(2, torch.float32), step(state)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fedshuffle.runs._files.replace", full)
        with pytest.raises(FedShuffleError, match="No space left"):
            folder.save(first)
    assert shelf.pins == {0, 1}
    folder.save(step(first))
    assert shelf.pins == {0, 2}


def test_the_rows_are_on_the_disk_before_the_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state = begin(tmp_path)
    state = step(state)
    events: list[str] = []
    names = {path.stat().st_ino: path.name for path in tmp_path.iterdir()}
    sync, move = os.fsync, os.replace

    def fsync(fd: int) -> None:
        events.append(names.get(os.fstat(fd).st_ino, "draft"))
        sync(fd)

    def replace(source: Path, target: Path) -> None:
        events.append(f"-> {Path(target).suffix}")
        move(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    folder.save(state)
    assert events[:4] == ["metrics.jsonl", "clients.rows", "draft", "-> .safetensors"]
    assert events[4:] == ["draft", "-> .json"]


def test_a_run_whose_clients_keep_nothing_has_no_such_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    state = folder.begin(SETTINGS, State(START), resume=False)
    folder.record({"round": 1})
    folder.save(State(START, {"m": START + 1}, round=1))
    found = RunFolder(tmp_path).latest()
    assert found is not None
    assert (found.clients, found.memory["m"].tolist(), state.clients) == (None, [1, 1], None)
    assert not (tmp_path / "clients.rows").exists()
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 1
