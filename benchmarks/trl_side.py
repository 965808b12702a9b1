"""One run of TRL's GRPOTrainer, as a job says: the other side of against_trl.py, run by TRL's own Python.

    python benchmarks/trl_side.py JOB.json RESULT.json

Invariants:
- Prompts come in the order of the job, ``groups_per_step`` of them a step, encoded as asyncrl encodes them.
- The learning rate of every update is the job's.
- The clock stands still while held-out questions are answered.
- Nothing of asyncrl is imported but the reward function.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback

PACKAGES = ("torch", "trl", "transformers", "accelerate")
Reward = Callable[[str, str], float]
"""(completion, answer) -> reward"""


class Meter(TrainerCallback):  # type: ignore[misc]
    """Seconds between the ends of two steps, evaluations left out, and what those found."""

    def __init__(
        self, evaluate: Callable[[], float], evaluated: Sequence[int], clock: Callable[[], float]
    ) -> None:
        """``evaluated``: the numbers of updates after which there is an evaluation."""
        self._evaluate = evaluate
        self._evaluated = frozenset(evaluated)
        self._clock = clock
        self._since = 0.0
        self.step_s: list[float] = []
        self.rates: list[float] = []
        """Learning rate of each update."""
        self.evals: list[tuple[int, float]] = []
        """(updates, held-out reward)."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start_step(0)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_s.append(self._clock() - self._since)
        self._start_step(state.global_step)

    def _start_step(self, updates: int) -> None:
        if updates in self._evaluated:
            self.evals.append((updates, self._evaluate()))
        self._since = self._clock()


def reward_named(path: str) -> Reward:
    """The function of ``package.module:function``."""
    module, _, name = path.partition(":")
    found: Reward = getattr(import_module(module), name)
    return found


def require_same_encoding(tokenizer: Any, rows: Sequence[dict[str, Any]]) -> None:
    """ValueError unless the tokenizer makes of each prompt what asyncrl made of it."""
    encoded = tokenizer(text=[row["prompt"] for row in rows])["input_ids"]
    for row, ids in zip(rows, encoded, strict=True):
        if ids != row["prompt_ids"]:
            raise ValueError(f"{row['prompt']!r}: found the tokens {ids}; expected {row['prompt_ids']}")


@torch.no_grad()
def held_out_reward(model: Any, tokenizer: Any, job: dict[str, Any], reward: Reward) -> float:
    """Mean reward of greedy answers to the held-out questions, answered all at once."""
    rows = job["held_out"]
    batch = tokenizer.pad({"input_ids": [row["prompt_ids"] for row in rows]}, return_tensors="pt")
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=job["max_new_tokens"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    training = model.training
    model.eval()
    tokens = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], generation_config=greedy
    )
    model.train(training)
    answers = tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return fmean(reward(said, row["answer"]) for said, row in zip(answers, rows, strict=True))


def grpo_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """What ``GRPOConfig`` is given, the folder aside."""
    samples = job["groups_per_step"] * job["group_size"]
    return {
        "use_cpu": True,
        "bf16": job["dtype"] == "bfloat16",
        "gradient_checkpointing": False,
        "use_vllm": False,
        "beta": 0.0,
        "loss_type": "dapo",  # the mean over all tokens of the step
        "scale_rewards": "group",
        "epsilon": job["clip_low"],
        "epsilon_high": job["clip_high"],
        "num_generations": job["group_size"],
        "per_device_train_batch_size": job["micro_batch"],
        "gradient_accumulation_steps": samples // job["micro_batch"],
        "max_completion_length": job["max_new_tokens"],
        "temperature": job["temperature"],
        "top_p": 1.0,
        "top_k": 0,
        "learning_rate": max(job["rates"]),
        "adam_beta1": job["betas"][0],
        "adam_beta2": job["betas"][1],
        "adam_epsilon": job["eps"],
        "weight_decay": job["weight_decay"],
        "max_grad_norm": job["max_grad_norm"],
        "max_steps": len(job["rates"]),
        "shuffle_dataset": False,
        "seed": job["seed"],
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job: seconds, mean reward and mean length of each step, evaluations, versions of packages."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["threads"])
    reward = reward_named(job["reward"])
    rates: list[float] = job["rates"]
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    require_same_encoding(tokenizer, [*job["held_out"], *job["prompts"]])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    rewards: list[float] = []
    lengths: list[float] = []

    def score(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        found = [reward(said, right) for said, right in zip(completions, answer, strict=True)]
        rewards.append(fmean(found))
        lengths.append(fmean(map(len, completion_ids)))
        return found

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda update: rates[min(update, len(rates) - 1)] / max(rates)
            )
            return self.lr_scheduler

    meter = Meter(
        lambda: held_out_reward(trainer.model, tokenizer, job, reward), job["evaluated"], time.perf_counter
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=score,
            args=GRPOConfig(output_dir=folder, **grpo_arguments(job)),
            train_dataset=Dataset.from_list(
                [{"prompt": row["prompt"], "answer": row["answer"]} for row in job["prompts"]]
            ),
            callbacks=[meter],
        )
        trainer.train()
    if any(abs(used - asked) > 1e-6 * asked for used, asked in zip(meter.rates, rates, strict=True)):
        raise ValueError(f"found the learning rates {meter.rates}; expected {rates}")
    return {
        "step_s": meter.step_s,
        "rewards": rewards,
        "lengths": lengths,
        "evals": meter.evals,
        "packages": {name: version(name) for name in PACKAGES},
    }


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(train(json.loads(job.read_text()))))


if __name__ == "__main__":
    main()
