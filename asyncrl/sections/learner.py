"""The ranks that train."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from asyncrl.config_lora import lora_problems
from asyncrl.learners.layout import Layout
from asyncrl.sections.base import Decay, Names, Section, refuse


class LoraSection(Section):
    """Low-rank adapters, which are trained in place of the weights. Generators get the two merged."""

    rank: PositiveInt = 16
    """r: inner width of an adapter's two matrices."""
    alpha: PositiveFloat = 32.0
    """An adapter adds alpha / rank times its product to the weight."""
    dropout: float = 0.0
    """Only 0: log-probs have to be a function of weights and tokens."""
    target_modules: Names = ("all-linear",)
    """Last names of the layers that get one, e.g. [q_proj, v_proj]. ``all-linear``: every linear layer but
    the output embedding."""
    seed: NonNegativeInt = 0
    """Seed of the adapters' initial values, with which they add nothing; apart from ``run.seed``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(lora_problems(self))
        return self


class EngineSection(Section):
    """Ranks that train a model: what policy and critic have alike."""

    backend: Literal["deepspeed", "fsdp2"] = "deepspeed"
    """The library that shares a model out among the ranks and steps it: DeepSpeed, or torch's own FSDP2, with
    ZeRO 2 or 3 and without LoRA."""
    ranks: PositiveInt = 1
    """Processes, a device each."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    """What the ranks share out: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. With fsdp2
    all of it at 2 and at 3, but at 2 parameters are whole from a forward to the end of its backward pass.
    Where parameters are shared out, all ranks of a critic value each group together."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda, then cpu."""
    threads: PositiveInt = 1
    """Torch threads of one rank on CPU."""
    cpu_cores: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Cores to pin the ranks to, dealt out in turn; null: unpinned."""
    micro_batch_tokens: PositiveInt = 4096
    """Tokens in one forward pass, padding included."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this L2 norm."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: slower, less memory."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds that the ranks may take to load the model and find each other."""
    step_timeout_s: PositiveFloat = 1800.0
    """Seconds that one update may take."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of every parameter, or all of them."""
        return self.zero_stage == 3 or self.backend == "fsdp2"


class LearnerSection(EngineSection):
    packing: bool = False
    """Several answers in a row without padding, each attending to itself alone. Checked at the start: models
    whose layers carry a state from token to token, or do not look at positions, cannot."""
    shared_prompts: bool = False
    """The prompt of a group is computed once, in one row with its answers, each attending to the prompt and
    itself. Saves most of the work where prompts are longer than answers. Checked at the start as packing
    is."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """The learner's implementation; auto: the model's own choice. With ``packing`` and flash_attention_2 (a
    GPU, bfloat16, and the package flash-attn) a micro-batch is a single row."""
    lora: LoraSection | None = None
    """Train low-rank adapters, the weights frozen; null: train the weights. Needs ``asyncrl[lora]``."""
    sequence_parallel: PositiveInt = 1
    """Ranks that share each sequence, a part of its tokens each (Ulysses): for sequences whose activations
    one device cannot hold. Divides ``ranks`` and the model's heads."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each layer, a part of its heads and columns each (AutoTP): for layers that one device
    cannot hold. Divides ``ranks`` and the model's heads."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to 0 at ``run.steps``."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly from lr / warmup_steps."""
    max_bad_steps: NonNegativeInt = 3
    """Non-finite updates in a row that are skipped before the run stops."""

    @property
    def shared(self) -> int:
        """Ranks that train the same samples, a part of the work each."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def replicas(self) -> int:
        """Groups of ranks that train samples of their own."""
        return self.ranks // self.shared

    @property
    def layout(self) -> Layout:
        """How a micro-batch is laid out."""
        if self.shared_prompts:
            return "shared"
        if not self.packing:
            return "padded"
        return "one_row" if self.attention == "flash_attention_2" else "packed"
