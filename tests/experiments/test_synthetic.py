"""The generated federation."""

import numpy as np

from fedshuffle.experiments import synthetic


def test_clients_differ_in_size_and_in_labels() -> None:
    train, test = synthetic.clients(), synthetic.clients("test")
    assert train.sizes.tolist() == synthetic.sizes().tolist()
    assert test.sizes.tolist() == (synthetic.TESTS * synthetic.sizes()).tolist()
    assert (train.sizes.min(), train.sizes.max()) == (1, 228)
    # The median of exp(1.3 z) is 1: half the clients have at most 8 examples.
    assert np.sum(train.sizes <= 8) == synthetic.CLIENTS // 2
    shares = np.array(
        [
            np.bincount(test.client(i)[1], minlength=synthetic.LABELS) / test.sizes[i]
            for i in range(synthetic.CLIENTS)
        ]
    )
    assert shares.max(axis=1).mean() > 0.5  # one label is most of what a client holds,
    assert len(set(shares.argmax(axis=1))) == synthetic.LABELS  # but not the same one


def test_a_client_tests_on_other_examples_of_the_same_kind() -> None:
    train, test = synthetic.clients(), synthetic.clients("test")
    last = synthetic.CLIENTS - 1
    seen, unseen = (part.client(last)[0] for part in (train, test))
    assert not set(map(bytes, seen)) & set(map(bytes, unseen))
    others = test.client(last - 1)[0]
    distance = np.linalg.norm(seen.mean(axis=0) - unseen.mean(axis=0))
    assert distance < 1 < np.linalg.norm(seen.mean(axis=0) - others.mean(axis=0))
    assert np.array_equal(synthetic.clients().client(3)[0], train.client(3)[0])
