"""The federation: clients, their examples in one packed layout, and the objective over them."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as default
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle import _arrays, _sources
from fedshuffle._arrays import FloatArray, IntArray, common_length, count, frozen, vector
from fedshuffle._sources import ExampleTransform
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.randomness import Purpose, generator

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

_NUMBERS = 1 << 16  # how many numbers are checked at a time, so that the check needs little memory


@dataclass(frozen=True, eq=False)
class Federation:
    r"""The clients and the objective over them.

    .. math:: f(x) = \sum_i w_i f_i(x), \qquad f_i(x) = \frac{1}{|D_i|} \sum_{j \in D_i} f_{ij}(x).

    All examples lie in one array per field, sorted by client; client ``i`` owns the rows
    ``offsets[i]:offsets[i + 1]``. Make one with :meth:`from_arrays`, :meth:`from_datasets`,
    :meth:`from_frame`, :meth:`from_huggingface`, :meth:`from_partitioner`,
    :meth:`from_image_folder`, or, for questions that need no data, :meth:`from_sizes`; or
    :meth:`open` one that is stored on disk.

        >>> federation = Federation.from_sizes([1, 2, 3])
        >>> federation.weights.round(3).tolist()
        [0.167, 0.333, 0.5]
        >>> Federation.from_arrays([[0.0], [1.0], [2.0]], client_ids=["b", "a", "b"]).ids
        ('a', 'b')
    """

    sizes: IntArray
    """Number of examples of each client."""
    weights: FloatArray
    """Objective weights w, positive, summing to one."""
    offsets: IntArray
    """Where each client's rows begin; n + 1 entries."""
    fields: tuple[Any, ...] = ()
    """The packed examples: numpy arrays or torch tensors with one row per example."""
    ids: Sequence[Hashable] = ()
    """Ids of the clients, in order; numbers from 0 if none were given."""
    transform: ExampleTransform | None = None
    """What every minibatch passes through: see :meth:`with_transform`."""
    _opened: tuple[str, ArrayLike | None, bool] | None = default(default=None, init=False)
    """If opened from disk: the path, the weights given, and whether it was pooled."""

    @classmethod
    def from_sizes(cls, sizes: ArrayLike, weights: ArrayLike | None = None) -> "Federation":
        """Clients of which only the numbers of examples are known: enough for an audit."""
        return cls._build((), _checked(sizes), weights)

    @classmethod
    def from_arrays(
        cls,
        *fields: Any,
        client_ids: Any = None,
        sizes: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        transform: ExampleTransform | None = None,
    ) -> "Federation":
        """Arrays or tensors with one row per example, and the client of each row.

        Give either ``client_ids``, one per row in any order (clients are then sorted by id, and
        ``weights`` follow that order), or ``sizes``, where the first ``sizes[0]`` rows belong to
        client 0, the next to client 1, and so on. Every minibatch passes through ``transform``
        (see :meth:`with_transform`).
        """
        if (client_ids is None) == (sizes is None):
            raise FedShuffleError("give either client_ids (one per row) or sizes.")
        packed = [_packable(field, index) for index, field in enumerate(fields)]
        rows = common_length(packed)
        if not rows:
            raise FedShuffleError("there are no examples: the fields have no rows.")
        if client_ids is None:
            return cls._build(packed, _checked(sizes), weights, None, transform)._check_finite()
        owners = np.asarray(client_ids)
        if owners.shape != (rows,):
            raise FedShuffleError(
                f"client_ids has shape {owners.shape}: give one for each of {rows} rows."
            )
        missing: Any = owners != owners  # NaN, of numbers and of times
        if owners.dtype == object:
            missing = [one is None for one in owners]
        for row in np.flatnonzero(missing).tolist():
            raise FedShuffleError(f"row {row} has no client in client_ids. Fill it in, or drop it.")
        if owners.dtype == object and len(set(map(type, owners))) > 1:
            raise FedShuffleError("client_ids mixes types. Make them all strings, or all numbers.")
        ids, owner, counts = np.unique(owners, return_inverse=True, return_counts=True)
        order = np.argsort(owner, kind="stable")
        packed = [field[order] for field in packed]
        names = tuple(ids.tolist())
        return cls._build(packed, counts, weights, names, transform)._check_finite()

    @classmethod
    def from_datasets(
        cls,
        datasets: "Sequence[Dataset[Any]] | Mapping[Any, Dataset[Any]]",
        weights: ArrayLike | None = None,
        *,
        ids: Sequence[Hashable] | None = None,
        transform: ExampleTransform | None = None,
    ) -> "Federation":
        """One map-style torch dataset per client; each example is read once and packed.

        The clients have the ``ids``, or the keys of a mapping from id to dataset. A transform
        within a dataset that is random would be drawn only once for all epochs, which a warning
        reports: give it as ``transform`` (see :meth:`with_transform`).

        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> two, three = TensorDataset(torch.zeros(2, 5)), TensorDataset(torch.ones(3, 5))
        >>> people = Federation.from_datasets({"ann": two, "bob": three})
        >>> people.ids, people.sizes.tolist()
        (('ann', 'bob'), [2, 3])
        """
        from fedshuffle._sources.torch_datasets import read_datasets

        if isinstance(datasets, Mapping):
            if ids is not None:
                raise FedShuffleError("the keys of the datasets are their ids: leave ids out.")
            datasets, ids = list(datasets.values()), list(datasets)
        sizes, fields = read_datasets(datasets)
        return cls._build(fields, sizes, weights, _ids(ids, sizes), transform)._check_finite()

    from_frame = classmethod(_sources.from_frame)
    from_huggingface = classmethod(_sources.from_huggingface)
    from_partitioner = classmethod(_sources.from_partitioner)
    from_image_folder = classmethod(_sources.from_image_folder)

    @classmethod
    def open(cls, path: str | Path, weights: ArrayLike | None = None) -> "Federation":
        """A federation on disk, mapped into memory without being read.

        It was written by :meth:`save` or an importer of :mod:`fedshuffle.data`. Without
        ``weights`` the objective is the one saved with it, or proportional to size. It is pickled
        as its path, so that other processes open it themselves.
        """
        from fedshuffle.data.storage.store import open_store

        store = open_store(path)
        federation = cls._build(store.fields, store.sizes, weights, store.ids)
        if weights is None and store.weights is not None:
            federation = replace(federation, weights=frozen(store.weights))
        object.__setattr__(federation, "_opened", (str(store.path), weights, False))
        return federation

    def save(
        self, path: str | Path, *, names: Sequence[str] | None = None, overwrite: bool = False
    ) -> None:
        """Write it to a folder for :meth:`open`; ``names`` are the names of its fields.

        Its transform is not written: give it again by :meth:`with_transform`.

        >>> import tempfile
        >>> folder = tempfile.mkdtemp() + "/people"
        >>> Federation.from_arrays([1.0, 2.0, 3.0], sizes=[1, 2]).save(folder)
        >>> Federation.open(folder)
        Federation(2 clients, 3 examples, (3,))
        """
        from fedshuffle.data.storage.store import open_store, save_arrays

        if names is None and self.path is not None:
            names = open_store(self.path).names
        ids = None if isinstance(self.ids, range) else self.ids
        by_size = np.array_equal(_normalised(self.sizes), self.weights)
        weights = None if by_size else self.weights
        save_arrays(path, self.fields, self.sizes, ids, weights, names, overwrite)

    @property
    def path(self) -> Path | None:
        """The folder it was opened from; None if it lies in memory."""
        return None if self._opened is None else Path(self._opened[0])

    def with_transform(self, transform: ExampleTransform | None) -> "Federation":
        r"""The same clients, with a function that every minibatch passes through: augmentation,
        scaling, padding. None takes it away.

        It takes the fields of a minibatch as tensors, with a row per example, and returns those
        that the loss takes, as a tuple (or one tensor for one field). It may draw from the global
        generators of torch, numpy and Python: each draw is a function of (seed, round, client,
        step), the same on every engine and after a resume. So a client's objective is the mean
        over its draws :math:`\xi`, and weights stay as they are:

        .. math:: f_i(x) = \frac{1}{|D_i|} \sum_{j \in D_i} E_\xi f(x; \xi(d_{ij})).

        A full gradient, where a method asks for one, takes one draw per example and round. An
        :class:`~fedshuffle.Evaluation` applies the transform of its own data, if they have one.

        >>> import torch
        >>> def add_noise(x, y):
        ...     return x + 0.1 * torch.randn_like(x), y
        >>> clients = Federation.from_arrays(torch.eye(3), torch.arange(3), sizes=[1, 2])
        >>> clients.with_transform(add_noise).transform.__name__
        'add_noise'
        """
        if transform is not None and not callable(transform):
            raise FedShuffleError(
                f"transform is {transform!r:.60}, but must be a function of the fields of a"
                " minibatch that returns the fields."
            )
        federation = replace(self, transform=transform)
        object.__setattr__(federation, "_opened", self._opened)
        return federation

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._opened is None:
            return super().__reduce_ex__(protocol)
        return _reopened, (*self._opened, self.transform)

    @classmethod
    def _build(
        cls,
        fields: Sequence[Any],
        sizes: IntArray,
        weights: ArrayLike | None,
        ids: Sequence[Hashable] | None = None,
        transform: ExampleTransform | None = None,
    ) -> "Federation":
        if float(np.sum(sizes, dtype=np.float64)) > 2.0**52:
            raise FedShuffleError("sizes add up to more than 2**52 examples, too many to count.")
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        if fields and (rows := common_length(fields)) != offsets[-1]:
            raise FedShuffleError(f"sizes add up to {offsets[-1]}, but there are {rows} rows.")
        objective = vector(sizes if weights is None else weights, "weights", range(len(sizes)))
        return cls(
            sizes=frozen(sizes),
            weights=frozen(_normalised(objective)),
            offsets=frozen(offsets),
            fields=tuple(fields),
            ids=range(len(sizes)) if ids is None else ids,
        ).with_transform(transform)

    def _check_finite(self) -> "Federation":
        """Refuse NaN and infinity, which would spoil every model."""
        for index, field in enumerate(self.fields):
            numpy = isinstance(field, np.ndarray)
            if not (field.dtype.kind in "fc" if numpy else field.is_floating_point()):
                continue
            at_once = max(1, _NUMBERS * len(field) // max(1, int(np.prod(field.shape))))
            for begin in range(0, len(field), at_once):
                part = field[begin : begin + at_once]
                good = np.isfinite(part) if numpy else part.isfinite().cpu().numpy()
                if not good.all():
                    row = begin + int(np.argmin(good.reshape(len(good), -1).all(axis=1)))
                    client = int(np.searchsorted(self.offsets, row, side="right")) - 1
                    raise FedShuffleError(
                        f"field {index} of client {self.ids[client]!r} has NaN or infinity in its"
                        f" example {row - int(self.offsets[client])}. Clean or drop that example."
                    )
        return self

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

    def subset(self, clients: ArrayLike) -> "Federation":
        """Only these clients, by number, with their examples and their relative weights.

        >>> Federation.from_arrays([1.0, 2.0, 3.0, 4.0], sizes=[1, 2, 1]).subset([0, 2]).fields
        (array([1., 4.]),)
        """
        chosen = np.unique(np.asarray(clients, dtype=np.int64))
        if not len(chosen) or chosen[0] < 0 or chosen[-1] >= len(self):
            raise FedShuffleError(f"choose at least one client, from 0 to {len(self) - 1}.")
        rows = np.concatenate([np.arange(*self.offsets[i : i + 2]) for i in chosen.tolist()])
        return Federation._build(
            [field[rows] for field in self.fields],
            self.sizes[chosen],
            self.weights[chosen],
            tuple(self.ids[i] for i in chosen.tolist()),
            self.transform,
        )

    def pooled(self) -> "Federation":
        """All examples in one place: a single client that holds the data of all.

        >>> Federation.from_sizes([1, 2, 3]).pooled()
        Federation(1 clients, 6 examples, sizes only)
        """
        everybody = self.offsets[-1:].copy(), None, ("everybody",), self.transform
        pooled = self._build(self.fields, *everybody)
        if self._opened is not None:
            object.__setattr__(pooled, "_opened", (*self._opened[:2], True))
        return pooled

    def sample(self, number: int, seed: int = 0) -> "Federation":
        """A random subset of this many clients; the federation itself if it has no more."""
        if count(number, "the number of clients") >= len(self):
            return self
        drawn = generator(seed, Purpose.SUBSET).choice(len(self), size=number, replace=False)
        return self.subset(drawn)

    def __repr__(self) -> str:
        shapes = ", ".join(str(tuple(field.shape)) for field in self.fields) or "sizes only"
        return f"Federation({len(self)} clients, {self.offsets[-1]} examples, {shapes})"

    def tensors(self) -> "tuple[torch.Tensor, ...]":
        """The packed fields as torch tensors (without a copy where the memory allows it)."""
        import torch

        if not self.fields:
            raise FedShuffleError(
                "this federation has sizes only, and training needs examples."
                " Use Federation.from_arrays, from_datasets or open."
            )
        return tuple(torch.as_tensor(field) for field in self.fields)


def _reopened(
    path: str, weights: ArrayLike | None, pooled: bool, transform: ExampleTransform | None
) -> Federation:
    federation = Federation.open(path, weights).with_transform(transform)
    return federation.pooled() if pooled else federation


def _normalised(weights: FloatArray | IntArray) -> FloatArray:
    shares: FloatArray = weights / float(weights.max())
    shares = shares / float(shares.sum())
    if not shares.min() > 0:
        raise FedShuffleError(
            f"the weights of clients {int(shares.argmin())} and {int(weights.argmax())} are too far"
            " apart to represent both. Leave out clients with a negligible weight."
        )
    return shares


def _checked(sizes: Any) -> IntArray:
    return _arrays.counts(sizes, "sizes", " Leave out clients without examples.")


def _ids(ids: Sequence[Hashable] | None, sizes: IntArray) -> Sequence[Hashable] | None:
    """The ids of clients of these sizes, if they are given: one for each, no two alike."""
    if ids is None:
        return None
    with error_context("ids", TypeError):
        distinct = len(set(ids)) == len(ids)
    if len(ids) != len(sizes) or not distinct:
        raise FedShuffleError(f"ids must be {len(sizes)} different ones, one per client.")
    return tuple(ids)


def _packable(field: Any, index: int) -> Any:
    """A field as a tensor, or as an array that torch can read."""
    if hasattr(field, "is_floating_point"):
        return field
    if hasattr(field, "dataset") and hasattr(field, "batch_size"):  # without importing torch
        raise FedShuffleError(
            f"field {index} is a {type(field).__name__}. Give its dataset to"
            " Federation.from_datasets, one per client; training makes the minibatches."
        )
    remedy = (
        "Convert it to numbers first (pandas: get_dummies for inputs, factorize for labels), or"
        " leave it out."
    )
    array = np.ascontiguousarray(_arrays.numeric(field, f"field {index}", remedy))
    return array.astype(array.dtype.newbyteorder("="), copy=False)
