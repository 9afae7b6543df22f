"""POST /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any, ClassVar, NotRequired

from fastapi import APIRouter
from starlette.responses import Response
from typing_extensions import TypedDict

from mindie_mm.errors import InputError
from mindie_mm.inputs import OFF, Item, media_defaults, template_variables
from mindie_mm.tokenize.prompt import PromptOptions
from mindie_mm.tokenize.requests import TokenizeRequest
from service.http.json_response import JSONResponse
from service.request.admitted import WholeAnswer
from service.request.incoming import Incoming, IncomingDep
from service.request.prompts import Parse, PromptReader, prompt_of_ids, prompts, spooled_prompts
from service.request.state import ServiceDep
from service.routes.infer import Inputs
from service.schemas.body import Array, Body, CacheSalt, NotServed, Templated, TokenIds
from service.schemas.description import answered
from service.schemas.message_types import AnyMessage
from service.schemas.not_served import NOT_SERVED
from service.schemas.openai_types import ChatBody, CompletionBody, opens_turn
from service.schemas.tool_types import ToolFields

router = APIRouter()


class TokenizeBody(ToolFields, Body):
    """POST /tokenize. Exactly one of `prompt`, `messages` and `inputs` must be given."""

    # chat_template is not refused, because it is a boolean field for `inputs`, as in /infer.
    not_served: ClassVar[NotServed] = {
        **{name: off for name, off in NOT_SERVED.items() if name != "chat_template"},
        **dict.fromkeys(("truncate_prompt_tokens", "prompt_embeds"), OFF),
    }

    ignored: ClassVar[Collection[str]] = {*ChatBody.model_fields, *CompletionBody.model_fields}
    """Fields of completions, whose bodies clients send to count their tokens. Those that change tokens are refused."""

    prompt: str | None = None
    messages: Array[AnyMessage] | None = None
    inputs: Inputs | None = None
    chat_template: Templated | None = None
    """True if a list of `inputs` becomes a chat turn. Allowed only with `inputs`. Default: true."""
    add_generation_prompt: bool | None = None
    """True if the chat template ends with the start of the assistant's turn. Default: true."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens, such as BOS. The default is true for `prompt` and false for `messages`, whose
    template usually writes these tokens. Not supported with `inputs`."""
    parse_special: bool | None = None
    """Has the same meaning as in a completion. Not supported with `messages` and with `inputs` that become a chat."""
    continue_final_message: bool | None = None
    """Has the same meaning as in a chat completion."""
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Any = None
    """`mm_processor_kwargs` and `media_io_kwargs` have the same meaning as in a chat completion. Both require
    `messages`."""
    media_io_kwargs: Any = None
    reasoning_effort: str | None = None
    """`reasoning_effort`, `tools`, `tool_choice`, `functions` and `function_call` have the same meaning as in a chat
    completion."""
    cache_salt: CacheSalt | None = None
    return_token_strs: bool | None = None

    @property
    def text(self) -> str | None:
        """The prompt, if it is one text."""
        return self.inputs if isinstance(self.inputs, str) else self.prompt

    @property
    def prompt_field(self) -> str | None:
        """Field that errors of the prompt name. None for a string, whose errors need no field."""
        if self.text is not None:
            return None
        return "inputs" if self.messages is None else "messages"

    def items(self, reader: PromptReader) -> list[Item] | None:
        """Parse the items of the prompt, unless it consists of messages. Raise InputError if they are not valid."""
        if self.text is not None:
            return reader.text(self.text)
        return reader.items(self.inputs) if isinstance(self.inputs, list) else None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: TokenIds
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default: false."""


class TokenizeAnswer(TypedDict):
    """The response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """The vocabulary's strings for the tokens, such as `Ġred`, if the request sets `return_token_strs`."""


class DetokenizeAnswer(TypedDict):
    """The response of /detokenize."""

    prompt: str


@router.post("/tokenize", responses=answered(TokenizeAnswer))
async def tokenize(body: TokenizeBody, incoming: IncomingDep) -> Response:
    """Return the token ids of a string, a chat or a `List[Dict]`, with placeholder ids in place of handle words."""
    return WholeAnswer(tokenizing(body, incoming), incoming.service.admission)


def tokenizing(body: TokenizeBody, incoming: Incoming) -> Callable[[], Awaitable[TokenizeAnswer]]:
    """Return the coroutine function that tokenizes the prompt of `body`. Raise InputError if the body is not valid."""
    service = incoming.service
    incoming.accept(body)
    if sum(given is not None for given in (body.prompt, body.messages, body.inputs)) != 1:
        raise InputError("the request must have exactly one of prompt, messages and inputs")
    if body.inputs == "":
        raise InputError("inputs is empty", param="inputs")
    if body.chat_template is not None and body.inputs is None:
        raise InputError(
            f"chat_template is {body.chat_template}, but there are no inputs; send inputs, or leave chat_template out",
            param="chat_template",
        )
    if body.add_special_tokens and body.inputs is not None:
        message = (
            f"add_special_tokens is {body.add_special_tokens}, which is not supported with inputs; leave this field out"
        )
        raise InputError(message, param="add_special_tokens")
    if body.continue_final_message and body.messages is None:
        raise InputError(
            "continue_final_message=true needs messages, which are missing; send messages, or leave "
            "continue_final_message out",
            param="continue_final_message",
        )
    defaults = media_defaults(body.mm_processor_kwargs, body.media_io_kwargs)
    if defaults and body.messages is None:
        raise InputError(
            "mm_processor_kwargs and media_io_kwargs require messages; with inputs, give each item its own options"
        )
    use = body.tool_use()
    if body.messages is None:
        messages = None
        variables = template_variables(body.chat_template_kwargs, use.offered, None, body.reasoning_effort)
    else:
        messages, variables = service.chat_dialect.request(
            body.messages, use, body.chat_template_kwargs, body.reasoning_effort
        )
    reader = PromptReader(service.config, service.kept, incoming.owner, body.cache_salt or "")

    def parse() -> TokenizeRequest:
        return TokenizeRequest(
            messages=None if messages is None else reader.messages(messages, defaults),
            items=body.items(reader),
            chat=body.text is None and body.chat_template is not False,
            add_generation_prompt=opens_turn(body.add_generation_prompt, body.continue_final_message),
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=variables,
            options=PromptOptions(
                service.worker.engine.info.max_model_len,
                is_counted=True,
                cache_salt=body.cache_salt or "",
                add_special_tokens=body.prompt is None or body.add_special_tokens is not False,
                parse_special=body.parse_special,
                repeat_special_tokens=body.messages is not None and bool(body.add_special_tokens),
            ),
        )

    async def answer() -> TokenizeAnswer:
        ids = await _ids_of(parse, body.prompt_field, incoming)
        return {
            "count": len(ids),
            "max_model_len": service.worker.engine.info.max_model_len,
            "tokens": ids,
            "token_strs": [*map(service.tokens.piece, ids)] if body.return_token_strs else None,
        }

    return answer


async def _ids_of(parse: Parse, field: str | None, incoming: Incoming) -> list[int]:
    service = incoming.service
    given = service, [parse], incoming.clock, incoming.owner, field
    if service.worker.only_plans:  # its arena has no room for media
        async with spooled_prompts(*given, service.worker.plan, fill=False) as made:
            (plan,) = made.results
            ids: list[int] = plan.ids.tolist()
    else:
        async with prompts(*given) as (source,):
            ids = source.prompt.plain_ids.tolist()
    return ids


class TokenizerInfo(TypedDict):
    """The contents of the checkpoint's tokenizer_config.json, with the chat template. There may be further keys."""

    tokenizer_class: str
    chat_template: NotRequired[Any]


@router.get("/tokenizer_info", responses=answered(TokenizerInfo))
async def tokenizer_info(service: ServiceDep) -> Response:
    """Return the settings of the tokenizer, as vLLM does."""
    return JSONResponse(service.tokenizer_info)


@router.post("/detokenize", responses=answered(DetokenizeAnswer))
async def detokenize(body: DetokenizeBody, incoming: IncomingDep) -> Response:
    """Return the text of token ids. By default, it includes the text of special tokens."""
    service = incoming.service
    incoming.accept(body)

    async def answer() -> DetokenizeAnswer:
        ids: list[int] = prompt_of_ids(service, body.tokens, "tokens").ids.tolist()
        return {"prompt": service.worker.tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens))}

    return WholeAnswer(answer, service.admission)
