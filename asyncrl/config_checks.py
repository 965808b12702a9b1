"""What no single key can get wrong: values that contradict each other.

Each function returns its findings as text, all of them, and raises nothing. A finding starts with the
key to change (from the section's own key for a section, from the top for ``contradictions``), and
states what was found, what was expected, and the remedy, with both numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.algorithms.names import (
    COMPARING,
    CORRECTING,
    NEEDING_GREEDY,
    PREFERENCE_NAMES,
)
from asyncrl.config_backends import backend_contradictions
from asyncrl.config_halves import half_contradictions
from asyncrl.config_lora import adapter_contradictions
from asyncrl.config_parallel import parallel_contradictions
from asyncrl.config_placement import placement_contradictions
from asyncrl.generators.vllm_options import option_problems

if TYPE_CHECKING:
    from asyncrl.config import (
        Config,
        CreateSection,
        EnvironmentSection,
        ModelSection,
        SourceSection,
    )

SOURCE_KINDS = ("path", "hub", "reasoning_gym", "python", "mixture", "holdout")
_SMALLEST_SHARE = 1e-3


def source_problems(source: SourceSection) -> list[str]:
    """A source has exactly one kind; the parts of a mixture have rows, and all of them a weight or none."""
    given = [kind for kind in SOURCE_KINDS if getattr(source, kind) not in (None, ())]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        return [f"found {found}; expected exactly one of {', '.join(SOURCE_KINDS)}"]
    problems = [
        f"mixture: found a part with {kind}; expected path, hub, reasoning_gym or python, which have rows"
        for part in source.mixture
        for kind in ("mixture", "holdout")
        if getattr(part, kind) not in (None, ())
    ]
    weights = [part.weight for part in source.mixture]
    known = [weight for weight in weights if weight is not None]
    if known and len(known) < len(weights):
        problems.append(
            f"mixture: found a weight in {len(known)} of {len(weights)} sources; expected it in all or none"
        )
    elif known and min(known) / sum(known) < _SMALLEST_SHARE:
        problems.append(
            f"mixture: found weight {min(known):g} of {sum(known):g} in all; expected at least one in "
            f"{1 / _SMALLEST_SHARE:g}"
        )
    return problems


def model_problems(model: ModelSection) -> list[str]:
    """A model is loaded or made, not both."""
    if model.path is not None and model.create is not None:
        return [f"found both path {model.path!r} and create; expected one: remove the other"]
    if model.path is None and model.create is None:
        return ["found neither path nor create; expected a folder or hub name as path, or a create block"]
    return []


def environment_problems(environment: EnvironmentSection) -> list[str]:
    """Tools are for the built-in environment, which has nothing else, and for the prompts of verifiers'; a
    command is for an agent."""
    if environment.kind == "agent":
        return _agent_problems(environment)
    if environment.command:
        return [f"command: found it with kind {environment.kind!r}; expected kind 'agent', or no command"]
    if (environment.path == "tools") == bool(environment.tools) or environment.form == "verifiers":
        return []
    if environment.tools:
        return [
            f"tools: found them with path {environment.path!r} and form {environment.form!r}; expected path "
            "'tools', form 'verifiers', or no tools"
        ]
    return ["tools: found none with path 'tools'; expected at least 1 function"]


def _agent_problems(environment: EnvironmentSection) -> list[str]:
    if environment.tools:
        return ["tools: found them with kind 'agent'; expected none: an agent offers its own with its calls"]
    if (environment.path == "command") != bool(environment.command):
        found = f"path {environment.path!r} with {len(environment.command)} words of command"
        return [f"command: found {found}; expected path 'command' and a command, or another path and none"]
    if environment.command and environment.args:
        return ["args: found them with a command; expected none: write them into the command"]
    return []


def creation_problems(create: CreateSection) -> list[str]:
    """The shape of a model that is to be made."""
    problems = []
    if create.hidden_size % (2 * create.heads):
        # Rotary embeddings turn pairs of channels.
        problems.append(
            f"hidden_size: found {create.hidden_size}; expected a multiple of 2 * heads = {2 * create.heads}"
        )
    if create.heads % create.kv_heads:
        problems.append(f"kv_heads: found {create.kv_heads}; expected a divisor of heads = {create.heads}")
    return problems


def contradictions(config: Config) -> list[str]:
    """Every pair of values that cannot both be meant."""
    return [
        *_staleness(config),
        *_masking(config),
        *_lengths(config),
        *_groups(config),
        *_corrections(config),
        *_devices(config),
        *_engine(config),
        *_canary(config),
        *_reference(config),
        *_critic(config),
        *_rewards(config),
        *_agents(config),
        *adapter_contradictions(config),
        *backend_contradictions(config),
        *placement_contradictions(config),
        *parallel_contradictions(config),
        *half_contradictions(config),
        *_other(config),
    ]


def _staleness(config: Config) -> list[str]:
    schedule = config.schedule
    depth, every, bound = schedule.pipeline_depth, schedule.publish_every, schedule.max_staleness
    needed = depth + every - 1
    if bound >= needed:
        return []
    return [
        f"schedule.max_staleness: found {bound}; expected at least pipeline_depth + publish_every - 1 = "
        f"{depth} + {every} - 1 = {needed}: raise max_staleness to {needed}, or lower the other two"
    ]


def _masking(config: Config) -> list[str]:
    schedule = config.schedule
    if schedule.at_bound != "mask" or schedule.in_flight_updates:
        return []
    return [
        "schedule.at_bound: found 'mask' with schedule.in_flight_updates false, where an answer is of one "
        "version and masking would take all of it; expected wait or drop, or in_flight_updates true"
    ]


def _lengths(config: Config) -> list[str]:
    problems = []
    prompt, answer = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    longest = config.max_sequence_tokens
    sum_text = f"data.max_prompt_tokens + rollout.max_new_tokens = {prompt} + {answer} = {longest}"
    for section, tokens in (
        ("learner", config.learner.micro_batch_tokens),
        ("reference", config.reference.micro_batch_tokens),
    ):
        if tokens is not None and longest > tokens:
            problems.append(
                f"{section}.micro_batch_tokens: found {tokens}, which cannot hold the longest sequence; "
                f"expected at least {sum_text}: raise it, or shorten prompts or answers"
            )
    create = config.model.create
    if create is not None:
        problems += length_problems(config, create.max_positions, "model.create.max_positions")
    return problems


def length_problems(config: Config, positions: int, name: str) -> list[str]:
    """Whether the longest sequences of training and evaluation fit a model of ``positions`` tokens."""
    problems = []
    prompt = config.data.max_prompt_tokens
    lengths = [("rollout.max_new_tokens", config.rollout.max_new_tokens)]
    evaluates = config.data.eval is not None or config.data.eval_sets
    if evaluates and config.eval.max_new_tokens is not None:
        lengths.append(("eval.max_new_tokens", config.eval.max_new_tokens))
    for key, answer in lengths:
        if prompt + answer > positions:
            problems.append(
                f"{key}: found data.max_prompt_tokens + {key} = {prompt} + {answer} = {prompt + answer}; "
                f"expected at most {name} = {positions}: shorten prompts or answers by "
                f"{prompt + answer - positions} tokens, or use a model with more positions"
            )
    return problems


def _agents(config: Config) -> list[str]:
    environment, replicas = config.environment, config.generators.replicas
    if environment is None or environment.kind != "agent":
        return []
    problems = []
    if config.algorithm.learns_from_pairs:
        problems.append(
            f"algorithm.loss: found {config.algorithm.loss!r} with environment.kind 'agent', whose samples "
            "may have several rows; expected a loss that compares no pairs"
        )
    if environment.serve.port and replicas > 1:
        problems.append(
            f"environment.serve.port: found {environment.serve.port} for {replicas} generators; expected 0 "
            "(any that is free), or generators.replicas = 1"
        )
    return problems


def _groups(config: Config) -> list[str]:
    problems = []
    rollout, algorithm = config.rollout, config.algorithm
    pairs = algorithm.learns_from_pairs
    comparing = pairs or algorithm.advantage in COMPARING
    what = f"{algorithm.loss} loss" if pairs else f"{algorithm.advantage} advantage"
    if comparing and rollout.group_size < 2:
        problems.append(
            f"rollout.group_size: found {rollout.group_size}; expected at least 2, because the "
            f"{what} compares the answers of a group with each other"
        )
    elif comparing and rollout.min_group < 2:
        problems.append(
            f"rollout.min_group: found {rollout.min_group}; expected at least 2, because the "
            f"{what} compares the answers of a group with each other"
        )
    elif rollout.min_group > rollout.group_size:
        problems.append(
            f"rollout.min_group: found {rollout.min_group}; expected at most rollout.group_size = "
            f"{rollout.group_size}"
        )
    answers = rollout.group_size + (algorithm.advantage in NEEDING_GREEDY and not pairs)
    if algorithm.filter_zero_variance != "none" and answers < 2:
        problems.append(
            f"algorithm.filter_zero_variance: found {algorithm.filter_zero_variance!r} with "
            f"rollout.group_size {rollout.group_size}, where all rewards of a group are equal and none would "
            "be trained; expected none, or a group_size of at least 2"
        )
    learner, parts = config.learner, algorithm.mini_batches
    ranks, name = learner.replicas, "learner.ranks"
    if learner.shared > 1:
        name = "learner.ranks / (sequence_parallel * tensor_parallel)"
    if rollout.groups_per_step < ranks * parts:
        needed = f"{name} = {ranks}"
        if parts > 1:
            needed = f"{name} * algorithm.mini_batches = {ranks} * {parts} = {ranks * parts}"
        problems.append(
            f"rollout.groups_per_step: found {rollout.groups_per_step}; expected at least {needed}, because "
            "whole groups go to each rank"
        )
    return problems


def _corrections(config: Config) -> list[str]:
    problems = []
    rollout, algorithm, bound = config.rollout, config.algorithm, config.schedule.max_staleness
    if rollout.top_p < 1.0:
        problems.append(
            f"rollout.top_p: found {rollout.top_p:g}; expected 1.0 in training, because the learner "
            "cannot correct for tokens that were cut off; eval.top_p is free"
        )
    if rollout.top_k > 0:
        problems.append(
            f"rollout.top_k: found {rollout.top_k}; expected 0 (off) in training, because the learner "
            "cannot correct for tokens that were cut off; eval.top_k is free"
        )
    uncorrected = algorithm.correction == "none" and algorithm.loss not in (*CORRECTING, *PREFERENCE_NAMES)
    if uncorrected and bound >= 2 and not algorithm.allow_uncorrected:
        problems.append(
            f"algorithm.correction: found 'none' with schedule.max_staleness {bound}; expected a "
            "correction from max_staleness 2 on, because the loss takes old data for new: set "
            "algorithm.correction to tis, lower schedule.max_staleness to 1, or set "
            "algorithm.allow_uncorrected to true"
        )
    return problems


def _devices(config: Config) -> list[str]:
    if config.weight_sync.backend != "nccl":
        return []
    return [
        f"weight_sync.backend: found 'nccl' with {name}.device {device!r}; expected cuda on both sides, "
        "because nccl connects GPUs only: set weight_sync.backend to gloo or auto"
        for name, device in (("generators", config.generators.device), ("learner", config.learner.device))
        if device not in ("auto", "cuda")
    ]


def _engine(config: Config) -> list[str]:
    generators = config.generators
    if generators.backend != "vllm":
        if not generators.vllm:
            return []
        return [
            f"generators.vllm: found {', '.join(sorted(generators.vllm))} with generators.backend "
            f"{generators.backend!r}; expected backend vllm, or no such block"
        ]
    longest = max(config.max_sequence_tokens, config.max_eval_tokens)
    problems = option_problems(generators.vllm, longest)
    if config.run.deterministic:
        problems.append(
            "run.deterministic: found true with generators.backend 'vllm', which repeats seeds but not "
            "bits; expected generators.backend torch, or run.deterministic false"
        )
    if generators.device == "mps":
        problems.append(
            "generators.device: found 'mps' with generators.backend 'vllm'; expected auto, cpu or cuda, or "
            "generators.backend torch"
        )
    return problems


def _canary(config: Config) -> list[str]:
    # Two tokens to score the second of, and room for one more.
    if config.weight_sync.canary_every == 0 or config.max_sequence_tokens >= 3:
        return []
    return [
        f"weight_sync.canary_every: found {config.weight_sync.canary_every} with data.max_prompt_tokens + "
        f"rollout.max_new_tokens = {config.max_sequence_tokens}; expected at least 3 tokens to compare "
        "log-probs on, or canary_every 0"
    ]


def _reference(config: Config) -> list[str]:
    problems = []
    reference, pushed = config.reference, config.schedule.publish_every
    if reference.ema is not None and reference.refresh_every == 0:
        problems.append(
            f"reference.ema: found {reference.ema:g} with reference.refresh_every 0, where the reference "
            "never moves; expected refresh_every of at least 1, or ema null"
        )
    if reference.refresh_every > 0 and not config.algorithm.needs_reference:
        problems.append(
            f"reference.refresh_every: found {reference.refresh_every} with algorithm.kl 'none' and loss "
            f"{config.algorithm.loss!r}, which start no reference; expected kl loss or reward, or 0"
        )
    if reference.place == "actors" and reference.refresh_every % pushed:
        problems.append(
            f"reference.refresh_every: found {reference.refresh_every} with schedule.publish_every {pushed}; "
            "expected a multiple of it, because the reference follows to versions that are pushed: the next "
            f"one is {(reference.refresh_every // pushed + 1) * pushed}"
        )
    return problems


def _critic(config: Config) -> list[str]:
    if not config.has_critic:
        return []
    problems = []
    critic, prompt, answer = config.critic, config.data.max_prompt_tokens, config.rollout.max_new_tokens
    if config.max_sequence_tokens > critic.micro_batch_tokens:
        problems.append(
            f"critic.micro_batch_tokens: found {critic.micro_batch_tokens}, which cannot hold the longest "
            f"sequence; expected at least data.max_prompt_tokens + rollout.max_new_tokens = {prompt} + "
            f"{answer} = {config.max_sequence_tokens}: raise it, or shorten prompts or answers"
        )
    needed = critic.ranks * config.algorithm.mini_batches
    if config.rollout.groups_per_step < needed:
        problems.append(
            f"rollout.groups_per_step: found {config.rollout.groups_per_step}; expected at least "
            f"critic.ranks * algorithm.mini_batches = {critic.ranks} * {config.algorithm.mini_batches} = "
            f"{needed}, because whole groups go to each rank"
        )
    if critic.warmup_steps >= config.run.steps:
        problems.append(
            f"critic.warmup_steps: found {critic.warmup_steps} with run.steps {config.run.steps}; expected "
            "fewer, because the policy is not trained in these"
        )
    return problems


def _rewards(config: Config) -> list[str]:
    problems = []
    functions, model = config.reward.functions, config.reward_model
    if not functions and model is None and config.environment is None:
        problems.append(
            "reward.functions: found 0 entries; expected at least 1, or a reward_model or an environment "
            "that scores answers"
        )
    names = [f.name for f in functions if f.name is not None]
    for name in sorted({n for n in names if names.count(n) > 1}):
        problems.append(
            f"reward.functions: found the name {name!r} {names.count(name)} times; expected each once"
        )
    if model is not None and "reward_model" in (f.label for f in functions):
        problems.append(
            "reward.functions: found a function with the name 'reward_model', which the scores of the "
            "reward_model bear; expected another: set reward.functions.name"
        )
    return problems


def _other(config: Config) -> list[str]:
    problems = []
    if config.data.train.holdout is not None:
        problems.append(
            "data.train.holdout: found it in data.train; expected it in data.eval alone, where it takes "
            "prompts away from data.train"
        )
    for name, source in config.data.eval_sets.items():
        if source.holdout is not None:
            problems.append(
                f"data.eval_sets: found holdout in {name}; expected it in data.eval alone, or rows of its own"
            )
    if config.learner.warmup_steps > config.run.steps:
        problems.append(
            f"learner.warmup_steps: found {config.learner.warmup_steps}; expected at most run.steps = "
            f"{config.run.steps}"
        )
    attention = config.learner.attention
    if attention == "flash_attention_2" and config.model.dtype == "float32":
        problems.append(
            "learner.attention: found 'flash_attention_2' with model.dtype 'float32'; expected model.dtype "
            "bfloat16, or another implementation"
        )
    elif attention == "flash_attention_2" and config.run.deterministic:
        problems.append(
            "learner.attention: found 'flash_attention_2' with run.deterministic true, whose gradients "
            "differ from run to run; expected sdpa or eager"
        )
    if config.learner.shared_prompts and config.learner.packing:
        problems.append(
            "learner.shared_prompts: found true with learner.packing true; expected one of them: each says "
            "what shares a row"
        )
    if config.learner.shared_prompts and attention == "flash_attention_2":
        problems.append(
            "learner.shared_prompts: found true with learner.attention 'flash_attention_2', which takes no "
            "mask; expected auto, sdpa or eager"
        )
    return problems
