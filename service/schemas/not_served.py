"""Request fields of other servers that would change the answer.

These fields are refused, so that no answer is silently wrong. Fields that only tune another field (`mirostat_tau`,
`dry_base`) are ignored, because they have no effect without that field.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindie_mm.inputs import OFF, PROMPT_FIELDS
from service.schemas.body import NotServed

_ZERO = (None, 0)

NOT_SERVED: NotServed = {
    **PROMPT_FIELDS,
    # fields of vLLM
    **dict.fromkeys(("guided_whitespace_pattern", "logits_processors"), OFF),
    **dict.fromkeys(("thinking_token_budget", "repetition_detection"), OFF),
    **dict.fromkeys(("lora_request", "vllm_xargs", "extra_args"), OFF),
    **dict.fromkeys(("detokenize", "include_reasoning"), (None, True)),
    "early_stopping": OFF,
    # fields of OpenAI
    "audio": OFF,
    "modalities": (*OFF, ["text"]),
    "web_search_options": (None,),  # empty options are refused too, because OpenAI searches even then
    "verbosity": (*OFF, "medium"),
    # fields of SGLang
    **dict.fromkeys(("stop_regex", "no_stop_trim", "custom_logit_processor"), OFF),
    **dict.fromkeys(("lora_path", "return_hidden_states", "session_params", "custom_params", "sampling_params"), OFF),
    **dict.fromkeys(("input_ids", "input_embeds", "image_data", "video_data", "audio_data", "return_logprob"), OFF),
    # fields of llama.cpp
    **dict.fromkeys(("lora", "input_prefix", "input_suffix", "return_tokens", "samplers"), OFF),
    "n_predict": (None,),
    **dict.fromkeys(("n_probs", "mirostat", "dynatemp_range", "t_max_predict_ms", "reasoning_budget"), (*OFF, 0)),
    **dict.fromkeys(("repeat_penalty", "tfs_z", "typ_p"), (None, 1)),
    "top_n_sigma": (None, -1, 0),
    # fields of Ollama
    **dict.fromkeys(("options", "format", "template", "system", "images", "context"), OFF),
    **dict.fromkeys(("num_predict", "num_ctx", "raw", "think"), (None,)),
    # fields of text-generation-inference and of transformers
    **dict.fromkeys(("watermarking", "watermarking_config", "stop_sequences", "guideline", "tool_prompt"), OFF),
    **dict.fromkeys(("details", "decoder_input_details", "return_full_text"), OFF),
    **dict.fromkeys(("top_n_tokens", "min_length"), _ZERO),
    **dict.fromkeys(("truncate", "max_length", "max_time"), (None,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (None, 1)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "suppress_tokens", "forced_eos_token_id"), OFF),
    "adapter_id": (*OFF, "None"),
    # fields of reasoning models, DashScope, Anthropic and Mistral
    **dict.fromkeys(("enable_thinking", "thinking", "thinking_budget", "reasoning", "safe_prompt"), (None,)),
    **dict.fromkeys(("enable_search", "vl_high_resolution_images", "max_output_tokens", "random_seed"), (None, False)),
    # fields of text-generation-webui
    **dict.fromkeys(("preset", "grammar_string", "custom_token_bans", "ban_eos_token", "dynamic_temperature"), OFF),
    **dict.fromkeys(("mirostat_mode", "dry_multiplier", "xtc_probability", "smoothing_factor"), _ZERO),
    **dict.fromkeys(("penalty_alpha", "no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "top_a"), _ZERO),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty", "tfs"), (None, 1)),
    # The OpenAI client replaces these fields by their content. Only a client that sends raw HTTP sends them.
    **dict.fromkeys(("extra_body", "extra_query"), OFF),
}
"""Fields that are refused, with the values that are accepted because they are harmless.

A field that the class of a body declares is accepted in that body.
"""

STRUCTURES: NotServed = {
    **dict.fromkeys(("response_format", "structured_outputs", "structural_tag"), OFF),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), OFF),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar"), OFF),
}
"""Fields for structured outputs, which MindIE's endpoints refuse."""

EXTRAS: NotServed = {
    **dict.fromkeys(("allowed_token_ids", "bad_words", "include_stop_str_in_output", "return_token_ids"), OFF),
    **dict.fromkeys(("return_tokens_as_token_ids", "logprob_token_ids", "prompt_logprobs", "use_beam_search"), OFF),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True)),
    "min_new_tokens": _ZERO,
    "length_penalty": (None, 1),
}
"""Fields of vLLM that MindIE's endpoints refuse."""

WITHOUT_BEAMS: NotServed = {
    **dict.fromkeys(("stream", "stop", "stop_token_ids", "logit_bias", "bad_words"), (*OFF, ())),
    **dict.fromkeys(("allowed_token_ids", "logprob_token_ids", "prompt_logprobs"), (None,)),
    **dict.fromkeys(("min_tokens", "min_new_tokens", "presence_penalty", "frequency_penalty"), _ZERO),
    "repetition_penalty": (None, 1),
}
"""Fields that `use_beam_search` excludes, with the values that are accepted because they are harmless.

vLLM ignores most of them. Fields that only concern drawing, such as `top_p`, are ignored here too.
"""

MINDIES: NotServed = {
    "parameters": OFF,
    "watermark": OFF,
    "do_sample": (None, True),
    "typical_p": (None, 1),
}
"""MindIE's fields that OpenAI's endpoints refuse.

MindIE itself ignores `typical_p` and `watermark`. Other servers apply them.
"""

INSTEAD: Mapping[str, str] = {
    "format": "response_format",
    "grammar_string": "grammar",
    **dict.fromkeys(("n_predict", "num_predict", "max_length", "max_output_tokens"), "max_tokens"),
    "min_length": "min_tokens",
    **dict.fromkeys(("enable_thinking", "thinking", "think"), "chat_template_kwargs"),
    **dict.fromkeys(("thinking_budget", "reasoning_budget"), "thinking_token_budget"),
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "random_seed": "seed",
    "system": "a message with the role system",
    **dict.fromkeys(
        ("extra_body", "extra_query", "parameters", "options", "sampling_params"),
        "its fields as top-level fields of the request",
    ),
    "num_return_sequences": "n",
    **dict.fromkeys(("images", "image_data"), "image_url parts in messages"),
    "video_data": "video_url parts in messages",
    "audio_data": "input_audio parts in messages",
    "functions": "tools in /v1/chat/completions",
    **dict.fromkeys(("tools", "mm_processor_kwargs", "media_io_kwargs"), "/v1/chat/completions, which has this field"),
    "documents": "the text of the documents in the prompt",
    "input_ids": "prompt in /v1/completions",
    **dict.fromkeys(("return_logprob", "n_probs", "top_n_tokens", "details"), "logprobs"),
    "decoder_input_details": "prompt_logprobs",
    "return_tokens": "return_token_ids",
    "no_stop_trim": "include_stop_str_in_output",
    "truncate": "truncate_prompt_tokens",
    "num_ctx": "the option --max-model-len of the service",
    **dict.fromkeys(("custom_token_bans", "suppress_tokens"), "logit_bias"),
    "bad_words_ids": "bad_words",
    "ban_eos_token": "ignore_eos",
    "do_sample": "temperature 0",
    "num_beams": "use_beam_search and n",
}
"""Fields or values to use instead of refused fields in requests to OpenAI's endpoints."""

INSTEAD_OF_MINDIES: Mapping[str, str] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens"),
    **dict.fromkeys((*STRUCTURES, *EXTRAS), "/v1/chat/completions, which has this field"),
    **dict.fromkeys(("guided_json", "guided_choice"), "/v1/chat/completions with response_format"),
    **dict.fromkeys(
        ("n", "logprobs", "top_logprobs", "logit_bias", "stop_token_ids", "ignore_eos"),
        "/v1/chat/completions, which has this field",
    ),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), "repetition_penalty"),
    "stop_sequences": "stop",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
}
"""Fields or endpoints to use instead of refused fields in `parameters` of MindIE's endpoints."""
