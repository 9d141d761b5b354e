"""Muown and its relatives as torch optimizers. Needs torch and nothing else."""

from .combined import Combined
from .muon import Muon
from .muown import Muown
from .param_roles import param_groups, parameter_roles

__all__ = ["Combined", "Muon", "Muown", "param_groups", "parameter_roles"]
