"""Tiny random models with a real tokenizer, written to disk as complete servable directories.

`make_tiny_llama(directory)` is what most tests want. All of it is deterministic: the same arguments give the same
bytes. The weights are random, so the text is nonsense, but greedy continuations vary from token to token and from
prompt to prompt (the initial weights are scaled up for that), which is what equality tests need.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2
VOCABULARY_SIZE = 384
MAX_MODEL_LEN = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "The quick brown fox jumps over the lazy dog while the other dogs sleep in the warm sun.",
    "Once upon a time there was a small village where everybody knew the baker and the baker knew everybody.",
    "A router accepts requests, a worker reads the prompt, another worker writes the answer word by word.",
    "What is the capital of France? The capital of France is Paris, and the river through it is the Seine.",
    "Numbers such as 1, 2, 3, 10, 100 and 1000 are written with digits; letters are written with letters.",
)


def write_tiny_tokenizer(directory: Path) -> None:
    """Write tokenizer.json (byte-level BPE, `VOCABULARY_SIZE` tokens) and tokenizer_config.json (chat template)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "model_max_length": MAX_MODEL_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))


def make_tiny_model(directory: Path, config: Any, *, seed: int = 0, weight_scale: float = 3.0) -> Path:
    """Write a random causal language model of `config` with the tiny tokenizer into `directory`, and return it."""
    from transformers import AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.mul_(weight_scale)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.1)
    model.save_pretrained(directory)
    generation_config = {"bos_token_id": IM_START_ID, "eos_token_id": IM_END_ID, "pad_token_id": IM_END_ID}
    (directory / "generation_config.json").write_text(json.dumps(generation_config, indent=2))
    write_tiny_tokenizer(directory)
    return directory


def make_tiny_llama(directory: Path, *, seed: int = 0, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """Write a Llama of 2 layers, 4 heads, 2 KV heads of 16 dimensions (512 bytes of KV a token)."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_model_len,
        bos_token_id=IM_START_ID,
        eos_token_id=IM_END_ID,
        pad_token_id=IM_END_ID,
        tie_word_embeddings=False,
    )
    return make_tiny_model(directory, config, seed=seed)
