"""Finding what an import path names, with the config's own folder among the places to look."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fedshuffle import _synonyms, methods
from fedshuffle.errors import FedShuffleError, one_line, user_error


def split(path: str) -> tuple[str, str]:
    """The module and the attribute of an import path.

    >>> split("package.module:function")
    ('package.module', 'function')
    """
    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", path):
        raise FedShuffleError(f"{path!r} is no import path: write 'package.module:attribute'.")
    module, _, attribute = path.partition(":")
    return module, attribute


_IMPORTABLE: list[Path] = []


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let modules of a folder be imported as if the program lay there, and forget them after,
    with the methods that they registered.
    """
    if folder in _IMPORTABLE:  # only the outermost forgets, or modules would be loaded twice
        yield
        return
    before = set(sys.modules)
    _IMPORTABLE.append(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        with methods.forgetting():
            yield
    finally:
        sys.path.remove(str(folder))
        _IMPORTABLE.remove(folder)
        new = sys.modules.keys() - before
        # Only what lies in the folder itself: an environment may lie somewhere below it.
        own = {name for name in new if "." not in name and _lies_in(sys.modules[name], folder)}
        for name in new:
            if name.partition(".")[0] in own:
                del sys.modules[name]


def find(path: str, folder: Path) -> Any:
    """What an import path names; the folder must be importable."""
    name, attribute = split(path)
    module = _module(path, name, folder)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise FedShuffleError(
                f"{path!r}: {name!r} has no {attribute!r}.{_near(part, dir(found))}"
                f" It was read from {_place(module)}."
            )
        found = getattr(found, part)
    return found


def call(path: str, arguments: Mapping[str, Any], folder: Path) -> Any:
    """What the function of that import path returns for these arguments."""
    make = maker(path, arguments, folder)
    with running(repr(path), folder):
        return make(**arguments)


def given(path: str, argument: Any, folder: Path) -> Any:
    """What the function of that import path returns for one argument."""
    make = function(path, {}, folder)
    with running(repr(path), folder):
        return make(argument)


@contextmanager
def running(what: str, folder: Path) -> Iterator[None]:
    """Say in one line what of the user's code failed, and where in the user's folder."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise FedShuffleError(f"{what} failed: {_cause(error, folder)}") from error


def maker(path: str, arguments: Mapping[str, Any], folder: Path) -> Callable[..., Any]:
    """The function of that import path, which takes these arguments and needs no other."""
    made = function(path, arguments, folder)
    for name, parameter in _parameters(made).items():
        optional = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not optional and parameter.default is parameter.empty and name not in arguments:
            raise FedShuffleError(f"{path!r} needs {name!r}: add that key below it.")
    return made


def function(path: str, arguments: Mapping[str, Any], folder: Path) -> Callable[..., Any]:
    """The function of that import path, which takes these arguments among others."""
    found: Callable[..., Any] = find(path, folder)
    if not callable(found):
        raise FedShuffleError(f"{path!r} is {found!r:.60}, which cannot be called.")
    parameters = _parameters(found)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return found
    for name in arguments:
        if name not in parameters:
            takes = ", ".join(parameters) or "nothing"
            raise FedShuffleError(
                f"{path!r} takes no {name!r}.{_near(name, parameters)} It takes: {takes}. Keys of"
                " the run itself stand above the first [section] of the file."
            )
    return found


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions do not tell: they take anything
        anything = inspect.Parameter("anything", inspect.Parameter.VAR_KEYWORD)
        return {anything.name: anything}


def _module(path: str, name: str, folder: Path) -> ModuleType:
    top = name.partition(".")[0]
    known = sys.modules.get(top)
    beside = [place for place in (folder / f"{top}.py", folder / top) if place.exists()]
    if known is not None and beside and not _lies_in(known, folder):
        raise FedShuffleError(
            f"{path!r}: {str(beside[0])!r} has the name of a module that is loaded already, from"
            f" {_place(known)}. Rename yours."
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise FedShuffleError(
                f"{path!r} cannot be imported: {_cause(error, folder)} Install that module."
            ) from error
        near = _near(top, [place.stem for place in folder.glob("*.py")])
        raise FedShuffleError(
            f"{path!r}: there is no module {error.name!r}, neither in {str(folder)!r} nor"
            f" installed.{near}"
        ) from error
    except (Exception, SystemExit) as error:
        raise FedShuffleError(f"{path!r} cannot be imported: {_cause(error, folder)}") from error


def _lies_in(module: ModuleType, folder: Path) -> bool:
    """Whether a top-level module or package lies right in a folder."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    return any(Path(place).parent == folder for place in places if place)


def _place(module: ModuleType) -> str:
    return repr(getattr(module, "__file__", None) or "Python itself")


def _near(name: str, known: Any) -> str:
    return _synonyms.hint(name, list(known))


def _cause(error: BaseException, folder: Path) -> str:
    """An error of the user's code in one line, with the place in the user's code."""
    text = one_line(error) if isinstance(error, FedShuffleError) else user_error(error)
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(folder) and not isinstance(error, SystemExit)
    ]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{text}{where}."
