"""Every schedule against `full-packed` in microbatches of four, in pairs, on one CPU thread; prints every cell.

Run by hand: `python benchmarks/gradients.py`. A ratio is the baseline's time over the schedule's, so above 1 is a
gain. Timed: zeroing, forward, loss, backward and the SGD step, in the order baseline, schedule, schedule, baseline,
`--blocks` times after an untimed warm-up; a cell is the median ratio of its blocks, which a busy machine moves least.
Before any time counts, the loss (2e-6) and the gradient (relative L2 1e-5) must equal the baseline's. One process and
one start: a first look, not an inference.

`schedule/4` runs at most four responses at once, as the baseline does; `schedule/G` the whole group; `schedule/=` as
many as keep no more bytes for the backward pass, prompt and wave together, than the baseline's microbatch of whole
sequences: what `python -m experiments.limits` prints. Models are random toys of two to four layers, fp32, 13 tokens:
they say how much is overhead, and little of large models.

`--cpu-time` counts the time that the process itself ran, which on one thread is the same work without the waiting: for
a machine that others use too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from experiments import costs, exactness
from experiments.batch import Group, Response
from experiments.family import LoopedModel
from experiments.latent import PositionLatent
from experiments.objective import Supervision, published
from experiments.schedules import SCHEDULES
from experiments.toys import TOYS, VOCABULARY, toy

Shape = tuple[int, int, int]
"""P, D, G: tokens of the prompt, tokens of a response, responses."""
GRID = [(p, d, g) for p, d in ((4, 16), (24, 4)) for g in (1, 8, 32)] + [(256, 8, 32)]
BASELINE = ("full-packed", 4)
WHOLE_GROUP, EQUAL_BYTES = 0, -1
ARMS = (
    ("full-packed", WHOLE_GROUP),
    ("prefix-serial", 4),
    ("prefix-packed", 4),
    ("prefix-packed", EQUAL_BYTES),
    ("prefix-packed", WHOLE_GROUP),
    ("tree-packed", 4),
    ("tree-packed", WHOLE_GROUP),
)
"""Schedule and microbatch."""
LEARNING_RATE = 0.03
LOSS_ERROR_MAX = 2e-6
GRADIENT_ERROR_MAX = 1e-5
OBJECTIVE = published(Supervision.ALL_LOOPS)


Clock = Callable[[], float]
"""Seconds, from any beginning."""


@dataclass(frozen=True)
class Case:
    """A model and one group, timed by a clock."""

    model: LoopedModel
    group: Group
    clock: Clock

    def step(self, schedule: str, microbatch: int) -> float:
        """Run one update and return its seconds; the parameters are put back afterwards, untimed."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        began = self.clock()
        optimizer.zero_grad(set_to_none=True)
        self.accumulate(schedule, microbatch)
        optimizer.step()
        seconds = self.clock() - began
        with torch.no_grad():
            for parameter, value in zip(trained, before, strict=True):
                parameter.copy_(value)
        return seconds

    def accumulate(self, schedule: str, microbatch: int) -> float:
        """Add the gradient and return the loss."""
        weights = OBJECTIVE.token_weights(self.group.lengths)
        return float(SCHEDULES[schedule](self.model, self.group, weights, OBJECTIVE, microbatch=microbatch))

    def check(self, schedule: str, microbatch: int) -> None:
        """Exit unless loss and gradient are the baseline's."""
        results = []
        for arm in (BASELINE, (schedule, microbatch)):
            self.model.zero_grad()
            results.append((self.accumulate(*arm), exactness.gradients(self.model)))
        (expected, truth), (loss, gradient) = results
        found = exactness.compare(gradient, truth)
        if abs(loss - expected) > LOSS_ERROR_MAX or found.whole > GRADIENT_ERROR_MAX:
            sys.exit(f"{schedule}/{microbatch}: loss off by {abs(loss - expected):.1e}, gradient {found}")


def draw(family: str, width: int, shape: Shape, clock: Clock) -> Case:
    """Return a toy and a random group for it, the same at every call."""
    prompt, response, responses = shape
    generator = torch.Generator().manual_seed(31)
    latent = PositionLatent(31) if family == "huginn" else None

    def one() -> Response:
        tokens = torch.randint(VOCABULARY, (response,), generator=generator)
        advantages = torch.randn(1, generator=generator).expand(response)
        return Response(tokens, advantages, torch.rand(response, generator=generator) - 3, latent)

    prompt_tokens = torch.randint(VOCABULARY, (prompt,), generator=generator)
    group = Group(prompt_tokens, tuple(one() for _ in range(responses)))
    return Case(toy(family, width=width, dtype=torch.float32), group, clock)


def at_once(asked: int, family: str, width: int, shape: Shape) -> int:
    """Return how many responses an arm runs at once; with equal bytes, as `costs` counts them, but at least one."""
    if asked == WHOLE_GROUP:
        return shape[2]
    if asked == EQUAL_BYTES:
        config = toy(family, width=width, dtype=torch.float32).config
        supervision, dtype = OBJECTIVE.supervision, torch.float32
        kept = costs.kept_bytes(config, supervision, dtype)
        return max(costs.equal_wave(config, kept, supervision, dtype, shape, min(BASELINE[1], shape[2])), 1)
    return asked


def ratio(case: Case, schedule: str, microbatch: int, blocks: int) -> float:
    """Return the baseline's time over the schedule's."""
    case.check(schedule, microbatch)
    ratios = []
    for block in range(blocks + 1):
        first, a, b, last = (case.step(*arm) for arm in (BASELINE, *[(schedule, microbatch)] * 2, BASELINE))
        if block:
            ratios.append((first + last) / (a + b))
    return statistics.median(ratios)


def table(family: str, width: int, grid: Sequence[Shape], blocks: int, clock: Clock) -> None:
    """Print one family's cells at one width."""
    signs = {WHOLE_GROUP: "G", EQUAL_BYTES: "="}
    names = [f"{schedule}/{signs.get(microbatch, microbatch)}" for schedule, microbatch in ARMS]
    print(f"\n{family}, width {width}\n{'P/D/G':>10} {'full/4 ms':>10} " + " ".join(f"{name:>15}" for name in names))
    for shape in grid:
        case = draw(family, width, shape, clock)
        baseline = statistics.median(case.step(*BASELINE) for _ in range(5))
        cells = [ratio(case, name, at_once(asked, family, width, shape), blocks) for name, asked in ARMS]
        label = "/".join(str(size) for size in shape)
        print(f"{label:>10} {1e3 * baseline:10.1f} " + " ".join(f"{cell:15.2f}" for cell in cells), flush=True)


def parse_shape(text: str) -> Shape:
    """Return P, D, G."""
    prompt, response, responses = (int(size) for size in text.split("/"))
    if min(prompt, response, responses) < 1:
        raise ValueError
    return prompt, response, responses


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, choices=range(1, 1001), default=5, metavar="N")
    parser.add_argument("--family", choices=list(TOYS), action="append")
    parser.add_argument("--width", type=int, choices=(8, 64), action="append")
    parser.add_argument("--shape", type=parse_shape, action="append", metavar="P/D/G", help="instead of the grid")
    parser.add_argument("--cpu-time", action="store_true", help="count what the process itself ran")
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = time.process_time if options.cpu_time else time.perf_counter
    for width in options.width or (8, 64):
        for family in options.family or TOYS:
            table(family, width, options.shape or GRID, options.blocks, clock)


if __name__ == "__main__":
    main()
