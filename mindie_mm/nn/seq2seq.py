"""The model's half of an encoder-decoder: a prompt is encoded once, its answer decoded from that token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mindie_mm.device import Device, upload
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.checkpoint.end_tokens import eos_token_ids
from mindie_mm.nn.checkpoint.renaming import RenamedWeights
from mindie_mm.nn.generation import GenerationRules
from mindie_mm.nn.model import MediaModel, ModelSpec
from mindie_mm.nn.splice import Splice, plain_ids, splice
from mindie_mm.nn.weights.pretrained import load_module


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """One sequence in the midst of its answer."""

    prompt: Tensor
    """The encoder's hidden states, [1, T, hidden]."""
    cache: Any
    """transformers' EncoderDecoderCache: keys and values of the prompt and of the answer's tokens so far."""


class Seq2SeqModel(MediaModel):
    """An encoder-decoder of transformers': a family adds its tower."""

    def __init__(
        self, module: Any, spec: ModelSpec, text_model: Any, lm_head: Callable[[Tensor], Tensor], rules: GenerationRules
    ) -> None:
        """`text_model` has the encoder and the decoder, in `module`, which is the whole."""
        self.spec = spec
        self.module = module
        self.text_model = text_model
        self.lm_head = lm_head
        self.rules = rules

    @property
    def prompt_token_bytes(self) -> int:
        """Bytes that one token of a prompt takes while its answer is decoded; one of the answer `kv_token_bytes`."""
        return self.spec.kv_token_bytes + self.spec.hidden_size * self.spec.dtype.itemsize

    @torch.inference_mode()
    def encode_prompt(self, input_ids: Tensor, splices: Sequence[Splice]) -> Decoding:
        """The start of an answer to plain ids int64 [T], whose rows that `splices` name take features."""
        from transformers import DynamicCache, EncoderDecoderCache

        embeddings = self.text_model.get_input_embeddings()
        hidden = splice(embeddings(upload(input_ids, self.spec.device)), splices)
        states = self.text_model.encoder(inputs_embeds=hidden.unsqueeze(0)).last_hidden_state
        return Decoding(states, EncoderDecoderCache(DynamicCache(), DynamicCache()))

    @torch.inference_mode()
    def decode(self, decoding: Decoding, token_ids: Sequence[int]) -> Tensor:
        """Logits float32 [n, vocabulary] behind each of the next n ids of an answer, the start token's first."""
        mask = None
        if len(token_ids) == 1:  # sees all before it: BART's decoder, given no mask, makes one and waits to read it
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
        """Logits float32 [n, vocabulary] of a decoder's ids int64 [n], to a prompt of ids int64 [T] with words."""
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
    """A `cls`, a PreTrainedModel, with the checkpoint's weights on `device`, its decoder's sizes and its rules.

    `max_model_len` is how long prompt and answer may each be; `renamed` are the weights of a translated checkpoint.
    UnsupportedCheckpoint as `load_module`, and for rules that are not served.
    """
    module = load_module(cls, checkpoint, device, dtype, renamed)
    # What config.json says of generating is with the part that it says it of.
    configs = [config for part in (module, *module.children()) if (config := getattr(part, "generation_config", None))]
    if renamed is not None:
        from transformers import GenerationConfig  # late, like all of its modelling

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
        num_layers=getattr(text, "decoder_layers", None) or text.num_decoder_layers,
        num_kv_heads=heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        eos_token_ids=rules.eos_token_ids or eos_token_ids(checkpoint),
        device=device.torch_device,
        dtype=dtype,
    )
    return module, spec, rules
