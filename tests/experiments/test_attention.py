"""The fused, merged form against the plain masked one and against a textbook softmax, in every shape that occurs."""

import pytest
import torch

from experiments import attention, dense_oracle, flash
from experiments.attention import MergedPrefixed, PrefixedCausal, SegmentedCausal, TreeCausal, prefixed
from experiments.exactness import FP64_GATE, compare, gradients
from experiments.flex import FlexPrefixed
from experiments.objective import Supervision, published
from experiments.schedules import SCHEDULES

SHAPES = [
    # prefix, suffix lengths, query heads, key/value heads, head dimension
    (5, (3,), 4, 4, 8),
    (5, (3, 3, 3), 4, 2, 8),
    (1, (1,), 2, 1, 4),
    (7, (1, 4, 2, 6), 6, 2, 16),
    (40, (9, 1, 17), 3, 3, 96),
    (33, (5, 5), 8, 2, 128),
]


def draw(prefix, lengths, heads, shared, dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(prefix + dim)

    def tensor(rows, count):
        return torch.randn(rows, count, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    rows = sum(lengths)
    return (
        [
            tensor(rows, heads),
            tensor(prefix, shared),
            tensor(prefix, shared),
            tensor(rows, shared),
            tensor(rows, shared),
        ],
        torch.randn(rows, heads, dim, generator=generator, dtype=torch.float64).to(dtype),
    )


def textbook(parts, lengths):
    """Every score, a mask and a softmax, in fp64, without any of the code under test."""
    query, prefix_key, prefix_value, key, value = (part.double() for part in parts)
    repeats = query.shape[1] // key.shape[1]
    keys = torch.cat((prefix_key, key)).repeat_interleave(repeats, dim=1)
    values = torch.cat((prefix_value, value)).repeat_interleave(repeats, dim=1)
    scores = torch.einsum("qhe,khe->hqk", query, keys) / query.shape[-1] ** 0.5
    prefix, row = prefix_key.shape[0], 0
    visible = torch.zeros(scores.shape[1:], dtype=torch.bool)
    visible[:, :prefix] = True
    for length in lengths:
        for place in range(length):
            visible[row + place, prefix + row : prefix + row + place + 1] = True
        row += length
    return torch.einsum("hqk,khe->qhe", scores.masked_fill(~visible, -torch.inf).softmax(-1), values)


def attend(kind, parts, lengths):
    query, prefix_key, prefix_value, key, value = parts
    return kind([prefix_key], [prefix_value], lengths)(0, query, key, value)


def errors(found, expected):
    found, expected = ([part.detach() for part in parts] for parts in (found, expected))
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)]


@pytest.fixture(params=["kernels", "one call"])
def form(request, monkeypatch):
    """Shapes of any size go through the kernels that large ones take, then through the one call of small ones."""
    monkeypatch.setattr(attention, "SCORES_MAX", 0 if request.param == "kernels" else 2**30)
    monkeypatch.setattr(attention, "COPIED_MAX", 2**30)
    return request.param


@pytest.mark.parametrize("kind", [MergedPrefixed, PrefixedCausal])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_all_gradients_equal_the_textbook(kind, shape, form):
    """fp64: output, and the gradients of queries, prefix keys and values, own keys and values."""
    parts, weights = draw(*shape)
    expected = textbook(parts, shape[1])
    truth = torch.autograd.grad((expected * weights).sum(), parts)
    out = attend(kind, parts, shape[1])
    found = torch.autograd.grad((out * weights).sum(), parts)
    assert max(errors([out, *found], [expected, *truth])) < 2e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_form_rounds_no_worse_than_the_plain_one(shape, dtype, form):
    """Against fp64 of the same operands: within a small factor of what one masked softmax loses."""
    parts, weights = draw(*shape, dtype)
    exact = textbook(parts, shape[1])
    truth = torch.autograd.grad((exact * weights.double()).sum(), parts)
    measured = []
    for kind in (MergedPrefixed, PrefixedCausal):
        out = attend(kind, parts, shape[1])
        found = torch.autograd.grad((out * weights).sum(), parts)
        measured.append(errors([out, *found], [exact, *truth]))
    floor = 3e-7 if dtype == torch.float32 else 4e-3
    for merged, plain in zip(*measured, strict=True):
        assert merged <= 2 * plain + floor


def test_a_detached_log_sum_exp_is_caught():
    """Negative control: autograd through the merge, each part with its own log-sum-exp, has a wrong query gradient."""
    shape = (7, (3, 5), 4, 2, 8)
    parts, weights = draw(*shape)
    query, prefix_key, prefix_value, key, value = parts
    truth = torch.autograd.grad((textbook(parts, shape[1]) * weights).sum(), parts)

    def part(keys, values, mask):
        scores = torch.einsum("qhe,khe->hqk", query, keys.repeat_interleave(2, dim=1)) / 8**0.5
        scores = scores.masked_fill(~mask, -torch.inf)
        out = torch.einsum("hqk,khe->qhe", scores.softmax(-1), values.repeat_interleave(2, dim=1))
        return out, scores.logsumexp(-1).mT.detach()

    mask = attention.suffix_mask(7, shape[1], torch.device("cpu"))
    out, _ = flash.merge(*part(prefix_key, prefix_value, mask[:, :7]), *part(key, value, mask[:, 7:]))
    assert max(errors([out], [textbook(parts, shape[1])])) < 1e-14
    wrong = errors(torch.autograd.grad((out * weights).sum(), parts), truth)
    assert wrong[0] > 1e-2
    assert wrong[1] > 1e-2
    assert wrong[2] < 1e-13


def test_a_part_without_keys_adds_nothing():
    """Its log-sum-exp is -inf; the merge is the other part, not NaN."""
    out, lse = torch.ones(2, 3, 4, dtype=torch.float64), torch.full((2, 3), 0.5, dtype=torch.float64)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (flash.merge(out, lse, *nothing), flash.merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


@pytest.mark.parametrize("lengths", [(4,), (3, 3), (2, 5, 1)])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2)])
def test_a_tree_is_its_trunk_and_its_branches(lengths, heads, shared, form, monkeypatch):
    """The prompt's rows are plain causal attention, a suffix's rows those behind a prefix; fused and plain agree."""
    generator = torch.Generator().manual_seed(4)
    rows = 6 + sum(lengths)
    packed = [
        torch.randn(rows, count, 8, generator=generator, dtype=torch.float64) for count in (heads, shared, shared)
    ]
    fused = TreeCausal(6, lengths)(0, *packed)
    trunk = SegmentedCausal([6])(0, *(part[:6] for part in packed))
    query, key, value = packed
    branches = PrefixedCausal([key[:6]], [value[:6]], lengths)(0, query[6:], key[6:], value[6:])
    torch.testing.assert_close(fused, torch.cat((trunk, branches)), atol=1e-14, rtol=0)
    monkeypatch.setattr(flash, "supports", lambda query: False)
    torch.testing.assert_close(TreeCausal(6, lengths)(0, *packed), fused, atol=1e-14, rtol=0)
    assert isinstance(prefixed([key[:6]], [value[:6]], lengths), PrefixedCausal)


def test_the_fused_form_is_used_where_it_can_be():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert isinstance(prefixed([torch.ones(2, 1, 4, dtype=dtype)], [torch.ones(2, 1, 4)], [1]), MergedPrefixed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_gradient_of_second_order_is_refused(form, dtype):
    """The fused backward has no derivative; asking for one is an error, never a wrong number."""
    parts, weights = draw(5, (3,), 4, 4, 8, dtype)
    for kind in (MergedPrefixed, PrefixedCausal):
        out = attend(kind, parts, (3,))
        weights.requires_grad_()
        (first,) = torch.autograd.grad((out * weights).sum(), parts[:1], create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiate twice|derivative for .* is not implemented"):
            first.sum().backward()


@pytest.mark.parametrize(
    ("shape", "dtype", "one_call"),
    [
        ((24, (3,) * 4, 2, 2, 4), torch.float32, True),
        ((256, (7,) * 4, 4, 2, 32), torch.float32, True),
        ((24, (3,) * 4, 2, 2, 4), torch.bfloat16, False),  # prefix gradients of each wave would be rounded
        ((257, (7,) * 32, 2, 2, 4), torch.float64, False),  # too many masked scores
        ((513, (1,), 1, 1, 128), torch.float32, False),  # too much to copy
    ],
)
def test_only_small_shapes_go_through_one_call(shape, dtype, one_call, monkeypatch):
    """The rule is one of size: a large prefix is not copied, and masked scores do not grow with a wave's square."""
    joined = []
    right = attention.dot_product
    monkeypatch.setattr(attention, "dot_product", lambda *parts, **how: joined.append(1) or right(*parts, **how))
    parts, _ = draw(*shape, dtype)
    attend(MergedPrefixed, parts, shape[1])
    assert bool(joined) is one_call


@pytest.mark.parametrize("lengths", [(2, 5, 1), (4, 4), (6,)])
def test_segments_see_nothing_of_each_other(lengths, form):
    """Ragged and equal segments, by kernels or by one masked call: what each would be alone."""
    generator = torch.Generator().manual_seed(5)
    packed = [torch.randn(sum(lengths), count, 8, generator=generator, dtype=torch.float64) for count in (4, 2, 2)]
    alone = [
        SegmentedCausal([len(part[0])])(0, *part) for part in zip(*(p.split(lengths) for p in packed), strict=True)
    ]
    torch.testing.assert_close(SegmentedCausal(lengths)(0, *packed), torch.cat(alone), atol=1e-14, rtol=0)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_attention_on_a_cpu_is_rounded_once(masked, dtype):
    """The output is the fp64 result of the same operands, rounded; torch's own bf16 kernel rounds probabilities too."""
    generator = torch.Generator().manual_seed(6)
    parts = [torch.randn(2, 70, count, 16, generator=generator).to(dtype).requires_grad_() for count in (4, 2, 2)]
    how = {"mask": attention.suffix_mask(0, (30, 40), torch.device("cpu"))} if masked else {"causal": True}
    exact = attention.dot_product(*(part.double() for part in parts), **how)
    found = attention.dot_product(*parts, **how)
    assert found.dtype == dtype
    assert (found.double() - exact).norm() <= 1.001 * (exact.to(dtype).double() - exact).norm()
    grad = torch.randn(exact.shape, generator=generator).to(dtype)
    truth = torch.autograd.grad(exact, parts, grad.double())
    assert max(errors(torch.autograd.grad(found, parts, grad), truth)) < torch.finfo(dtype).eps


@pytest.mark.parametrize("schedule", ["full-packed", "prefix-packed", "tree-packed"])
def test_schedules_are_exact_whatever_form_their_attention_takes(case, schedule, form):
    model, group = case()
    objective = published(Supervision.ALL_LOOPS)
    truth = dense_oracle.evaluate(model, group, objective).gradient
    SCHEDULES[schedule](model, group, objective.token_weights(group.lengths), objective, microbatch=2)
    assert FP64_GATE.admits(compare(gradients(model), truth))


@pytest.mark.parametrize("lengths", [(3, 3), (2, 5, 1)])
def test_spreading_segments_is_undone(lengths):
    segments = flash.Segments(lengths, torch.device("cpu"))
    rows = torch.arange(1.0, 1 + 2 * sum(lengths)).view(-1, 2)
    spread = segments.spread(rows)
    assert spread.shape == (len(lengths), max(lengths), 2)
    assert torch.equal(segments.gather(spread), rows)
    assert float(spread.sum()) == float(rows.sum())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_flex_mask_is_the_same_rule(shape):
    """Uncompiled and forward only, which is what a CPU has: padding, owners and causality of the block mask."""
    parts, _ = draw(*shape)
    query, prefix_key, prefix_value, key, value = (part.detach() for part in parts)
    out = FlexPrefixed([prefix_key], [prefix_value], shape[1], compiled=False)(0, query, key, value)
    assert max(errors([out], [textbook(parts, shape[1])])) < 1e-14
