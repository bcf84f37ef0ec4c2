"""Tokenize conversations, mark their target tokens, and make batches of samples."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jinja2 import TemplateError
from numpy.typing import NDArray
from options import SIZES, TEXT
from rows import Messages, read_rows
from samestep import ConfigError, log
from samestep.data.token_batches import TokenBatches
from samestep.options import Options
from samestep.sharding import permute
from samestep.torch.token_sampler import GlobalTokenBatchSampler
from torch import Tensor

HELD_OUT = 10  # 1 / HELD_OUT of the samples, but at least one sample, are the test set
IGNORED = -100  # the label of a position whose next token is not a target
PADDING = -101  # the label of a position after the end of a sample
COUNTED_STEPS = 100  # number of steps that `idle_share` counts
PROBE = "samestep"  # an assistant's text, after which `ChatTokenizer` finds the end token


class Tokenizer(Protocol):
    """The interface of a model's tokenizer."""

    end: str  # text of the token that ends a completion
    size: int  # largest token + 1
    special: list[str]  # texts of the special tokens

    def prompt(self, messages: Messages) -> str:
        """Return the text of the messages, up to the point at which the assistant's next text begins."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. The text of a special token becomes one token."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of ``tokens``, without special tokens."""


class ByteTokenizer:
    """A tokenizer whose tokens are bytes. Token 256 marks the end of a completion."""

    end = "<end>"
    size = 257  # including the end token

    def __init__(self) -> None:
        self.special = [self.end]

    def prompt(self, messages: Messages) -> str:
        return "".join(message["content"] + self._after(message) for message in messages)

    def _after(self, message: dict[str, str]) -> str:
        if message["role"] == "assistant":
            return self.end
        return "\n"

    def encode(self, text: str) -> list[int]:
        if text == self.end:
            return [256]
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class ChatTokenizer:
    """A tokenizer of Hugging Face with its chat template. Without a template, a prompt is one text and a newline.

    A prompt without a template begins with the token, if any, that the tokenizer itself puts before a text.

    Raises:
        ConfigError: the tokenizer has no end token, or its chat template writes none.
    """

    def __init__(self, inner: Any, folder: Path) -> None:
        if inner.eos_token is None:
            raise ConfigError(f"--model {folder}: its tokenizer has no end token: set eos_token")
        self._inner = inner
        adds_start = inner("a")["input_ids"][:1] == [inner.bos_token_id]
        self._start = inner.bos_token if adds_start else ""
        self.end = self._end_of_turn(folder) if inner.chat_template else inner.eos_token
        self.special = [*inner.all_special_tokens, self.end]
        self.size = 1 + max(inner.get_vocab().values())

    def _end_of_turn(self, folder: Path) -> str:
        """Return the token that the chat template writes after an assistant's text. It can differ from eos_token."""
        messages = [{"role": "user", "content": "user"}, {"role": "assistant", "content": PROBE}]
        try:
            text = self._inner.apply_chat_template(messages, tokenize=False)
        except (TemplateError, ValueError) as error:
            reason = log.first_line(str(error))
            raise ConfigError(f"--model {folder}: its chat template fails ({reason}): correct the template") from None
        tokens = self.encode(text.partition(PROBE)[2].lstrip())
        if not tokens or tokens[0] not in self._inner.added_tokens_decoder:
            raise ConfigError(
                f"--model {folder}: its chat template has no end token after the assistant's text: add eos_token"
            )
        end: str = self._inner.convert_ids_to_tokens(tokens[0])
        return end

    def prompt(self, messages: Messages) -> str:
        if not self._inner.chat_template:
            if len(messages) != 1:
                raise ValueError(
                    "the model has no chat template: give prompt and completion, or choose another --model"
                )
            return f"{self._start}{messages[0]['content']}\n"
        try:
            text: str = self._inner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses the row ({error}): change its roles") from None
        return text

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._inner(text, add_special_tokens=False)["input_ids"]
        return tokens

    def decode(self, tokens: list[int]) -> str:
        text: str = self._inner.decode(tokens, skip_special_tokens=True)
        return text


@dataclass(frozen=True)
class Sample:
    """The tokens of one conversation.

    Attributes:
        tokens: int64 [length].
        is_target: bool [length]; true for the tokens of the assistant's texts, and for the end token after each text.
    """

    tokens: NDArray[np.int64]
    is_target: NDArray[np.bool_]


def tokenize(tokenizer: Tokenizer, messages: Messages) -> Sample:
    """Return the tokens of one conversation.

    Each of the assistant's texts is tokenized separately, so that no token spans the border to another text.

    Raises:
        ValueError: a text contains a special token, or the chat template rejects the messages or changes earlier ones.
    """
    for message in messages:
        for special in tokenizer.special:
            if special in message["content"]:
                raise ValueError(f"a text has {special!r}, which is a token of the model: take it out")
    tokens: list[int] = []
    is_target: list[bool] = []
    before = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.prompt(messages[:i])
        if not prompt.startswith(before):
            raise ValueError("the model's chat template rewrites earlier turns: give one turn a row")
        given = tokenizer.encode(prompt[len(before) :])
        completion = [*tokenizer.encode(message["content"]), *tokenizer.encode(tokenizer.end)]
        tokens += given + completion
        is_target += [False] * len(given) + [True] * len(completion)
        before = prompt + message["content"] + tokenizer.end
    return Sample(np.array(tokens, np.int64), np.array(is_target))


class Samples:
    """A dataset of samples, which pads each batch. A `samestep.torch.DataLoader` reads each batch by one call."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples
        self.lengths = np.array([len(sample.tokens) for sample in samples], np.int64)
        # The first token is never a target, because no token precedes it.
        self.targets = np.array([int(sample.is_target[1:].sum()) for sample in samples], np.int64)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the tokens and labels of samples ``indices`` [m], int64 [m, longest], padded on the right.

        A label is the next token if the next token is a target. Other labels are IGNORED, or PADDING after a sample's
        end.
        """
        longest = int(self.lengths[indices].max(initial=1))
        tokens = torch.zeros(len(indices), longest, dtype=torch.int64)
        labels = torch.full_like(tokens, PADDING)
        for row, i in enumerate(indices):
            sample = self._samples[i]
            length = len(sample.tokens)
            tokens[row, :length] = torch.from_numpy(sample.tokens)
            next_tokens = np.where(sample.is_target[1:], sample.tokens[1:], IGNORED)
            labels[row, : length - 1] = torch.from_numpy(next_tokens)
            labels[row, length - 1] = IGNORED
        return tokens, labels


def data_path(options: Options) -> Path:
    """Return --data-file, or the path of the embedded data."""
    path: Path = options.data_file or TEXT
    return path


def load(options: Options, tokenizer: Tokenizer) -> tuple[Samples, Samples]:
    """Return the training set and the test set, without samples of more than --max-length tokens.

    The function logs the number of omitted samples, if any.

    Raises:
        ConfigError: a row is invalid, or fewer than two samples remain.
    """
    path = data_path(options)
    rows = itertools.islice(read_rows(path).items(), SIZES.get(options.dataset))
    samples = []
    for line, messages in rows:
        try:
            samples.append(tokenize(tokenizer, messages))
        except ValueError as error:
            raise ConfigError(f"{path}:{line}: {error}") from None
    kept = [sample for sample in samples if len(sample.tokens) <= options.max_length]
    if len(kept) < len(samples):
        log.info(
            f"{len(samples) - len(kept)} of {len(samples)} samples have more than {options.max_length} tokens and are "
            "left out: raise --max-length and --micro-tokens to keep them"
        )
    if len(kept) < 2:
        longest = max(len(sample.tokens) for sample in samples)
        raise ConfigError(
            f"--max-length {options.max_length} leaves {len(kept)} samples of {path}, and training needs two: raise "
            f"it, up to {longest}"
        )
    order = permute(np.arange(len(kept)), len(kept), 0, 0)
    count = max(1, len(kept) // HELD_OUT)
    test_set = Samples([kept[i] for i in order[:count]])
    train_set = Samples([kept[i] for i in np.sort(order[count:])])
    return train_set, test_set


def idle_share(batches: TokenBatches) -> float:
    """Return the fraction of the ranks' time in which they wait for ranks with more micro-batches.

    The estimate uses at most COUNTED_STEPS steps, and assumes that all micro-batches have the same duration.
    """
    busy = 0
    total = 0
    for step in range(min(COUNTED_STEPS, batches.steps_per_epoch)):
        count = batches.num_micro_batches(step)
        busy += count
        total += -(-count // batches.world_size) * batches.world_size
    return 1 - busy / total


def make_sampler(options: Options, train_set: Samples, rank: int, world_size: int) -> GlobalTokenBatchSampler:
    """Return the sampler of the training set.

    Raises:
        ConfigError: --step-tokens is too small for the longest sample.
    """
    longest = int(train_set.lengths.max())
    total = int(train_set.lengths.sum())
    steps = -(-total // options.step_tokens)
    if total // steps < longest:
        raise ConfigError(
            f"--step-tokens {options.step_tokens} is too few for a sample of {longest} tokens: raise it to "
            f"{2 * longest}, or lower --max-length"
        )
    return GlobalTokenBatchSampler(
        train_set.lengths,
        train_set.targets,
        options.step_tokens,
        options.micro_tokens,
        rank=rank,
        world_size=world_size,
        seed=options.seed,
        virtual_ranks=options.virtual_ranks,
    )
