"""The parts of the examples that need no ranks; CI runs the main job itself."""

from __future__ import annotations

import data
import pytest
import torch
from model import PRESETS, Config, Llama
from train import warmup_and_cosine
from view import plot_losses

from fsdp_compiled import fully_shard
from tests.training import TINY


def test_the_standard_library_is_the_default_text():
    corpus = data.load(None, seq=64)
    assert "files of" in corpus.description
    tokens, targets = corpus.sample(3, 64, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (3, 64)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert corpus.held_out_windows(5, 64)[0].shape == (5, 64)


def test_a_file_of_the_users_own(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 20)
    corpus = data.load(str(text), seq=32)
    assert len(corpus.train) + len(corpus.held_out) == 256 * 20
    assert len(corpus.held_out) == 256
    text.write_bytes(b"too short")
    with pytest.raises(ValueError, match="expected at least 34 bytes of training text, got"):
        data.load(str(text), seq=32)


def test_held_out_files_are_not_trained_on(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i]) * 100)
    corpus = data.load(str(tmp_path), seq=8)
    assert set(corpus.held_out.tolist()) == {0, 20}
    assert set(corpus.train.tolist()) == set(range(40)) - {0, 20}


def test_the_model_is_causal_and_starts_near_uniform():
    model = Llama(TINY)
    model.init_weights(0)
    tokens = torch.randint(TINY.vocab, (2, TINY.max_seq), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % TINY.vocab
    torch.testing.assert_close(model(changed)[:, :-1], logits[:, :-1])
    assert model(tokens, tokens).item() == pytest.approx(torch.tensor(TINY.vocab).log().item(), rel=0.02)


@pytest.mark.usefixtures("fake_group")
def test_sharding_before_initialisation_gives_the_same_weights():
    alone = Llama(TINY)
    alone.init_weights(5)
    with torch.device("meta"):
        model = Llama(TINY)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.init_weights(5)
    for (name, param), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.to_local(), whole.chunk(4)[0]), name
    assert torch.equal(model.cos, alone.cos)


def test_the_8b_preset_has_the_parameters_of_llama_3_8b():
    with torch.device("meta"):
        model = Llama(PRESETS["8b"])
    assert sum(p.numel() for p in model.parameters()) == 8_030_261_248


def test_learning_rate_factors():
    assert warmup_and_cosine(0, 100) == pytest.approx(0.1)
    assert warmup_and_cosine(10, 100) == pytest.approx(1.0)
    assert warmup_and_cosine(100, 100) == pytest.approx(0.1)


def test_the_loss_curve_is_a_picture(tmp_path):
    picture = plot_losses([3.0, 2.0], 2.5, tmp_path / "new" / "loss.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_groups_of_heads_divide():
    for config in (*PRESETS.values(), Config()):
        assert config.width % config.heads == 0
        assert config.heads % config.kv_heads == 0
