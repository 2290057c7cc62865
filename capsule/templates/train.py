"""A plain training script: fit a line by gradient descent. `python train.py` runs it alone."""

import argparse
import random
import time

from capsule import record

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--rate", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=50)
options = parser.parse_args()

draw = random.Random(options.seed)
points = [(x, 3 * x + 1 + draw.gauss(0, 0.1)) for x in (draw.uniform(-1, 1) for _ in range(200))]

began = time.perf_counter()
slope = offset = loss = 0.0
for step in range(options.steps):
    errors = [slope * x + offset - y for x, y in points]
    loss = sum(error * error for error in errors) / len(points)
    slope -= options.rate * 2 * sum(error * x for error, (x, _) in zip(errors, points, strict=True)) / len(points)
    offset -= options.rate * 2 * sum(errors) / len(points)
    if step % 10 == 0:
        print(f"step {step}: loss {loss:.6f}")

# One call at the end, and nothing else to learn: the observations that the protocol names.
record(loss=loss, seconds=time.perf_counter() - began)
