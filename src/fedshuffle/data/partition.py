"""Splitting your own examples over clients: every function returns the client of each row.

Pass the result to ``Federation.from_arrays(..., client_ids=...)``. Every client gets at least one
example, every row is assigned, and the split depends on the seed alone.

    >>> from fedshuffle import Federation
    >>> labels = [0, 0, 0, 0, 1, 1, 1, 1]
    >>> owners = dirichlet(labels, clients=3, alpha=0.5, seed=4)
    >>> Federation.from_arrays(labels, client_ids=owners)
    Federation(3 clients, 8 examples, (8,))
"""

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import FloatArray, IntArray, count, number
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.randomness import Purpose, check_seed, generator

__all__ = [
    "by_column",
    "dirichlet",
    "lognormal",
    "pachinko",
]


def dirichlet(labels: ArrayLike, clients: int, alpha: float, seed: int = 0) -> IntArray:
    """Clients that differ in labels and in size (Yurochkin et al. 2019).

    The examples of every label are divided by a draw from a symmetric Dirichlet distribution over
    the clients. Small ``alpha`` gives most of a label to few clients, large ``alpha`` the same mix
    to all. Clients without any example then get one from a client with several.

    For clients of equal sizes give the labels twice to :func:`pachinko`.

    Args:
        labels: the label of each row.
        clients: the number of clients.
        alpha: the concentration of the distribution.
        seed: the seed of the draw.

    >>> owner = dirichlet([0] * 50 + [1] * 50, clients=4, alpha=0.1)
    >>> len(owner), np.unique(owner).tolist()
    (100, [0, 1, 2, 3])
    """
    label = _codes(labels, "labels")
    _check_enough(len(label), clients)
    alpha = number(alpha, "alpha", within="(0, inf)")
    rng = generator(check_seed(seed), Purpose.SPLIT)
    owner = np.empty(len(label), dtype=np.int64)
    for rows in _rows_by_code(label, rng):
        cuts = _cuts(_shares(_log_gammas(rng, alpha, clients)), len(rows))
        owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")

    missing = np.setdiff1d(np.arange(clients), owner)
    _, firsts = np.unique(owner, return_index=True)
    spare = np.setdiff1d(np.arange(len(owner)), firsts)
    owner[rng.choice(spare, len(missing), replace=False)] = missing
    return owner


def lognormal(examples: int, clients: int, spread: float, seed: int = 0) -> IntArray:
    """Clients of very different sizes with examples from the same distribution.

    Every client gets one example, and the rest is divided in proportion to ``exp(spread * z)`` with
    standard normal ``z``. A spread of 0 makes all sizes equal; at 1 a client one deviation above
    the median has about seven times as much as one below.

        >>> np.bincount(lognormal(examples=1000, clients=5, spread=1.0)).sum()
        np.int64(1000)
    """
    rows = count(examples, "examples")
    _check_enough(rows, clients)
    spread = number(spread, "spread", within="[0, inf)")
    rng = generator(check_seed(seed), Purpose.SPLIT)
    cuts = _cuts(_shares(spread * rng.standard_normal(clients)), rows - clients)
    return rng.permutation(np.repeat(np.arange(clients), 1 + np.diff(cuts, prepend=0)))


def pachinko(
    coarse: ArrayLike,
    fine: ArrayLike,
    clients: int,
    *,
    alpha: float = 0.1,
    beta: float = 10.0,
    seed: int = 0,
) -> IntArray:
    """Clients of equal sizes that differ in coarse labels, with all fine labels under these.

    Hierarchical LDA, or Pachinko allocation (Li and McCallum 2006; Reddi et al. 2021). Each client
    has a distribution over the coarse labels, drawn from a symmetric Dirichlet(alpha), and one over
    the fine labels under each, drawn from a symmetric Dirichlet(beta). Client by client, every
    example is drawn by coarse label, then by fine label, then among the remaining ones; labels that
    have run out are skipped. Sizes differ by one if the rows do not divide evenly.

    Args:
        coarse: the coarse label of each row.
        fine: the fine label of each row.
        clients: the number of clients.
        alpha: how alike clients are in coarse labels: small values make them differ.
        beta: the same for fine labels.
        seed: the seed of the draw.

    >>> owner = pachinko([0, 0, 1, 1], [0, 1, 2, 3], clients=2)
    >>> np.bincount(owner).tolist()
    [2, 2]
    """
    rows = len(_codes(coarse, "coarse"))
    _check_enough(rows, clients)
    sizes = np.diff(_cuts(np.full(clients, 1 / clients), rows), prepend=0)
    return allocate(coarse, fine, sizes, alpha=alpha, beta=beta, seed=seed)


def by_column(values: ArrayLike) -> NDArray[Any]:
    """Clients as a column names them: text or whole numbers; rows without a name are refused.

    >>> by_column(["ward 2", "ward 1", "ward 2"]).tolist(), by_column([3.0, 7.0]).tolist()
    (['ward 2', 'ward 1', 'ward 2'], [3, 7])
    """
    names = np.asarray(values, dtype=object)
    if names.ndim != 1 or not len(names):
        raise FedShuffleError(f"a column has one value per row, but this has shape {names.shape}.")
    for row, name in enumerate(names):
        if name == "" if isinstance(name, str) else str(name) in ("None", "nan", "NaT", "<NA>"):
            raise FedShuffleError(f"row {row} names no client: {name!r}. Name one, or drop it.")
    if all(isinstance(name, str) for name in names):
        return names.astype(str)
    with suppress(TypeError, ValueError, OverflowError):
        whole: IntArray = names.astype(np.int64)
        if (whole == names).all():
            return whole
    kinds = ", ".join(sorted({type(name).__name__ for name in names}))
    raise FedShuffleError(f"the column holds {kinds}: make all ids text, or all whole numbers.")


def allocate(
    coarse: ArrayLike,
    fine: ArrayLike,
    sizes: IntArray,
    *,
    alpha: float,
    beta: float,
    seed: int,
    stream: int = 0,
) -> IntArray:
    """As :func:`pachinko`, for clients of these sizes; -1 for rows that are left over."""
    top, under = _codes(coarse, "coarse"), _codes(fine, "fine")
    if len(top) != len(under):
        raise FedShuffleError(f"there are {len(top)} coarse labels for {len(under)} fine ones.")
    alpha = number(alpha, "alpha", within="(0, inf)")
    beta = number(beta, "beta", within="(0, inf)")
    check_seed(seed)
    # A pile of rows for each fine label under each coarse one, taken from the end.
    leaf = _codes(top * (under.max() + 1) + under, "labels")
    piles = _rows_by_code(leaf, generator(seed, Purpose.SPLIT, round=stream))
    left = np.array([len(pile) for pile in piles])
    above = np.array([top[pile[0]] for pile in piles])
    owner = np.full(len(top), -1)
    for client, size in enumerate(sizes.tolist()):
        rng = generator(seed, Purpose.SPLIT, round=stream, client=client + 1)
        coarse_logs = _log_gammas(rng, alpha, int(top.max()) + 1)
        fine_logs = _log_gammas(rng, beta, len(piles))
        wanted = _draw(rng, coarse_logs, np.bincount(above, left).astype(np.int64), size)
        for kind in np.flatnonzero(wanted).tolist():
            leaves = np.flatnonzero(above == kind)
            taken = _draw(rng, fine_logs[leaves], left[leaves], int(wanted[kind]))
            for k, some in zip(leaves.tolist(), taken.tolist(), strict=True):
                owner[piles[k][left[k] - some : left[k]]] = client
                left[k] -= some
    return owner


def _draw(rng: np.random.Generator, logs: FloatArray, room: IntArray, size: int) -> IntArray:
    """How often each is drawn, one after another, where none is drawn once its room is used up.

    Skipping a full one means drawing again, and it does not matter when: so all are drawn at once,
    and those that found no room again.
    """
    taken = np.zeros_like(room)
    while size:
        shares = _shares(np.where(taken < room, logs, -np.inf))
        fits = np.minimum(rng.multinomial(size, shares), room - taken)
        taken += fits
        size -= int(fits.sum())
    return taken


def _log_gammas(rng: np.random.Generator, shape: float, size: int) -> FloatArray:
    """Logarithms of gamma variables, the shares of which are a Dirichlet draw.

    Gamma variables of small shapes underflow, and shares would be 0 / 0; their logarithms do not:
    if G has shape a + 1 and U is uniform, G U^(1/a) has shape a.
    """
    boosted = np.log(rng.standard_gamma(shape + 1, size))
    logs: FloatArray = boosted + np.log1p(-rng.random(size)) / shape
    return logs


def _shares(logs: FloatArray) -> FloatArray:
    shares: FloatArray = np.exp(logs - logs.max())
    shares /= shares.sum()
    return shares


def _cuts(shares: FloatArray, total: int) -> IntArray:
    """Where the parts of ``total`` end if cut by these shares, each within one of its share."""
    cuts = np.rint(np.cumsum(shares) * total).astype(np.int64)
    cuts[-1] = total
    return np.minimum(cuts, total)


def _rows_by_code(codes: IntArray, rng: np.random.Generator) -> list[IntArray]:
    shuffled = rng.permutation(len(codes))
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(codes))[:-1])


def _codes(labels: ArrayLike, what: str) -> IntArray:
    array = np.asarray(labels)
    if array.ndim != 1 or not len(array):
        raise FedShuffleError(f"{what} must be one label per row, but have shape {array.shape}.")
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        row = int(np.argmin(np.isfinite(array)))
        raise FedShuffleError(f"{what}: row {row} has {array[row]}. Name its label, or drop it.")
    with error_context(lambda error: f"{what} mix types of labels: {error}.", TypeError):
        codes: IntArray = np.unique(array, return_inverse=True)[1]
    return codes


def _check_enough(rows: int, clients: int) -> None:
    if count(clients, "clients") > rows:
        raise FedShuffleError(f"{rows} examples are too few for {clients} clients: at most {rows}.")
