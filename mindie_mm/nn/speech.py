"""Traits of a family that determine how a checkpoint is asked to transcribe or to translate speech."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

WINDOW_S = 30.0
"""Length in seconds of a clip that every family with audio accepts, unless its processor states less."""
LANGUAGES: Mapping[str, str] = {
    "af": "Afrikaans",
    "ar": "Arabic",
    "az": "Azerbaijani",
    "be": "Belarusian",
    "bg": "Bulgarian",
    "bn": "Bengali",
    "bs": "Bosnian",
    "ca": "Catalan",
    "cs": "Czech",
    "cy": "Welsh",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "et": "Estonian",
    "eu": "Basque",
    "fa": "Persian",
    "fi": "Finnish",
    "fil": "Filipino",
    "fr": "French",
    "ga": "Irish",
    "gl": "Galician",
    "gu": "Gujarati",
    "he": "Hebrew",
    "hi": "Hindi",
    "hr": "Croatian",
    "hu": "Hungarian",
    "hy": "Armenian",
    "id": "Indonesian",
    "is": "Icelandic",
    "it": "Italian",
    "ja": "Japanese",
    "jv": "Javanese",
    "ka": "Georgian",
    "kk": "Kazakh",
    "km": "Khmer",
    "kn": "Kannada",
    "ko": "Korean",
    "lo": "Lao",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "mi": "Maori",
    "mk": "Macedonian",
    "ml": "Malayalam",
    "mn": "Mongolian",
    "mr": "Marathi",
    "ms": "Malay",
    "my": "Burmese",
    "ne": "Nepali",
    "nl": "Dutch",
    "no": "Norwegian",
    "pa": "Punjabi",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "si": "Sinhala",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sq": "Albanian",
    "sr": "Serbian",
    "sv": "Swedish",
    "sw": "Swahili",
    "ta": "Tamil",
    "te": "Telugu",
    "th": "Thai",
    "tl": "Tagalog",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "ur": "Urdu",
    "uz": "Uzbek",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}
"""English names of languages, by ISO 639 code."""


class SpeechTraits(msgspec.Struct, frozen=True):
    """How a checkpoint is asked to transcribe or to translate speech.

    The user's turn consists of the audio clip and text: `with_prompt`, the text of the task, `in_language` and
    `with_times`, as far as the request needs them.
    """

    window_s: float = WINDOW_S
    """Maximum length of a clip in seconds. Longer speech is cut."""
    transcribe: str = "Transcribe the speech word for word. Answer with the transcript only."
    """Text of the task of a transcription."""
    translate: str | None = "Translate the speech into English. Answer with the translation only."
    """Text of the task of a translation into English. None if the checkpoint cannot translate."""
    in_language: str = " The language of the speech is {language}."
    """Text for the language of the speech. `{language}` is an entry of `languages`."""
    languages: Mapping[str, str] = msgspec.field(default_factory=lambda: LANGUAGES)
    """The form of a language in the text, by ISO 639 code. Empty if no language can be chosen."""
    with_prompt: str = "The speech may contain names and words from this text: {prompt}\n"
    """Text for the `prompt` of a request."""
    control_start: str = ""
    """Beginning of the control tokens that the checkpoint accepts in texts. In the `prompt` of a request, a space after
    its first character makes them plain text. Empty if texts contain no control tokens."""
    max_prompt_tokens: int = 0
    """Number of tokens at the end of `prompt` that the checkpoint reads. 0 if it reads all of them."""
    prompt_role: Literal["user", "system"] = "user"
    """Role of the message with this text."""
    opening: str = ""
    """Beginning of the answer if the request states a language, with `{language}`. It replaces `in_language`."""
    detect: str = ""
    """Text that asks for the token that follows the decoder's first one: the language, or `no_speech_id`. Empty if the
    checkpoint has no such text."""
    no_speech_id: int = -1
    """Id of the token that stands for a clip without speech."""
    language: str = ""
    """Code of the language that the checkpoint assumes if the request states none. Empty if it detects the language."""
    with_times: str = ""
    """Text that asks for time stamps. Empty if the checkpoint writes none."""
    first_time_id: int = -1
    """Id of the token for the beginning of the clip. The ids after it stand for the times that follow."""
    time_s: float = 0.02
    """Difference between the times of consecutive tokens, in seconds."""
    answer_start: str = ""
    """Text of the answer after which the transcript begins, if the answer contains it."""

    @property
    def has_times(self) -> bool:
        """True if the checkpoint writes time stamps."""
        return bool(self.with_times)
