import copy
import io
import pickle
import warnings
from collections import defaultdict

import pytest
import torch

from muown_train.optim import SOAP, Combined, Lion, Muown, NorMuon


def named(*shapes, start=0):
    generator = torch.Generator().manual_seed(start)
    return [
        (f"p{start + i}", torch.nn.Parameter(torch.randn(shape, generator=generator))) for i, shape in enumerate(shapes)
    ]


def make(seed=0):
    torch.manual_seed(seed)
    w, v, e = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((4, 6), (6,), (9, 4)))
    rest = [{"params": [("v", v)], "lr": 0.01}, {"params": [("e", e)]}]
    return Combined(Muown([("w", w)], lr=0.1, ns_dtype="float32"), torch.optim.AdamW(rest, lr=0.2))


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters(optimizer):
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def check_equal(one, two):
    for p, q in zip(parameters(one), parameters(two), strict=True):
        assert torch.equal(p, q)


def snapshot(optimizer):
    """Return everything about the groups: which dictionaries are where, and what is in them."""
    lists = [optimizer.param_groups, *(part.param_groups for part in optimizer.optimizers)]
    return [[(id(group), {k: v if k != "params" else [*map(id, v)] for k, v in group.items()}) for group in groups]
            for groups in lists]  # fmt: skip


class TestStep:
    def test_it_steps_each_part(self):
        together, alone = make(), make()
        for seed in range(3):
            step(together, seed)
            for part in alone.optimizers:
                for p, q in zip(parameters(alone), parameters(together), strict=True):
                    p.grad = q.grad.clone()
                part.step()
        check_equal(together, alone)

    def test_a_closure_runs_once_and_gradients_are_cleared(self):
        optimizer, calls = make(), []

        def closure():
            calls.append(torch.is_grad_enabled())
            loss = sum(p.square().sum() for p in parameters(optimizer))
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        assert calls == [True]
        optimizer.zero_grad()
        assert all(p.grad is None for p in parameters(optimizer))

    def test_hooks_and_grad_scaler(self):
        optimizer, seen = make(), []
        optimizer.register_step_pre_hook(lambda *_: seen.append("steps"))
        optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        before = [p.detach().clone() for p in parameters(optimizer)]
        scaler.scale(sum(p.pow(3).sum() for p in parameters(optimizer))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert seen == ["steps", "stepped"]
        assert all(not torch.equal(p, q) for p, q in zip(parameters(optimizer), before, strict=True))

    def test_grad_scaler_skips_all_parts(self):
        optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        before = [p.detach().clone() for p in parameters(optimizer)]
        step_grads = [torch.ones_like(p) for p in parameters(optimizer)]
        step_grads[0][0, 0] = torch.inf
        for p, grad in zip(parameters(optimizer), step_grads, strict=True):
            p.grad = grad
        scaler.scale(torch.ones(()))  # a scaler starts with its first use
        scaler.step(optimizer)
        assert all(torch.equal(p, q) for p, q in zip(parameters(optimizer), before, strict=True))
        assert not optimizer.state

    @pytest.mark.slow
    def test_a_step_under_torch_compile(self):
        plain, compiled = make(), make()
        torch._dynamo.reset()
        compiled_step = torch.compile(compiled.step, backend="eager")
        for seed in range(3, 6):
            step(plain, seed)
            for p, q in zip(parameters(plain), parameters(compiled), strict=True):
                q.grad = p.grad.clone()
            compiled_step()
        for p, q in zip(parameters(plain), parameters(compiled), strict=True):
            torch.testing.assert_close(q, p)


class TestSchedulers:
    def test_a_scheduler_reaches_the_parts(self):
        optimizer = make()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        step(optimizer, 0)
        scheduler.step()
        assert [group["lr"] for part in optimizer.optimizers for group in part.param_groups] == [0.05, 0.005, 0.1]

    def test_a_scheduler_still_reaches_the_parts_after_loading(self):
        optimizer = make()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        optimizer.load_state_dict(optimizer.state_dict())
        step(optimizer, 0)
        scheduler.step()
        assert optimizer.optimizers[0].param_groups[0]["lr"] == 0.05

    def test_a_cycled_momentum_is_refused(self):
        optimizer = make()
        with pytest.raises(ValueError, match="cycle_momentum"):
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
        torch.optim.lr_scheduler.OneCycleLR(make(), max_lr=0.1, total_steps=5, cycle_momentum=False)
        torch.optim.lr_scheduler.CyclicLR(make(), 0.01, 0.1, cycle_momentum=False)


class TestGroupsAndState:
    def test_they_are_the_parts_own(self):
        optimizer = make()
        muown, adamw = optimizer.optimizers
        assert isinstance(optimizer, torch.optim.Optimizer)
        for mine, own in zip(optimizer.param_groups, muown.param_groups + adamw.param_groups, strict=True):
            assert mine is own
        assert optimizer.param_groups is optimizer.param_groups
        step(optimizer, 0)
        assert len(optimizer.state) == 3
        for p, state in optimizer.state.items():
            assert state is (muown.state[p] if p in muown.state else adamw.state[p])
        assert optimizer.state[torch.ones(1)] == {} and len(muown.state) == 1

    def test_groups_are_deleted(self):
        optimizer = make()
        muown, adamw = optimizer.optimizers
        groups = optimizer.param_groups
        last = groups[-1]
        del optimizer.param_groups[-1]
        assert len(optimizer.param_groups) == 2 and optimizer.param_groups is groups
        assert len(adamw.param_groups) == 1
        before = last["params"][0].detach().clone()
        last["params"][0].grad = torch.ones_like(before)
        step(optimizer, 0)
        assert torch.equal(last["params"][0], before)
        optimizer.param_groups.append(last)
        assert optimizer.optimizers[1].param_groups[-1] is last and len(muown.param_groups) == 1
        step(optimizer, 1)
        assert not torch.equal(last["params"][0], before)

    def test_groups_are_appended(self):
        optimizer = make()
        ((name, p),) = named((5, 3), start=7)
        optimizer.param_groups.append({"params": [p], "param_names": [name], "role": "matrix", "lr": 0.3})
        muown, adamw = optimizer.optimizers
        assert muown.param_groups[-1] is optimizer.param_groups[-1] and len(adamw.param_groups) == 2
        assert muown.param_groups[-1]["momentum"] == 0.95

    def test_the_list_is_assigned(self):
        """Lightning's BaseFinetuning assigns new dictionaries, of further groups too."""
        optimizer, other = make(), make()
        step(optimizer, 0)
        step(other, 0)
        new = [dict(group) for group in reversed(optimizer.param_groups)]
        p = torch.nn.Parameter(torch.ones(3, 5))
        new.insert(1, {key: value for key, value in new[-1].items() if key != "role"} | {"params": [p]})
        new[1]["param_names"] = ["new"]
        new[1]["lr"] = 0.7
        optimizer.param_groups = new
        assert optimizer.param_groups is new
        muown, adamw = optimizer.optimizers
        assert list(map(id, muown.param_groups)) == [id(new[1]), id(new[3])]  # by their options
        assert list(map(id, adamw.param_groups)) == [id(new[0]), id(new[2])]
        p.grad = torch.randn(3, 5)
        for part in optimizer.optimizers:
            for group in part.param_groups:
                for q in group["params"]:
                    if q is not p:
                        q.grad = torch.ones_like(q)
        for q in parameters(other):
            q.grad = torch.ones_like(q)
        optimizer.step()
        other.step()
        assert not torch.equal(p, torch.ones(3, 5))
        for q, name in zip(parameters(other), ("w", "v", "e"), strict=True):
            group = next(group for group in new if name in group["param_names"])
            assert torch.equal(group["params"][0], q)

    def test_the_list_is_assigned_for_a_while(self):
        """DeepSpeed steps one group after the other by assigning a list of one group."""
        optimizer, other = make(), make()
        for seed in range(3):
            step(other, seed)
            for p, q in zip(parameters(other), parameters(optimizer), strict=True):
                q.grad = p.grad.clone()
            groups = optimizer.param_groups
            for group in list(groups):
                optimizer.param_groups = [group]
                optimizer.step()
                optimizer.param_groups = groups
        assert optimizer.param_groups is groups and len(groups) == 3
        assert [len(part.param_groups) for part in optimizer.optimizers] == [1, 2]
        check_equal(optimizer, other)

    @pytest.mark.parametrize("replace_element", [True, False])
    def test_parameters_are_replaced(self, replace_element):
        optimizer = make()
        step(optimizer, 0)
        for group in optimizer.param_groups:
            (old,) = group["params"]
            new = torch.nn.Parameter(old.detach().clone())
            state = optimizer.state.pop(old)
            if replace_element:
                group["params"][0] = new
            else:
                group["params"] = [new]
            optimizer.state[new] = state
        other = make()
        step(other, 0)
        step(optimizer, 1)
        step(other, 1)
        check_equal(optimizer, other)
        assert set(optimizer.state_dict()["state"]) == {0, 1, 2}

    def test_changes_in_a_part_are_seen(self):
        optimizer = make()
        muown, adamw = optimizer.optimizers
        groups = optimizer.param_groups
        (pair,) = named((3, 3), start=3)
        muown.add_param_group({"params": [pair]})
        assert optimizer.param_groups is groups and groups[-1] is muown.param_groups[1]
        adamw.load_state_dict(adamw.state_dict())
        assert list(map(id, optimizer.param_groups)) == [
            *map(id, (muown.param_groups[0], *adamw.param_groups, muown.param_groups[1]))
        ]
        muown.param_groups.pop()
        assert len(optimizer.param_groups) == 3

    @pytest.mark.parametrize("change", ["clear", "delete", "assign", "pop", "popitem"])
    def test_state_is_reset(self, change):
        optimizer = make()
        step(optimizer, 0)
        if change == "clear":
            optimizer.state.clear()
        elif change == "assign":
            optimizer.state = defaultdict(dict)
        elif change == "popitem":
            while optimizer.state:
                optimizer.state.popitem()
        else:
            for p in parameters(optimizer):
                if change == "pop":
                    optimizer.state.pop(p)
                else:
                    del optimizer.state[p]
        assert not optimizer.state and not any(part.state for part in optimizer.optimizers)
        other = make()
        for p, q in zip(parameters(optimizer), parameters(other), strict=True):
            q.data.copy_(p.data)
        step(optimizer, 1)
        step(other, 1)
        check_equal(optimizer, other)

    def test_state_is_distributed(self):
        optimizer, other = make(), make()
        step(optimizer, 0)
        step(other, 0)
        copies = {
            p: copy.deepcopy(state)
            for p, state in zip(parameters(optimizer), map(other.state.get, parameters(other)), strict=True)
        }
        optimizer.state = copies
        muown, adamw = optimizer.optimizers
        assert len(muown.state) == 1 and len(adamw.state) == 2
        optimizer.state = optimizer.state
        assert len(optimizer.state) == 3
        step(optimizer, 1)
        step(other, 1)
        check_equal(optimizer, other)
        with pytest.raises(ValueError, match=r"shape \(2, 2\), which is in no group"):
            optimizer.state = {**optimizer.state, torch.ones(2, 2): {}}
        assert len(optimizer.state) == 3

    def test_state_is_a_mapping(self):
        optimizer = make()
        muown, adamw = optimizer.optimizers
        w, v, _ = parameters(optimizer)
        assert not optimizer.state and len(optimizer.state) == 0
        assert optimizer.state.get(w) is None and w not in optimizer.state and not muown.state
        optimizer.state[v]["note"] = 1  # as in a defaultdict
        assert adamw.state[v] == {"note": 1} and v in optimizer.state
        assert optimizer.state.setdefault(v, {}) is adamw.state[v]
        assert optimizer.state.setdefault(w, {"a": 2}) is muown.state[w]
        assert optimizer.state.pop(torch.ones(1), None) is None
        with pytest.raises(KeyError):
            del optimizer.state[torch.ones(1)]
        with pytest.raises(ValueError, match=r"no group has this parameter of shape \(1,\)"):
            optimizer.state[torch.ones(1)] = {}
        assert [*optimizer.state] == [w, v]
        assert type(copy.copy(optimizer.state)) is defaultdict
        assert [*copy.deepcopy(optimizer.state).values()] == [{"a": 2}, {"note": 1}]

    def test_a_change_that_cannot_be_is_undone(self):
        optimizer = make()
        before = snapshot(optimizer)
        w, v, _ = parameters(optimizer)
        optimizer.param_groups.append({"params": [w]})
        with pytest.raises(ValueError, match=r"parameter 0 of group 3, of shape \(4, 6\) is in two groups"):
            _ = optimizer.param_groups
        assert snapshot(optimizer) == before
        with pytest.raises(ValueError, match=r"group 0 has parameters of Muown and of AdamW"):
            optimizer.param_groups = [{"params": [w, v], "lr": 0.1}]
        assert snapshot(optimizer) == before
        optimizer.optimizers[1].add_param_group({"params": [("w", w)]})
        with pytest.raises(ValueError, match=r"'w' is in two groups"):
            optimizer.step()
        assert snapshot(optimizer) == before


class TestAddParamGroup:
    @pytest.mark.parametrize("role,part", [("matrix", 0), ("head", 1), ("vector", 1)])
    def test_the_role_decides(self, role, part):
        optimizer = make()
        group = {"params": named((5, 4), start=5), "role": role}
        optimizer.add_param_group(group)
        assert optimizer.optimizers[part].param_groups[-1] is group is optimizer.param_groups[-1]
        assert [len(part.param_groups) for part in optimizer.optimizers] == ([2, 2] if part == 0 else [1, 3])
        before = group["params"][0].detach().clone()
        step(optimizer, 0)
        assert not torch.equal(group["params"][0], before)

    def test_a_part_with_the_role_comes_first(self):
        (w, e, v) = named((4, 4), (9, 4), (4,))
        parts = (
            Lion([{"params": [w], "role": "matrix"}]),
            torch.optim.AdamW([{"params": [e], "role": "embedding"}]),
            torch.optim.SGD([{"params": [v], "role": "vector"}], lr=0.1),
        )
        optimizer = Combined(*parts)
        for i, (role, part) in enumerate([("matrix", 0), ("embedding", 1), ("vector", 2), ("head", 2)]):
            optimizer.add_param_group({"params": named((5, 4), start=10 + i), "role": role})
            assert parts[part].param_groups[-1]["role"] == role

    @pytest.mark.parametrize("parts,matrix,rest", [((SOAP, torch.optim.AdamW), 0, 1), ((Muown, NorMuon), 0, 1)])
    def test_parts_of_one_kind(self, parts, matrix, rest):
        optimizer = Combined(*(part(named((4, 6), start=i)) for i, part in enumerate(parts)))
        optimizer.add_param_group({"params": named((5, 4), start=5), "role": "matrix"})
        assert len(optimizer.optimizers[matrix].param_groups) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.add_param_group({"params": named((5, 4), start=6)})
        assert len(optimizer.optimizers[rest].param_groups) == 2

    def test_matrices_without_a_role_are_named_in_a_warning(self):
        optimizer = make()
        with pytest.warns(
            UserWarning, match=r"parameter 'p5', parameter 'p7' went to AdamW.*role=\"matrix\" for Muown"
        ):
            optimizer.add_param_group({"params": named((5, 4), (5,), (3, 3, 3), start=5)})
        assert len(optimizer.optimizers[1].param_groups[-1]["params"]) == 3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.add_param_group({"params": named((5,), (), start=9)})
        assert len(optimizer.param_groups) == 5

    def test_named_and_unnamed_groups_mix(self):
        optimizer = make()
        p, q = (torch.nn.Parameter(torch.randn(3, 4)) for _ in range(2))
        names = [group["param_names"] for group in optimizer.param_groups]
        optimizer.add_param_group({"params": p, "role": "matrix"})
        optimizer.add_param_group({"params": iter([torch.nn.Parameter(torch.ones(2))])})
        optimizer.add_param_group({"params": [("q", q)], "role": "matrix"})
        assert [group.get("param_names") for group in optimizer.param_groups] == [*names, None, None, ["q"]]
        assert "param_names" not in optimizer.optimizers[0].param_groups[1]
        step(optimizer, 0)
        other = copy.deepcopy(optimizer)
        for state in other.state.values():
            for value in state.values():
                value.zero_()
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(optimizer, 1)
        step(other, 1)
        check_equal(optimizer, other)

    def test_an_error_changes_nothing(self):
        optimizer = make()
        step(optimizer, 0)
        before, w = snapshot(optimizer), parameters(optimizer)[0]
        for match, group in [
            ("is in two groups", {"params": [w], "role": "vector"}),
            ("2-D", {"params": [torch.nn.Parameter(torch.ones(3))], "role": "matrix"}),
            ("lr", {"params": [torch.nn.Parameter(torch.ones(3, 3))], "role": "matrix", "lr": -1.0}),
            ("some parameters of the group have a name", {"params": [*named((3,)), torch.nn.Parameter(torch.ones(3))]}),
            ("non-leaf", {"params": [torch.nn.Parameter(torch.ones(3)) * 2]}),
        ]:
            given = dict(group)
            with pytest.raises(ValueError, match=match):
                optimizer.add_param_group(group)
            assert snapshot(optimizer) == before and len(optimizer.state) == 3
            assert group.keys() == given.keys()
        with pytest.raises(TypeError, match="order"):
            optimizer.add_param_group({"params": {torch.nn.Parameter(torch.ones(3))}})
        with pytest.raises(TypeError, match="str"):
            optimizer.add_param_group({"params": ["weight"]})
        assert snapshot(optimizer) == before

    def test_a_parameter_moves_to_another_part(self):
        optimizer = make()
        step(optimizer, 0)
        group = optimizer.param_groups.pop()
        (e,) = group["params"]
        optimizer.add_param_group({"params": [("e", e)], "role": "matrix"})
        step(optimizer, 1)
        assert "magnitude" in optimizer.state[e] and len(optimizer.state) == 3
        optimizer.state_dict()

    def test_a_parameter_comes_back(self):
        optimizer = make()
        group = optimizer.param_groups.pop(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.add_param_group({"params": group["params"]})
        assert optimizer.optimizers[0].param_groups[0] is optimizer.param_groups[-1]


class TestStateDict:
    @pytest.mark.parametrize("done", [0, 2])
    def test_round_trip(self, done):
        one, two = make(), make()
        for seed in range(done):
            step(one, seed)
        buffer = io.BytesIO()
        torch.save(one.state_dict(), buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        assert [group["params"] for group in saved["param_groups"]] == [[0], [1], [2]]
        assert set(saved["state"]) == ({0, 1, 2} if done else set())
        two.load_state_dict(saved)
        for p, q in zip(parameters(one), parameters(two), strict=True):
            q.data.copy_(p.data)
        for seed in range(5, 8):
            step(one, seed)
            step(two, seed)
        check_equal(one, two)

    def test_it_holds_data_alone(self):
        optimizer = Combined(Muown(named((4, 6)), orthogonalizer=lambda X: X), torch.optim.AdamW(named((4,), start=1)))
        step(optimizer, 0)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        optimizer.load_state_dict(torch.load(buffer, weights_only=True))
        step(optimizer, 1)

    def test_groups_that_were_added_round_trip(self):
        one, two = make(), make()
        for optimizer in (one, two):
            for i, role in enumerate(("matrix", "vector", "matrix")):
                optimizer.add_param_group({"params": named((5, 4), start=10 + i), "role": role})
        for seed in range(3):
            step(one, seed)
        saved = one.state_dict()
        assert [group["params"] for group in saved["param_groups"]] == [[0], [1], [2], [3], [4], [5]]
        two.load_state_dict(copy.deepcopy(saved))
        for p, q in zip(parameters(one), parameters(two), strict=True):
            q.data.copy_(p.data)
        step(one, 4)
        step(two, 4)
        check_equal(one, two)

    def test_groups_in_another_order_are_matched_by_name(self):
        def build(reverse):
            matrices, vectors = named((4, 6), (4, 6)), named((3,), (3,), start=2)
            turn = reversed if reverse else iter
            parts = (
                Muown([{"params": [p]} for p in turn(matrices)], lr=0.1),
                torch.optim.AdamW([{"params": [p]} for p in turn(vectors)], lr=0.1),
            )
            return Combined(*turn(parts)), dict(matrices + vectors)

        (one, by_name), (two, others) = build(False), build(True)
        for seed in range(2):
            step(one, seed)
        two.load_state_dict(copy.deepcopy(one.state_dict()))
        for name, p in by_name.items():
            others[name].data.copy_(p.data)
            assert p.shape == others[name].shape
            p.grad = torch.randn(p.shape)
            others[name].grad = p.grad.clone()
        one.step()
        two.step()
        for name, p in by_name.items():
            assert torch.equal(p, others[name])

    def test_a_parameter_without_partner_is_refused(self):
        optimizer = make()
        before = optimizer.optimizers[0].state_dict()
        with pytest.raises(ValueError, match="the saved optimizer does not have parameter 'e'"):
            optimizer.load_state_dict(before)

    def test_hooks(self):
        optimizer, seen = make(), []
        optimizer.register_state_dict_pre_hook(lambda o: seen.append("saves"))
        optimizer.register_state_dict_post_hook(lambda o, saved: seen.append("saved") or {**saved, "more": 1})
        optimizer.register_load_state_dict_pre_hook(lambda o, saved: seen.append(saved["more"]))
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == ["saves", "saved", 1, "loaded"]

    @pytest.mark.parametrize("again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
    def test_copies_continue_identically(self, again):
        optimizer = make()
        optimizer.add_param_group({"params": named((5, 4), start=5), "role": "matrix"})
        step(optimizer, 0)
        other = again(optimizer)
        assert list(map(id, other.param_groups)) != list(map(id, optimizer.param_groups))
        step(optimizer, 1)
        step(other, 1)
        for p, q in zip(parameters(optimizer), parameters(other), strict=True):
            assert p is not q and torch.equal(p, q)
        other.param_groups[-1]["lr"] = 0.5
        assert other.optimizers[0].param_groups[-1]["lr"] == 0.5
        assert repr(other).count("Parameter Group") == 4


class TestParts:
    def test_one_owner(self):
        w = torch.nn.Parameter(torch.randn(4, 6))
        with pytest.raises(ValueError, match="'w' is in two groups"):
            Combined(Muown([("w", w)]), torch.optim.AdamW([("w", w)]))
        with pytest.raises(ValueError, match=r"of shape \(4, 6\) is in two groups"):
            Combined(Muown([w]), torch.optim.AdamW([w]))
        with pytest.raises(ValueError, match="at least one"):
            Combined()

    @pytest.mark.parametrize("kind", [Muown, torch.optim.Muon])
    def test_a_part_may_be_empty(self, kind):
        for matrices, vectors in (([], named((3,))), (named((4, 6)), [])):
            optimizer = Combined(
                kind([{"params": matrices, "role": "matrix"}], lr=0.1),
                torch.optim.AdamW([{"params": vectors}], lr=0.1),
            )
            assert len(optimizer.param_groups) == 1
            step(optimizer, 0)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.add_param_group({"params": named((5, 4), start=5), "role": "matrix"})
            optimizer.add_param_group({"params": named((5,), start=6)})
            step(optimizer, 1)
            assert len(optimizer.state) == 3 and all(part.state for part in optimizer.optimizers)

    def test_a_combined_of_a_combined(self):
        def build(nested):
            w, v, e = named((4, 6), (6,), (9, 4))
            muown, adamw, lion = Muown([w]), torch.optim.AdamW([v]), Lion([e])
            return Combined(Combined(muown, adamw), lion) if nested else Combined(muown, adamw, lion)

        one, two = build(True), build(False)
        for seed in range(2):
            step(one, seed)
            step(two, seed)
        one.load_state_dict(copy.deepcopy(two.state_dict()))
        step(one, 2)
        step(two, 2)
        check_equal(one, two)
        del one.param_groups[0]
        assert not one.optimizers[0].optimizers[0].param_groups


def test_a_part_that_refuses_its_state_leaves_the_other_parts_as_they_were():
    def combine(kind):
        [(_, w)], [(_, v)] = named((4, 6)), named((6,))
        return Combined(Muown([w], lr=0.1), kind([v], lr=0.1))

    one, other = combine(SOAP), combine(Lion)
    step(one, 0), step(other, 1)
    before, state = snapshot(one), copy.deepcopy([dict(part.state) for part in one.optimizers])
    with pytest.raises(ValueError, match="the saved optimizer kept exp_avg, this one keeps"):
        one.load_state_dict(other.state_dict())
    assert snapshot(one) == before
    for part, states in zip(one.optimizers, state, strict=True):
        for now, then in zip(part.state.values(), states.values(), strict=True):
            assert all(torch.equal(now[key], then[key]) for key in then)


def test_what_is_no_optimizer_and_no_group_is_refused():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.randn(2, 2))])
    with pytest.raises(TypeError, match="Combined takes optimizers, one after the other, got list"):
        Combined([optimizer])
    combined = Combined(optimizer)
    with pytest.raises(TypeError, match="a group must be a dictionary, got list"):
        combined.add_param_group([torch.nn.Parameter(torch.randn(2))])
    assert len(combined.param_groups) == 1
