"""Judges a gradient or an update against an oracle's, in fp64.

Relative L2 is ||g - g*|| / ||g*||, over all parameters concatenated and, as the worst, over each tensor alone. Where
||g*|| is zero, g must be zero. Elements are compared with an absolute floor, never by ratio alone. Anything that is
not finite is infinitely wrong, so that no gate can let it through.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.errors import ExperimentError

ELEMENT_ATOL = 1e-5
ELEMENT_RTOL = 8e-5
UPDATE_ATOL = 2e-6
UPDATE_RTOL = 1e-4
BF16_WHOLE_RATIO_MAX = 1.10
BF16_WORST_RATIO_MAX = 1.5


class ExactnessError(ExperimentError):
    """Two sets of tensors that cannot be compared."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a gradient is from its oracle; `element_excess` above 1 means an element outside its tolerance."""

    whole: float
    worst_tensor: float
    worst_name: str
    element_excess: float


@dataclass(frozen=True, slots=True)
class Gate:
    """The largest relative L2 errors that count as the same gradient."""

    whole_max: float
    worst_tensor_max: float

    def admits(self, agreement: Agreement) -> bool:
        """Say whether every bound holds; the elementwise one is common to all gates."""
        return (
            agreement.whole <= self.whole_max
            and agreement.worst_tensor <= self.worst_tensor_max
            and agreement.element_excess <= 1
        )


FP64_GATE = Gate(1e-12, 1e-11)
FP32_GATE = Gate(2e-6, 1e-5)
FP32_PAIR_GATE = Gate(4e-6, 1e-5)
"""For two fp32 results, each with its own rounding."""


def bf16_admits(candidate: Agreement, baseline: Agreement) -> bool:
    """Say whether a bf16 schedule is about as close to the oracle as the bf16 baseline is to the same oracle."""
    return (
        candidate.whole <= BF16_WHOLE_RATIO_MAX * baseline.whole
        and candidate.worst_tensor <= BF16_WORST_RATIO_MAX * baseline.worst_tensor
    )


@dataclass(frozen=True, slots=True)
class UpdateAgreement:
    """How far one SGD step's parameter change is from the oracle's, and its own L2 norm."""

    max_abs_error: float
    element_excess: float
    norm: float

    @property
    def admitted(self) -> bool:
        """Say whether every element is within tolerance and the step moved the parameters at all."""
        return self.element_excess <= 1 and 0 < self.norm < math.inf


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a CPU fp64 copy of every parameter's gradient; a parameter that got none, or is frozen, has zeros."""
    return {
        name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        .detach()
        .to(device="cpu", dtype=torch.float64, copy=True)
        for name, parameter in model.named_parameters()
    }


def compare(actual: Mapping[str, Tensor], oracle: Mapping[str, Tensor]) -> Agreement:
    """Measure a gradient against the oracle's; both map the same parameter names to tensors of the same shapes."""
    squared_error = squared_norm = element_excess = 0.0
    worst_tensor, worst_name = 0.0, ""
    for name, (found, expected) in _paired(actual, oracle).items():
        error, norm = float((found - expected).norm()), float(expected.norm())
        ratio = _ratio(error, norm)
        if ratio >= worst_tensor:
            worst_tensor, worst_name = ratio, name
        squared_error, squared_norm = squared_error + error**2, squared_norm + norm**2
        element_excess = max(element_excess, _excess(found, expected, ELEMENT_ATOL, ELEMENT_RTOL))
    whole = _ratio(math.sqrt(squared_error), math.sqrt(squared_norm))
    return Agreement(whole, worst_tensor, worst_name, element_excess)


def compare_updates(actual: Mapping[str, Tensor], oracle: Mapping[str, Tensor]) -> UpdateAgreement:
    """Measure the parameter changes of one SGD step against the oracle's."""
    largest = excess = squared_norm = 0.0
    for found, expected in _paired(actual, oracle).values():
        largest = max(largest, _finite(float((found - expected).abs().max())))
        excess = max(excess, _excess(found, expected, UPDATE_ATOL, UPDATE_RTOL))
        squared_norm += float(found.norm()) ** 2
    return UpdateAgreement(largest, excess, _finite(math.sqrt(squared_norm)))


def _paired(actual: Mapping[str, Tensor], oracle: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return both sides in fp64 on the CPU; raise ExactnessError where names or shapes differ, or none is there."""
    different = sorted(actual.keys() ^ oracle.keys())
    if different or not oracle:
        raise ExactnessError(f"expected the same tensors on both sides, found only on one: {different}")
    for name in oracle:
        if actual[name].shape != oracle[name].shape:
            raise ExactnessError(f"{name}: shapes {list(actual[name].shape)} and {list(oracle[name].shape)}")
    return {
        name: (actual[name].detach().to("cpu", torch.float64), oracle[name].detach().to("cpu", torch.float64))
        for name in oracle
    }


def _excess(found: Tensor, expected: Tensor, atol: float, rtol: float) -> float:
    return _finite(float(((found - expected).abs() / (atol + rtol * expected.abs())).max()))


def _ratio(error: float, norm: float) -> float:
    if norm == 0:
        return 0.0 if error == 0 else math.inf
    return _finite(error / norm)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
