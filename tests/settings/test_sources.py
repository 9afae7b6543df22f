"""Tests for the sources of settings, the list of settings, and the errors for invalid settings."""

import dataclasses
from pathlib import Path

import pytest

from mindie_mm.cli.serve import command
from mindie_mm.errors import InputError
from mindie_mm.settings.config import WorkerConfig
from mindie_mm.settings.sources import CLASSES, PARTS, Configuration, configuration


@pytest.fixture
def file(tmp_path):
    return tmp_path / "settings.toml"


def origins(found: Configuration) -> dict[str, str]:
    return {one.name: one.origin for one in found.settings()}


def test_flags_override_the_environment_which_overrides_the_file(file, monkeypatch):
    file.write_text("port = 1\ngrace_s = 2\nmax_media_items = 3\n")
    monkeypatch.setenv("MINDIE_MM_GRACE_S", "20")
    monkeypatch.setenv("MINDIE_MM_MAX_MEDIA_ITEMS", "30")
    found = configuration({"max_media_items": 300, "host": None, "api_key": ()}, file)
    service = found.service
    assert (service.max_media_items, service.grace_s, service.port, service.host) == (300, 20.0, 1, "127.0.0.1")
    named = origins(found)
    assert (named["max_media_items"], named["grace_s"]) == ("--max-media-items", "MINDIE_MM_GRACE_S")
    assert (named["port"], named["host"]) == (str(file), "default")


def test_the_environment_names_the_file_unless_a_flag_does(file, monkeypatch, tmp_path):
    file.write_text("port = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("port = 2\n")
    monkeypatch.setenv("MINDIE_MM_CONFIG", str(file))
    assert configuration({}).service.port == 1
    assert configuration({}, other).service.port == 2


def test_a_file_can_hold_every_type_of_setting(file):
    file.write_text(
        """
model = "/models/a"
family = "f"
max_num_seqs = 3
memory_share = 1
max_video_seconds = 1.5
truncate = true
api_key = ["one", "two"]
allowed_media_domains = []
rgba_background_color = [0, 128, 255]
"""
    )
    found = configuration({}, file)
    worker, service = found.worker, found.service
    assert (worker.model, worker.family, worker.truncate) == (Path("/models/a"), "f", True)
    assert (worker.engine.max_num_seqs, worker.engine.memory_share, worker.media.max_video_seconds) == (3, 1.0, 1.5)
    assert worker.media.rgba_background_color == (0, 128, 255)
    assert (service.api_key, service.allowed_media_domains) == (("one", "two"), ())


def test_a_color_can_come_from_the_environment_or_a_flag(monkeypatch):
    monkeypatch.setenv("MINDIE_MM_RGBA_BACKGROUND_COLOR", "0, 128,255")
    assert configuration({}).worker.media.rgba_background_color == (0, 128, 255)
    found = configuration({"rgba_background_color": (1, 2, 3)})
    assert found.worker.media.rgba_background_color == (1, 2, 3)
    assert origins(found)["rgba_background_color"] == "--rgba-background-color"
    parsed = command.make_context("serve", ["--rgba-background-color", "1", "2", "3"]).params
    assert parsed["rgba_background_color"] == (1, 2, 3)
    for text in ("white", "0,0", "0,0,256", "#ffffff"):
        monkeypatch.setenv("MINDIE_MM_RGBA_BACKGROUND_COLOR", text)
        message = "MINDIE_MM_RGBA_BACKGROUND_COLOR=.* must be a list of 3 elements, each an integer from 0 to 255"
        with pytest.raises(InputError, match=message):
            configuration({})


@pytest.mark.parametrize("text", ["image=4, video=0", '{"image": 4, "video": 0}'])
def test_limits_of_prompts_can_come_from_every_source(file, monkeypatch, text):
    for stated in (f"'{text}'", "{image = 4, video = 0}"):
        file.write_text(f"limit_mm_per_prompt = {stated}")
        assert configuration({}, file).worker.limit_mm_per_prompt == {"image": 4, "video": 0}
    monkeypatch.setenv("MINDIE_MM_LIMIT_MM_PER_PROMPT", text)
    assert configuration({}).worker.limit_mm_per_prompt == {"image": 4, "video": 0}
    flags = command.make_context("serve", ["--limit-mm-per-prompt", text]).params
    found = configuration(flags)
    assert found.worker.limit_mm_per_prompt == {"image": 4, "video": 0}
    assert {one.name: one.value for one in found.settings()}["limit_mm_per_prompt"] == "{image = 4, video = 0}"


def test_the_service_limits_prompts_also_in_kinds_that_the_setting_leaves_out():
    assert configuration({}).worker.limit_mm_per_prompt == {}
    served = configuration({}).for_service()
    assert served.worker.limit_mm_per_prompt == {"image": 32, "video": 8, "audio": 8}
    assert origins(served)["limit_mm_per_prompt"] == "default"
    served = configuration({"limit_mm_per_prompt": "image=4"}).for_service()
    assert served.worker.limit_mm_per_prompt == {"image": 4, "video": 8, "audio": 8}


@pytest.mark.parametrize(
    "value", ["image", "image=", "image=-1", "image=1,image=2", "picture=1", "[1]", '{"image":', {"image": "1"}, [], 4]
)
def test_other_limits_of_prompts_are_refused(value):
    with pytest.raises(InputError, match="must be a mapping from image, video, audio to an integer of at least 0"):
        WorkerConfig(limit_mm_per_prompt=value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rgba_background_color = [0, 0]",
            r"=\[0, 0\] must be a list of 3 elements, each an integer from 0 to 255",
        ),
        ("rgba_background_color = 'white'", "='white' must be a list of 3"),
        ("prot = 1", "there is no setting 'prot'; did you mean 'port'"),
        ("max-media-items = 1", "there is no setting 'max-media-items'; did you mean 'max_media_items'"),
        ("max-images = 1", "the setting 'max_images' was removed: set limit_mm_per_prompt, such as image=4"),
        ("xyzzy = 1", "there is no setting 'xyzzy'$"),
        ("engine = 1", "there is no setting 'engine'"),
        ("[engine]\nmax_num_seqs = 1", r"\[engine\] is a table; settings must be top-level keys"),
        ("port = '1'", "port='1' must be an integer from 0 to 65535"),
        ("port = 1.0", "port=1.0 must be an integer from 0 to 65535"),
        ("port = true", "port=True must be an integer from 0 to 65535"),
        ("grace_s = true", "grace_s=True must be a number of at least 0"),
        ("truncate = 1", "truncate=1 must be true or false"),
        ("spool = 1", "spool=1 must be a string"),
        ("family = 1979-05-27", "family is of type date; it must be a string"),
        ("api_key = 'a-secret'", "api_key is of type str; it must be a list of elements, each a string$"),
        ("api_key = ['a', 1]", "api_key is of type list; it must be a list of elements, each a string$"),
        ("port = ", "is not valid TOML"),
        ("port = 1\nport = 2", "is not valid TOML"),
    ],
)
def test_the_error_of_a_mistake_names_file_and_key(file, text, message):
    file.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        configuration({}, file)
    assert str(caught.value).startswith(str(file))
    assert "a-secret" not in str(caught.value)


def test_an_invalid_value_is_refused_from_a_file_too(file):
    file.write_text("log_format = 'xml'")
    with pytest.raises(InputError, match="log_format='xml' must be one of text, json"):
        configuration({}, file)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read_is_refused(file, content):
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"cannot be read: (No such file|it is not UTF-8)"):
        configuration({}, file)


def test_the_listing_of_settings_hides_only_secrets(file):
    file.write_text("api_key = ['first-key', 'second-key']\nserved_model_name = 'm'\nport = 0\n")
    listed = {one.name: one.value for one in configuration({}, file).settings()}
    assert listed.keys() == {field.name for cls in CLASSES for field in dataclasses.fields(cls)} - PARTS
    assert (listed["api_key"], listed["served_model_name"], listed["port"]) == ("*** (2 of them)", '["m"]', "0")
    assert (listed["truncate"], listed["spool"], listed["cors_origin"]) == ("false", "none", "[]")
    assert not any("-key" in value for value in listed.values())


def test_names_of_settings_are_unique():
    names = [field.name for cls in CLASSES for field in dataclasses.fields(cls) if field.name not in PARTS]
    assert len(names) == len(set(names)), "a file has no sections, and a flag no prefix"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:4318", "must be an http or https URL"),
        ("grpc://collector:4317", "must be an http or https URL"),
        ("http://", "must be an http or https URL"),
        ("http://user:word@collector/v1/traces", "has a user name or a query, which may be secret"),
    ],
)
def test_an_invalid_endpoint_for_spans_is_refused(url, message):
    with pytest.raises(InputError, match=message):
        configuration({"otlp_endpoint": url})
