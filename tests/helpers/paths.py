"""Where things lie: the checkout, the fixtures of the tests, and how the command line is started."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
SHARED = ROOT.parent / "shared"  # larger data beside the checkout; tests that need them skip without
COMMAND = [sys.executable, "-m", "muown_train"]
