"""TRL's GRPOTrainer, whose completions come from an engine of its own that gets the weights before each step."""

from __future__ import annotations

import json
import zlib

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from fsdp_compiled import FSDPModule, as_torch_fsdp, stream_parameters
from tests.ecosystem.test_trl import SHARDED, options, tokenizer
from tests.ecosystem.training import MODES, accelerate_on_cpu
from tests.support import huggingface
from tests.support.ranks import on_ranks
from tests.support.training import assert_close

STEPS, GENERATED, GROUP = 4, 6, 2
PROMPTS = [f"w{first} w{first + 1} w{first + 5}" for first in range(3, 15)]


class Engine:
    """An unsharded model that draws completions, the same for the same prompt, place in its group and weights."""

    def __init__(self):
        self.model, self.words = huggingface.build("llama"), tokenizer()
        self.received = 0

    def __call__(self, prompts, trainer):
        own = self.model.state_dict()
        for name, tensor in self._weights(trainer):
            own[name].copy_(tensor)
            self.received += 1
        drawn = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for at, prompt in enumerate(prompts):
            generator = torch.Generator().manual_seed(zlib.crc32(prompt.encode()) + prompts[:at].count(prompt))
            prompt_ids = self.words(prompt)["input_ids"]
            completion, logprobs = self._draw(prompt_ids, generator)
            drawn["prompt_ids"].append(prompt_ids)
            drawn["completion_ids"].append(completion)
            drawn["logprobs"].append(logprobs)
        return drawn

    def _weights(self, trainer):
        model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        if isinstance(model, FSDPModule):
            return stream_parameters(model, bucket_bytes=4000)
        return model.named_parameters()

    @torch.no_grad()
    def _draw(self, ids, generator):
        taken, logprobs = list(ids), []
        for _ in range(GENERATED):
            scores = self.model(input_ids=torch.tensor([taken])).logits[0, -1].log_softmax(-1)
            taken.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            logprobs.append(float(scores[taken[-1]]))
        return taken[len(ids) :], logprobs


def _reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def _train(mode, folder, ranks):
    arguments = GRPOConfig(
        **options(mode, folder),
        **(SHARDED if ranks > 1 else {}),
        per_device_train_batch_size=2 * GROUP // ranks,
        num_generations=GROUP,
        num_iterations=2,  # in the second one the loss is not zero
        max_completion_length=GENERATED,
        max_steps=STEPS,
    )
    engine = Engine()
    trainer = GRPOTrainer(
        model=huggingface.build("llama"),
        args=arguments,
        reward_funcs=_reward,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=engine.words,
        rollout_func=engine,
    )
    trainer.train()
    assert engine.received == STEPS // 2 * len(engine.model.state_dict())
    return trainer, [
        (entry["loss"], entry.get("reward", 0.0)) for entry in trainer.state.log_history if "loss" in entry
    ]


@on_ranks(1)
def _alone(folder):
    with accelerate_on_cpu():
        trainer, log = _train("eager", folder, 1)
    (folder / "log.json").write_text(json.dumps(log))
    torch.save(trainer.model.state_dict(), folder / "weights.pt")


@pytest.mark.parametrize("mode", MODES)
def test_trains_like_one_process(mode, tmp_path):
    _alone(folder=tmp_path)
    _sharded(mode=mode, folder=tmp_path)


@on_ranks(2)
def _sharded(mode, folder):
    with accelerate_on_cpu(), as_torch_fsdp():
        trainer, log = _train(mode, folder, 2)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    assert isinstance(model, FSDPModule)
    want = json.loads((folder / "log.json").read_text())
    assert all(abs(loss) > 1e-3 for loss, _ in want[1::2]) and len({reward for _, reward in want}) > 1, want
    torch.testing.assert_close(torch.tensor(log), torch.tensor(want), rtol=1e-3, atol=1e-6)
    assert_close(dict(stream_parameters(model)), torch.load(folder / "weights.pt"), rtol=1e-3)
