"""All rules, in the order in which a report lists findings of equal cost."""

from __future__ import annotations

from . import _rules_data, _rules_host, _rules_model, _rules_optimizer, _rules_precision
from ._rule import Rule

RULES: tuple[Rule, ...] = (
    *_rules_model.RULES,
    *_rules_data.RULES,
    *_rules_precision.RULES,
    *_rules_optimizer.RULES,
    *_rules_host.RULES,
)
