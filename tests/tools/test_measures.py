"""Whether a process grows, on made-up samples and on real ones."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from tests.support.measures import Sample, growing, sample, table


def made_up(*values):
    return [Sample(10 * i, 1000, 5, 2, value, 3, 7) for i, value in enumerate(values)]


def test_only_what_goes_on_rising_grows():
    for flat in ((1, 2) * 3, (5, 5, 9, 9, 9, 9), (9, 9, 9, 9, 1, 1), (1, 4, 2, 5, 3, 6), (1,) * 7):
        assert growing(made_up(*flat), {}) == []
    assert growing(made_up(1, 2, 3, 4, 5, 6), {}) == ["objects grows by 0.10 a step: 1, 2, 3, 4, 5, 6"]
    with pytest.raises(ValueError, match="samples: expected at least 6, got 2; allow more time"):
        growing(made_up(1, 2), {})


def test_a_measure_may_be_allowed_to_grow_a_little():
    rising = [Sample(10 * i, 1000 + 10 * i, 5, 2, 3, 3, 7) for i in range(6)]
    assert growing(rising, {"rss_kib": 1.0}) == []
    assert growing(rising, {"rss_kib": 0.1}) == ["rss_kib grows by 1.00 a step: 1000, 1010, 1020, 1030, 1040, 1050"]


@pytest.mark.usefixtures("nothing_older")
def test_a_kept_tensor_and_an_open_file_are_found():
    kept, files, samples = [], [], []
    for _ in range(3):
        gc.collect()  # what other tests have left, some of which is freed by what is freed
    for step in range(6):
        kept += [torch.zeros(20, 256) for _ in range(200)]  # more than other tests leave to be freed meanwhile
        files += [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
        samples.append(sample(step))
    for file in files:
        os.close(file)
    grown = [sentence.split()[0] for sentence in growing(samples, {"rss_kib": 100.0})]
    assert {"descriptors", "tensors", "tensor_kib"} <= set(grown)
    assert "threads" not in grown


def test_the_table():
    assert table([("eager", made_up(1, 2))]) == (
        "  run  steps       rss_kib  descriptors  threads  objects  tensors  tensor_kib\n"
        "eager     10  1000 .. 1000       5 .. 5   2 .. 2   1 .. 2   3 .. 3      7 .. 7"
    )
