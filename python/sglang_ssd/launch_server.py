"""`python -m sglang_ssd.launch_server`, or `sglang-ssd`: SGLang's server, our settings as flags.

It takes every flag of SGLang and one --ssd-* flag for each field of SsdConfig, chooses the CPU
platform where there is no accelerator, and then starts the server as sglang.launch_server does.
The platform must be chosen before anything of SGLang is imported, so those imports are local.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_ssd.config import (
    ALGORITHM,
    CONFIG_ENV,
    CPU_PLATFORM,
    DEFAULT_NUM_STEPS,
    MAX_NUM_STEPS,
    PLATFORM_ENV,
    SettingsError,
    SsdConfig,
    allowed_values,
    flag_name,
    from_texts,
    help_text,
    load_config,
    raw_settings,
    shown_default,
)
from sglang_ssd.drafter.process import sweep_socket_dirs
from sglang_ssd.platform.affinity import core_reasons, lent_cores

HOLDS_WITHOUT_SSD = frozenset({"target_cores"})
"""Settings that mean something to a server without speculation."""


def main(argv: Sequence[str] | None = None) -> None:
    """Start the server of this command line and serve until it is told to stop."""
    given = list(sys.argv[1:] if argv is None else argv)
    own_parser = ssd_parser()
    own_flags, server_argv = own_parser.parse_known_args(_join_negative_values(given))
    settings: dict[str, Any] = vars(own_flags)
    try:
        if settings:
            os.environ[CONFIG_ENV] = merge_settings(settings)
        server_argv = choose_platform(server_argv)
        _serve(server_argv, settings)
    except SettingsError as error:
        sys.exit(f"sglang-ssd: {error}")


def _join_negative_values(argv: Sequence[str]) -> list[str]:
    """--ssd-fan-out -1,2 as one word: argparse takes a lone -1,2 for a flag, and says no more."""
    joined: list[str] = []
    for word in argv:
        if joined and re.fullmatch(r"--ssd-[a-z-]+", joined[-1]) and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def ssd_parser() -> argparse.ArgumentParser:
    """The --ssd-* flags alone; flags that are not given leave no trace in the result."""
    parser = argparse.ArgumentParser(prog="sglang-ssd", add_help=False, allow_abbrev=False)
    add_ssd_flags(parser)
    return parser


def add_ssd_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of SsdConfig, whose help states its default and what it may be."""
    group = parser.add_argument_group(
        "SSD",
        "Speculative speculative decoding, with --speculative-algorithm SSD. K, the drafts of a "
        f"round, is --speculative-num-steps: 1 to {MAX_NUM_STEPS}, default {DEFAULT_NUM_STEPS}.",
    )
    defaults = msgspec.to_builtins(SsdConfig())
    for field in msgspec.structs.fields(SsdConfig):
        default = shown_default(defaults[field.name])
        allowed = f" Allowed: {allowed_values(field.name)}."
        text = f"{help_text(field.name)}{allowed} Default: {default}."
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if isinstance(defaults[field.name], bool):
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(defaults[field.name], list):
            options |= {"type": lambda text: text.split(","), "metavar": "N[,N...]"}
        else:
            options["metavar"] = field.name.rsplit("_", 1)[-1].upper()
        group.add_argument(flag_name(field.name), help=text.replace("%", "%%"), **options)


def merge_settings(settings: dict[str, Any]) -> str:
    """SGLANG_SSD_CONFIG with the flags over what it says already.

    Wrong values stay in it: the server's validation refuses them beside all else that it finds.
    """
    return msgspec.json.encode({**raw_settings(), **from_texts(settings)}).decode()


def choose_platform(server_argv: list[str]) -> list[str]:
    """SGLang's flags for this machine; sets SGLANG_PLATFORM where the CPU has to serve."""
    selected = os.environ.get(PLATFORM_ENV)
    if selected and selected != CPU_PLATFORM:
        raise SettingsError(
            f"{PLATFORM_ENV}={selected}: SGLang loads no plugin of ours under another platform; "
            f"unset it (GPU) or set it to {CPU_PLATFORM} (CPU)"
        )
    device = _given_device(server_argv)
    if not selected:
        if device not in (None, "cpu") or (device is None and has_accelerator()):
            return server_argv
        os.environ[PLATFORM_ENV] = CPU_PLATFORM
    return server_argv if device else [*server_argv, "--device", "cpu"]


def has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _given_device(server_argv: list[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    device: str | None = parser.parse_known_args(server_argv)[0].device
    return device


def _serve(server_argv: list[str], settings: dict[str, Any]) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if {"-h", "--help"} & set(server_argv):
        _print_help()
        return
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(server_argv)
    if (server_args.speculative_algorithm or "").upper() != ALGORITHM:
        _check_without_ssd(server_args.speculative_algorithm, settings)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
        sweep_socket_dirs()


def _check_without_ssd(algorithm: str | None, settings: dict[str, Any]) -> None:
    """What the algorithm's own validation would have found."""
    idle = [flag_name(name) for name in settings if name not in HOLDS_WITHOUT_SSD]
    if idle:
        raise SettingsError(
            f"{', '.join(idle)}: mean something only with --speculative-algorithm SSD "
            f"(given: {algorithm})"
        )
    reasons = core_reasons(load_config(), lent_cores())
    if reasons:
        raise SettingsError("; ".join(reasons))


def _print_help() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang-ssd")
    ServerArgs.add_cli_args(parser)
    add_ssd_flags(parser)
    parser.print_help()


if __name__ == "__main__":
    main()
