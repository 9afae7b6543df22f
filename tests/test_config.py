"""Settings name themselves when they are wrong."""

import pytest

from mindie_mm.config import EngineConfig, ServiceConfig, WorkerConfig, environment
from mindie_mm.errors import InputError


@pytest.mark.parametrize("empty", ["", ",", " , "])
@pytest.mark.parametrize("name", ["API_KEY", "ALLOWED_MEDIA_DOMAINS"])
def test_an_empty_list_in_the_environment_is_a_mistake(monkeypatch, name, empty):
    """Taken as none, a key that was meant to be there would leave the service open."""
    monkeypatch.setenv(f"MINDIE_MM_{name}", empty)
    with pytest.raises(InputError, match=f"MINDIE_MM_{name} is '{empty}', which holds no value"):
        environment(ServiceConfig)


def test_the_environment_sets_fields_by_their_types(monkeypatch):
    monkeypatch.setenv("MINDIE_MM_PORT", "0")
    monkeypatch.setenv("MINDIE_MM_ALLOWED_MEDIA_DOMAINS", "a.example, b.example")
    monkeypatch.setenv("MINDIE_MM_ALLOW_PRIVATE_MEDIA", "true")
    found = ServiceConfig(**environment(ServiceConfig))
    assert (found.port, found.allow_private_media) == (0, True)
    assert found.allowed_media_domains == ("a.example", "b.example")


@pytest.mark.parametrize(("name", "value"), [("PORT", "eighty"), ("ALLOW_PRIVATE_MEDIA", "perhaps")])
def test_a_value_of_another_type_is_named(monkeypatch, name, value):
    monkeypatch.setenv(f"MINDIE_MM_{name}", value)
    with pytest.raises(InputError, match=f"MINDIE_MM_{name} is '{value}'"):
        environment(ServiceConfig)


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (EngineConfig, "max_num_batched_tokens", 0),
        (EngineConfig, "kv_block_size", 0),
        (EngineConfig, "max_model_len", 1),
        (WorkerConfig, "num_tokenizers", 0),
    ],
)
def test_what_nothing_could_run_with_is_refused(cls, name, value):
    with pytest.raises(InputError, match=f"{name} is {value}"):
        cls(**{name: value})
