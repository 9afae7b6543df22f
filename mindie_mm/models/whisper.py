"""Whisper: speech recognition and translation by an encoder-decoder.

Source: arXiv 2212.04356. Spectrograms, the decoder's first tokens and logits match transformers' `whisper`. The prompt
of the encoder consists of placeholders, one for each of its positions. The tokens that follow them begin the decoder's
sequence: the transcript before the clip, if any, the language, the task, and the token that turns time stamps off. If
the prompt states no language, the decoder detects it.

A clip longer than the encoder's window, 30 s, is refused. The reference cuts it, or decodes it in overlapping segments
whose bounds depend on predicted time stamps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from mindie_mm.nn.family import Placeholder, PretrainedFamily, Spelling
from mindie_mm.nn.generation import GenerationRules
from mindie_mm.nn.model import ModelSpec
from mindie_mm.nn.model_inputs import Item
from mindie_mm.nn.seq2seq import Decoding, Seq2SeqModel, load_seq2seq
from mindie_mm.nn.splice import MediaItem, Splice
from mindie_mm.nn.staging import to_device
from mindie_mm.nn.traits import Traits
from mindie_mm.nn.weights.pretrained import read_config

_EXTRACTORS = {"WhisperFeatureExtractor": {"feature_size": 80}}
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

    A text is the transcript before the clip. It may also contain the token of a language and the token of a task, such
    as <|de|><|translate|>.
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
        self.start, self.no_timestamps = config.decoder_start_token_id, checkpoint.token_id("<|notimestamps|>")
        # The token before <|notimestamps|> stands for a clip without speech. Its name differs between releases.
        self.placeholders = {"audio": Placeholder((), self.no_timestamps - 1, ())}
        self._previous = checkpoint.token_id("<|startofprev|>")
        generation = checkpoint.json("generation_config.json")
        languages, tasks = (dict(generation.get(f"{name}_to_id") or {}) for name in ("lang", "task"))
        self.languages, self._tasks = frozenset(languages.values()), frozenset(tasks.values())
        self._language, self._task = _forced(generation, languages, tasks)
        self._control = {self.start, self.no_timestamps, self._previous, config.eos_token_id}
        self._control |= self.languages | self._tasks

    def spelling(self, kind: Kind, num_features: int, grid: tuple[int, ...]) -> Spelling | None:
        return super().spelling(kind, num_features, grid) if num_features == self.num_features else None

    def token_inputs(self, ids: NDArray[np.int64], items: Sequence[Item]) -> dict[str, Tensor]:
        """Return the decoder's first tokens. The placeholders of the clip are no tokens of the decoder."""
        return {"decoder_input_ids": torch.from_numpy(ids[self.num_features * len(items) :])}

    def frame(self, ids: list[int], num_items: int) -> list[int]:
        """Return the decoder's first tokens. The language is missing if the decoder must detect it.

        Raises:
            InputError: The text is too long, or it contains several languages or tasks.

        """
        language = _only(ids, self.languages, "language", self._language)
        task = _only(ids, self._tasks, "task", self._task)
        text = [index for index in ids if index not in self._control]
        chosen = [index for index in (language, task) if index is not None]
        return [*([self._previous, *text] if text else ()), self.start, *chosen, self.no_timestamps]


class WhisperModel(Seq2SeqModel):
    """The Whisper model. `module` is transformers' `WhisperForConditionalGeneration`."""

    def __init__(self, module: Any, spec: ModelSpec, rules: GenerationRules, processor: WhisperProcessor) -> None:
        super().__init__(module, spec, module.model, module.proj_out, rules)
        self._processor = processor

    def check_prompt(self, ids: NDArray[np.int64], items: Sequence[MediaItem]) -> None:
        known = self._processor
        if len(items) != 1 or items[0].start != 0 or known.start not in ids[known.num_features :]:
            raise InputError(
                f"the prompt has {len(items)} audio clips; this model needs one clip, followed by the decoder's first "
                f"tokens, of which one is {known.start}"
            )

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
        if known.languages and not known.languages.intersection(first[after:]):
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
    def model(cls, checkpoint: Checkpoint, processor: Any, device: Device, dtype: torch.dtype) -> WhisperModel:
        longest = processor.num_features + processor.max_target
        module, spec, rules = load_seq2seq(cls.module_class(), checkpoint, device, dtype, longest)
        return WhisperModel(module, spec, rules, processor)

    @classmethod
    def tokenizer(cls, checkpoint: Checkpoint) -> Any:
        """Return the tokenizer of the checkpoint, in which texts may contain the tokens of languages and tasks."""
        from transformers import PreTrainedTokenizerFast

        generation = checkpoint.json("generation_config.json")
        chosen = {index for name in ("lang_to_id", "task_to_id") for index in (generation.get(name) or {}).values()}
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
