"""Attacks with addresses and files that a client must not reach, and with deceptive or invalid URLs."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.attacks.conftest import CHAT, Attacked, asking
from tools.demo import draw_shape, encode

STAR = encode(draw_shape("green", (40, 160, 60), "star", x=0.5), "PNG")
B64 = base64.b64encode(STAR).decode()

UNKNOWN = "its name cannot be resolved"
PRIVATE = [
    "127.0.0.1",
    "127.1",
    "127.255.255.254",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "0177.0.0.1",
    "017700000001",
    "0",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.0.1",
    "100.64.0.1",
    "169.254.169.254",
    "2852039166",
    "0xA9FEA9FE",
    "100.100.100.200",
    "192.0.0.192",
    "168.63.129.16",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "[::1]",
    "[::]",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b:1::7f00:1]",
    "[2002:7f00:1::]",
    "[2001:0:0:0:0:0:80ff:fffe]",
    "[fe80::1]",
    "[fe80::1%25lo]",
    "[fc00::1]",
    "[fd00:ec2::254]",
    "[fec0::1]",
    "[ff02::1]",
    "localhost",
    "localhost.",
    "LOCALHOST",
    "ip6-localhost",
    "\u2460\u2461\u2466.0.0.1",
    "127\u30020\u30020\u30021",
    "\uff11\uff12\uff17.0.0.1",
]
SPELLED = [
    ("http://user@127.0.0.1/x.png", "user name or password"),
    ("http://example.org:80@127.0.0.1/x.png", "user name or password"),
    ("http://example.org\\@127.0.0.1/x.png", "backslash"),
    ("http://127.0.0.1\\.example.org/x.png", "backslash"),
    ("http:\\\\127.0.0.1\\x.png", "backslash"),
    ("http://127.0.0.1\t/x.png", "white space or a control character"),
    ("http://127.0.0.1\r\nHost: x/", "white space or a control character"),
    ("http://127.0.0.1/\0.png", "white space or a control character"),
    ("http://127.0.0.1/x y.png", "white space or a control character"),
    ("http://127.0.0.1:99999/", "cannot be parsed"),
    ("http://[::1/x.png", "cannot be parsed"),
    ("http://127.0.0.1:0/x.png", "its port is 0"),
    ("http:///x.png", "has no host"),
    ("http://xn--/x.png", "cannot be parsed"),
    ("http://a.xn--.example/x.png", "cannot be parsed"),
    ("http:", ""),
    ("HTTP://127.0.0.1/x.png", "not public"),
    ("http:127.0.0.1", ""),
    ("http://127.0.0.1#@example.org/", "not public"),
    ("http://127.0.0.1?@example.org/", "not public"),
    ("http://" + "a" * 5000, "the limit is 4096"),
    ("ftp://127.0.0.1/x.png", "scheme 'ftp'"),
    ("gopher://127.0.0.1:6379/_FLUSHALL", "scheme 'gopher'"),
    ("dict://127.0.0.1:11211/stat", "scheme 'dict'"),
    ("ldap://127.0.0.1/", "scheme 'ldap'"),
    ("rtsp://127.0.0.1/x", "scheme 'rtsp'"),
    ("jar:http://127.0.0.1!/x", "scheme 'jar'"),
    ("unix:/var/run/docker.sock", "scheme 'unix'"),
    ("concat:/etc/passwd|/etc/hosts", "scheme 'concat'"),
    ("subfile,,start,0,end,9,,:/etc/passwd", ""),
    ("pipe:0", "scheme 'pipe'"),
    ("lavfi:movie=/etc/passwd", "scheme 'lavfi'"),
    ("blob:https://example.org/1", "scheme 'blob'"),
]
FILES = [
    "/etc/passwd",
    "/proc/self/environ",
    "/proc/1/cmdline",
    "/dev/zero",
    "/dev/stdin",
    "/dev/shm",
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "file:/etc/passwd",
    "file://localhost/etc/passwd",
    "file:///%65tc/passwd",
    "file:////etc/passwd",
    "file:etc/passwd",
    "file:",
    "{media}",
    "{media}/",
    "{media}/folder.png",
    "{media}/missing.png",
    "{media}/../secret.png",
    "{media}/folder.png/../../secret.png",
    "{media}/%2e%2e/secret.png",
    "file://{media}/../secret.png",
    "file://{media}/%2e%2e/secret.png",
    "file://{media}/..%2fsecret.png",
    "{media}x/../secret.png",
    "{media}/up/secret.png",
    "{media}/out.png",
    "{media}/relative.png",
    "{media}/chain.png",
    "{media}/loop.png",
    "{media}/proc/self/environ",
    "{media}/null.png",
    "{media}/zero.png",
    "{media}/pipe.png",
    "{media}/socket.png",
    "{media}/hole.png",
    "{media}/empty.png",
    "{media}/text.png",
    "{media}/star.png/",
    "{media}/star.png\0.txt",
    "file://{media}/star.png%00",
    "file://example.org{media}/star.png",
    "file://127.0.0.1{media}/star.png",
    "file://[{media}/star.png",
    "~/.ssh/id_rsa",
    "../../etc/passwd",
    "star.png",
    "/" + "a/" * 4000,
]
DATA = [
    ("data:", "must have the form"),
    ("data:,", "must have the form"),
    ("data:image/png," + B64, "must have the form"),
    ("data:" + ";" * 500_000 + "base64," + B64, "must have the form"),
    ("data:" + "a" * 500_000 + ";base64," + B64, "must have the form"),
    ("data:image/png;base32," + B64, "must have the form"),
    ("data:image/png;base64" + B64, "must have the form"),
    ("data:image/png;base64,", "is empty"),
    ("data:image/png;base64,=", "base64"),
    ("data:image/png;base64," + B64[:-1], "base64"),
    ("data:image/png;base64," + B64 + "=", "base64"),
    ("data:image/png;base64," + B64 + "====", "base64"),
    ("data:image/png;base64," + " " * 5_000_000, "is empty"),
    ("data:image/png;base64,\u00a0" + B64, "base64"),
    ("data:image/png;base64," + B64[:40] + "\x1c" + B64[40:], "base64"),
    ("data:image/png;base64," + B64[:40] + "%0A" + B64[40:], "base64"),
    ("data:image/png;base64," + B64[:40] + "\0" + B64[40:], "base64"),
    ("data:image/png;base64," + B64[:40] + "!" + B64[41:], "base64"),
    ("data:image/png;base64,-_" + B64[2:], "base64"),
    ("data:image/png;base64," + B64[:40] + "==" + B64[40:], "base64"),
    ("data:image/png;base64,data:image/png;base64," + B64, "base64"),
    ("data:image/png;base64,http://127.0.0.1/x.png", "base64"),
    ("data:image/png;base64,/etc/passwd", "base64"),
    ("data:image/png;base64,\u00e9\u00e9\u00e9\u00e9", "base64"),
    (
        "data:text/html;base64," + base64.b64encode(b"<script>alert(1)</script>" * 9).decode(),
        "cannot be read as an image",
    ),
    ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "cannot be read as an image"),
    ("data:video/jpeg;base64," + ",".join([B64] * 50), "base64"),
]


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_are_refused(attacked: Attacked, host: str) -> None:
    message = attacked.refused(asking("image", f"http://{host}:8000/x.png"), "media item 0 (image)")
    assert any(reason in message for reason in ("not public", "nor a canonical address", "cannot be parsed", UNKNOWN))


@pytest.mark.parametrize(("url", "message"), SPELLED)
def test_deceptive_urls_are_refused(attacked: Attacked, url: str, message: str) -> None:
    attacked.refused(asking("image", url), message)


@pytest.mark.parametrize("path", FILES)
def test_other_files_are_refused(attacked: Attacked, path: str) -> None:
    attacked.refused(asking("image", path.replace("{media}", str(attacked.media))), "media item 0 (image)")


def test_a_huge_file_url_is_refused(attacked: Attacked) -> None:
    """The URL is refused before its %XX escapes are decoded, which would take 100 times as much memory as the URL."""
    attacked.refused(asking("image", "file:///" + "%61" * 2_000_000), "the file: URL has 6000008 characters")


@pytest.mark.parametrize(("url", "message"), DATA, ids=range(len(DATA)))
def test_invalid_data_urls_are_refused(attacked: Attacked, url: str, message: str) -> None:
    attacked.refused(asking("image", url), message)


def test_a_data_url_above_the_limit_of_a_body_is_refused(attacked: Attacked) -> None:
    answer = attacked.http.post(CHAT, json=asking("image", "data:image/png;base64," + "A" * 90_000_000))
    assert answer.status_code == 413
    attacked.is_right()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("http://127.0.0.1:8000/x.wav", "not public"),
        ("file:///etc/passwd", "no such file"),
        ("/etc/passwd", "base64"),
        ("ftp://127.0.0.1/x.wav", "scheme 'ftp'"),
    ],
)
def test_audio_in_the_openai_form_obeys_the_same_policy(attacked: Attacked, data: str, message: str) -> None:
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    assert "media item 0 (audio)" in attacked.refused({"messages": [{"role": "user", "content": [part]}]}, message)


@pytest.mark.parametrize(
    "url", ["{media}/star.png", "file://{media}/star.png", "data:text/plain;base64," + B64, B64, B64 + "\n"]
)
def test_allowed_files_and_data_are_read(attacked: Attacked, url: str) -> None:
    answer = attacked.http.post(CHAT, json=asking("image", url.replace("{media}", str(attacked.media))))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("kind", "limit"), [("image", 32), ("video", 8), ("audio", 8)])
def test_too_many_items_of_a_kind_are_refused(attacked: Attacked, kind: str, limit: int) -> None:
    body = asking(kind, str(attacked.media / Path("star.png")))
    body["messages"][0]["content"] = body["messages"][0]["content"][:1] * (limit + 1)
    message = attacked.refused(body)
    assert f"{limit + 1} media items" in message
    assert f"the limit is {limit}" in message
