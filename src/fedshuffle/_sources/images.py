"""Images as arrays: those of a list, and those in a folder per client and class."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedshuffle._arrays import IntArray, count
from fedshuffle.errors import FedShuffleError, check_known, error_context, one_line, optional_import

MODES = ("L", "RGB", "RGBA")
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")


def pixels(images: Iterable[Any], what: str) -> NDArray[np.float32]:
    """Images (of Pillow) of one size, as numbers from 0 to 1 of shape (colours, height, width)."""
    arrays: list[NDArray[np.float32]] = []
    for k, image in enumerate(images):
        if image is None:
            raise FedShuffleError(f"image {k} of {what} is missing. Drop that row.")
        if not hasattr(image, "mode"):
            raise FedShuffleError(
                f"image {k} of {what} is a {type(image).__name__}, not an image of Pillow. Decode"
                " it: dataset.cast_column(name, datasets.Image(decode=True))."
            )
        array = np.asarray(image.convert("RGB") if image.mode in ("P", "CMYK") else image)
        if array.dtype == bool:
            array = array.astype(np.uint8) * 255
        if array.dtype != np.uint8:
            raise FedShuffleError(
                f"image {k} of {what} has mode {image.mode!r}, not 8 bits per colour: convert it."
            )
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        if arrays and array.shape != arrays[0].shape:
            raise FedShuffleError(
                f"image {k} of {what} has shape {array.shape}, and others {arrays[0].shape}."
                " Resize them to one, and convert them to one mode."
            )
        arrays.append(np.divide(array, 255, dtype=np.float32))
    return np.stack(arrays)


def read_folder(
    folder: str | Path, size: tuple[int, int] | None, mode: str, classes: Sequence[str] | None
) -> tuple[list[str], list[int], NDArray[np.float32], IntArray]:
    """The clients, their numbers of images, all images and their classes."""
    pillow = optional_import("PIL.Image", "reading images", "data")
    check_known("mode", mode, MODES)
    size = None if size is None else _pair(size)
    if classes is not None and (isinstance(classes, str) or len(set(classes)) < len(classes)):
        raise FedShuffleError(f"classes is {classes!r:.60}, but must be a list of different names.")
    root = Path(folder)
    if not root.is_dir():
        raise FedShuffleError(f"there is no folder {str(root)!r}.")
    found = {path.name: _images(path) for path in _folders(root)}
    if not found:
        raise FedShuffleError(
            f"{str(root)!r} has no folders. Put images into {root.name}/CLIENT/CLASS/."
        )
    for path in (*_files(root), *(one for client in found for one in _stray(root / client))):
        raise FedShuffleError(
            f"{str(path)!r} is not in the folder of a class, as in {root.name}/CLIENT/CLASS/. Put"
            " it there, or remove it."
        )
    for client, files in found.items():
        if not files:
            raise FedShuffleError(
                f"client {client!r} has no images in folders of classes, as in"
                f" {root.name}/{client}/CLASS/. Put its images there, or remove its folder."
            )
    names = sorted({name for files in found.values() for name, _ in files})
    for name in names if classes is not None else ():
        check_known("class", name, classes or ())
    number = {name: k for k, name in enumerate(names if classes is None else classes)}

    def opened() -> Iterator[Any]:
        common = None
        for path in (path for files in found.values() for _, path in files):
            with _reading(path), pillow.open(path) as image:
                if image.mode[0] in "IF":  # converting it would cut what is above 255
                    raise ValueError(
                        f"its mode is {image.mode!r}, not 8 bits per colour: convert it"
                    )
                changed = image.convert(mode)
                if size is not None:
                    changed = changed.resize((size[1], size[0]))
                elif changed.size != (common := common or changed.size):
                    raise ValueError(
                        f"it is {changed.size[::-1]} high and wide, and others {common[::-1]}: give"
                        " size=(height, width), to which all are scaled"
                    )
            yield changed

    images = pixels(opened(), repr(str(root)))
    labels = [number[name] for files in found.values() for name, _ in files]
    return list(found), [len(files) for files in found.values()], images, np.array(labels)


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _images(client: Path) -> list[tuple[str, Path]]:
    """The class and the file of each image of a client."""
    return [(folder.name, file) for folder in _folders(client) for file in _files(folder)]


def _stray(client: Path) -> list[Path]:
    """Images of a client beside the folders of classes, or in folders within these."""
    inner = [path for folder in _folders(client) for path in _folders(folder)]
    return [file for folder in (client, *inner) for file in _files(folder)]


def _files(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
    )


def _pair(size: tuple[int, int]) -> tuple[int, int]:
    if np.shape(size) != (2,):
        raise FedShuffleError(f"size is {size!r}, but must be two numbers: (height, width).")
    return count(size[0], "the height"), count(size[1], "the width")


def _reading(path: Path) -> AbstractContextManager[None]:
    return error_context(
        lambda error: f"cannot read {str(path)!r}: {one_line(error)}.",
        (OSError, SyntaxError, ValueError),
    )
