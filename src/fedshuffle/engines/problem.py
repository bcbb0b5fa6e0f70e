"""The problem an engine works on: a model, a loss, and the federation's examples."""

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.nn.parameter import is_lazy

from fedshuffle import fingerprint, losses
from fedshuffle._arrays import IGNORED, IntArray, expect
from fedshuffle.engines.copies import shareable, shared_copy
from fedshuffle.engines.example_transform import transformed
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation
from fedshuffle.randomness import NO_ADDRESS, Address

GRADIENT_ROWS = 1024  # full gradients are computed in pieces of at most this many examples
_DRAWS = 8  # of a transform that are made twice, to see whether they are the same
_AT_ONCE = 1 << 20  # how many labels are checked at a time
_OF_TOKENS = losses.causal_lm, losses.sequence_classification

Loss = Callable[..., Tensor]
"""``loss(model, *fields)``: the mean loss over the examples of a minibatch, a scalar tensor."""


class Piece(NamedTuple):
    """Some examples of a client: their rows, the share of their loss in that over all pieces, and
    where their transform draws.
    """

    rows: IntArray
    share: float
    address: Address


class Problem:
    """A module and a loss over a federation, with the model's parameters as one flat vector.

    The module is a copy: the one given stays as it is. Copies share the memory of frozen
    parameters, so a large frozen base is held once. A client's objective is the loss over all its
    examples at once.

    >>> from fedshuffle import fingerprint, losses
    >>> federation = Federation.from_arrays(torch.eye(4), torch.arange(4), sizes=[1, 3])
    >>> Problem(nn.Linear(4, 4), losses.cross_entropy, federation).start.shape
    torch.Size([20])
    """

    def __init__(self, model: nn.Module, loss: Loss, federation: Federation) -> None:
        expect(model, nn.Module, "model")
        expect(federation, Federation, "federation")
        _check_loss(loss)
        _check_model(model)
        with error_context(
            lambda error: (
                f"the model cannot be copied ({type(error).__name__}:"
                f" {str(error).split('.  ')[0].rstrip('.')}). It may hold something open, or an"
                " activation, as by torch.nn.utils.weight_norm: let it hold only what it was made"
                " of, and use torch.nn.utils.parametrizations.weight_norm."
            ),
            Exception,
        ):
            self.model = shared_copy(model)
        self.loss = loss
        self.federation = federation
        self.parameters = {k: p for k, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise FedShuffleError(
                "the model has no trainable parameters: none has requires_grad. To train adapters"
                " that were loaded, use PeftModel.from_pretrained(..., is_trainable=True)."
            )
        self.dtype, self.device = _one_kind(self.parameters)
        # Data on disk stay there: minibatches are converted one by one.
        self._stored = federation.path is not None
        fields = federation.tensors()
        self.fields = fields if self._stored else tuple(map(self._converted, fields))
        self.start = torch.cat([p.detach().reshape(-1) for p in self.parameters.values()])
        self._untouched = shared_copy(self.model)
        self._given = list(model.parameters())
        self._shares: dict[int, list[float]] = {}
        self.tried: dict[str, str] = {}
        """Fast ways to compute gradients that were compared with the reference: what is wrong."""

    def _converted(self, field: Tensor) -> Tensor:
        """Examples on the model's device, and floating-point ones in its precision."""
        return field.to(self.device, self.dtype if field.is_floating_point() else field.dtype)

    def load(self, x: Tensor) -> nn.Module:
        """The problem's own module, with the parameters ``x`` copied into it."""
        _fill(self.parameters.values(), x)
        return self.model

    def copy(self, x: Tensor) -> nn.Module:
        """A new module with the parameters ``x``."""
        model = self.replica()
        _fill([p for p in model.parameters() if p.requires_grad], x)
        return model

    def replica(self) -> nn.Module:
        """A copy of the model as it was given, without anything that running it leaves behind."""
        return shared_copy(self._untouched)

    def loss_at(self, x: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        """The mean loss of model ``x`` on a minibatch."""
        return self.loss(self.load(x), *batch)

    @functools.cached_property
    def frozen_sha256(self) -> str:
        """A digest of what training does not change; it is computed once."""
        return fingerprint.frozen(self.model)

    def check_labels(self) -> None:
        """Refuse labels in memory for which the model has no output, and tokens that it does not
        know, whichever client they are of: it may be sampled late.
        """
        loss, classes, tokens = self.loss, 0, 0
        if not isinstance(loss, losses.MeanLoss) or loss not in (losses.cross_entropy, *_OF_TOKENS):
            return
        if self._stored or self.federation.transform is not None:
            return
        few, model = torch.arange(min(2, len(self.fields[0]))), self.replica()
        with suppress(Exception), torch.no_grad(), forked(self.device):  # reported when it trains
            if loss in _OF_TOKENS:
                tokens = cast(Any, model).get_input_embeddings().num_embeddings
            classes = loss.predict(model, self.batch(few))[0].shape[1]
        for client, token in self._beyond(self.fields[0], tokens, set()):
            raise FedShuffleError(
                f"client {client!r} has the token {token}, and the model knows those from 0 to"
                f" {tokens - 1}. Use its own tokenizer, or give tokens that were added to it an"
                " embedding: model.resize_token_embeddings(len(tokenizer))."
            )
        for client, label in self._beyond(self.fields[-1], classes, {IGNORED}):
            raise FedShuffleError(
                f"client {client!r} has the label {label}, and the model gives {classes} outputs,"
                f" for the classes from 0 to {classes - 1}. Number the classes from 0 on, or give"
                f" the model an output for each; {IGNORED} marks what does not count."
            )

    def _beyond(
        self, field: Tensor, count: int, also: Collection[int]
    ) -> Iterator[tuple[Hashable, int]]:
        """The whole numbers of a field beyond ``0, ..., count - 1``, but for some that may be there
        as well, and their clients; at most one of each million. None if the count is unknown.
        """
        flat = field.reshape(-1)[: 0 if field.is_floating_point() or not count else None]
        for first in range(0, len(flat), _AT_ONCE):
            part = flat[first : first + _AT_ONCE].long()
            wrong = (part < 0) | (part >= count)
            for number in also:
                wrong &= part != number
            for place in wrong.nonzero()[:1].flatten().tolist():
                row = (first + place) * len(field) // len(flat)
                client = np.searchsorted(self.federation.offsets, row, side="right") - 1
                yield self.federation.ids[client], int(part[place])

    @property
    def random(self) -> bool:
        """Whether the model or the loss draws random numbers, as dropout does."""
        return self._observed[0]

    @property
    def changes_parameters(self) -> bool:
        """Whether the forward pass changes parameters, as ``nn.Embedding(max_norm=...)`` does."""
        return self._observed[1]

    @functools.cached_property
    def _observed(self) -> tuple[bool, bool]:
        """Run the model once; an error for what cannot be trained."""
        model = self.replica()
        parameters = {k: p for k, p in model.named_parameters() if p.requires_grad}
        versions = [p._version for p in parameters.values()]
        frozen = {name: p._version for name, p in shareable(model).items()}
        with forked(self.device):
            few = torch.arange(min(2, int(self.federation.offsets[-1])))
            self._check_transform(few)
            before = _random_state(self.device)
            loss = self.loss(model, *self.batch(few))
            random = not torch.equal(before, _random_state(self.device))
        for name, parameter in shareable(model).items():
            if parameter._version != frozen[name]:
                raise FedShuffleError(
                    f"the forward pass changes the frozen parameter {name!r}, which all copies of"
                    " the model share. Make it trainable, or leave it constant."
                )
        buffers = dict(self._untouched.named_buffers())
        for name, buffer in model.named_buffers():
            if name in buffers and not torch.equal(buffer, buffers[name]):
                raise FedShuffleError(
                    f"the forward pass changes the model's buffer {name!r}. Buffers are not"
                    " averaged over clients: make it a parameter, or leave it constant."
                )
        _check_gradients(loss, parameters, self._given)
        self._given = []
        return random, versions != [p._version for p in parameters.values()]

    def _check_transform(self, rows: Tensor) -> None:
        """Refuse a transform whose draws no seed determines: the same ones are made twice."""
        tries = range(0 if self.federation.transform is None else _DRAWS)
        for address in (Address(part=part) for part in tries):
            pairs = zip(self.batch(rows, address), self.batch(rows, address), strict=True)
            if not all(
                one.shape == again.shape
                and torch.allclose(one.float(), again.float(), equal_nan=True)
                for one, again in pairs
            ):
                raise FedShuffleError(
                    "the transform of the examples gives different values for the same seed: it"
                    " draws from a generator of its own. Let it draw from the global ones, as"
                    " torch.rand(...) does without a generator."
                )

    def rows(self, client: Any, positions: Any) -> Any:
        """Positions among a client's examples as rows of the packed layout."""
        return positions + self.federation.offsets[client]

    def pieces(
        self, client: int, positions: IntArray | None = None, address: Address | None = None
    ) -> list[Piece]:
        """A client's examples (or those at some positions) in pieces, with the randomness of an
        address.

        A piece counts by the number of values that its mean is taken over (see
        :mod:`fedshuffle.losses`). A piece without any is left out.
        """
        whole = positions is None and self.federation.transform is None
        seed, round, own, first = address or Address(client=client)
        if positions is None:
            positions = np.arange(int(self.federation.sizes[client]))
        rows = self.rows(client, positions)
        parts = [
            Piece(rows[k : k + GRADIENT_ROWS], 1.0, Address(seed, round, own, first + k))
            for k in range(0, len(rows), GRADIENT_ROWS)
        ]
        if len(parts) == 1:
            return parts
        shares = self._shares.get(client) if whole else None
        if shares is None:
            shares = self._loss_shares(parts)
        if whole:  # for the next round
            self._shares[client] = shares
        pairs = zip(parts, shares, strict=True)
        return [part._replace(share=share) for part, share in pairs if share]

    def _loss_shares(self, parts: Sequence[Piece]) -> list[float]:
        weights = [float(len(part.rows)) for part in parts]
        if losses.tells_counts(self.loss):
            model = self.replica()
            with torch.no_grad(), forked(self.device):
                batches = (self.batch(part.rows, part.address) for part in parts)
                weights = [losses.counted(self.loss, model, batch) for batch in batches]
        total = sum(weights)
        return [weight / total if total else 0.0 for weight in weights]

    def batch(self, rows: Any, address: Address = NO_ADDRESS) -> tuple[Tensor, ...]:
        """The examples at these rows as the loss takes them, with the randomness of an address."""
        return self.transformed(self.gather(rows), address)

    def transformed(self, fields: tuple[Tensor, ...], address: Address) -> tuple[Tensor, ...]:
        """What the federation's transform makes of the fields of a minibatch."""
        if self.federation.transform is None:
            return fields
        return tuple(map(self._converted, transformed(self.federation.transform, fields, address)))

    def gather(self, rows: Any) -> tuple[Tensor, ...]:
        """The examples at these rows as the federation holds them."""
        index = torch.as_tensor(rows, device=self.fields[0].device)
        flat = index.reshape(-1)
        found = tuple(field.index_select(0, flat) for field in self.fields)
        if self._stored:
            found = tuple(map(self._converted, found))
        return tuple(part.view(*index.shape, *part.shape[1:]) for part in found)


def forked(device: torch.device) -> AbstractContextManager[None]:
    """Restore torch's random state afterwards."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def _random_state(device: torch.device) -> Tensor:
    state = torch.get_rng_state()
    if device.type == "cpu":
        return state
    return torch.cat([state, torch.get_device_module(device).get_rng_state(device)])


def _fill(parameters: Collection[nn.Parameter], x: Tensor) -> None:
    parts = torch.split(x, [p.numel() for p in parameters])
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))


def _check_loss(loss: Loss) -> None:
    remedy = "Use one of fedshuffle.losses, or your own function loss(model, *fields)"
    if not callable(loss):
        raise FedShuffleError(f"the loss is {loss!r}, which cannot be called. {remedy}.")
    functional = getattr(loss, "__module__", None) == nn.functional.__name__
    if functional or isinstance(loss, _Loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise FedShuffleError(
            f"{name} takes outputs and targets, and a loss here takes the model and"
            f" the fields. {remedy}, such as lambda model, x, y: criterion(model(x), y)."
        )


def _check_model(model: nn.Module) -> None:
    """Refuse a model that has no values yet, loses hooks in a copy, or is not averaged whole."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        fault = ""
        if is_lazy(tensor):
            fault = "is lazy and has no shape yet. Run the model on an example before you train it"
        elif tensor.device.type == "meta":
            fault = (
                "is on the meta device and has no values. Move the model with to_empty and"
                " initialise it before you train it"
            )
        elif tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            fault = (
                "has a gradient hook (register_hook), which copies of the model do not have. Do the"
                " same in the model's forward or in the loss, and remove it"
            )
        if fault:
            raise FedShuffleError(f"parameter {name!r} {fault}.")
    for name, module in model.named_modules():
        tracks = getattr(module, "track_running_stats", False)
        if tracks and getattr(module, "running_mean", 0) is not None:
            raise FedShuffleError(
                f"layer {name!r} ({type(module).__name__}) has running statistics, which differ"
                " from client to client and are not averaged. Use GroupNorm, or"
                " track_running_stats=False."
            )


def _one_kind(parameters: Mapping[str, nn.Parameter]) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device of all parameters."""
    kinds = {(p.dtype, p.device): name for name, p in parameters.items()}
    if len(kinds) > 1:
        shown = [f"{name!r} of {dtype} on {device}" for (dtype, device), name in kinds.items()]
        raise FedShuffleError(
            f"the model mixes trainable parameters: {', '.join(sorted(shown))}. Convert the model"
            " to one dtype and device, as by model.float()."
        )
    return next(iter(kinds))


def _check_gradients(
    loss: Tensor, parameters: Mapping[str, nn.Parameter], given: Sequence[nn.Parameter]
) -> None:
    """Refuse gradients that cannot be added up, and those of the model that was copied."""
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        return  # reported where gradients are needed
    both = [*parameters.values(), *(p for p in given if p.requires_grad)]
    found = torch.autograd.grad(loss, both, allow_unused=True)
    if any(grad is None for grad in found[: len(parameters)]) and _reentrant(loss):
        raise FedShuffleError(
            "the model uses reentrant gradient checkpointing, and what is in it would not train."
            " Give use_reentrant=False, in transformers as"
            ' gradient_checkpointing_enable({"use_reentrant": False}).'
        )
    for name, gradient in zip(parameters, found, strict=False):
        if gradient is not None and gradient.layout != torch.strided:
            raise FedShuffleError(
                f"parameter {name!r} has sparse gradients, which are not averaged here. Make its"
                " layer with sparse=False."
            )
    if any(gradient is not None for gradient in found[len(parameters) :]):
        raise FedShuffleError(
            "a copy of the model still uses the parameters of the original. A forward or hook that"
            " was given to one of its layers names that layer: take the parameters from its"
            " argument, as a method of a class does."
        )


def _reentrant(loss: Tensor) -> bool:
    """Whether reentrant checkpointing is among the operations that gave the loss."""
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            if node.name() == "CheckpointFunctionBackward":
                return True
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return False
