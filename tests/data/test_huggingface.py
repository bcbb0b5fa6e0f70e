"""Federations from datasets of Hugging Face, partitioners of Flower and frames of polars."""

import doctest
from typing import Any

import datasets
import numpy as np
import polars
import pytest
import torch
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import (
    DirichletPartitioner,
    IidPartitioner,
    NaturalIdPartitioner,
)
from PIL import Image
from torch import Tensor, nn

from fedshuffle import Federation, FedShuffleError, LocalWork, losses, train
from fedshuffle.data import padded

WHO = ["bob", "ann", "bob", "cid"]
ORDER = [1, 0, 2, 3]  # sorted by client, otherwise as they were
TEXTS = ["so it is", "no", "yes", "well"]
COLOURS = [(255, 0, 51), (0, 102, 0), (0, 0, 255), (51, 51, 51)]


def dataset() -> Any:
    features = datasets.Features(
        {
            "user": datasets.Value("string"),
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "scan": datasets.Sequence(datasets.Value("float32")),
            "grid": datasets.Array2D((2, 2), "float32"),
            "text": datasets.Value("string"),
        }
    )
    rows = {
        "user": WHO,
        "image": [Image.new("RGB", (3, 2), colour) for colour in COLOURS],
        "label": ["dog", "cat", "cat", "dog"],
        "scan": [[k, k + 0.5] for k in range(4)],
        "grid": [[[k, 1], [2, 3]] for k in range(4)],
        "text": TEXTS,
    }
    return datasets.Dataset.from_dict(rows, features=features)


def letters(texts: list[str]) -> Any:
    return padded([[ord(letter) for letter in text] for text in texts])


def test_columns_of_a_dataset_become_fields() -> None:
    names = ["image", "scan", "grid", "text", "label"]
    found = Federation.from_huggingface(
        dataset(), client="user", fields=names, encode={"text": letters}
    )
    assert (list(found.ids), found.sizes.tolist()) == (["ann", "bob", "cid"], [1, 2, 1])
    images, scans, grids, texts, labels = found.fields
    assert (images.shape, images.dtype) == ((4, 3, 2, 3), np.float32)
    np.testing.assert_allclose(
        images[:, :, 0, 0], np.array(COLOURS, np.float32)[ORDER] / 255, rtol=1e-6
    )
    assert scans.tolist() == [[k, k + 0.5] for k in ORDER]
    assert (scans.dtype, grids.dtype) == (np.float32, np.float32)
    assert grids[:, 0, 0].tolist() == ORDER
    assert ["".join(map(chr, row)).rstrip("\0") for row in texts] == [TEXTS[k] for k in ORDER]
    assert (labels.dtype, labels.tolist()) == (np.int64, [0, 1, 0, 1])


def test_rows_that_were_selected_and_the_only_input() -> None:
    some = dataset().select([3, 0]).remove_columns(["scan", "grid"])
    found = Federation.from_huggingface(some, client="user", label="label")
    assert list(found.ids) == ["bob", "cid"]
    assert found.fields[0].shape == (2, 3, 2, 3)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"client": "who"}, "unknown client column 'who'.*Known: grid, image, label, scan"),
        (None, {"fields": ["text", "label"]}, "column 'text' holds text. If these are classes"),
        (
            lambda d: datasets.DatasetDict(train=d),
            {},
            r"splits 'train'. Give one: dataset\['train'\]",
        ),
        (lambda d: d.to_iterable_dataset(), {}, "the dataset is a stream. Load it without"),
        (lambda d: d.with_transform(lambda rows: rows), {}, r"a transform \(set_transform\)"),
        (
            lambda d: d.cast_column("image", datasets.Image(decode=False)),
            {"fields": ["image"]},
            "image 0 of column 'image' is a dict.*decode=True",
        ),
        (lambda d: d.to_dict(), {}, "a dataset of Hugging Face is needed, not a dict"),
        (lambda d: d.select([]), {"fields": ["scan"]}, "there are no examples"),
    ],
)
def test_what_is_wrong_with_a_dataset_is_said_once(
    change: Any, options: dict[str, Any], message: str
) -> None:
    data = dataset() if change is None else change(dataset())
    with pytest.raises(FedShuffleError, match=message) as error:
        Federation.from_huggingface(data, **{"client": "user", "fields": ["label"], **options})
    assert "\n" not in str(error.value)


def test_a_dataset_per_client_is_joined_first() -> None:
    with pytest.raises(FedShuffleError, match=r"concatenate_datasets.*from_huggingface"):
        Federation.from_datasets({"ann": dataset().select([1]), "bob": dataset().select([0, 2])})


def test_images_of_different_sizes_are_refused() -> None:
    images = [Image.new("L", (2, 2)), Image.new("L", (3, 3))]
    rows = datasets.Dataset.from_dict({"user": ["a", "b"], "image": images})
    with pytest.raises(FedShuffleError, match=r"column 'image' has shape \(1, 3, 3\), and others"):
        Federation.from_huggingface(rows, client="user", fields=["image"])

    def small(images: list[Any]) -> Any:
        return np.stack([np.asarray(image.resize((2, 2))) for image in images])

    found = Federation.from_huggingface(
        rows, client="user", fields=["image"], encode={"image": small}
    )
    assert found.fields[0].shape == (2, 2, 2)


def test_partitions_are_clients() -> None:
    partitioner = NaturalIdPartitioner(partition_by="user")
    partitioner.dataset = dataset()
    found = Federation.from_partitioner(partitioner, fields=["scan", "label"])
    wanted = Federation.from_huggingface(dataset(), client="user", fields=["scan", "label"])
    assert sorted(map(str, found.ids)) == list(wanted.ids)
    for i, name in enumerate(found.ids):
        for have, want in zip(found.client(i), wanted.client(wanted.find(name)), strict=True):
            np.testing.assert_array_equal(have, want)

    rows = {"x": [[float(k)] for k in range(30)], "y": [k % 3 for k in range(30)]}
    many = DirichletPartitioner(4, partition_by="y", alpha=100.0, min_partition_size=1, seed=1)
    many.dataset = datasets.Dataset.from_dict(rows)
    found = Federation.from_partitioner(many, fields=["x", "y"], transform=torch.neg)
    assert list(found.ids) == [0, 1, 2, 3]
    for k in range(4):
        assert found.client(k)[0].flatten().tolist() == [x for (x,) in many.load_partition(k)["x"]]
    assert found.transform is torch.neg


def test_natural_ids_are_no_input() -> None:
    rows = {"user": [3, 1, 3], "x": [1.0, 2.0, 3.0], "y": [0, 1, 0]}
    partitioner = NaturalIdPartitioner(partition_by="user")
    partitioner.dataset = datasets.Dataset.from_dict(rows)
    found = Federation.from_partitioner(partitioner, label="y")
    assert found.fields[0].tolist() == [[2], [1], [3]]
    named = Federation.from_partitioner(partitioner, fields=["user", "y"])
    assert named.fields[0].tolist() == [1, 3, 3]


def test_what_is_wrong_with_a_partitioner_is_said_once() -> None:
    with pytest.raises(FedShuffleError, match=r"no dataset. Assign it: partitioner\.dataset ="):
        Federation.from_partitioner(IidPartitioner(num_partitions=2), fields=["x"])
    with pytest.raises(FedShuffleError, match="a partitioner of flwr_datasets is needed, not a"):
        Federation.from_partitioner(dataset(), fields=["x"])
    more = IidPartitioner(num_partitions=9)
    more.dataset = dataset()
    with pytest.raises(FedShuffleError, match=r"the partitioner fails: .*more partitions than"):
        Federation.from_partitioner(more, fields=["scan"])
    whole = FederatedDataset(dataset="unread", partitioners={"train": 3})
    with pytest.raises(FedShuffleError, match=r'not a FederatedDataset. Give .*partitioners\["tr'):
        Federation.from_partitioner(whole, fields=["x"])


def test_columns_of_polars_become_fields() -> None:
    frame = polars.DataFrame(
        {
            "who": WHO,
            "age": [30, 41, 31, 22],
            "scan": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]],
            "city": polars.Series(
                ["Rome", "Bern", "Bern", "Rome"], dtype=polars.Enum(["Rome", "Bern"])
            ),
        }
    )
    found = Federation.from_frame(frame, client="who", fields=["age", "scan", "city"])
    assert list(found.ids) == ["ann", "bob", "cid"]
    assert found.fields[0].tolist() == [41, 30, 31, 22]
    assert found.fields[1].tolist() == [[3, 4], [1, 2], [5, 6], [7, 8]]
    assert found.fields[2].tolist() == [1, 0, 1, 0]
    with pytest.raises(FedShuffleError, match=r"the frame is lazy. Give frame\.collect"):
        Federation.from_frame(frame.lazy(), client="who", fields=["age"])
    with pytest.raises(FedShuffleError, match="unknown client column 'user'"):
        Federation.from_frame(frame, client="user", fields=["age"])
    unordered = frame.with_columns(polars.col("city").cast(polars.Categorical))
    with pytest.raises(FedShuffleError, match=r"column 'city' holds text.*\{'Bern': 0"):
        Federation.from_frame(unordered, client="who", fields=["city"])


def test_a_text_model_trains_on_padded_tokens() -> None:
    """From raw text to a model: encoded once, and cut to the longest text of each minibatch."""

    def cut(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[:, : int((tokens != 0).sum(1).max())], labels

    found = Federation.from_huggingface(
        dataset(),
        client="user",
        fields=["text", "label"],
        encode={"text": letters},
        transform=cut,
    )
    model = nn.Sequential(nn.EmbeddingBag(128, 4, padding_idx=0), nn.Linear(4, 2))
    options: dict[str, Any] = {"work": LocalWork(batch_size=2), "rounds": 2}
    one, two = (
        train(model, found, loss=losses.cross_entropy, engine=engine, **options).model
        for engine in ("reference", "sequential")
    )
    torch.testing.assert_close(one.state_dict(), two.state_dict())


@pytest.mark.parametrize("make", [Federation.from_huggingface, Federation.from_partitioner])
def test_the_examples_of_docstrings_run(make: Any) -> None:
    text = make.__doc__.replace("  # doctest: +SKIP", "")
    example = doctest.DocTestParser().get_doctest(text, {}, make.__name__, None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0
