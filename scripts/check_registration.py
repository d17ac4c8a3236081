"""See stock SGLang find the installed distribution: algorithm, both entry points, console script.

Run outside the checkout, so that the installed wheel is what is imported.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from sglang.srt.plugins import load_plugins
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

import sglang_ssd
import sglang_ssd_kernels


def main() -> None:
    for package in (sglang_ssd, sglang_ssd_kernels):
        where = Path(package.__file__ or "").resolve()
        if "site-packages" not in where.parts:
            raise SystemExit(f"{package.__name__} was imported from {where}, not from the wheel")
    found = {(e.group, e.name) for e in distribution("sglang-ssd").entry_points}
    wanted = {
        ("sglang.srt.plugins", "ssd"),
        ("sglang.srt.platforms", "ssd_cpu"),
        ("console_scripts", "sglang-ssd"),
    }
    if found != wanted:
        raise SystemExit(f"entry points of the wheel: {sorted(found)}, expected {sorted(wanted)}")
    load_plugins()
    algorithm = SpeculativeAlgorithm.from_string("SSD")
    if not algorithm.is_speculative():
        raise SystemExit(f"SGLang knows SSD, but not as a speculative algorithm: {algorithm!r}")
    print(f"SGLang registered {algorithm.name} from {Path(sglang_ssd.__file__ or '').parent.name}")


if __name__ == "__main__":
    main()
