"""The backend of a stage test, by name."""

from typing import Any

import pytest


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Any:
    # Here, because the shape checks of the outer conftest are set up before the library is imported.
    from support.stage_backends import BACKENDS

    return BACKENDS[request.param]
