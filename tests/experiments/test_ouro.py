import torch

from experiments.attention import SegmentedCausal

NARROW = (torch.float32, torch.float16, torch.bfloat16)


def test_an_fp64_model_computes_in_fp64_throughout(small_model):
    """Dtype purity: no intermediate of an fp64 forward pass, norms and rotation included, is narrower."""
    narrow = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            results = result if isinstance(result, tuple | list) else (result,)
            if any(isinstance(part, torch.Tensor) and part.dtype in NARROW for part in results):
                narrow.append(str(function))
            return result

    tokens, positions = torch.arange(5), torch.arange(5)
    model = small_model(torch.float64)
    with Watch():
        model.readout_states(tokens, positions, SegmentedCausal([5]), (0, 1, 2))
    assert narrow == []


def test_an_fp64_state_keeps_more_than_fp32_digits(small_model):
    """The same parameters in fp32 agree with fp64 to fp32 rounding and differ beyond it."""
    exact, rounded = small_model(torch.float64), small_model(torch.float32)
    rounded_up = rounded.to(torch.float64)
    exact.load_state_dict(rounded_up.state_dict())
    rounded = rounded_up.to(torch.float32)
    tokens, positions = torch.arange(5), torch.arange(5)
    wide = exact.readout_states(tokens, positions, SegmentedCausal([5]), (2,))[0]
    narrow = rounded.readout_states(tokens, positions, SegmentedCausal([5]), (2,))[0]
    error = float((wide - narrow).detach().abs().max())
    assert 1e-9 < error < 1e-4


def test_calls_are_numbered_in_the_order_in_which_they_run(small_model):
    """Every layer asks for attention once in every loop, with key/value heads as configured."""
    model, seen = small_model(), []

    def attend(call, query_THE, key_TKE, value_TKE):
        seen.append((call, query_THE.shape, key_TKE.shape, value_TKE.shape))
        return query_THE

    model.readout_states(torch.arange(5), torch.arange(5), attend, (2,))
    assert [entry[0] for entry in seen] == list(range(6))
    assert {entry[1:] for entry in seen} == {((5, 4, 4), (5, 2, 4), (5, 2, 4))}


def test_only_the_positions_of_keys_relative_to_queries_matter(small_model):
    """Rotation is relative: moving every position by the same amount changes nothing."""
    model, tokens = small_model(), torch.arange(6)
    here = model.readout_states(tokens, torch.arange(6), SegmentedCausal([6]), (2,))[0]
    there = model.readout_states(tokens, torch.arange(6) + 900, SegmentedCausal([6]), (2,))[0]
    shifted = model.readout_states(tokens, torch.arange(6) * 2, SegmentedCausal([6]), (2,))[0]
    torch.testing.assert_close(there, here, atol=1e-11, rtol=0)
    assert float((shifted - here).detach().abs().max()) > 1e-3


def test_shared_heads_equal_repeated_heads(small_model):
    """Grouped-query attention is the same as repeating each key/value head for its query heads."""
    shared, repeated = small_model(key_value_heads=2), small_model(key_value_heads=4)
    state = shared.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16)
    repeated.load_state_dict(state)
    tokens, positions = torch.arange(6), torch.arange(6)
    torch.testing.assert_close(
        shared.readout_states(tokens, positions, SegmentedCausal([6]), (2,))[0],
        repeated.readout_states(tokens, positions, SegmentedCausal([6]), (2,))[0],
        atol=1e-13,
        rtol=0,
    )


def test_a_later_token_never_reaches_an_earlier_state(small_model):
    """Causality, over all loops."""
    model, tokens = small_model(), torch.arange(6)
    before = model.readout_states(tokens, torch.arange(6), SegmentedCausal([6]), (2,))[0]
    tokens[4] = 11
    after = model.readout_states(tokens, torch.arange(6), SegmentedCausal([6]), (2,))[0]
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


def test_the_gate_is_frozen(small_model):
    """The exit gate takes no part in a fixed-depth objective, so an optimizer must not see it."""
    frozen = {name for name, parameter in small_model().named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
