import math

import pytest
import torch

from experiments import full_packed
from experiments.latent import (
    GivenLatent,
    LatentError,
    LatentIdentity,
    PositionLatent,
    TwoKeyLatent,
    draw,
    packed_rows,
)
from experiments.toys import toy

WIDTH = 8
KNOWN = [-0.128302693, 0.271786332, 0.169607833, 0.126902953]


def test_a_row_depends_on_seed_and_position_alone():
    """Any window onto the positions shows the same values, whatever was drawn before."""
    whole = draw(5, 0, 40, WIDTH)
    torch.manual_seed(0)
    assert torch.equal(draw(5, 17, 23, WIDTH), whole[17:23])
    assert torch.equal(draw(5, 0, 40, WIDTH), whole)
    assert not torch.equal(draw(6, 0, 40, WIDTH), whole)


def test_a_row_is_drawn_on_the_cpu_whatever_the_default_device():
    """A trainer may have made another device the default one."""
    with torch.device("meta"):
        found = draw(5, 17, 23, WIDTH)
    assert torch.equal(found, draw(5, 17, 23, WIDTH))


def test_known_values():
    """Pinned, so that another rule cannot slip in under the same name."""
    found = draw(1, 0, 2, 2).flatten().tolist()
    assert found == pytest.approx(KNOWN, abs=1e-7)


def test_the_distribution_is_the_truncated_normal():
    """Mean 0, the variance of a normal cut at 3 sigma, sigma^2 = 2/5, and never outside."""
    values = draw(3, 0, 4000, 64).double()
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    variance = 0.4 * (1 - 6 * density / math.erf(3 / math.sqrt(2)))
    assert float(values.mean()) == pytest.approx(0, abs=5e-3)
    assert float(values.var()) == pytest.approx(variance, rel=1e-2)
    assert float(values.abs().max()) <= 3 * math.sqrt(0.4)


def test_neighbouring_seeds_positions_and_columns_are_unrelated():
    base = draw(3, 0, 2000, 16).double()
    others = {
        "seed": draw(4, 0, 2000, 16).double(),
        "position": draw(3, 1, 2001, 16).double(),
        "column": base.roll(1, dims=1),
    }
    for other in others.values():
        assert abs(float(torch.corrcoef(torch.stack((base.flatten(), other.flatten())))[0, 1])) < 0.02


def test_two_keys_meet_at_the_prompts_end():
    latent = TwoKeyLatent(5, 9)
    rows = latent.rows(0, 10, 6, WIDTH)
    assert torch.equal(rows[:6], draw(5, 0, 6, WIDTH))
    assert torch.equal(rows[6:], draw(9, 6, 10, WIDTH))
    assert torch.equal(latent.rows(8, 10, 6, WIDTH), rows[8:])
    assert torch.equal(latent.rows(2, 4, 6, WIDTH), rows[2:4])


def test_identity_is_the_rule_and_what_decides_the_prompt():
    assert PositionLatent(5).identity(4) == LatentIdentity("position-v1", "5")
    assert TwoKeyLatent(5, 1).identity(4) == TwoKeyLatent(5, 2).identity(4)
    assert TwoKeyLatent(5, 1).identity(4) != PositionLatent(5).identity(4)


def test_a_given_table_is_identified_by_its_prompt_rows():
    table = draw(5, 0, 10, WIDTH)
    later, earlier = table.clone(), table.clone()
    later[7], earlier[2] = 0, 0
    same, other = GivenLatent(later), GivenLatent(earlier)
    assert GivenLatent(table).identity(6) == same.identity(6) != other.identity(6)
    assert GivenLatent(table).identity(6) != GivenLatent(table.double()).identity(6)


def test_a_table_can_be_watched_and_a_key_needs_no_watching():
    table = draw(5, 0, 10, WIDTH)
    assert [tensor is table for tensor in GivenLatent(table).tensors()] == [True]
    assert PositionLatent(5).tensors() == TwoKeyLatent(5, 1).tensors() == ()


def test_packing_keeps_every_sequences_own_rows():
    latents = [PositionLatent(5), TwoKeyLatent(5, 2), PositionLatent(5)]
    ranges = [(0, 7), (2, 5), (4, 9)]
    packed = packed_rows(latents, ranges, 4, WIDTH)
    alone = [latent.rows(*span, 4, WIDTH) for latent, span in zip(latents, ranges, strict=True)]
    assert torch.equal(packed, torch.cat(alone))


@pytest.mark.parametrize("table", [draw(5, 0, 9, WIDTH), draw(5, 0, 10, WIDTH + 1)])
def test_a_table_that_does_not_reach_is_refused(table):
    with pytest.raises(LatentError, match="given latent: expected 10 positions of width 8"):
        GivenLatent(table).rows(0, 10, 6, WIDTH)


@pytest.mark.parametrize(("start", "stop", "width"), [(-1, 3, 8), (4, 3, 8), (0, 2**20 + 1, 8), (0, 1, 0)])
def test_positions_and_widths_that_would_collide_are_refused(start, stop, width):
    with pytest.raises(LatentError):
        draw(1, start, stop, width)


def test_a_family_gets_the_latents_it_takes_and_no_others(small_group):
    with pytest.raises(LatentError, match="response 0: expected a latent"):
        full_packed.score_responses(toy("huginn"), torch.arange(3), small_group((2,)).responses, (2,))
    group = small_group((2,), latent=PositionLatent(1))
    with pytest.raises(LatentError, match="expected no latent"):
        full_packed.score_responses(toy("ouro"), torch.arange(3), group.responses, (3,))


@pytest.mark.parametrize("family", ["ouro", "nanbeige"])
def test_a_model_that_takes_no_latent_refuses_one(family):
    with pytest.raises(LatentError, match="starts from its embedding"):
        toy(family).readout_states(torch.arange(3), torch.arange(3), lambda call, q, k, v: q, (1,), torch.ones(3, 16))


@pytest.mark.parametrize("latent", [None, torch.ones(2, 16)])
def test_a_model_that_takes_a_latent_refuses_to_do_without(latent):
    with pytest.raises(LatentError, match=r"expected a latent of shape \[3, 16\]"):
        toy("huginn").readout_states(torch.arange(3), torch.arange(3), lambda call, q, k, v: q, (2,), latent)
