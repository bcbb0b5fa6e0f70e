"""Tables: Parquet, CSV and TSV with a client column."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedshuffle import Federation, FedShuffleError
from fedshuffle.data import import_chunks, import_file, open_store
from tests.data.helpers import (
    assert_same,
    table,
    write_csv,
)


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.tsv", "t.csv.gz", "parts"])
def test_a_table_with_a_label(tmp_path: Path, name: str) -> None:
    x, y, owners, columns = table()
    if name == "parts":  # rows of a client lie in several files
        (tmp_path / name).mkdir()
        for k in range(5):
            part = {key: column[k * 100 : (k + 1) * 100] for key, column in columns.items()}
            parquet.write_table(pa.table(part), tmp_path / name / f"part{k}.parquet")
    elif name.endswith("parquet"):
        parquet.write_table(pa.table(columns), tmp_path / name, row_group_size=64)
    else:
        write_csv(tmp_path / name, columns, "\t" if "tsv" in name else ",")
    federation = import_file(tmp_path / name, tmp_path / "p", client="who", label="y")
    assert_same(federation, Federation.from_arrays(x, y, client_ids=owners))
    store = open_store(tmp_path / "p")
    assert store.names == ("input", "label")
    assert store.origin["columns"] == {"input": ["a", "b", "c"], "label": "y"}
    assert store.origin["left_out"] == ["note"]


def test_columns_as_fields(tmp_path: Path) -> None:
    x, y, owners, columns = table(50)
    columns["image"] = [[[1, 2], [3, k]] for k in range(50)]
    columns["flat"] = pa.FixedSizeListArray.from_arrays(pa.array(range(100), pa.uint8()), 2)
    columns["small"] = pa.array(y, pa.int8())
    columns["money"] = pa.array([Decimal("1.00")] * 50, pa.decimal128(5, 2))
    columns["code"] = pa.array(owners).dictionary_encode()
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    fields = ["image", "flat", "small", "a", "money"]
    federation = import_file(
        tmp_path / "t.parquet", tmp_path / "p", client="code", fields=fields, dtype={"a": "float64"}
    )
    expected = Federation.from_arrays(
        np.array(columns["image"]),
        np.arange(100, dtype=np.uint8).reshape(50, 2),
        y,
        x[:, 0].astype(np.float64),
        np.ones(50),
        client_ids=owners,
    )
    assert_same(federation, expected)


def test_a_list_column_as_the_input(tmp_path: Path) -> None:
    columns = {"client": [2, 1], "x": [[1.0, 2.0], [3.0, 4.0]], "y": [1.5, 2.5]}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    federation = import_file(tmp_path / "t.parquet", tmp_path / "p", client="client", label="y")
    assert list(federation.ids) == [1, 2]
    assert federation.fields[0].tolist() == [[3, 4], [1, 2]]
    assert federation.fields[1].tolist() == [2.5, 1.5]


def test_input_columns_in_the_order_they_are_named(tmp_path: Path) -> None:
    x, _, owners, columns = table(30)
    write_csv(tmp_path / "t.csv", columns)
    federation = import_file(tmp_path / "t.csv", tmp_path / "p", client="who", input=["c", "a"])
    assert_same(federation, Federation.from_arrays(x[:, [2, 0]], client_ids=owners))
    alone = import_file(tmp_path / "t.csv", tmp_path / "q", client="who", input=["b"])
    assert alone.fields[0].shape == (30, 1)


def test_clients_of_text_files(tmp_path: Path) -> None:
    write_csv(tmp_path / "n.csv", {"who": ["10", "9", "-1", "10"], "x": [1, 2, 3, 4]})
    numbers = import_file(tmp_path / "n.csv", tmp_path / "p", client="who", fields=["x"])
    assert list(numbers.ids) == [-1, 9, 10]
    assert numbers.fields[0].tolist() == [3, 2, 1, 4]
    write_csv(tmp_path / "t.csv", {"who": ["7", "007", "7"], "x": [1, 2, 3]})
    text = import_file(tmp_path / "t.csv", tmp_path / "q", client="who", fields=["x"])
    assert list(text.ids) == ["007", "7"]
    assert text.fields[0].tolist() == [2, 1, 3]


def test_text_files_that_begin_with_whole_numbers(tmp_path: Path) -> None:
    """What the first megabyte looks like must not decide what comes later."""
    n = 400_000
    x = np.ones(n)
    x[-1] = 0.5
    write_csv(tmp_path / "t.csv", {"who": ["1"] * (n - 1) + ["b"], "x": [f"{v:g}" for v in x]})
    federation = import_file(tmp_path / "t.csv", tmp_path / "p", client="who", input=["x"])
    assert list(federation.ids) == ["1", "b"]
    assert federation.fields[0].ravel().tolist() == x.tolist()
    given = import_file(
        tmp_path / "t.csv", tmp_path / "q", client="who", fields=["x"], dtype={"x": "float64"}
    )
    assert given.fields[0].tolist() == x.tolist()
    with pytest.raises(FedShuffleError, match=r"cannot read.*0\.5"):
        import_file(tmp_path / "t.csv", tmp_path / "r", client="who", fields=["x"])


def test_folders_named_after_clients(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "t" / f"who={name}").mkdir(parents=True)
        part = pa.table({"x": [ord(name)] * 2})
        parquet.write_table(part, tmp_path / "t" / f"who={name}" / "part.parquet")
    federation = import_file(tmp_path / "t", tmp_path / "p", client="who", fields=["x"])
    assert list(federation.ids) == ["a", "b"]
    assert federation.fields[0].tolist() == [97, 97, 98, 98]


def test_folders_above_the_source_are_no_columns(tmp_path: Path) -> None:
    (tmp_path / "version=3" / "parts").mkdir(parents=True)
    columns = pa.table({"who": [1], "a.b": [2.0], "y": [0]})
    parquet.write_table(columns, tmp_path / "version=3" / "parts" / "t.parquet")
    for k, source in enumerate(["version=3/parts", "version=3/parts/t.parquet"]):
        federation = import_file(tmp_path / source, tmp_path / str(k), client="who", label="y")
        assert federation.fields[0].tolist() == [[2.0]]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"x": [1.0]}, {"label": "y"}, "unknown label column 'y'"),
        ({"x": [1.0]}, {"fields": ["X"]}, "unknown column 'X'"),
        ({"x": [1.0]}, {}, "who, x"),
        ({"x": [1.0]}, {"fields": ["x"], "label": "x"}, "who, x"),
        ({"x": [1.0]}, {"fields": ["x", "x"]}, "named twice"),
        ({"x": [1.0]}, {"input": ["x", "x"]}, "named twice"),
        ({"y": [1.0]}, {"label": "y"}, "no other column"),
        ({"x": ["t"]}, {"fields": ["x"]}, "column 'x' holds text"),
        ({"x": [["t"]]}, {"fields": ["x"]}, "column 'x' holds text"),
        ({"x": [[1.0]], "z": [1.0], "y": [1]}, {"label": "y"}, r"\(x\)"),
        ({"x": [[1.0]], "z": [[1.0]], "y": [1]}, {"label": "y"}, "x, z"),
        ({"x": [[1.0]], "z": [1.0]}, {"input": ["x", "z"]}, r"\(x\)"),
        ({"x": [[1.0], [1.0, 2.0]]}, {"fields": ["x"]}, "'x'.*row 2"),
        ({"x": [[1.0], None]}, {"fields": ["x"]}, "row 2"),
        ({"x": [[[1], [2]], [[1], [2, 3]]]}, {"fields": ["x"]}, "'x'.*row 2"),
        ({"x": [1.0, None]}, {"fields": ["x"]}, "'ann'.*NaN.*example 1"),
        ({"x": [1, None]}, {"fields": ["x"]}, "'ann'.*NaN.*example 1"),
        ({"x": [[1], [None]]}, {"fields": ["x"]}, "'ann'.*NaN.*example 1"),
        ({"x": [1.0, np.inf]}, {"input": ["x"]}, "'input'.*'ann'.*NaN"),
        ({"x": [1.0]}, {"fields": ["x"], "dtype": {"y": "int8"}}, "unknown field 'y'"),
        ({"who": [1.5], "x": [1.0]}, {"fields": ["x"]}, "'who' holds double"),
        ({"who": ["a", None], "x": [1, 2]}, {"fields": ["x"]}, "row 2 has no client"),
        ({"x": [1.0]}, {"fields": ["x"], "client": None}, "client"),
        ({"x": [1.0]}, {"fields": ["x"], "client": "whom"}, "Did you mean 'who'"),
        ({"x": [1.0]}, {"fields": ["x"], "format": "xml"}, "unknown format 'xml'"),
        ({"x": [1.0]}, {"fields": ["x"], "format": "csv"}, "cannot read|unknown column"),
        ({"x": pa.array([], pa.float64())}, {"fields": ["x"]}, "no examples"),
    ],
)
def test_tables_that_cannot_be_imported(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    n = len(next(iter(columns.values())))
    columns = {"who": pa.array(["ann"] * n, pa.string()), **columns}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(FedShuffleError, match=message) as error:
        import_file(tmp_path / "t.parquet", tmp_path / "p", **{"client": "who", **options})
    assert "\n" not in str(error.value)
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("who,x\na,1\nb,\n", "client 'b' has NaN"),
        ("who,x\na,1\n,2\n", "row 2 has no client"),
        ("who,x\na,1\nb\n", "cannot read"),
        ("", "cannot read"),
        ("who,x\n", "holds null values|no examples"),
        ("who,x\na,nan\n", "client 'a' has NaN"),
    ],
)
def test_text_that_cannot_be_imported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(FedShuffleError, match=message):
        import_file(tmp_path / "t.csv", tmp_path / "p", client="who", fields=["x"])


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("choice", "value", "message"),
    [
        ({"input": ["x", "z"]}, "old", "'z'"),
        ({"fields": ["x", "z"]}, "old", "'z'"),
        ({"label": "z"}, "old", "'z'"),
    ],
)
def test_text_in_a_column_is_named(
    tmp_path: Path, choice: dict[str, Any], value: str, message: str, late: bool
) -> None:
    before = 200_000 if late else 0  # more than is read to see what a column looks like
    rows = ["who,x,z", *["a,1,2"] * before, f"b,3,{value}"]
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(FedShuffleError, match=message) as error:
        import_file(tmp_path / "t.csv", tmp_path / "p", client="who", **choice)
    assert "\n" not in str(error.value)
    assert not late or "'old' in row 200002" in str(error.value)


def test_boolean_columns_are_numbers(tmp_path: Path) -> None:
    """As pandas writes get_dummies: True and False in text files, bool in Parquet."""
    table = pandas.get_dummies(
        pandas.DataFrame({"who": [1, 2, 2], "age": [3, 4, 5.5], "city": ["p", "r", "p"]})
    )
    table.to_csv(tmp_path / "t.csv", index=False)
    parquet.write_table(pa.Table.from_pandas(table), tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        imported = import_file(
            tmp_path / name,
            tmp_path / "p",
            client="who",
            label=None,
            input=["age", "city_p", "city_r"],
            overwrite=True,
        )
        assert imported.fields[0].tolist() == [[3, 1, 0], [4, 0, 1], [5.5, 1, 0]]
        only = import_file(
            tmp_path / name,
            tmp_path / "p",
            client="who",
            label="age",
            input=["city_p", "city_r"],
            overwrite=True,
        )
        assert only.fields[0].dtype == np.float32
    x = table.drop(columns="who")
    chunks = import_chunks([("a", x[:1]), ("b", x[1:])], tmp_path / "q")
    assert chunks.fields[0].tolist() == [[3, 1, 0], [4, 0, 1], [5.5, 1, 0]]


def test_a_parquet_file_that_is_cut_short(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"who": [1] * 100, "x": [1.0] * 100}), tmp_path / "t.parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(data[:-20])
    with pytest.raises(FedShuffleError, match="cannot read"):
        import_file(tmp_path / "t.parquet", tmp_path / "p", client="who", fields=["x"])
