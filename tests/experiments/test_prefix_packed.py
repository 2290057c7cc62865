"""What only packed prefix passes can get wrong: negative controls for every family, and adjoints in fp32."""

from dataclasses import replace

import pytest
import torch

from experiments import attention, dense_oracle, exactness, flash, full_packed, prefix_packed, readout, suffixes
from experiments.batch import Group
from experiments.contract import ContractError, Options
from experiments.exactness import FP64_GATE, compare
from experiments.latent import PositionLatent
from experiments.objective import Supervision, published
from experiments.prefix import CapturingCausal, Cut, SharedPrefix

ALL = published(Supervision.ALL_LOOPS)


@pytest.fixture
def judged(case):
    model, group = case((3, 1, 5))
    truth = dense_oracle.evaluate(model, group, ALL).gradient

    def error(between=lambda shared: None, weights=None, group=group):
        """Run the phases in two waves, with something done between B and C; 0 where the gate passes."""
        model.zero_grad()
        shared = SharedPrefix(model, group, ALL.supervised_loops(model.loops))
        for wave in ((0, 1), (2,)):
            slices = ALL.token_weights(group.lengths) if weights is None else weights
            prefix_packed.open_wave(shared, wave, slices, ALL).backward()
        between(shared)
        shared.finish()
        agreement = compare(exactness.gradients(model), truth)
        return 0.0 if FP64_GATE.admits(agreement) else agreement.whole

    return model, group, error


class TestNegativeControls:
    """Each fault is small enough to train with, and fails the gate by far."""

    def test_the_harness_itself_passes(self, judged):
        assert judged[2]() == 0

    def test_dropped_first_response_adjoint(self, judged):
        def drop(shared):
            for leaf in shared.boundary.first:
                assert leaf.grad.any()
                leaf.grad = None

        assert judged[2](drop) > 1e-3

    def test_one_loops_key_and_value_adjoints_dropped(self, judged, family):
        error = judged[2]
        calls = {"ouro": slice(2, 4), "nanbeige": slice(0, 2), "huginn": slice(1, 3)}[family]

        def drop(shared):
            for leaf in (*shared.boundary.keys[calls], *shared.boundary.values[calls]):
                assert leaf.grad.any()
                leaf.grad = None

        assert error(drop) > 1e-4

    def test_weights_of_each_microbatch_alone(self, judged):
        _, group, error = judged
        alone = [*ALL.token_weights(group.lengths[:2]), *ALL.token_weights(group.lengths[2:])]
        assert error(weights=[weight / 2 for weight in alone]) > 1e-3

    def test_suffix_positions_off_by_one(self, judged, monkeypatch):
        right = suffixes.Suffixes.positions
        monkeypatch.setattr(suffixes.Suffixes, "positions", lambda self: right(self) + 1)
        assert judged[2]() > 1e-3

    def test_one_prompt_token_masked(self, judged, monkeypatch):
        right = attention.merged

        def masked(query, prefix_key, prefix_value, *own):
            keep = [0, *range(2, prefix_key.shape[0])]
            return right(query, prefix_key[keep], prefix_value[keep], *own)

        monkeypatch.setattr(attention, "merged", masked)
        assert judged[2]() > 1e-3

    def test_a_detached_log_sum_exp(self, judged, monkeypatch):
        """Autograd through the fused operators and the merge: the same loss, and a wrong gradient without an error."""
        monkeypatch.setattr(attention, "merged", naive)
        assert judged[2]() > 1e-3

    def test_a_detached_log_sum_exp_of_the_readout(self, judged, monkeypatch):
        monkeypatch.setattr(suffixes, "score", detached)
        assert judged[2]() > 1e-3

    @pytest.mark.parametrize("family", ["huginn"])  # the one that starts from a latent
    def test_a_wrong_latent(self, judged, family):
        _, group, error = judged
        responses = tuple(replace(response, latent=PositionLatent(18)) for response in group.responses)
        assert error(group=Group(group.prompt_P, responses)) > 1e-3

    @pytest.mark.parametrize("family", ["huginn"])  # the one that has a coda
    def test_a_coda_that_is_fed_back(self, judged, family):
        """In whole replay, whose attention does not count calls: the next loop starts from the coda's output."""
        model, group, _ = judged
        truth = dense_oracle.evaluate(model, group, ALL).gradient
        coda = model.transformer.coda[0]
        model.transformer.core_block[-1].register_forward_hook(lambda block, inputs, out: coda(out, *inputs[1:]))
        full_packed.accumulate(model, group, ALL.token_weights(group.lengths), ALL, microbatch=2)
        agreement = compare(exactness.gradients(model), truth)
        assert agreement.whole > 1e-3
        assert not FP64_GATE.admits(agreement)


def detached(states, head_VC, targets_N):
    """Right scores, whose normaliser is taken for a constant."""
    tables = [state_NC @ head_VC.T for state_NC in states]
    log_probs = [(table - table.logsumexp(-1, keepdim=True).detach()) for table in tables]
    picked = [rows.gather(1, targets_N[:, None]).squeeze(1) for rows in log_probs]
    return readout.Scores(torch.stack(picked, dim=1), -(log_probs[-1].exp() * log_probs[-1]).sum(-1))


def naive(query, prefix_key, prefix_value, key, value, segments):
    """Right outputs by the fused operators' own autograd, which knows nothing of their log-sum-exps."""

    def part(query, key, value, causal):
        heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal)
        return out.transpose(1, 2), lse.transpose(1, 2)

    rows = torch.split(torch.arange(query.shape[0]), list(segments.lengths))
    own = [part(query[None, r], key[None, r], value[None, r], True) for r in rows]
    behind = part(query[None], prefix_key[None], prefix_value[None], False)
    out, lse = (torch.cat(pieces, dim=1)[0] for pieces in zip(*own, strict=True))
    return flash.merge(behind[0][0], behind[1][0], out, lse)[0]


def test_adjoints_of_a_bf16_model_add_up_in_fp32(case):
    """32 equal suffixes, in as many waves, give 32 times the adjoint of one; a bf16 sum is off by thousandths."""
    model, one = case((3,), torch.bfloat16)
    many = Group(one.prompt_P, one.responses * 32)
    weights = ALL.token_weights(many.lengths)
    adjoints = []
    for group, waves in ((one, [[0]]), (many, [[index] for index in range(32)])):
        shared = SharedPrefix(model, group, range(model.loops))
        for wave in waves:
            prefix_packed.open_wave(shared, wave, weights[: len(group.responses)], ALL).backward()
        leaves = (shared.boundary.keys[0], shared.boundary.values[0], shared.boundary.first[0])
        assert all(leaf.dtype == torch.bfloat16 for leaf in leaves)
        adjoints.append([leaf.grad for leaf in leaves])
    for single, total in zip(*adjoints, strict=True):
        assert total.dtype == torch.float32
        assert float((total - 32 * single).norm()) <= 1e-5 * float(total.norm())


def test_the_boundary_is_not_a_copy(case):
    """Leaves share the storage of what the prompt's own graph keeps."""
    model, group = case()
    shared = SharedPrefix(model, group, range(model.loops), Options())
    outputs = shared._cut._outputs
    assert all(leaf.data_ptr() == out.data_ptr() for leaf, out in zip(shared._cut.leaves, outputs, strict=True))


def test_a_cut_sends_back_only_what_arrived():
    x = torch.ones(2, requires_grad=True)
    cut = Cut([x * 2, x * 3])
    cut.leaves[1].sum().backward()
    cut.backward()
    assert x.grad.tolist() == [3, 3]


def test_calls_out_of_order_are_refused():
    """A family that skips a call would pair keys with the wrong layer."""
    rows = torch.ones(2, 1, 4)
    capture = CapturingCausal()
    capture(0, rows, rows, rows)
    with pytest.raises(ContractError, match="expected call 1 next, found call 2"):
        capture(2, rows, rows, rows)
