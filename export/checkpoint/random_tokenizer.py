"""A small byte-level BPE tokenizer with a ChatML template, for checkpoints with random weights.

It has what the official one has, in small: every byte has a token, specials follow the vocabulary (so the model's
last ids have no text), and the end of a chat turn is not the document separator. Merges are learnt from the text
below, the same on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

MERGES = 240
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = (256 + MERGES + i for i in range(len(SPECIALS)))
SMALLEST_VOCABULARY = 256 + MERGES + len(SPECIALS)

PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

TEXT = """
A language model reads a text from left to right and says, after every token, how likely each token is to come next.
To write, it chooses one of them, appends it, and reads on. Most of the time is spent not on arithmetic but on
fetching the weights from memory, and so a model that reads fewer of them for each token answers sooner. A mixture of
experts keeps many small networks and asks only a few of them for each token; a table of word pairs and triples gives
the model something to remember without any arithmetic at all; and attention that looks at a few blocks of the past
costs no more at the end of a long book than at its beginning. The linear layers keep a summary of fixed size instead:
they forget a little at every step, correct what they had predicted wrongly, and write the correction back.
When the morning came the rain had stopped, and the old harbour was quiet. "Where are you going?" she asked. "To the
other side of the river," he said, "before the others are awake." There were 12 boats in 1987, 7 in 2003, and 3 now.
def main(): return [x * x for x in range(10) if x % 2 == 0]
user: What is the capital of France? assistant: The capital of France is Paris. user: And of Japan? assistant: Tokyo.
"""


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer = build_tokenizer()
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    text = json.dumps(tokenizer_config(), indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer() -> Tokenizer:
    """256 byte tokens, then the merges, then the specials."""
    merges = _learn_merges()
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    tokenizer = with_pipeline(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "additional_special_tokens": list(SPECIALS),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }


def _learn_merges() -> list[tuple[str, str]]:
    tokenizer = with_pipeline(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    merges = [(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]
    if len(merges) != MERGES:
        raise RuntimeError(f"the built-in text gives {len(merges)} merges, {MERGES} are needed")
    return merges


def with_pipeline(model: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
