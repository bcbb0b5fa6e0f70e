"""The federation: clients, their examples in one packed layout, and the objective you mean."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, count, counts, frozen, numeric, positive
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, generator

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset


_NUMBERS = 1 << 16
"""Data is checked so many numbers at a time, so that the check needs no memory to speak of."""


@dataclass(frozen=True, eq=False)
class Federation:
    r"""The clients and the objective over them.

    .. math:: f(x) = \sum_i w_i f_i(x), \qquad f_i(x) = \frac{1}{|D_i|} \sum_{j \in D_i} f_{ij}(x).

    All examples lie in one array per field, sorted by client; client ``i`` owns the rows
    ``offsets[i]:offsets[i + 1]``. Make one with :meth:`from_arrays`, :meth:`from_datasets`, or, for
    questions that need no data, :meth:`from_sizes`; or :meth:`open` one that lies on disk.

        >>> federation = Federation.from_sizes([1, 2, 3])
        >>> federation.weights.round(3).tolist()
        [0.167, 0.333, 0.5]
        >>> Federation.from_arrays([[0.0], [1.0], [2.0]], client_ids=["b", "a", "b"]).ids
        ('a', 'b')
    """

    sizes: IntArray
    """Examples of each client."""
    weights: FloatArray
    """Objective weights w, positive, summing to one."""
    offsets: IntArray
    """Where each client's rows begin; n + 1 entries."""
    fields: tuple[Any, ...] = ()
    """The packed examples: numpy arrays or torch tensors with one row per example."""
    ids: Sequence[Hashable] = ()
    """The clients' own names, in order; their numbers where none were given."""
    _opened: tuple[str, ArrayLike | None, bool] | None = default(default=None, init=False)
    """The path and the weights that it was opened with, if it was, and whether it was pooled."""

    @classmethod
    def from_sizes(cls, sizes: ArrayLike, weights: ArrayLike | None = None) -> Federation:
        """Clients known only by how many examples they hold: enough for an audit."""
        return cls._build((), _checked(sizes), weights, None)

    @classmethod
    def from_arrays(
        cls,
        *fields: Any,
        client_ids: Any = None,
        sizes: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> Federation:
        """Arrays or tensors with one row per example, and who owns which row.

        Give either ``client_ids``, one per row in any order (clients are then sorted by id, and
        ``weights`` follow that order), or ``sizes``, where the first ``sizes[0]`` rows belong to
        client 0, the next to client 1, and so on.
        """
        if (client_ids is None) == (sizes is None):
            raise FedShuffleError(
                "say who owns which row: give either client_ids (one per row) or sizes."
            )
        packed = [_packable(field, index) for index, field in enumerate(fields)]
        rows = _common_length(packed)
        if client_ids is None:
            return cls._build(packed, _checked(sizes), weights, None)
        owners = np.asarray(client_ids)
        if owners.dtype == object and len({type(owner) for owner in owners.flat}) > 1:
            raise FedShuffleError(
                "client_ids mixes kinds of ids. Make them all strings, or all numbers."
            )
        if owners.shape != (rows,):
            raise FedShuffleError(
                f"client_ids has shape {owners.shape}, but there are {rows} rows: give one id each."
            )
        names, owner, found = np.unique(owners, return_inverse=True, return_counts=True)
        order = np.argsort(owner, kind="stable")
        return cls._build([field[order] for field in packed], found, weights, names.tolist())

    @classmethod
    def from_datasets(
        cls, datasets: Sequence[Dataset[Any]], weights: ArrayLike | None = None
    ) -> Federation:
        """One map-style torch dataset per client; its examples are read once and packed.

        So random transforms would be drawn once, and every epoch would see that draw: they are
        noticed, with a warning. What shall be random in every epoch belongs into the model, as a
        layer such as :class:`fedshuffle.datasets.Augment`.
        """
        from fedshuffle._torch_data import packed, sizes_of, warn_of_randomness

        sizes = sizes_of(datasets)
        checked = _checked(sizes)
        rows = [(i, j) for i, m in enumerate(sizes) for j in range(m)]
        fields = packed(datasets, rows)
        federation = cls._build(fields, checked, weights, None)
        warn_of_randomness(datasets, rows, fields)
        return federation

    @classmethod
    def open(cls, path: str | Path, weights: ArrayLike | None = None) -> Federation:
        """A federation on disk, mapped into memory without being read.

        It is what :meth:`save` or an importer of :mod:`fedshuffle.populations` wrote. Without
        ``weights`` the objective is the one saved with it, or goes by size. Pickled, it is sent as
        its path, so that other processes open it themselves.
        """
        from fedshuffle.populations.store import open_store

        store = open_store(path)
        objective = store.sizes if weights is None else weights
        shares = _normalised(positive(objective, len(store.sizes), "weights"))
        if weights is None and store.weights is not None:
            shares = store.weights
        federation = cls(
            sizes=frozen(store.sizes),
            weights=frozen(shares),
            offsets=frozen(_offsets(store.sizes)),
            fields=store.fields,
            ids=store.ids,
        )
        object.__setattr__(federation, "_opened", (str(store.path), weights, False))
        return federation

    def save(
        self, path: str | Path, *, names: Sequence[str] | None = None, overwrite: bool = False
    ) -> None:
        """Write it to a folder, to be opened there; ``names`` are what its fields are called.

        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/people"
        >>> Federation.from_arrays([1.0, 2.0, 3.0], sizes=[1, 2]).save(folder)
        >>> Federation.open(folder)
        Federation(2 clients, 3 examples, (3,))
        """
        from fedshuffle.populations.saving import save

        by_size = _normalised(positive(self.sizes, len(self), "sizes"))
        weights = None if np.array_equal(by_size, self.weights) else self.weights
        save(self, path, weights, names, overwrite)

    @property
    def path(self) -> Path | None:
        """The folder that it was opened from; None if it lies in memory."""
        return None if self._opened is None else Path(self._opened[0])

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._opened is None:
            return super().__reduce_ex__(protocol)
        return _reopened, self._opened

    @classmethod
    def _build(
        cls,
        fields: Sequence[Any],
        sizes: IntArray,
        weights: ArrayLike | None,
        ids: Sequence[Hashable] | None,
    ) -> Federation:
        n = len(sizes)
        offsets = _offsets(sizes)
        if fields and _common_length(fields) != offsets[-1]:
            raise FedShuffleError(
                f"sizes add up to {offsets[-1]} examples, but the arrays have {len(fields[0])}"
                " rows."
            )
        objective = positive(sizes if weights is None else weights, n, "weights")
        federation = cls(
            sizes=frozen(sizes),
            weights=frozen(_normalised(objective)),
            offsets=frozen(offsets),
            fields=tuple(fields),
            ids=range(n) if ids is None else tuple(ids),
        )
        for index, field in enumerate(fields):
            federation._check_finite(index, field)
        return federation

    def _check_finite(self, index: int, field: Any) -> None:
        """NaN or infinity in the data would poison every model: name the first culprit."""
        numpy = isinstance(field, np.ndarray)
        if numpy and field.dtype.kind not in "fciub":
            raise FedShuffleError(
                f"field {index} holds {field.dtype} values. Convert it to numbers first."
            )
        if not (field.dtype.kind in "fc" if numpy else field.is_floating_point()):
            return
        at_once = max(1, _NUMBERS * len(field) // max(1, int(np.prod(field.shape))))
        for begin in range(0, len(field), at_once):
            part = field[begin : begin + at_once]
            good = np.isfinite(part) if numpy else part.isfinite().cpu().numpy()
            if not good.all():
                row = begin + int(np.flatnonzero(~good.reshape(len(good), -1).all(axis=1))[0])
                client = int(np.searchsorted(self.offsets, row, side="right")) - 1
                raise FedShuffleError(
                    f"field {index} of client {self.ids[client]!r} has NaN or infinity in its"
                    f" example {row - int(self.offsets[client])}. Clean or drop that example."
                )

    def __len__(self) -> int:
        return len(self.sizes)

    def find(self, id: Hashable) -> int:
        """The number of the client with this id."""
        try:
            return self.ids.index(id)
        except ValueError:
            raise FedShuffleError(f"no client has the id {id!r}.") from None

    def client(self, i: int) -> tuple[Any, ...]:
        """The examples of client number ``i``: its rows of every field, without a copy.

        >>> people = Federation.from_arrays([1.0, 2.0, 3.0], client_ids=["bob", "ann", "bob"])
        >>> people.client(people.find("bob"))[0].tolist()
        [1.0, 3.0]
        """
        i = range(len(self))[i]
        return tuple(field[self.offsets[i] : self.offsets[i + 1]] for field in self.fields)

    def subset(self, clients: ArrayLike) -> Federation:
        """Only these clients, by number, with their examples and the proportions of their weights.

        >>> Federation.from_arrays([1.0, 2.0, 3.0, 4.0], sizes=[1, 2, 1]).subset([0, 2]).fields
        (array([1., 4.]),)
        """
        chosen = np.unique(np.asarray(clients, dtype=np.int64))
        if not len(chosen) or chosen[0] < 0 or chosen[-1] >= len(self):
            raise FedShuffleError(
                f"clients are numbered from 0 to {len(self) - 1}; choose at least one of them."
            )
        pieces = [np.arange(*self.offsets[i : i + 2]) for i in chosen.tolist()]
        rows = np.concatenate(pieces)
        return Federation._build(
            [field[rows] for field in self.fields],
            self.sizes[chosen],
            self.weights[chosen],
            [self.ids[i] for i in chosen.tolist()],
        )

    def pooled(self) -> Federation:
        """All examples in one place: a single client that holds the data of all.

        >>> Federation.from_sizes([1, 2, 3]).pooled()
        Federation(1 clients, 6 examples, sizes only)
        """
        everything = int(self.offsets[-1])
        pooled = replace(
            self,
            sizes=frozen(np.array([everything])),
            weights=frozen(np.ones(1)),
            offsets=frozen(np.array([0, everything])),
            ids=("everybody",),
        )
        if self._opened is not None:
            object.__setattr__(pooled, "_opened", (*self._opened[:2], True))
        return pooled

    def sample(self, number: int, seed: int = 0) -> Federation:
        """So many clients, drawn once; the federation itself if it has no more."""
        if count(number, "the number of clients") >= len(self):
            return self
        drawn = generator(seed, Purpose.SUBSET).choice(len(self), size=number, replace=False)
        return self.subset(drawn)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(field.shape)) for field in self.fields) or "sizes only"
        return f"Federation({len(self)} clients, {self.offsets[-1]} examples, {shapes})"

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The packed fields as torch tensors (without a copy where the memory allows it)."""
        import torch

        if not self.fields:
            raise FedShuffleError(
                "this federation has sizes only, and training needs examples."
                " Use Federation.from_arrays, from_datasets or open."
            )
        return tuple(torch.as_tensor(field) for field in self.fields)


def _reopened(path: str, weights: ArrayLike | None, pooled: bool) -> Federation:
    federation = Federation.open(path, weights)
    return federation.pooled() if pooled else federation


def _offsets(sizes: IntArray) -> IntArray:
    if float(np.sum(sizes, dtype=np.float64)) > 2.0**52:
        raise FedShuffleError("sizes add up to more than 2**52 examples, too many to count.")
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _normalised(weights: FloatArray) -> FloatArray:
    shares: FloatArray = weights / float(weights.max())
    shares = shares / float(shares.sum())
    if not shares.min() > 0:
        raise FedShuffleError(
            f"the weights of clients {int(shares.argmin())} and {int(weights.argmax())} are too far"
            " apart to count both. Leave out clients that hardly count."
        )
    return shares


def _checked(sizes: Any) -> IntArray:
    return counts(sizes, "sizes", " Leave out clients without examples.")


def _packable(field: Any, index: int) -> Any:
    """A field as a tensor, or as an array that torch can read."""
    if hasattr(field, "is_floating_point"):
        return field
    if hasattr(field, "dataset") and hasattr(field, "batch_size"):  # without importing torch
        raise FedShuffleError(
            f"field {index} is a {type(field).__name__}. Give its dataset to"
            " Federation.from_datasets, one per client; minibatches are made in training."
        )
    array = np.ascontiguousarray(
        numeric(
            field,
            f"field {index}",
            "Convert it to numbers first (pandas: get_dummies for inputs, factorize for labels), or"
            " leave it out.",
        )
    )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _common_length(fields: Sequence[Any]) -> int:
    if not fields:
        raise FedShuffleError("give at least one array of examples.")
    lengths = {int(field.shape[0]) if len(field.shape) else -1 for field in fields}
    if len(lengths) != 1 or -1 in lengths:
        shapes = ", ".join(str(tuple(field.shape)) for field in fields)
        raise FedShuffleError(f"all fields need one row per example, got shapes {shapes}.")
    rows = lengths.pop()
    if rows == 0:
        raise FedShuffleError("there are no examples: the fields have no rows.")
    return rows
