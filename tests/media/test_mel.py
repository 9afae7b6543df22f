"""Tests for log-mel spectrograms against transformers' WhisperFeatureExtractor."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

from mindie_mm.errors import UnsupportedCheckpoint
from mindie_mm.media.audio.encoded_audio import open_audio
from mindie_mm.media.audio.mel import MelSettings, write_log_mel
from tests.audio_samples import speech, tone

RATE = 16_000
LENGTHS = [1, 2, 160, 161, 320, 321, 5000, 70_001, 5 * RATE - 401, 5 * RATE - 1, 5 * RATE, 5 * RATE + 1, 8 * RATE]


def both(samples: np.ndarray, further: int = 2, **settings: int) -> tuple[np.ndarray, np.ndarray]:
    """Return our spectrogram and the reference's, float32 [bins, frames].

    Both contain the frames that the reference's attention mask includes, followed by `further` frames of padding.
    """
    extractor = WhisperFeatureExtractor(**{"chunk_length": 5, **settings})
    expected = extractor(samples, sampling_rate=RATE, return_attention_mask=True, return_tensors="np")
    ours = MelSettings.read(extractor.to_dict(), "test")
    num_frames = ours.num_frames(len(samples))
    assert num_frames == expected["attention_mask"].sum()
    out = np.full((ours.num_bins, min(num_frames + further, ours.max_frames)), np.nan, np.float32)
    write_log_mel(samples, ours, out)
    return out, expected["input_features"][0, :, : out.shape[1]]


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("length", LENGTHS)
def test_spectrograms_equal_the_references(length, bins):
    ours, expected = both(tone(9.0)[:length], feature_size=bins)
    assert np.abs(ours - expected).max() <= 1e-6


def test_a_spectrogram_of_speech_equals_the_reference():
    samples = open_audio(speech()).decode(RATE, 30 * RATE)
    ours, expected = both(samples, chunk_length=30, feature_size=128)
    assert np.abs(ours - expected).max() <= 1e-6


@pytest.mark.parametrize("samples", [np.zeros(4000, np.float32), tone(0.5) * 1000, tone(0.5) * 1e-6])
def test_silence_and_unscaled_samples_equal_the_reference(samples):
    ours, expected = both(samples)
    assert np.abs(ours - expected).max() <= 1e-6


def test_the_loudest_frame_may_follow_the_requested_frames():
    # The window of the loud sample extends beyond the last frame.
    samples = np.concatenate([tone(0.02), np.ones(1, np.float32)])
    for further in (0, 1, 7):
        ours, expected = both(samples, further)
        assert np.abs(ours - expected).max() <= 1e-6


def test_read_only_samples_are_accepted():
    samples = tone(0.3)
    samples.flags.writeable = False
    assert np.isfinite(both(samples)[0]).all()


def test_other_windows_and_hops_equal_the_reference():
    ours, expected = both(tone(1.0), n_fft=512, hop_length=128)
    assert np.abs(ours - expected).max() <= 1e-6


@pytest.mark.parametrize("length", [201, 7999, 8000, 8001, 16_100, 16_159, 95 * RATE + 77])
def test_clips_of_any_length_equal_the_reference_that_does_not_pad(length):
    """A short clip is padded to the minimum length. A long clip is transformed in several pieces."""
    samples = np.resize(tone(9.0), length)
    samples[length // 2 :] *= 30  # the loudest frame is not in the first piece
    extractor = Qwen3ASRFeatureExtractor(feature_size=16)
    expected = extractor(samples, sampling_rate=RATE, padding=True, return_attention_mask=True, return_tensors="np")
    ours = replace(MelSettings.read(extractor.to_dict(), "test"), pads=False, max_samples=100 * RATE)
    out = np.empty((16, ours.num_frames(length)), np.float32)
    write_log_mel(samples, ours, out)
    assert out.shape[1] == expected["attention_mask"].sum()
    assert np.abs(out - expected["input_features"][0, :, : out.shape[1]]).max() <= 1e-6


@pytest.mark.parametrize("option", [{"dither": 0.1}, {"padding_value": 1.0}])
def test_an_unsupported_option_is_refused(option):
    with pytest.raises(UnsupportedCheckpoint, match=next(iter(option))):
        MelSettings.read(option, "test")
