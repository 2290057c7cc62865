"""A first look at a CUDA device: exactness in fp32 and bf16, then time and memory at a real layer shape.

`python -m experiments.gpu_check FOLDER...` judges the schedules on folders of published results, compares the fused
suffix attention and compiled FlexAttention with a textbook softmax in fp64 for head dimensions 96 and 128 with and
without shared heads, and with `--time` prints a table at Ouro's layer shape (six physical layers, four loops, bf16,
terminal supervision) for P/D/G 2048/512/16 and 8192/512/16. Prints one JSON object a line; exits with 1 where a gate
fails. It measures one process and judges no speed.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from experiments import costs, main_gradients, reference
from experiments.attention import MergedPrefixed, PrefixedCausal, suffix_mask
from experiments.batch import Group, Response
from experiments.errors import ExperimentError
from experiments.family import Attend
from experiments.flex import FlexPrefixed
from experiments.objective import Supervision, published
from experiments.official import config_of
from experiments.ouro import Ouro, OuroConfig
from experiments.schedules import SCHEDULES

HEADS = ((16, 16, 128), (48, 8, 128), (55, 55, 96))
"""Query heads, key/value heads and head dimension of the three published models."""
SHAPES = ((2048, 512, 16), (8192, 512, 16))
ARMS = (("full-packed", 4), ("prefix-packed", 4), ("prefix-packed", 16), ("tree-packed", 4), ("tree-packed", 16))
ATTENTION_RATIO_MAX = 1.5
"""The most that a fused form may round more than the plain masked softmax in the same dtype."""
OBJECTIVE = published(Supervision.TERMINAL_ONLY)
Prefixed = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int]], Attend]


def attention_errors(kind: Prefixed, heads: tuple[int, int, int], dtype: torch.dtype) -> list[float]:
    """Return relative L2 errors of output and five gradients against fp64, for ragged suffixes behind 700 keys."""
    lengths, prefix = (130, 1, 257, 64), 700
    generator = torch.Generator("cuda").manual_seed(1)
    query_heads, shared, dim = heads
    rows = sum(lengths)
    counts = ((rows, query_heads), (prefix, shared), (prefix, shared), (rows, shared), (rows, shared))
    parts = [torch.randn(*count, dim, generator=generator, device="cuda").to(dtype) for count in counts]
    grad = torch.randn(rows, query_heads, dim, generator=generator, device="cuda").to(dtype)
    results = []
    for exact in (False, True):
        leaves = [part.double().requires_grad_() if exact else part.clone().requires_grad_() for part in parts]
        query, prefix_key, prefix_value, key, value = leaves
        attend = kind([prefix_key], [prefix_value], lengths)
        out = _textbook(leaves, lengths) if exact else attend(0, query, key, value)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
    pairs = zip(*results, strict=True)
    return [float((found.double() - truth).norm() / truth.norm()) for found, truth in pairs]


def _textbook(parts: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    query, prefix_key, prefix_value, key, value = parts
    repeats = query.shape[1] // key.shape[1]
    keys = torch.cat((prefix_key, key)).repeat_interleave(repeats, dim=1)
    values = torch.cat((prefix_value, value)).repeat_interleave(repeats, dim=1)
    scores = torch.einsum("qhe,khe->hqk", query, keys) * query.shape[-1] ** -0.5
    hidden = ~suffix_mask(prefix_key.shape[0], lengths, query.device)
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def check_attention() -> bool:
    """Print one line a head shape; return whether the fused forms round about as the plain one does."""
    passed = True
    for heads in HEADS:
        plain = attention_errors(PrefixedCausal, heads, torch.bfloat16)
        for name, kind in (("merged", MergedPrefixed), ("flex", FlexPrefixed)):
            found = attention_errors(kind, heads, torch.bfloat16)
            admitted = all(a <= ATTENTION_RATIO_MAX * b for a, b in zip(found, plain, strict=True))
            print(json.dumps({"attention": name, "heads": heads, "errors": found, "plain": plain, "passed": admitted}))
            passed = passed and admitted
    return passed


def layer_shape() -> OuroConfig:
    """Return Ouro-1.4B with six physical layers."""
    config = config_of("Ouro-1.4B")
    assert isinstance(config, OuroConfig)
    return replace(config, layers=6)


def draw(config: OuroConfig, shape: tuple[int, int, int]) -> tuple[Ouro, Group]:
    """Return a random bf16 model and group on the device."""
    prompt, response, responses = shape
    generator = torch.Generator("cuda").manual_seed(2)
    with torch.device("cuda"):
        model = Ouro(config).to(torch.bfloat16)
    tokens = torch.randint(config.vocabulary, (prompt + response * responses,), generator=generator, device="cuda")
    blank = torch.full((response,), -10.0, device="cuda")
    answers = torch.split(tokens[prompt:], response)
    advantages = torch.randn(responses, generator=generator, device="cuda")
    made = (Response(answer, a.expand(response), blank) for answer, a in zip(answers, advantages, strict=True))
    return model, Group(tokens[:prompt], tuple(made))


def timings(shape: tuple[int, int, int]) -> Iterator[dict[str, object]]:
    """Yield seconds and peak bytes of each arm, and its share of the operations' limit; the median of three."""
    config = layer_shape()
    model, group = draw(config, shape)
    main_gradients.widen(model)
    weights = [part.cuda() for part in OBJECTIVE.token_weights(group.lengths)]
    architecture = costs.describe(config, Supervision.TERMINAL_ONLY)
    first: tuple[float, int] | None = None
    for schedule, microbatch in ARMS:
        seconds = []
        for _ in range(4):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            resident = torch.cuda.memory_allocated()
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            SCHEDULES[schedule](model, group, weights, OBJECTIVE, microbatch=microbatch)
            end.record()
            torch.cuda.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        middle = sorted(seconds[1:])[1]
        count = costs.flops(architecture, costs.work(schedule, shape[0], group.lengths, microbatch)).total
        first = first or (middle, count)
        speed_up, limit = first[0] / middle, first[1] / count
        yield {
            "shape": shape,
            "schedule": schedule,
            "microbatch": microbatch,
            "seconds": middle,
            "speed_up": speed_up,
            "limit": limit,
            "share_of_limit": speed_up / limit,
            "peak_bytes": torch.cuda.max_memory_allocated() - resident,
            "tflop_per_second": count / middle / 1e12,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; return 0, 1 where a gate fails, 2 without a CUDA device or for an unusable folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu_check", description="Check a CUDA device.")
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: expected a CUDA device that torch can use, found no CUDA device", file=sys.stderr)
        return 2
    passed = check_attention()
    try:
        for folder in options.folders:
            for dtype in (torch.float32, torch.bfloat16):
                passed = reference.judge(folder, list(SCHEDULES), dtype, "cuda", 4) and passed
    except ExperimentError as error:
        print(f"error: {error}\nhint: {getattr(error, 'hint', reference.HELP)}", file=sys.stderr)
        return 2
    for shape in SHAPES if options.time else ():
        for row in timings(shape):
            print(json.dumps(row), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
