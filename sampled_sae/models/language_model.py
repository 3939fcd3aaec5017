"""A language model's activations at any hook point: capture them, or replace them in a forward pass."""

from __future__ import annotations

import difflib
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from sampled_sae.utils.errors import UserError

Hook = Callable[[Tensor], Tensor | None]
"""Sees the activations [n, L, d] at a hook point; what it returns, if anything, takes their place."""


@dataclass(frozen=True, slots=True)
class HookPoint:
    """Activations [n, L, d] inside a model: the input or output of one of its modules."""

    module: str
    """Path in the model, such as `model.layers.12.mlp`."""
    side: Literal["input", "output"] = "output"
    layer: int | None = None
    """Number of the block, counted from 0, if this is the residual stream after it."""

    @property
    def name(self) -> str:
        """`layer-12` for the residual stream after block 12, else the module, with `.input` for its input.

        `LanguageModel.hook_point` takes it; runs at several hook points are in folders of these names.
        """
        if self.layer is not None:
            return f"layer-{self.layer}"
        return self.module if self.side == "output" else f"{self.module}.input"


At = int | str | HookPoint  # a hook point as users name it; see `LanguageModel.hook_point`
Point = TypeVar("Point", bound=At)


class LanguageModel:
    """tokens [n, L] -> activations at any hook point [n, L, d], or logits [n, L, vocabulary].

    Sequences are full: there is no padding, every token sees all tokens before it and nothing of the other
    sequences. Results are plain tensors in the model's dtype and on its device, without gradients.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, bos: bool | None = None):
        """`model` is a causal language model of transformers; it is put into evaluation mode, without gradients.

        `bos`: whether the model expects BOS at the start of each context; by default the tokenizer decides.
        """
        config = text_config(model.config)
        model.config.use_cache = config.use_cache = False
        self.model: nn.Module = model.eval().requires_grad_(False)
        self.tokenizer, self.name = tokenizer, name
        self.bos = adds_bos(tokenizer) if bos is None else bos
        self.path, self.blocks = find_blocks(model, name)
        self.width = int(config.hidden_size)
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        # Hooks are the model's, not a pass's: two passes at once would see each other's.
        self._one_pass = threading.Lock()

    @property
    def layers(self) -> int:
        """Number of blocks; they count from 0."""
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(weight.dtype for weight in self.model.parameters() if weight.is_floating_point())

    @property
    def bytes(self) -> int:
        """Size of its weights."""
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    def compile(self) -> None:
        """Have torch compile the blocks: some seconds for each new shape of input, then faster; rounding differs."""
        for block in self.blocks:
            # The forward method, not the module: hooks stay outside of what is compiled.
            block.forward = torch.compile(block.forward, dynamic=False)

    def hook_point(self, at: At) -> HookPoint:
        """The hook point that a user means.

        A number is the residual stream after that block. A name is the path of a module, which stands for its output,
        or with `.input` behind it for its input (`model.layers.12.input` is the residual stream before block 12);
        SAELens' `blocks.12.hook_resid_post` and `hook_resid_pre` are known too.
        """
        if isinstance(at, HookPoint):
            at = at.name
        if not isinstance(at, str):
            number = self.check_layer(at)
            return HookPoint(f"{self.path}.{number}", layer=number)
        known = re.fullmatch(r"layer-(\d+)|blocks\.(\d+)\.hook_resid_(post|pre)", at)
        if known and known[3] == "pre":
            return HookPoint(f"{self.path}.{self.check_layer(int(known[2]))}", "input")
        if known:
            return self.hook_point(int(known[1] or known[2]))
        modules = {path for path, _ in self.model.named_modules()} - {""}
        module, _, side = at.rpartition(".")
        if at in modules or side not in ("input", "output"):
            module, side = at, "output"
        if module not in modules:
            near = difflib.get_close_matches(module, sorted(modules), n=3, cutoff=0.3)
            raise UserError(f"hook = {at!r}: {self.name} has no such module; the nearest are {', '.join(near)}")
        block = module.removeprefix(f"{self.path}.")
        if side == "output" and block.isdigit():
            return HookPoint(module, layer=int(block))
        return HookPoint(module, "input" if side == "input" else "output")

    def saelens_hook_name(self, at: At) -> str:
        """The same point as SAELens names it, such as `blocks.6.hook_resid_post`; else its own name."""
        hook = self.hook_point(at)
        if hook.layer is not None:
            return f"blocks.{hook.layer}.hook_resid_post"
        number = hook.module.removeprefix(f"{self.path}.")
        return f"blocks.{number}.hook_resid_pre" if number.isdigit() else hook.name

    def check_layer(self, layer: int) -> int:
        """The layer as a plain int, or one line with the number of layers."""
        try:
            number = operator.index(layer)
        except TypeError:
            raise UserError(f"layer = {layer!r}: must be a whole number") from None
        if not 0 <= number < self.layers:
            raise UserError(f"layer = {number}: {self.name} has {self.layers} layers, 0 to {self.layers - 1}")
        return number

    def width_at(self, at: At) -> int:
        """Width d of the activations at a hook point."""
        hook = self.hook_point(at)
        if hook.layer is not None:
            return self.width
        return self.activations(torch.zeros(1, 1, dtype=torch.long), [hook])[hook].shape[-1]

    @torch.no_grad()
    def activations(self, tokens: Tensor, hooks: Sequence[Point]) -> dict[Point, Tensor]:
        """tokens [n, L] -> the activations [n, L, d] at each hook point; the pass ends at the last of them."""
        points = {at: self.hook_point(at) for at in hooks}
        if not points:
            raise UserError("layers = []: must name at least one layer or hook point")
        wanted, found = set(points.values()), dict[HookPoint, Tensor]()

        def keep(point: HookPoint, stream: Tensor) -> None:
            if len(found.keys() | {point}) == len(wanted):
                found[point] = stream
                raise _Enough
            # Some models add to the stream in place.
            found[point] = stream.clone()

        with suppress(_Enough):
            self._forward(tokens, {point: partial(keep, point) for point in wanted})
        return {at: found[point] for at, point in points.items()}

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [n, L] -> [n, L, vocabulary]."""
        return self._forward(tokens, {}).logits

    @torch.no_grad()
    def logits_with(self, tokens: Tensor, at: At, replace: Callable[[Tensor], Tensor]) -> Tensor:
        """tokens [n, L] -> logits [n, L, vocabulary], with the activations h [n, L, d] at a hook point replaced by
        replace(h)."""

        def hook(stream: Tensor) -> Tensor:
            new = replace(stream)
            if new.shape != stream.shape:
                raise UserError(
                    f"replace gave {tuple(new.shape)}: must keep the activations' shape {tuple(stream.shape)}"
                )
            return new.to(stream)

        return self._forward(tokens, {self.hook_point(at): hook}).logits

    def _forward(self, tokens: Tensor, hooks: Mapping[HookPoint, Hook]) -> Any:
        self._check_tokens(tokens)
        try:
            with self._one_pass, self._hooked(hooks, tokens.shape):
                return self.model(input_ids=tokens.to(self.device, non_blocking=True))
        except torch.cuda.OutOfMemoryError:
            n, length = tokens.shape
            raise UserError(
                f"model = {self.name!r}: out of memory on {self.device} with {n} sequences of {length} tokens at once: "
                "lower the number of sequences, or the context"
            ) from None

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.numel():
            raise UserError(f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}: must be whole numbers [n, L]")
        if self.context is not None and tokens.shape[1] > self.context:
            raise UserError(f"context = {tokens.shape[1]}: {self.name} reads at most {self.context} tokens at once")
        # On a GPU the look would make every pass wait for the one before it.
        if tokens.device.type == "cpu" and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary:
            raise UserError(
                f"tokens go from {int(tokens.min())} to {int(tokens.max())}: {self.name} has 0 to "
                f"{self.vocabulary - 1}; they are of another model's tokenizer"
            )

    @contextmanager
    def _hooked(self, hooks: Mapping[HookPoint, Hook], shape: torch.Size) -> Iterator[None]:
        ran: set[HookPoint] = set()

        def see(point: HookPoint, stream: Any) -> Tensor | None:
            found = tuple(stream.shape) if isinstance(stream, Tensor) else ()
            expected = (*shape, self.width if point.layer is not None else found[-1] if found else "d")
            if found != expected:
                raise UserError(
                    f"model = {self.name!r}: {point.name} does not give activations of shape {expected}, but {found}"
                )
            ran.add(point)
            return hooks[point](stream)

        handles = [_register(self.model.get_submodule(at.module), at.side, partial(see, at)) for at in hooks]
        try:
            yield
            if missing := [point.name for point in hooks if point not in ran]:
                raise UserError(f"hook = {missing[0]!r}: {self.name} does not run this module, or it is compiled")
        finally:
            for handle in handles:
                handle.remove()

    def __repr__(self) -> str:
        return f"LanguageModel({self.name}: {self.layers} layers of width {self.width}, {self.dtype} on {self.device})"


def _register(module: nn.Module, side: str, hook: Hook) -> Any:
    """Have torch show `hook` the activations in a module's output or input, and put what it returns there.

    The input is the first argument, or `hidden_states`, by which attention layers are called.
    """

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return hook(output)
        new = hook(output[0])
        return None if new is None else (new, *output[1:])

    def before(module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        new = hook(inputs[0] if inputs else named.get("hidden_states", torch.empty(0)))
        if new is None:
            return None
        return ((new, *inputs[1:]), named) if inputs else (inputs, named | {"hidden_states": new})

    if side == "output":
        return module.register_forward_hook(after)
    return module.register_forward_pre_hook(before, with_kwargs=True)


def adds_bos(tokenizer: Any) -> bool:
    """Whether a tokenizer of transformers begins each text with its BOS."""
    if tokenizer is None or tokenizer.bos_token_id is None:
        return False
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A call of a fast tokenizer changes its settings of truncation and padding; this does not.
    ids = tokenizer("a")["input_ids"] if backend is None else backend.encode("a").ids
    return tokenizer.bos_token_id in ids


class _Enough(Exception):
    """Ends a forward pass when all activations are captured."""


def text_config(config: Any) -> Any:
    """The configuration of the part that reads text: models of text and images keep it in a part of theirs."""
    return getattr(config, "text_config", None) or config


def find_blocks(model: Any, name: str) -> tuple[str, nn.ModuleList]:
    """The decoder's blocks and their path: the list in it that is as long as its configuration counts layers.

    Lists inside the blocks (experts, for instance) do not count; of several lists, those of one kind of module do.
    """
    wanted = getattr(text_config(model.config), "num_hidden_layers", None)
    decoder = model.get_decoder()
    inside = set((decoder if isinstance(decoder, nn.Module) else model).modules())
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and module in inside and len(module) == wanted
    }
    outer = {path: blocks for path, blocks in lists.items() if not any(path.startswith(f"{p}.") for p in lists)}
    if len(outer) > 1:
        outer = {path: blocks for path, blocks in outer.items() if len({type(block) for block in blocks}) == 1}
    if len(outer) != 1:
        found = ", ".join(outer) or "none"
        raise UserError(
            f"model = {name!r}: cannot find its blocks in {type(model).__name__}; exactly one list of {wanted} modules "
            f"was expected, found: {found}"
        )
    [(path, blocks)] = outer.items()
    return path, blocks
