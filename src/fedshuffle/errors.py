"""Errors that name the thing at fault and the remedy."""

import difflib
import os
import re
import tomllib
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing them, but for new lines and tabs."""


def visible(text: str) -> str:
    r"""Text from data with its control characters shown, so that no terminal obeys them.

    >>> print(visible("\x1b]0;a new title\x07"))
    \x1b]0;a new title\x07
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class FedShuffleError(ValueError):
    """An error that the user can fix: the message says what is wrong and what to do.

    >>> raise FedShuffleError("rounds is 0, but must be at least 1.")
    Traceback (most recent call last):
    fedshuffle.errors.FedShuffleError: rounds is 0, but must be at least 1.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(visible(arg) if isinstance(arg, str) else arg for arg in args))


class NotAuditableError(FedShuffleError):
    """No way is known to compute which objective this run minimises; it can be trained.

    >>> raise NotAuditableError("no formula is known for this method: audit another.")
    Traceback (most recent call last):
    fedshuffle.errors.NotAuditableError: no formula is known for this method: audit another.
    """


class TrainingError(FedShuffleError):
    """Training failed; carries the client, the round and the stage of the failure.

    >>> error = TrainingError("no loss", client="ann", round=3, stage="local training")
    >>> error.client, str(error)
    ('ann', 'round 3, client ann, local training: no loss')
    """

    def __init__(self, message: str, *, client: object, round: int, stage: str) -> None:
        super().__init__(f"round {round}, client {client}, {stage}: {message}")
        self.message = message
        self.client = client
        self.round = round
        self.stage = stage

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the way from a worker process to its parent."""
        again = partial(type(self), client=self.client, round=self.round, stage=self.stage)
        return again, (self.message,)


class DivergedError(TrainingError):
    """Numbers that training needs are no longer finite: the step size was too large."""


def one_line(error: BaseException) -> str:
    r"""What an error says, in one line and without its last full stop.

    >>> one_line(ValueError("spam\n  and eggs."))
    'spam and eggs'
    """
    return " ".join(str(error).split()).rstrip(".")


def user_error(error: BaseException) -> str:
    """An error of the user's code in one line: its kind and what it says.

    Code that calls ``sys.exit`` would end the program without a word, so that is an error as well.

    >>> user_error(ZeroDivisionError("of 0 examples."))
    'ZeroDivisionError: of 0 examples'
    """
    if isinstance(error, SystemExit):
        library = Path(os.__file__).parent
        frames = traceback.extract_tb(error.__traceback__)
        places = [(Path(frame.filename), frame.lineno) for frame in frames]
        own = [(p, n) for p, n in places if p.parent != library and p.suffix == ".py"]
        where = f" in {own[-1][0].name}, line {own[-1][1]}" if own else ""
        return f"sys.exit({error.code!r}) was called{where}; raise an error instead"
    kind, text = type(error).__name__, one_line(error)
    return f"{kind}: {text}" if text else kind


Errors = type[BaseException] | tuple[type[BaseException], ...]


@contextmanager
def error_context(
    context: str | Callable[[Any], str | FedShuffleError],
    catch: Errors = (Exception, SystemExit),
) -> Iterator[None]:
    """Turn an error inside into a FedShuffleError that says where or why, in one line.

    The context is put before the error's own words, unless they begin with it. It may also be a
    function of the error that returns the whole message, or the error to raise. Errors that are not
    to catch pass.

    >>> with error_context("evaluation"):
    ...     1 / 0
    Traceback (most recent call last):
    fedshuffle.errors.FedShuffleError: evaluation: ZeroDivisionError: division by zero
    >>> with error_context("clock", FedShuffleError):
    ...     raise FedShuffleError("clock '0.1' cannot be read.")
    Traceback (most recent call last):
    fedshuffle.errors.FedShuffleError: clock '0.1' cannot be read.
    >>> with error_context(lambda error: f"cannot read 'x': {error.strerror}.", OSError):
    ...     open("/no/such/file")
    Traceback (most recent call last):
    fedshuffle.errors.FedShuffleError: cannot read 'x': No such file or directory.
    """
    try:
        yield
    except catch as error:
        if callable(context):
            raised = context(error)
        else:
            text = str(error) if isinstance(error, FedShuffleError) else user_error(error)
            raised = text if text.startswith(f"{context} ") else f"{context}: {text}"
        raise raised if isinstance(raised, Exception) else FedShuffleError(raised) from error


EXTRAS: dict[str, tuple[str, ...]] = {
    "report": ("matplotlib", "jinja2"),
    "demo": ("matplotlib", "jinja2", "sklearn"),
    "data": ("h5py", "PIL", "pyarrow"),
    "huggingface": ("datasets", "flwr_datasets"),
    "polars": ("polars", "pyarrow"),
    "frame": ("pandas",),
    "privacy": ("dp_accounting",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow",),
    "wandb": ("wandb",),
    "lora": ("peft", "transformers"),
    "ray": ("ray",),
    "flower": ("flwr", "trustme"),
}
"""The modules that each extra of this package brings."""

_REQUIRED = ("torch", "safetensors", "cloudpickle")
"""Modules that every installation has, except one made without dependencies, which can audit."""

_DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "dp_accounting": "dp-accounting",
    "PIL": "pillow",
    "flwr_datasets": "flwr-datasets",
}


class MissingPackageError(FedShuffleError, ImportError):
    """A package that is not installed, or cannot be imported; the message has the remedy."""


def missing_package(
    module: str, purpose: str, extra: str = "", instead: str = "", cause: object = ""
) -> MissingPackageError:
    """The error for a package that cannot be imported, with the command that installs it.

    With a cause, the package is there, but importing it fails.

    >>> print(missing_package("sklearn", "fedshuffle demo", "demo"))
    fedshuffle demo needs scikit-learn. Install it with pip install 'fedshuffle[demo]'.
    >>> print(missing_package("ray", "this", cause="no GLIBC"))  # doctest: +NORMALIZE_WHITESPACE
    this needs ray, which is installed but cannot be imported (no GLIBC).
    Try pip install --force-reinstall 'fedshuffle[ray]'.
    """
    extra = extra or next((name for name, modules in EXTRAS.items() if module in modules), "")
    packages = [_DISTRIBUTIONS.get(module, module)]
    if module in _REQUIRED and not cause:  # all at once, not one after the other
        packages = [name for name in _REQUIRED if name == module or not _is_installed(name)]
    wanted = f"'fedshuffle[{extra}]'" if extra else " ".join(packages)
    needs = f"{purpose} needs {', '.join(packages)}"
    instead = instead and f", {instead}"
    if cause:
        problem = f"which is installed but cannot be imported ({cause})"
        remedy = f"Try pip install --force-reinstall {wanted}{instead}."
        return MissingPackageError(f"{needs}, {problem}. {remedy}")
    them = "it" if len(packages) == 1 else "them"
    return MissingPackageError(f"{needs}. Install {them} with pip install {wanted}{instead}.")


def missing_known(error: ImportError, purpose: str) -> MissingPackageError | None:
    """The error for a failed import of a package that fedshuffle uses; None for other packages."""
    module = (error.name or "").partition(".")[0]
    known = {*_REQUIRED, *(module for modules in EXTRAS.values() for module in modules)}
    if module not in known:
        return None
    cause = one_line(error) if module != error.name and _is_installed(module) else ""
    return missing_package(module, purpose, cause=cause)


def optional_import(module: str, purpose: str, extra: str, instead: str = "") -> Any:
    """Import a module of an extra, or say how to install it."""
    try:
        return import_module(module)
    except Exception as error:  # such as ValueError, where it was built for another numpy
        top = module.partition(".")[0]
        top = top if top in EXTRAS[extra] else EXTRAS[extra][0]
        cause = user_error(error) if _is_installed(top) else ""
        raise missing_package(top, purpose, extra, instead, cause) from error


def require(extra: str, purpose: str) -> None:
    """Fail before any work if a package of an extra cannot be imported."""
    for module in EXTRAS[extra]:
        optional_import(module, purpose, extra)


def require_training(purpose: str) -> None:
    """Fail before any work where what training needs is missing, as where one only audits."""
    for module in _REQUIRED:
        if not _is_installed(module):
            raise missing_package(module, purpose)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the latter for what somebody put in its place
        return False


_TWO_OUTPUTS = "It takes one output for each of the two classes."
_REMARKS = {
    "mse": "It is half the squared distance, the mean over examples.",
    "bce": _TWO_OUTPUTS,
    "binary_cross_entropy": _TWO_OUTPUTS,
    "bce_with_logits": _TWO_OUTPUTS,
}


@cache
def _synonyms() -> dict[str, str]:
    """Our names, each with those that people bring from other libraries, separated by spaces."""
    return tomllib.loads(Path(__file__).with_name("_synonyms.toml").read_text("utf-8"))


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """The known name that somebody may have meant, if there is one.

    >>> nearest_name("lr", ["rounds", "step_size"]), nearest_name("fedavgg", ["fedavg"])
    ('step_size', 'fedavg')
    """
    word = name.lower().replace("-", "_")
    for ours, theirs in _synonyms().items():
        if ours in known and word in theirs.split():
            return ours
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The question whether the nearest known name was meant, or nothing."""
    near = nearest_name(name, known)
    remark = _REMARKS.get(name.lower(), "") if near in ("squared_error", "cross_entropy") else ""
    return f" Did you mean {near!r}? {remark}".rstrip() if near else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> FedShuffleError:
    """The error for a name that does not exist, with the nearest ones that do."""
    names = sorted(known)
    hint = did_you_mean(str(name), names)
    return FedShuffleError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}.")


def check_known(kind: str, name: object, known: Collection[str]) -> None:
    """Refuse a name that does not exist."""
    if name not in known:
        raise unknown(kind, name, known)
