"""Every schedule against `full-packed` in microbatches of four, in pairs, on one CPU thread; prints every cell.

Run by hand: `python benchmarks/gradients.py`. A ratio is the baseline's time over the schedule's, so above 1 is a
gain. Timed: zeroing, forward, loss, backward and the SGD step, in the order baseline, schedule, schedule, baseline,
`--blocks` times after an untimed warm-up; a cell is the exponential of the mean log ratio of its blocks. Before any
time counts, the loss (2e-6) and the gradient (relative L2 1e-5) must equal the baseline's. One process and one start:
a first look, not an inference.

`schedule/4` runs at most four responses at once, as the baseline does; `schedule/G` the whole group; `schedule/=` as
many as keep no more rows alive, prompt and wave together, than the baseline's microbatch of whole sequences. Models
are random toys of two to four layers, fp32, 13 tokens: they say how much is overhead, and little of large models.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from experiments import exactness
from experiments.batch import Group, Response
from experiments.family import LoopedModel
from experiments.latent import PositionLatent
from experiments.objective import Supervision, published
from experiments.schedules import SCHEDULES
from experiments.toys import TOYS, VOCABULARY, toy

GRID = [(p, d, g) for p, d in ((4, 16), (24, 4)) for g in (1, 8, 32)] + [(256, 8, 32)]
BASELINE = ("full-packed", 4)
WHOLE_GROUP, EQUAL_ROWS = 0, -1
ARMS = (
    ("full-packed", WHOLE_GROUP),
    ("prefix-serial", 4),
    ("prefix-packed", 4),
    ("prefix-packed", EQUAL_ROWS),
    ("prefix-packed", WHOLE_GROUP),
    ("tree-packed", 4),
    ("tree-packed", WHOLE_GROUP),
)
"""Schedule and microbatch."""
LEARNING_RATE = 0.03
LOSS_ERROR_MAX = 2e-6
GRADIENT_ERROR_MAX = 1e-5
OBJECTIVE = published(Supervision.ALL_LOOPS)


@dataclass(frozen=True)
class Case:
    """A model and one group."""

    model: LoopedModel
    group: Group

    def step(self, schedule: str, microbatch: int) -> float:
        """Run one update and return its seconds; the parameters are put back afterwards, untimed."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in trained]
        optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        self.accumulate(schedule, microbatch)
        optimizer.step()
        seconds = time.perf_counter() - began
        with torch.no_grad():
            for parameter, value in zip(trained, before, strict=True):
                parameter.copy_(value)
        return seconds

    def accumulate(self, schedule: str, microbatch: int) -> float:
        """Add the gradient and return the loss."""
        weights = OBJECTIVE.token_weights(self.group.lengths)
        size = self.microbatch(microbatch)
        return float(SCHEDULES[schedule](self.model, self.group, weights, OBJECTIVE, microbatch=size))

    def microbatch(self, asked: int) -> int:
        """Return how many responses run at once; with equal rows, prompt and wave together have the baseline's."""
        prompt, response, responses = len(self.group.prompt_P), max(self.group.lengths), len(self.group.responses)
        if asked == WHOLE_GROUP:
            return responses
        if asked == EQUAL_ROWS:
            baseline = min(BASELINE[1], responses) * (prompt + response - 1)
            return min(max((baseline - prompt) // (response - 1), 1), responses)
        return asked

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


def draw(family: str, width: int, prompt: int, response: int, count: int) -> Case:
    """Return a toy and a random group for it, the same at every call."""
    generator = torch.Generator().manual_seed(31)
    latent = PositionLatent(31) if family == "huginn" else None

    def one() -> Response:
        tokens = torch.randint(VOCABULARY, (response,), generator=generator)
        advantages = torch.randn(1, generator=generator).expand(response)
        return Response(tokens, advantages, torch.rand(response, generator=generator) - 3, latent)

    prompt_tokens = torch.randint(VOCABULARY, (prompt,), generator=generator)
    return Case(toy(family, width=width, dtype=torch.float32), Group(prompt_tokens, tuple(one() for _ in range(count))))


def ratio(case: Case, schedule: str, microbatch: int, blocks: int) -> float:
    """Return the baseline's time over the schedule's."""
    case.check(schedule, microbatch)
    logs = []
    for block in range(blocks + 1):
        first, a, b, last = (case.step(*arm) for arm in (BASELINE, *[(schedule, microbatch)] * 2, BASELINE))
        if block:
            logs.append(math.log((first + last) / (a + b)))
    return math.exp(sum(logs) / len(logs))


def table(family: str, width: int, grid: Sequence[tuple[int, int, int]], blocks: int) -> None:
    """Print one family's cells at one width."""
    signs = {WHOLE_GROUP: "G", EQUAL_ROWS: "="}
    names = [f"{schedule}/{signs.get(microbatch, microbatch)}" for schedule, microbatch in ARMS]
    print(f"\n{family}, width {width}\n{'P/D/G':>10} {'full/4 ms':>10} " + " ".join(f"{name:>15}" for name in names))
    for shape in grid:
        case = draw(family, width, *shape)
        baseline = sorted(case.step(*BASELINE) for _ in range(5))[2]
        cells = [ratio(case, *arm, blocks) for arm in ARMS]
        label = "/".join(str(size) for size in shape)
        print(f"{label:>10} {1e3 * baseline:10.1f} " + " ".join(f"{cell:15.2f}" for cell in cells), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--family", choices=list(TOYS), action="append")
    parser.add_argument("--width", type=int, action="append")
    parser.add_argument("--shape", action="append", help="P/D/G instead of the grid")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [tuple(int(size) for size in shape.split("/")) for shape in options.shape or ()]
    grid = [(p, d, g) for p, d, g in wanted] or GRID
    for width in options.width or (8, 64):
        for family in options.family or TOYS:
            table(family, width, grid, options.blocks)


if __name__ == "__main__":
    main()
