"""What cannot be done with real clients, refused before any of them is asked."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedshuffle import probabilities, sampling
from fedshuffle._arrays import FloatArray, count, vector
from fedshuffle.errors import FedShuffleError, error_context, unknown
from fedshuffle.flower.chain import WireChain
from fedshuffle.kernel import FullGradient, LocalTraining, Request
from fedshuffle.local_optimisers import SGD, LocalOptimiser
from fedshuffle.local_work import LocalWork
from fedshuffle.methods import Method, averaging
from fedshuffle.privacy import Mechanism
from fedshuffle.probabilities import Estimate
from fedshuffle.sampling import Sampling
from fedshuffle.state import State
from fedshuffle.timing import OverSelection, TrainingSchedule, Wait
from fedshuffle.training.rounds import Run, advance


def check_settings(method: Method, work: LocalWork, drawn: str | Sampling, withheld: bool) -> None:
    """Refuse methods, samplings and local work."""
    if sampling.is_two_phase(drawn):
        raise FedShuffleError(
            "optimal client sampling asks for norms first and updates later, which takes two"
            " exchanges here and saves nothing. Use another sampling."
        )
    if method.pooled:
        raise FedShuffleError(
            f"{method.name} has all data in one place, which the strategy does not offer. Use"
            " fedshuffle-gen, or fedshuffle-mvr+fedshuffle-gen."
        )
    if work.interruption is not None:
        raise FedShuffleError(
            "real clients report the steps they did: leave work.interruption out, and limit the"
            " time on the client (client_app(seconds=...))."
        )
    optimiser = LocalOptimiser.of(method.local_work(work).optimiser or SGD)
    if not isinstance(optimiser.kind, str):
        raise FedShuffleError(
            f"clients would not know the local optimiser {optimiser}: only its name is sent. Use"
            " one of torch.optim, such as 'adamw'."
        )
    if not withheld:
        return
    if not optimiser.plain:
        raise FedShuffleError(
            f'with sizes="withheld" clients scale their steps by the number of them, which is right'
            f" for plain 'sgd' only: leave out the local optimiser {optimiser}, or the withholding."
        )
    if method.local_work(work).steps is not None:
        raise FedShuffleError('with sizes="withheld" the local work is given in epochs, not steps.')
    by_size = ("importance", "one", "ais", "stratified")
    if isinstance(drawn, str) and drawn.split(":")[0].strip() in by_size:
        raise FedShuffleError(
            f'sampling {drawn!r} depends on sizes, and sizes are "withheld". Use full, uniform:B or'
            " independent:p1,p2,..."
        )
    rules, known = method.averaging, (averaging.objective_weight, averaging.weight_per_share_done)
    if rules.step_normalisation is not averaging.own_steps or rules.weight not in known:
        raise FedShuffleError(
            f"{method.name} needs the clients' numbers of steps, which follow from their sizes. Use"
            " fedshuffle (or NAME+fedshuffle), whose clients can scale their steps themselves."
        )


def _first_request(run: Run) -> Request | State:
    """What the method asks for first, with one client and one parameter."""
    return advance(run.round(run.start(torch.zeros(1)), run.cohort(0, np.arange(1))))


def check_transforms(run: Run, resume: bool) -> None:
    """Refuse chains that real clients cannot run."""
    WireChain(run.chain).texts  # noqa: B018  # fails if clients would not know a transform
    name, stateful = run.method.name, run.method.direction.client_state
    if run.method.direction.own_models:
        raise FedShuffleError(
            f"clients of {name} start from models of their own, which the strategy does not offer."
            " Use mifa or fedvarp."
        )
    first = _first_request(run)
    if isinstance(first, FullGradient) and first.chain:
        raise FedShuffleError(
            f"{name} compresses full gradients, which the strategy does not offer. Use fedlin."
        )
    if stateful and run.chain:
        raise FedShuffleError(
            f"{name} keeps a vector for each client, which the server computes from the whole"
            f" update, but after {run.chain.transforms[0]} it does not see that. Leave out"
            " transforms, or use a method without client state."
        )
    if run.chain.keeps_state and resume:
        memory = next(one for one in run.chain.transforms if one.keeps_state)
        raise FedShuffleError(
            f"a run with {memory} cannot be resumed: what clients keep is gone with the Flower run."
            " Start a new run in another folder."
        )


def cost(mechanism: Mechanism, rounds: int) -> str:
    """What a run costs; an error if that is more than may be spent."""
    budget, most = mechanism.budget, mechanism.max_rounds
    if most is not None and rounds > most:
        raise FedShuffleError(
            f"epsilon {mechanism.privacy.epsilon:g} affords {most} rounds, and this run has"
            f" {rounds}. Run fewer, or start a new run with another epsilon."
        )
    return f"{rounds} rounds cost epsilon {budget.spent(rounds):.3g} at delta {budget.delta:.1e}"


def check_estimated(run: Run, secure: bool) -> None:
    """Refuse what does not go together with estimated response probabilities."""
    if run.mechanism is not None:
        raise FedShuffleError(
            "estimated response probabilities depend on who replied, so weights tell who did, and"
            " privacy would not hold: state response_probability as a number."
        )
    if secure:
        raise _lost_rounds()


def check_secure(run: Run, retries: int, response_probability: FloatArray) -> None:
    """Refuse what needs more than the sum of the updates, or weights that are not known before."""
    method = run.method
    if not method.averaging.by_probability:
        raise FedShuffleError(
            f"{method.name} divides by a sum over the clients that reply, but with secure"
            " aggregation clients apply their weights before anybody knows who replies. Use"
            " fedshuffle (or NAME+fedshuffle)."
        )
    first = _first_request(run)
    if not isinstance(first, LocalTraining) or first.sums > 1 or method.direction.client_state:
        raise FedShuffleError(
            f"{method.name} needs more than the sum of the updates, which is all that secure"
            " aggregation reveals. Use fedshuffle."
        )
    if (channel := WireChain(run.chain).channel) is not None or run.chain.keeps_state:
        raise FedShuffleError(
            "with secure aggregation clients send masked vectors in full, and the server decodes"
            f" none: leave out {channel or 'transforms that keep state'}."
        )
    if retries:
        raise FedShuffleError("Flower's secure aggregation asks every client once: no retries.")
    if (response_probability < 1).any():
        raise _lost_rounds()


def check_schedule(run: Run, schedule: TrainingSchedule, secure: bool) -> None:
    """Refuse to leave out slow clients where everybody is needed."""
    if secure and not isinstance(schedule, Wait):
        raise FedShuffleError(
            "secure aggregation waits for all clients that take part, or loses the round: leave out"
            f" schedule {str(schedule)!r}."
        )
    if not isinstance(schedule, OverSelection):
        return
    if run.mechanism is not None:
        raise FedShuffleError(
            "a client that is among the first displaces another, so one client changes more than"
            f" its own update, and privacy would not hold: use a deadline, not {str(schedule)!r}."
        )
    if isinstance(_first_request(run), FullGradient):
        raise FedShuffleError(
            f"{run.method.name} asks clients twice in a round, and those who are first may differ:"
            f" use a deadline, not {str(schedule)!r}."
        )


def _lost_rounds() -> FedShuffleError:
    return FedShuffleError(
        "Flower's secure aggregation loses the whole round if a client drops out before it trains,"
        " so no response probability describes who is in the sum: leave response_probability out."
    )


def check_config(name: str, config: Mapping[str, object] | None) -> None:
    """Refuse a config that no client would see."""
    if config:
        raise FedShuffleError(
            f"{name} has {next(iter(config))!r}, which this strategy does not pass on: leave it"
            " out, and give work=LocalWork(...) and step_size to the strategy. ConsistentFedAvg"
            " passes it on, to clients with a train function of their own."
        )


def check_nodes(nodes: Mapping[int, int], clients: int) -> None:
    numbers = [*nodes.values()]
    whole = all(isinstance(n, int | np.integer) for n in [*nodes, *numbers])
    if not whole or len({*numbers}) < len(numbers) or not {*numbers} <= {*range(clients)}:
        raise FedShuffleError(
            "nodes says which client each of Flower's nodes is, every client at most once:"
            f" nodes={{NODE_ID: 0, ...}}, with clients 0 to {clients - 1}."
        )


def population(clients: int | None, sizes: Sequence[int] | str) -> int:
    if isinstance(sizes, str):
        if sizes not in ("asked", "withheld"):
            raise unknown("sizes", sizes, ["asked", "withheld"])
        if clients is None:
            raise FedShuffleError("say how many clients there are in all: clients=100.")
        return count(clients, "clients")
    if clients is not None and clients != len(sizes):
        raise FedShuffleError(f"there are {clients} clients, but {len(sizes)} sizes.")
    return count(len(sizes), "the number of sizes")


def response_probability(
    values: float | Sequence[float] | str | Estimate, clients: int
) -> tuple[FloatArray, Estimate | None]:
    """That each client replies, and the rule that estimates it instead, if any."""
    if isinstance(values, str | Estimate):
        return np.ones(clients), response_estimate(values)
    given = np.full(clients, values) if np.ndim(values) == 0 else values
    return vector(given, "response_probability", range(clients), within="(0, 1]"), None


def response_estimate(rule: str | Estimate | None) -> Estimate | None:
    """The rule that estimates response probabilities, if any."""
    if isinstance(rule, int | float):
        raise FedShuffleError(
            f"response_probability is {rule}, and that all clients reply alike is assumed anyway:"
            ' leave it out, or give that of each node, {NODE_ID: 0.9, ...}, or "estimate".'
        )
    with error_context("response_probability"):
        return None if rule is None else probabilities.resolve(rule)
