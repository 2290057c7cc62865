"""GRPO-style training of a small looped model: `python -m experiments.examples.grpo`.

The task: repeat the prompt's last token. A group is one random prompt and 32 sampled answers; a token's reward
is 1 where it is right, an answer's advantage its standardised share of right tokens. Every update samples from the
current policy, scores the frozen first policy for the KL term, accumulates the full gradient of four groups with the
chosen schedule, and takes one AdamW step. The same seed gives the same rewards under every schedule.
"""

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments import full_packed, logical_batch
from experiments.attention import dot_product
from experiments.batch import Group, Response
from experiments.family import LoopedModel
from experiments.objective import Mean, Objective, Supervision
from experiments.schedules import SCHEDULES
from experiments.toys import VOCABULARY, toy

PROMPT_TOKENS, ANSWER_TOKENS, ANSWERS, GROUPS = 24, 4, 32, 4
LEARNING_RATE = 1e-2
OBJECTIVE = Objective(
    alpha=1.5,
    kl_coefficient=0.01,
    entropy_coefficient=0.003,
    supervision=Supervision.ALL_LOOPS,
    mean=Mean.TOKEN,
)


@dataclass(frozen=True, slots=True)
class Step:
    """What one update saw: the mean reward of its samples, before it, and its loss."""

    reward: float
    loss: float


def dense_causal(call: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
    """Causal attention over a batch of equally long rows; here T stands for [G, T]."""
    return dot_product(query_THE, key_TKE, value_TKE, causal=True)


@torch.no_grad()
def sample(model: LoopedModel, prompt_P: Tensor, generator: torch.Generator) -> Tensor:
    """Return ANSWERS answers of ANSWER_TOKENS tokens, [G, D], from the last loop's distribution."""
    tokens_GT = prompt_P.expand(ANSWERS, -1)
    for _ in range(ANSWER_TOKENS):
        positions_GT = torch.arange(tokens_GT.shape[1]).expand_as(tokens_GT)
        (state_GTC,) = model.readout_states(tokens_GT, positions_GT, dense_causal, (model.loops - 1,))
        chances_GV = (state_GTC[:, -1] @ model.head_VC.T).softmax(dim=-1)
        tokens_GT = torch.cat((tokens_GT, torch.multinomial(chances_GV, 1, generator=generator)), dim=1)
    return tokens_GT[:, len(prompt_P) :]


@torch.no_grad()
def reference_log_probs(reference: LoopedModel, prompt_P: Tensor, answers: Sequence[Tensor]) -> list[Tensor]:
    """Return the frozen policy's log-probability of every token, one [D] an answer."""
    blank = [torch.zeros(len(tokens_D)) for tokens_D in answers]
    unscored = [Response(tokens_D, zeros, zeros) for tokens_D, zeros in zip(answers, blank, strict=True)]
    scores = full_packed.score_responses(reference, prompt_P, unscored, (reference.loops - 1,))
    return list(torch.split(scores.log_probs_NS[:, 0], [len(tokens_D) for tokens_D in answers]))


def draw_group(model: LoopedModel, reference: LoopedModel, generator: torch.Generator) -> tuple[Group, float]:
    """Sample a group and return it with its mean reward."""
    prompt_P = torch.randint(VOCABULARY, (PROMPT_TOKENS,), generator=generator)
    answers_GD = sample(model, prompt_P, generator)
    rewards_G = (answers_GD == prompt_P[-1]).double().mean(dim=1)
    advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-6)
    answers = list(answers_GD)
    columns = zip(answers, advantages_G, reference_log_probs(reference, prompt_P, answers), strict=True)
    responses = [Response(tokens_D, a.expand(len(tokens_D)), log_probs_D) for tokens_D, a, log_probs_D in columns]
    return Group(prompt_P, tuple(responses)), float(rewards_G.mean())


def train(schedule: str, updates: int, *, seed: int = 5, model: LoopedModel | None = None) -> Iterator[Step]:
    """Train a model (in place; a toy Ouro if none is given) and yield every update."""
    model = model or toy("ouro", dtype=torch.float64)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(updates):
        groups, rewards = zip(*(draw_group(model, reference, generator) for _ in range(GROUPS)), strict=True)
        optimizer.zero_grad()
        found = logical_batch.accumulate(model, groups, OBJECTIVE, schedule=schedule, microbatch=ANSWERS)
        optimizer.step()
        yield Step(sum(rewards) / GROUPS, float(found.loss))


def main() -> None:
    """Train and print the reward."""
    parser = argparse.ArgumentParser(prog="python -m experiments.examples.grpo", description="Repeat the last token.")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="prefix-packed")
    parser.add_argument("--updates", type=int, default=150)
    options = parser.parse_args()
    if options.updates < 1:
        parser.error(f"argument --updates: expected at least one, found {options.updates}")
    torch.set_num_threads(1)
    window: list[float] = []
    for index, step in enumerate(train(options.schedule, options.updates), start=1):
        window.append(step.reward)
        if index % 10 == 0:
            mean = sum(window) / len(window)
            print(f"update {index:4}  reward {mean:.3f}  {'#' * round(40 * mean)}", flush=True)
            window.clear()


if __name__ == "__main__":
    main()
