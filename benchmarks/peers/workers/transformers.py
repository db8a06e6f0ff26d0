"""transformers' `generate`: static batches, padded on the left, each as long as its longest."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.worker import Loaded, num_cores, serve, versions


def load(options: dict[str, Any]) -> Loaded:
    """Options: `model`, a Hugging Face directory, and `slots`, the size of a batch."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(num_cores())
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()

    def batch(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        width, most = max(map(len, prompts)), max(max_tokens)
        padding = [width - len(prompt) for prompt in prompts]
        ids = [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        config = GenerationConfig(
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        with torch.inference_mode():
            out = model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                generation_config=config,
            )
        rows = out[:, width:].tolist()
        return [row[:count] for row, count in zip(rows, max_tokens, strict=True)]

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        size = options["slots"]
        return [
            tokens
            for i in range(0, len(prompts), size)
            for tokens in batch(prompts[i : i + size], max_tokens[i : i + size])
        ]

    return Loaded(generate, {"versions": versions("transformers", "torch")})


if __name__ == "__main__":
    serve(load)
