"""Runs schedules on a folder of published results and says how far each is from them.

`python -m experiments.reference FOLDER` prints one JSON object a schedule and line, and exits with 1 where a gate
fails (2 for a folder or an argument that it cannot use). A folder holds a checkpoint (`config.json`,
`model.safetensors`) and `expected.safetensors`, whose tensors are int64, or floats in one of fp32 and fp64, finite:

    inputs    prompt [P]; responses [T], one after another, with response_lengths [G] that add up to T;
              advantages [T]; reference_log_probs [T]; for Huginn alone initial_state [P + longest response, C]
    results   per_loop_log_probs [T, loops]; terminal_entropy [T]; loss [1]; grad.NAME for every parameter
    metadata  alpha, kl_coefficient, entropy_coefficient; reduction (token_mean, which it is if left out, or
              response_mean)

The gate is that of the lower of the folder's and the requested precision. Published fp32 results carry rounding of
their own, and fp64 ones reduce norms in fp32, so that 4e-6 and 1e-6 are what they can show. In bf16 a schedule is
judged beside `full-packed` at the same microbatch: at most 1.10 times its error, and 1.5 times for the worst tensor.
`noise_floor`, printed beside it, is how far `full-packed` is from itself at another microbatch.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from experiments import families, main_gradients
from experiments.batch import Group, Response
from experiments.checkpoint import mismatches
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
SCORE_ERROR_MAX: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.float64: 2e-6, torch.bfloat16: math.inf}
"""The largest error of a log-probability and of an entropy."""
CONSTANT_MAX = 100.0
"""The largest constant of a loss, either way: 1024 loops to this power are still a number."""
REDUCTIONS: Mapping[str, Mean] = {"token_mean": Mean.TOKEN, "response_mean": Mean.RESPONSE}
INTEGER, FLOAT = (torch.int64,), (torch.float32, torch.float64)
HELP = "`python -m experiments.reference --help` gives the arguments and the form of a folder"


class PublishedResultsError(ExperimentError):
    """A folder that holds no published results of the form above."""

    hint: ClassVar[str] = HELP


class UnusableArgumentError(ExperimentError):
    """An argument that this machine or this command cannot follow."""

    hint: ClassVar[str] = HELP


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """The published inputs and results of one folder."""

    group: Group
    objective: Objective
    loss: float
    log_probs_TS: Tensor
    entropy_T: Tensor
    gradient: Mapping[str, Tensor]
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class Recording:
    """An objective that remembers each response's log-probabilities [D, S] and entropy [D], by its tokens' identity."""

    objective: Objective
    scores: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def supervised_loops(self, loops: int) -> tuple[int, ...]:
        """Return those of the objective."""
        return self.objective.supervised_loops(loops)

    def loss(self, scores: Scores, responses: Sequence[Response], weights: Sequence[Tensor], loops: int) -> Tensor:
        """Return the objective's loss."""
        lengths = [len(response) for response in responses]
        columns = (torch.split(part.detach(), lengths) for part in (scores.log_probs_NS, scores.terminal_entropy_N))
        found = zip(*columns, strict=True)
        self.scores.update({id(response.tokens_D): pair for response, pair in zip(responses, found, strict=True)})
        return self.objective.loss(scores, responses, weights, loops)


@dataclass(frozen=True, slots=True)
class Result:
    """What one schedule found, beside the published results."""

    schedule: str
    loss_error: float
    agreement: Agreement
    log_prob_max_abs: float
    entropy_max_abs: float
    seconds: float

    def admitted(self, gate: Gate | None, dtype: torch.dtype, baseline: Agreement) -> bool:
        """Say whether every error is within its bound; without a gate, beside the baseline's."""
        exact = bf16_admits(self.agreement, baseline) if gate is None else gate.admits(self.agreement)
        errors = (self.loss_error, self.log_prob_max_abs, self.entropy_max_abs)
        bounds = (LOSS_ERROR_MAX[dtype], SCORE_ERROR_MAX[dtype], SCORE_ERROR_MAX[dtype])
        within = all(math.isfinite(error) and error <= most for error, most in zip(errors, bounds, strict=True))
        return exact and within


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """The tensors and the metadata of one file, and what is said about those that do not fit."""

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def tensor(self, name: str, dtypes: Sequence[torch.dtype], *shape: int | None) -> Tensor:
        """Return a finite tensor of one of the dtypes and of this shape, where None is any size but 0."""
        wanted = f"{' or '.join(map(_plain, dtypes))} {['any' if size is None else size for size in shape]}"
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self.error(name, wanted, "no such tensor")
        found = tuple(tensor.shape)
        fits = len(found) == len(shape) and all(
            size > 0 if wished is None else size == wished for size, wished in zip(found, shape, strict=True)
        )
        if tensor.dtype not in dtypes or not fits:
            raise self.error(name, wanted, f"{_plain(tensor.dtype)} {list(found)}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise self.error(name, "finite numbers", f"{int((~tensor.isfinite()).sum())} that are not")
        return tensor

    def constant(self, name: str) -> float:
        """Return a constant of the loss from the metadata."""
        text = self.metadata.get(name)
        try:
            value = float(text or "")
        except ValueError:
            value = math.nan
        if not abs(value) <= CONSTANT_MAX:
            raise self.error(f"metadata {name}", f"a number up to {CONSTANT_MAX:g}", repr(text))
        return value

    def mean(self) -> Mean:
        """Return what a token weighs; the published form says token mean, and names it or not."""
        found = self.metadata.get("reduction", "token_mean")
        if found not in REDUCTIONS:
            raise self.error("metadata reduction", " or ".join(REDUCTIONS), repr(found))
        return REDUCTIONS[found]

    def error(self, where: str, expected: str, found: str) -> PublishedResultsError:
        """Return the error for one place of the file."""
        return PublishedResultsError(f"{self.path}: {where}: expected {expected}, found {found}")


def read(folder: Path) -> Reference:
    """Read the published inputs and results; raise PublishedResultsError where they are not of the form above."""
    published = _open(folder / EXPECTED_NAME)
    lengths = [int(length) for length in published.tensor("response_lengths", INTEGER, None)]
    count = sum(lengths)
    if min(lengths) < 0 or not count:
        raise published.error("response_lengths", "lengths with at least one token in all", f"{lengths!s:.80}")
    prompt_P = published.tensor("prompt", INTEGER, None)
    tokens, advantages, reference = (
        torch.split(published.tensor(name, dtypes, count), lengths)
        for name, dtypes in (("responses", INTEGER), ("advantages", FLOAT), ("reference_log_probs", FLOAT))
    )
    latent = None
    if "initial_state" in published.tensors:
        positions = len(prompt_P) + max(lengths)
        latent = GivenLatent(published.tensor("initial_state", FLOAT, positions, None))
    loss = published.tensor("loss", FLOAT, 1)
    same = (loss.dtype,)
    alpha, kl, entropy = (published.constant(name) for name in ("alpha", "kl_coefficient", "entropy_coefficient"))
    return Reference(
        group=Group(prompt_P, tuple(Response(*row, latent) for row in zip(tokens, advantages, reference, strict=True))),
        objective=Objective(alpha, kl, entropy, Supervision.ALL_LOOPS, published.mean()),
        loss=float(loss),
        log_probs_TS=published.tensor("per_loop_log_probs", same, count, None).double(),
        entropy_T=published.tensor("terminal_entropy", same, count).double(),
        gradient={
            name.removeprefix(GRADIENT_PREFIX): published.tensor(name, same, *tensor.shape)
            for name, tensor in published.tensors.items()
            if name.startswith(GRADIENT_PREFIX)
        },
        dtype=loss.dtype,
    )


def _open(path: Path) -> Published:
    try:
        with safe_open(path, "pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (it is no mapping)
            return Published(path, tensors, dict(handle.metadata() or {}))
    except (OSError, SafetensorError) as error:
        raise PublishedResultsError(f"{path}: expected a safetensors file, found {error}") from error


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_misfits(model: LoopedModel, reference: Reference, path: Path) -> None:
    """Raise PublishedResultsError unless the inputs and results, which were read from `path`, can be this model's."""
    vocabulary, width = model.head_VC.shape
    group, latent = reference.group, reference.group.responses[0].latent
    faults = []
    tokens_of = {"prompt": group.prompt_P, "responses": torch.cat([part.tokens_D for part in group.responses])}
    for name, tokens in tokens_of.items():
        outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
        if len(outside):
            faults.append(f"{name}: expected tokens from 0 to {vocabulary - 1}, found {int(outside[0])}")
    loops = reference.log_probs_TS.shape[1]
    if loops != model.loops:
        faults.append(f"per_loop_log_probs: expected {model.loops} loops, found {loops}")
    found = latent.table_TC.shape[1] if isinstance(latent, GivenLatent) else None
    if found != (width if model.takes_latent else None):
        needed = f"a width of {width}" if model.takes_latent else "none for a family without latents"
        faults.append(f"initial_state: expected {needed}, found {found or 'none'}")
    found_of = {GRADIENT_PREFIX + name: tensor for name, tensor in reference.gradient.items()}
    faults += mismatches({GRADIENT_PREFIX + name: tensor for name, tensor in model.named_parameters()}, found_of)
    if faults:
        raise PublishedResultsError(f"{path}: expected results of the model beside it, found {'; '.join(faults)}")


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
    filled = [recording.scores[id(response.tokens_D)] for response in group.responses if len(response)]
    log_probs_TS, entropy_T = (torch.cat(part).cpu().double() for part in zip(*filled, strict=True))
    return Result(
        schedule=schedule,
        loss_error=abs(loss - reference.loss),
        agreement=compare(gradients(model), reference.gradient),
        log_prob_max_abs=float((log_probs_TS - reference.log_probs_TS).abs().max()),
        entropy_max_abs=float((entropy_T - reference.entropy_T).abs().max()),
        seconds=seconds,
    )


def lower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """Return the dtype with fewer digits."""
    return max((first, second), key=lambda dtype: torch.finfo(dtype).eps)


def judge(folder: Path, schedules: Sequence[str], dtype: torch.dtype, device: str, microbatch: int) -> bool:
    """Print one line a schedule; return whether all gates pass."""
    if microbatch < 1:
        raise UnusableArgumentError(f"--microbatch: expected at least one response, found {microbatch}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UnusableArgumentError("--device: expected a CUDA device that torch can use, found none; try --device cpu")
    reference = read(folder)
    judged_as = lower(reference.dtype, dtype)
    gate = {torch.float64: ROUNDED_FP64_GATE, torch.float32: FP32_PAIR_GATE}.get(judged_as)
    model = families.load(folder, dtype, device)
    refuse_misfits(model, reference, folder / EXPECTED_NAME)
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
        admitted = result.admitted(gate, judged_as, baseline.agreement)
        passed = passed and admitted
        line = {
            "schedule": schedule,
            "loss_error": result.loss_error,
            "gradient_relative_l2": result.agreement.whole,
            "worst_tensor": result.agreement.worst_name,
            "worst_tensor_relative_l2": result.agreement.worst_tensor,
            "log_prob_max_abs": result.log_prob_max_abs,
            "entropy_max_abs": result.entropy_max_abs,
            "seconds": result.seconds,
            "passed": admitted,
        }
        print(json.dumps(line if gate else line | {"noise_floor": noise_floor}))
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, judge, and return the exit status."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m experiments.reference", description=__doc__, formatter_class=plain)
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
        print(f"error: {error}\nhint: {getattr(error, 'hint', HELP)}", file=sys.stderr)
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
