"""The part `tests` of check_gpu.py: the tests marked gpu, as rows of a table."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from gpu_limits import ROOT, Limits, Row


def run_tests(limits: Limits) -> Iterator[Row]:
    """Run the tests marked gpu and yield their number, then each that failed. A dry run takes some, on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = ["-m", "gpu", "tests/gpu", "-n", "0" if limits.dry_run else "4", "-q", f"--junitxml={report}"]
        words += ["-k", "qkv or pinned", "-p", "no:cacheprovider"] if limits.dry_run else []
        environment = os.environ | ({"MUOWN_GPU_TESTS_ON_CPU": "1"} if limits.dry_run else {})
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment, timeout=limits.left)
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    numbers = {key: int(suite.attrib[key]) for key in ("tests", "skipped", "failures", "errors")}
    failed = numbers["failures"] + numbers["errors"]
    yield {"table": "tests", "": "marked gpu", **numbers, "failed": failed, "seconds": float(suite.attrib["time"])}
    for case in suite.iter("testcase"):
        for fault in (*case.iter("failure"), *case.iter("error")):
            message = " ".join(fault.attrib.get("message", "").split())[:300].replace("|", "/")
            yield {"table": "tests that failed", "test": case.attrib["name"], "message": message}
