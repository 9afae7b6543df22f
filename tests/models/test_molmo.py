"""Tests for Molmo against results of the original implementation in tests/golden/molmo."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.errors import InputError
from mindie_mm.inputs import Embeddings, Media
from mindie_mm.models import load_model
from mindie_mm.models.molmo import Canvas, paddings
from mindie_mm.nn.splice import plain_ids
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm import request_directory
from mindie_mm.tokenize import Tokenizer
from tests.models.contract import FamilyContract, run
from tests.models.golden import GOLDEN, GoldenReference, cases, drawn_weights, write_checkpoint
from tests.models.small_checkpoints import changed

FOLDER, OTHER_STYLE = GOLDEN / "molmo" / "d", GOLDEN / "molmo" / "o"
PATCH_ID = 642
HEAD = "model.transformer.ff_out.weight"


def items_of(about, images):
    return [{"text": about["text"]}, *({"image": np.asarray(Image.open(image))} for image in images)]


ALL = cases(FOLDER, items_of)
TWO = ALL["two"]  # the original writes the features of both images to the positions of the first image
CASES = {name: case for name, case in ALL.items() if case is not TWO}


class Reference(GoldenReference):
    def text(self, items):
        return "".join(item.get("text", "") for item in items)


class TestMolmo(FamilyContract):
    name = "molmo"
    prompts: ClassVar = {name: case.items for name, case in CASES.items()}
    tolerance = 5e-4  # the original resizes with TensorFlow
    bf16_tolerance = 0.4  # 0.34 was measured, 0.026 on average, because these weights are larger than trained ones
    unspelled = True

    @classmethod
    def write_checkpoint(cls, out):
        write_checkpoint(FOLDER, out, drawn_weights(FOLDER))

    @classmethod
    def make_reference(cls, path):
        return Reference(CASES, load_file(path / "model.safetensors")[HEAD], PATCH_ID)

    def assert_arrays(self, expected, items, model):
        arrays, found = expected["case"].arrays, model.processor.media_inputs([items], model.spec.device)
        assert np.abs(found["images"][0][:, 5::48].cpu().numpy() - arrays["pixels"]).max() <= 3e-4
        masks = found["image_masks"][0]
        assert np.array_equal(torch.where(masks == 0, 1, torch.where(masks < 1, 2, 0)), arrays["padding"])
        assert np.array_equal(paddings(items[0]), arrays["padding"])
        assert np.array_equal(found["image_input_idx"][0], arrays["image_input_idx"])

    @pytest.mark.parametrize("name", ["text", "tiny", "flat"])
    def test_logits_are_nearer_for_images_that_both_libraries_resize_alike(self, name, reference, model, tokenized):
        assert (self.logits(model, tokenized[name]) - reference.logits(CASES[name].items)).abs().max() <= 2e-4

    @pytest.mark.parametrize("name", ["wide", "text"])
    def test_the_other_style_of_preprocessing_is_served(self, name, tmp_path):
        weights = drawn_weights(OTHER_STYLE)
        write_checkpoint(OTHER_STYLE, tmp_path, weights)
        case = cases(OTHER_STYLE, items_of)[name]
        model = load_model(tmp_path, device="cpu", dtype="float32")
        with Tokenizer.from_pretrained(tmp_path) as tokenizer, request_directory(tmp_path) as directory:
            ids = tokenizer.tokenize(case.items, directory.path_file)
            items = model.read(ids.numpy())
            assert np.array_equal(plain_ids(ids.numpy(), items), case.input_ids)
            assert (self.logits(model, ids) - case.hidden @ weights[HEAD].T).abs().max() <= self.tolerance
            outputs, _ = run(Engine(model, EngineConfig()), [ids], max_tokens=8, ignore_eos=True)
            assert outputs == {0: case.about["generated"]}

    def test_two_images_have_their_features_at_their_own_slots(self, model, tokenizer, path_file):
        text, first, second = TWO.items
        ids = tokenizer.tokenize([first, text, second], path_file)
        items = model.read(ids.numpy())
        alone = [
            model.encode(model.read(tokenizer.tokenize([image], path_file).numpy()))[0] for image in (first, second)
        ]
        plain = torch.from_numpy(plain_ids(ids.numpy(), items))
        assert plain.tolist() == TWO.input_ids.tolist()
        hidden = model.embed(plain.to(model.spec.device))
        for item, features in zip(items, alone, strict=True):
            hidden[item.slots] += features
        given = [{"image": Embeddings(f.cpu().numpy(), item.shape.grid)} for f, item in zip(alone, items, strict=True)]
        logits = model.logits(tokenizer.tokenize([text, *given], path_file))
        assert (model.logits(ids) - logits).abs().max() <= 1e-4
        slots = np.concatenate([item.slots for item in items])
        assert np.array_equal(np.flatnonzero(plain == items[0].shape.token), slots)

    def test_the_originals_slots_of_a_second_image_can_be_selected(self, path, tokenizer, path_file, tmp_path):
        """The features of the second image are placed over the features of the first, as in the original."""
        other = changed(path, tmp_path / "other", "config", {"overwrite_earlier_images": True})
        model = load_model(other, device="cpu", dtype="float32")
        ids = tokenizer.tokenize(TWO.items, path_file)
        assert np.array_equal(plain_ids(ids.numpy(), model.read(ids.numpy())), TWO.input_ids)
        expected = TWO.hidden @ load_file(path / "model.safetensors")[HEAD].T
        assert (self.logits(model, ids) - expected).abs().max() <= self.tolerance
        for budget in (1000, 100):
            engine = Engine(model, EngineConfig(max_num_batched_tokens=budget))
            outputs, _ = run(engine, [ids], max_tokens=8, ignore_eos=True)
            assert outputs == {0: TWO.about["generated"]}

    def test_image_tokens_allow_a_repetition_penalty_and_prompt_logprobs(self, model, tokenized):
        """The ids of image tokens are not part of the vocabulary, so image tokens have no logits."""
        ids = tokenized["tiny"].numpy()
        engine = Engine(model, EngineConfig())
        params = SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.3, prompt_logprobs=1)
        found = [engine.add(Add("0", ids.tobytes(), params))]
        while engine.has_work():
            found += engine.step().progress
        assert not any(progress.error for progress in found if progress)
        (prompt,) = (progress.prompt_logprobs for progress in found if progress and progress.prompt_logprobs)
        logprobs = [position.logprob for position in prompt]
        plain = plain_ids(ids, model.read(ids))[1:]
        assert np.array_equal(np.isneginf(logprobs), plain >= model.spec.vocab_size)

    def test_chat_is_formatted_as_in_the_original(self, tokenizer, path_file):
        text, image = CASES["tiny"].items
        question = text["text"].removeprefix(" User: ").removesuffix(" Assistant:")
        content = [{"type": "text", "text": question}, {"type": "image", "image": image["image"]}]
        ids = tokenizer.tokenize_chat([{"role": "user", "content": content}], path_file)
        expected = tokenizer.tokenize([image, text], path_file)
        assert ids[ids >= 0].tolist() == expected[expected >= 0].tolist()

    def test_tokenizers_refuse_unsupported_settings_too(self, path, tmp_path):
        other = changed(path, tmp_path / "other", "config", {"layer_norm_type": "low_precision"})
        self.assert_refused(other, "layer_norm_type is 'low_precision'")

    def test_other_geometries_are_refused_by_name(self, path, tmp_path):
        other = changed(path, tmp_path / "other", "preprocessor_config", {"overlap_margins": [2, 2]})
        self.assert_refused(other, r"overlap_margins is \[2, 2\]")

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda w: w.pop("model.transformer.blocks.1.ff_out.weight"), "blocks.1.ff_out.weight"),
            (lambda w: w.update({"model.extra": torch.zeros(2)}), "model.extra"),
            (
                lambda w: w.update({"model.vision_backbone.pad_embed": torch.zeros(3, 3)}),
                r"pad_embed, .* shape \[3, 3\]",
            ),
        ],
        ids=["missing", "unexpected", "misshapen"],
    )
    def test_weights_that_do_not_fit_are_refused_by_name(self, change, named, path, tmp_path):
        self.assert_weights_refused(path, tmp_path, change, named)

    def test_embeddings_of_another_grid_are_refused(self, tokenizer, path_file):
        with pytest.raises(InputError, match=r"grid \(2, 2\)"):
            tokenizer.tokenize([{"image": Embeddings(np.zeros((288, 128), np.float32), (2, 2))}], path_file)

    @pytest.mark.parametrize("size", [(1, 5000), (112, 112), (111, 3000), (2, 2)], ids=str)
    def test_images_of_any_shape_are_accepted(self, size, processor):
        data = np.full((*size, 3), 255, np.uint8)
        plan, write = processor.plan(Media("image", data), data, {"image": 1})
        arrays = {name: np.empty(spec.shape, spec.dtype) for name, spec in plan.specs.items()}
        write(arrays)
        assert all(np.abs(array - 1).max() < 1e-5 for array in arrays.values())

    def test_an_image_is_centred_on_its_canvas(self):
        canvas = Canvas.fitting(100, 200, 336, 336)
        assert (canvas.rows, canvas.columns, canvas.top, canvas.left) == (168, 336, 84, 0)
        drawn = canvas.draw(torch.ones(canvas.rows, canvas.columns, 3))
        assert drawn.shape == (336, 336, 3)
        assert drawn.sum(dim=(1, 2)).nonzero().flatten().tolist() == [*range(84, 252)]

    @pytest.mark.parametrize(("height", "rows"), [(56, 112), (200, 56)])
    def test_an_image_one_pixel_wide_is_resized_as_one_that_is_one_pixel_high(self, height, rows):
        rgb = np.random.default_rng(height).integers(0, 256, (height, 8, 3), np.uint8)
        narrow, low = np.empty((rows, 1, 3), np.float32), np.empty((1, rows, 3), np.float32)
        Canvas(rows, rows, rows, 1).resize(rgb, narrow)
        Canvas(rows, rows, 1, rows).resize(np.ascontiguousarray(rgb.transpose(1, 0, 2)), low)
        np.testing.assert_allclose(narrow, low.transpose(1, 0, 2), atol=1e-5)
