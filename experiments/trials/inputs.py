"""What one trial computes on: read from a cell's workload, then drawn from its seed, always on the CPU.

Tokens, advantages, reference log-probabilities and the oracle are therefore the same on every device.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments import dense_oracle, families
from experiments.batch import Group, Response
from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.latent import Latent, PositionLatent
from experiments.objective import Objective, Supervision, published

REFERENCE_HEAD_SCALE = 0.95
LEARNING_RATE = 0.03
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
DEVICES = ("cpu", "cuda")
_WORKLOAD_KEYS = ("prompt", "response", "responses", "checkpoint", "dtype", "supervision")


class CellError(ExperimentError):
    """A cell that asks for something this trial does not have; the message names the key."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One workload under one seed on one device; equal settings have equal inputs and oracles.

    `prompt_tokens` is P, `response_tokens` D (all responses are equally long) and `responses` G.
    """

    seed: int
    prompt_tokens: int
    response_tokens: int
    responses: int
    checkpoint: Path
    dtype: str
    supervision: Supervision
    device: str


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Everything an update needs, on the setting's device, and the fp64 oracle's results, on the CPU."""

    model: LoopedModel
    initial: Mapping[str, Tensor]
    group: Group
    objective: Objective
    weights: tuple[Tensor, ...]
    oracle: dense_oracle.Evaluation
    oracle_update: Mapping[str, Tensor]


def parse_setting(workload: Mapping[str, object], seed: int, source_root: Path, device: str) -> Setting:
    """Read a workload strictly; raise CellError for unknown, missing or meaningless values."""
    refuse_other_keys("workload", workload, _WORKLOAD_KEYS)
    if device not in DEVICES:
        raise CellError(f"device: expected one of {', '.join(DEVICES)}, found {device!r}")
    dtype, supervision, checkpoint = (str(workload[key]) for key in ("dtype", "supervision", "checkpoint"))
    if dtype not in DTYPES:
        raise CellError(f"workload dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    if supervision not in tuple(Supervision):
        raise CellError(f"workload supervision: expected one of {', '.join(Supervision)}, found {supervision!r}")
    folder = (source_root / checkpoint).resolve()
    if not folder.is_relative_to(source_root.resolve()):
        raise CellError(f"workload checkpoint: expected a folder inside the sources, found {checkpoint!r}")
    return Setting(
        seed=seed,
        prompt_tokens=count("workload", workload, "prompt"),
        response_tokens=count("workload", workload, "response"),
        responses=count("workload", workload, "responses"),
        checkpoint=folder,
        dtype=dtype,
        supervision=Supervision(supervision),
        device=device,
    )


def refuse_other_keys(place: str, found: Mapping[str, object], expected: tuple[str, ...]) -> None:
    """Raise CellError unless exactly the expected keys are there."""
    if set(found) != set(expected):
        raise CellError(f"{place}: expected the keys {', '.join(sorted(expected))}, found {', '.join(sorted(found))}")


def count(place: str, values: Mapping[str, object], key: str) -> int:
    """Return a value that must be a positive integer."""
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CellError(f"{place} {key}: expected a positive integer, found {value!r}")
    return value


def prepare(setting: Setting) -> Inputs:
    """Load the model, draw the group and evaluate the oracle; takes far longer than one update."""
    model = families.load(setting.checkpoint, DTYPES[setting.dtype], setting.device)
    exact = families.load(setting.checkpoint, DTYPES[setting.dtype]).to(torch.float64)
    group = _draw_group(exact, setting)
    objective = published(setting.supervision)
    oracle = dense_oracle.evaluate(exact, group, objective)
    return Inputs(
        model=model,
        initial={name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        group=group.to(setting.device),
        objective=objective,
        weights=tuple(slice_D.to(setting.device) for slice_D in objective.token_weights(group.lengths)),
        oracle=oracle,
        oracle_update={name: -LEARNING_RATE * gradient for name, gradient in oracle.gradient.items()},
    )


def _draw_group(exact: LoopedModel, setting: Setting) -> Group:
    """Draw tokens and rewards from the seed; advantages are the group's standardised rewards, one a response.

    The reference policy is the same model with its head scaled down; constants are rounded to the trial's dtype
    before anybody uses them, so that oracle and schedules read the same numbers. A family that starts from a latent
    gets one of the trial's seed, the same for all responses.
    """
    generator = torch.Generator("cpu").manual_seed(setting.seed)
    shape, vocabulary = (setting.responses, setting.response_tokens), exact.head_VC.shape[0]
    prompt_P = torch.randint(vocabulary, (setting.prompt_tokens,), generator=generator)
    tokens_GD = torch.randint(vocabulary, shape, generator=generator)
    rewards_G = torch.rand(setting.responses, generator=generator, dtype=torch.float64)
    if setting.responses > 1:
        rewards_G = (rewards_G - rewards_G.mean()) / rewards_G.std()
    dtype = DTYPES[setting.dtype]
    advantages_GD = rewards_G.to(dtype)[:, None].expand(shape)
    blank_GD = torch.zeros(shape, dtype=dtype)
    latent = PositionLatent(setting.seed) if exact.takes_latent else None
    unscored = _group(prompt_P, tokens_GD, advantages_GD, blank_GD, latent)
    with torch.no_grad():
        tables = dense_oracle.log_prob_tables(exact, unscored, (exact.loops - 1,), REFERENCE_HEAD_SCALE)
    return _group(prompt_P, tokens_GD, advantages_GD, tables[0][:, :, -1].to(dtype), latent)


def _group(
    prompt_P: Tensor, tokens_GD: Tensor, advantages_GD: Tensor, reference_GD: Tensor, latent: Latent | None
) -> Group:
    rows = zip(tokens_GD, advantages_GD, reference_GD, strict=True)
    return Group(prompt_P, tuple(Response(*row, latent) for row in rows))
