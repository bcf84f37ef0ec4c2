"""Build the language model, its LoRA matrices and its loss over target tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

os.environ["HF_HUB_OFFLINE"] = "1"  # never contact the Hub; transformers reads this variable at its import
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizer threads do not survive a fork

import torch
import torch.nn.functional as F
from data import IGNORED, PADDING, ByteTokenizer, ChatTokenizer, Tokenizer
from options import model_folder
from peft import LoraConfig, PeftModel, get_peft_model
from samestep import ConfigError, log
from samestep.options import Options
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)


class TokenLoss(nn.Module):
    """Compute the loss summed over a batch's target tokens.

    The module computes scores only for targets, to save memory. SmolLM2's 49,152 scores of a token need 0.2 MB in
    float32.
    """

    def __init__(self, model: nn.Module, autocast: bool = False, pack: bool = False) -> None:
        super().__init__()
        self.model = model
        self._autocast = autocast
        self._pack = pack

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of tokens and labels int64 [m, length] of `data.Samples`; m may be 0.

        The model needs no attention mask. Attention is causal and padding is on the right, so targets never attend to
        padding.
        """
        if len(tokens) == 0:
            return self._loss_of_nothing()
        causal = causal_model(self.model)
        positions = None
        if self._pack:
            tokens, labels, positions = pack(tokens, labels)
        is_target = labels >= 0
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self._autocast):
            scores = target_scores(causal, tokens, positions, is_target)
        # The loss function of transformers would round the scores of a float64 model to float32.
        return F.cross_entropy(scores.to(causal.dtype), labels[is_target], reduction="sum")

    def _loss_of_nothing(self) -> Tensor:
        """Return 0, with a gradient of 0 for each trained weight, because DDP waits for all gradients.

        The model does not accept an empty batch.
        """
        sums = [weight.sum() for weight in self.parameters() if weight.requires_grad]
        return torch.stack(sums).sum() * 0


def target_scores(causal: Any, tokens: Tensor, positions: Tensor | None, is_target: Tensor) -> Tensor:
    """Return the scores of the target tokens [targets, vocabulary].

    Args:
        causal: transformers model.
        tokens: int64 [m, length].
        positions: int64 [m, length], or None if each row has one sample.
        is_target: bool [m, length].
    """
    hidden = causal.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    scores: Tensor = causal.lm_head(hidden[is_target])
    return scores


def pack(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert padded tokens and labels [m, length] to tokens, labels and positions int64 [1, tokens of all samples].

    The samples share a row, without padding. Positions restart at 0 with each sample. If no attention mask is given,
    transformers therefore masks the attention between different samples.
    """
    is_token = labels != PADDING
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return tokens[is_token][None], labels[is_token][None], positions[is_token][None]


@torch.no_grad()
def check_scores(model: Any, folder: Path) -> None:
    """Raise ConfigError if the model does more than lm_head after its last layer, such as scale or cap the scores.

    All tokens are targets here, so both computations have the same shapes, and the same bits without such a step.
    """
    tokens = torch.arange(8)[None]
    expected = model(input_ids=tokens, use_cache=False).logits[0]
    scores = target_scores(model, tokens, None, torch.ones_like(tokens, dtype=torch.bool))
    if (scores - expected).abs().max() > 1e-5 * expected.abs().max():
        kind = type(model).__name__
        raise ConfigError(f"--model {folder} is a {kind}, which changes lm_head's scores: use a model such as Llama")


@torch.inference_mode()
def check_packing(model: nn.Module) -> None:
    """Raise ConfigError if samples that share a row change each other's losses."""
    device = next(model.parameters()).device
    tokens = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]], device=device)
    labels = torch.tensor([[2, 3, 4, 5, IGNORED], [7, 8, IGNORED, PADDING, PADDING]], device=device)
    was_training = model.training
    model.eval()
    packed = TokenLoss(model, pack=True)(tokens, labels)
    padded = TokenLoss(model)(tokens, labels)
    model.train(was_training)
    if not torch.allclose(packed, padded, rtol=1e-4, atol=0):
        raise ConfigError(f"--pack: {type(model).__name__} lets samples that share a row see each other: leave it out")


def causal_model(model: nn.Module) -> Any:
    """Return the transformers model inside a PeftModel, or ``model`` itself if it is not a PeftModel."""
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


def load_tokenizer(options: Options) -> Tokenizer:
    """Return the tokenizer of --model.

    Raises:
        ConfigError: the model's folder is missing, or has no usable tokenizer.
    """
    folder = model_folder(options.model)
    if folder is None:
        return ByteTokenizer()
    if not folder.is_dir():
        script = "scripts/run_llm_finetune.sh"
        raise ConfigError(f"--model {options.model} is not in {folder}: start the app by {script}, which downloads it")
    try:
        inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = log.first_line(str(error))
        raise ConfigError(f"--model {folder} has no tokenizer ({reason}): add tokenizer.json") from None
    return ChatTokenizer(inner, folder)


def build_model(options: Options, tokenizer: Tokenizer) -> nn.Module:
    """Return the model in training mode. If --lora is above 0, only LoRA's matrices require gradients.

    Raises:
        ConfigError: the folder has no usable model, or the tokenizer has more tokens than the embedding has rows. The
            model cannot compute in --dtype, or a name of --lora-targets matches no linear layer.
    """
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(options.seed)
    model = load_base(options, dtype)
    rows = model.get_input_embeddings().num_embeddings
    if tokenizer.size > rows:
        raise ConfigError(
            f"--model {options.model}: its tokenizer has {tokenizer.size} tokens, and the embedding {rows} rows: use "
            "the model's own tokenizer"
        )
    if dtype == torch.float64:
        compute_norms_in_float64(model)
    if not options.lora:
        return cast(nn.Module, model.train())
    targets = options.lora_targets.split(",")
    check_targets(model, targets)
    lora = LoraConfig(
        r=options.lora,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    return cast(nn.Module, get_peft_model(model, lora, autocast_adapter_dtype=False).train())


def check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise ConfigError unless each target is the name of a linear layer, or the last components of such a name."""
    layers = [f".{name}" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(layer.endswith(f".{target}") for layer in layers):
            raise ConfigError(
                f"--lora-targets {target} names no linear layer of the model: choose names such as q_proj,v_proj"
            )


def load_base(options: Options, dtype: torch.dtype) -> Any:
    """Return the model of --model, in ``dtype`` and without LoRA.

    Raises:
        ConfigError: the folder's model cannot be loaded, has no attribute ``model`` or ``lm_head``, or changes the
            scores of ``lm_head``.
    """
    folder = model_folder(options.model)
    if folder is None:
        return tiny_model().to(dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = log.first_line(str(error))
        raise ConfigError(f"--model {folder} cannot be loaded ({reason}): name another folder") from None
    if not hasattr(model, "model") or not hasattr(model, "lm_head"):
        kind = type(model).__name__
        raise ConfigError(f"--model {folder} is a {kind}, without .model and .lm_head: use a model such as Llama")
    check_scores(model, folder)
    return model


def tiny_model() -> LlamaForCausalLM:
    """Return a small Llama over bytes with random weights."""
    config = LlamaConfig(
        vocab_size=ByteTokenizer.size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=256,
        pad_token_id=256,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=256, pad_token_id=256)
    return model


def compute_norms_in_float64(model: nn.Module) -> None:
    """Replace the forward pass of transformers' RMSNorm, which always computes in float32, by torch's rms_norm.

    Raises:
        ConfigError: a norm is not torch's rms_norm. Gemma's norms multiply by 1 + weight.
    """
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm):  # torch's own computes in float64
            norm = cast(Any, module)
            if not hasattr(norm, "variance_epsilon"):  # transformers names it so in norms that multiply by weight
                raise ConfigError(f"--dtype float64: the model's {kind} cannot compute in float64: leave it out")
            norm.forward = lambda x, norm=norm: F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


@torch.inference_mode()
def write(model: nn.Module, tokenizer: Tokenizer, prompt: str, most: int) -> str:
    """Return a completion of ``prompt`` with at most ``most`` tokens, by greedy decoding.

    Args:
        model: model from `build_model`.
        tokenizer: the model's tokenizer.
        prompt: text of the user's message.
        most: largest number of new tokens.
    """
    causal = causal_model(model)
    was_training = model.training
    model.eval()
    messages = [{"role": "user", "content": prompt}]
    device = next(causal.parameters()).device
    given = torch.tensor([tokenizer.encode(tokenizer.prompt(messages))], device=device)
    settings = GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=tokenizer.encode(tokenizer.end)[0],
        pad_token_id=tokenizer.encode(tokenizer.end)[0],
    )
    written = causal.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
    model.train(was_training)
    return tokenizer.decode(written[0, given.shape[1] :].tolist())


def is_tiny(options: Options) -> bool:
    """Return whether --model is tiny, the model with random initial weights."""
    return model_folder(options.model) is None


def describe(options: Options, model: nn.Module) -> str:
    """Return the model's name, its number of trained weights and its number of all weights, for the log."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    name = Path(options.model).name
    return f"{name} ({trained:,} of {total:,} weights trained)"
