"""Prompts of a checkpoint. Items or messages are converted to ids with the handle words of media."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from mindie_mm.decode import Decoders
from mindie_mm.decode.decoder_messages import DecoderSetup
from mindie_mm.errors import ContextLengthExceeded, InputError, Miscounted
from mindie_mm.inputs import PROMPT, Kind, Message, Text
from mindie_mm.media.guard.caps import decoding_to_count
from mindie_mm.models import family_of, processor_of, reading
from mindie_mm.nn.checkpoint.config_only import ConfigOnly
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Family, Placeholder, Processor
from mindie_mm.nn.pretrained_family import PretrainedFamily
from mindie_mm.processes import faults
from mindie_mm.processes.alone import gather_in_order
from mindie_mm.processes.tasks import in_thread, task_group
from mindie_mm.tokenize.documents import Pages
from mindie_mm.tokenize.media_stage import MediaStage, RequestMedia
from mindie_mm.tokenize.placeholders import expand as expand_items
from mindie_mm.tokenize.placeholders import insert, locate
from mindie_mm.tokenize.planning import PlannedItem, Planner, text_placeholder
from mindie_mm.tokenize.prompt import MediaSpan, PlannedPrompt, PlannedSpan, Prompt, PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest
from mindie_mm.tokenize.setup import Setup
from mindie_mm.tokenize.stores import Store
from mindie_mm.tokenize.text.chat_template import as_dict
from mindie_mm.tokenize.text.spelling import Rendered, strings
from mindie_mm.tokenize.text.text_encoder import Encoded, SpecialTokens, TextEncoder
from mindie_mm.tokenize.tokenizer_traits import Sizes, TokenizerTraits
from mindie_mm.tokenize.truncate import cut, truncate


class Prompts:
    """A maker of prompts for one checkpoint. Its media stage handles media, and this class does everything else."""

    def __init__(
        self, setup: Setup, store: Store | Callable[[Processor], Store], decoders: Decoders | None = None
    ) -> None:
        """Read the checkpoint.

        Args:
            setup: Settings.
            store: Store for media items, or a function that creates it.
            decoders: Pool of decoder processes, or None to decode in this process.

        Raises:
            UnsupportedCheckpoint: The checkpoint is not supported.

        """
        checkpoint = Checkpoint.open(setup.model)
        family = family_of(checkpoint, setup.family)
        self._processor = processor_of(checkpoint, family)
        with reading(checkpoint, family):
            checkpoint = family.translated(checkpoint)
            tokenizer = family.tokenizer(checkpoint)
            sizes = sizes_of(checkpoint, family) if setup.states_sizes else Sizes()
        placeholders = [*self._processor.placeholders.values()]
        self._tokens = {placeholder.token for placeholder in placeholders}
        media_ids = {index for p in placeholders for index in (*p.before, p.token, *p.after)}
        plain = {token.content for token in tokenizer.added_tokens_decoder.values() if not token.special}
        stated = checkpoint.json("tokenizer.json").get("added_tokens", ())
        shown_tokens = [token["content"] for token in stated if token["special"] and token["content"] in plain]
        self._inserted_at = self._processor.traits.inserted_at
        if self._inserted_at is not None:  # placeholders are inserted as ids, so the tokenizer may lack tokens for them
            media_ids = self._tokens & tokenizer.added_tokens_decoder.keys()
        self._text = TextEncoder(checkpoint, tokenizer, media_ids, self._processor, setup.chat_template_content_format)
        spelled = [*placeholders, text_placeholder(self._processor)] if self._inserted_at is None else []
        self._marker_of = {placeholder: self._spelled_marker(placeholder) for placeholder in spelled}
        self._markers = frozenset(self._marker_of.values())
        self._parse_special = setup.parse_special == "on"
        self.added_tokens = frozenset(token.content for token in tokenizer.added_tokens_decoder.values())
        """Texts of the added tokens of the tokenizer."""
        speech = self._processor.speech if "audio" in self._processor.placeholders else None
        name = family.__name__
        items = {**self._processor.vllm_items}
        self.traits = TokenizerTraits(shown_tokens, self._text.chat_traits, speech, sizes, items, name)
        planner = Planner(self._processor, name, setup.limit_mm_per_prompt)
        store = store if isinstance(store, Store) else store(self._processor)
        self.stage = MediaStage(planner, decoders, store, setup.media)

    @classmethod
    async def open(cls, setup: Setup, store: Store, resources: AsyncExitStack) -> Self:
        """Start the decoders and read the checkpoint. Closing `resources` ends the decoders.

        Raises:
            UnsupportedCheckpoint: The checkpoint is not supported.
            ProcessDied: The decoders cannot be started.

        """
        decoders = Decoders(DecoderSetup(setup.model, setup.family, setup.media), setup.arena_bytes)
        resources.push_async_callback(decoders.close)
        async with task_group() as group:  # in parallel, because the imports of each take seconds
            group.create_task(decoders.open(setup.num_decoders))
            reading = group.create_task(in_thread(partial(cls, setup, store, decoders)))
        return reading.result()

    @property
    def has_template(self) -> bool:
        """True if the checkpoint has a chat template."""
        return self._text.has_template

    async def make(self, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
        """Return the prompts of `requests`, which have the same path file. Their blocks are allocated together.

        After Miscounted, the prompts are made a second time. Videos and audio clips are then decoded to count their
        frames and samples, so that the prompts have as many placeholders as features.

        Raises:
            InputError: A request or an item is invalid.
            ContextLengthExceeded: A prompt is too long.
            ArenaFull: Not enough memory became free in time.
            SharedMemoryError: Shared memory cannot be used.

        """
        path_files = {request.path_file for request in requests}
        if len(path_files) != 1:
            raise InputError(
                f"prompts that are tokenized together must share one path file; found {sorted(path_files)}"
            )
        requests = await self._with_pages(requests)
        try:
            return await self._make(requests)
        except Miscounted:
            with decoding_to_count():
                return await self._make(requests)

    async def plan(self, requests: Sequence[TokenizeRequest], *, fill: bool = False) -> list[PlannedPrompt]:
        """Return the prompts of `requests` without preprocessing their media.

        Only the headers of media are decoded, if they suffice. Media of other formats are decoded as far as counting
        their tokens requires. With `fill`, the media are preprocessed nevertheless, as in `make`.

        Raises:
            InputError: A request or an item is invalid. Without `fill`, faults behind the header of a file are not
                noticed.
            ContextLengthExceeded: A prompt is too long.
            ArenaFull, SharedMemoryError: As in `make`, with `fill`.

        """
        requests = await self._with_pages(requests)
        try:
            return await self._plan(requests, fill=fill)
        except Miscounted:
            with decoding_to_count():
                return await self._plan(requests, fill=fill)

    async def _plan(self, requests: Sequence[TokenizeRequest], *, fill: bool) -> list[PlannedPrompt]:
        with closing(RequestMedia(self.stage, requests[0].options.domain)) as media:
            made = await self._planned(requests, media)
            plans = [
                PlannedPrompt(
                    self._vllm_ids(prompt) if requests[0].options.like_vllm else prompt.ids,
                    await _planned_spans(media, prompt, planned[left]),
                    left.start,
                )
                for prompt, planned, left in made
            ]
            if not fill:
                return plans
            filled = await self._fill(requests[0].path_file, made, media)
            return [replace(plan, ids=prompt.ids) for plan, prompt in zip(plans, filled, strict=True)]

    def _vllm_ids(self, prompt: Prompt) -> NDArray[np.int64]:
        """Return the ids of a prompt without handle words, with vLLM's placeholders."""
        ids = prompt.ids.copy()
        for span in prompt.spans:
            own = ids[span.start : span.stop]
            own[own == span.token] = self._processor.vllm_tokens.get(span.kind, span.token)
        return ids

    async def _with_pages(self, requests: Sequence[TokenizeRequest]) -> list[TokenizeRequest]:
        """Return checked requests, in which each document is replaced by its pages."""
        requests = [self._checked(request) for request in requests]
        if not any(media.is_document for request in requests for media in request.media):
            return requests
        pages = Pages(self.stage, requests[0].options.domain)
        return [await pages.of(request) for request in requests]

    def _checked(self, request: TokenizeRequest) -> TokenizeRequest:
        """Check `request` without its media. Return it as messages if the chat template formats its items."""
        messages, options = request.messages, request.options
        if options.like_vllm and not self._processor.traits.samples_like_vllm:
            _require_no_videos(request)
        if messages is None and request.continue_final_message:
            raise InputError(
                "continue_final_message is set, but there are no messages; send messages, or leave "
                "continue_final_message out",
                param="continue_final_message",
            )
        if messages is None and request.ids is None and request.chat and self.has_template:
            messages = [Message("user", tuple(request.items or ()))]
            request = msgspec.structs.replace(request, messages=messages, items=None)
        if messages is None:
            if request.chat_template_kwargs or not request.add_generation_prompt:
                raise InputError(
                    "chat template variables were given, but the prompt does not use a chat template; leave them out"
                )
            texts: Iterable[str] = (item.text for item in request.items or () if isinstance(item, Text))
        else:
            if options.parse_special:
                raise InputError(
                    "parse_special=true is not supported for a chat, whose texts never contain control tokens; leave "
                    "parse_special out, or apply the chat template yourself",
                    param="parse_special",
                )
            texts = strings([*map(as_dict, messages), request.chat_template_kwargs])
        if options.max_prompt_tokens:
            self._text.check_size(texts, options.max_prompt_tokens)
        return request

    async def _make(self, requests: Sequence[TokenizeRequest]) -> list[Prompt]:
        with closing(RequestMedia(self.stage, requests[0].options.domain)) as media:
            made = await self._planned(requests, media)
            return await self._fill(requests[0].path_file, made, media)

    async def _fill(
        self, path_file: str, made: Sequence[tuple[Prompt, list[PlannedItem], slice]], media: RequestMedia
    ) -> list[Prompt]:
        """Preprocess the media of prompts from `_planned`, and return the prompts with handle words."""
        prompts = [prompt for prompt, _, _ in made]
        items = [item for _, planned, left in made for item in planned[left]]
        faults.point("planned")
        return await media.fill(prompts, items, Path(path_file) if path_file else None)

    async def _planned(
        self, requests: Sequence[TokenizeRequest], media: RequestMedia
    ) -> list[tuple[Prompt, list[PlannedItem], slice]]:
        """Return each prompt without handle words, its items, and the slice of the items that its spans stand for."""
        made: list[tuple[Prompt, list[PlannedItem], slice]] = []
        alone = requests[0].options.like_vllm and self._processor.traits.alone_in_vllm
        salted = [(request.media, request.options.cache_salt) for request in requests]
        all_planned = await media.plan(salted, alone=alone)
        for request, planned in zip(requests, all_planned, strict=True):
            if made:
                await asyncio.sleep(0)  # encoding many long texts without a pause would delay other requests
            prompt, left = _fitted(self._whole(request, planned), request.options)
            made.append((prompt, planned, left))
        return made

    def _whole(self, request: TokenizeRequest, planned: Sequence[PlannedItem]) -> Prompt:
        """Return the prompt of `request` with the planned media, before it is cut and without handle words."""
        if request.messages is not None:
            return self._of_messages(request, request.messages, planned)
        if request.ids is not None and request.ranges is not None:
            return locate(request.ids, request.ranges, planned, self._tokens)
        if request.ids is not None:
            encoded = self._text.replace_marker_ids(request.ids, self._markers, *self._spellings(planned))
            return self._expanded(encoded, planned)
        return self._of_items(request, planned)

    def _of_items(self, request: TokenizeRequest, planned: Sequence[PlannedItem]) -> Prompt:
        items, options = request.items or (), request.options
        if planned and len(planned) == len(items) and all(item.shape.kind == PROMPT for item in planned):
            # Embeddings of a whole prompt, without BOS.
            return expand_items([item.placeholder.token for item in planned], planned, self._tokens)
        parse_special = self._parse_special if options.parse_special is None else options.parse_special
        spelled = self._spell(planned)
        pieces = [item if isinstance(item, Text) else next(spelled) for item in items]
        rendered = self._text.render_items(pieces, parse_special=parse_special)
        if not (options.add_special_tokens or planned):
            return Prompt(np.array(self._text.encode(rendered, "none").ids, np.int64))
        prompt = self._expanded(self._encode(rendered, planned, "missing"), planned)
        if not (options.marks_assistant and options.answer_items):
            return prompt
        question = self._text.render_items(pieces[: -options.answer_items], parse_special=parse_special)
        start, in_common = self._begins_with(question, prompt, planned, "missing")
        if in_common < start:
            raise InputError(
                f"the completion cannot be located, because the prompt's tokens from token {in_common} on differ with "
                "and without the completion. Move the space or the text at the boundary from one to the other, or "
                "train on all tokens"
            )
        return replace(prompt, assistant=((start, len(prompt.ids)),))

    def _of_messages(
        self, request: TokenizeRequest, messages: Sequence[Message], planned: Sequence[PlannedItem]
    ) -> Prompt:
        options, variables = request.options, request.chat_template_kwargs
        rendered = self._text.render_messages(
            messages,
            request.add_generation_prompt,
            variables,
            list(self._spell(planned)),
            continue_final_message=request.continue_final_message,
            name=options.template,
        )
        if options.max_prompt_tokens:  # a template may write numbers, or the same text several times
            self._text.check_size([rendered.text], options.max_prompt_tokens)
        special_tokens: SpecialTokens = "none" if options.like_vllm else "unless_begun"
        if options.repeat_special_tokens:
            special_tokens = "all"
        encoded = self._encode(rendered, planned, special_tokens)
        prompt = self._expanded(encoded, planned, like_vllm=options.like_vllm)
        if not options.marks_assistant:
            return prompt
        cuts = self._text.render_turns(messages, variables, list(self._spell(planned)))
        return replace(prompt, assistant=self._turns(prompt, cuts, planned, special_tokens))

    def _turns(
        self, prompt: Prompt, cuts: Sequence[Rendered], planned: Sequence[PlannedItem], special_tokens: SpecialTokens
    ) -> tuple[tuple[int, int], ...]:
        """Return the ranges of ids between the bounds of turns. `cuts` are the texts before each bound.

        Raise InputError if the ids of a text are not the first ids of the prompt.
        """
        bounds = []
        for index, cut_off in enumerate(cuts):
            bound, in_common = self._begins_with(cut_off, prompt, planned, special_tokens)
            if in_common < bound:
                raise InputError(
                    f"the assistant's turn {index // 2 + 1} cannot be located, because later turns change the tokens "
                    f"from token {in_common} on, before its {'end' if index % 2 else 'beginning'}. Use a chat template "
                    "with {% generation %}, or train on all tokens"
                )
            bounds.append(bound)
        return tuple(zip(bounds[::2], bounds[1::2], strict=True))

    def _begins_with(
        self, cut_off: Rendered, prompt: Prompt, planned: Sequence[PlannedItem], special_tokens: SpecialTokens
    ) -> tuple[int, int]:
        """Encode the beginning of a prompt's text.

        Return the number of its ids, and how many of them, from the first, equal the prompt's ids.
        """
        num_items = len(planned)
        if self._inserted_at is None:
            num_items = min(num_items, self._text.count_markers(cut_off, self._markers))
        own = planned[:num_items]
        ids = self._expanded(self._encode(cut_off, own, special_tokens), own).ids
        if np.array_equal(ids, prompt.ids[: len(ids)]):
            return len(ids), len(ids)
        return len(ids), _in_common(ids.tolist(), prompt.ids.tolist())

    def _encode(self, rendered: Rendered, planned: Sequence[PlannedItem], special_tokens: SpecialTokens) -> Encoded:
        rendered = replace(rendered, text=self._processor.prompt_text(rendered.text))
        if self._markers:
            spellings = self._spellings(planned, rendered.embeds_mark)
            rendered = self._text.replace_markers(rendered, self._markers, *spellings)
        elif rendered.embeds_mark:  # the items are inserted as ids
            rendered = replace(rendered, text=rendered.text.replace(rendered.embeds_mark, ""))
        return self._text.encode(rendered, special_tokens)

    def _expanded(self, encoded: Encoded, planned: Sequence[PlannedItem], *, like_vllm: bool = False) -> Prompt:
        processor, tokens = self._processor, self._tokens
        ids, opening_ids = [*encoded.ids], [*self._text.opening]
        if planned or not (like_vllm and processor.traits.frames_only_media_in_vllm):
            ids, opening_ids = processor.frame(ids, len(planned)), processor.frame(opening_ids, len(planned))
        opening = _in_common(ids, opening_ids)
        if self._inserted_at is not None:
            return insert(ids, self._inserted_at, planned, tokens, opening)
        reaches = zip(planned, encoded.items, strict=True)
        around = [_around(item, encoded.ids, *reach) for item, reach in reaches]
        return expand_items(ids, planned, tokens, opening, around)

    def _spell(self, planned: Sequence[PlannedItem]) -> Iterator[str]:
        """Yield the text that represents each item in the unencoded prompt."""
        numbers: Counter[Kind] = Counter()
        for item in planned:
            if self._inserted_at is not None:
                yield ""
                continue
            numbers[item.shape.kind] += 1
            placeholder = item.placeholder
            head, tail = (part.format(numbers[item.shape.kind]) for part in placeholder.caption)
            before, after = self._text.spell(placeholder.before), self._text.spell(placeholder.after)
            marker = self._marker_of[placeholder]
            framed = marker if before and marker.startswith(before) else before + marker + after
            yield head + framed + tail

    def _spelled_marker(self, placeholder: Placeholder) -> str:
        return placeholder.marker or self._text.spell((placeholder.token,))

    def _spellings(self, planned: Sequence[PlannedItem], embeds_mark: str = "") -> tuple[list[str], list[str]]:
        """Return the marker of each item in the prompt's text, and the text that replaces each marker.

        `embeds_mark` has the same meaning as in `Rendered`.
        """
        items = planned if self._inserted_at is None else []
        markers = [
            embeds_mark if embeds_mark and item.shape.kind == PROMPT else self._marker_of[item.placeholder]
            for item in items
        ]
        texts, numbers = [], Counter[Kind]()
        for item, marker in zip(items, markers, strict=True):
            if item.shape.kind == PROMPT:
                texts.append(self._text.spell((item.placeholder.token,)))
                continue
            text = marker if item.spelling.text is None else item.spelling.text
            if item.spelling.number is not None:
                text = str(numbers[item.shape.kind]).join(item.spelling.number) + text
            texts.append(text)
            numbers[item.shape.kind] += 1
        return markers, texts


def sizes_of(checkpoint: Checkpoint, family: type[Family]) -> Sizes:
    """Return the sizes of a checkpoint that `family` has translated."""
    if not issubclass(family, PretrainedFamily):
        stated = ConfigOnly(checkpoint.path, checkpoint.config).stated_anywhere
        return Sizes(stated("vocab_size"), stated("max_position_embeddings"))
    config, longest = family.configuration(checkpoint), family.longest_prompt(checkpoint)
    text = config.get_text_config()
    if not (config.is_encoder_decoder or text.is_encoder_decoder):
        return Sizes(text.vocab_size, longest)
    targets = getattr(text, "max_target_positions", None)
    return Sizes(text.vocab_size, longest, longest if targets is None else targets - 1)  # one is for the first token


def _require_no_videos(request: TokenizeRequest) -> None:
    """Raise InputError if the request has a video whose frames are not sampled yet."""
    if any(media.kind == "video" and not media.num_listed_frames for media in request.media):
        raise InputError(
            "vLLM takes no videos for this model, or samples frames by a rule that is not supported; start the service "
            "with --like transformers, or send the frames as images"
        )


async def _planned_spans(media: RequestMedia, prompt: Prompt, items: Sequence[PlannedItem]) -> tuple[PlannedSpan, ...]:
    digests = await gather_in_order([media.digest(item) for item in items])
    spans = zip(prompt.spans, items, digests, strict=True)
    return tuple(_planned_span(prompt, span, item, digest) for span, item, digest in spans)


def _planned_span(prompt: Prompt, span: MediaSpan, item: PlannedItem, digest: bytes) -> PlannedSpan:
    placeholder = item.placeholder
    ahead = prompt.ids[span.start - span.lead : span.start][: len(placeholder.before)]
    behind = prompt.ids[span.stop : span.stop + span.tail][-len(placeholder.after) :] if placeholder.after else ()
    return PlannedSpan(
        *msgspec.structs.astuple(span),
        num_features=item.plan.num_features,
        num_bytes=sum(spec.nbytes for spec in item.plan.specs.values()),
        digest=digest,
        is_rgb=item.plan.is_rgb,
        plan=msgspec.msgpack.encode(item.plan),
        by_counts=item.plan.by_counts,
        sample=item.plan.sample,
        written_lead=span.lead - (len(ahead) if tuple(ahead) == placeholder.before else 0),
        written_tail=span.tail - (len(behind) if tuple(behind) == placeholder.after else 0),
    )


def _fitted(prompt: Prompt, options: PromptOptions) -> tuple[Prompt, slice]:
    """Return the prompt with as many tokens as `options` allow, and the slice of its media items that are left.

    Raise ContextLengthExceeded if it is too long and must not be truncated.
    """
    num_kept = options.max_prompt_tokens if options.cut_to == -1 else options.cut_to
    stop = len(prompt.spans)
    if 0 < num_kept < len(prompt):
        prompt = cut(prompt, num_kept, options.cut_side)
        stop = len(prompt.spans) if options.cut_side == "right" else stop
    if not options.is_counted and 0 < options.max_prompt_tokens < len(prompt):
        if not options.truncate:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens; the limit is {options.max_prompt_tokens}"
            )
        prompt = truncate(prompt, options.max_prompt_tokens)
    return prompt, slice(stop - len(prompt.spans), stop)


def _around(item: PlannedItem, ids: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """Return how many ids in [start, stop), the ids of an item, precede its first and follow its last placeholder."""
    own = [index for index in range(start, stop) if ids[index] == item.placeholder.token]
    return (own[0] - start, stop - 1 - own[-1]) if own else (0, 0)


def _in_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    equal = (one == other for one, other in zip(ids, others, strict=False))
    return sum(1 for _ in takewhile(bool, equal))
