"""Muown and related optimizers as torch optimizers; this package imports torch alone."""

from .combined import Combined
from .describe import describe
from .lion import Lion
from .muon import Muon
from .muown import Muown
from .muown_sign import MuownSign
from .normuon import NorMuon, NorMuown
from .param_groups import param_groups, parameter_roles
from .sharding import gather_state_dict, shard
from .soap import SOAP

__all__ = [
    "SOAP",
    "Combined",
    "Lion",
    "Muon",
    "Muown",
    "MuownSign",
    "NorMuon",
    "NorMuown",
    "describe",
    "gather_state_dict",
    "param_groups",
    "parameter_roles",
    "shard",
]
