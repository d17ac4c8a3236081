"""Wrong settings are refused all at once, each by its flag; right ones survive the trip."""

from __future__ import annotations

import msgspec
import pytest

from sglang_ssd.config import (
    CONFIG_ENV,
    SsdConfig,
    allowed_values,
    build_config,
    dump_config,
    flag_name,
    from_texts,
    help_text,
    load_config,
    validate,
    without_effect,
)


def load(text: str) -> SsdConfig:
    return load_config({CONFIG_ENV: text})


def test_nothing_set_is_the_defaults() -> None:
    assert load_config({}) == load(" ") == SsdConfig()


def test_round_trip_through_text_and_file(tmp_path) -> None:
    config = SsdConfig(mode="sync", fan_out=[4, 2, 0], endpoint="ipc:///run/d", trace=None)
    assert load(dump_config(config)) == config
    path = tmp_path / "ssd.json"
    path.write_text(dump_config(config))
    assert load(str(path)) == config


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"modus": "async"}', ["--ssd-modus", "no such setting", "--ssd-mode"]),
        ('{"mode": "fast"}', ["--ssd-mode 'fast'", "one of async, off, sync"]),
        ('{"reply_deadline_ms": 0}', ["--ssd-reply-deadline-ms 0", "above 0"]),
        ('{"reply_deadline_ms": -1.5}', ["--ssd-reply-deadline-ms -1.5", "above 0"]),
        ('{"lease_s": "10"}', ["--ssd-lease-s '10'", "a number above 0"]),
        ('{"fan_out": [3, -1]}', ["--ssd-fan-out 3,-1", "at least 0"]),
        ('{"fan_out": 3}', ["--ssd-fan-out 3", "a list"]),
        ('{"acceptance_rate": 1}', ["--ssd-acceptance-rate 1", "between 0 and 1"]),
        ('{"drafter_max_sequences": 0}', ["--ssd-drafter-max-sequences 0", "or left out"]),
        ('{"allow_padded_vocab": "yes"}', ["--ssd-allow-padded-vocab 'yes'", "true or false"]),
        ("[1]", [CONFIG_ENV, "JSON object"]),
        ('{"mode": ', [CONFIG_ENV, "JSON object"]),
        ("/no/such/file", [CONFIG_ENV, "/no/such/file"]),
    ],
)
def test_wrong_settings_are_named(text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="S") as caught:
        load(text)
    for part in parts:
        assert part in str(caught.value)


def test_no_wait_is_endless() -> None:
    with pytest.raises(ValueError, match=r"--ssd-start-timeout-s inf"):
        build_config({"start_timeout_s": float("inf")})


def test_every_wrong_setting_is_in_one_refusal() -> None:
    with pytest.raises(ValueError, match="Wrong SSD settings") as caught:
        load('{"mode": "x", "lease_s": 0, "what": 1}')
    settings = ", ".join(map(flag_name, SsdConfig.__struct_fields__))
    assert str(caught.value) == (
        "Wrong SSD settings:\n"
        "  --ssd-mode 'x': must be one of async, off, sync\n"
        "  --ssd-lease-s 0: must be a number above 0\n"
        f"  --ssd-what: no such setting; there are {settings}"
    )


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (SsdConfig(fan_out=[1, 2]), "--ssd-fan-out 1,2: 2 numbers; allowed is one, or 5"),
        (SsdConfig(fan_out=[]), "0 numbers"),
        (SsdConfig(fan_out=[0, 0, 0, 0, 0]), "all zero"),
        (SsdConfig(endpoint="tcp://10.0.0.1:5000"), "loopback"),
        (SsdConfig(endpoint="tcp://127.0.0.1"), "no port"),
        (SsdConfig(endpoint="/tmp/sock"), "ipc:///PATH"),
        (SsdConfig(endpoint="ipc://run/drafter"), "not an absolute path"),
        (SsdConfig(endpoint="ipc:///" + "x" * 120), "longer than 103 bytes"),
        (SsdConfig(endpoint="tcp://127.0.0.1:5000/x"), "no port"),
        (SsdConfig(trace="/no/such/folder/t.json"), "existing folder"),
        (SsdConfig(trace="/dev/full"), "existing folder"),
        (SsdConfig(trace="/"), "existing folder"),
        (SsdConfig(drafter_device="gpu"), "auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_depends_on_more_than_the_value(config: SsdConfig, part: str) -> None:
    [reason] = validate(config, num_steps=4)
    assert part in reason


def test_good_configs_have_no_reasons() -> None:
    for config in (
        SsdConfig(),
        SsdConfig(fan_out=[5, 0, 0, 0, 1], endpoint="tcp://[::1]:5000"),
        SsdConfig(endpoint="ipc:///run/drafter", trace="trace.json"),
    ):
        assert validate(config, num_steps=4) == []


def test_every_field_says_what_it_does_and_may_be() -> None:
    for field in msgspec.structs.fields(SsdConfig):
        assert help_text(field.name).endswith(".")
        assert allowed_values(field.name)


def test_texts_of_a_command_line_become_values() -> None:
    texts = {"fan_out": ["4", "2"], "lease_s": "2.5", "drafter_max_sequences": "8"}
    config = build_config(from_texts({**texts, "allow_padded_vocab": True}))
    assert config == SsdConfig(
        fan_out=[4, 2], lease_s=2.5, drafter_max_sequences=8, allow_padded_vocab=True
    )
    with pytest.raises(ValueError, match=r"--ssd-fan-out 4,x"):
        build_config(from_texts({"fan_out": ["4", "x"]}))


def test_what_is_without_effect_on_another_drafter_is_known() -> None:
    """Red when a setting that only a drafter reads is taken from a server that started none."""
    settings = {"fan_out": [4], "drafter_cores": "0", "restart_delay_s": 1, "trace": "t.json"}
    assert without_effect(build_config(settings)) == []
    assert without_effect(build_config({**settings, "endpoint": "ipc:///d"})) == [
        *("--ssd-fan-out", "--ssd-restart-delay-s")
    ]
    assert without_effect(build_config({**settings, "endpoint": "tcp://10.0.0.1:5000"})) == [
        *("--ssd-fan-out", "--ssd-restart-delay-s", "--ssd-drafter-cores")
    ]
    assert without_effect(build_config({**settings, "endpoint": "ipc:///d", "mode": "off"})) == []
