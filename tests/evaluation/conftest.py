"""The simulator of the measurement, for every test of what is made of one."""

from __future__ import annotations

import pytest
from simulator import Simulator


@pytest.fixture(scope="session")
def simulator() -> Simulator:
    return Simulator()
