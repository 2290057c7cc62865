"""Runs schedules on a folder of published results and says how far each is from them.

`python -m experiments.reference FOLDER` prints one JSON object a schedule and line, and exits with 1 where a gate
fails (2 for a folder or an argument that it cannot use). A folder holds a checkpoint (`config.json`,
`model.safetensors`) and `expected.safetensors`: `prompt` [P], `responses` [T] with `response_lengths` [G],
`advantages` [T], `reference_log_probs` [T], for Huginn `initial_state` [positions, C]; and the results
`per_loop_log_probs` [T, loops], `loss` [1] and `grad.<parameter>`, with the loss's constants in the metadata.

The gate is that of the lower of the folder's and the requested precision. Published fp32 results carry rounding of
their own, and fp64 ones reduce norms in fp32, so that 4e-6 and 1e-6 are what they can show. In bf16 a schedule is
judged beside `full-packed` at the same microbatch: 1.10 times its error, plus `noise_floor`, which is how far that is
from itself at another microbatch, and 1.5 times the worst tensor's.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from experiments import families, main_gradients
from experiments.batch import Group, Response
from experiments.errors import ExperimentError
from experiments.exactness import FP32_PAIR_GATE, Agreement, Gate, bf16_admits, compare, gradients
from experiments.family import LoopedModel
from experiments.latent import GivenLatent
from experiments.objective import Mean, Objective, Supervision
from experiments.readout import Scores
from experiments.schedules import SCHEDULES

EXPECTED_NAME = "expected.safetensors"
GRADIENT_PREFIX = "grad."
BASELINE = "full-packed"
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16")}
ROUNDED_FP64_GATE = Gate(1e-6, 1e-6)
LOSS_ERROR_MAX: Mapping[torch.dtype, float] = {torch.float32: 2e-6, torch.float64: 1e-6, torch.bfloat16: math.inf}
LOG_PROB_ERROR_MAX: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.float64: 2e-6, torch.bfloat16: math.inf}


class PublishedResultsError(ExperimentError):
    """A folder that holds no published results of the form above."""


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The published inputs and results of one folder."""

    group: Group
    objective: Objective
    loss: float
    log_probs_TS: Tensor
    gradient: Mapping[str, Tensor]
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class Recording:
    """An objective that remembers each response's log-probabilities [D, S], under the identity of its tokens."""

    objective: Objective
    log_probs: dict[int, Tensor] = field(default_factory=dict)

    def supervised_loops(self, loops: int) -> tuple[int, ...]:
        """Return those of the objective."""
        return self.objective.supervised_loops(loops)

    def loss(self, scores: Scores, responses: Sequence[Response], weights: Sequence[Tensor], loops: int) -> Tensor:
        """Return the objective's loss."""
        parts = torch.split(scores.log_probs_NS.detach(), [len(response) for response in responses])
        self.log_probs.update({id(response.tokens_D): part for response, part in zip(responses, parts, strict=True)})
        return self.objective.loss(scores, responses, weights, loops)


@dataclass(frozen=True, slots=True)
class Result:
    """What one schedule found, beside the published results."""

    schedule: str
    loss_error: float
    agreement: Agreement
    log_prob_max_abs: float
    seconds: float

    def admitted(self, gate: Gate | None, dtype: torch.dtype, baseline: Agreement, noise_floor: float) -> bool:
        """Say whether every error is within its bound; without a gate, beside the baseline's."""
        exact = bf16_admits(self.agreement, baseline, noise_floor) if gate is None else gate.admits(self.agreement)
        return (
            exact
            and math.isfinite(self.loss_error)
            and math.isfinite(self.log_prob_max_abs)
            and self.loss_error <= LOSS_ERROR_MAX[dtype]
            and self.log_prob_max_abs <= LOG_PROB_ERROR_MAX[dtype]
        )


def read(folder: Path) -> Reference:
    """Read the published inputs and results; raise PublishedResultsError where something is missing."""
    path = folder / EXPECTED_NAME
    try:
        with safe_open(path, "pt") as handle:
            metadata = dict(handle.metadata() or {})
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (it is no mapping)
        lengths = tensors["response_lengths"].tolist()
        tokens, advantages, reference = (
            torch.split(tensors[name], lengths) for name in ("responses", "advantages", "reference_log_probs")
        )
        latent = GivenLatent(tensors["initial_state"]) if "initial_state" in tensors else None
        if metadata["reduction"] not in ("token_mean", "response_mean"):
            raise PublishedResultsError(
                f"{path}: expected token_mean or response_mean, found {metadata['reduction']!r}"
            )
        mean = Mean.TOKEN if metadata["reduction"] == "token_mean" else Mean.RESPONSE
        alpha, kl, entropy = (float(metadata[name]) for name in ("alpha", "kl_coefficient", "entropy_coefficient"))
        rows = zip(tokens, advantages, reference, strict=True)
        return Reference(
            group=Group(tensors["prompt"], tuple(Response(*row, latent) for row in rows)),
            objective=Objective(alpha, kl, entropy, Supervision.ALL_LOOPS, mean),
            loss=float(tensors["loss"]),
            log_probs_TS=tensors["per_loop_log_probs"].double(),
            gradient={
                name.removeprefix(GRADIENT_PREFIX): tensor
                for name, tensor in tensors.items()
                if name.startswith(GRADIENT_PREFIX)
            },
            dtype=tensors["loss"].dtype,
        )
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise PublishedResultsError(f"{path}: expected published results, found {error!r}") from error


def run(model: LoopedModel, reference: Reference, schedule: str, microbatch: int) -> Result:
    """Run a schedule once on the reference's inputs, on the model's device."""
    device = model.head_VC.device
    group = reference.group.to(str(device))
    recording = Recording(reference.objective)
    weights = [slice_D.to(device) for slice_D in reference.objective.token_weights(group.lengths)]
    model.zero_grad()
    began = time.perf_counter()
    loss = float(SCHEDULES[schedule](model, group, weights, recording, microbatch=microbatch))
    seconds = time.perf_counter() - began
    filled = [recording.log_probs[id(response.tokens_D)] for response in group.responses if len(response)]
    difference = torch.cat(filled).cpu().double() - reference.log_probs_TS
    return Result(
        schedule=schedule,
        loss_error=abs(loss - reference.loss),
        agreement=compare(gradients(model), reference.gradient),
        log_prob_max_abs=float(difference.abs().max()),
        seconds=seconds,
    )


def lower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Return the dtype with fewer digits."""
    return max((first, second), key=lambda dtype: torch.finfo(dtype).eps)


def judge(folder: Path, schedules: Sequence[str], dtype: torch.dtype, device: str, microbatch: int) -> bool:
    """Print one line a schedule; return whether all gates pass."""
    reference = read(folder)
    judged_as = lower(reference.dtype, dtype)
    gate = {torch.float64: ROUNDED_FP64_GATE, torch.float32: FP32_PAIR_GATE}.get(judged_as)
    model = families.load(folder, dtype, device)
    main_gradients.widen(model)
    baseline = run(model, reference, BASELINE, microbatch)
    noise_floor = 0.0
    if gate is None:
        first = gradients(model)
        other = 1 if microbatch > 1 else len(reference.group.responses)
        run(model, reference, BASELINE, other)
        noise_floor = compare(gradients(model), first).whole
    passed = True
    for schedule in schedules:
        result = run(model, reference, schedule, microbatch)
        admitted = result.admitted(gate, judged_as, baseline.agreement, noise_floor)
        passed = passed and admitted
        line = {
            "schedule": schedule,
            "loss_error": result.loss_error,
            "gradient_relative_l2": result.agreement.whole,
            "worst_tensor": result.agreement.worst_name,
            "worst_tensor_relative_l2": result.agreement.worst_tensor,
            "log_prob_max_abs": result.log_prob_max_abs,
            "seconds": result.seconds,
            "passed": admitted,
        }
        print(json.dumps(line if gate else line | {"noise_floor": noise_floor}))
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, judge, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.reference", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schedule", choices=[*SCHEDULES, "all"], default="all")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--microbatch", type=int, default=4, help="the most responses that run at once")
    options = parser.parse_args(arguments)
    schedules = list(SCHEDULES) if options.schedule == "all" else [options.schedule]
    try:
        passed = judge(options.folder, schedules, DTYPES[options.dtype], options.device, options.microbatch)
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
