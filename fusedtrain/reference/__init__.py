"""The plain-torch truth of every op: oracle of the tests, TorchScript fallback, last resort."""

from .activations import ACTIVATIONS, Activation
from .optimizer_rules import RULES, Rule

__all__ = ["ACTIVATIONS", "FAMILIES", "RULES", "Activation", "Rule"]


def _ops_of(row: Activation) -> tuple[str, ...]:
    both = (row.name, f"{row.name}_backward")
    return both if row.tensors else (*both, f"{row.name}_")


# The ops that backends have kernels of, by family. The module of the family's name in this package
# has a formula of each op's name; those of activations are in ACTIVATIONS.
FAMILIES: dict[str, tuple[str, ...]] = {
    "activations": tuple(op for row in ACTIVATIONS.values() for op in _ops_of(row)),
    "batch_norm": (
        "batch_norm_stats", "batch_norm_act", "batch_norm_act_", "batch_norm_act_restore",
        "batch_norm_act_apply", "batch_norm_act_backward", "batch_norm_act_backward_reduce",
        "batch_norm_act_backward_apply",
    ),
    "bias_act": ("bias_act", "bias_act_backward"),
    "depthwise": ("depthwise_conv", "depthwise_conv_backward"),
    "few_bit": ("few_bit", "few_bit_", "few_bit_backward"),
    "fold": ("fold_weight", "fold_weight_backward"),
    "gated": ("gated", "gated_backward", "gated_spread", "gated_spread_backward"),
    "group_norm": ("group_norm_act", "group_norm_act_apply", "group_norm_act_backward"),
    "images": ("normalize_images",),
    "optimizers": ("measure_gradients", "try_update", "optimizer_step"),
    "pool": ("max_pool2d", "max_pool2d_backward"),
    "row_norm": ("row_norm", "row_norm_backward"),
    "scale_add": ("scale_add", "scale_add_backward"),
    "scaling": ("update_scale", "zero_tensors"),
}  # fmt: skip
