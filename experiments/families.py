"""The families by the `model_type` of their official configs."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from experiments import huginn, nanbeige, ouro
from experiments.checkpoint import CONFIG_NAME, CheckpointError, read_object
from experiments.family import LoopedModel

FAMILIES: Mapping[str, Callable[[Path, torch.dtype, str], LoopedModel]] = {
    "ouro": ouro.load,
    "nanbeige": nanbeige.load,
    "huginn_raven": huginn.load,
}


def load(folder: Path, dtype: torch.dtype, device: str = "cpu") -> LoopedModel:
    """Load an official checkpoint folder of any family; raise CheckpointError if it is none."""
    model_type = read_object(folder / CONFIG_NAME).get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"config field model_type: expected one of {', '.join(FAMILIES)}, found {model_type!r}")
    return FAMILIES[model_type](folder, dtype, device)
