"""torch.utils.checkpoint around the blocks of a model, as people write it by hand."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Items with children in the lists and sequences of the model; none within another."""
    blocks: list[nn.Module] = []
    inner: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.Sequential | nn.ModuleList) and module not in inner:
            items = [item for item in module if _has_children(item)]
            if len(items) < (2 if module is model else 1) or any(map(_is_stage, items)):
                continue
            blocks += items
            inner.update(part for item in items for part in item.modules())
    return blocks


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _is_stage(module: nn.Module) -> bool:
    """Whether the module is a sequence of blocks."""
    return isinstance(module, nn.Sequential) and any(map(_has_children, module))


def checkpoint_blocks(blocks: list[nn.Module]) -> None:
    """Each block recomputes its forward in backward."""
    for block in blocks:
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)


def restore_blocks(blocks: list[nn.Module]) -> None:
    """The blocks have the forward of their class again."""
    for block in blocks:
        vars(block).pop("forward", None)
