"""`python -m muown_train`: see `muown_train.cli.main`."""

from muown_train.cli.main import run

if __name__ == "__main__":
    run()
