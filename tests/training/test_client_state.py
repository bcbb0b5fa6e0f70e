"""Client state: a file of rows against a plain dictionary, and runs that are resumed with it."""

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
from fedshuffle.state import State
from fedshuffle.training.client_state import _HEADER, ClientState, ClientStateStore
from fedshuffle.training.run_folder import RunFolder

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
        self.store = ClientStateStore(WIDTH, torch.float32, self.folder / "rows")
        self.values = [(ClientState.empty(N, self.store), dict[int, list[float]]())]
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
        client_state, known = self.values[which % len(self.values)]
        rows = [[self.count + k, -float(client), 0.5] for k, client in enumerate(clients)]
        self.count += len(clients)
        self.most = max(self.most, 2 * self.slots_needed(), self.slots_needed() + len(clients))
        after = client_state.updated(ids(*clients), torch.tensor(rows).reshape(-1, WIDTH))
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
        client_state, known = self.values[which % len(self.values)]
        self.store.pins.pop(key, None)
        self.store.pin(key, client_state.slots)
        self.saved[key] = client_state.index(), known

    @rule(key=KEYS)
    def forget(self, key: int) -> None:
        self.store.pins.pop(key, None)
        self.saved.pop(key, None)

    @precondition(lambda self: self.saved)
    @rule(which=WHICH)
    def restore(self, which: int) -> None:
        index, known = list(self.saved.values())[which % len(self.saved)]
        self.values.append((ClientState.restore(self.store, index), known))

    @rule()
    def killed(self) -> None:
        """A new process has the file and what was saved."""
        self.values = []
        self.store = ClientStateStore(WIDTH, torch.float32, self.folder / "rows")
        for key, (index, _) in self.saved.items():
            self.store.pin(key, index["slots"].numpy())
        self.values.append((ClientState.empty(N, self.store), {}))

    @invariant()
    def agrees(self) -> None:
        for client_state, known in self.values:
            rows = client_state.rows(np.arange(N))
            assert rows.tolist() == [known.get(client, [0.0] * WIDTH) for client in range(N)]
        for index, known in self.saved.values():
            kept = ClientState.restore(self.store, index).rows(np.arange(N))
            assert kept.tolist() == [known.get(client, [0.0] * WIDTH) for client in range(N)]

    @invariant()
    def is_no_larger_than_needed(self) -> None:
        file = self.folder / "rows"
        size = file.stat().st_size - _HEADER if file.exists() else 0
        assert size <= self.most * self.store.row_bytes

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """All patterns of bytes, so NaNs of every kind, infinities, -0 and subnormals."""
    rows = torch.arange(256, dtype=torch.uint8).reshape(2, 128).view(dtype)
    store = ClientStateStore(rows.shape[1], dtype, tmp_path / "rows")
    kept = ClientState.empty(3, store).updated(ids(2, 0), rows)
    again = ClientStateStore(rows.shape[1], dtype, tmp_path / "rows")
    for client_state in (kept, ClientState.restore(again, kept.index())):
        found = client_state.rows(ids(0, 1, 2, 0))
        assert (found.dtype, tuple(found.shape)) == (dtype, (4, rows.shape[1]))
        zero = [0] * 128
        assert bits(found) == [bits(rows)[1], zero, bits(rows)[0], bits(rows)[1]]


def test_rows_of_any_layout_and_for_any_device() -> None:
    wide = torch.arange(12.0).reshape(3, 4).requires_grad_()
    client_state = ClientState.empty(5, ClientStateStore(3, torch.float32)).updated(
        ids(1, 2, 3, 4), wide.T
    )
    assert client_state.rows(ids(2)).tolist() == [[1, 5, 9]]
    assert not client_state.rows(ids(2)).requires_grad
    assert client_state.rows(ids(2), device="meta").device.type == "meta"


def test_no_client_is_no_row(tmp_path: Path) -> None:
    client_state = ClientState.empty(5, ClientStateStore(3, torch.float32, tmp_path / "rows"))
    assert tuple(client_state.rows(ids()).shape) == (0, 3)
    assert client_state.updated(ids(), torch.zeros(0, 3)) is client_state
    client_state.store.sync()
    assert list(tmp_path.iterdir()) == []  # the file is made with the first row
    assert len(client_state) == 5


def test_a_slot_is_used_again_when_nobody_needs_it(tmp_path: Path) -> None:
    store = ClientStateStore(10, torch.float64, file := tmp_path / "rows")
    client_state = ClientState.empty(100, store)
    clients = np.arange(0, 100, 5)
    for step in range(50):
        client_state = client_state.updated(
            clients, torch.full((20, 10), float(step), dtype=torch.float64)
        )
        # only while it is replaced is the value before needed, so twice the rows are
        assert file.stat().st_size == _HEADER + (20 if step == 0 else 40) * 80
    assert bool((client_state.rows(clients) == 49.0).all())


def test_a_temporary_store_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client_state = ClientState.empty(4, ClientStateStore(2, torch.float32)).updated(
        ids(1), torch.ones(1, 2)
    )
    client_state.store.sync()
    assert client_state.rows(ids(1)).tolist() == [[1, 1]]
    del client_state
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_pinned_rows_are_never_overwritten(tmp_path: Path) -> None:
    store = ClientStateStore(2, torch.float32, file := tmp_path / "rows")
    everyone = np.arange(6)
    client_state = ClientState.empty(6, store).updated(everyone, torch.arange(12.0).reshape(6, 2))
    store.pin(7, client_state.slots)
    pinned = [_HEADER + slot * 8 for slot in client_state.slots.tolist()]
    before = file.read_bytes()
    index = client_state.index()
    for step in range(1, 40):
        client_state = client_state.updated(everyone, torch.full((6, 2), -float(step)))
        after = file.read_bytes()
        assert all(after[at : at + 8] == before[at : at + 8] for at in pinned)
    assert ClientState.restore(store, index).rows(everyone).flatten().tolist() == list(range(12))
    size = file.stat().st_size
    store.pins.pop(7)
    for _ in range(40):
        client_state = client_state.updated(everyone, torch.zeros(6, 2))
    assert file.stat().st_size == size  # the slots that were pinned serve again
    with pytest.raises(FedShuffleError, match="client 0"):
        ClientState.restore(store, index).rows(everyone)


def test_pins_of_one_key_add_up(tmp_path: Path) -> None:
    """A checkpoint that is written again has the one before beside it until it is there."""
    store = ClientStateStore(1, torch.float32, tmp_path / "rows")
    first = ClientState.empty(1, store).updated(ids(0), torch.ones(1, 1))
    second = first.updated(ids(0), 2 * torch.ones(1, 1))
    for client_state in (first, second):
        store.pin(3, client_state.slots)
    indices = [client_state.index() for client_state in (first, second)]
    del first, second, client_state
    other = ClientState.empty(1, store)
    for _ in range(9):
        other = other.updated(ids(0), torch.zeros(1, 1))
    kept = [ClientState.restore(store, index).rows(ids(0)).item() for index in indices]
    assert kept == [1.0, 2.0]
    assert set(store.pins) == {3}


@pytest.mark.parametrize("how", ["restored", "pinned"])
def test_slots_needed_again_are_not_overwritten(tmp_path: Path, how: str) -> None:
    store = ClientStateStore(1, torch.float32, tmp_path / "rows")
    base = ClientState.empty(4, store).updated(np.arange(4), torch.zeros(4, 1))
    index = base.updated(np.arange(4), torch.ones(4, 1)).index()  # and nobody keeps its slots
    other = base.updated(ids(0), torch.full((1, 1), 5.0))  # takes one of them
    assert other.slots[0] == index["slots"][0]
    index["slots"][0] = -1
    if how == "restored":
        restored = ClientState.restore(store, index)
    else:
        store.pin(1, index["slots"].numpy())
    for _ in range(9):
        other = other.updated(ids(1), torch.full((1, 1), 5.0))
    if how == "pinned":
        restored = ClientState.restore(store, index)
    assert restored.rows(np.arange(4)).flatten().tolist() == [0, 1, 1, 1]


def test_memory_and_disk_grow_with_updated_clients_only(tmp_path: Path) -> None:
    n, width = 10**6, 1000
    clients = np.arange(0, n, n // 50)
    tracemalloc.start()
    store = ClientStateStore(width, torch.float32, file := tmp_path / "rows")
    client_state = ClientState.empty(n, store)
    for step in range(5):
        client_state = client_state.updated(clients, torch.full((50, width), float(step)))
    restored = ClientState.restore(
        ClientStateStore(width, torch.float32, file), client_state.index()
    )
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
    store = ClientStateStore(2, torch.float32, file := tmp_path / "rows")
    client_state = ClientState.empty(9, store).updated(ids(4, 7), torch.ones(2, 2))
    damage(file, _HEADER + int(client_state.slots[7]) * 8 + 5)
    assert client_state.rows(ids(4, 0)).tolist() == [[1, 1], [0, 0]]
    with pytest.raises(FedShuffleError, match="client 7"):
        client_state.rows(ids(4, 7))


def test_a_file_that_lost_its_end_is_named(tmp_path: Path) -> None:
    store = ClientStateStore(2, torch.float32, file := tmp_path / "rows")
    client_state = ClientState.empty(9, store).updated(ids(4, 7), torch.ones(2, 2))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(FedShuffleError, match="client 7"):
        client_state.rows(ids(4, 7))
    with pytest.raises(FedShuffleError, match="143 bytes of 144"):
        ClientState.restore(ClientStateStore(2, torch.float32, file), client_state.index())


def test_a_file_that_is_missing_or_another_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    index = (
        ClientState.empty(9, ClientStateStore(2, torch.float32, file))
        .updated(ids(1), torch.ones(1, 2))
        .index()
    )
    whole = file.read_bytes()
    for width, dtype in [(3, torch.float32), (2, torch.float64), (2, torch.bfloat16)]:
        with pytest.raises(FedShuffleError, match=f"{width} values of {dtype}"):
            ClientState.restore(ClientStateStore(width, dtype, file), index)
    for data in (b"", b"a text", whole[:-20], b"x" + whole[1:]):
        file.write_bytes(data)
        with pytest.raises(FedShuffleError, match="rows'"):
            ClientState.restore(ClientStateStore(2, torch.float32, file), index)
        assert file.read_bytes() == data
    file.unlink()
    with pytest.raises(FedShuffleError, match="rows' is missing"):
        ClientState.restore(ClientStateStore(2, torch.float32, file), index)
    assert not file.exists()


def test_an_unused_file_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    ClientState.empty(9, ClientStateStore(2, torch.float32, file)).updated(ids(1), torch.ones(1, 2))
    fresh = ClientState.empty(9, ClientStateStore(5, torch.float64, file))
    fresh = fresh.updated(ids(3), torch.ones(1, 5, dtype=torch.float64))
    assert file.stat().st_size == _HEADER + 40


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    store = ClientStateStore(1000, torch.float32, tmp_path / "rows")
    client_state = ClientState.empty(99, store).updated(ids(1), torch.ones(1, 1000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(FedShuffleError, match="4000 bytes"):
            client_state.updated(np.arange(99), torch.zeros(99, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bool((client_state.rows(ids(1)) == 1).all())
    after = client_state.updated(np.arange(99), torch.full((99, 1000), 2.0))
    assert [m.rows(ids(1))[0, 999].item() for m in (client_state, after)] == [1, 2]
    nowhere = ClientState.empty(9, ClientStateStore(1, torch.float32, tmp_path / "no" / "rows"))
    with pytest.raises(FedShuffleError, match="cannot write"):
        nowhere.updated(ids(1), torch.ones(1, 1))


@pytest.mark.parametrize(
    ("clients", "rows", "message"),
    [
        (
            [1],
            torch.zeros(1, 3),
            r"2 values .*\(1, 3\)",
        ),
        ([1], torch.zeros(1, 2, dtype=torch.float64), "of torch.float64"),
    ],
)
def test_bad_rows_are_refused(clients: Any, rows: Tensor, message: str) -> None:
    client_state = ClientState.empty(9, ClientStateStore(2, torch.float32))
    with pytest.raises(FedShuffleError, match=message):
        client_state.updated(np.array(clients), rows)


def test_a_state_is_immutable_and_cannot_be_pickled() -> None:
    client_state = ClientState.empty(9, ClientStateStore(2, torch.float32)).updated(
        ids(1), torch.ones(1, 2)
    )
    with pytest.raises(ValueError, match="read-only"):
        client_state.slots[0] = 3
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(client_state)
    client_state.index()["slots"].zero_()  # a copy
    assert client_state.rows(ids(1)).tolist() == [[1, 1]]


# Runs

CLIENT_COUNT, START = 6, torch.zeros(2)
SETTINGS = {"rounds": 100, "seed": 1}


def begin(out: Path, resume: bool = False, keep: int = 2) -> tuple[RunFolder, State]:
    """As training starts or resumes."""
    folder = RunFolder(out, keep)
    clients = ClientState.empty(CLIENT_COUNT, folder.client_store(len(START), START.dtype))
    return folder, folder.begin(SETTINGS, State(START, clients=clients), resume)


def step(state: State) -> State:
    """A round in which three clients add the round's number to their state."""
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


def test_a_run_is_resumed_from_every_checkpoint_on_disk(tmp_path: Path) -> None:
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
        assert set(folder.client_store(2, torch.float32).pins) == set(checkpoints)
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


def test_a_damaged_checkpoint_is_skipped_with_its_rows(tmp_path: Path) -> None:
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
    assert set(again.client_store(2, torch.float32).pins) == {3}
    again.save(found := step(found))
    assert kept(found) == kept(state)


def test_a_row_that_is_damaged_shows_when_it_is_read(tmp_path: Path) -> None:
    folder, state = begin(tmp_path)
    folder.record({"round": 1})
    folder.save(state := step(state))
    assert isinstance(state.clients, ClientState)
    damage(tmp_path / "clients.rows", _HEADER + int(state.clients.slots[1]) * 8)
    _, found = begin(tmp_path, resume=True)
    assert found.round == 1
    with pytest.raises(FedShuffleError, match="client 1"):
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
        rows.write_bytes(whole[:-5] if harm == "short" else b"other")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    message = {"missing": "is missing", "short": "cut off", "other": "does not hold"}[harm]
    with pytest.raises(FedShuffleError, match=rf"clients.rows'.*{message}"):
        begin(tmp_path, resume=True)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    rows.write_bytes(whole)
    assert kept(begin(tmp_path, resume=True)[1]) == kept(state)


def test_a_folder_of_another_run_is_not_touched(tmp_path: Path) -> None:
    folder, state = begin(tmp_path)
    folder.save(step(state))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(FedShuffleError, match="already holds a run"):
        begin(tmp_path)
    (tmp_path / "run.json").rename(tmp_path / "elsewhere")
    with pytest.raises(FedShuffleError, match=r"run.json"):
        begin(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / "run.json")
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_the_next_save_releases_what_a_failed_one_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state = begin(tmp_path)
    store, first = folder.client_store(2, torch.float32), step(state)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("fedshuffle.training.run_folder._files.atomic_write", full)
        with pytest.raises(FedShuffleError, match="No space left"):
            folder.save(first)
    assert set(store.pins) == {0, 1}
    folder.save(step(first))
    assert set(store.pins) == {0, 2}


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


def test_a_run_without_client_state_has_no_such_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    state = folder.begin(SETTINGS, State(START), resume=False)
    folder.record({"round": 1})
    folder.save(State(START, {"m": START + 1}, round=1))
    found = RunFolder(tmp_path).latest()
    assert found is not None
    assert (found.clients, state.clients) == (None, None)
    assert found.method_state["m"].tolist() == [1, 1]
    assert not (tmp_path / "clients.rows").exists()
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 1
