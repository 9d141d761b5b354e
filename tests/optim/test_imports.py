import subprocess
import sys

PROGRAM = """
import sys
import torch
before = set(sys.modules)
import muown_train.optim
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""


def test_the_library_loads_nothing_but_torch():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['muown_train']"
