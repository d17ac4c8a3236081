"""`python -m sglang_ssd.keys DIR`: CURVE keys for a drafter and a target on two machines.

DIR/drafter/drafter.key_secret   stays with the drafter
DIR/drafter/targets/target.key   the targets that it serves; add more as you like
DIR/target/target.key_secret     stays with the target
DIR/target/drafter.key           the drafter that it talks to
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq.auth


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if there is something in DIR already."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ssd.keys",
        description="Make the CURVE keys of a drafter and a target that do not share a machine.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    folder: Path = parser.parse_args(argv).folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        print(f"{folder}: there is something already; name a new folder", file=sys.stderr)
        return 1
    make_keys(folder)
    print(
        f"Copy {folder}/drafter to the drafter's machine and {folder}/target to the target's.\n"
        "drafter: python -m sglang_ssd.drafter --model-path DRAFT --endpoint tcp://0.0.0.0:PORT "
        "--secret-key drafter/drafter.key_secret --peer-keys drafter/targets\n"
        "target:  python -m sglang_ssd.launch_server ... --ssd-endpoint tcp://HOST:PORT "
        "--ssd-secret-key target/target.key_secret --ssd-peer-keys target/drafter.key"
    )
    return 0


def make_keys(folder: Path) -> None:
    """Both key pairs, each side's folder complete; readable by the owner alone."""
    ours = {"drafter": folder / "drafter", "target": folder / "target"}
    targets = ours["drafter"] / "targets"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for directory in (*ours.values(), targets):
        directory.mkdir(mode=0o700)
    for name, directory in ours.items():
        _, secret = zmq.auth.create_certificates(directory, name)
        Path(secret).chmod(0o600)
    shutil.move(ours["target"] / "target.key", targets / "target.key")
    shutil.move(ours["drafter"] / "drafter.key", ours["target"] / "drafter.key")


if __name__ == "__main__":
    sys.exit(main())
