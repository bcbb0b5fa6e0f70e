"""The notebooks of the docs run, and print what is stored in them."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.notebooks import NOTEBOOKS, execute

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?")
_TEXTS = ("text/plain", "text/html")
_KILOBYTES = 60  # the largest picture
_WORDS = 350  # at most, of a notebook


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def cells(notebook: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in cells(notebook, "code") for output in cell["outputs"]]


def texts(notebook: dict[str, Any]) -> str:
    """All that is printed or shown as text."""
    parts: list[str] = []
    for output in outputs(notebook):
        shown = output.get("data", {})
        for lines in (output.get("text", ()), *(shown.get(kind, ()) for kind in _TEXTS)):
            parts += lines
    return "\n".join(parts)


def pictures(notebook: dict[str, Any]) -> list[bytes]:
    shown = [output.get("data", {}).get("image/png") for output in outputs(notebook)]
    return [base64.b64decode(picture) for picture in shown if picture]


def named(path: Path) -> str:
    return path.stem


def test_there_are_three_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["audit", "digits", "your-log"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_stored_notebook_is_clean(path: Path) -> None:
    notebook = read(path)
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook["metadata"] == {"kernelspec": python, "language_info": {"name": "python"}}
    assert not any(cell["metadata"] for cell in notebook["cells"])
    assert not any(output.get("metadata") for output in outputs(notebook))
    counts = [cell["execution_count"] for cell in cells(notebook, "code")]
    assert counts == list(range(1, len(counts) + 1))
    for output in outputs(notebook):
        assert output["output_type"] != "error"
        assert output.get("name") != "stderr"  # no warnings and no progress bars
    assert pictures(notebook)
    assert max(map(len, pictures(notebook))) < 1000 * _KILOBYTES
    texts = json.dumps([cell["source"] for cell in notebook["cells"]])
    for output in outputs(notebook):
        shown = {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}
        texts += json.dumps([output.get("text"), shown])
    assert not re.search(r"(?<![\w.:/<])/\w+/", texts)  # no path of the machine that ran it


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_notebook_is_short_and_its_links_lead_somewhere(path: Path) -> None:
    words = ["".join(cell["source"]) for cell in cells(read(path), "markdown")]
    assert "pip install 'fedshuffle[demo]'" in words[0]
    assert len(" ".join(words).split()) <= _WORDS
    links = re.findall(r"\]\(([^)#]+)\)", " ".join(words))
    assert links
    for link in links:
        assert (path.parent / link).exists(), link


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
@pytest.mark.filterwarnings("default")  # of Jupyter
def test_a_notebook_prints_what_is_stored(path: Path, tmp_path: Path) -> None:
    """Numbers may differ a little: machines round differently."""
    stored, new = read(path), execute(path, tmp_path)
    assert _NUMBER.sub("#", texts(new)) == _NUMBER.sub("#", texts(stored))
    before, after = ([float(n) for n in _NUMBER.findall(texts(nb))] for nb in (stored, new))
    np.testing.assert_allclose(after, before, rtol=0.03, atol=0.02)
    assert len(pictures(new)) == len(pictures(stored))
