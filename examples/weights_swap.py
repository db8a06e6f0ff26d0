"""Train and serve one weight tree: a tiny model learns a sentence while the engine serves it.

Gradients go through the very modules that generate.  Each update is another tree of the same
shapes, so the engine's executables serve it as it is: no checkpoint, no copy, no compilation.

    python examples/weights_swap.py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from jaxserve import LLM, SamplingParams
from jaxserve.models.scoring import sequence_log_prob

SENTENCE = "The engine serves what the optimizer has just made: pages, slots and steps stay."
ROUNDS, STEPS = 3, 40


def main() -> None:
    """Train a little, serve, and so on."""
    llm = LLM(
        str(Path(__file__).with_name("tiny.json")),
        load_format="dummy",
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=32,
        prefill_buckets=(16,),
    )
    tokens = jnp.array(llm.tokenizer.encode(SENTENCE))
    optimizer = optax.adam(3e-3)

    def loss(params):  # the canonical tree, as `llm.params` has it
        return -sequence_log_prob(llm.module(params), tokens) / len(tokens)

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    params, state = llm.params, optimizer.init(llm.params)
    events = serve(llm, params)
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            params, state = step(params, state)
        events += serve(llm, params)
    print(f"compile events while serving: {events}")


def serve(llm: LLM, params) -> int:
    """Show how the engine continues the sentence with these weights; count compile events."""
    start, count = SENTENCE[:4], len(SENTENCE) - 4
    llm.engine.compilations.reset()  # what the optimizer compiled does not count
    llm.update_weights(params)
    answer = llm.generate(start, SamplingParams(temperature=0, max_tokens=count))[0]
    nll = llm.score(SENTENCE)[0].mean_nll
    print(f"{nll:.2f} nats per token: {start + answer.outputs[0].text!r}")
    return llm.engine.compilations.count


if __name__ == "__main__":
    main()
