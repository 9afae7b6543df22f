"""Tests for the content part `file`, which contains a text file or a PDF."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.media_samples import raw_pdf
from tools.demo import data_url, draw_shape
from tools.serving import RunningService

CASES = Path(__file__).parents[1] / "cases/media3"
CHAT = "/v1/chat/completions"
QUESTION = {"type": "text", "text": "What is in the image?"}
RED, GREEN = draw_shape("red", (220, 40, 40), "square", x=0.4), draw_shape("green", (40, 160, 60), "star", x=0.5)


def file_part(data: bytes | str, name: str | None = None, kind: str = "application/pdf", **options: Any) -> Any:
    if isinstance(data, bytes):
        data = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "file", "file": {"file_data": data, "filename": name}, **options}


def pdf_of(*pages: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    pages[0].save(file, "PDF", save_all=True, append_images=pages[1:], resolution=144, **settings)
    return file.getvalue()


def body(*parts: Any, **changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "temperature": 0, "max_tokens": 12} | changes


def post(http: Any, *parts: Any, status: int = 200, **changes: Any) -> Any:
    answer = http.post(CHAT, json=body(*parts, **changes))
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]["message"]


def prompt(http: Any, *parts: Any) -> tuple[str, list[int]]:
    tokens = http.post("/tokenize", json=body(*parts)).json()["tokens"]
    return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"], tokens


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"A list:\n- tea\n", "A list:\n- tea\n"),
        ("Grüße".encode(), "Grüße"),
        (b"\xef\xbb\xbfx = 1", "x = 1"),
        ("Grüße".encode("utf-16"), "Grüße"),
        (b"<|im_end|><|IMAGE|>", "<|im_end|><|IMAGE|>"),
    ],
)
def test_a_text_file_becomes_text(http: Any, data: bytes, text: str) -> None:
    """The declared media type is ignored, and special tokens in the file stay text."""
    for name, head in (("list.txt", "File list.txt:\n"), (None, "")):
        for kind in ("text/plain", "application/pdf", "text/markdown;charset=utf-8"):
            found = prompt(http, QUESTION, file_part(data, name, kind))
            assert found == prompt(http, QUESTION, {"type": "text", "text": f"{head}{text}\n"})


@pytest.mark.parametrize("head", ["text/plain;charset=gbk", "text/plain", "application/octet-stream"])
def test_a_text_file_in_gbk_becomes_text(http: Any, head: str) -> None:
    data = (CASES / "gbk.txt").read_bytes()
    assert prompt(http, file_part(data, "a.txt", head)) == prompt(
        http, {"type": "text", "text": f"File a.txt:\n{data.decode('gbk')}\n"}
    )
    message = post(http, file_part("台北市".encode("big5"), "a.txt"), status=400)
    assert "state the charset, as in data:text/plain;charset=big5;base64,<data>" in message


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("unused_alpha.bmp", "plain.png"),
        ("white_is_zero_16.tif", "plain_grey.png"),
        ("thumbnail_first.tif", "plain.png"),
        ("long_text.png", "plain.png"),
        ("photo.heic", "plain.png"),
    ],
)
def test_an_image_in_any_format_gets_the_same_answer(http: Any, name: str, plain: str) -> None:
    answers = []
    for file in (name, plain):
        url = "data:;base64," + base64.b64encode((CASES / file).read_bytes()).decode()
        image = {"type": "image_url", "image_url": {"url": url}}
        answers.append(post(http, image, QUESTION)["choices"][0]["message"]["content"])
    assert answers[0] == answers[1] != ""


def test_all_pages_of_a_tiff_are_images(http: Any) -> None:
    """As an image, which is one image, the file is refused."""
    data, plain = ((CASES / name).read_bytes() for name in ("pages.tif", "plain.png"))
    image = {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(plain).decode()}}
    expected = post(http, image, image, QUESTION)["usage"]["prompt_tokens"]
    assert post(http, file_part(data, kind="image/tiff"), QUESTION)["usage"]["prompt_tokens"] == expected
    image["image_url"] = {"url": "data:image/tiff;base64," + base64.b64encode(data).decode()}
    assert "the TIFF has 2 pages" in post(http, image, QUESTION, status=400)


def test_a_page_whose_font_is_missing_is_refused(http: Any) -> None:
    font = (
        "5 0 obj <</Type/Font/Subtype/Type0/BaseFont/Rare/Encoding/Identity-H/DescendantFonts[<</Type/Font/Subtype"
        "/CIDFontType2/BaseFont/Rare/CIDSystemInfo<</Registry(Adobe)/Ordering(Identity)/Supplement 0>>>>]>> endobj\n"
    )
    page = raw_pdf("/MediaBox[0 0 99 99]/Resources<</Font<</F 5 0 R>>>>", "BT /F 24 Tf 9 9 Td <00240025> Tj ET", font)
    assert "'Rare', which is not embedded" in post(http, file_part(page), QUESTION, status=400)


def test_the_pages_of_a_pdf_are_images_in_its_place(service: RunningService, http: Any, red_square: str) -> None:
    """A PDF whose pages are images has the same placeholders as the images, and gets the same answers."""
    one, two = pdf_of(RED, quality=100), pdf_of(RED, GREEN, quality=100)
    image = {"type": "image_url", "image_url": {"url": red_square}}
    usages = [post(http, part, QUESTION)["usage"] for part in (file_part(one), image)]
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
    assert "red square" in post(http, file_part(one, "a.pdf"), QUESTION)["choices"][0]["message"]["content"]
    assert "green star" in post(http, file_part(pdf_of(GREEN)), QUESTION)["choices"][0]["message"]["content"]
    spans = post(http, QUESTION, file_part(two), image, QUESTION, media_spans=True)["media_spans"]
    apart = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in (RED, GREEN)]
    same = post(http, QUESTION, *apart, image, QUESTION, media_spans=True)["media_spans"]
    assert [(span["start"], span["stop"]) for span in spans] == [(span["start"], span["stop"]) for span in same]
    assert service.wait_until_free()["blocks"] == 0


def test_the_openai_client_sends_a_pdf(client: openai.OpenAI, service: RunningService) -> None:
    part: Any = file_part(pdf_of(RED), "red.pdf")
    messages: Any = [{"role": "user", "content": [part, QUESTION]}]
    answer = client.chat.completions.create(model=service.model, messages=messages, temperature=0, stream=True)
    assert "red square" in "".join(chunk.choices[0].delta.content or "" for chunk in answer)


ENCRYPTED = "/Encrypt <</Filter/Standard/V 1/R 2/P -4/O<" + "00" * 32 + ">/U<" + "11" * 32 + ">>>/ID[<00><00>]"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            file_part(raw_pdf("/MediaBox[0 0 9 9]").replace(b"<</Root", b"<<" + ENCRYPTED.encode() + b"/Root")),
            "encrypt",
        ),
        (file_part(b"%PDF-1.7 and nothing else"), "cannot be read"),
        (file_part(raw_pdf("/MediaBox[0 0 99 99]").replace(b"/Count 1", b"/Count 99").replace(b"[3", b"[9")), "broken"),
        (file_part(b"\x89PNG\r\n\x1a\n\0\0"), "neither a PDF nor text"),
        (file_part(b"a\0b"), "neither a PDF nor text"),
        (file_part(b"\n"), "is empty"),
        (file_part("https://example.org/a.pdf"), "send the content of the file in file_data"),
        (file_part("data:application/pdf,%25PDF"), "not of the form data:<type>;base64"),
        (file_part("not base64!"), "not valid base64"),
        ({"type": "file", "file": {"file_id": 1}}, "file_id is not supported here"),
        ({"type": "file", "file": {}}, "file_data is missing"),
        ({"type": "file", "file": "x"}, "file is of type str"),
        (file_part(b"a", "n" * 10_000), "filename has 10000 characters; the limit is 255"),
        (file_part(b"a", fps=2), "fps"),
        (file_part(pdf_of(*[RED.resize((8, 8))] * 33)), "33 pages or more; the limit is 32 (--max-pdf-pages)"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(http: Any, part: Any, message: str) -> None:
    assert message in post(http, part, QUESTION, status=400)


@pytest.mark.parametrize("size", ["0 0 1e30 1e30", "0 0 0 0", "0 0 1000000 1000000", "5 5 5 5", "0 0 0.001 14400"])
def test_the_size_of_a_page_is_bounded(http: Any, size: str) -> None:
    """No matter what size a page declares, it is rendered at a limited size or refused."""
    answer = http.post(CHAT, json=body(file_part(raw_pdf(f"/MediaBox[{size}]")), QUESTION))
    assert answer.status_code in (200, 400), answer.text


def test_an_image_that_is_too_large_is_not_decoded(http: Any) -> None:
    head = "/Type/XObject/Subtype/Image/Width 60000/Height 60000/BitsPerComponent 8/ColorSpace/DeviceRGB"
    image = f"5 0 obj <<{head}/Length 0>> stream\nendstream endobj\n"
    page = "/MediaBox[0 0 99 99]/Resources<</XObject<</I 5 0 R>>>>"
    message = post(http, file_part(raw_pdf(page, "99 0 0 99 0 0 cm /I Do", image)), QUESTION, status=400)
    assert "60000x60000" in message
