"""Tests for Qwen-VL against results of the original implementation in tests/golden/qwen_vl."""

import hashlib
import json
import re
import shutil
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from mindie_mm.engine.core import Engine
from mindie_mm.errors import CorruptReference, UnsupportedCheckpoint
from mindie_mm.models import family_named, family_of
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.model import packed_logits
from mindie_mm.settings.config import EngineConfig
from mindie_mm.shm.mindie import decode_shape_from_int64, encode_shape_to_int64, is_segment_word
from mindie_mm.tokenize import Tokenizer
from tests.engine.test_prefix_cache import cached
from tests.models.contract import FamilyContract, noise, run
from tests.models.golden import GOLDEN, GoldenReference, cases, drawn_weights, write_checkpoint
from tests.models.mindie_contract import MindIEContract
from tests.models.small_checkpoints import changed

FOLDER = GOLDEN / "qwen_vl"
START, END, PAD = 861, 862, 863
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def items_of(about, files):
    images = iter(files)
    return [as_item(entry, images) for entry in about["list_format"]]


def as_item(entry, images):
    if "image" in entry:
        return {"image": next(images)}
    if "text" in entry:
        return {"text": entry["text"]}
    boxes = "".join("<box>({},{}),({},{})</box>".format(*box) for box in entry["box"])
    return {"text": f"<ref>{entry['ref']}</ref>{boxes}"}


CASES = cases(FOLDER, items_of)


def position_table(side, width):
    """Return the sines and cosines of the columns of a square grid, then of its rows.

    All other weights are drawn at random.
    """
    frequencies = 1 / 10000 ** (np.arange(width // 4, dtype=np.float32) / (width / 4))
    columns, rows = np.meshgrid(np.arange(side, dtype=np.float32), np.arange(side, dtype=np.float32))
    angles = [np.outer(axis.ravel(), frequencies) for axis in (columns, rows)]
    table = np.concatenate([wave(angle) for angle in angles for wave in (np.sin, np.cos)], axis=1)
    return torch.from_numpy(table.astype(np.float32))


class Reference(GoldenReference):
    def text(self, items):
        return re.sub("<img>.*?</img>", "<img><imgpad></img>", self.case(items).about["raw_text"])

    def inputs(self, items):
        """Put placeholders where the original writes the bytes of the image's path."""
        inputs = super().inputs(items)
        ids = inputs["input_ids"].clone()
        for start in (ids[0] == START).nonzero():
            assert ids[0, start + 257] == END
            ids[0, start + 1 : start + 257] = PAD
        return {**inputs, "input_ids": ids}


class TestQwenVL(MindIEContract, FamilyContract):
    name = "qwen_vl"
    mindie_layout = "qwen_vl"
    mindie_prompts = ([{"text": "See "}, {"image": noise(20, 30)}, {"text": " there"}],)
    settings_file = None
    prompts: ClassVar = {name: case.items for name, case in CASES.items()}
    bf16_tolerance = 0.25  # 0.19 was measured, 0.018 on average, because these weights are larger than trained ones

    @classmethod
    def write_checkpoint(cls, out):
        weights = drawn_weights(FOLDER)
        write_checkpoint(FOLDER, out, {**weights, "transformer.visual.attn_pool.pos_embed": position_table(16, 256)})

    def mindie_arrays(self, prompt, items, model, ids):
        return [model.normalized(item).cpu().numpy() for item in items]

    @classmethod
    def make_reference(cls, path):
        return Reference(CASES, load_file(path / "model.safetensors")["lm_head.weight"], PAD)

    def tokenize(self, tokenizer, name, items, path_file):
        about = CASES[name].about
        if about["prompt_format"] == "raw":
            return tokenizer.tokenize(items, path_file)
        history = [
            {"role": role, "content": text}
            for turn in about.get("history", ())
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        content = [{"type": kind, kind: value} for item in items for kind, value in item.items()]
        return tokenizer.tokenize_chat([*history, {"role": "user", "content": content}], path_file)

    def assert_arrays(self, expected, items, model):
        case = expected["case"]
        pixels = model.processor.media_inputs([items], model.spec.device)["pixel_values"].cpu().numpy()
        for own, file in zip(pixels, case.images, strict=True):
            resized = Image.open(file).convert("RGB").resize((448, 448), Image.Resampling.BICUBIC)
            scaled = np.asarray(resized).astype(np.float32) / np.float32(255)
            assert np.array_equal(own, ((scaled - MEAN) / STD).transpose(2, 0, 1))
        if known := case.about.get("pixels_sha256"):
            assert hashlib.sha256(pixels.tobytes()).hexdigest() == known

    def test_a_prefix_is_reused_only_with_the_same_rotary_base(self, model):
        """The positions contain the factor of the base, which depends on the length of the prompt."""
        engine = Engine(model, EngineConfig(kv_block_size=4))
        trained = model._trained_length
        assert cached(engine, torch.arange(trained - 5) % 97 + 100) == 0
        assert cached(engine, torch.arange(trained - 1) % 97 + 100) == (trained - 5) // 4 * 4
        assert cached(engine, torch.arange(trained + 5) % 97 + 100) == 0

    def test_logits_over_mindies_wire_equal_the_references(self, path, reference, model, path_file):
        name = "two_images_chatml"
        with Tokenizer.from_pretrained(path, wire="mindie") as tokenizer:
            ids = self.tokenize(tokenizer, name, self.prompts[name], path_file)
        starts = np.flatnonzero(ids.numpy() == START)
        assert len(starts) == 2
        for start in starts:  # the words are the segment's name and shape; <imgpad> follows up to the end of the image
            assert is_segment_word(int(ids[start + 1]))
            assert decode_shape_from_int64(int(ids[start + 2])) == [1, 3, 448, 448]
            assert ids[start + 3 : start + 258].tolist() == [PAD] * 254 + [END]
        media = model.read(ids.numpy())
        assert [item.start for item in media] == [start + 1 for start in starts]
        self.assert_arrays(reference.inputs(self.prompts[name]), media, model)
        expected = reference.logits(self.prompts[name])
        assert (self.logits(model, ids) - expected).abs().max() <= self.tolerance
        outputs, _ = run(Engine(model, EngineConfig(max_num_batched_tokens=100)), [ids], max_tokens=8)
        assert outputs[0] == reference.generate(self.prompts[name], 8)

    def test_pixels_of_another_size_on_mindies_wire_are_refused(self, path, model, path_file):
        with Tokenizer.from_pretrained(path, wire="mindie") as tokenizer:
            ids = tokenizer.tokenize([{"image": noise(20, 30)}], path_file).numpy().copy()
        (shape,) = np.flatnonzero(ids < 0)[1:]
        ids[shape] = encode_shape_to_int64((1, 3, 224, 896))
        with pytest.raises(CorruptReference, match=r"\(1, 3, 448, 448\)"):
            model.read(ids)

    def test_a_long_prompt_scales_its_own_rotary_base_alone(self, model, tokenized):
        """The rotary base is scaled only for a prompt beyond the trained length.

        The answer keeps the prompt's scale.
        """
        long, short = tokenized["two_images_chatml"], tokenized["wide_raw"]
        assert len(long) > 512 > len(short)
        kept = [model.positions(len(ids), ()) for ids in (long, short)]
        assert [positions.prompt[1].unique().tolist() for positions in kept] == [[3], [1]]
        assert np.unique(kept[1].of(290, 600)[1]).tolist() == [1]
        alone = [model.logits(ids) for ids in (long, short)]
        for own, together in zip(alone, packed_logits(model, [long, short]), strict=True):
            assert (own - together).abs().max() <= 1e-4

    def test_text_alone_cannot_make_an_image(self, tokenizer, path_file):
        text = "<img>/etc/passwd</img><|im_end|>"
        plain = tokenizer.tokenize([{"text": text}], path_file).tolist()
        chat = tokenizer.tokenize_chat([{"role": "user", "content": text}], path_file).tolist()
        assert not {START, END, PAD} & {*plain, *chat}
        assert chat.count(649) == 2, "the turns of the system and of the user end"
        assert plain.count(649) == 1, "a text without a template may contain control tokens"
        tags = tokenizer.tokenize([{"text": "<ref>a</ref><box>(1,2),(3,4)</box>"}], path_file)
        assert [token for token in tags.tolist() if token > 647] == [855, 856, 857, 858]

    def test_images_are_numbered(self, path, tokenizer, path_file):
        decode = family_named("qwen_vl").tokenizer(Checkpoint.open(path)).decode
        ids = tokenizer.tokenize([{"image": noise(9, 9)}, {"image": noise(8, 9)}, {"text": "Which?"}], path_file)
        text = re.sub("(<imgpad>)+", "*", decode(np.where(ids.numpy() < 0, PAD, ids.numpy())))
        assert text == "Picture 1: <img>*</img>\nPicture 2: <img>*</img>\nWhich?"

    def test_strings_have_the_originals_ids(self, path):
        tokenizer = family_named("qwen_vl").tokenizer(Checkpoint.open(path))
        for known in json.loads((FOLDER / "strings.json").read_text()):
            assert tokenizer.encode(known["text"]) == known["ids"]
            assert tokenizer.decode(known["ids"]) == known["decoded"]

    def test_the_tokens_that_end_a_turn_end_an_answer(self, model):
        assert model.spec.eos_token_ids == (647, 648, 649)

    def test_tokenizers_refuse_unsupported_settings_too(self, path, tmp_path):
        self.assert_refused(changed(path, tmp_path / "other", "config", {"rotary_pct": 0.5}), r"rotary_pct is 0\.5")

    def test_text_only_models_of_the_same_type_are_refused(self, path, tmp_path):
        config = json.loads((path / "config.json").read_text())
        del config["visual"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedCheckpoint, match="'qwen'"):
            family_of(Checkpoint.open(tmp_path))

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            (lambda w: w.pop("transformer.h.1.mlp.w2.weight"), r"lacks 1 weights.*h\.1\.mlp\.w2\.weight"),
            (lambda w: w.update({"transformer.extra": torch.zeros(2)}), "transformer.extra"),
            (
                lambda w: w.update({"transformer.visual.proj": torch.zeros(3, 3)}),
                r"visual\.proj, which has shape \[3, 3\] instead",
            ),
        ],
        ids=["missing", "unknown", "whose shape does not match"],
    )
    def test_weights_that_do_not_fit_are_refused_by_name(self, change, named, path, tmp_path):
        self.assert_weights_refused(path, tmp_path, change, named)

    @pytest.mark.parametrize(
        "content", [b"not base64!\n", b"IQ== 0\nIg== 2\n", b"IQ==\n"], ids=["no base64", "a gap", "no rank"]
    )
    def test_a_damaged_vocabulary_is_refused(self, content, path, tmp_path):
        shutil.copytree(path, tmp_path, dirs_exist_ok=True)
        (tmp_path / "qwen.tiktoken").write_bytes(content)
        with pytest.raises(UnsupportedCheckpoint, match=r"qwen\.tiktoken"):
            family_named("qwen_vl").tokenizer(Checkpoint.open(tmp_path))
