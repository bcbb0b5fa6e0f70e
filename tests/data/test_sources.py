"""Federations from frames, image folders and torch datasets, against arrays made by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from fedshuffle import Federation, FedShuffleError
from fedshuffle.data import padded

ROWS: dict[str, Any] = {
    "who": ["bob", "ann", "bob", "cid"],
    "age": [30, 41, 31, 22],
    "weight": [81.5, 60.0, 80.0, 55.25],
    "ill": [1, 0, 0, 1],
    "city": ["Rome", "Bern", "Bern", "Rome"],
    "scan": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]],
}
FRAME: Any = pandas.DataFrame(ROWS)
ORDER = [1, 0, 2, 3]  # sorted by client, otherwise as they were
LISTS = pyarrow.list_(pyarrow.float64())


def check(federation: Federation, *fields: Any) -> None:
    """The federation of the rows, sorted by client."""
    assert list(federation.ids) == ["ann", "bob", "cid"]
    assert federation.sizes.tolist() == [1, 2, 1]
    for have, want in zip(federation.fields, fields, strict=True):
        assert have.dtype == np.asarray(want).dtype
        np.testing.assert_array_equal(have, np.asarray(want)[ORDER])


def test_columns_of_a_frame_become_fields() -> None:
    found = Federation.from_frame(FRAME, client="who", fields=["scan", "ill"])
    check(found, ROWS["scan"], ROWS["ill"])
    found = Federation.from_frame(
        FRAME[["who", "age", "weight", "ill", "city"]], client="who", label="ill"
    )
    matrix = np.stack([ROWS["age"], ROWS["weight"]], axis=1).astype(np.float32)
    check(found, matrix, ROWS["ill"])
    found = Federation.from_frame(FRAME, client="who", input=["weight"], label="ill")
    check(found, matrix[:, 1:], ROWS["ill"])


def test_categories_and_text_become_numbers() -> None:
    categories = pandas.Categorical(ROWS["city"], categories=["Rome", "Bern"])
    found = Federation.from_frame(FRAME.assign(city=categories), client="who", fields=["city"])
    check(found, [0, 1, 1, 0])
    numbers = {"Bern": 5, "Rome": 7}
    found = Federation.from_frame(FRAME, client="who", fields=["city"], encode={"city": numbers})
    check(found, [7, 5, 5, 7])

    def lengths(texts: list[str]) -> torch.Tensor:
        return torch.tensor([[len(text), 1] for text in texts])

    found = Federation.from_frame(FRAME, client="who", fields=["city"], encode={"city": lengths})
    check(found, [[4, 1]] * 4)
    some = FRAME[["who", "age", "city", "ill"]]  # what encode makes numbers of is input as well
    found = Federation.from_frame(some, client="who", label="ill", encode={"city": numbers})
    check(found, np.stack([ROWS["age"], [7, 5, 5, 7]], axis=1).astype(np.float32), ROWS["ill"])


def test_weights_and_a_transform_are_kept() -> None:
    found = Federation.from_frame(
        FRAME, client="who", fields=["ill"], weights=[2, 1, 1], transform=torch.neg
    )
    assert found.weights.tolist() == [0.5, 0.25, 0.25]
    assert found.transform is torch.neg


def test_whole_numbers_may_be_ids() -> None:
    found = Federation.from_frame(FRAME, client="age", fields=["ill"])
    assert list(found.ids) == [22, 30, 31, 41]


def ragged() -> Any:
    return FRAME.assign(scan=[[1, 2, 3], [4], [], [5, 6]])


def test_lists_are_padded_by_encode() -> None:
    found = Federation.from_frame(ragged(), client="who", fields=["scan"], encode={"scan": padded})
    check(found, [[1, 2, 3], [4, 0, 0], [0, 0, 0], [5, 6, 0]])
    assert padded([[1, 2, 3], [4]], length=2).tolist() == [[1, 2], [4, 0]]
    assert padded([[0.5], []], value=-100).tolist() == [[0.5], [-100]]


def missing() -> Any:
    return FRAME.assign(who=["bob", None, "ann", "cid"])


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (
            FRAME,
            {"client": "user", "label": "ill"},
            "unknown client column 'user'.*Known: age, city, ill",
        ),
        (FRAME, {"client": "whom", "label": "ill"}, "Did you mean 'who'"),
        (FRAME, {"client": "who", "fields": ["x"]}, "unknown column 'x'"),
        (FRAME, {"client": "who"}, "choose by fields, or by label and input, among.* who, age"),
        (FRAME, {"client": "who", "label": "ill"}, r"lists \(scan\) do not fit beside others"),
        (
            FRAME,
            {"client": "weight", "fields": ["ill"]},
            "'weight' holds double, but ids are text.* missing, drop those rows",
        ),
        (missing(), {"client": "who", "fields": ["ill"]}, "row 2 has no client in column 'who'"),
        (
            FRAME,
            {"client": "who", "fields": ["age", "city"]},
            "column 'city' holds text. If these.*encode={'city': {'Bern': 0, 'Rome': 1}}",
        ),
        (
            FRAME,
            {"client": "who", "fields": ["city"], "encode": {"city": {"Rome": 1}}},
            "column 'city' holds 'Bern', for which encode has no number: add it there",
        ),
        (
            FRAME,
            {"client": "who", "fields": ["city"], "encode": {"town": len}},
            "unknown column to encode 'town'",
        ),
        (
            FRAME,
            {"client": "who", "fields": ["ill"], "encode": {"city": len}},
            "unknown column to encode 'city'.*Known: ill",
        ),
        (
            FRAME,
            {"client": "who", "fields": ["city"], "encode": {"city": len}},
            r"what encode makes of column 'city' has shape \(\) for 4 rows",
        ),
        (
            FRAME,
            {"client": "who", "fields": ["city"], "encode": {"city": list}},
            r"what encode makes of column 'city' holds text \('Rome'\)",
        ),
        (
            FRAME,
            {"client": "who", "fields": ["city"], "encode": {"city": lambda t: 1 / 0}},
            "encode of column 'city': ZeroDivisionError",
        ),
        (
            FRAME,
            {"client": "who", "fields": ["city"], "encode": {"city": lambda t: {"ids": t}}},
            r"encode of column 'city' returned ids by name: return one.*padding=True\)\['ids'\]",
        ),
        (
            ragged(),
            {"client": "who", "fields": ["scan"], "encode": {"scan": list}},
            "different lengths.*Pad them, such as by fedshuffle.data.padded",
        ),
        (ragged(), {"client": "who", "fields": ["scan"]}, "lists of 3 and, in row 2, of 1 values"),
        (
            FRAME.assign(age=[1.0, np.nan, 3.0, 4.0]),
            {"client": "who", "label": "ill", "input": ["age"]},
            "column 'age' has a missing value, NaN or infinity in row 2. Fill it in, or drop",
        ),
        (
            FRAME.assign(city=pandas.Categorical(["a", None, "b", "b"])),
            {"client": "who", "fields": ["city"]},
            "column 'city' has missing values",
        ),
        (
            FRAME.assign(city=[np.eye(2)] * 4),
            {"client": "who", "fields": ["city"]},
            "'city' cannot be read .*one type, .*encode={'city': function}",
        ),
        (
            FRAME.assign(who=["bob", 3, "ann", "cid"]),
            {"client": "who", "fields": ["ill"]},
            "'who' cannot be read .*one type",
        ),
        (
            pandas.concat([FRAME, FRAME[["age"]]], axis=1),
            {"client": "who", "fields": ["age"]},
            "several columns have the name 'age'",
        ),
        (FRAME, {"client": "who", "fields": "ill"}, r"fields is the text 'ill': give a list"),
        (FRAME, {"client": "who", "input": "age"}, r"input is the text 'age': give a list"),
        (
            FRAME,
            {"client": "who", "input": ["age", "city"], "encode": {"city": lambda t: np.eye(4)}},
            r"column 'city' becomes an array of shape \(4, 4\), .*use fields",
        ),
        (
            FRAME,
            {"client": "who", "fields": ["scan"], "encode": {"scan": {1.0: 2}}},
            "encode of column 'scan' needs a function",
        ),
        (FRAME, {"client": "who", "fields": ["scan"], "encode": len}, "encode must be of type"),
        (
            FRAME.assign(scan=[[], [], [], []]).astype({"scan": pandas.ArrowDtype(LISTS)}),
            {"client": "who", "fields": ["scan"]},
            "column 'scan' holds no values",
        ),
        (FRAME.rename(columns={"age": 3}), {"client": "who", "fields": ["ill"]}, "must be text"),
        (ROWS, {"client": "who", "fields": ["ill"]}, "a frame is a DataFrame.*not a dict"),
        (FRAME[:0], {"client": "who", "fields": ["ill"]}, "there are no examples"),
        (FRAME[:0], {"client": "who", "fields": ["scan"]}, "there are no examples"),
    ],
)
def test_what_is_wrong_with_a_frame_is_said_once(
    frame: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedShuffleError, match=message) as error:
        Federation.from_frame(frame, **options)
    assert "\n" not in str(error.value)


# Torch datasets ---------------------------------------------------------------------------------


def test_torch_datasets_have_ids() -> None:
    x = torch.arange(6.0)
    parts = [TensorDataset(x[:4]), TensorDataset(x[4:])]
    for found in (
        Federation.from_datasets(parts, ids=["b", "a"], transform=torch.neg),
        Federation.from_datasets(dict(zip("ba", parts, strict=True)), transform=torch.neg),
    ):
        assert list(found.ids) == ["b", "a"]  # in the order given
        assert found.client(found.find("a"))[0].tolist() == [4, 5]
        assert found.transform is torch.neg
    for ids in (["a"], ["a", "a"]):
        with pytest.raises(FedShuffleError, match="ids must be 2 different ones"):
            Federation.from_datasets(parts, ids=ids)
    with pytest.raises(FedShuffleError, match="leave ids out"):
        Federation.from_datasets({"a": parts[0]}, ids=["a"])
    with pytest.raises(FedShuffleError, match="ids: TypeError: unhashable"):
        Federation.from_datasets(parts, ids=[[1], [2]])  # type: ignore[list-item]


def test_labels_of_a_torch_dataset_are_no_text() -> None:
    named: Any = [(torch.ones(2), "cat"), (torch.ones(2), "dog")]
    with pytest.raises(FedShuffleError, match=r"part 1 is text \('cat'\). Convert it"):
        Federation.from_datasets([named])


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise OSError("no such file")


def test_what_is_wrong_with_torch_datasets_is_said_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    two, three = TensorDataset(torch.ones(1, 2)), TensorDataset(torch.ones(1, 3))
    gap = TensorDataset(torch.tensor([[1.0], [torch.nan]]))
    for datasets, says in (
        ([], "there are no datasets: give one for each client"),
        (iter(()), "there are no datasets"),
        ([two, Broken(torch.ones(1, 2))], "example 0 of dataset 1: OSError: no such file"),
        ([two, three], "do not fit together: .* of one shape: .* pad what differs in length"),
        ([[(Image.new("L", (2, 2)), 0)]], "found .*Image.* convert images to tensors"),
        ([gap], "NaN or infinity in its example 1"),
    ):
        with pytest.raises(FedShuffleError, match=says) as error:
            Federation.from_datasets(datasets)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
    assert not recwarn  # NaN does not look like a random transform
    assert len(Federation.from_datasets(iter([two, two]))) == 2  # type: ignore[arg-type]


# Images -----------------------------------------------------------------------------------------


def draw(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (3, 2)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw(tmp_path / "people/bob/dog/1.png", (255, 0, 51))
    draw(tmp_path / "people/bob/cat/2.PNG", (0, 102, 0))
    draw(tmp_path / "people/ann/dog/3.png", (0, 0, 255))
    (tmp_path / "people/ann/dog/notes.txt").write_text("a good dog")
    (tmp_path / "people/.hidden").mkdir()
    return tmp_path / "people"


def test_a_folder_of_images_per_client(folder: Path) -> None:
    found = Federation.from_image_folder(folder)
    assert (list(found.ids), found.sizes.tolist()) == (["ann", "bob"], [1, 2])
    images, labels = found.fields
    assert (images.shape, images.dtype) == ((3, 3, 2, 3), np.float32)
    colours = np.array([[0, 0, 1], [0, 0.4, 0], [1, 0, 0.2]])
    np.testing.assert_allclose(images[:, :, 1, 2], colours, rtol=1e-6)
    assert labels.tolist() == [1, 0, 1]
    grey = Federation.from_image_folder(folder, mode="L", size=(4, 5), classes=["dog", "cat"])
    assert grey.fields[0].shape == (3, 1, 4, 5)
    assert grey.fields[1].tolist() == [0, 1, 0]


def test_what_is_wrong_with_images_is_said_once(folder: Path) -> None:
    make = Federation.from_image_folder
    with pytest.raises(FedShuffleError, match="unknown class 'cat'"):
        make(folder, classes=["dog"])
    with pytest.raises(FedShuffleError, match="unknown mode 'XYZ'"):
        make(folder, mode="XYZ")
    with pytest.raises(FedShuffleError, match="there is no folder"):
        make(folder / "nobody")
    with pytest.raises(FedShuffleError, match=r"has no folders.* into dog/CLIENT/CLASS"):
        make(folder / "ann/dog")
    for size in (4, (0, 4), (4, 4, 4)):
        with pytest.raises(FedShuffleError, match=r"two numbers: \(height, width\)|height is 0"):
            make(folder, size=size)  # type: ignore[arg-type]
    for classes in ("cat", ["cat", "dog", "dog"]):
        with pytest.raises(FedShuffleError, match="must be a list of different names"):
            make(folder, classes=classes)
    (folder / "cid/dog").mkdir(parents=True)
    with pytest.raises(FedShuffleError, match="client 'cid' has no images in folders of classes"):
        make(folder)
    for stray in ("4.png", "cid/4.png", "cid/dog/more/4.png"):
        draw(folder / stray, (0, 0, 0))
        with pytest.raises(FedShuffleError, match=r"4\.png' is not in the folder of a class"):
            make(folder)
        (folder / stray).unlink()
    deep = Image.fromarray(np.full((2, 3), 1000, np.uint16))
    deep.save(folder / "cid/dog/5.png")  # Pillow would turn all of it white
    with pytest.raises(FedShuffleError, match=r"5\.png.*'I;16', not 8 bits per colour"):
        make(folder)
    (folder / "cid/dog/5.png").unlink()
    draw(folder / "cid/dog/4.png", (0, 0, 0), (5, 5))
    with pytest.raises(FedShuffleError, match=r"4\.png.* \(5, 5\) .* others \(2, 3\).*size="):
        make(folder)
    (folder / "cid/dog/4.png").write_bytes(b"no image")
    with pytest.raises(FedShuffleError, match=r"cannot read .*4\.png"):
        make(folder)
