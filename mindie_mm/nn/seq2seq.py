"""The base class of encoder-decoder models, and their loader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mindie_mm.device import Device, upload
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import eos_token_ids
from mindie_mm.nn.checkpoint.renaming import RenamedWeights
from mindie_mm.nn.generation import GenerationRules
from mindie_mm.nn.model import MediaModel, ModelSpec
from mindie_mm.nn.paged_cache import KVLayer
from mindie_mm.nn.splice import Splice, plain_ids, splice
from mindie_mm.nn.weights.pretrained import load_module


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """The state of a sequence whose answer is being decoded."""

    prompt: Tensor
    """Hidden states of the encoder, [1, T, hidden]."""
    cache: Any
    """An EncoderDecoderCache from transformers, with the keys and values of the prompt and of the answer so far."""

    @classmethod
    def of(cls, prompt: Tensor) -> Decoding:
        """Return the state before the first token of an answer."""
        from transformers import DynamicCache, EncoderDecoderCache

        return cls(prompt, EncoderDecoderCache(DynamicCache(), DynamicCache()))


class Seq2SeqModel(MediaModel):
    """An encoder-decoder model from transformers. Each prompt is encoded once. Each family implements `tower`."""

    def __init__(
        self, module: Any, spec: ModelSpec, text_model: Any, lm_head: Callable[[Tensor], Tensor], rules: GenerationRules
    ) -> None:
        """Wrap a loaded module.

        Args:
            module: The whole model.
            spec: Sizes of the decoder.
            text_model: Part of `module` that has the encoder and the decoder.
            lm_head: Function from the decoder's hidden states to logits.
            rules: Tokens that the checkpoint forces or suppresses.

        """
        self.spec = spec
        self.module = module
        self.text_model = text_model
        self.lm_head = lm_head
        self.rules = rules

    def text_modules(self) -> list[nn.Module]:
        return [self.text_model, *([self.lm_head] if isinstance(self.lm_head, nn.Module) else ())]

    @property
    def prompt_token_bytes(self) -> int:
        """Memory that a token of the prompt needs during decoding, in bytes.

        A token of the answer needs `kv_token_bytes`.
        """
        return self.spec.kv_token_bytes + self.spec.hidden_size * self.spec.dtype.itemsize

    @torch.inference_mode()
    def encode_prompt(self, input_ids: Tensor, splices: Sequence[Splice]) -> Decoding:
        """Encode a prompt and return the state in which decoding begins.

        Args:
            input_ids: Ids without handle words, int64 [T].
            splices: Features and the rows of the embeddings that they replace.

        """
        embeddings = self.text_model.get_input_embeddings()
        hidden = splice(embeddings(upload(input_ids, self.spec.device)), splices)
        states = self.text_model.encoder(inputs_embeds=hidden.unsqueeze(0)).last_hidden_state
        return Decoding.of(states)

    def beginning(self, decoding: Decoding, input_ids: Sequence[int]) -> list[int]:
        """Return the first ids of the decoder, before the answer. By default, they are the start token.

        Args:
            decoding: State in which decoding begins. It is not changed.
            input_ids: Ids of the prompt without handle words.

        """
        return [self.rules.start_token_id]

    def constrain(self, row: Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int], *, last: bool) -> None:
        """Apply the constraints on the next token to its logits, in place.

        Args:
            row: Logits, float32 [vocabulary].
            prompt_ids: Ids of the prompt without handle words.
            output_ids: Tokens of the answer so far.
            last: Whether the next token is the last token that the answer may have.

        """
        self.rules.constrain(row, output_ids, last=last)

    def longest_output(self, num_prompt: int) -> int:
        """Return the maximum number of tokens of an answer to a prompt of `num_prompt` tokens."""
        return self.spec.max_model_len

    @torch.inference_mode()
    def decode(self, decoding: Decoding, token_ids: Sequence[int]) -> Tensor:
        """Run the decoder on the next n ids of a sequence that starts with the ids of `beginning`.

        Returns:
            Logits after each id, float32 [n, vocabulary].

        """
        mask = None
        if len(token_ids) == 1:  # without a mask, BART's decoder would build one and wait for the device
            num_tokens = decoding.cache.get_seq_length() + 1
            mask = torch.zeros(1, 1, 1, num_tokens, dtype=self.spec.dtype, device=self.spec.device)
        out = self.text_model.decoder(
            input_ids=upload([list(token_ids)], self.spec.device),
            attention_mask=mask,
            encoder_hidden_states=decoding.prompt,
            past_key_values=decoding.cache,
            use_cache=True,
        )
        return self.lm_head(out.last_hidden_state[0]).float()

    def logits(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """Return the logits of a whole answer.

        Args:
            input_ids: Ids of the prompt, including handle words, int64 [T].
            decoder_input_ids: Ids of the answer, including the start token, int64 [n].

        Returns:
            float32 [n, vocabulary].

        """
        ids = input_ids.cpu().numpy()
        items = self.read(ids)
        features = self.encode(items) if items else []
        splices = [Splice(item.slots, rows) for item, rows in zip(items, features, strict=True)]
        decoding = self.encode_prompt(torch.from_numpy(plain_ids(ids, items)), splices)
        return self.decode(decoding, decoder_input_ids.tolist())


def load_seq2seq(
    cls: type[Any],
    checkpoint: Checkpoint,
    device: Device,
    dtype: torch.dtype,
    max_model_len: int,
    renamed: RenamedWeights | None = None,
) -> tuple[Any, ModelSpec, GenerationRules]:
    """Load an encoder-decoder model from transformers.

    Args:
        cls: A subclass of PreTrainedModel.
        checkpoint: Where the weights are.
        device: Where the module runs.
        dtype: The dtype of the weights.
        max_model_len: Maximum number of tokens of the prompt, and of the answer.
        renamed: Weights of a translated checkpoint. None if the checkpoint was not translated.

    Returns:
        The module, the sizes of its decoder, and the tokens that the checkpoint forces or suppresses.

    Raises:
        UnsupportedCheckpoint: `load_module` refuses the checkpoint, or its generation settings are not supported.

    """
    module = load_module(cls, checkpoint, device, dtype, renamed)
    # transformers attaches the generation settings in a section of config.json to the submodule of that section.
    configs = [config for part in (module, *module.children()) if (config := getattr(part, "generation_config", None))]
    if renamed is not None:
        from transformers import GenerationConfig  # imported late, like all of transformers' modeling code

        configs = [GenerationConfig(**checkpoint.json("generation_config.json"))]
    if (eos := checkpoint.json("generation_config.json").get("eos_token_id")) is not None:
        configs.insert(0, SimpleNamespace(eos_token_id=eos))
    rules = GenerationRules(configs, str(checkpoint.path), device.torch_device)
    text = module.config.get_text_config()
    heads = getattr(text, "decoder_attention_heads", None) or text.num_attention_heads
    spec = ModelSpec(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_model_len=max_model_len,
        layers=(KVLayer(heads, getattr(text, "head_dim", None) or text.hidden_size // heads),)
        * (getattr(text, "decoder_layers", None) or text.num_decoder_layers),
        eos_token_ids=rules.eos_token_ids or eos_token_ids(checkpoint),
        device=device.torch_device,
        dtype=dtype,
    )
    return module, spec, rules
