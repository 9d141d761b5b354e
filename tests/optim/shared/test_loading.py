"""Loading a state dict: torch's hooks see it in torch's order, and one that does not fit changes nothing."""

import copy
import io

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LinearLR

from muown_train.optim import SOAP, Lion, Muon, Muown, MuownSign, NorMuon, NorMuown

EVERY = (Muon, Muown, NorMuon, NorMuown, MuownSign, SOAP, Lion)
each = pytest.mark.parametrize("kind", EVERY)


def optimizer(kind, **options):
    p = torch.nn.Parameter(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    made = kind([{"params": [p], **options}])
    p.grad = torch.ones(8, 4).triu()
    made.step()
    return made, p


def big_state(made):
    """Return a tensor from the state of the only parameter that has its shape or one number per row."""
    (state,) = made.state.values()
    return next(value for key, value in state.items() if key != "step")


@each
def test_pre_hooks_change_what_is_loaded(kind):
    made, _ = optimizer(kind)
    saved = made.state_dict()

    def unwrapped(_, state_dict):
        inner = copy.deepcopy(state_dict["nested"])
        for state in inner["state"].values():
            for key, value in state.items():
                if key != "step":
                    value.fill_(7.0)
        return inner

    made.register_load_state_dict_pre_hook(unwrapped)
    made.load_state_dict({"nested": saved})
    assert (big_state(made) == 7).all()


@each
def test_post_hooks_have_the_last_word(kind):
    made, _ = optimizer(kind)
    made.register_load_state_dict_post_hook(lambda loaded: big_state(loaded).fill_(5.0))
    made.load_state_dict(made.state_dict())
    assert (big_state(made) == 5).all()


@each
@pytest.mark.parametrize(
    "option, message", [({"lr": "x"}, "lr must be"), ({"betas": (2.0, 0.9)}, "betas"), ({"momentum": 1.0}, "momentum")]
)
def test_invalid_options_change_nothing(kind, option, message):
    made, _ = optimizer(kind)
    if not option.keys() <= made.param_groups[0].keys():
        pytest.skip("no such option")
    before = copy.deepcopy(made.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"][0] |= option
    for state in saved["state"].values():
        for value in state.values():
            value.zero_()
    with pytest.raises(ValueError, match=message):
        made.load_state_dict(saved)
    assert repr(made.state_dict()) == repr(before)


@pytest.mark.parametrize("kind", [Muon, Muown, SOAP])
def test_other_blocks_are_refused(kind):
    made, _ = optimizer(kind, blocks=(4, 4))
    whole, _ = optimizer(kind)
    with pytest.raises(
        ValueError, match=r"saved with blocks=None, but in this optimizer has blocks=\(4, 4\)|the saved"
    ):
        made.load_state_dict(whole.state_dict())
    assert made.param_groups[0]["blocks"] == (4, 4)


def test_blocks_that_went_through_json_are_the_same():
    made, _ = optimizer(Muown, blocks=(4, 4))
    saved = made.state_dict()
    saved["param_groups"][0] |= {"blocks": [4, 4], "betas": [0.5, 0.5]}
    made.load_state_dict(saved)
    assert made.param_groups[0]["blocks"] == (4, 4) and made.param_groups[0]["betas"] == (0.5, 0.5)


def test_numpys_numbers_and_tensors_are_saved_as_pythons():
    made, _ = optimizer(
        Muown,
        lr=np.float32(1e-3),
        betas=np.array([0.5, 0.5]),
        momentum=torch.tensor([0.9]),
        ns_steps=np.int64(3),
    )
    group = made.param_groups[0]
    assert (type(group["lr"]), type(group["momentum"]), type(group["ns_steps"])) == (float, float, int)
    LinearLR(made)  # writes to lr
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    made.load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("betas", [{0.9, 0.95}, {0.9: 1, 0.95: 2}, "ab", 0.9])
def test_unordered_betas_are_refused(betas):
    with pytest.raises(ValueError, match="betas must be 2 numbers"):
        optimizer(Muown, betas=betas)


@pytest.mark.parametrize("kind", [Muown, NorMuown, MuownSign])
def test_rows_that_became_zero_before_the_first_step(kind):
    p = torch.nn.Parameter(torch.randn(4, 3))
    made = kind([p])
    with torch.no_grad():
        p[1] = 0
    p.grad = torch.ones(4, 3)
    before = p.detach().clone()
    with pytest.raises(ValueError, match="1 of 4 rows are zero"):
        made.step()
    assert torch.equal(p, before)


@each
def test_on_the_meta_device(kind):
    kind([torch.nn.Parameter(torch.empty(4, 3, device="meta"))])
