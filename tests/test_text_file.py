"""Tests for the charsets of text files."""

import base64
from pathlib import Path

import pytest

from mindie_mm.errors import InputError
from mindie_mm.inputs import MediaOptions, Text
from mindie_mm.inputs.files import parse_file
from mindie_mm.inputs.text_file import stated_charset, text_of_file

GBK = (Path(__file__).parent / "cases/media3/gbk.txt").read_bytes()
INVOICE = "发票合计：一百元\r\n"  # noqa: RUF001
CHINESE = (
    INVOICE,
    "本合同由甲乙双方在北京签订，自二〇二四年三月一日起生效。",  # noqa: RUF001
    "姓名,金额\r\n张三,100\r\n李四,200\r\n",
    "采购订单：钢管三百米，水泥五十吨",  # noqa: RUF001
    "中华人民共和国宪法",
    "使用说明：双击运行安装程序即可。",  # noqa: RUF001
    "床前明月光，疑是地上霜。举头望明月，低头思故乡。",  # noqa: RUF001
    "def f(x):\n    # 返回两个数中较大的那个\n    return x\n",
)
OTHERS = (
    ("これは日本語のテキストです。", "shift_jis"),
    ("これは日本語のテキストです。", "euc_jp"),
    ("株式会社東京", "euc_jp"),
    ("안녕하세요 한국어 텍스트입니다", "euc_kr"),
    ("대한민국 서울특별시 강남구", "euc_kr"),
    ("大韓民國 서울특별시", "euc_kr"),
    ("繁體中文的文字檔案，發票號碼一百元", "big5"),  # noqa: RUF001
    ("台北市", "big5"),
    ("Привет, как дела? Это текст", "koi8-r"),
    ("привет", "koi8-r"),
    ("Привет, как дела?", "windows-1251"),
    ("Grüße aus Köln für Größe", "iso-8859-1"),
    ("café crème à la française", "windows-1252"),
    ("Größe", "windows-1252"),
    ("สวัสดีครับ ประเทศไทย", "cp874"),
    ("Καλημέρα κόσμε", "windows-1253"),
    ("שלום עולם", "windows-1255"),
    ("مرحبا بالعالم", "windows-1256"),
    ("สวัสดี", "cp874"),
    ("บริษัท", "cp874"),
    ("นครราชสีมา", "cp874"),
    ("ประชาชนคอมพิวเตอร์", "cp874"),
    ("บาทจังหวัดนครราชสีมา", "cp874"),
    ("ГОРОДПОДПИСЬПРИКАЗ", "windows-1251"),
    ("ЦЕНА ПРОДАВЕЦ", "windows-1251"),
    ("КОЛИЧЕСТВО", "windows-1251"),
    ("ответзакон", "koi8-r"),
    ("ответзакон\n" * 100, "koi8-r"),
    ("покупатель", "koi8-r"),
    ("РУБЛЬЗАКАЗ", "iso-8859-5"),
    ("ΣΠΊΤΙΔΟΥΛΕΙΆ", "windows-1253"),
    ("السعرخبز", "windows-1256"),
    ("인생 역사 東京 회사 주소", "euc_kr"),
    ("北海道", "euc_jp"),
    ("中国 令和 数量 年月日 鈴木", "euc_jp"),
    ("会社 社会 住所 領収書 北海道", "euc_jp"),
    ("Příliš žluťoučký kůň", "windows-1250"),
)


@pytest.mark.parametrize("text", CHINESE)
@pytest.mark.parametrize("charset", ["gbk", "gb18030"])
def test_chinese_text_is_detected(text, charset):
    assert text_of_file(text.encode(charset), None, "the file") == text
    assert text_of_file(text.encode(charset), charset, "the file") == text


def test_the_case_is_read():
    assert text_of_file(GBK, None, "the file") == text_of_file(GBK, "gbk", "the file") == INVOICE


@pytest.mark.parametrize(("text", "charset"), OTHERS)
def test_text_in_another_charset_is_never_garbled(text, charset):
    """The charset must be stated, because short texts in these charsets are also valid in others."""
    with pytest.raises(InputError, match=r"state the charset, as in data:text/plain;charset=big5;base64"):
        text_of_file(text.encode(charset), None, "the file")
    assert text_of_file(text.encode(charset), charset, "the file") == text


def test_a_text_of_few_characters_needs_a_charset():
    with pytest.raises(InputError, match="state the charset"):
        text_of_file("你好".encode("gbk"), None, "the file")
    assert text_of_file("你好".encode("gbk"), "gbk", "the file") == "你好"


@pytest.mark.parametrize("charset", ["utf-8-sig", "utf-16", "utf-32", "utf-16-be", "utf-16-le"])
@pytest.mark.parametrize("stated", [None, "utf-8", "gbk"])
def test_a_byte_order_mark_takes_precedence(charset, stated):
    data = INVOICE.encode(charset)
    if charset.endswith(("be", "le")):
        data = "\ufeff".encode(charset) + data
    assert text_of_file(data, stated, "the file") == INVOICE


def test_utf_16_without_a_mark_can_be_stated():
    assert text_of_file(INVOICE.encode("utf-16-le"), "utf-16le", "the file") == INVOICE
    with pytest.raises(InputError, match="neither a PDF nor text"):
        text_of_file("a text".encode("utf-16-le"), None, "the file")


def test_a_wrong_charset_is_refused():
    with pytest.raises(InputError, match="not valid text in the charset 'utf-8' that it states"):
        text_of_file(GBK, "utf-8", "the file")
    for charset in ("klingon", "rot13", "idna", "unicode_escape", "zlib"):
        with pytest.raises(InputError, match=f"states the charset '{charset}', which is not supported"):
            text_of_file(GBK, charset, "the file")


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n\0\0", b"a\0b", b"PK\3\4" + bytes(range(128, 256)), bytes(range(1, 256))]
)
def test_what_is_no_text_is_refused(data):
    with pytest.raises(InputError, match="neither a PDF nor text"):
        text_of_file(data, None, "the file")


@pytest.mark.parametrize(
    ("media_type", "charset"),
    [
        ("data:text/plain;charset=gbk;base64", "gbk"),
        ('data:text/plain; CHARSET = "GB18030";base64', "GB18030"),
        ("data:text/plain;format=flowed;charset=big5;base64", "big5"),
        ("data:text/plain;base64", None),
        ("text/plain; charset=utf-8", "utf-8"),
    ],
)
def test_the_charset_of_a_media_type(media_type, charset):
    assert stated_charset(media_type) == charset


@pytest.mark.parametrize("head", ["data:text/plain;charset=big5;base64,", ""])
def test_a_file_part_states_its_charset(head):
    data = head + base64.b64encode("台北市".encode("big5")).decode()
    file = {"file_data": data} if head else {"file_data": data, "mime_type": "text/plain; charset=big5"}
    assert parse_file(file, MediaOptions(), "file", strict=True) == Text("台北市\n")


@pytest.mark.parametrize("start", [b"II*\0", b"MM\0*", b"II+\0"])
def test_a_tiff_is_a_document(start):
    parsed = parse_file({"file_data": base64.b64encode(start + bytes(9)).decode()}, MediaOptions(), "f", strict=True)
    assert not isinstance(parsed, Text)
    assert parsed.is_document
