"""`python -m muown_train`: see `muown_train.cli.main`."""

from muown_train.cli.main import command

if __name__ == "__main__":
    command()
