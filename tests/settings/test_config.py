"""Tests for invalid settings. The error gives the name of the setting."""

import math

import pytest
from click.testing import CliRunner

from mindie_mm.cli import main
from mindie_mm.errors import InputError
from mindie_mm.settings.config import EngineConfig, ServiceConfig, WorkerConfig
from mindie_mm.settings.sources import configuration, from_environment, read_file


@pytest.mark.parametrize("empty", ["", ",", " , "])
@pytest.mark.parametrize("name", ["API_KEY", "ALLOWED_MEDIA_DOMAINS"])
def test_an_empty_list_in_the_environment_is_refused(monkeypatch, name, empty):
    """If an empty list of keys meant that there are no keys, a mistake would leave the service open to everyone."""
    monkeypatch.setenv(f"MINDIE_MM_{name}", empty)
    with pytest.raises(InputError, match=f"MINDIE_MM_{name} is '{empty}', which is empty"):
        from_environment(ServiceConfig)


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize("name", ["allowed_media_dir", "spool", "host"])
def test_an_empty_string_is_refused_in_every_source(monkeypatch, tmp_path, name, empty):
    """An empty path, as from `${DIR:-}`, would give clients access to all files of the working directory."""
    message = f"is '{empty}', which is empty"
    monkeypatch.setenv(f"MINDIE_MM_{name.upper()}", empty)
    with pytest.raises(InputError, match=f"MINDIE_MM_{name.upper()} {message}"):
        from_environment(ServiceConfig)
    file = tmp_path / "mm.toml"
    file.write_text(f'{name} = "{empty}"')
    with pytest.raises(InputError, match=f"mm.toml: {name} {message}"):
        read_file(file)
    with pytest.raises(InputError, match=f"^{name} {message}"):
        ServiceConfig(**{name: empty})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["serve", "--allowed-media-dir", ""], "--allowed-media-dir"),
        (["serve", ""], "[PATH]"),
        (["ask", "--model", "", "a"], "--model"),
    ],
)
def test_an_empty_path_on_the_command_line_is_refused(arguments, name):
    found = CliRunner().invoke(main, arguments)
    assert found.exit_code == 2
    assert f"{name}': the value is empty" in found.output


def test_an_empty_path_of_the_settings_file_is_refused(monkeypatch):
    monkeypatch.setenv("MINDIE_MM_CONFIG", "")
    with pytest.raises(InputError, match="MINDIE_MM_CONFIG is '', which is empty"):
        configuration({})


def test_the_environment_sets_fields_by_their_types(monkeypatch):
    monkeypatch.setenv("MINDIE_MM_PORT", "0")
    monkeypatch.setenv("MINDIE_MM_ALLOWED_MEDIA_DOMAINS", "a.example, b.example")
    monkeypatch.setenv("MINDIE_MM_ALLOW_PRIVATE_MEDIA", "true")
    found = ServiceConfig(**from_environment(ServiceConfig))
    assert (found.port, found.allow_private_media) == (0, True)
    assert found.allowed_media_domains == ("a.example", "b.example")


@pytest.mark.parametrize(("name", "value"), [("PORT", "eighty"), ("ALLOW_PRIVATE_MEDIA", "perhaps")])
def test_a_value_of_another_type_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(f"MINDIE_MM_{name}", value)
    with pytest.raises(InputError, match=f"MINDIE_MM_{name}='{value}' must be"):
        from_environment(ServiceConfig)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (EngineConfig, "max_num_batched_tokens", 0),
        (EngineConfig, "kv_block_size", 0),
        (EngineConfig, "max_model_len", 1),
        (WorkerConfig, "decoders", -1),
    ],
)
def test_a_value_below_the_minimum_is_refused(cls, name, value):
    with pytest.raises(InputError, match=f"{name}={value} must be an integer of at least"):
        cls(**{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 65536}, "port=65536 must be an integer from 0 to 65535"),
        ({"port": "80"}, "port='80' must be an integer from 0 to 65535"),
        ({"port": True}, "port=True must be an integer from 0 to 65535"),
        ({"grace_s": -1}, "grace_s=-1 must be a number of at least 0"),
        ({"grace_s": math.nan}, "grace_s=nan must be a number of at least 0"),
        ({"request_timeout_s": 0}, "request_timeout_s=0 must be a number above 0"),
        ({"send_timeout_s": math.inf}, "send_timeout_s=inf must be a number from 0.001 to 86400"),
        ({"served_model_name": ""}, "served_model_name is '', which is empty; leave it out, or give a value"),
        ({"log_level": "loud"}, "log_level='loud' must be one of debug, info, warning, error"),
        ({"web_page": "no"}, "web_page='no' must be true or false"),
        ({"spool": 5}, "spool=5 must be a string"),
        ({"api_key": "a-key"}, "api_key is of type str; it must be a list of elements, each a string"),
        ({"api_key": ("a-key", 5)}, "api_key is of type tuple; it must be a list of elements, each a string"),
        ({"max_media_items": 1.5}, "max_media_items=1.5 must be an integer of at least 0"),
    ],
)
def test_the_error_of_a_setting_states_its_limits(settings, message):
    with pytest.raises(InputError) as raised:
        ServiceConfig(**settings)
    assert str(raised.value) == message


def test_a_share_or_time_outside_its_limits_is_refused():
    for share in (0, 1.01, math.nan):
        with pytest.raises(InputError, match="must be a number above 0 and at most 1"):
            EngineConfig(memory_share=share)
    assert EngineConfig(memory_share=1, kv_cache_bytes=None).memory_share == 1
