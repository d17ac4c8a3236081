"""The command line of our launcher: one flag for each setting, and the platform it chooses."""

from __future__ import annotations

import os

import msgspec
import pytest

from sglang_ssd import launch_server
from sglang_ssd.config import (
    CONFIG_ENV,
    SettingsError,
    SsdConfig,
    dump_config,
    flag_name,
    load_config,
)
from sglang_ssd.launch_server import choose_platform, merge_settings, ssd_parser


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (CONFIG_ENV, "SGLANG_PLATFORM"):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone as well
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch_server, "has_accelerator", lambda: False)
    return monkeypatch


def parse(*argv: str) -> tuple[SsdConfig, list[str]]:
    flags, rest = ssd_parser().parse_known_args(argv)
    return load_config({CONFIG_ENV: merge_settings(vars(flags))}), rest


def test_every_setting_is_a_flag_with_default_and_range() -> None:
    shown = " ".join(ssd_parser().format_help().split())
    for field in msgspec.structs.fields(SsdConfig):
        assert f"{flag_name(field.name)}" in shown
    assert shown.count("Default:") == shown.count("Allowed:") == len(SsdConfig.__struct_fields__)
    for default in ("Default: async.", "Default: 3.", "Default: 0.8.", "Default: left out."):
        assert default in shown
    assert "--speculative-num-steps: 1 to 16, default 4." in shown


def test_ssd_flags_are_taken_and_sglangs_are_left() -> None:
    config, rest = parse(
        *("--model-path", "m", "--ssd-mode", "sync", "--ssd-fan-out=4,2", "--port", "1"),
        *("--ssd-lease-s", "2.5", "--ssd-allow-padded-vocab"),
    )
    assert config == SsdConfig(mode="sync", fan_out=[4, 2], lease_s=2.5, allow_padded_vocab=True)
    assert rest == ["--model-path", "m", "--port", "1"]


def test_flags_go_over_the_environment(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(CONFIG_ENV, dump_config(SsdConfig(mode="sync", backup="none")))
    assert parse("--ssd-mode", "off")[0] == SsdConfig(mode="off", backup="none")


def test_all_wrong_flags_are_named_by_who_reads_them() -> None:
    with pytest.raises(SettingsError) as caught:
        parse("--ssd-mode", "fast", "--ssd-fan-out", "3,-1", "--ssd-reply-deadline-ms", "0")
    for part in ("--ssd-mode 'fast'", "--ssd-fan-out 3,-1", "--ssd-reply-deadline-ms '0'"):
        assert part in str(caught.value)


def test_a_wrong_number_that_looks_like_a_flag_is_a_wrong_number(
    environment: pytest.MonkeyPatch,
) -> None:
    """Red when argparse, which takes -1,2 for a flag, ends before the other reasons are heard."""
    served = []
    environment.setattr(launch_server, "_serve", lambda argv, settings: served.append(argv))
    launch_server.main(
        ["--ssd-fan-out", "-1,2", "--ssd-lease-s", "-3", "--ssd-allow-padded-vocab", "--port", "1"]
    )
    assert served == [["--port", "1", "--device", "cpu"]]
    with pytest.raises(SettingsError) as caught:
        load_config()
    assert "--ssd-fan-out -1,2: must be" in str(caught.value)
    assert "--ssd-lease-s '-3': must be" in str(caught.value)


def test_cpu_platform_is_chosen_without_an_accelerator() -> None:
    assert choose_platform(["--port", "1"]) == ["--port", "1", "--device", "cpu"]
    assert os.environ["SGLANG_PLATFORM"] == "ssd_cpu"


def test_an_accelerator_is_left_alone(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(launch_server, "has_accelerator", lambda: True)
    assert choose_platform(["--port", "1"]) == ["--port", "1"]
    assert "SGLANG_PLATFORM" not in os.environ
    assert choose_platform(["--device=cpu"]) == ["--device=cpu"]
    assert os.environ["SGLANG_PLATFORM"] == "ssd_cpu"


def test_a_foreign_platform_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("SGLANG_PLATFORM", "other")
    with pytest.raises(SettingsError, match=r"SGLANG_PLATFORM=other.*ssd_cpu"):
        choose_platform([])
