"""Tests for work that a device records and replays. They are skipped on devices that cannot record."""

import pytest
import torch

from mindie_mm.device import kind_of, open_device


@pytest.fixture
def kind(device):
    kind = kind_of(open_device(device).torch_device)
    if not kind.records:
        pytest.skip(f"{kind.name} records no work")
    return kind


def test_a_recording_reads_its_inputs_at_launch(kind):
    numbers = torch.zeros(4, device=kind().torch_device)
    result = torch.zeros(4, device=numbers.device)
    launch = kind.record(lambda: result.copy_(numbers * 2 + 1))
    for start in range(3):
        numbers.copy_(torch.arange(start, start + 4))
        launch([])
        assert result.tolist() == [2 * n + 1 for n in range(start, start + 4)]


def test_recording_work_that_waits_is_refused_and_does_not_affect_later_work(kind):
    numbers = torch.ones(4, device=kind().torch_device)
    with pytest.raises(RuntimeError):
        kind.record(lambda: numbers * float(numbers.sum()))
    assert numbers.add(1).tolist() == [2.0] * 4
    launch = kind.record(lambda: numbers.add_(1))
    before = numbers.tolist()
    launch([])
    assert numbers.tolist() == [number + 1 for number in before]
