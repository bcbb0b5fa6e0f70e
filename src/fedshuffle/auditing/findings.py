"""What is wrong with a method or a server: why, and how to fix it."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.auditing.subject import Subject
from fedshuffle.local_work import Workload
from fedshuffle.methods import MVR, Cohort, GlobalMomentum, Method, Plain
from fedshuffle.methods.servers import Average
from fedshuffle.sampling import AmongAvailable, Buffers, Full
from fedshuffle.timing import InTime

TOLERANCE = 1e-8  # the relative distance within which effective weights equal the objective's
CLOSE = 1e-5  # the same for answers of servers, which may compute in single precision

_TEXTS = {  # what, why and fix, a line each
    "steps": """Clients take from {low} to {high} local steps {at}.
        A client that takes more steps moves the model further, so it also counts by steps.
        Divide each client's step size, or its weight, by its number of steps{instead}.""",
    "common steps": """The number of steps is the {steps} over each cohort.
        Clients that are sampled together with large clients move the model further.
        Give every client its own epochs and scale the step size{instead}.""",
    "interruption": """Some clients do not finish the steps that they planned{unfinished}.
        A client that stops early moves less far than its weight says.
        Weight by the share of the work that was done: method fedshuffle-gen.""",
    "normalised": """The aggregation weights are normalised over the cohort.
        {why_not_normalise}
        Divide each weight by the client's inclusion probability{instead}.""",
    "availability": """Clients come and go: client {often} is there {most:.0%} of the time, \
client {rarely} {least:.0%}.
        The weights are divided by the clients that came, so those who come often count more.
        Divide by the inclusion probability of sampling and availability together{instead}.""",
    "leaves": """Clients leave before they answer: client {leaver} {gone:.0%} of the times that it \
is asked, client {stayer} {kept:.0%}.
        The weights are divided by the clients that answered, so those that leave count less.
        Divide by the inclusion probability, which includes leaving{instead}.""",
    "deadline": """Late clients are dropped: client {fast} is in time in {most:.0%} of its rounds, \
client {slow} in {least:.0%}.
        The weights are divided by the clients that came, so fast ones count more.
        Divide by the inclusion probability, which includes being in time{instead}, or set a later \
deadline.""",
    "over": """Only the first {keep} of {ask} clients count: of its rounds client {fast} is among \
them in {most:.0%}, client {slow} in {least:.0%}.
        The weights are divided by the clients that came, so fast ones count more.
        Divide by the inclusion probability, which depends on speed{instead}, or take more of \
the updates.""",
    "arrival rates": """Client {often} arrives {times:.3g} times as often as client {rarely}.
        Every update moves the model, so a client counts by its rate.
        Divide each weight by the client's rate, known or estimated{instead}.""",
    "stale updates": """An update that is t server steps old counts (1 + t)^-{exponent:g} times.
        Slow clients are staler, so they count less, beside what their rate does.
        Divide each weight by the client's mean staleness weight as well{instead}.""",
    "cut": """Inclusion probabilities are estimated, and the estimate does not tend to them.
        Client {client} counts {ratio:.3g} times what was meant, also in a long run.
        Let the estimate remember longer, with a larger cutoff or a smaller share, or estimate by \
counting: estimate:bayes.""",
    "never": """Client {never} is never there, and was dropped.
        Its objective cannot be minimised: the model never sees its data.
        Leave it out of the objective, or reach it in some rounds.""",
    "time": """Who is there changes with time: {when} what you meant.
        The model follows whoever is there, and here the mean over time does not make up for it.
        Divide by inclusion probabilities, as method fedshuffle does, with step sizes that are \
small for the length of a period.""",
    "time and rounds": """Who is there changes with time: {when} what you meant.
        Inclusion probabilities are means over {period} rounds, and these are {rounds}.
        Let the drift last as long as the run, train for whole periods, or estimate probabilities \
by a moving rate: estimate:ewma:0.05.""",
    "time and step sizes": """Who is there changes with time: {when} what you meant.
        Rounds {window} have {share} of the step sizes, so those who are there then count more.
        Keep step sizes constant while who is there changes, or let them fall over many periods \
of it.""",
    "joint": """{name} estimates the gradient from the cohort that then follows it.
        A cohort of large total weight both counts more in the estimate and moves further.
        Use {other}, or a sampling whose cohorts all have the same total weight (full \
participation, or one client with probability w).""",
    "rules": """The rules of {name} do not weight clients as the objective does.
        In the mean over cohorts client {client} counts {ratio:.3g} times what was meant.
        Make weight times steps over normalisations proportional to the objective's weight\
{instead}.""",
    "rounds": """A rule or an interruption depends on the round.
        The weights are the mean over the first {rounds} rounds; later ones may differ.
        Let every round treat clients alike, or audit over as many rounds as you train.""",
    "pooled": """All data is in one place, and every example counts equally.
        The objective goes by the number of examples, not by the weights you gave.
        Weight clients by size, or use a federated method.""",
    "windows": """Who counts changes over the rounds: in rounds {first} to {last} client {client} \
has {then:.2%} of the weight, in all rounds {overall:.2%}.
        Clients come and go, and the model follows whoever is there; where step sizes fall, early \
rounds count more.
        Divide each weight by how often the client takes part at that time, and let step sizes \
fall only over many comings and goings.""",
    "sizes": """The server ignores how many examples clients have.
        Small clients count like large ones.
        Weight clients by size, or say that you mean an objective of equal weights.""",
    "probability": """The server ignores inclusion probability.
        Clients that take part more often count more.
        Divide each client's weight by its inclusion probability.""",
    "rates": """Client {fast} uploads {often:.3g} times as often as client {slow}.
        Every upload moves the model, so clients count by their speed.
        Divide each update by its client's rate times its mean staleness weight.""",
    "staleness": """An update counts {one:.3g} times a fresh one if one model came in between, \
{last:.3g} times if {staleness} did.
        Slow clients are stale more often, so this takes more from those who upload rarely.
        Divide each update by its client's rate times its mean staleness weight.""",
    "lost": """An update of client {client} counts {ratio:.3g} times what it should, in the mean, \
although staleness makes no difference.
        Some of its updates are lost on their way into the model, or replaced by later ones.
        Add every update that arrives, once.""",
    "undone": """A client that uploads the model that it downloaded undoes {undone:.0%} of what \
others did in between.
        The server moves towards the client's model instead of by its update, so work is lost, \
the more the slower a client is.
        Add the update: the client's model minus the model that it downloaded.""",
    "not finite": """{non_finite_rounds} of {rounds} rounds gave NaN or infinity.
        One such step destroys the model for good.
        Look for divisions by zero: cohorts of one client, clients that did not move.""",
    "drift": """The model moves although no client moves.
        It is led away from every objective that clients have.
        Add nothing to the step that does not come from updates.""",
    "unbounded": """The steps grow without bound while clients send the same updates.
        Memory is fed back with a factor of one or more, so any step size diverges.
        Let momentum decay, and add it once.""",
    "only one": """Only the {only_client_counted} client of a cohort counts.
        The updates of all other clients are thrown away.
        Sum the updates instead of overwriting the sum.""",
    "order": """The step depends on the order in which replies arrive.
        Fast clients count differently from slow ones.
        Let the weights depend on who takes part, not on when.""",
    "fails": """The server fails if no client moves.
        A client that has nothing to learn, or has converged, stops the training.
        Look for divisions by the norm of an update.""",
    "optimiser": """The server's optimiser is not linear in the updates.
        The weights are those of the average that it gets; if cohorts differ, it may shift them.
        Judge by the weights where the optimiser's steps are small.""",
    "not linear": """Not linear in the updates.
        No weighted sum of the clients' objectives is minimised; the weights describe the \
response to small differences between clients that move alike.
        Trust the weights only near a point where clients agree.""",
    "ignored": """{ignored_rounds} of {rounds} rounds ignored all their clients.
        Clients that are mostly sampled in such rounds count too little.
        Let every cohort move the model.""",
    "biased transform": """{transform} changes the mean update, and nothing makes up for it.
        What it leaves out is lost in every round, so the model settles where no weighted sum of \
the clients' objectives is smallest.
        Let clients remember what was left out and send it later: add +ef to the channel.""",
    "model-dependent": """What {transform} does to an update depends on the update.
        A client whose updates are long counts less than you meant; {longest}.
        Measure it along a run: train with record_clients=True, then fedshuffle audit --clipping \
FOLDER --clip C.""",
    "unequal adaptive steps": """Clients take from {low} to {high} steps of {optimiser}, which \
rescales each client's gradients.
        Unequal numbers of adaptive steps minimise no weighted sum of the clients' objectives: a \
client counts by how far it moves, not by how steep its objective is.
        Give every client the same number of steps (LocalWork(steps=K)), and one scale to all: \
local SGD and an adaptive server (fedadam+fedshuffle), or mime-adam.""",
    "equal adaptive steps": """{optimiser} rescales each client's gradients by their own size.
        All clients move equally far, so the weights are those of votes: where gradients differ \
in size, the model settles near a weighted median of what clients want, at the minimum of no \
weighted sum.
        Share one scale among all clients: local SGD and an adaptive server (fedadam+fedshuffle), \
or mime-adam. Where clients' gradients are alike in size there is nothing to fix.""",
    "not clipped": """An update counts in full, however long it is.
        One client can move the model as far as it likes, and no noise hides that.
        Clip each client's update to a norm before it is summed.""",
    "no noise": """No noise is added, or the same in every round.
        Whoever sees two models can tell what a client sent.
        Add Gaussian noise from a new stream of random numbers in every round.""",
    "noise by number": """The noise is made for {number} clients that count alike.
        Client {client} counts {weight:.3g}, not 1/{number}, so the real noise multiplier is \
{multiplier:.3g}, not {claim:.4g}.
        Scale the noise to the clipping norm times the largest weight, or weight clients alike, or \
clip each update after it is weighted.""",
    "noise too small": """The noise is too small for what one client can do.
        Client {client} can move the model by {distance:.3g}, the noise has a standard deviation \
of {noise:.3g}: the real noise multiplier is {multiplier:.3g}, not {claim:.4g}.
        Scale the noise to the sensitivity: multiplier times clipping norm times largest weight.""",
    "inverted threshold": """The threshold falls when updates are clipped, and rises when none is.
        The rule wants the share of updates within the threshold, and gets the share of clipped \
ones: from {first:.3g} it runs to {last:.3g} while the norms do not \
change.
        Count the updates whose norm is at most the threshold.""",
    "runaway threshold": """The threshold runs away from the norms of the updates.
        From {first:.3g} it runs to {last:.3g} while the norms do \
not change: in the end all updates are clipped, or none is.
        Lower the threshold by the share of updates within it beyond the target quantile.""",
    "removal": """The weights are normalised over the replies.
        A client that does not reply makes the others count more, so that its absence moves the \
model {farther:.3g} times as far as an update of zero.
        Divide by a fixed number, such as the inclusion probability, or state that neighbours \
differ by a zeroed update.""",
}


@dataclass(frozen=True)
class Finding:
    """One cause of a bias."""

    what: str
    why: str
    fix: str


def findings_of(causes: dict[str, Any], **values: Any) -> list[Finding]:
    """The findings of the causes that hold."""
    texts = [_TEXTS[cause].split("\n") for cause, holds in causes.items() if holds]
    return [Finding(*(line.strip().format_map(values) for line in text)) for text in texts]


def method_findings(
    subject: Subject, effective: FloatArray, biased: bool, rounds: int | None
) -> list[Finding]:
    """The causes of the bias of a method. Without a bias, the only possible finding is that rounds
    differ: ``rounds`` is then the number of rounds that were averaged.
    """
    method, work, objective = subject.method, subject.workload.work, subject.federation.weights
    if method.pooled or not biased:
        pooled = method.pooled and biased
        return findings_of({"pooled": pooled, "rounds": rounds is not None}, rounds=rounds)
    buffers = subject.sampling if isinstance(subject.sampling, Buffers) else None
    alone = isinstance(subject.sampling, Full) or (buffers and buffers.schedule.buffer == 1)
    steps, partial = subject.workload.possible_steps[0], not alone
    few, many = int(steps.max(axis=1).min()), int(steps.max())
    ends = (few, few), (many, many)
    by_steps = uneven(steps) and work.steps is None and _differs(subject, *ends)
    scaled = by_steps and _differs(subject, *ends, scale_only=True)
    early = _stops_early(subject.workload) and _differs(subject, (many, 1), (many, many))
    causes = {
        "rounds": rounds is not None,
        "steps": by_steps,
        "common steps": uneven(steps) and isinstance(work.steps, str),
        "interruption": early,
    }
    why = why_not_normalise(objective, effective, other_causes=any(causes.values()))
    by_probability = method.averaging.by_probability
    constant = buffers is not None and not uneven(objective)  # a buffer's sum of equal weights
    causes["normalised"] = partial and not by_probability and not constant
    came = subject.sampling if isinstance(subject.sampling, AmongAvailable) else None
    there = subject.sampling.inclusion if came is None else came.availability_probability
    causes["availability"] = came is not None and not by_probability and bool(np.ptp(there) > 1e-9)
    leaves = _leaves(came)
    causes["leaves"] = not by_probability and bool(np.ptp(leaves) > 1e-9)
    causes |= {} if buffers is None or by_probability else _by_arrivals(buffers)
    causes["never"] = bool((subject.sampling.inclusion == 0).any())
    estimated = subject.probability / subject.sampling.p  # 1, or a factor for each client
    causes["cut"] = bool(np.ptp(estimated) > TOLERANCE * estimated.max())
    causes["joint"] = partial and method.direction.needs_joint
    changes = came is not None and came.period > 1  # which is reported with who counts when
    causes["rules"] = not any(causes.values()) and not changes
    most = int(np.argmax(np.abs(np.log(np.maximum(effective, 1e-300) / objective))))
    mvr = isinstance(method.direction, MVR)
    return findings_of(
        causes,
        rounds=rounds,
        low=steps.min(),
        high=many,
        steps=work.steps,
        at="at step sizes that do not make up for it" if scaled else "at one step size",
        instead=f", as method {consistent_variant(method)} does",
        unfinished=_unfinished(subject),
        why_not_normalise=why,
        often=subject.federation.ids[int(there.argmax())],
        rarely=subject.federation.ids[int(there.argmin())],
        most=there.max(),
        least=there.min(),
        leaver=subject.federation.ids[int(leaves.argmax())],
        stayer=subject.federation.ids[int(leaves.argmin())],
        gone=leaves.max(),
        kept=leaves.min(),
        times=there.max() / max(there.min(), 1e-300),
        exponent=0.0 if buffers is None else buffers.schedule.staleness,
        never=subject.federation.ids[int(subject.sampling.inclusion.argmin())],
        name="Exact MVR" if mvr else method.name,
        other="the cheap global momentum" if mvr else "scaffold",
        client=subject.federation.ids[most],
        ratio=effective[most] / objective[most],
    )


def _leaves(sampling: AmongAvailable | None) -> FloatArray:
    """The probability of each client to leave before it answers, however fast it is."""
    if sampling is None:
        return np.zeros(1)
    there = sampling.availability
    leaves = there.of.leaves if isinstance(there, InTime) else there.leaves
    return np.zeros(1) if leaves is None else leaves


def _by_arrivals(buffers: Buffers) -> dict[str, bool]:
    """How an asynchronous schedule makes clients count differently."""
    by_staleness = bool(buffers.schedule.staleness) and uneven(buffers.tasks.mean)
    return {"arrival rates": uneven(buffers.p), "stale updates": by_staleness}


def adaptive_steps(workload: Workload) -> tuple[str, list[Finding], list[str]]:
    """Whether clients take "equal" or "unequal" numbers of steps of an optimiser that rescales
    their gradients, empty if they do not; what is wrong with that; and what remains true.

    >>> from fedshuffle import LocalWork
    >>> sizes = np.array([1, 2])
    >>> adaptive_steps(LocalWork(optimiser="adam").on(sizes))[0]
    'unequal'
    >>> adaptive_steps(LocalWork(steps=5, optimiser="adam").on(sizes))[0]
    'equal'
    >>> adaptive_steps(LocalWork(optimiser="sgd:momentum=0.9").on(sizes))
    ('', [], [])
    """
    optimiser, steps = workload.optimiser, workload.possible_steps[0]
    if optimiser.linear or len(steps) == 1:
        return "", [], []
    low, high = int(steps.min()), int(steps.max())
    alike = low == high or workload.work.steps in ("min", "mean")  # all of a cohort take as many
    kind = "equal" if alike and not workload.work.interruption else "unequal"
    found = findings_of({f"{kind} adaptive steps": True}, optimiser=optimiser, low=low, high=high)
    return (
        kind,
        found,
        [
            f"gradients twice as long move a client {optimiser.gain:.3g} times as far, not twice",
            "the weights hold where every parameter's gradient has the same size at all clients",
        ],
    )


def why_not_normalise(objective: FloatArray, effective: FloatArray, other_causes: bool) -> str:
    """Why weights should not be normalised over the cohort, as these weights show it.

    ``other_causes`` says whether there are other causes of a bias, which may outweigh this one.
    """
    order = np.argsort(objective, kind="stable")
    tenth = max(1, len(order) // 10)
    small, large = (
        effective[part].sum() / objective[part].sum() for part in (order[:tenth], order[-tenth:])
    )
    then = ", so it does not count in proportion to its weight."
    if objective[order[0]] < objective[order[-1]] and large < 1 < small:
        then = ", so large clients count too little and small ones too much."
    elif other_causes:
        then = ". By itself this takes weight from large clients; here other causes outweigh it."
    sampled = "A client is divided by a larger sum when it is sampled itself"
    return f"{sampled}, and most of all when it is large{then}"


def _stops_early(workload: Workload) -> bool:
    interruption = workload.work.interruption
    if interruption is None or interruption.random:
        return interruption is not None
    planned = workload.possible_steps[0][:, -1]
    return bool((workload.done(planned, np.arange(len(planned)), 0, 0) < planned).any())


def _unfinished(subject: Subject) -> str:
    """Which client does the least of its work by a deadline, if that is known."""
    outcomes = subject.outcomes
    if outcomes.done is None:
        return ""
    share = (outcomes.chances * outcomes.done / outcomes.planned).sum(axis=1)
    client = subject.federation.ids[int(share.argmin())]
    return f": by the deadline client {client} has done {share.min():.0%} of them, in the mean"


def _differs(subject: Subject, *steps: tuple[int, int], scale_only: bool = False) -> bool:
    """Whether a client's contribution, or its scale alone, differs with (planned, done) steps."""
    first, half = np.zeros(1, dtype=np.int64), np.full(1, 0.5)
    rule, most, values = subject.method.averaging, subject.workload.max_steps, []
    for planned, done in steps:
        both = np.array([planned]), np.array([done])
        client = Cohort(first, half, half, *both, most, optimiser=subject.workload.optimiser)
        scale = rule.step_scale(client)
        value = scale if scale_only else rule.client_weights(client) * scale * client.done_length
        values.append(value.item())
    return not math.isclose(*values, rel_tol=1e-9)


def consistent_variant(method: Method) -> str:
    """The name of the method with the same direction and server that averages as FedShuffle does.

    >>> from fedshuffle import methods
    >>> consistent_variant(methods.get("fedavg")), consistent_variant(methods.get("fedprox"))
    ('fedshuffle', 'fedprox+fedshuffle')
    """
    averages = isinstance(method.direction, Plain | MVR | GlobalMomentum)
    if averages and isinstance(method.server, Average):
        return "fedshuffle"
    return f"{method.name.partition('+')[0]}+fedshuffle"


def uneven(values: FloatArray | IntArray) -> bool:
    """Whether these numbers are not all the same."""
    return bool(np.ptp(values) > 1e-9 * np.abs(values).max())
