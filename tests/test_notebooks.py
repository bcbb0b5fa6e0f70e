"""The notebooks of the docs run, and print what is stored in them."""

import base64
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from tests.notebooks import NOTEBOOKS, execute

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?")
_TEXTS = ("text/plain", "text/html")
_KILOBYTES = 60  # the largest picture
_WORDS = 350  # at most, of a notebook


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def outputs(notebook: Any) -> list[Any]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs]


def texts(notebook: Any) -> str:
    """All that is printed or shown as text."""
    parts = []
    for output in outputs(notebook):
        parts += [output.text] if output.output_type == "stream" else []
        parts += [output.data[kind] for kind in _TEXTS if kind in output.get("data", {})]
    return "\n".join(parts)


def pictures(notebook: Any) -> list[bytes]:
    shown = [output.get("data", {}).get("image/png") for output in outputs(notebook)]
    return [base64.b64decode(picture) for picture in shown if picture]


def named(path: Path) -> str:
    return path.stem


def test_there_are_three_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["audit", "digits", "your-log"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_stored_notebook_is_clean(path: Path) -> None:
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info == {"name": "python"}
    assert not any(cell.metadata for cell in notebook.cells)
    assert not any(output.get("metadata") for output in outputs(notebook))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"  # no warnings and no progress bars
    assert pictures(notebook)
    assert max(map(len, pictures(notebook))) < 1000 * _KILOBYTES
    for private in ("/home/", "/tmp/", "/work/", "/Users/"):
        assert private not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=named)
def test_a_notebook_is_short_and_its_links_lead_somewhere(path: Path) -> None:
    words = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
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
