"""A character tokenizer: one token a printable ASCII character, beside padding, end and unknown.

Invariants:
- EOS and PAD are different tokens, so that padding can never be mistaken for the end of an answer.
- Text of known characters survives encoding and decoding unchanged, spaces included, and never becomes
  a special token: a prompt that says ``<eos>`` does not end anything.
- The vocabulary does not depend on the data: a model made for one family of tasks can read another.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
CHARACTERS = "\n\t" + "".join(chr(code) for code in range(32, 127))


def character_tokenizer(max_positions: int) -> PreTrainedTokenizerFast:
    """A fast tokenizer that ``AutoTokenizer`` loads again after ``save_pretrained``.

    Any other character (another alphabet, a typographic quote) becomes ``<unk>``. There is no chat
    template: prompts are plain text.
    """
    vocabulary = {token: i for i, token in enumerate((PAD, EOS, UNKNOWN, *CHARACTERS))}
    # Byte-pair encoding with no merges leaves single characters.
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
