r"""Local optimisers: what a client makes of the directions of its local steps.

By default the step is the kernel's own: plain SGD. Any other optimiser of torch gets the kernel's
direction as its gradient, and the client's step size as its ``lr``:

.. math:: y \leftarrow O\big(y;\; D (\alpha g(y; B) - \beta g(x; B) + v -
          \kappa \nabla f_i(x) + \mu (y - x))\big)

Every client makes a new optimiser in every round, so nothing is kept between rounds: a client is
seen rarely, and its old moments would be those of another model.

SGD with momentum is linear in the gradients. Along a constant gradient :math:`\tau` steps of size
:math:`\gamma` go :math:`\gamma \|a(\tau)\|_1` far, with the coefficients a of Wang et al.,
Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, 2020: the
*length* that averaging rules and the audit count instead of steps. Adam and its like are not
linear: each client rescales its own gradients.
"""

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, expect, number
from fedshuffle.errors import FedShuffleError, check_known, error_context, one_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_ADAM = {"beta1": "[0, 1)", "beta2": "[0, 1)", "eps": "[0, inf)", "amsgrad": ""}
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "sgd": {"momentum": "[0, 1)", "dampening": "[0, 1]", "nesterov": ""},
    "adam": _ADAM,
    "adamw": {**_ADAM, "weight_decay": "[0, inf)"},
}
"""The options of the usual ones with their ranges. Coupled weight decay is the local work's."""

_ELEMENTWISE: tuple[str, ...] = ("SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "ASGD")
_ELEMENTWISE += ("NAdam", "RAdam", "RMSprop", "Rprop")
_CLASSES = {name.lower(): name for name in (*_ELEMENTWISE, "Adafactor", "Muon")}
"""The classes of torch.optim that have a name here."""

_MEASURED = 4096  # steps of which lengths are measured; further ones add as much as the last
_STEP_SIZE = 2.0**-20  # to measure with: only effects of first order are seen


@dataclass(frozen=True)
class LocalOptimiser:
    """An optimiser of torch for the local steps.

    Args:
        kind: ``"sgd"``, ``"adam"``, ``"adamw"`` or another class of ``torch.optim`` in lower case;
            or a class that derives from ``torch.optim.Optimizer``.
        options: its arguments except ``lr``, which is the client's step size. The ``betas`` of
            torch's own are ``beta1`` and ``beta2``.

    As text, in configs and on the command line:

        >>> LocalOptimiser.read("adamw:weight_decay=0.1,beta1=0.95")
        LocalOptimiser(kind='adamw', options={'weight_decay': 0.1, 'beta1': 0.95})
        >>> str(LocalOptimiser("sgd", {"momentum": 0.9, "nesterov": True}))
        'sgd:momentum=0.9,nesterov=true'
    """

    kind: "str | type[Optimizer]" = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.kind, type):
            _check_class(self.kind)
            if self.kind.__module__.startswith("torch.optim."):
                object.__setattr__(self, "kind", self.kind.__name__.lower())
        if isinstance(self.kind, str):
            object.__setattr__(self, "kind", self.kind.strip().lower())  # "AdamW", as in torch
            check_known("local optimiser", self.kind, _CLASSES)
        elif not isinstance(self.kind, type):
            raise FedShuffleError(
                f"the local optimiser is of type {type(self.kind).__name__}: give a text such as"
                " 'adamw', or a class of torch.optim; each client makes its own."
            )
        expect(self.options, Mapping, "options of the local optimiser")
        options = dict(self.options)
        if isinstance(self.kind, str) and "betas" in options:
            if np.shape(betas := options.pop("betas")) != (2,) or {"beta1", "beta2"} & set(options):
                raise FedShuffleError(
                    f"betas of the local optimiser {self.kind!r} is {betas!r:.40}: give a pair, or"
                    " beta1 and beta2."
                )
            options["beta1"], options["beta2"] = betas
        for taken in {"lr", "params"} & options.keys():
            raise FedShuffleError(
                f"{taken} of the local optimiser is set by the run: leave it out, and give the step"
                " size as step_size."
            )
        if isinstance(self.kind, str):
            _check_options(self.kind, options)
        object.__setattr__(self, "options", options)

    def __hash__(self) -> int:
        return hash((self.kind, *sorted(self.options)))  # values need not be hashable

    @classmethod
    def of(cls, given: "LocalOptimiser | str | type[Optimizer]") -> "LocalOptimiser":
        """The optimiser that a text or a class names; an optimiser itself as it is."""
        if isinstance(given, str):
            return cls.read(given)
        return given if isinstance(given, LocalOptimiser) else cls(given)

    @classmethod
    def read(cls, text: str) -> "LocalOptimiser":
        """What a text says: a name, and after a colon perhaps options."""
        name, colon, rest = text.strip().partition(":")
        options: dict[str, Any] = {}
        for part in rest.split(",") if colon else ():
            key, equals, value = (word.strip() for word in part.partition("="))
            if not (key and equals and value) or key in {*options, "betas"}:
                raise FedShuffleError(
                    f"the local optimiser {text!r} cannot be read: write it like"
                    " 'adamw:weight_decay=0.1,beta1=0.95', each option once."
                )
            options[key] = _value(value, f"{key} of the local optimiser {name!r}")
        return cls(name, options)

    def __str__(self) -> str:
        if isinstance(self.kind, str):
            name = self.kind
        else:
            name = f"{self.kind.__module__}.{self.kind.__qualname__}"
        options = [
            f"{key}={str(value).lower() if isinstance(value, bool) else repr(value)}"
            for key, value in self.options.items()
        ]
        return ":".join([name, *([",".join(options)] if options else [])])

    @property
    def plain(self) -> bool:
        """Whether it is SGD without momentum: the kernel's own step."""
        return self.kind == "sgd" and not self.options.get("momentum")

    @property
    def weight_decay(self) -> float:
        """Its own weight decay, apart from that of the local work.

        >>> LocalOptimiser("adamw").weight_decay, LocalOptimiser("adam").weight_decay
        (0.01, 0.0)
        """
        if self.plain:
            return 0.0
        import torch

        return float(self.make([torch.zeros(1, 1)], 1.0).defaults.get("weight_decay") or 0.0)

    @property
    def elementwise(self) -> bool:
        """Whether every parameter is treated alone, so that one flat vector stands for all."""
        return isinstance(self.kind, str) and _CLASSES[self.kind] in _ELEMENTWISE

    @property
    def linear(self) -> bool:
        """Whether the steps are linear in the gradients; measured unless it is known.

        >>> LocalOptimiser.read("sgd:momentum=0.9").linear, LocalOptimiser("adamw").linear
        (True, False)
        """
        return self.kind == "sgd" or (self.kind not in _OPTIONS and _is_linear(self))

    def lengths(self, steps: IntArray | FloatArray) -> FloatArray:
        """How far these numbers of steps of size one go along a gradient of one that stays: for SGD
        with momentum the closed form of Wang et al., 2020; for others measured.

        >>> LocalOptimiser.read("sgd:momentum=0.5").lengths(np.array([1, 2, 3])).tolist()
        [1.0, 2.5, 4.25]
        """
        count: FloatArray = steps.astype(np.float64)
        if self.plain or self.kind in ("adam", "adamw"):  # every step of Adam's has length one
            return count
        far: FloatArray
        if self.kind != "sgd":
            table = _measured_lengths(self, min(math.ceil(steps.max(initial=1)), _MEASURED))
            last = len(table) - 1
            more = np.maximum(count - last, 0.0) * (table[last] - table[last - 1])
            far = np.interp(count, np.arange(last + 1), table) + more
            return far
        m, new = self.options["momentum"], 1 - self.options.get("dampening", 0.0)
        first = -np.expm1(count * np.log(m)) / (1 - m)  # 1 + m + ... : what the first gradient adds
        far = first + new * (count - first) / (1 - m)
        return count + m * far if self.options.get("nesterov") else far

    @property
    def gain(self) -> float:
        """How many times as far a client moves if its gradients are twice as long: 2 if the steps
        are linear, 1 for Adam.

        >>> LocalOptimiser.read("adamw").gain, LocalOptimiser.read("sgd:momentum=0.9").gain
        (1.0, 2.0)
        """
        if self.kind in _OPTIONS:
            return 2.0 if self.linear else 1.0
        return _measured_gain(self)

    def check(self, parameters: "Sequence[Tensor]" = ()) -> None:
        """Refuse what torch cannot make, before training; over these parameters, if given. Without,
        refuse also one that does not descend. Of plain SGD it makes nothing, and the first
        optimiser that it makes in a process takes it seconds.
        """
        if self.plain:
            return
        import torch

        self.make(parameters or [torch.zeros(1, 1)], 1.0)
        if not parameters and self.kind not in _OPTIONS:
            moved = _moved(self, torch.ones(8, 2, 2, dtype=torch.float64))[-1].mean()
            if not 0 < moved < math.inf:
                raise FedShuffleError(
                    f"the local optimiser {self} does not descend: along a gradient of one, 8"
                    f" steps of size one go {moved:g} far. Its step must change parameters in"
                    " place, as by p.data.add_, against the gradient."
                )

    def make(self, parameters: "Sequence[Tensor]", step_size: float) -> "Optimizer":
        """A fresh optimiser of torch over these parameters."""
        from torch import optim

        arguments = dict(self.options)
        kind: Any = self.kind
        if isinstance(kind, str):
            if {"beta1", "beta2"} & arguments.keys():
                pair = arguments.pop("beta1", 0.9), arguments.pop("beta2", 0.999)
                arguments["betas"] = pair
            kind = getattr(optim, _CLASSES[kind], None)
            if kind is None:
                raise FedShuffleError(f"this torch has no optimiser {self.kind!r}: update torch.")
        with self._fails("cannot be made"):
            made: Optimizer = kind(parameters, lr=step_size, **arguments)
            return made

    def _fails(self, how: str) -> AbstractContextManager[None]:
        return error_context(
            lambda error: (
                f"the local optimiser {self} {how}: {one_line(error).rstrip('.')}. Change its"
                " options, or use another, such as 'adamw'."
            ),
            Exception,
        )


def _check_class(kind: type) -> None:
    from torch.optim import Optimizer

    if not issubclass(kind, Optimizer):
        raise FedShuffleError(
            f"the local optimiser is the class {kind.__name__}: give one that derives from"
            " torch.optim.Optimizer."
        )
    required = [
        p.name
        for p in list(inspect.signature(kind.step).parameters.values())[1:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    sparse = kind.__name__ == "SparseAdam"
    if required or sparse:
        why = "it wants sparse gradients" if sparse else f"its step needs a {required[0]}"
        raise FedShuffleError(
            f"the local optimiser {kind.__name__} cannot be used: {why}, and a local step has one"
            " dense gradient. Use another, such as 'adamw'."
        )


def _check_options(kind: str, options: dict[str, Any]) -> None:
    """Refuse options that do not exist, or are no plain numbers; known ones out of their range."""
    known = _OPTIONS.get(kind)
    for name, value in options.items():
        what = f"{name} of the local optimiser {kind!r}"
        if name == "weight_decay" and kind in ("sgd", "adam"):
            raise FedShuffleError(
                f"{what} adds to the gradient as that of the local work does: give"
                " LocalWork(weight_decay=...), or use 'adamw', which decays apart from it. Where"
                " clients make their own optimiser, leave it out: steps count the same."
            )
        if known is not None:
            check_known(f"option of the local optimiser {kind!r}", name, known)
        if known is not None and not known[name]:
            expect(value, bool, what)
        elif known is not None:
            options[name] = number(value, what, within=known[name])
        elif not isinstance(value, bool | int | float):
            raise FedShuffleError(f"{what} is {value!r:.40}, but must be a number, true or false.")
    if options.get("nesterov") and (not options.get("momentum") or options.get("dampening")):
        raise FedShuffleError(
            "nesterov of the local optimiser 'sgd' needs momentum and no dampening: add"
            " momentum=0.9."
        )


def _value(text: str, what: str) -> bool | int | float:
    if text in ("true", "false"):
        return text == "true"
    value = number(text, what)
    return int(text) if text.isdecimal() else value


def _moved(optimiser: LocalOptimiser, gradients: "Tensor") -> FloatArray:
    """Minus the parameters, which start at zero, after each of these gradients, per step size."""
    import torch

    y = torch.zeros(gradients.shape[1:], dtype=torch.float64)
    leaf = y.detach()  # on the memory of y, as in engines
    made, rows = optimiser.make([leaf], _STEP_SIZE), []
    for gradient in gradients:
        leaf.grad = gradient.clone()
        with optimiser._fails("cannot make a step"):
            made.step()
        rows.append(-y.clone() / _STEP_SIZE)
    found: FloatArray = torch.stack(rows).numpy()
    return found


@functools.lru_cache
def _measured_lengths(optimiser: LocalOptimiser, steps: int) -> FloatArray:
    """The lengths of 0, 1, ... steps, and of one more."""
    import torch

    ones = torch.ones(steps + 1, 2, 2, dtype=torch.float64)
    return np.concatenate([[0.0], _moved(optimiser, ones).mean(axis=(1, 2))])


@functools.lru_cache
def _is_linear(optimiser: LocalOptimiser) -> bool:
    """Whether the sum of two sequences of gradients moves a model by the sum of both."""
    import torch

    draw = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 8, 2, 2, dtype=torch.float64, generator=draw)
    apart = _moved(optimiser, one) + _moved(optimiser, other)
    together = _moved(optimiser, one + other)
    return bool(np.abs(apart - together).max() <= 1e-6 * np.abs(apart).max())


@functools.lru_cache
def _measured_gain(optimiser: LocalOptimiser) -> float:
    import torch

    ones = torch.ones(8, 2, 2, dtype=torch.float64)
    once, twice = _moved(optimiser, ones)[-1], _moved(optimiser, 2 * ones)[-1]
    return float(twice.mean() / once.mean())


SGD = LocalOptimiser()
"""The kernel's own step."""
