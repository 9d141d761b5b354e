"""The name that `muown-train import` had in earlier versions."""

from muown_train.cli.main import run_moved_script

run_moved_script("import")
