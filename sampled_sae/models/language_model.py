"""A language model's activations at any hook point: capture them, or replace them in a forward pass."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from sampled_sae.hooks import At, Decoder, Hook, HookPoint, register, text_config
from sampled_sae.utils.errors import UserError

Point = TypeVar("Point", bound=At)


class LanguageModel(Decoder):
    """tokens [n, L] -> activations at any hook point [n, L, d], or logits [n, L, vocabulary].

    Sequences are full: there is no padding, every token sees all tokens before it and nothing of the other
    sequences. Results are plain tensors in the model's dtype and on its device, without gradients.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, bos: bool | None = None):
        """`model` is a causal language model of transformers; it is put into evaluation mode, without gradients.

        `bos`: whether the model expects BOS at the start of each context; by default the tokenizer decides.
        """
        config = text_config(model.config)
        super().__init__(model.eval().requires_grad_(False), name)
        self.tokenizer = tokenizer
        self.bos = adds_bos(tokenizer) if bos is None else bos
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        accepted = inspect.signature(model.forward).parameters.values()
        cached = any(one.name == "use_cache" or one.kind is one.VAR_KEYWORD for one in accepted)
        self._options = {"use_cache": False} if cached and hasattr(config, "use_cache") else {}
        # Hooks are the model's, not a pass's: two passes at once would see each other's.
        self._one_pass = threading.Lock()
        self._compiles = False
        self._compiled_for: tuple[int, int] | None = None

    @property
    def layers(self) -> int:
        """Number of blocks; they count from 0."""
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        """Where tokens go: the first weight's device, or the one that accelerate loads it to."""
        first = next(self.model.parameters())
        hook = getattr(self.model.get_input_embeddings(), "_hf_hook", None) if first.is_meta else None  # type: ignore[operator]
        return first.device if hook is None else torch.device(hook.execution_device)

    @property
    def dtype(self) -> torch.dtype:
        return next(weight.dtype for weight in self.model.parameters() if weight.is_floating_point())

    @property
    def bytes(self) -> int:
        """Size of its weights."""
        return sum(weight.numel() * weight.element_size() for weight in self.model.parameters())

    def compile(self, shape: tuple[int, int] | None = None) -> None:
        """Have torch compile the blocks: some seconds for each new shape of input, then faster; rounding differs.

        With a `shape` (n, L), only tokens of that shape go through the compiled blocks. Blocks that cannot be compiled
        run as they are, and a line says so.
        """
        self._compiled_for = shape
        if not self._compiles:
            self._compiles = True
            for block in self.blocks:
                # The forward method, not the module: hooks stay outside of what is compiled.
                block.forward = self._either(block.forward, torch.compile(block.forward, dynamic=False))

    def _either(self, plain: Callable[..., Any], fast: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward method, compiled where it should be."""

        @wraps(plain)
        def forward(*inputs: Any, **named: Any) -> Any:
            x = inputs[0] if inputs else named["hidden_states"]
            if not self._compiles or self._compiled_for not in (None, tuple(x.shape[:2])):
                return plain(*inputs, **named)
            from torch._dynamo.exc import TorchDynamoException

            try:
                return fast(*inputs, **named)
            except TorchDynamoException as error:
                self._compiles = False
                reason = str(error).strip().splitlines()[0]
                print(f"{self.name}: torch cannot compile its blocks, they run as they are ({reason})", file=sys.stderr)
                return plain(*inputs, **named)

        return forward

    def width_at(self, at: At) -> int:
        """Width d of the activations at a hook point."""
        hook = self.hook_point(at)
        if hook.layer is not None:
            return self.width
        return self.activations(torch.zeros(1, 1, dtype=torch.long), [hook])[hook].shape[-1]

    @torch.no_grad()
    def activations(self, tokens: Tensor | str, hooks: Sequence[Point]) -> dict[Point, Tensor]:
        """tokens [n, L] -> the activations [n, L, d] at each hook point; the pass ends at the last of them.

        A text is tokenized first, with BOS if the model needs it: n = 1.
        """
        if isinstance(hooks, int | str):
            raise UserError(f"hooks = {hooks!r}: must be a list, such as [{hooks!r}]")
        tokens = self.tokens(tokens) if isinstance(tokens, str) else tokens
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

    @torch.no_grad()
    def tokens(self, text: str) -> Tensor:
        """Token ids [1, L] of a text, with BOS first if the model needs it."""
        ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"].long()
        before = torch.full((1, int(self.bos)), self.tokenizer.bos_token_id or 0, dtype=ids.dtype)
        return torch.cat((before, ids), dim=1)

    def generate(self, prompt: str, **settings: Any) -> str:
        """The model's continuation of a text; `settings` are those of transformers' `generate`, greedy by default."""
        tokens = self.tokens(prompt)
        self._check_tokens(tokens)
        options = {"do_sample": False, "use_cache": True, "attention_mask": torch.ones_like(tokens).to(self.device)}
        out: Any = self.model.generate(tokens.to(self.device), **options | settings)  # type: ignore[operator]
        return str(self.tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True))

    def _forward(self, tokens: Tensor, hooks: Mapping[HookPoint, Hook]) -> Any:
        self._check_tokens(tokens)
        try:
            with self._one_pass, self._hooked(hooks, tokens.shape):
                return self.model(input_ids=tokens.to(self.device, non_blocking=True), **self._options)
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

        handles = [register(self.model, at, partial(see, at)) for at in hooks]
        try:
            yield
            if missing := [point.name for point in hooks if point not in ran]:
                raise UserError(f"hook = {missing[0]!r}: {self.name} does not run this module, or it is compiled")
        finally:
            for handle in handles:
                handle.remove()

    def __repr__(self) -> str:
        return f"LanguageModel({self.name}: {self.layers} layers of width {self.width}, {self.dtype} on {self.device})"


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
