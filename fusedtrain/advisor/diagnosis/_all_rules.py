"""All rules, in the order in which a report lists findings of equal cost."""

from __future__ import annotations

from . import _rules_data, _rules_host, _rules_model, _rules_optimizer, _rules_precision
from ._rule import Rule

_FILES = (_rules_model, _rules_data, _rules_precision, _rules_optimizer, _rules_host)
RULES = tuple(one for file in _FILES for one in vars(file).values() if isinstance(one, Rule))
