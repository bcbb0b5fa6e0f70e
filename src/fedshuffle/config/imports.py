"""Import paths ``package.module:attribute``; modules in the config's folder are found first."""

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedshuffle import methods
from fedshuffle import sampling as samplings
from fedshuffle._arrays import expect
from fedshuffle.errors import (
    FedShuffleError,
    did_you_mean,
    error_context,
    missing_known,
    one_line,
    user_error,
)
from fedshuffle.federation import Federation
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling
from fedshuffle.transforms import Transform, channels


def method(text: str, folder: Path, momentum: str | None = None) -> Method:
    """A method by its name, or a user's own by its import path, with a momentum."""
    found: Method = find(text, folder) if methods.is_import_path(text) else methods.get(text)
    expect(found, Method, repr(text))
    return found if momentum is None else found.with_momentum(methods.parse_momentum(momentum))


def sampling(text: str, federation: Federation, folder: Path) -> Sampling:
    """A sampling by its text, or what the user's function returns for the federation."""
    if not samplings.is_import_path(text):
        return samplings.resolve(text, federation)
    with importable(folder):
        made = call(text, {}, folder, Sampling, federation)  # type: ignore[type-abstract]
        return samplings.resolve(made, federation)


def transform(text: str, folder: Path) -> Transform:
    """A channel by its text, or a user's transform by its import path."""
    if channels.is_channel(text):
        found: object = channels.channel(text)
    else:
        found = find(text, folder)
    expect(found, Transform, repr(text))
    assert isinstance(found, Transform)
    return found


T = TypeVar("T")
_IMPORTABLE: list[Path] = []


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Make the modules of a folder importable; forget them, and methods they registered, after."""
    if folder in _IMPORTABLE:  # only the outermost forgets, so that modules are loaded once
        yield
        return
    before = set(sys.modules)
    _IMPORTABLE.append(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        with methods.isolated_registry():
            yield
    finally:
        sys.path.remove(str(folder))
        _IMPORTABLE.remove(folder)
        new = sys.modules.keys() - before
        # Only modules directly in the folder: a virtual environment may be somewhere below it.
        own = {name for name in new if "." not in name and _is_in(sys.modules[name], folder)}
        for name in new:
            if name.partition(".")[0] in own:
                del sys.modules[name]


def find(path: str, folder: Path) -> Any:
    """The object that an import path names."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", path):
        raise FedShuffleError(f"{path!r} is not an import path: write 'package.module:attribute'.")
    name, _, attribute = path.partition(":")
    with importable(folder):
        module = _module(path, name, folder)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise FedShuffleError(
                f"{path!r}: {name!r} has no {attribute!r}.{did_you_mean(part, dir(found))} It was"
                f" read from {_file(module)}."
            )
        found = getattr(found, part)
    return found


def function(
    path: str, arguments: Mapping[str, Any], folder: Path, *, complete: bool = False
) -> Callable[..., Any]:
    """The function at an import path, which takes these arguments, and needs no other ones if the
    arguments are ``complete``.
    """
    found: Callable[..., Any] = find(path, folder)
    if not callable(found):
        raise FedShuffleError(f"{path!r} is {found!r:.60}, which cannot be called.")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return found
    try:
        (signature.bind if complete else signature.bind_partial)(**arguments)
    except TypeError as error:
        known = list(signature.parameters)
        hint = "".join(did_you_mean(name, known) for name in arguments if name not in known)
        raise FedShuffleError(
            f"{path!r} takes {', '.join(known) or 'nothing'}: {error}.{hint} Its arguments are the"
            " keys beside it; keys of the run itself go above the first [section] of the file."
        ) from error
    return found


def call(path: str, arguments: Mapping[str, Any], folder: Path, kind: type[T], *given: object) -> T:
    """What the function at an import path returns, which must be of this type."""
    make = function(path, arguments, folder, complete=not given)
    with running(repr(path), folder):
        made: T = make(*given, **arguments)
    expect(made, kind, f"what {path!r} returns")
    return made


def running(what: str, folder: Path) -> AbstractContextManager[None]:
    """Report a failure of the user's code in one line, with its place in the user's folder."""
    return error_context(lambda error: f"{what} failed: {_cause(error, folder)}")


def _module(path: str, name: str, folder: Path) -> ModuleType:
    top = name.partition(".")[0]
    loaded = sys.modules.get(top)
    # Folders without these, such as the run folder of a method, are no modules.
    files = f"{top}.py", f"{top}/__init__.py", f"{name.replace('.', '/')}.py"
    own = [folder / file for file in files if (folder / file).exists()]
    if loaded is not None and own and not _is_in(loaded, folder):
        raise FedShuffleError(
            f"{path!r}: {str(own[0])!r} has the name of a module that is loaded already, from"
            f" {_file(loaded)}. Rename yours."
        )

    def message(error: BaseException) -> str:
        remedy = ""
        if isinstance(error, ModuleNotFoundError):
            near = did_you_mean(top, [place.stem for place in folder.glob("*.py")])
            remedy = f"{near} Install it, or put it into {str(folder)!r}."
            if known := missing_known(error, str(own[0]) if own else repr(path)):
                return f"{path!r} cannot be imported: {known}" if own else str(known)
        return f"{path!r} cannot be imported: {_cause(error, folder)}{remedy}"

    with error_context(message):
        return importlib.import_module(name)


def _is_in(module: ModuleType, folder: Path) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    return any(Path(place).parent == folder for place in places if place)


def _file(module: ModuleType) -> str:
    return repr(getattr(module, "__file__", None) or "Python itself")


def _cause(error: BaseException, folder: Path) -> str:
    """An error in one line, with the last place in the user's folder."""
    text = one_line(error) if isinstance(error, FedShuffleError) else user_error(error)
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(folder) and not isinstance(error, SystemExit)
    ]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{text}{where}."
