"""Parameter gradients in fp32 for models in a narrower dtype.

A gradient that gathers over many microbatches in bf16 loses what is smaller than its last digit. torch's `grad_dtype`
lets a parameter keep a wider gradient; within one backward pass the sum over loops still rounds to the model's dtype.
"""

from torch import nn

from experiments.layers import wide


def widen(model: nn.Module) -> None:
    """Let every parameter's `.grad` be at least fp32, from the next backward pass on; gradients there are dropped."""
    for parameter in model.parameters():
        parameter.grad = None
        parameter.grad_dtype = wide(parameter.dtype)
