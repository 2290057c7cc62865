import math

import pytest
import torch

from experiments import exactness
from experiments.exactness import FP32_GATE, FP64_GATE, ExactnessError, compare, compare_updates

ORACLE = {"large": torch.tensor([3.0, 4.0]), "small": torch.tensor([0.1]), "gate": torch.zeros(2)}


def changed(name, offset):
    return ORACLE | {name: ORACLE[name].double() + offset}


def test_equal_gradients_are_at_distance_zero():
    agreement = compare(ORACLE, ORACLE)
    assert (agreement.whole, agreement.worst_tensor, agreement.element_excess) == (0, 0, 0)


def test_distances_are_relative_l2_whole_and_by_tensor():
    """A small tensor's error hides in the whole and shows in the worst."""
    agreement = compare(changed("small", 0.01), ORACLE)
    assert agreement.whole == pytest.approx(0.01 / math.sqrt(25.01), rel=1e-6)
    assert (agreement.worst_tensor, agreement.worst_name) == (pytest.approx(0.1, rel=1e-6), "small")
    assert agreement.element_excess == pytest.approx(0.01 / (1e-5 + 8e-5 * 0.1), rel=1e-6)


def test_where_the_oracle_is_zero_the_gradient_must_be():
    """No ratio excuses a gradient for a parameter that takes no part."""
    agreement = compare(changed("gate", 1e-30), ORACLE)
    assert (agreement.worst_tensor, agreement.worst_name) == (math.inf, "gate")
    assert not FP32_GATE.admits(agreement)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_infinite_or_undefined_passes_a_gate(poison):
    agreement = compare(changed("small", poison), ORACLE)
    assert (agreement.whole, agreement.worst_tensor, agreement.element_excess) == (math.inf,) * 3
    assert not FP32_GATE.admits(agreement)


def test_each_bound_of_a_gate_can_fail_alone():
    assert FP64_GATE.admits(exactness.Agreement(1e-12, 1e-11, "", 1))
    assert not FP64_GATE.admits(exactness.Agreement(1.1e-12, 1e-11, "", 1))
    assert not FP64_GATE.admits(exactness.Agreement(1e-12, 1.1e-11, "", 1))
    assert not FP64_GATE.admits(exactness.Agreement(1e-12, 1e-11, "", 1.1))


def test_bf16_is_judged_beside_its_baseline():
    baseline = exactness.Agreement(1e-3, 1e-2, "", 50)
    assert exactness.bf16_admits(exactness.Agreement(1.09e-3, 1.4e-2, "", 50), baseline)
    assert not exactness.bf16_admits(exactness.Agreement(1.11e-3, 1e-2, "", 50), baseline)
    assert not exactness.bf16_admits(exactness.Agreement(1e-3, 1.6e-2, "", 50), baseline)


@pytest.mark.parametrize(
    "other",
    [{}, {"large": ORACLE["large"]}, ORACLE | {"more": torch.ones(1)}, ORACLE | {"small": torch.ones(2)}],
)
def test_different_tensors_cannot_be_compared(other):
    with pytest.raises(ExactnessError):
        compare(other, ORACLE)


def test_an_update_must_move_and_stay_within_tolerance():
    assert compare_updates(ORACLE, ORACLE).admitted
    still = {name: torch.zeros_like(tensor) for name, tensor in ORACLE.items()}
    assert not compare_updates(still, still).admitted
    assert not compare_updates(changed("small", math.nan), ORACLE).admitted
    off = compare_updates(changed("small", 2e-5), ORACLE)
    assert (off.max_abs_error, off.admitted) == (pytest.approx(2e-5, rel=1e-3), False)


def test_gradients_are_copies_and_missing_ones_are_zero():
    layer = torch.nn.Linear(2, 1)
    layer.weight.grad = torch.ones(1, 2)
    found = exactness.gradients(layer)
    layer.weight.grad.zero_()
    assert found["weight"].tolist() == [[1, 1]]
    assert found["weight"].dtype == torch.float64
    assert found["bias"].tolist() == [0]
