"""Bytes that devices send each other: read off a program's text, and as the formula of docs/scaling.md has them."""

import pytest

from benchmarks import traffic

TEXT = """
  %a = f32[8,1,64,128]{3,2,1,0} all-gather(%x), channel_id=1
  %b = (f32[2,64]{1,0}, bf16[4,64]{1,0}) all-gather(%x, %y), channel_id=2
  %c = (f32[2,3]{1,0}, f32[2,3]{1,0}, u32[], u32[]) collective-permute-start(%x), channel_id=3
  %d = f32[16]{0} all-reduce-start(%x), channel_id=4
"""


def test_bytes_that_a_device_gets():
    got = traffic.received(TEXT, 2)
    gathered = (8 * 64 * 128 * 4 + 2 * 64 * 4 + 4 * 64 * 2) // 2
    assert got == {"all-gather": gathered, "collective-permute": 24, "all-reduce": 64}


@pytest.mark.aot
@pytest.mark.parametrize("devices", [2, 16])
def test_a_call_gets_what_the_formula_says(devices):
    text = traffic.compiled("gdn", devices, tokens=128, heads=2, dim=64, backward=True)
    assert sum(traffic.received(text, devices).values()) == traffic.formula(
        devices, 2, 64, 64, True
    )
