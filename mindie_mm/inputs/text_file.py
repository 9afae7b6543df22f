"""Decoding of text files: the charset is stated, or detected.

Without a stated charset, only Unicode and GB18030 are detected. Programs on Chinese Windows save text in GBK, which
GB18030 contains. Other charsets have too few features to be told apart in a short text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping

from mindie_mm.errors import InputError

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins like the mark of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_UNICODE = ("utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
_OTHERS = ("gb18030", "big5hkscs", "euc_jp", "cp932", "iso2022_jp", "cp949", "koi8-r", "koi8-u", "cp866", "cp874")
_PAGES = tuple(f"cp{number}" for number in range(1250, 1259))
_PARTS = tuple(f"iso8859-{number}" for number in range(2, 17) if number != 12)
_CODECS = frozenset((*_UNICODE, *_OTHERS, *_PAGES, *_PARTS, "mac-roman", "mac-cyrillic"))
_LARGER: Mapping[str, str] = {
    "ascii": "cp1252",
    "big5": "big5hkscs",
    "euc_kr": "cp949",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "iso8859-1": "cp1252",
    "shift_jis": "cp932",
    "tis-620": "cp874",
}
"""Charsets that contain a charset and are used in its place, as in the Encoding Standard of the Web."""
_CHARSET = re.compile(r""";\s*charset\s*=\s*["']?([A-Za-z0-9_.:-]{1,40})""", re.IGNORECASE)
_CONTROLS = re.compile(r"[\0-\x08\x0e-\x19\x1c-\x1f\x7f\ufffe\uffff]")
_SAMPLE = 2**16
"""Number of characters to look at when the charset is detected."""
_FREQUENT = frozenset(
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过发后作里用道行所然家种事成方多经么去法学如都同现当没动"
    "面起看定天分还进好小部其些主样理心她本前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很最重并物手应战向"
    "头文体政美相见被利什二等产或新己制身果加西斯月话合回特代内信表化老给世位次度门任常先海通教儿原东声提立及比员解水名真论处走义各入几口认条平系气题活"
    "尔更别打女变四神总何电数安少报才结反受目太量再感建务做接必场件计管期市直德资命山金指克许统区保至队形社便空决治展马科司五基眼书非则听白却界达光放强即像难"
    "且权思王象完设式色路记南品住告类求据程北边死张该交规万取拉格望觉术领共确传师观清今切院让识候带导争运笑飞风步改收根干造言联持组每济车亲极林服快办议往元英"
    "士证近失转夫令准布始怎呢存未远叫台单影具罗字爱击流备兵连调深商算质团集百需价花党华城石级整府离况亚请技际约示复病息究线似官火断精满支视消越器容照须九增研"
    "写称企八功吗包片史委乎查轻易早曾除农找装广显吧阿李标谈吃图念六引历首医局突专费号尽另周较注语仅考落青随选列票额姓址税款账户银付签订编邮箱购销京甲乙双返测"
    "试默输谢您码版限项型参错误执"
)
"""Frequent characters of Chinese texts and forms. They make up about three quarters of such texts.

They make up a sixth of the characters of GB 2312 that other charsets become by chance.
"""
_MIN_FREQUENT, _MIN_SHARE = 4, 0.3
"""A text needs at least this number of frequent characters, plus this share of its Chinese characters. Short texts thus
need a higher share."""
_MIN_DIFFERENT = 6
"""Minimum number of different frequent characters, because a word in another charset may be repeated."""
_KANA, _LEVEL_1, _LEVEL_2 = range(0xA4, 0xA6), range(0xB0, 0xD8), range(0xD8, 0xF8)
_SYMBOLS = range(0xA1, 0xAA)
_FIRST_CELL = 0xA1
"""First value of the second byte of a character in GB 2312."""


def stated_charset(media_type: str) -> str | None:
    """Return the charset in a media type such as `text/plain; charset=gbk`, or None if it has none."""
    match = _CHARSET.search(media_type)
    return match[1] if match else None


def text_of_file(data: bytes, charset: str | None, where: str) -> str:
    """Decode a text file.

    Args:
        data: The file. A byte order mark takes precedence over `charset`.
        charset: Charset that the client states, or None if it should be detected.
        where: Name of the file in error messages.

    Raises:
        InputError: The file is not text in the charset, the charset is unknown, or no charset was detected.

    """
    mark = next((codec for mark, codec in _MARKS if data.startswith(mark)), None)
    if mark is None and charset is not None:
        codec = _codec(charset, where)
        if (text := _decoded(data, codec)) is None:
            raise InputError(f"{where} is not valid text in the charset {charset!r} that it states")
        return text
    text = _decoded(data, mark or "utf-8")
    if text is None and mark is None and (text := _decoded(data, "gb18030")) is not None:
        text = text if _is_chinese(text[:_SAMPLE]) else None
    if text is None:
        raise InputError(
            f"{where} is neither a PDF nor text in UTF-8 or GBK; for text in another charset, state the charset, as in "
            "data:text/plain;charset=big5;base64,<data>. Send images and audio as parts of their own types"
        )
    return text


def _codec(charset: str, where: str) -> str:
    try:
        name = codecs.lookup(charset).name
    except LookupError:
        name = ""
    if (name := _LARGER.get(name, name)) not in _CODECS:
        raise InputError(f"{where} states the charset {charset!r}, which is not supported; send it in UTF-8")
    return name


def _decoded(data: bytes, codec: str) -> str | None:
    """Return the text, or None if the data are not valid or have control characters that texts do not have."""
    try:
        text = data.decode(codec)
    except UnicodeDecodeError:
        return None
    return None if _CONTROLS.search(text) else text


def _is_chinese(text: str) -> bool:
    """Return whether `text`, decoded as GB18030, is plausible simplified Chinese.

    Text in most other charsets has bytes that GB18030 does not allow. What remains is excluded by characters
    outside GB 2312, by kana in EUC-JP, and by rare characters. Texts of five Chinese characters or fewer are never
    plausible, because a word in Thai, Greek, Cyrillic, Korean or Japanese may become frequent characters.
    """
    rows = [*_rows(text)]
    hanzi = [row for row in rows if row in _LEVEL_1 or row in _LEVEL_2]
    if not hanzi or any(row in _KANA for row in rows):
        return False
    num_strange = rows.count(0)
    return (
        num_strange <= 0.1 * len(hanzi)
        and sum(row in _LEVEL_1 for row in hanzi) >= 0.85 * len(hanzi)
        and len(_FREQUENT.intersection(text)) >= _MIN_DIFFERENT
        and sum(character in _FREQUENT for character in text) >= _MIN_FREQUENT + _MIN_SHARE * len(hanzi)
    )


def _rows(text: str) -> Iterator[int]:
    """Yield the first byte of each character in GB 2312, or 0 for a Chinese character that GB 2312 does not have."""
    for character in text:
        if character >= "\x80":
            try:
                row, cell, *_ = character.encode("gbk")
            except UnicodeEncodeError:
                row, cell = 0, 0
            yield row if cell >= _FIRST_CELL or row in _SYMBOLS else 0
