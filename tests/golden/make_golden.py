"""Make the golden models: two tiny models and what transformers in float32 says they generate.

Run by hand, in an environment with torch, transformers and tokenizers; the results are committed:

    python tests/golden/make_golden.py

Prints how varied the generated tokens are and the smallest gap between the two best logits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
VOCAB = 300
NUM_TOKENS = 32
PROMPT_LENGTHS = (1, 7, 16, 33, 64, 120, 150)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = " the of and in to that was his he it with is for as had you not be her on at by which"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
}
MODELS = {
    # Grouped queries, tied embedding, plain rotary embedding.
    "llama-gqa": LlamaConfig(
        **COMMON,
        intermediate_size=72,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_theta=10000.0,
    ),
    # Everything that differs at once; the wavelengths 6, 30, 140 and 664 fall into all three
    # ranges of the llama3 scaling, whose limits are 8 and 32.
    "qwen3-llama3rope": Qwen3Config(
        **COMMON,
        intermediate_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        rope_theta=500.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}


def main() -> None:
    """Write one directory per model."""
    for seed, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        make = LlamaForCausalLM if isinstance(config, LlamaConfig) else Qwen3ForCausalLM
        model = make._from_config(config, attn_implementation="eager").float().eval()
        randomise(model)
        directory = HERE / name
        shutil.rmtree(directory, ignore_errors=True)
        model.save_pretrained(directory)
        (directory / "model.safetensors").chmod(0o644)
        write_tokenizer(directory)
        cases = [golden_case(model, prompt) for prompt in prompts(seed)]
        (directory / "golden.json").write_text(json.dumps({"cases": cases}, indent=1) + "\n")
        distinct = [len(set(case["output_ids"])) for case in cases]
        smallest = min(min(case["top2_gaps"]) for case in cases)
        print(name, "distinct tokens of 32:", distinct, "smallest gap:", smallest)


def randomise(model: torch.nn.Module) -> None:
    """Weights large enough that attention is peaked and the best token keeps changing."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(1 + 0.2 * torch.randn(weight.shape))
            elif "embed" in name or "lm_head" in name:
                weight.copy_(0.5 * torch.randn(weight.shape))
            else:
                weight.copy_(2.0 * torch.randn(weight.shape) / weight.shape[1] ** 0.5)


def prompts(seed: int) -> list[list[int]]:
    """Random token ids; the special tokens are not among them."""
    generator = torch.Generator().manual_seed(100 + seed)
    return [
        torch.randint(0, 256, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]


def golden_case(model: torch.nn.Module, prompt: list[int]) -> dict[str, list]:
    """Greedy tokens (end tokens do not end it), their margins, and the prompt's scores."""
    ids, gaps = list(prompt), []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([ids])).logits[0]
            best = torch.topk(logits[-1], 2).values
            gaps.append(round((best[0] - best[1]).item(), 6))
            ids.append(int(logits[-1].argmax()))
        scores = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
    return {
        "prompt_ids": prompt,
        "output_ids": ids[len(prompt) :],
        "top2_gaps": gaps,
        "prompt_logprobs": [
            round(scores[i, token].item(), 6) for i, token in enumerate(prompt[1:])
        ],
    }


def write_tokenizer(directory: Path) -> None:
    """Byte-level, 300 tokens: bytes, three special tokens, and merges of common words."""
    chars = list(byte_chars())
    vocab = {char: i for i, char in enumerate(chars)}
    vocab |= {text: 256 + i for i, text in enumerate(SPECIAL)}
    merges: list[tuple[str, str]] = []
    for word in WORDS.split():
        left = "\u0120"
        for char in word:
            if len(vocab) < VOCAB and left + char not in vocab:
                merges.append((left, char))
                vocab[left + char] = len(vocab)
            left += char
    assert len(vocab) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def byte_chars() -> list[str]:
    """GPT-2's character for each byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


if __name__ == "__main__":
    main()
