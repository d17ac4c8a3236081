"""Set up the environment and the demo model, then run the tests; arguments go to pytest.

./run-tests                          unit, integration, kernels, then real servers; not "slow"
./run-tests test/unit -k fan_out     part of them
./run-tests -m slow                  the long ones
"""

from __future__ import annotations

import os
import sys

from demo_model import ensure_demo_model
from environment import MODELS, ROOT, enter_environment, interruptible

LANES = ("test/unit", "test/integration", "test/kernels", "test/e2e", "test/gpu")
"""Cheapest first, so that a broken invariant shows before a server is started."""


def pytest_arguments(given: list[str]) -> list[str]:
    """Add the lanes unless paths were given, and leave the slow tests out unless -m was given."""
    arguments = list(given)
    if not any(argument == "-m" or argument.startswith("-m=") for argument in given):
        arguments += ["-m", "not slow"]
    if not any("/" in word and (ROOT / word.split("::")[0]).exists() for word in given):
        arguments += [lane for lane in LANES if (ROOT / lane).is_dir()]
    return arguments


def main() -> None:
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return
    enter_environment()
    ensure_demo_model(MODELS)
    os.chdir(ROOT)
    os.environ["SGLANG_SSD_MODELS"] = str(MODELS)
    command = [sys.executable, "-m", "pytest", *pytest_arguments(sys.argv[1:])]
    print(" ".join(command), "collecting the tests, up to half a minute", sep="\n", flush=True)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    with interruptible():
        main()
