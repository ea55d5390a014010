"""Hooks around the module that owns the layers: what a forward hands out, and what it refuses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from vitrim.core.tokens import unmerge
from vitrim.core.trace import Trace
from vitrim.errors import UnsupportedModelError

logger = logging.get_logger(__name__)


class TrunkHook:
    """Hook that runs before the forward of the module that owns the layers and decides what this forward hands out.

    With ``output_hidden_states``, and always in an ``AutoBackbone`` whose feature maps are hidden states: full grids,
    un-merged after every layer. With ``output_attentions``: the map of every layer over the tokens it has, as in the
    dense model where attention is eager only. Masks over the full sequence are refused. A hook and not a forward of its
    own, because export and trainers read the signature of ``model.forward``. An object and not a function, so that the
    model can still be copied and pickled.
    """

    def __init__(self, trace: Trace, positional: tuple[str, ...], pools: bool) -> None:
        self.trace = trace
        self.positional = positional  # names of the trunk's arguments, in order: a mask may be given by its place
        self.pools = pools  # a head reads all tokens, and is to read the same ones whatever is handed out beside

    def __call__(self, trunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        maps = _wanted("output_attentions", trunk, kwargs)
        if maps and trunk.config._attn_implementation != "eager":
            logger.warning_once(  # in the words of the library, whose own attention does not run here
                f"`{trunk.config._attn_implementation}` attention does not support `output_attentions=True`. Please "
                "set your attention to `eager` if you want any of these features."
            )
            maps = False
        self.trace.hand_out_maps(maps)
        for name in ("attention_mask", "bool_masked_pos"):
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(f"a reduced model takes no {name}; vitrim.restore_(model) first")
        is_backbone = hasattr(trunk, "forward_with_filtered_kwargs")
        hidden = _wanted("output_hidden_states", trunk, kwargs) and not self.trace.compact
        self.trace.next_dense(is_backbone or hidden, spare_last=self.pools and not is_backbone)


class HiddenHook:
    """Hook that runs after the forward of such a module and lays the last hidden state out on the full grid.

    Where a head reads all tokens, the last block hands out what it does without hidden states (`TrunkHook`): a mean
    over patches, or a probe's attention, must not read the zeros of pruned ones.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __call__(self, trunk: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.trace.spares_last:
            return None
        if not isinstance(output, tuple):
            output.hidden_states = self.spread(output.hidden_states)
            return output
        # attention maps have four axes
        return tuple(
            self.spread(part) if isinstance(part, tuple) and any(x is not None and x.dim() == 3 for x in part) else part
            for part in output
        )

    def spread(self, hidden: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """The hidden states with the last one un-merged, if it is there and has not all tokens."""
        last, state = hidden[-1], self.trace.final
        if last is None or state is None or last.shape[1] == state.num_inputs:
            return hidden
        return (*hidden[:-1], unmerge(last, state))


class NoMapsHook(TrunkHook):
    """`TrunkHook` that refuses attention maps, of models that lay out tokens otherwise than by image."""

    def __call__(self, trunk: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__call__(trunk, args, kwargs)
        if self.trace.maps or {**dict(zip(self.positional, args, strict=False)), **kwargs}.get("output_attentions"):
            self.trace.hand_out_maps(False)
            raise UnsupportedModelError(
                f"a reduced {type(trunk).__name__} hands out no attention maps; vitrim.restore_(model) first"
            )


def _wanted(name: str, trunk: Any, kwargs: dict[str, Any]) -> bool:
    value = kwargs.get(name)
    if value is None:
        value = getattr(trunk.config, name, None)
    return value is not None and value is not False  # a list of layers is a wish, too
