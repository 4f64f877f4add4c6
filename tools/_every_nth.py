"""A pytest plugin: of the cases of each test function, every nth (``--every N``)."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, help="run every nth case of each function")


def pytest_configure(config: pytest.Config) -> None:
    config.option.cases = "all"  # of tests/helpers/tiers.py: this plugin chooses


# Behind -k, which leaves out the backends that are not meant.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every: int = config.getoption("--every")
    seen: Counter[str] = Counter()
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        (left_out if seen[function] % every else chosen).append(item)
        seen[function] += 1
    items[:] = chosen
    config.hook.pytest_deselected(items=left_out)
