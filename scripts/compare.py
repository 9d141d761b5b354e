"""The name that `muown-train compare` had in earlier versions."""

from muown_train.cli.main import run_moved_script

run_moved_script("compare")
