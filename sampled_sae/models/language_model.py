"""The layers of a language model: where its blocks are, the residual stream after them, and what replacing it does."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from sampled_sae.utils.errors import UserError

Hook = Callable[[Tensor], Tensor | None]
"""Sees the residual stream [n, L, d] after a block; what it returns, if anything, takes its place."""


class LanguageModel:
    """tokens [n, L] -> the residual stream after any block [n, L, d], or logits [n, L, vocabulary].

    Sequences are full: there is no padding, every token sees all tokens before it and nothing of the other
    sequences. Results are plain tensors in the model's dtype and on its device, without gradients.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str):
        """`model` is a causal language model of transformers; it is put into evaluation mode, without gradients."""
        config = text_config(model.config)
        model.config.use_cache = config.use_cache = False
        self.model: nn.Module = model.eval().requires_grad_(False)
        self.tokenizer, self.name = tokenizer, name
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
        return next(self.model.parameters()).dtype

    @property
    def bytes(self) -> int:
        """What its weights take."""
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    def compile(self) -> None:
        """Have torch compile the blocks: some seconds for each new shape of input, then faster; rounding differs."""
        for block in self.blocks:
            # The forward method, not the module: hooks stay outside of what is compiled.
            block.forward = torch.compile(block.forward, dynamic=False)

    def hook_name(self, layer: int) -> str:
        """The block's path in the model, such as `gpt_neox.layers.6`."""
        return f"{self.path}.{self.check_layer(layer)}"

    def saelens_hook_name(self, layer: int) -> str:
        """The same place as SAELens names it, such as `blocks.6.hook_resid_post`."""
        return f"blocks.{self.check_layer(layer)}.hook_resid_post"

    def check_layer(self, layer: int) -> int:
        """The layer as a plain int, or one line that says how many there are."""
        try:
            number = operator.index(layer)
        except TypeError:
            raise UserError(f"layer = {layer!r}: must be a whole number") from None
        if not 0 <= number < self.layers:
            raise UserError(f"layer = {number}: {self.name} has {self.layers} layers, 0 to {self.layers - 1}")
        return number

    @torch.no_grad()
    def activations(self, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """tokens [n, L] -> for each layer the residual stream after it [n, L, d]; the pass ends at the last of them."""
        asked = [self.check_layer(layer) for layer in layers]
        if not asked:
            raise UserError("layers = []: must name at least one layer")
        last, found = max(asked), dict[int, Tensor]()

        def keep(layer: int) -> Hook:
            def hook(stream: Tensor) -> None:
                if layer == last:
                    found[layer] = stream
                    raise _Enough
                # Some models add to the stream in place.
                found[layer] = stream.clone()

            return hook

        with suppress(_Enough):
            self._forward(tokens, {layer: keep(layer) for layer in asked})
        return {layer: found[layer] for layer in asked}

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [n, L] -> [n, L, vocabulary]."""
        return self._forward(tokens, {}).logits

    @torch.no_grad()
    def logits_with(self, tokens: Tensor, layer: int, replace: Callable[[Tensor], Tensor]) -> Tensor:
        """tokens [n, L] -> logits [n, L, vocabulary], with the residual stream h [n, L, d] after `layer` replaced by
        replace(h)."""

        def hook(stream: Tensor) -> Tensor:
            new = replace(stream)
            if new.shape != stream.shape:
                raise UserError(
                    f"replace gave {tuple(new.shape)}: must keep the residual stream's shape {tuple(stream.shape)}"
                )
            return new.to(stream)

        return self._forward(tokens, {self.check_layer(layer): hook}).logits

    def _forward(self, tokens: Tensor, hooks: dict[int, Hook]) -> Any:
        self._check_tokens(tokens)
        try:
            with self._one_pass, self._hooked(hooks, (*tokens.shape, self.width)):
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
                f"tokens go from {int(tokens.min())} to {int(tokens.max())}: {self.name} knows 0 to "
                f"{self.vocabulary - 1}; they are of another model's tokenizer"
            )

    @contextmanager
    def _hooked(self, hooks: dict[int, Hook], shape: tuple[int, ...]) -> Iterator[None]:
        handles = [self.blocks[layer].register_forward_hook(self._after(h, shape)) for layer, h in hooks.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _after(self, hook: Hook, shape: tuple[int, ...]) -> Callable[[nn.Module, Any, Any], Any]:
        """A hook of torch that shows ours the residual stream in a block's output, and puts its answer there."""

        def after(block: nn.Module, inputs: Any, output: Any) -> Any:
            stream = output[0] if isinstance(output, tuple) else output
            if not isinstance(stream, Tensor) or stream.shape != shape:
                kind = type(block).__name__
                raise UserError(f"model = {self.name!r}: {kind} does not give a residual stream of shape {shape}")
            new = hook(stream)
            return (new, *output[1:]) if isinstance(output, tuple) and new is not None else new

        return after

    def __repr__(self) -> str:
        return f"LanguageModel({self.name}: {self.layers} layers of width {self.width}, {self.dtype} on {self.device})"


class _Enough(Exception):
    """Ends a forward pass at the last layer that is asked for."""


def text_config(config: Any) -> Any:
    """The configuration of the part that reads text: models of text and images keep it in a part of theirs."""
    inner = getattr(config, "text_config", None)
    return config if inner is None else inner


def find_blocks(model: Any, name: str) -> tuple[str, nn.ModuleList]:
    """The decoder's blocks and their path: the list in it that is as long as its configuration counts layers.

    Lists inside the blocks (experts, say) do not count; of several lists, those of one kind of module do.
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
            f"model = {name!r}: cannot tell its blocks in {type(model).__name__}; exactly one list of {wanted} modules "
            f"was expected, found: {found}"
        )
    [(path, blocks)] = outer.items()
    return path, blocks
