"""The format of a file, the packages that read it, and the command that imports it."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedshuffle import Federation, FedShuffleError, cli
from fedshuffle.data import import_file
from fedshuffle.reports.comparison.figures import histogram
from tests.data.helpers import (
    leaf_json,
    table,
    write_csv,
)


def test_the_format_is_guessed_from_the_suffix_or_given(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="no file or folder"):
        import_file(tmp_path / "none.csv", tmp_path / "p")
    (tmp_path / "t.dat").write_text("who,x\n1,2\n")
    with pytest.raises(FedShuffleError, match="suffix"):
        import_file(tmp_path / "t.dat", tmp_path / "p", client="who", fields=["x"])
    forced = import_file(
        tmp_path / "t.dat", tmp_path / "p", client="who", fields=["x"], format="csv"
    )
    assert forced.fields[0].tolist() == [2]
    (tmp_path / "mixed").mkdir()
    for name in ("a.csv", "b.json"):
        (tmp_path / "mixed" / name).touch()
    with pytest.raises(FedShuffleError, match="formats csv and leaf"):
        import_file(tmp_path / "mixed", tmp_path / "q")
    with pytest.raises(FedShuffleError, match=r"no file in .* ends with \.h5|cannot read"):
        import_file(tmp_path / "mixed", tmp_path / "q", format="hdf5")


@pytest.mark.parametrize("package", ["pyarrow", "h5py"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    name = {"pyarrow": "t.csv", "h5py": "t.h5"}[package]
    (tmp_path / name).touch()
    for module in [m for m in sys.modules if m.partition(".")[0] == package] + [package]:
        monkeypatch.setitem(sys.modules, module, None)
    client = "who" if package == "pyarrow" else None
    with pytest.raises(FedShuffleError, match=rf"{package}.*pip install 'fedshuffle\[data\]'"):
        import_file(tmp_path / name, tmp_path / "p", client=client, label="y")


def test_importing_the_package_loads_no_reader() -> None:
    code = """
import sys
import fedshuffle.cli, fedshuffle.data
assert not {"torch", "pyarrow", "h5py"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def command(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["fedshuffle", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_the_import_and_show_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y, owners, columns = table()
    write_csv(tmp_path / "t.csv", columns)
    out = tmp_path / "people"
    words = ["--client", "who", "--label", "y", "--dtype", "input=float64, label=int8"]
    assert command(monkeypatch, "data", "import", tmp_path / "t.csv", "--out", out, *words) == 0
    text = capsys.readouterr().out
    for word in ["7 clients", "500 examples", "float64", "int8", "columns left out: note", "####"]:
        assert word in text
    expected = Federation.from_arrays(x.astype(np.float64), y.astype(np.int8), client_ids=owners)
    stored = Federation.open(out)
    assert stored.sizes.tolist() == expected.sizes.tolist()
    np.testing.assert_allclose(stored.fields[0], expected.fields[0], rtol=1e-6)

    assert command(monkeypatch, "data", "show", out) == 0
    assert "min 5" not in capsys.readouterr().err
    assert command(monkeypatch, "data", "show", out, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["clients"] == 7
    assert facts["examples"] == 500
    assert facts["sizes"]["min"] == expected.sizes.min()
    assert facts["sizes"]["median"] == np.median(expected.sizes)
    assert sum(bin["clients"] for bin in facts["histogram"]) == 7
    assert facts["fields"][0] == {"name": "input", "dtype": "float64", "shape": [3]}

    again = ["data", "import", tmp_path / "t.csv", "--out", out, *words]
    assert command(monkeypatch, *again) == 2
    assert "holds a federation already" in capsys.readouterr().err
    assert command(monkeypatch, *again, "--overwrite") == 0


def test_the_command_reports_clients_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = {"a": {"x": [[1.0]], "y": [1]}, "b": {"x": [], "y": []}}
    (tmp_path / "t.json").write_text(leaf_json(users))
    out = tmp_path / "p"
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert command(monkeypatch, "data", "import", tmp_path / "t.json", "--out", out) == 0
    assert "! 1 clients without examples were left out, such as 'b'." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import", "none.csv", "--out", "p"], "no file or folder 'none.csv'"),
        (["import", "none.csv", "--out", "p", "--dtype", "float32"], "--dtype: cannot read"),
        (["show", "none"], "no federation in 'none'"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "data", *words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@given(st.lists(st.integers(1, 10**9), min_size=1))
def test_the_histogram_counts_every_client_once(sizes: list[int]) -> None:
    bins = histogram(sizes)
    for low, high, count in bins:
        assert count == sum(low <= size <= high for size in sizes)
    assert sum(count for _, _, count in bins) == len(sizes)
