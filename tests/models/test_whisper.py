"""Tests for Whisper against transformers, on random weights."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from mindie_mm.device.cpu import CPU
from mindie_mm.engine.process.largest_step import WorstCase
from mindie_mm.engine.seq2seq import Seq2SeqEngine
from mindie_mm.errors import InputError, LimitExceeded
from mindie_mm.models import load_model
from mindie_mm.settings.config import EngineConfig
from mindie_mm.tokenize import Tokenizer
from tests.audio_samples import tone
from tests.models.contract import refusals, run
from tests.models.seq2seq_contract import Seq2SeqContract, Seq2SeqReference
from tests.models.small_checkpoints import changed, save_json, save_tokenizer
from tests.transformers_reference import AutoTokenizer

WINDOW_S, FEATURES, BINS, TARGET = 2, 100, 16, 64
TOKENS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
EOT, START, EN, DE, TRANSLATE, TRANSCRIBE, _, PREVIOUS, NO_SPEECH, NO_TIMES = range(len(TOKENS))
GENERATION = {
    "bos_token_id": EOT,
    "pad_token_id": EOT,
    "eos_token_id": EOT,
    "decoder_start_token_id": START,
    "forced_decoder_ids": [[1, None], [2, TRANSCRIBE]],
    "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
    "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": PREVIOUS,
    "is_multilingual": True,
    "return_timestamps": False,
    "suppress_tokens": [START, TRANSLATE, TRANSCRIBE, NO_SPEECH],
    "begin_suppress_tokens": [220, EOT],
    "max_length": TARGET,
}


def write_timed_checkpoint(out):
    """Write a checkpoint that writes time stamps. As in published ones, their tokens are the last of the vocabulary."""
    TestWhisper.write_checkpoint(out)
    tokenizer = save_tokenizer(out, [])
    first = len(tokenizer)
    times = [f"<|{0.02 * index:.2f}|>" for index in range(FEATURES + 1)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*TOKENS], "eos_token": TOKENS[EOT]})
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    tokenizer.save_pretrained(out)
    moved = {
        name: [[step, index and index + first] for step, index in value]
        if name == "forced_decoder_ids"
        else {key: index + first for key, index in value.items()}
        if isinstance(value, dict)
        else [index + first if index < len(TOKENS) else index for index in value]
        if isinstance(value, list)
        else value + first
        if name.endswith("_id")
        else value
        for name, value in GENERATION.items()
    }
    save_json(out, generation_config=moved | {"max_initial_timestamp_index": 50})
    config = WhisperConfig.from_pretrained(out)
    config.vocab_size = len(tokenizer)
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id", "eos_token_id"):
        setattr(config, name, getattr(config, name) + first)
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    torch.manual_seed(1)
    # So that it writes time stamps, and ends some answers with two of them.
    direction = torch.nn.functional.normalize(torch.randn(config.d_model), dim=0)
    embeddings = model.model.decoder.embed_tokens.weight.data
    model.model.decoder.layer_norm.bias.data.copy_(direction)
    embeddings[config.eos_token_id] += 4 * direction
    embeddings[-len(times) :] += 2 * direction
    (out / "generation_config.json").unlink()
    model.save_pretrained(out)
    save_json(out, generation_config=moved | {"max_initial_timestamp_index": 50})
    return out


class Reference(Seq2SeqReference):
    """The reference. Its prompt is the beginning of the decoder's sequence, after the placeholders."""

    decoder_input_ids = (START, DE, TRANSCRIBE, NO_TIMES, 77, 300, 30)

    def __init__(self, path):
        super().__init__(WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32), None)
        self.extract = WhisperFeatureExtractor.from_pretrained(path)
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def inputs(self, items):
        (clip,) = [item["audio"] for item in items if "audio" in item]
        return {"input_features": self.extract(clip, sampling_rate=16_000, return_tensors="pt").input_features}

    def text(self, items):
        return "".join(item.get("text", "") for item in items)

    def settings(self, items):
        """Return the arguments of `generate` for the text of a prompt."""
        text, found = self.text(items), {}
        for name, tokens in (("language", ("<|en|>", "<|de|>")), ("task", ("<|translate|>",))):
            for token in tokens:
                if token in text:
                    text = text.replace(token, "")
                    found[name] = token if name == "language" else token.strip("<|>")
        if text:
            found["prompt_ids"] = torch.tensor([PREVIOUS, *self.tokenizer(text, add_special_tokens=False)["input_ids"]])
        return found

    @torch.inference_mode()
    def beginning(self, items):
        config, settings = self.model.generation_config, self.settings(items)
        before = settings.pop("prompt_ids", torch.tensor([], dtype=torch.int64)).tolist()
        config = type(config)(**{**config.to_dict(), **settings})
        features = self.inputs(items)["input_features"]
        first = self.model._retrieve_init_tokens(features, 1, config, self.model.config, 2 * FEATURES, {})
        return [*before, *first[0].tolist()]

    @torch.inference_mode()
    def generate(self, items, count, **settings):
        out = self.model.generate(
            **self.inputs(items), **self.settings(items), max_new_tokens=count, do_sample=False, num_beams=1, **settings
        )
        return out[0, :count].tolist()  # `generate` may decode the speech after an unfinished segment again


class TestWhisper(Seq2SeqContract):
    name = "whisper"
    reference_class = Reference
    unspelled = True
    decoder_input_ids = Reference.decoder_input_ids
    prompts: ClassVar = {
        "a clip": [{"audio": tone(0.53)}],
        "a language": [{"text": "<|de|>"}, {"audio": tone(0.21, hertz=900)}],
        "a task": [{"audio": tone(1.3)}, {"text": "<|en|><|translate|>"}],
        "the text before": [{"audio": tone(0.011)}, {"text": "<|en|> A square, perhaps."}],
        "the whole window": [{"audio": tone(WINDOW_S)}],
    }

    @staticmethod
    def item(seed):
        return {"audio": tone(0.4, hertz=300 + 300 * seed)}

    @classmethod
    def write_checkpoint(cls, out):
        tokenizer = save_tokenizer(out, TOKENS, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            "<|startoftranscript|> <|notimestamps|> $A <|endoftext|>",
            special_tokens=[(TOKENS[index], index) for index in (START, NO_TIMES, EOT)],
        )
        tokenizer.save_pretrained(out)
        WhisperFeatureExtractor(feature_size=BINS, chunk_length=WINDOW_S).save_pretrained(out)
        torch.manual_seed(0)
        config = WhisperConfig(
            vocab_size=400,
            num_mel_bins=BINS,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=FEATURES,
            max_target_positions=TARGET,
            decoder_start_token_id=START,
            bos_token_id=EOT,
            pad_token_id=EOT,
            eos_token_id=EOT,
            init_std=0.2,
        )
        WhisperForConditionalGeneration(config).save_pretrained(out)
        save_json(out, generation_config=GENERATION)

    def test_ids_and_arrays_equal_the_references(self, reference, model, tokenized):
        """The prompt has a placeholder for each position of the encoder. A language that is detected is missing."""
        for name, items in self.prompts.items():
            ids = tokenized[name]
            (item,) = model.read(ids.numpy())
            assert item.slots.tolist() == list(range(FEATURES))
            expected = [*reference.beginning(items)]
            detected = "language" not in reference.settings(items)
            assert ids[FEATURES:].tolist() == [index for index in expected if not (detected and index in (EN, DE))]
            spectrogram, padded = item.view["input_features"], reference.inputs(items)["input_features"][0].numpy()
            assert np.abs(spectrogram - padded[:, : spectrogram.shape[1]]).max() <= 1e-6
            assert np.abs(spectrogram[:, -1:] - padded[:, spectrogram.shape[1] :]).max(initial=0) <= 1e-6

    def test_truncation_keeps_the_opening_and_no_part_of_a_removed_item(self):
        """Skip this test: the decoder's first tokens, which follow the clip, are control tokens."""
        pytest.skip("a prompt without its clip is refused")

    def test_a_clip_longer_than_the_window_is_refused(self, tokenizer, path_file):
        with pytest.raises(LimitExceeded, match=r"lasts 2\.7 s; the limit of this model is 2 s\. Cut the clip"):
            tokenizer.tokenize([{"audio": tone(2.7)}], path_file)

    def test_a_prompt_needs_one_clip(self, model, tokenizer, path_file):
        with pytest.raises(InputError, match="2 items of kind audio; the model's limit is 1"):
            tokenizer.tokenize([{"audio": tone(0.6)}] * 2, path_file)
        _, errors = run(self.engine(model), [tokenizer.tokenize([{"text": "Hi"}])], max_tokens=2)
        assert "the prompt has 0 audio clips; this model needs one clip" in errors[0].message

    def test_a_second_language_is_refused(self, tokenizer, path_file):
        with pytest.raises(InputError, match="the text has 2 language tokens"):
            tokenizer.tokenize([{"audio": tone(0.6)}, {"text": "<|en|><|de|>"}], path_file)

    def test_a_message_of_a_chat_is_the_text_before_the_clip(self, tokenizer, path_file):
        for text, first in (("A square", [PREVIOUS]), ("", [START]), ("<|de|> A square", [PREVIOUS])):
            parts = [{"type": "audio", "audio": tone(0.3)}, {"type": "text", "text": text}]
            ids = tokenizer.tokenize_chat([{"role": "user", "content": parts}], path_file)[FEATURES:]
            assert ids[:1].tolist() == first
            plain = tokenizer.tokenize(
                [{"audio": tone(0.3)}, {"text": text.replace("A", " A", text == "A square")}], path_file
            )
            assert ids.tolist() == plain[FEATURES:].tolist()

    def test_the_end_of_a_long_text_is_kept(self, reference, tokenizer, path_file):
        text = " ".join(f"word {number}" for number in range(40))
        ids = tokenizer.tokenize([{"audio": tone(0.3)}, {"text": f"<|de|>{text}"}], path_file)[FEATURES:]
        every = reference.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(every) > TARGET // 2
        assert ids.tolist() == [PREVIOUS, *every[-(TARGET // 2 - 1) :], START, DE, TRANSCRIBE, NO_TIMES]

    def test_answers_fill_the_decoders_positions(self, model, tokenized):
        ids = tokenized["a language"]
        assert self.engine(model).ready.max_output_len == TARGET - 1
        outputs, errors = run(self.engine(model), [ids], max_tokens=TARGET, ignore_eos=True)
        assert errors[0].name == "ContextLengthExceeded"
        outputs, errors = run(self.engine(model), [ids], ignore_eos=True)
        assert not errors
        assert len(outputs[0]) == TARGET - 5

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ({"language": "german", "forced_decoder_ids": None}, [START, DE, TRANSCRIBE, NO_TIMES]),
            ({"language": "<|en|>", "task": "translate"}, [START, EN, TRANSLATE, NO_TIMES]),
            ({"forced_decoder_ids": [[1, DE], [2, TRANSLATE]]}, [START, DE, TRANSLATE, NO_TIMES]),
            ({"lang_to_id": None, "task_to_id": None, "forced_decoder_ids": None}, [START, NO_TIMES]),
        ],
        ids=str,
    )
    def test_the_generation_config_sets_language_and_task(self, change, expected, path, tmp_path, path_file):
        other = changed(path, tmp_path / "other", "generation_config", change)
        with Tokenizer.from_pretrained(other) as tokenizer:
            assert tokenizer.tokenize([{"audio": tone(0.3)}], path_file)[FEATURES:].tolist() == expected

    test_a_window_that_does_not_fit_the_encoder_is_refused = refusals(
        [("preprocessor_config", {"chunk_length": 3}, "max_source_positions is 100; clips of 300 frames need 150")]
    )

    def test_an_unknown_language_is_refused(self, path, tmp_path):
        other = changed(path, tmp_path / "other", "generation_config", {"language": "klingon"})
        self.assert_refused(other, "language is 'klingon'")
        load_model(path, device="cpu")

    def test_a_context_without_room_for_a_clip_is_logged(self, model, processor, caplog):
        if model.spec.device.type != "cpu":
            pytest.skip("other devices run the step")
        WorstCase(model, processor, CPU(), EngineConfig(max_model_len=FEATURES - 1)).step(("audio",))
        assert f"no audio fits in {FEATURES - 1} tokens" in caplog.text
        caplog.clear()
        WorstCase(model, processor, CPU(), EngineConfig(max_model_len=FEATURES)).step(("audio",))
        assert not caplog.messages


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    return write_timed_checkpoint(tmp_path_factory.mktemp("timed"))


@pytest.mark.parametrize("hertz", [300, 900, 1500])
def test_time_stamps_are_the_references(timed, tmp_path, hertz):
    model = WhisperForConditionalGeneration.from_pretrained(timed, dtype=torch.float32)
    clip, own = tone(1.3, hertz=hertz), load_model(timed, device="cpu")
    features = WhisperFeatureExtractor.from_pretrained(timed)(clip, sampling_rate=16_000, return_tensors="pt")
    # Otherwise, `generate` decodes the speech after an unfinished segment again.
    settings = {"force_unique_generate_call": True, "do_sample": False, "num_beams": 1, "max_new_tokens": 30}
    expected = model.generate(**features, **settings, language="<|en|>", return_timestamps=True)[0].tolist()
    with Tokenizer.from_pretrained(timed) as tokenizer:
        ids = tokenizer.tokenize([{"audio": clip}, {"text": "<|en|><|0.00|>"}], tmp_path / "shm.txt")
        outputs, errors = run(Seq2SeqEngine(own, EngineConfig()), [ids], max_tokens=30)
    assert not errors
    assert outputs[0] == expected[3:]  # after the start, the language and the task
