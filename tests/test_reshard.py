"""Which parameters stay unsharded from forward to backward, on plain records."""

from __future__ import annotations

from fsdp_compiled.passes.reshard import Candidate, decide_kept


def test_the_largest_gather_time_per_byte_first():
    candidates = [Candidate("big", 1000, 20.0), Candidate("small", 10, 10.0), Candidate("slow", 500, 100.0)]
    assert decide_kept(candidates, 0) == set()
    assert decide_kept(candidates, 10) == {"small"}
    assert decide_kept(candidates, 509) == {"small"}
    assert decide_kept(candidates, 510) == {"small", "slow"}
    assert decide_kept(candidates, 10**6) == {"big", "small", "slow"}


def test_what_does_not_fit_is_passed_over():
    assert decide_kept([Candidate("slow", 500, 100.0), Candidate("next", 100, 10.0)], 200) == {"next"}
