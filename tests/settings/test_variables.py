"""Tests for environment variables whose names resemble settings. Warnings contain the names but no values."""

import dataclasses
import os
import re

import pytest
from click.testing import CliRunner

from mindie_mm.cli.serve import command
from mindie_mm.errors import InputError
from mindie_mm.settings.environment import variable
from mindie_mm.settings.sources import CLASSES, PARTS, REMOVED, configuration, misspelt_variables, without_effect


@pytest.fixture(autouse=True)
def only_these(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MINDIE_MM_")]:
        monkeypatch.delenv(name)


def test_a_misspelled_variable_is_reported_without_its_value(monkeypatch):
    monkeypatch.setenv("MINDIE_MM_MAX_MEDIA_ITEM", "4")
    monkeypatch.setenv("MINDIE_MM_API_KEYS", "a-secret")
    monkeypatch.setenv("MINDIE_MM_XYZZYPLUGHPLOVER", "1")
    assert misspelt_variables() == [
        "MINDIE_MM_API_KEYS is not a setting; did you mean MINDIE_MM_API_KEY?",
        "MINDIE_MM_MAX_MEDIA_ITEM is not a setting; did you mean MINDIE_MM_MAX_MEDIA_ITEMS?",
        "MINDIE_MM_XYZZYPLUGHPLOVER is not a setting",
    ]
    configuration({})


def test_the_variable_of_every_setting_is_known(monkeypatch):
    for cls in CLASSES:
        for field in dataclasses.fields(cls):
            if field.name not in PARTS:
                monkeypatch.setenv(variable(field.name), "1")
    monkeypatch.setenv("MINDIE_MM_CONFIG", "/settings.toml")
    assert misspelt_variables() == []


def test_variables_of_kubernetes_services_are_not_reported(monkeypatch):
    """Kubernetes sets variables such as MINDIE_MM_SERVICE_HOST for Services named mindie-mm and mindie-mm-canary."""
    for name, value in {
        "SERVICE_HOST": "10.0.0.1",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_HTTP": "80",
        "PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PORT_8000_TCP_PROTO": "tcp",
        "PORT_8000_TCP_PORT": "8000",
        "PORT_8000_TCP_ADDR": "10.0.0.1",
        "CANARY_SERVICE_HOST": "10.0.0.2",
        "CANARY_PORT": "tcp://10.0.0.2:80",
        "CANARY_PORT_80_TCP_ADDR": "10.0.0.2",
    }.items():
        monkeypatch.setenv(f"MINDIE_MM_{name}", value)
    assert misspelt_variables() == []
    monkeypatch.setenv("MINDIE_MM_CANARY_PORT", "80")
    assert misspelt_variables() == ["MINDIE_MM_CANARY_PORT is not a setting"]


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_is_named_with_what_to_do(name, tmp_path, monkeypatch):
    file = tmp_path / "settings.toml"
    file.write_text(f"{name} = 0")
    with pytest.raises(InputError, match=f"the setting '{name}' was removed: {re.escape(REMOVED[name])}"):
        configuration({}, file)
    monkeypatch.setenv(f"MINDIE_MM_{name.upper()}", "0")
    assert misspelt_variables() == [f"MINDIE_MM_{name.upper()} has no effect: {REMOVED[name]}"]
    option = f"--{name.replace('_', '-')}"
    result = CliRunner().invoke(command, [option, "0"])
    assert result.exit_code == 2
    assert f"{option} was removed: {REMOVED[name]}" in result.output
    assert option not in CliRunner().invoke(command, ["--help"]).output


def test_a_setting_without_effect_is_named_in_the_environment_and_refused_in_the_file(monkeypatch, tmp_path):
    names = {"device", "admin_key", "web_page"}
    monkeypatch.setenv("MINDIE_MM_DEVICE", "cpu")
    monkeypatch.setenv("MINDIE_MM_ADMIN_KEY", "secret")
    monkeypatch.setenv("MINDIE_MM_PORT", "8100")
    assert without_effect(configuration({}), names, "render") == [
        "MINDIE_MM_ADMIN_KEY has no effect on mindie-mm render",
        "MINDIE_MM_DEVICE has no effect on mindie-mm render",
    ]
    file = tmp_path / "settings.toml"
    file.write_text("port = 8100\nweb_page = true\n")
    with pytest.raises(InputError, match=r"settings\.toml: web_page has no effect on mindie-mm render; remove it"):
        without_effect(configuration({}, file), names, "render")
