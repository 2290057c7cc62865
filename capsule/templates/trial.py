"""The trial: called once for every planned cell; what it returns is the cell's row."""

import random
import time


def measure(cell):
    """Sum numbers drawn from the cell's seed, and say how long it took."""
    numbers = [random.Random(cell.seed + i).randrange(100) for i in range(cell.workload["numbers"])]
    began = time.perf_counter()
    if cell.parameters["method"] == "builtin":
        total = sum(numbers)
    else:
        total = 0
        for number in numbers:
            total += number
    return {"seconds": time.perf_counter() - began, "total": total}
