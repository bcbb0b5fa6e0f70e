"""Channels by name: how updates are compressed on their way to the server.

``topk:0.01``, ``randk:0.1``, ``qsgd:4``, ``sign`` and ``float16`` name a compressor; ``+ef``,
``+ef21`` and ``+diana`` after it name the memory. ``diana`` alone is ``qsgd:4+diana``, and ``none``
sends updates as they are.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from fedshuffle._arrays import expect
from fedshuffle.errors import FedShuffleError, check_known
from fedshuffle.transforms.base import Transform
from fedshuffle.transforms.compression import EF21, Channel, Compressed, Diana, ErrorFeedback
from fedshuffle.transforms.compressor import Compressor
from fedshuffle.transforms.down_link import DownLink
from fedshuffle.transforms.quantization import QSGD, Float16, Sign
from fedshuffle.transforms.sparsification import RandK, TopK

NONE = "none"
_SHORT = {"diana": "qsgd:4+diana"}
_MEMORY: dict[str, type[ErrorFeedback | EF21 | Diana]] = {
    "ef": ErrorFeedback,
    "ef21": EF21,
    "diana": Diana,
}


def channel(text: str | Channel | None) -> Channel | None:
    """The transform that a text names; None for ``none``. A channel itself is returned as it is.

    >>> str(channel("topk:0.01+ef")), str(channel("diana")), channel("none")
    ('topk:0.01+ef', 'qsgd:4+diana', None)
    """
    if text is None or isinstance(text, Channel):
        return text
    expect(text, str, "channel")
    if text.strip() == NONE:
        return None
    name, *memory = _SHORT.get(text.strip(), text.strip()).split("+")
    if name == NONE or name in _SHORT:
        raise FedShuffleError(f"channel {text!r} cannot be read: {name!r} stands alone.")
    made = compressor(name)
    if not memory:
        return Compressed(made)
    kind, _, argument = memory[0].partition(":")
    check_known("memory", kind, _MEMORY)
    if len(memory) > 1:
        raise FedShuffleError(
            f"channel {text!r} has {len(memory)} kinds of memory, but a client keeps one vector:"
            f" write '{name}+{memory[0]}' or '{name}+{memory[1]}'."
        )
    if not argument:
        return _MEMORY[kind](made)
    if kind == "diana":
        return Diana(made, _read(float, argument, text, f"{name}+diana:ALPHA"))
    raise FedShuffleError(f"channel {text!r} has too much after {kind!r}: write '{name}+{kind}'.")


def with_channel(
    transforms: Sequence[Transform], text: str | Channel | None
) -> tuple[Transform, ...]:
    """The transforms of a run, and the channel after them, if there is one."""
    last = channel(text)
    return (*transforms, *([] if last is None else [last]))


def is_channel(text: str) -> bool:
    """Whether a text begins with the name of a compressor.

    >>> is_channel("topk:0.1+ef"), is_channel("my.module:NAME")
    (True, False)
    """
    name = re.split("[:+]", text.strip())[0]
    return name in _MAKERS or name in _SHORT


def down_link(text: str | DownLink | None) -> DownLink | None:
    """The down-link that a text names; None for ``none``.

    >>> down_link("qsgd:4")
    DownLink(compressor=QSGD(bits=4))
    """
    if text is None or isinstance(text, DownLink):
        return text
    expect(text, str, "down_channel")
    if text.strip() == NONE:
        return None
    name, plus, _ = text.strip().partition("+")
    if plus or name in _SHORT:
        raise FedShuffleError(
            f"the down-link {text!r} names a memory, but what a down-link leaves out is always fed"
            f" back: write {_SHORT.get(name, name).split('+')[0]!r}."
        )
    return DownLink(compressor(name))


def compressor(text: str) -> Compressor:
    """The compressor that a text names.

    >>> compressor("qsgd:4")
    QSGD(bits=4)
    """
    name, _, argument = text.strip().partition(":")
    check_known("compressor", name, _MAKERS)
    form, make = _MAKERS[name]
    if bool(argument) != (":" in form):
        raise FedShuffleError(f"channel {text!r} is incomplete or has too much: write {form!r}.")
    made: Compressor = _read(make, argument, text, form)
    expect(made, Compressor, f"the compressor {name!r}")
    return made


def register(form: str, make: Callable[[str], Compressor]) -> None:
    """Give a compressor of your own a name: ``form`` is how it is written, ``name`` or
    ``name:ARGUMENT``, and ``make`` makes it from the argument, empty if there is none.

    >>> register("ternary", lambda _: QSGD(2))
    >>> channel("ternary+ef")
    ErrorFeedback(compressor=QSGD(bits=2))
    """
    name = form.partition(":")[0]
    if name in _OWN or name in _SHORT or name == NONE:
        raise FedShuffleError(f"the name {name!r} is taken: register the compressor under another.")
    if not name.replace("-", "_").isidentifier():
        raise FedShuffleError(f"{name!r} cannot be the name of a compressor: use letters and '-'.")
    _MAKERS[name] = (form, make)


def _read(make: Callable[[str], Any], argument: str, text: str, form: str) -> Any:
    """What is made of an argument, or an error that says how to write it."""
    try:
        return make(argument)
    except FedShuffleError:
        raise
    except ValueError as error:
        raise FedShuffleError(f"channel {text!r} cannot be read: write {form!r}.") from error


_MAKERS: dict[str, tuple[str, Callable[[str], Compressor]]] = {
    "topk": ("topk:SHARE", lambda share: TopK(float(share))),
    "randk": ("randk:SHARE", lambda share: RandK(float(share))),
    "qsgd": ("qsgd:BITS", lambda bits: QSGD(int(bits))),
    "sign": ("sign", lambda _: Sign()),
    "float16": ("float16", lambda _: Float16()),
}
_OWN = frozenset(_MAKERS)
