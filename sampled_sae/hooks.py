"""Hook points of a model: the blocks of a decoder, names of hook points, and hooks that see or replace activations."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sampled_sae.utils.errors import UserError

Hook = Callable[[Tensor], Tensor | None]
"""Sees the activations [n, L, d] at a hook point; what it returns, if anything, takes their place."""
RESIDUAL = re.compile(r"layer-(\d+)|blocks\.(\d+)\.hook_resid_(post|pre)")
SAELENS = re.compile(r"blocks\.(\d+)\.(?:\w+\.)?hook_(\w+)")
ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "feed_forward", "ffn")
OUT = ("o_proj", "out_proj", "c_proj", "dense")
"""Names of an attention's last linear layer, whose input is the heads' output."""


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


At = int | str | HookPoint  # a hook point as users name it; see `Decoder.hook_point`
Where = int | str  # the same in its short form: a layer for the residual stream after that block, else its name


class Decoder:
    """The blocks of a causal language model of transformers, and its hook points by name."""

    def __init__(self, model: Any, name: str):
        self.model: nn.Module = model
        self.name = name
        self.path, self.blocks = find_blocks(model, name)
        self.width = int(text_config(model.config).hidden_size)

    @classmethod
    def of(cls, model: Any) -> Decoder:
        """That of a model of transformers as users have it."""
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            right = "must be a model of ss.load_model or of transformers"
            raise UserError(f"model = {type(model).__name__}: {right}")
        return cls(model, str(getattr(model.config, "_name_or_path", "") or type(model).__name__))

    def hook_point(self, at: At) -> HookPoint:
        """The hook point that a user means.

        A number is the residual stream after that block. A name is the path of a module, which stands for its output,
        or with `.input` behind it for its input (`model.layers.12.input` is the residual stream before block 12). Of
        SAELens' names, `blocks.12.hook_resid_post`, `hook_resid_pre`, `hook_mlp_out`, `hook_attn_out` and
        `attn.hook_z` are known.
        """
        if isinstance(at, HookPoint):
            at = at.name
        if not isinstance(at, str):
            number = self.check_layer(at)
            return HookPoint(f"{self.path}.{number}", layer=number)
        known = RESIDUAL.fullmatch(at)
        if known and known[3] == "pre":
            return HookPoint(f"{self.path}.{self.check_layer(int(known[2]))}", "input")
        if known:
            return self.hook_point(int(known[1] or known[2]))
        if foreign := SAELENS.fullmatch(at):
            return self._saelens(self.check_layer(int(foreign[1])), foreign[2], at)
        return self._module(at)

    def where(self, at: At) -> Where:
        """The same hook point by its layer, or else by its name."""
        point = self.hook_point(at)
        return point.name if point.layer is None else point.layer

    def writes_to_residual(self, at: At) -> bool:
        """Whether the activations are the residual stream, or what a part of a block adds to it."""
        point = self.hook_point(at)
        number, _, part = point.module.removeprefix(f"{self.path}.").partition(".")
        if not number.isdigit() or not part:
            return number.isdigit()
        return point.side == "output" and part in self._added(int(number))

    def _added(self, number: int) -> tuple[str, ...]:
        """Names of the parts of a block whose outputs are added to the residual stream."""
        if hasattr(self.blocks[number], "pre_feedforward_layernorm"):  # Gemma 2 and 3 normalize them
            return ("post_attention_layernorm", "post_feedforward_layernorm")
        return (*ATTENTION, *MLP)

    def check_layer(self, layer: int) -> int:
        """The layer as a plain int, or one line with the number of layers."""
        return check_layer(layer, len(self.blocks), self.name)

    def saelens_hook_name(self, at: At) -> str:
        """The same point as SAELens names it, such as `blocks.6.hook_resid_post`; else its own name."""
        hook = self.hook_point(at)
        if hook.layer is not None:
            return f"blocks.{hook.layer}.hook_resid_post"
        number = hook.module.removeprefix(f"{self.path}.")
        return f"blocks.{number}.hook_resid_pre" if number.isdigit() else hook.name

    def _module(self, at: str) -> HookPoint:
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

    def _saelens(self, number: int, what: str, at: str) -> HookPoint:
        """A point inside a block; where the block normalizes what a part of it adds (Gemma 2), the result of that."""
        block, path = self.blocks[number], f"{self.path}.{number}"
        parts = dict(block.named_children())
        attention = next((name for name in ATTENTION if name in parts), None)
        mlp = next((name for name in MLP if name in parts), None)
        ends = {"mlp_out": (*MLP, "post_feedforward_layernorm"), "attn_out": (*ATTENTION, "post_attention_layernorm")}
        for name in self._added(number):
            if name in parts and name in ends.get(what, ()):
                return HookPoint(f"{path}.{name}")
        if what == "z" and attention is not None:
            inside = [name for name, _ in parts[attention].named_children()]
            if last := next((name for name in OUT if name in inside), None):
                return HookPoint(f"{path}.{attention}.{last}", "input")
        raise UserError(f"hook = {at!r}: not known in {self.name}; name a module, such as {path}.{mlp or attention}")


def saved_hook(metadata: Mapping[str, Any]) -> Where | None:
    """The hook point in an SAE's metadata: a layer for the residual stream after it, else a name; None without one."""
    layer = metadata.get("layer")
    if layer is not None:
        if isinstance(layer, bool) or not re.fullmatch(r"\d+", str(layer)):
            raise UserError(f"layer = {str(layer)[:50]!r}: must be a whole number, in an SAE's metadata")
        return int(layer)
    name = metadata.get("hook_point") or metadata.get("hook_name")
    found = RESIDUAL.fullmatch(str(name))
    if found and found[3] == "pre" and int(found[2]) > 0:
        return int(found[2]) - 1  # the same as after the block before it
    if found and found[3] != "pre":
        return int(found[1] or found[2])
    return None if name is None else str(name)


def hook_title(at: Where | None) -> str:
    """A hook point of `saved_hook` for readers: `layer 12`, or its name."""
    return f"layer {at}" if isinstance(at, int) else str(at)


def register(model: nn.Module, point: HookPoint, hook: Hook) -> Any:
    """Have torch show `hook` the activations at a hook point, and put what it returns there; returns a handle.

    They are the module's output, or the first of several, and its first argument, or `hidden_states`, by which
    attention layers are called.
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

    module = model.get_submodule(point.module)
    if point.side == "output":
        return module.register_forward_hook(after)
    return module.register_forward_pre_hook(before, with_kwargs=True)


@contextmanager
def attach(decoder: Decoder, at: At | None, metadata: Mapping[str, Any], width: int, hook: Hook) -> Iterator[None]:
    """Within the block, `hook` sees and replaces the activations, of this width, at a hook point: `at`, or the one of
    an SAE's metadata."""
    at = saved_hook(metadata) if at is None else at
    if at is None:
        raise UserError("hook: is missing, and the SAE does not name its own; give a layer, or the name of a module")
    point = decoder.hook_point(at)
    if point.layer is not None and width != decoder.width:
        raise UserError(f"the SAE has width {width}: must be {decoder.width}, the width of {decoder.name}")

    def checked(x: Any) -> Tensor | None:
        if not isinstance(x, Tensor) or not x.ndim or x.shape[-1] != width:
            found = f"width {x.shape[-1]}" if isinstance(x, Tensor) and x.ndim else "no activations"
            raise UserError(f"hook = {point.name!r}: {decoder.name} has {found} there; the SAE has width {width}")
        return hook(x)

    handle = register(decoder.model, point, checked)
    try:
        yield
    finally:
        handle.remove()


def check_layer(layer: Any, count: int, name: str) -> int:
    """The layer of a model with `count` layers as a plain int, or one line."""
    try:
        number = operator.index(layer)
    except TypeError:
        raise UserError(f"layer = {layer!r}: must be a whole number") from None
    if not 0 <= number < count:
        raise UserError(f"layer = {number}: {name} has {count} layers, 0 to {count - 1}")
    return number


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
