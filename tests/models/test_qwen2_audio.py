"""Tests for Qwen2-Audio against transformers, on random weights."""

import json
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor
from transformers import WhisperFeatureExtractor as FeatureExtractor

from mindie_mm.errors import LimitExceeded, MediaError
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.models import load_model
from mindie_mm.nn.splice import plain_ids
from mindie_mm.tokenize import Tokenizer
from tests.audio_samples import encode_audio, speech, tone
from tests.models.contract import FamilyContract
from tests.models.mindie_contract import MindIEContract
from tests.models.references import Reference as BaseReference
from tests.models.small_checkpoints import read_model, save_model, save_tokenizer
from tests.transformers_reference import AutoTokenizer

TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
WINDOW_S = 2


class Reference(BaseReference):
    markers: ClassVar = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}

    def inputs(self, items):
        clips = [item["audio"] for item in items if "audio" in item]
        given = {"audio": clips, "sampling_rate": 16_000} if clips else {}
        return self.processor(text=[self.text(items)], return_tensors="pt", **given)

    @torch.inference_mode()
    def generate(self, items, count):
        """Generate `count` tokens greedily.

        If the prompt has a single audio token, do not call transformers' `generate`: that method would take the token
        for an unexpanded placeholder, expand the token again and lose the attention mask.
        """
        inputs = {**self.inputs(items)}
        if (inputs["input_ids"] == self.model.config.audio_token_id).sum() != 1:
            return super().generate(items, count)
        tokens: list[int] = []
        while len(tokens) < count and tokens[-1:] != [self.model.generation_config.eos_token_id]:
            tokens.append(self.model(**inputs).logits[0, -1].argmax().item())
            inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([tokens[-1:]])], dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return tokens


class TestQwen2Audio(MindIEContract, FamilyContract):
    name = "qwen2_audio"
    mindie_layout = "qwen2_audio"
    mindie_prompts = (
        [{"text": "Listen: "}, {"audio": tone(0.53)}, {"text": "What is it?"}],
        [{"audio": tone(0.21, hertz=900)}, {"text": " and "}, {"audio": tone(WINDOW_S)}, {"text": "differ?"}],
    )
    mindie_pixel_tolerance = 1e-6
    mindie_tolerance = 1e-4
    prompts: ClassVar = {
        "text": [{"text": "What is in the image? A square, perhaps."}],
        "one clip": [{"text": "Listen: "}, {"audio": tone(0.53)}, {"text": "What is it?"}],
        "two clips": [{"audio": tone(0.21, hertz=900)}, {"text": " and "}, {"audio": tone(1.3)}, {"text": "differ?"}],
        "a single slot": [{"text": "Hark"}, {"audio": tone(0.03)}, {"text": "?"}],
        "the whole window": [{"audio": tone(WINDOW_S)}, {"text": "?"}],
    }

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(out, TOKENS, eos_token="<|im_end|>", pad_token="<|endoftext|>")
        ids = tokenizer.convert_tokens_to_ids
        extractor = FeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
        Qwen2AudioProcessor(extractor, tokenizer).save_pretrained(out)
        config = Qwen2AudioConfig(
            audio_config={
                "num_mel_bins": 16,
                "d_model": 64,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 96,
                "max_source_positions": WINDOW_S * 50,
                "initializer_range": 0.05,
            },
            text_config={
                "model_type": "qwen2",
                "vocab_size": 400,
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 128,
                "max_position_embeddings": 8192,
                "initializer_range": 0.05,
            },
            audio_token_index=ids("<|AUDIO|>"),
        )
        save_model(out, Qwen2AudioForConditionalGeneration, config, ids("<|im_end|>"), ids("<|endoftext|>"))

    @classmethod
    def make_reference(cls, path):
        return Reference(
            read_model(Qwen2AudioForConditionalGeneration, path),
            Qwen2AudioProcessor(FeatureExtractor.from_pretrained(path), AutoTokenizer.from_pretrained(path)),
        )

    def mindie_arrays(self, prompt, items, model, ids):
        extractor = FeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
        clips = [item["audio"] for item in prompt if "audio" in item]
        found = extractor(
            clips, sampling_rate=16_000, padding="max_length", return_attention_mask=True, return_tensors="np"
        )
        pads = ids == items[0].shape.token
        text = ids[~(pads & np.roll(pads, 1))][np.newaxis]
        return [found["input_features"], text, np.ones_like(text), found["attention_mask"].astype(np.int64)]

    def test_encoded_speech_equals_the_reference(self, reference, model, tokenizer, path_file):
        data = speech(2)
        items = [{"text": "Said: "}, {"audio": data}]
        decoded = [{"text": "Said: "}, {"audio": open_audio(data).decode(16_000, 60 * 16_000)}]
        ids = tokenizer.tokenize(items, path_file)
        found = plain_ids(ids.numpy(), model.read(ids.numpy()))
        assert found.tolist() == reference.inputs(decoded)["input_ids"][0].tolist()
        assert (self.logits(model, ids) - reference.logits(decoded)).abs().max() <= self.tolerance

    def test_samples_of_another_rate_equal_their_file(self, model, tokenizer, path_file):
        samples = tone(0.8, 44_100)
        file = encode_audio(samples, 44_100, "WAV", "FLOAT")
        one = model.logits(tokenizer.tokenize([{"audio": samples, "sampling_rate": 44_100}], path_file))
        assert torch.equal(one, model.logits(tokenizer.tokenize([{"audio": file}], path_file)))

    def test_a_clip_that_is_too_short_is_refused(self, tokenizer, path_file):
        with pytest.raises(
            MediaError, match=r"item 0 \(audio\): the audio clip has 320 samples .*; it must have at least 321"
        ):
            tokenizer.tokenize([{"audio": tone(0.02)}], path_file)

    @pytest.mark.parametrize("as_file", [False, True])
    def test_a_clip_longer_than_the_window_is_refused(self, as_file, tokenizer, path_file):
        clip = encode_audio(tone(WINDOW_S + 0.7), 16_000) if as_file else tone(WINDOW_S + 0.7)
        with pytest.raises(
            LimitExceeded, match=r"item 0 \(audio\): the audio clip lasts 2\.7 s; .* is 2 s\. Cut the clip"
        ):
            tokenizer.tokenize([{"audio": clip}], path_file)

    def test_a_chat_is_rendered_with_the_processors_template(self, reference, model, tokenizer, path_file):
        messages = [
            {"role": "user", "content": [{"type": "audio", "audio": tone(0.4)}, {"type": "text", "text": "What?"}]},
            {"role": "assistant", "content": "A tone."},
            {"role": "user", "content": [{"type": "text", "text": "Now?"}, {"type": "audio", "audio": tone(0.7)}]},
        ]
        text = reference.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = reference.processor(text=text, audio=[tone(0.4), tone(0.7)], sampling_rate=16_000)
        ids = tokenizer.tokenize_chat(messages, path_file).numpy()
        assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0]

    def test_the_tokenizers_own_template_is_ignored(self, path, reference, model, tmp_path, path_file):
        """As in the reference's processor, the tokenizer's template is ignored, because it does not support audio."""
        other = shutil.copytree(path, tmp_path / "other")
        (other / "chat_template.jinja").unlink()
        described = json.loads((other / "tokenizer_config.json").read_text())
        template = "{% for message in messages %}{{ '<|im_start|>' + message['content'] }}{% endfor %}"
        (other / "tokenizer_config.json").write_text(json.dumps({**described, "chat_template": template}))
        messages = [
            {"role": "user", "content": [{"type": "audio", "audio": tone(0.4)}, {"type": "text", "text": "What?"}]}
        ]
        read = Qwen2AudioProcessor.from_pretrained(other)
        text = read.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = reference.processor(text=text, audio=[tone(0.4)], sampling_rate=16_000)
        with Tokenizer.from_pretrained(other) as tokenizer:
            ids = tokenizer.tokenize_chat(messages, path_file).numpy()
            assert plain_ids(ids, model.read(ids)).tolist() == expected["input_ids"][0]


def test_weights_under_their_earlier_names_are_served(tmp_path):
    """On the Hub, the weights are called `language_model.model...` and `audio_tower...`."""
    TestQwen2Audio.write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    old = {
        name.replace("model.language_model.", "language_model.model.").removeprefix("model."): weight
        for name, weight in weights.items()
    }
    old = {("language_model." + name if name.startswith("lm_head") else name): w for name, w in old.items()}
    assert not any(name.startswith("model.") for name in old)
    save_file(old, file, {"format": "pt"})
    model = load_model(tmp_path, device="cpu", dtype="float32")
    with Tokenizer.from_pretrained(tmp_path) as tokenizer:
        ids = tokenizer.tokenize([{"text": "What?"}])
    save_file(weights, file, {"format": "pt"})
    assert torch.equal(model.logits(ids), load_model(tmp_path, device="cpu", dtype="float32").logits(ids))
