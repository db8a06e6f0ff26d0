"""Everything here is for `make test-deviceless` only: it needs compilers that jax comes without."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("deviceless")
