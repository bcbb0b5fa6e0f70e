"""Splitting examples of one's own over clients: every function says whose each row is.

What comes back is for ``Federation.from_arrays(..., client_ids=...)``. Everyone gets at least one
example, every row is given away, and the split follows from the seed alone.

    >>> from fedshuffle import Federation
    >>> labels = [0, 0, 0, 0, 1, 1, 1, 1]
    >>> owners = dirichlet(labels, clients=3, alpha=0.5, seed=4)
    >>> Federation.from_arrays(labels, client_ids=owners)
    Federation(3 clients, 8 examples, (8,))
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedshuffle._arrays import FloatArray, IntArray, count, number
from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, check_seed, generator


def dirichlet(labels: ArrayLike, clients: int, alpha: float, seed: int = 0) -> IntArray:
    """Clients that see different labels, and differ in size (Yurochkin et al. 2019).

    The examples of every label are shared out by a draw from a symmetric Dirichlet distribution
    over the clients. Small ``alpha`` gives most of a label to few clients, large ``alpha`` the same
    mix to all. Clients that got nothing are then given one example of those who have several.

    For clients of equal sizes give the labels twice to :func:`pachinko`.
    """
    label = _codes(labels, "labels")
    _enough(len(label), clients)
    alpha = _above_zero(alpha, "alpha")
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
    """Clients of very different sizes, whose examples are drawn from all alike.

    Everyone gets one example, and what is left is shared in proportion to ``exp(spread * z)`` with
    standard normal ``z``. A spread of 0 makes all sizes equal; at 1 a client at the upper end of
    the middle two thirds has about seven times as much as one at the lower end.

        >>> np.bincount(lognormal(examples=1000, clients=5, spread=1.0)).sum()
        np.int64(1000)
    """
    rows = count(examples, "examples")
    _enough(rows, clients)
    spread = number(spread, "spread")
    if not 0 <= spread < np.inf:
        raise FedShuffleError(f"spread is {spread:g}, but must be a finite number of at least 0.")
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
    """Clients of equal sizes that see different coarse labels, and under these all fine ones.

    Hierarchical LDA, or Pachinko allocation (Li and McCallum 2006; Reddi et al. 2021). Each client
    has a distribution over the coarse labels, drawn from a symmetric Dirichlet(alpha), and one over
    the fine labels under each, drawn from a symmetric Dirichlet(beta). Client by client, every
    example is drawn by coarse label, then by fine label, then among what is left of these; labels
    of which nothing is left are passed over. Sizes differ by one where the rows do not divide.
    """
    rows = len(_codes(coarse, "coarse"))
    _enough(rows, clients)
    sizes = np.diff(_cuts(np.full(clients, 1 / clients), rows), prepend=0)
    return allocate(coarse, fine, sizes, alpha=alpha, beta=beta, seed=seed)


def by_column(values: ArrayLike) -> NDArray[Any]:
    """Clients as a column names them: text, or whole numbers; rows without a name are refused.

    >>> by_column(["ward 2", "ward 1", "ward 2"]).tolist(), by_column([3.0, 7.0]).tolist()
    (['ward 2', 'ward 1', 'ward 2'], [3, 7])
    """
    names = np.asarray(values, dtype=object)
    if names.ndim != 1 or not len(names):
        raise FedShuffleError(f"a column has one value a row, but this has shape {names.shape}.")
    for row, name in enumerate(names):
        if _is_missing(name):
            raise FedShuffleError(f"row {row} names no client: {name!r}. Name one, or drop it.")
    if all(isinstance(name, str) for name in names):
        return names.astype(str)
    try:
        whole: IntArray = names.astype(np.int64)
        if (whole == names).all():
            return whole
    except (TypeError, ValueError, OverflowError):
        pass
    kinds = ", ".join(sorted({type(name).__name__ for name in names}))
    raise FedShuffleError(
        f"the column holds {kinds}, but clients are named by text or by whole numbers. Convert it."
    )


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
    top = _codes(coarse, "coarse")
    under = _codes(fine, "fine")
    if len(top) != len(under):
        raise FedShuffleError(f"there are {len(top)} coarse labels for {len(under)} fine ones.")
    alpha, beta = _above_zero(alpha, "alpha"), _above_zero(beta, "beta")
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
        room = np.bincount(above, left).astype(np.int64)
        wanted = _draw(rng, coarse_logs, room, size)
        for kind in np.flatnonzero(wanted).tolist():
            leaves = np.flatnonzero(above == kind)
            taken = _draw(rng, fine_logs[leaves], left[leaves], int(wanted[kind]))
            for k, some in zip(leaves.tolist(), taken.tolist(), strict=True):
                owner[piles[k][left[k] - some : left[k]]] = client
                left[k] -= some
    return owner


def _draw(rng: np.random.Generator, logs: FloatArray, room: IntArray, size: int) -> IntArray:
    """How often each is drawn, one after another, where none is drawn once its room is used up.

    To pass over what is full is to draw again, and it does not matter when: so all are drawn at
    once, and those that found no room again.
    """
    taken = np.zeros_like(room)
    while size:
        shares = _shares(np.where(taken < room, logs, -np.inf))
        fits = np.minimum(rng.multinomial(size, shares), room - taken)
        taken += fits
        size -= int(fits.sum())
    return taken


def _log_gammas(rng: np.random.Generator, shape: float, size: int) -> FloatArray:
    """Logarithms of gamma variables, whose shares are a Dirichlet draw.

    Small shapes make numbers below the smallest float, so that shares would be 0 / 0; as logarithms
    they do not vanish: if G has shape a + 1 and U is uniform, G U^(1/a) has shape a.
    """
    boosted = np.log(rng.standard_gamma(shape + 1, size))
    logs: FloatArray = boosted + np.log1p(-rng.random(size)) / shape
    return logs


def _shares(logs: FloatArray) -> FloatArray:
    shares: FloatArray = np.exp(logs - logs.max())
    shares /= shares.sum()
    return shares


def _cuts(shares: FloatArray, total: int) -> IntArray:
    """Where the parts of ``total`` end if cut by these shares, each within one of its share.

    >>> _cuts(np.array([0.5, 0.25, 0.25]), 10).tolist()
    [5, 8, 10]
    """
    cuts = np.rint(np.cumsum(shares) * total).astype(np.int64)
    cuts[-1] = total
    return np.minimum(cuts, total)


def _rows_by_code(codes: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """The rows of every code, each in random order."""
    shuffled = rng.permutation(len(codes))
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(codes))[:-1])


def _codes(labels: ArrayLike, what: str) -> IntArray:
    """Labels of any kind as numbers from 0."""
    found = np.asarray(labels)
    if found.ndim != 1 or not len(found):
        raise FedShuffleError(f"{what} must be one label a row, but have shape {found.shape}.")
    if found.dtype.kind in "fc" and not np.isfinite(found).all():
        row = int(np.argmin(np.isfinite(found)))
        raise FedShuffleError(f"{what}: row {row} has {found[row]}. Name its label, or drop it.")
    try:
        codes: IntArray = np.unique(found, return_inverse=True)[1]
    except TypeError as error:
        raise FedShuffleError(f"{what} mix kinds of labels: {error}.") from error
    return codes


def _enough(rows: int, clients: int) -> None:
    if count(clients, "clients") > rows:
        raise FedShuffleError(
            f"{rows} examples are too few for {clients} clients with at least one each. Ask for at"
            f" most {rows} clients."
        )


def _above_zero(value: float, what: str) -> float:
    found = number(value, what)
    if not 0 < found < np.inf:
        raise FedShuffleError(f"{what} is {value!r}, but must be a positive finite number.")
    return found


def _is_missing(name: Any) -> bool:
    try:
        return name is None or name == "" or bool(name != name)
    except TypeError:  # pandas will not say whether its missing value differs from itself
        return True
