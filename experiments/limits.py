"""Says beforehand whether sharing the prompt pays.

`python -m experiments.limits MODEL --prompt P --response D --responses G` prints one line a schedule: its operations,
the limit of its speed-up over `full-packed`, and the bytes that autograd keeps at its fullest moment. MODEL is a
published name or a checkpoint folder. What is counted, and what is left out, stands in `costs`.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from experiments.costs import (
    PAYS_FROM,
    Config,
    Kept,
    LimitError,
    activation_bytes,
    describe,
    equal_wave,
    flops,
    kept_bytes,
    prelude_flops,
    work,
)
from experiments.errors import ExperimentError
from experiments.huginn import HuginnConfig
from experiments.objective import Supervision
from experiments.official import OFFICIAL, config_of

SCHEDULES = ("full-packed", "prefix-packed", "tree-packed")
LARGEST = {"prompt": 2**30, "response": 2**30, "responses": 2**20, "microbatch": 2**20, "wave": 2**20}
"""The largest value of every size, so that none takes long to count."""
HELP = "`python -m experiments.limits --help` gives the arguments"
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float32", "float64")}


def lines(
    config: Config,
    shape: tuple[int, int, int],
    microbatch: int,
    wave: int,
    supervision: Supervision,
    dtype: torch.dtype,
) -> list[str]:
    """Return the table, the wave that costs no memory, and last whether sharing pays, and for which latents.

    `shape` is P, D, G. Whole sequences run `microbatch` at once, suffixes `wave`.
    """
    prompt, response, responses = shape
    architecture, kept = describe(config, supervision), kept_bytes(config, supervision, dtype)
    sizes = {"full-packed": microbatch, "prefix-packed": wave, "tree-packed": wave}
    counted = {
        name: flops(architecture, work(name, prompt, [response] * responses, sizes[name])).total for name in SCHEDULES
    }
    table = [f"{'schedule':<34}{'at once':>8}{'TFLOP':>12}{'limit':>8}{'GB kept':>10}"]
    for name in SCHEDULES:
        ratio = counted["full-packed"] / counted[name]
        size = activation_bytes(config, kept, supervision, dtype, name, shape, sizes[name])
        table.append(f"{name:<34}{sizes[name]:>8}{counted[name] / 1e12:>12.4g}{ratio:>7.2f}x{size / 1e9:>10.3g}")
    table.append(_rematerialised(config, kept, supervision, dtype, shape, wave, counted["full-packed"]))
    boundary = architecture.boundary_elements * dtype.itemsize
    table.append(
        f"kept per token {kept.plain / 1e6:.3g} MB ({kept.rematerialised / 1e6:.3g} MB rematerialised), "
        f"keys and values per prompt token {boundary / 1e6:.3g} MB"
    )
    table.append(_equal(equal_wave(config, kept, supervision, dtype, shape, microbatch)))
    table.append(verdict(counted["full-packed"] / counted["prefix-packed"], shape))
    if isinstance(config, HuginnConfig) and responses > 1:
        apart = prelude_flops(config, supervision, prompt, [response] * responses).total
        table.append(
            "That needs one latent at the prompt: the same for all responses, or a two-key one. Where responses start "
            f"from latents of their own, the prelude alone is shared: up to {counted['full-packed'] / apart:.3f}x."
        )
    return table


def _equal(wave: int) -> str:
    """Say which wave of `prefix-packed` keeps no more bytes than `full-packed`."""
    if not wave:
        return "even one suffix at a time keeps more bytes than full-packed"
    return f"up to {wave} suffixes at once keep no more bytes than full-packed"


def verdict(limit: float, shape: tuple[int, int, int]) -> str:
    """Say in one sentence whether sharing pays, and if not, why."""
    prompt, response, responses = shape
    if responses < 2:
        return "Sharing does not pay: one response has nobody to share its prompt with; it is replayed whole."
    if limit >= PAYS_FROM:
        return f"Sharing can pay: up to {limit:.2f}x fewer operations than full replay."
    reason = (
        f"responses of {response} tokens outweigh a prompt of {prompt}" if response > prompt else "little is shared"
    )
    return f"Sharing does not pay: {reason}, so that even without any overhead the limit is {limit:.2f}x."


def _rematerialised(
    config: Config,
    kept: Kept,
    supervision: Supervision,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    wave: int,
    full: int,
) -> str:
    prompt, response, responses = shape
    again = {"rematerialise": True, "rematerialise_prefix": True}
    done = work("prefix-packed", prompt, [response] * responses, wave)
    total = flops(describe(config, supervision), done, **again).total
    size = activation_bytes(config, kept, supervision, dtype, "prefix-packed", shape, wave, **again)
    name = "prefix-packed, rematerialised"
    return f"{name:<34}{wave:>8}{total / 1e12:>12.4g}{full / total:>7.2f}x{size / 1e9:>10.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, print, and return the exit status: 2 for a model or shape that cannot be counted."""
    parser = argparse.ArgumentParser(prog="python -m experiments.limits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help=f"{', '.join(OFFICIAL)}, or a checkpoint folder")
    for name, text in (("prompt", "tokens of it"), ("response", "tokens of each"), ("responses", "how many")):
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument("--microbatch", type=int, default=4, help="whole sequences at once")
    parser.add_argument("--wave", type=int, help="suffixes at once; the whole group if left out")
    parser.add_argument("--supervision", choices=list(Supervision), default=Supervision.TERMINAL_ONLY)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    options = parser.parse_args(arguments)
    shape = (options.prompt, options.response, options.responses)
    wave = options.responses if options.wave is None else options.wave
    try:
        for name, largest in LARGEST.items():
            value = wave if name == "wave" else getattr(options, name)
            if not 1 <= value <= largest:
                raise LimitError(f"--{name}: expected a whole number from 1 to {largest}, found {value}")
        table = lines(
            config_of(options.model),
            shape,
            min(options.microbatch, options.responses),
            min(wave, options.responses),
            Supervision(options.supervision),
            DTYPES[options.dtype],
        )
    except ExperimentError as error:
        print(f"error: {error}\nhint: {getattr(error, 'hint', HELP)}", file=sys.stderr)
        return 2
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
