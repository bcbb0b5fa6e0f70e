"""Plays by speaking character: who is a client, what is verse, and what is held out."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from fedshuffle.errors import FedShuffleError
from fedshuffle.experiments import plays

VERSE = "If music be the food of love, play on;\nGive me excess of it, that, surfeiting"
PROSE = "Such a fish, that it smells\nlike a fish; a very ancient"


def written(folder: Path, *roles: object) -> Path:
    file = folder / plays.FILE
    file.parent.mkdir()
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(role) + "\n" for role in roles)
    return folder


def role(name: str, *speeches: str) -> dict[str, object]:
    return {"play": "The Tempest", "character": name, "speeches": speeches}


@pytest.mark.parametrize(
    ("speech", "prose"),
    [
        (VERSE, False),
        (PROSE, True),
        ("One line only", None),
        ("", None),
        ("'Tis new to thee.\n\n[Aside] Well demanded", False),  # marks before a letter do not count
        ("A line\n...\nAnother", False),  # nor does a line without letters
    ],
)
def test_is_prose(speech: str, prose: bool | None) -> None:
    assert plays.is_prose(speech) is prose


def test_every_fourth_speech_is_held_out(tmp_path: Path) -> None:
    main = role("DUKE", *[VERSE, PROSE] * 4, "Too short to tell")
    rare = role("PAGE", VERSE, VERSE, VERSE)
    train, test = plays.load(written(tmp_path, rare, main, role("FOOL", *[PROSE] * 4)), features=64)
    assert set(train.ids) == set(test.ids) == {"The Tempest: DUKE", "The Tempest: FOOL"}
    sizes = dict(zip(train.ids, train.sizes.tolist(), strict=True))
    assert sizes == {"The Tempest: DUKE": 6, "The Tempest: FOOL": 3}
    duke = test.ids.index("The Tempest: DUKE")
    rows = slice(test.offsets[duke], test.offsets[duke + 1])
    assert np.asarray(test.fields[1])[rows].tolist() == [1, 1]  # the fourth and the eighth
    inputs = np.asarray(train.fields[0])
    assert inputs.shape == (9, 64)
    assert np.linalg.norm(inputs, axis=1) == pytest.approx(1.0, abs=1e-6)


def test_neither_line_breaks_nor_capitals_are_seen(tmp_path: Path) -> None:
    flat = PROSE.replace("like", "Like")  # verse by its look, with the same words
    train, _ = plays.load(written(tmp_path, role("A", *[PROSE] * 4), role("B", *[flat] * 4)))
    inputs, labels = (np.asarray(field) for field in train.fields)
    assert sorted(set(labels.tolist())) == [0, 1]
    assert (inputs == inputs[0]).all()


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSHUFFLE_DATA", raising=False)
    with pytest.raises(FedShuffleError, match="FEDSHUFFLE_DATA"):
        plays.load(tmp_path)
    with pytest.raises(FedShuffleError, match="no character"):
        plays.load(written(tmp_path, role("A", VERSE)))
    (tmp_path / plays.FILE).write_bytes(b"no gzip")
    with pytest.raises(FedShuffleError, match="cannot read"):
        plays.load(tmp_path)
    with gzip.open(tmp_path / plays.FILE, "wt") as out:
        out.write('{"play": "Hamlet"}\n')
    with pytest.raises(FedShuffleError, match="cannot read"):
        plays.load(tmp_path)
