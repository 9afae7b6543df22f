"""Whisper: speech recognition and translation by an encoder-decoder.

Source: arXiv 2212.04356. Spectrograms, the decoder's first tokens and logits match transformers' `whisper`. The prompt
of the encoder consists of placeholders, one for each of its positions. The tokens that follow them begin the decoder's
sequence: the transcript before the clip, if any, the language, the task, and the token that turns time stamps off. If
the prompt states no language, the decoder detects it. If its text contains the time stamp of the clip's beginning,
<|0.00|>, time stamps are on, and follow the rules of transformers' `WhisperTimeStampLogitsProcessor`.

A clip longer than the encoder's window, 30 s, is refused. The reference cuts it, or decodes it in overlapping segments
whose bounds depend on predicted time stamps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from mindie_mm.device import Device, upload
from mindie_mm.errors import InputError, UnsupportedCheckpoint
from mindie_mm.inputs import Kind
from mindie_mm.models._clips import SPECTROGRAM, ClipProcessor, Clips, read_mel
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Placeholder, Spelling
from mindie_mm.nn.generation import GenerationRules
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.nn.seq2seq import Decoding, Seq2SeqModel, load_seq2seq
from mindie_mm.nn.speech import SpeechTraits
from mindie_mm.nn.splice import MediaItem, Splice
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import read_config

_EXTRACTORS = {"WhisperFeatureExtractor": {"feature_size": 80}}
_FIRST_TIME = "<|0.00|>"
_DETECT = "<|startoflm|>"
"""Token in the text that asks for the language. Models do not use this token for anything else."""
_FRAMES_PER_TIME = 2
"""Number of frames between two time stamps."""
_FURTHER_FRAMES = 3
"""Number of frames after the end of a clip that are stored. The window of the last one contains only silence."""
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_CHAT_TEMPLATE = (
    "{% if messages | length != 1 %}{{ raise_exception('this model accepts only one message, without earlier "
    "turns') }}{% endif %}{% if messages[0].content is string %}{% set text = messages[0].content | trim %}{% else %}"
    "{% set text = messages[0].content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join | trim %}"
    "{% endif %}{% if text and not text.startswith('<|') %}{{ ' ' }}{% endif %}{{ text }}"
)


class WhisperProcessor(ClipProcessor):
    """Processor for Whisper.

    The text is the transcript before the clip. It may also contain the tokens of a language and a task, such as
    <|de|><|translate|>, and <|0.00|> for time stamps. <|startoflm|> asks for the language instead.
    """

    traits = Traits(
        chat_template=_CHAT_TEMPLATE,
        inserted_at=0,
        max_items={"audio": 1},
        not_packed="its encoder attends to the whole row",
    )
    mask = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = read_config("WhisperConfig", checkpoint)
        mel = read_mel(checkpoint, config, _EXTRACTORS)
        self.num_features: int = config.max_source_positions
        if mel.max_frames != 2 * self.num_features:
            raise UnsupportedCheckpoint(
                f"{checkpoint.path}: max_source_positions is {self.num_features}; clips of {mel.max_frames} frames "
                f"need {mel.max_frames // 2}"
            )
        self.clips = Clips(mel, lambda _: self.num_features, least_frames=1, further_frames=_FURTHER_FRAMES)
        self.feature_width = config.d_model
        self.max_target: int = config.max_target_positions
        self._max_text = self.max_target // 2 - 1
        self.start, self.no_timestamps = config.decoder_start_token_id, checkpoint.token_id("<|notimestamps|>")
        # The token before <|notimestamps|> stands for a clip without speech. Its name differs between releases.
        self.placeholders = {"audio": Placeholder((), self.no_timestamps - 1, ())}
        self._previous, self._detect = (checkpoint.token_id(name) for name in ("<|startofprev|>", _DETECT))
        generation = checkpoint.json("generation_config.json")
        languages, tasks = (dict(generation.get(f"{name}_to_id") or {}) for name in ("lang", "task"))
        self.languages, self._tasks = frozenset(languages.values()), frozenset(tasks.values())
        self._language, self._task = _forced(generation, languages, tasks)
        first_time = checkpoint.ids_of(checkpoint.tokenizer_json()).get(_FIRST_TIME)
        self.first_time = first_time if first_time == self.no_timestamps + 1 else -1
        """Token of the first time stamp, after which the others follow, or -1 if the tokenizer lacks it."""
        self._control = {self.start, self.no_timestamps, self._previous, config.eos_token_id, self.first_time}
        self._control |= self.languages | self._tasks
        self.end = config.eos_token_id
        self.last_first_time: int | None = generation.get("max_initial_timestamp_index")
        self._speech = self._speech_traits(languages, tasks)

    def _speech_traits(self, languages: Mapping[str, int], tasks: Mapping[str, int]) -> SpeechTraits:
        return SpeechTraits(
            window_s=self.clips.mel.max_samples / self.clips.mel.rate,
            transcribe="<|transcribe|>" if "transcribe" in tasks else "",
            translate="<|translate|>" if "translate" in tasks else None,
            in_language="{language}",
            detect=_DETECT,
            no_speech_id=self.no_timestamps - 1,
            language=next((name.strip("<|>") for name in languages if languages[name] == self._language), ""),
            languages={name.strip("<|>"): name for name in languages} or {"en": ""},
            with_prompt="{prompt}",
            control_start="<|",
            max_prompt_tokens=self._max_text,
            with_times=_FIRST_TIME if self.first_time > 0 else "",
            first_time_id=self.first_time,
            time_s=self.clips.mel.hop * _FRAMES_PER_TIME / self.clips.mel.rate,
        )

    @property
    def speech(self) -> SpeechTraits:
        return self._speech

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        return super().spelling(kind, num_features, grid) if num_features == self.num_features else None

    def token_inputs(self, ids: NDArray[np.int64], items: Sequence[Item]) -> dict[str, Tensor]:
        """Return the decoder's first tokens. The placeholders of the clip are no tokens of the decoder."""
        return {"decoder_input_ids": torch.from_numpy(ids[self.num_features * len(items) :])}

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """Return the decoder's first tokens. The language is missing if the decoder must detect it.

        As in the reference, the end of the text is kept if the text fills more than half of the decoder's positions.

        Raises:
            InputError: The text contains several languages or tasks.

        """
        if self._detect in ids:
            return [self.start]
        language = _only(ids, self.languages, "language", self._language)
        task = _only(ids, self._tasks, "task", self._task)
        text = [index for index in ids if index not in self._control]
        if num_items:  # the model refuses a prompt without a clip
            text = text[-self._max_text :]
        chosen = [index for index in (language, task) if index is not None]
        off = () if self.first_time in ids else (self.no_timestamps,)
        return [*([self._previous, *text] if text else ()), self.start, *chosen, *off]


class WhisperModel(Seq2SeqModel):
    """The Whisper model. `module` is transformers' `WhisperForConditionalGeneration`."""

    def __init__(self, module: Any, spec: ModelSpec, rules: GenerationRules, processor: WhisperProcessor) -> None:
        super().__init__(module, spec, module.model, module.proj_out, rules)
        from transformers.generation.logits_process import (
            WhisperTimeStampLogitsProcessor,
        )  # imported late: takes seconds

        self._processor = processor
        known = SimpleNamespace(
            no_timestamps_token_id=processor.no_timestamps,
            eos_token_id=processor.end,
            bos_token_id=processor.end,
            max_initial_timestamp_index=processor.last_first_time,
        )
        self._times = WhisperTimeStampLogitsProcessor(known, begin_index=1)

    def constrain(self, row: Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int], *, last: bool) -> None:
        """Also apply the rules for time stamps, if the prompt does not turn them off."""
        super().constrain(row, prompt_ids, output_ids, last=last)
        known = self._processor
        if known.languages and prompt_ids[-1] == known.start:  # the answer begins with the language
            return
        if known.first_time > 0 and known.no_timestamps not in prompt_ids[known.num_features :]:
            ids = upload([[known.start, *output_ids]], row.device)
            row.copy_(self._times(ids, row.unsqueeze(0))[0])

    def read(self, ids: NDArray[np.int64]) -> list[MediaItem]:
        items, known = super().read(ids), self._processor
        if len(items) != 1 or items[0].start != 0 or known.start not in ids[known.num_features :]:
            raise InputError(
                f"the prompt has {len(items)} audio clips; this model needs one clip, followed by the decoder's first "
                f"tokens, of which one is {known.start}"
            )
        return items

    def longest_output(self, num_prompt: int) -> int:
        # One more position is for the language, if the decoder detects it.
        return self._processor.max_target - max(num_prompt - self._processor.num_features, 0) - 1

    def tower(self, items: Sequence[MediaItem]) -> list[Tensor]:
        frames = self._processor.clips.mel.max_frames
        clips = [to_device(item.view, SPECTROGRAM, self.spec.device) for item in items]
        # The last stored frame is silent, unless the clip is as long as the window.
        padded = [F.pad(clip[None], (0, frames - clip.shape[1]), mode="replicate") for clip in clips]
        encoded: Tensor = self.module.model.encoder(torch.cat(padded).to(self.spec.dtype)).last_hidden_state
        return list(encoded)

    @torch.inference_mode()
    def encode_prompt(self, input_ids: Tensor, splices: Sequence[Splice]) -> Decoding:
        """Return the state in which decoding begins. The tower has already encoded the clip."""
        (clip,) = splices
        return Decoding.of(clip.features.unsqueeze(0))

    def beginning(self, decoding: Decoding, input_ids: Sequence[int]) -> list[int]:
        """Return the decoder's first tokens from the prompt, with the language if the prompt states none."""
        known = self._processor
        first = list(input_ids[known.num_features :])
        after = len(first) - first[::-1].index(known.start)
        if known.languages and after < len(first) and not known.languages.intersection(first[after:]):
            logits = self.decode(Decoding.of(decoding.prompt), [known.start])[0]
            spoken = upload(sorted(known.languages), logits.device)
            first.insert(after, int(spoken[logits[spoken].argmax()]))
        return first


class Whisper(PretrainedFamily):
    """Whisper (Radford et al., 2022, arXiv 2212.04356), run by transformers' modules."""

    model_types = ("whisper",)
    published = "openai/whisper-large-v3"
    kinds = ("audio",)
    processor = WhisperProcessor
    module_name = "WhisperForConditionalGeneration"
    other_keys = ("forced_decoder_ids",)  # the prompt's language and task replace these ids

    @classmethod
    def longest_prompt(cls, checkpoint: Checkpoint) -> int:
        config = cls.configuration(checkpoint)
        return int(config.max_source_positions + config.max_target_positions)

    @classmethod
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> WhisperModel:
        longest = cls.longest_prompt(checkpoint)
        module, spec, rules = load_seq2seq(cls.module_class(), checkpoint, device, dtype, longest)
        return WhisperModel(module, spec, rules, processor)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        """Return the tokenizer of the checkpoint.

        Texts may contain the tokens of languages and tasks, the first time stamp, and the token that asks for a
        language.
        """
        from transformers import PreTrainedTokenizerFast

        generation = checkpoint.json("generation_config.json")
        chosen = {index for name in ("lang_to_id", "task_to_id") for index in (generation.get(name) or {}).values()}
        chosen.add(checkpoint.token_id("<|notimestamps|>") + 1)  # the first time stamp
        chosen.add(checkpoint.token_id(_DETECT))
        backend = checkpoint.tokenizer(lambda token: token["special"] and token["id"] not in chosen)
        named = {name: token for name in _NAMED_TOKENS if (token := checkpoint.special_token(name)) is not None}
        return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)


def _forced(
    generation: Mapping[str, Any], languages: Mapping[str, int], tasks: Mapping[str, int]
) -> tuple[int | None, int | None]:
    """Return the language and the task of generation_config.json.

    The language is None if the decoder detects it. As in the reference, `language` and `task` take precedence over
    `forced_decoder_ids`. The default task is transcription.
    """
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE  # imported late: only names use it

    name, task = generation.get("language"), generation.get("task")
    forced: list[int] = []
    if name is None and task is None:
        forced = [index for _, index in generation.get("forced_decoder_ids") or ()]
    stated = None
    if name is not None and languages:
        code = name if name in languages else f"<|{TO_LANGUAGE_CODE.get(name.lower(), name.lower())}|>"
        if (stated := languages.get(code)) is None:
            raise UnsupportedCheckpoint(f"generation_config.json: language is {name!r}, which is not in lang_to_id")
    language = next((index for index in forced if index in languages.values()), stated)
    default = tasks.get(task or "transcribe")
    return language, next((index for index in forced if index in tasks.values()), default)


def _only(ids: Sequence[int], known: frozenset[int], name: str, default: int | None) -> int | None:
    """Return the id among `known` that the text contains, or `default`. Raise InputError if there are several."""
    found = known.intersection(ids)
    if len(found) > 1:
        raise InputError(f"the text has {len(found)} {name} tokens; it may have one. Remove the others")
    return next(iter(found), default)
