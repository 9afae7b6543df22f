"""Contract of every encoder-decoder, whose prompt and answer are separate sequences."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from mindie_mm.device import open_device
from mindie_mm.engine.cache.kv_cache_size import useful_bytes
from mindie_mm.engine.process.largest_step import WorstCase
from mindie_mm.engine.process.memory_profile import Memory
from mindie_mm.engine.requests.default_sampling import defaults_of
from mindie_mm.engine.requests.engine_messages import Abort, Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.engine.seq2seq import Seq2SeqEngine
from mindie_mm.errors import DeviceError
from mindie_mm.models import family_named, load_model
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import release
from tests.models.contract import FamilyContract, noise, run
from tests.models.references import Items, Reference


class Seq2SeqReference(Reference):
    """Reference of an encoder-decoder. Override `part` if the whole model does not accept prompts without media."""

    decoder_input_ids: ClassVar[Sequence[int]]
    """Decoder ids whose logits are compared: the start token, and possibly further tokens."""

    def part(self, items: Items) -> Any:
        """Return the part of the model that generates the answer."""
        return self.model

    @torch.inference_mode()
    def answer_logits(self, items: Items, decoder_input_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of the decoder ids, float32 [n, vocabulary]."""
        ids = torch.tensor([[*decoder_input_ids]])
        return self.part(items)(**self.inputs(items), decoder_input_ids=ids).logits[0].float()

    def logits(self, items: Items) -> torch.Tensor:
        return self.answer_logits(items, self.decoder_input_ids)

    def beginning(self, items: Items) -> Sequence[int]:
        """Return the ids with which the decoder begins. By default, they are the start token."""
        return self.decoder_input_ids[:1]

    @torch.inference_mode()
    def generate(self, items: Items, count: int, **settings: Any) -> list[int]:
        out = self.part(items).generate(
            **self.inputs(items), max_new_tokens=count, do_sample=False, num_beams=1, length_penalty=None, **settings
        )
        return out[0, 1:].tolist()


class Seq2SeqContract(FamilyContract):
    """Tests that every encoder-decoder must pass. Subclasses are called Test<Family> and use a Seq2SeqReference."""

    def engine(self, model: Any, **settings: Any) -> Seq2SeqEngine:
        return Seq2SeqEngine(model, EngineConfig(**settings))

    @staticmethod
    def item(seed: int) -> dict[str, Any]:
        """Return a media item. Items of different seeds are different."""
        return {"image": noise(40, 40, seed)}

    def logits(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        return model.logits(ids, torch.tensor([*self.decoder_input_ids])).cpu()

    def test_logits_of_a_flat_batch_equal_the_references_in_any_order(self, reference, model, tokenized):
        for names in ([*self.prompts], [*self.prompts][::-1]):
            engine = self.engine(model)
            params = SamplingParams(temperature=0, max_tokens=self.num_tokens, logprobs=0)
            for name in names:
                assert engine.add(Add(name, tokenized[name].numpy().tobytes(), params)) is None
            found: dict[str, list[Any]] = {name: [] for name in names}
            while engine.has_work():
                for progress in engine.step().progress:
                    found[progress.request_id] += progress.logprobs or ()
            for name, drawn in found.items():
                tokens = [one.token_id for one in drawn]
                start = reference.beginning(self.prompts[name])
                expected = reference.answer_logits(self.prompts[name], [*start, *tokens[:-1]]).log_softmax(-1)
                chosen = expected[len(start) - 1 :].gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
                assert (torch.tensor([one.logprob for one in drawn]) - chosen).abs().max() <= self.tolerance, name

    def test_recorded_decode_steps_generate_the_same_tokens(self, recorded):
        """Skip this test: the caches of keys and values grow by concatenation, so no step can be recorded."""
        pytest.skip("an encoder-decoder has no paged cache")

    def test_preempted_sequences_generate_the_same_tokens(self, reference, model, tokenized):
        """An encoder-decoder does not preempt. If the cache has room for only one request, the other requests wait."""
        longest = max(len(ids) for ids in tokenized.values())
        room = longest * model.prompt_token_bytes + self.num_tokens * model.spec.kv_token_bytes
        engine = self.engine(model, kv_cache_bytes=room, encoder_cache_bytes=1000)
        outputs, errors = run(engine, [*tokenized.values()], max_tokens=self.num_tokens)
        assert not errors
        for i, items in enumerate(self.prompts.values()):
            assert outputs[i] == reference.generate(items, self.num_tokens)
        assert engine.stats.kv_cache_usage == 0
        params = SamplingParams(temperature=0, max_tokens=self.num_tokens)
        for i, ids in enumerate(tokenized.values()):
            engine.add(Add(str(i), ids.numpy().tobytes(), params))
        assert engine.step().stats.num_running == 1
        assert engine.stats.kv_cache_usage <= 1
        for i in range(len(tokenized)):
            engine.abort(Abort(str(i)))
        _, errors = run(engine, [*tokenized.values()], max_tokens=10 * self.num_tokens)
        assert {error.name for error in errors.values()} == {"ContextLengthExceeded"}

    @pytest.mark.representative
    def test_a_continued_answer_equals_an_undisturbed_answer(self, model, tokenized):
        for name, ids in tokenized.items():
            for seed in (None, 3):
                params = SamplingParams(temperature=0 if seed is None else 1, seed=seed, max_tokens=self.num_tokens)

                def tokens(drawn_ids, ids=ids, params=params):
                    engine = self.engine(model)
                    assert engine.add(Add("a", ids.numpy().tobytes(), params, drawn_ids=drawn_ids)) is None
                    return [
                        token
                        for _ in iter(engine.has_work, False)
                        for progress in engine.step().progress
                        for token in progress.token_ids
                    ]

                whole = tokens([])
                for count in range(1, len(whole)):
                    assert tokens(whole[:count]) == whole[count:], name

    def test_blocks_may_be_freed_once_the_prompts_are_encoded(self, reference, model, tokenizer, path_file):
        tokenized = {name: self.tokenize(tokenizer, name, items, path_file) for name, items in self.prompts.items()}
        engine = self.engine(model, encoder_cache_bytes=0)
        params = SamplingParams(temperature=0, max_tokens=self.num_tokens)
        for name, ids in tokenized.items():
            assert engine.add(Add(name, ids.numpy().tobytes(), params)) is None
        waiting = {name for name, ids in tokenized.items() if (ids < 0).any()}
        outputs: dict[str, list[int]] = {name: [] for name in tokenized}
        while engine.has_work():
            for progress in engine.step().progress:
                assert progress.error is None
                outputs[progress.request_id] += progress.token_ids
                if progress.media_consumed:
                    waiting.remove(progress.request_id)
            if not waiting:
                release(path_file)
        assert outputs == {name: reference.generate(items, self.num_tokens) for name, items in self.prompts.items()}

    @pytest.mark.representative
    def test_a_default_repetition_penalty_is_applied_as_in_transformers(self, path, reference, tokenized, tmp_path):
        other, count = tmp_path / "other", 2 * self.num_tokens
        shutil.copytree(path, other)
        file = other / "generation_config.json"
        stated = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(stated | {"repetition_penalty": 1.8}))
        self.change_text_config(other, repetition_penalty=1.8)
        penalty = defaults_of(other, None, "auto").repetition_penalty
        assert penalty == 1.8
        engine = self.engine(load_model(other, device="cpu", dtype="float32"))
        outputs, errors = run(engine, [*tokenized.values()], max_tokens=count, repetition_penalty=penalty)
        assert not errors
        plain, _ = run(engine, [*tokenized.values()], max_tokens=count)
        assert outputs != plain
        for i, items in enumerate(self.prompts.values()):
            assert outputs[i] == reference.generate(items, count, repetition_penalty=penalty), items

    def change_text_config(self, path: Path, **changes: Any) -> None:
        """Change generation settings in config.json.

        Only layouts that store these settings there override this method.
        """

    @pytest.mark.representative
    def test_lengths_beyond_the_cache_are_refused_if_requested_and_lowered_otherwise(self, model, caplog):
        caplog.set_level("INFO")
        each, own = model.prompt_token_bytes + model.spec.kv_token_bytes, model.spec.max_model_len
        with pytest.raises(DeviceError, match=f"a context of 10 tokens needs {10 * each} bytes .* enough for 9 tokens"):
            self.engine(model, kv_cache_bytes=10 * each - 1, max_model_len=10, max_num_seqs=2)
        ready = self.engine(model, kv_cache_bytes=10 * each, max_model_len=10).ready
        assert (ready.max_model_len, ready.max_output_len) == (10, 10)
        assert "holds 10 tokens in" in caplog.text
        assert "WARNING" not in caplog.text
        ready = self.engine(model, kv_cache_bytes=2 * each).ready
        assert (
            f"a context of {own} tokens needs {own * each} bytes of KV cache; the cache has {2 * each}" in caplog.text
        )
        # A smaller limit on one of the two lengths leaves room for a larger limit on the other.
        assert ready.max_model_len == 2 + model.spec.kv_token_bytes // model.prompt_token_bytes
        assert ready.max_output_len == 2 + model.prompt_token_bytes // model.spec.kv_token_bytes
        with pytest.raises(DeviceError, match="enough for 0 tokens"):
            self.engine(model, kv_cache_bytes=each - 1)

    def test_finished_and_aborted_requests_free_their_cache(self, model, tokenized):
        engine = self.engine(model, max_num_seqs=2)
        for i, ids in enumerate(tokenized.values()):
            params = SamplingParams(temperature=0, max_tokens=30 if i else 1, ignore_eos=True)
            engine.add(Add(str(i), ids.numpy().tobytes(), params))
        engine.step()
        assert engine.stats.num_running == 1, "the first one has its token"
        engine.step()
        stats = engine.step().stats
        assert stats.num_running == 2
        assert stats.kv_cache_usage > 0
        assert stats.num_waiting == len(tokenized) - 3
        for i in range(len(tokenized)):
            engine.abort(Abort(str(i)))
        assert not engine.has_work()
        assert engine.stats.kv_cache_usage == 0
        assert not engine._decodings

    @pytest.mark.representative
    def test_the_cache_size_is_measured(self, model, device, processor):
        config, opened = EngineConfig(max_num_seqs=2), open_device(device)
        step = WorstCase(model, processor, opened, config).step(family_named(self.name).kinds)
        memory = Memory(model, step, opened)
        assert memory.kv_cache_bytes(config) == useful_bytes(model, config), "a small model's sequences all fit"
        with pytest.raises(DeviceError, match="does not fit"):
            memory.kv_cache_bytes(EngineConfig(kv_cache_bytes=2**60, max_num_seqs=10**9))

    def test_a_lost_block_fails_its_own_request_alone(self, model, tokenizer, path_file, tmp_path):
        """Only the request whose item is lost fails. A repeated item is not encoded again."""
        engine = self.engine(model)
        params = SamplingParams(temperature=0, max_tokens=2)
        prompts = {
            name: tokenizer.tokenize([self.item(seed), {"text": "?"}], file)
            for name, seed, file in (
                ("kept", 0, path_file),
                ("lost", 1, tmp_path / "lost"),
            )
        }
        for name, ids in prompts.items():
            assert engine.add(Add(name, ids.numpy().tobytes(), params)) is None
        release(tmp_path / "lost")
        errors = {progress.request_id: progress.error for progress in engine.step().progress}
        assert errors["lost"].name == "StaleReference"
        assert errors["kept"] is None
        assert engine.add(Add("same", prompts["kept"].numpy().tobytes(), params)) is None
        assert engine.stats.encoder_cache_hits == 1
        while engine.has_work():
            engine.step()
        assert engine.stats.kv_cache_usage == 0

    def test_a_request_that_fails_in_the_decoder_fails_alone(self, model, tokenized):
        """Only the request whose cache is damaged fails. The other request generates the same tokens as on its own."""
        engine, params = self.engine(model), SamplingParams(temperature=0, max_tokens=4)
        prompt = next(iter(tokenized.values()))
        ids = prompt.numpy().tobytes()
        outputs, errors = {"spoilt": [], "audio": []}, {}
        for name in outputs:
            engine.add(Add(name, ids, params))
        while engine.has_work():
            for progress in engine.step().progress:
                outputs[progress.request_id] += progress.token_ids
                errors[progress.request_id] = progress.error
            for sequence, decoding in engine._decodings.items():
                if sequence.request_id == "spoilt":
                    decoding.cache.self_attention_cache.layers[0].keys = None
        assert errors["spoilt"].name == "DeviceError"
        assert errors["audio"] is None
        alone, _ = run(self.engine(model), [prompt], max_tokens=4)
        assert outputs["audio"] == alone[0]

    def test_prompt_logprobs_are_refused(self, model, tokenized):
        _, errors = run(self.engine(model), [next(iter(tokenized.values()))], max_tokens=2, prompt_logprobs=0)
        (error,) = errors.values()
        assert error.name == "InputError"
        assert "encoder-decoder" in error.message
