"""Verse or prose: speeches of plays by speaking character, a task with natural, uneven clients.

Most characters speak only verse, some only prose, a few both; a main character has a hundred times
the speeches of a messenger. The task is to tell from its letters whether a speech is verse.
"""

import gzip
import json
import os
import re
import zlib
from pathlib import Path

import numpy as np

from fedshuffle.errors import FedShuffleError, error_context, optional_import
from fedshuffle.federation import Federation

FILE = "shakespeare/moby_by_character.jsonl.gz"
MIN_SPEECHES = 4
"""Characters with fewer are left out: every fourth speech of a character is for testing."""


def load(folder: str | Path | None = None, features: int = 1024) -> tuple[Federation, Federation]:
    """Speeches to train on and to test on, as hashed counts of three letters; label 1 is prose.

    Args:
        folder: the folder that holds ``shakespeare/moby_by_character.jsonl.gz``; by default
            FEDSHUFFLE_DATA. Each line of the file is a JSON object with the keys ``play``,
            ``character`` and ``speeches``, a list of texts with line breaks.
        features: the number of counts, scaled to norm 1.
    """
    text = optional_import("sklearn.feature_extraction.text", "the experiment on plays", "demo")
    place = folder or os.environ.get("FEDSHUFFLE_DATA")
    path = Path(place or ".", FILE)
    if not path.is_file():
        raise FedShuffleError(
            f"there is no {str(path)!r}: set FEDSHUFFLE_DATA to a folder that holds {FILE}."
        )
    ids: list[str] = []
    speeches: list[str] = []
    labels: list[int] = []
    testing: list[bool] = []
    broken = (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error)
    unreadable = error_context(lambda error: f"cannot read {str(path)!r}: {error!r}.", broken)
    with unreadable, gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            role = json.loads(line)
            known = [
                (one, label) for one in role["speeches"] if (label := is_prose(one)) is not None
            ]
            if len(known) < MIN_SPEECHES:
                continue
            ids += [f"{role['play']}: {role['character']}"] * len(known)
            speeches += [re.sub("[^a-z]+", " ", one.lower()) for one, _ in known]
            labels += [int(label) for _, label in known]
            testing += [k % 4 == 3 for k in range(len(known))]
    if not ids:
        raise FedShuffleError(f"{str(path)!r} has no character with {MIN_SPEECHES} speeches.")
    counts = text.HashingVectorizer(
        analyzer="char", ngram_range=(3, 3), n_features=features, alternate_sign=False
    )
    inputs = counts.transform(speeches).toarray().astype(np.float32)
    owners, targets, held_out = np.array(ids), np.array(labels), np.array(testing)
    train, test = (
        Federation.from_arrays(inputs[rows], targets[rows], client_ids=owners[rows])
        for rows in (~held_out, held_out)
    )
    return train, test


def is_prose(speech: str) -> bool | None:
    r"""Whether a line of a speech goes on with a small letter; None if it has only one line.

    Editions start each line of verse with a capital letter.

    >>> is_prose("To be, or not to be:\nThat is the question"), is_prose("O brave new\nworld")
    (False, True)
    """
    starts = [re.sub("^[^A-Za-z]+", "", line)[:1] for line in speech.splitlines() if line.strip()]
    return any(letter.islower() for letter in starts[1:]) if len(starts) > 1 else None
