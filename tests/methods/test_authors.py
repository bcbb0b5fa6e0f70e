"""Methods for clients that come and go, against numbers that their authors' code printed.

``authors.json`` says whose code that is, at which commit, and on what it ran.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshuffle.availability import Trace
from fedshuffle.sampling import Full, Sampling, Uniform, among_available
from tests.regression import Clients, make_run, models, trained, whole

AUTHORS = json.loads(Path(__file__).with_name("authors.json").read_text())
ROWS, VALUES = (list(map(np.array, AUTHORS[key])) for key in ("rows", "values"))
CLIENTS = Clients(ROWS, VALUES, np.full(4, 0.25))
STEP_SIZES: dict[str, float | Callable[[int], float]] = {
    "0.1": 0.1,
    "0.1 / (t + 1)": lambda t: 0.1 / (t + 1),
    "0.01 / sqrt(t / 10 + 1)": lambda t: 0.01 / math.sqrt(t / 10 + 1),
}


def recorded() -> Sampling:
    """Clients take part as in the record, in which nobody does in some rounds."""
    rounds = AUTHORS["participation"]
    client, begin = np.array([(i, t) for t, there in enumerate(rounds) for i in there]).T
    trace = Trace(4, client, begin, begin + 1, allow_gaps=True)
    return among_available(Full(4), trace, CLIENTS.federation, len(rounds))


@pytest.mark.parametrize("theirs", AUTHORS["runs"], ids=lambda run: run["method"])
def test_the_models_of_their_authors_code(theirs: dict[str, Any]) -> None:
    name, table = theirs["method"], theirs.get("participation", AUTHORS["participation"])
    sampling = Uniform(4, 2) if name == "fedvarp" else recorded()  # FedVARP's are uniform
    step_size, server = STEP_SIZES[theirs["step_size"]], theirs["server_step_size"]
    run = make_run(CLIENTS, name, sampling, whole(theirs["steps"]), step_size, server)
    assert [run.cohort(t).clients.tolist() for t in range(len(table))] == table
    found = models(trained(CLIENTS, run, len(table)))
    np.testing.assert_allclose(found, theirs["models"], rtol=0, atol=1e-12)
