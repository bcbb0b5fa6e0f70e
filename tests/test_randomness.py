import itertools

import pytest

from fedshuffle.errors import FedShuffleError
from fedshuffle.randomness import Purpose, check_seed, generator


def test_every_address_has_a_stream_of_its_own() -> None:
    addresses = itertools.product([0, 1, 2**64 - 1], list(Purpose), [0, 1], [0, 1])
    firsts = [
        tuple(generator(s, purpose, round=r, client=c).integers(2**60, size=2))
        for s, purpose, r, c in addresses
    ]
    assert len(set(firsts)) == len(firsts)


def test_streams_can_be_drawn_in_any_order() -> None:
    late = generator(5, Purpose.ORDER, round=9, client=3).random(4)
    generator(5, Purpose.ORDER, round=1, client=3).random(1000)
    assert (generator(5, Purpose.ORDER, round=9, client=3).random(4) == late).all()


def test_neighbouring_streams_do_not_overlap() -> None:
    here = set(generator(1, Purpose.ORDER, round=0, client=0).integers(2**62, size=5000).tolist())
    next_ = set(generator(1, Purpose.ORDER, round=0, client=1).integers(2**62, size=5000).tolist())
    assert not here & next_


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "a", None])
def test_bad_seeds_are_refused(seed: object) -> None:
    with pytest.raises(FedShuffleError, match="seed"):
        check_seed(seed)  # type: ignore[arg-type]
