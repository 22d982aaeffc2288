"""Tests of a family take the family and its cases from the file that they are imported into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from family import Family

pytest.register_assert_rewrite(
    "family", "family_16_bits", "family_backward", "family_choices", "family_float32", "family_forward", "float32_cases"
)
# The argument of a test, and the list of the file that gives its values.
LISTS = {
    "refusal": "REFUSALS",
    "output": "OUTPUTS",
    "in_any_order": "IN_ANY_ORDER",
    "peaked": "PEAKED",
    "gradient": "GRADIENTS",
    "cut": "CUT",
    "partly": "PARTLY",
    "partly_cut": "PARTLY_CUT",
    "subnormal": "SUBNORMAL",
    "dominated": "DOMINATED",
    "gradient_in_any_order": "GRADIENTS_IN_ANY_ORDER",
}


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Family:
    return request.module.FAMILY  # type: ignore[no-any-return]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gpu" in metafunc.fixturenames and hasattr(metafunc.module, "FAMILY"):
        metafunc.parametrize("gpu", metafunc.module.FAMILY.gpus)
    for argument, name in LISTS.items():
        if argument in metafunc.fixturenames and hasattr(metafunc.module, name):
            metafunc.parametrize(argument, getattr(metafunc.module, name), ids=str)
