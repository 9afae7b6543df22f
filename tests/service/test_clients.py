"""Tests for the file of API keys with names and quotas."""

from __future__ import annotations

import time
from hashlib import sha256
from pathlib import Path

import pytest

from mindie_mm.errors import InputError, QueueFull, QuotaExceeded
from mindie_mm.settings.config import ServiceConfig
from service.http.clients import Client, Clients


def read(folder: Path, text: str) -> Clients:
    file = folder / "keys.toml"
    file.write_text(text)
    return Clients(ServiceConfig(api_key=("plain",), api_key_file=file))


def found(clients: Clients, key: str) -> str:
    client = clients.find(sha256(key.encode()).digest())
    return "nobody" if client is None else client.name


def test_keys_of_the_setting_and_of_the_file_are_found(tmp_path: Path) -> None:
    clients = read(tmp_path, "[a]\nkey = 'one'\n[b]\nkey = 'two'\n")
    assert [found(clients, key) for key in ("plain", "one", "two", "thr")] == ["", "a", "b", "nobody"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no keys; add a table for each"),
        ("[a", "is not valid TOML"),
        ("key = 'secret'", r"\[key\]: Expected `object`, got `str`"),
        ("[a]\nkey = 5", r"\[a\]: Expected `str`, got `int`"),
        ("[a]\nkey = ''", r"\[a\]: the key is empty"),
        ("[a]\nkey = 'secret\u00e9'", r"\[a\]: the key is empty or has a character"),
        ("['a secret']\nkey = 'x'", "a name must have 1 to 64 letters"),
        ("[a]\nkey = 'secret'\nrpm = 5", r"\[a\]: Object contains unknown field `rpm`"),
        ("[a]\nkey = 'secret'\nrequests_per_minute = 0", r"\[a\]: Expected `int` >= 1 - at `\$.requests_per_minute`"),
        ("[a]\nkey = 'secret'\n[b]\nkey = 'secret'", "b has the same key as a"),
        ("[a]\nkey = 'plain'", "a has the same key as --api-key"),
    ],
)
def test_an_invalid_file_is_refused_without_quoting_a_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, text)
    assert "keys.toml" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Clients(ServiceConfig(api_key_file=tmp_path / "none.toml"))


def test_a_reload_keeps_the_counts_of_names_that_stay(tmp_path: Path) -> None:
    clients = read(tmp_path, "[a]\nkey = 'one'\n[b]\nkey = 'two'\n")
    clients.named[0].count_tokens(prompt=7)
    (tmp_path / "keys.toml").write_text("[a]\nkey = 'new'\n")
    clients.reload()
    assert [found(clients, key) for key in ("one", "two", "new")] == ["nobody", "nobody", "a"]
    assert [client.num_prompt_tokens for client in clients.named] == [7]
    (tmp_path / "keys.toml").write_text("[a]\n")
    with pytest.raises(InputError):
        clients.reload()
    assert found(clients, "new") == "a"


def only(folder: Path, quota: str) -> Client:
    (client,) = read(folder, f"[a]\nkey = 'one'\n{quota}\n").named
    return client


def test_a_quota_limits_concurrent_requests(tmp_path: Path) -> None:
    client = only(tmp_path, "max_concurrent_requests = 2")
    for _ in range(2):
        client.require_room()
        client.begin()
    with pytest.raises(QuotaExceeded, match="named a has 2 requests in progress; its limit is 2") as caught:
        client.require_room()
    assert isinstance(caught.value, QueueFull)
    assert caught.value.retry_after_s == 1
    client.end()
    client.require_room()


def test_a_quota_of_tokens_counts_answers_and_fills_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = only(tmp_path, "tokens_per_minute = 600")
    start = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: start)
    client.count_tokens(prompt=500)
    client.require_room()
    client.count_tokens(generated=300)
    with pytest.raises(QuotaExceeded, match="has used 600 tokens in a minute") as caught:
        client.require_room()
    assert caught.value.retry_after_s == 21, "200 tokens too many, and one for the next request, at 10 per second"
    monkeypatch.setattr(time, "monotonic", lambda: start + 21)
    client.require_room()
