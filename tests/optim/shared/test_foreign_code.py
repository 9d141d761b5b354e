"""The optimizers in other people's code: moved and reset state, changed weights, autocast, dtypes, names, layouts."""

import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muown_train.optim import SOAP, Combined, Lion, Muon, Muown, MuownSign, NorMuon, NorMuown

EVERY = (Muon, Muown, NorMuon, NorMuown, MuownSign, Lion, SOAP)
REPARAMETERIZED = (Muown, NorMuown, MuownSign)
each = pytest.mark.parametrize("kind", EVERY)


def make_parameter(*shape, seed=0, dtype=torch.float32):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def take_steps(optimizer, seeds, scale=1.0):
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = scale * torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
        optimizer.step()


def freeze(optimizer):
    """Set every learning rate of the optimizer to 0."""
    for group in optimizer.param_groups:
        group.update({key: 0.0 for key in ("lr", "magnitude_lr") if key in group})


# --- state follows its parameter, and is made anew where it was removed


@each
@pytest.mark.parametrize("steps", [0, 2])
def test_state_follows_the_parameter_to_another_dtype(kind, steps):
    model = torch.nn.Linear(6, 8, bias=False)
    optimizer = kind(model.parameters(), lr=0.01)
    take_steps(optimizer, range(steps))
    model.to(torch.float64)
    take_steps(optimizer, [7])
    fresh = optimizer.create_state(model.weight.detach(), optimizer.param_groups[0])
    state = optimizer.state[model.weight]
    assert {key: s.dtype for key, s in state.items()} == {key: s.dtype for key, s in fresh.items()}
    assert kind is Lion or state["step"] == steps + 1


@each
@pytest.mark.parametrize("steps", [0, 2])
def test_state_follows_the_parameter_to_another_device(kind, steps):
    """The device "meta" stands for another one: it has shapes and places, but no numbers."""
    if kind is SOAP:
        pytest.skip("its decompositions look at numbers")
    p = make_parameter(8, 6)
    optimizer = kind([p], lr=0.01)
    take_steps(optimizer, range(steps))
    saved = optimizer.state_dict()
    moved = torch.nn.Parameter(p.detach().to("meta"))  # a parameter cannot become one on "meta" itself
    optimizer.param_groups[0]["params"] = [moved]
    if steps:
        optimizer.state = {moved: optimizer.state[p]}
    moved.grad = torch.empty_like(moved)
    optimizer.step()
    assert all(s.is_meta for key, s in optimizer.state[moved].items() if key != "step")
    if steps:
        optimizer.load_state_dict(saved)
        assert all(s.is_meta for key, s in optimizer.state[moved].items() if key != "step")


@each
@pytest.mark.parametrize("reset", ["clear", "delete", "assign", "replace"])
def test_removed_state_is_made_anew(kind, reset):
    p = make_parameter(8, 6)
    optimizer = kind([p], lr=0.01)
    take_steps(optimizer, range(3))
    if reset == "clear":
        optimizer.state.clear()
    elif reset == "delete":
        del optimizer.state[p]
    elif reset == "assign":
        optimizer.state = {}
    else:
        p = optimizer.param_groups[0]["params"][0] = torch.nn.Parameter(p.detach().clone())
    q = torch.nn.Parameter(p.detach().clone())
    fresh = kind([q], lr=0.01)
    take_steps(optimizer, range(5, 8)), take_steps(fresh, range(5, 8))
    assert torch.equal(p, q)


def test_a_parameter_that_a_framework_puts_into_a_group_is_checked():
    optimizer = Muown([("w", make_parameter(4, 3))])
    optimizer.param_groups[0]["params"] = [make_parameter(12)]
    with pytest.raises(ValueError, match=r"'w'.*2-D"):
        take_steps(optimizer, [0])


@each
def test_an_optimizer_without_parameters(kind):
    optimizer = kind([])
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state and sum(len(group["params"]) for group in optimizer.param_groups) == 0


# --- weights that something else changes


@each
def test_a_step_of_learning_rate_0_changes_nothing(kind):
    p = make_parameter(8, 6)
    optimizer = kind([p], lr=0.01)
    take_steps(optimizer, range(3))
    freeze(optimizer)
    p.data.copy_(make_parameter(8, 6, seed=9).data)  # the best weights are loaded again
    before = p.detach().clone()
    take_steps(optimizer, [3, 4])
    assert torch.equal(p, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", REPARAMETERIZED)
def test_rows_that_were_scaled_stay_scaled(kind, dtype):
    """QK-clip scales some rows; the next steps move them by a step, not back."""
    p = make_parameter(16, 32, dtype=dtype)
    optimizer = kind([p], lr=1e-3)
    take_steps(optimizer, range(3))
    p.data[:4] *= 0.5
    clipped = p.detach().clone()
    take_steps(optimizer, [3, 4])
    assert (p - clipped).norm() < 0.05 * clipped.norm()
    g = optimizer.state[p]["magnitude"]
    torch.testing.assert_close(g.abs(), p.detach().to(g.dtype).norm(dim=1), rtol=1e-2, atol=0)


def test_max_norm_does_not_let_the_magnitudes_run_away():
    p = make_parameter(8, 6)
    optimizer = Muown([p], lr=0.05)
    for step in range(60):
        p.grad = -p.detach()  # the loss wants longer rows
        optimizer.step()
        p.data.div_(p.detach().norm(dim=1, keepdim=True).clamp(min=1.0))
        assert step == 0 or (optimizer.state[p]["magnitude"].abs() < 1.2).all()
    assert (p.detach().norm(dim=1) > 0.9).all()


def test_undisturbed_magnitudes_are_never_taken_from_the_rows(monkeypatch):
    from muown_train.optim import muown

    runs = []
    for adopt in (muown.adopt_changed_norms, lambda W, g, floor, zeros_too: None):
        monkeypatch.setattr(muown, "adopt_changed_norms", adopt)
        p = make_parameter(24, 300)
        optimizer = Muown([p], lr=0.02, weight_decay=0.1)
        take_steps(optimizer, range(20))
        runs.append(p.detach())
    assert torch.equal(*runs)


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(2, 40), st.floats(1e-3, 1e3), st.booleans())
def test_refresh_row_norms(m, n, factor, negative):
    p = make_parameter(m, n, seed=m * n)
    optimizer = Muown([p], lr=0.01)
    take_steps(optimizer, [0])
    if negative:
        optimizer.state[p]["magnitude"].neg_()
    p.data *= factor
    optimizer.refresh_row_norms()
    g = optimizer.state[p]["magnitude"]
    torch.testing.assert_close(g.abs(), p.detach().norm(dim=1))
    assert (g < 0).all() == negative


@pytest.mark.parametrize("zero_rows", ["error", 0.5])
@pytest.mark.parametrize("factor", [0.0, 1e-14])
def test_a_row_that_is_set_to_zero(zero_rows, factor):
    """It is never an error, and by default the row does not jump back to its old length."""
    p = make_parameter(4, 6)
    optimizer = Muown([p], lr=0.01, zero_rows=zero_rows)
    take_steps(optimizer, [0])
    length = float(p.detach()[1].norm())
    p.data[1] *= factor
    lengths = []
    for seed in range(1, 40):
        take_steps(optimizer, [seed])
        lengths.append(float(p.detach()[1].norm()))
    if zero_rows == "error":
        assert all(abs(b - a) < 0.03 for a, b in zip([0.0, *lengths], lengths, strict=False)) and max(lengths) > 0.005
    else:
        assert lengths[0] == pytest.approx(length, rel=0.05)
    assert p.isfinite().all()


@each
def test_loading_state_from_before_the_first_step_removes_the_state(kind):
    """As an LR finder does, which saves, tries and goes back."""
    p, q = make_parameter(8, 6), make_parameter(8, 6)
    tried, fresh = kind([p], lr=0.01), kind([q], lr=0.01)
    weights, saved = p.detach().clone(), tried.state_dict()
    take_steps(tried, range(3))
    p.data.copy_(weights)
    tried.load_state_dict(saved)
    assert not tried.state
    take_steps(tried, [7, 8]), take_steps(fresh, [7, 8])
    assert torch.equal(p, q)


# --- autocast and dtypes


@each
@pytest.mark.parametrize("options", [{}, {"ns_dtype": "float32"}, {"orthogonalizer": "svd"}])
def test_a_step_inside_autocast_is_the_same(kind, options):
    if options.keys() - kind([make_parameter(2, 2)]).defaults.keys() or (kind in (Muon, MuownSign) and options):
        pytest.skip("no such option")
    p, q = make_parameter(8, 6), make_parameter(8, 6)
    inside, outside = kind([p], lr=0.01, **options), kind([q], lr=0.01, **options)
    with torch.autocast("cpu", torch.bfloat16):
        take_steps(inside, range(3))
    take_steps(outside, range(3))
    assert torch.equal(p, q)


@each
def test_a_closure_is_evaluated_under_the_autocast_of_the_caller(kind):
    p, seen = make_parameter(8, 6), []

    def closure():
        seen.append((p @ p.T).dtype)
        p.grad = torch.ones_like(p)
        return torch.tensor(1.0)

    with torch.autocast("cpu", torch.bfloat16):
        kind([p], lr=0.01).step(closure)
    assert seen == [torch.bfloat16]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
@each
def test_gradients_of_another_dtype(kind):
    p, q = (make_parameter(8, 6, dtype=torch.bfloat16) for _ in range(2))
    p.grad_dtype = torch.float32
    wide, narrow = kind([p], lr=0.01), kind([q], lr=0.01)
    for seed in range(3):
        q.grad = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).bfloat16()
        p.grad = q.grad.float()
        wide.step(), narrow.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("kind", REPARAMETERIZED)
def test_the_momentum_of_float16_weights_does_not_overflow(kind):
    p = make_parameter(8, 6, dtype=torch.float16)
    optimizer = kind([p], lr=1e-3)
    for _ in range(40):
        p.grad = torch.full((8, 6), 5000.0, dtype=torch.float16).triu()
        optimizer.step()
    assert p.isfinite().all() and all(s.isfinite().all() for s in optimizer.state[p].values())


# --- state dicts


def test_a_users_function_is_stored_by_its_name():
    orthogonalizer = lambda X: torch.linalg.qr(X.mT).Q.mT  # noqa: E731
    one, two = (Muown([make_parameter(4, 6)], lr=0.01, orthogonalizer=orthogonalizer) for _ in range(2))
    take_steps(one, range(2))
    both = Combined(one, torch.optim.AdamW([make_parameter(3)]))
    for optimizer in (one, both):
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert "<lambda>" in saved["param_groups"][0]["orthogonalizer"]
    two.param_groups[0]["params"][0].data.copy_(one.param_groups[0]["params"][0].data)
    two.load_state_dict(one.state_dict())
    take_steps(one, [2]), take_steps(two, [2])
    assert torch.equal(one.param_groups[0]["params"][0], two.param_groups[0]["params"][0])
    with pytest.raises(ValueError, match=r"orthogonalizer.*<lambda>"):
        Muown([make_parameter(4, 6)]).load_state_dict(one.state_dict())


@each
def test_named_parameters_are_matched_by_name(kind):
    named = {name: make_parameter(4, 6, seed=i) for i, name in enumerate("abc")}
    one = kind(
        [{"params": [("module.a", named["a"])], "lr": 0.1}, {"params": [(n, named[n]) for n in "bc"], "lr": 0.2}]
    )
    take_steps(one, range(2))
    twins = {name: torch.nn.Parameter(p.detach().clone()) for name, p in named.items()}
    two = kind([{"params": [(n, twins[n]) for n in "cb"]}, {"params": [("a", twins["a"])]}])
    two.load_state_dict(one.state_dict())
    assert [group["lr"] for group in two.param_groups] == [0.2, 0.1]
    for seed in (5, 6):
        for i, name in enumerate("abc"):
            named[name].grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * seed + i))
            twins[name].grad = named[name].grad.clone()
        one.step(), two.step()
    assert all(torch.equal(named[name], twins[name]) for name in "abc")
    other = kind([("a", make_parameter(4, 6)), ("d", make_parameter(4, 6))])
    with pytest.raises(ValueError, match=r"does not have parameter '[bcd]'"):
        other.load_state_dict(one.state_dict())


@each
def test_named_parameters_of_one_shape_may_come_in_another_order(kind):
    """By position the momentum of one would be loaded as that of the other, without an error."""
    named = [(name, make_parameter(4, 6, seed=i)) for i, name in enumerate("ab")]
    one = kind(named, lr=0.1)
    take_steps(one, range(2))
    twins = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
    two = kind(twins[::-1], lr=0.1)
    two.load_state_dict(one.state_dict())
    for (_, p), (_, twin) in zip(named, twins, strict=True):
        assert all(torch.equal(s, two.state[twin][key]) for key, s in one.state[p].items())


def test_names_that_are_not_unique_do_not_decide():
    """Two submodules, whose groups were made apart, may use one name."""

    def make(seed):
        weights = [make_parameter(4, 6, seed=seed + i) for i in range(2)]
        return Muown([{"params": [("weight", p)]} for p in weights], lr=0.1), weights

    one, saved = make(0)
    take_steps(one, [0])
    two, loaded = make(5)
    two.load_state_dict(one.state_dict())
    for p, q in zip(saved, loaded, strict=True):
        assert torch.equal(two.state[q]["momentum_buffer"], one.state[p]["momentum_buffer"])


# --- layouts


LAYOUTS = {
    "conv": ({"layout": "conv"}, (6, 3, 2, 2), lambda X: [X.flatten(1)]),
    "grouped": ({"layout": "conv", "blocks": (2, 4)}, (6, 3, 2), lambda X: list(X.flatten(1).split([2, 4]))),
    "experts": ({"layout": "experts"}, (3, 4, 5), lambda X: list(X)),
    "fused experts": (
        {"layout": "experts", "blocks": (1, 3)},
        (2, 4, 5),
        lambda X: [b for e in X for b in (e[:1], e[1:])],
    ),
    "transposed": ({"transposed": True}, (5, 7), lambda X: [X.mT]),
    "fused transposed": ({"transposed": True, "blocks": (4, 3)}, (5, 7), lambda X: list(X.mT.split([4, 3]))),
    "transposed experts": ({"layout": "experts", "transposed": True}, (3, 4, 5), lambda X: list(X.mT)),
}


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("kind", [Muon, Muown, NorMuon, NorMuown, MuownSign, SOAP])
def test_layouts_are_parameters_of_their_own(kind, case):
    options, shape, split = LAYOUTS[case]
    whole = make_parameter(*shape, dtype=torch.float64)
    parts = [torch.nn.Parameter(part.clone()) for part in split(whole.detach())]
    extra = {"ns_dtype": "float64"} if "ns_dtype" in kind([parts[0]]).defaults and kind is not MuownSign else {}
    one, many = kind([{"params": [whole], **options}], lr=0.03, **extra), kind(parts, lr=0.03, **extra)
    for seed in range(3):
        whole.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for p, G in zip(parts, split(whole.grad), strict=True):
            p.grad = G.clone()
        one.step(), many.step()
    for p, q in zip(parts, split(whole.detach()), strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-9, atol=1e-9)
    assert one.state[whole]["exp_avg" if kind is SOAP else "momentum_buffer"].shape == shape


@pytest.mark.parametrize("kind", [Muown, NorMuown, Muon])
def test_channels_last_convolutions(kind):
    p = make_parameter(6, 3, 2, 2)
    q = torch.nn.Parameter(p.detach().clone())
    groups = [[{"params": [w], "layout": "conv"}] for w in (p, q)]
    one, two = (kind(group, lr=0.03, ns_dtype="float32") for group in groups)
    for seed in range(4):
        if seed == 2:  # as model.to(memory_format=torch.channels_last) does, with gradients as they come
            q.data = q.data.to(memory_format=torch.channels_last)
        p.grad = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
        q.grad = p.grad.clone()
        one.step(), two.step()
    torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert q.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "shape, options, message",
    [
        ((4, 3, 2), {}, "2-D parameters, got 3-D"),
        ((4, 3), {"layout": "conv"}, "conv"),
        ((4, 3), {"layout": "experts"}, "experts"),
        ((4, 3, 2), {"layout": "rows"}, "layout must be one of"),
        ((4, 3), {"transposed": 1}, "transposed must be true or false"),
        ((4, 3), {"transposed": True, "blocks": (2, 2)}, "sum to its 3 rows"),
        ((4, 3, 2), {"layout": "experts", "blocks": (2, 2)}, "sum to its 3 rows"),
        ((2, 2, 3, 3), {"layout": "conv", "transposed": True}, "not transposed"),
    ],
)
def test_wrong_layouts(shape, options, message):
    with pytest.raises(ValueError, match=message):
        Muown([{"params": [("w", make_parameter(*shape))], **options}])


def test_lr_scales_of_layouts():
    optimizer = Muown([{"params": [make_parameter(3, 4, 5), make_parameter(2, 9, 4)], "layout": "experts"}])
    scales = optimizer.get_lr_scales(optimizer.param_groups[0])
    assert scales == pytest.approx([0.2 * math.sqrt(5)] * 3 + [0.2 * math.sqrt(9)] * 2)
