"""What each schedule costs, counted from a configuration before anything runs.

Counted per pass over tokens, in floating-point operations (a multiply-accumulate is 2):

- projections: 2 forward and 4 backward a multiply-accumulate of every call and token, 2 more where the call is
  rematerialised; equal to torch's FLOP counter.
- readout: 8 * width * vocabulary a scored token and supervised loop (the backward pass computes logits again).
- attention: 14 * heads * head dimension a visible (query, key) pair and call, 4 more where rematerialised. torch's
  counter gives 0 for the fused CPU kernel and ignores causality, so pairs are enumerated instead.

Norms, rotations, activations and the optimizer are left out, so the ratio of two counts is a limit for kernels that
are equally good at both, not a prediction of time. The limit is about (P + D) / (P / G + D), at most min(G, 1 + P / D).

Bytes are what autograd keeps between forward and backward, counted on the meta device by running the real layers
there; the model, its gradients and what a kernel needs while it runs are not in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.batch import microbatches
from experiments.errors import ExperimentError
from experiments.family import LoopedModel
from experiments.huginn import Huginn, HuginnConfig
from experiments.nanbeige import Nanbeige, NanbeigeConfig
from experiments.objective import Supervision, published
from experiments.ouro import Ouro, OuroConfig

FORWARD, BACKWARD, READOUT = 2, 4, 8
ATTENTION, ATTENTION_FORWARD = 14, 4
PAYS_FROM = 1.10
"""The least limit of the speed-up that leaves anything after a second set of kernel launches."""
Config = OuroConfig | NanbeigeConfig | HuginnConfig


class LimitError(ExperimentError):
    """A schedule or shape that cannot be counted."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one token costs: `call_macs` multiply-accumulates in each of `calls`, and `other_macs` between them.

    `tail_macs` are those of the last product of a call that rematerialisation leaves out, because nothing after it
    needs its result. `boundary_elements` is what one prompt token exposes: keys and values of all calls.
    """

    calls: int
    call_macs: int
    other_macs: int
    tail_macs: int
    head_macs: int
    attention_width: int
    boundary_elements: int
    supervised: int


@dataclass(frozen=True, slots=True)
class Work:
    """How much of everything a schedule runs; `prompt_tokens` is the part of `tokens` in a shared prompt pass."""

    tokens: int
    prompt_tokens: int
    pairs: int
    prompt_pairs: int
    scored: int


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations of one gradient."""

    projections: int
    readout: int
    attention: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.projections + self.readout + self.attention


def describe(config: Config, supervision: Supervision) -> Architecture:
    """Count a family's call from its configuration."""
    supervised = len(published(supervision).supervised_loops(config.loops))
    width, inner = config.width, config.inner
    if isinstance(config, HuginnConfig):
        calls = config.prelude + config.loops * config.core + supervised * config.coda
        query_width = key_value_width = width
        other, tail = config.loops * 2 * width * width, 0
    else:
        calls = config.layers * config.loops
        query_width, key_value_width = config.heads * config.head_dim, config.key_value_heads * config.head_dim
        other, tail = 0, inner * width if isinstance(config, NanbeigeConfig) else 0
    return Architecture(
        calls=calls,
        call_macs=2 * width * query_width + 2 * width * key_value_width + 3 * width * inner,
        other_macs=other,
        tail_macs=tail,
        head_macs=width * config.vocabulary,
        attention_width=query_width,
        boundary_elements=2 * key_value_width * calls,
        supervised=supervised,
    )


def work(schedule: str, prompt: int, lengths: Sequence[int], microbatch: int) -> Work:
    """Count what a schedule runs for one group of responses of the given lengths; empty ones run nothing."""
    filled = [length for length in lengths if length]
    scored = sum(filled)
    replayed = sum(prompt + length - 1 for length in filled)
    replayed_pairs = sum((prompt + length - 1) * (prompt + length) // 2 for length in filled)
    if schedule in ("full-serial", "full-packed") or (schedule == "prefix-packed" and len(filled) < 2):
        return Work(replayed, 0, replayed_pairs, 0, scored)
    suffix = sum(length - 1 for length in filled)
    suffix_pairs = sum((length - 1) * prompt + (length - 1) * length // 2 for length in filled)
    prompt_pairs = prompt * (prompt + 1) // 2
    if schedule in ("prefix-serial", "prefix-packed"):
        return Work(prompt + suffix, prompt, prompt_pairs + suffix_pairs, prompt_pairs, scored)
    if schedule == "tree-packed":
        passes = sum(any(lengths[index] for index in part) for part in microbatches(len(lengths), microbatch))
        return Work(passes * prompt + suffix, 0, passes * prompt_pairs + suffix_pairs, 0, scored)
    raise LimitError(f"expected a schedule, found {schedule!r}")


def flops(
    architecture: Architecture, done: Work, *, rematerialise: bool = False, rematerialise_prefix: bool = False
) -> Flops:
    """Count floating-point operations of one gradient."""
    again, pairs_again = 0, 0
    if rematerialise:
        again, pairs_again = done.tokens - done.prompt_tokens, done.pairs - done.prompt_pairs
    if rematerialise_prefix:
        again, pairs_again = again + done.prompt_tokens, pairs_again + done.prompt_pairs
    call = architecture.calls * architecture.call_macs
    kept = architecture.calls * (architecture.call_macs - architecture.tail_macs)
    return Flops(
        projections=(FORWARD + BACKWARD) * (call + architecture.other_macs) * done.tokens + FORWARD * kept * again,
        readout=READOUT * architecture.head_macs * architecture.supervised * done.scored,
        attention=architecture.attention_width
        * architecture.calls
        * (ATTENTION * done.pairs + ATTENTION_FORWARD * pairs_again),
    )


def prelude_flops(config: HuginnConfig, supervision: Supervision, prompt: int, lengths: Sequence[int]) -> Flops:
    """Count full replay behind a prelude that runs over the prompt once, for groups with distinct latents."""
    whole = describe(config, supervision)
    prelude = replace(whole, calls=config.prelude, other_macs=0, supervised=0)
    replayed, shared = work("full-packed", prompt, lengths, 1), work("prefix-serial", prompt, lengths, 1)
    full, without, once = flops(whole, replayed), flops(prelude, replayed), flops(prelude, shared)
    return Flops(
        projections=full.projections - without.projections + once.projections,
        readout=full.readout,
        attention=full.attention - without.attention + once.attention,
    )


def speed_up_limit(config: Config, prompt: int, response: int, responses: int, supervision: Supervision) -> float:
    """Return full replay's operations over those of a shared prompt pass, for equally long responses."""
    architecture, lengths = describe(config, supervision), [response] * responses
    full = flops(architecture, work("full-packed", prompt, lengths, responses))
    return full.total / flops(architecture, work("prefix-packed", prompt, lengths, responses)).total


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that autograd keeps for one more token: all, and with every call rematerialised."""

    plain: int
    rematerialised: int


def kept_bytes(config: Config, supervision: Supervision, dtype: torch.dtype) -> Kept:
    """Count what the layers keep per token, by running them on the meta device at two lengths."""
    with torch.device("meta"):
        model = _build(config).to(dtype)
    loops = published(supervision).supervised_loops(config.loops)
    found = []
    for rematerialise in (False, True):
        short, long = (_kept(model, loops, tokens, rematerialise) for tokens in (8, 16))
        found.append((long - short) // 8)
    return Kept(*found)


def activation_bytes(
    config: Config,
    kept: Kept,
    supervision: Supervision,
    dtype: torch.dtype,
    schedule: str,
    shape: tuple[int, int, int],
    microbatch: int,
    *,
    rematerialise: bool = False,
    rematerialise_prefix: bool = False,
) -> int:
    """Return the bytes kept at the fullest moment of a schedule, for P, D, G in `shape`.

    A shared prompt pass keeps its graph during every wave, and an fp32 (or wider) adjoint of its keys and values;
    rematerialised, it still keeps keys and values themselves, which the waves read.
    """
    prompt, response, responses = shape
    alive = min(microbatch, responses)
    by_wave = kept.rematerialised if rematerialise else kept.plain
    if schedule == "full-serial":
        return (prompt + response - 1) * by_wave
    if schedule == "full-packed" or (schedule == "prefix-packed" and responses < 2):
        return alive * (prompt + response - 1) * by_wave
    if schedule == "tree-packed":
        return (prompt + alive * (response - 1)) * by_wave
    elements = describe(config, supervision).boundary_elements
    adjoints = elements * max(dtype.itemsize, torch.float32.itemsize)
    by_prompt = kept.rematerialised + elements * dtype.itemsize if rematerialise_prefix else kept.plain
    return prompt * (by_prompt + adjoints) + alive * (response - 1) * by_wave


def equal_wave(
    config: Config,
    kept: Kept,
    supervision: Supervision,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    microbatch: int,
) -> int:
    """Return the most responses that `prefix-packed` can run at once and keep no more bytes than `full-packed`.

    `microbatch` is how many whole sequences `full-packed` runs at once. 0 where even one response keeps more.
    """
    prompt, response, responses = shape

    def size(schedule: str, wave: int) -> int:
        return activation_bytes(config, kept, supervision, dtype, schedule, (prompt, response, responses), wave)

    first, most = size("prefix-packed", 1), size("full-packed", microbatch)
    if first > most:
        return 0
    step = (response - 1) * kept.plain
    return min(1 + (most - first) // step, responses) if step else responses


def _build(config: Config) -> LoopedModel:
    if isinstance(config, OuroConfig):
        return Ouro(config)
    return Nanbeige(config) if isinstance(config, NanbeigeConfig) else Huginn(config)


def _kept(model: LoopedModel, loops: Sequence[int], tokens: int, rematerialise: bool) -> int:
    """Return the bytes of all distinct storages that one forward pass over `tokens` keeps, parameters apart."""
    owned = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            storages[storage._cdata] = storage
        return tensor

    places = torch.arange(tokens, device="meta")
    width = model.head_VC.shape[1]
    latent = torch.empty(tokens, width, device="meta", dtype=model.head_VC.dtype) if model.takes_latent else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # While hooks are nested, the inner ones of a rematerialised call take its tensors and these get its inputs.
        states = model.readout_states(places, places, _fused, loops, latent, rematerialise=rematerialise)
    total = sum(storage.nbytes() for storage in storages.values())
    del states
    return total


def _fused(call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
    out: Tensor = _FusedShape.apply(query_THE, key_TKE, value_TKE)  # type: ignore[no-untyped-call]
    return out


class _FusedShape(torch.autograd.Function):
    """What a fused attention kernel keeps, without computing anything."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        lse = torch.empty(query.shape[:-1], device=query.device, dtype=torch.promote_types(query.dtype, torch.float32))
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
