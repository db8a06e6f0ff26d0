"""OpenAI's request fields that are accepted and change no answer here, with the reason."""

from __future__ import annotations

IGNORED = {
    "metadata": "nothing is stored, so there is nothing to label",
    "moderation": "nothing is moderated",
    "prediction": "it only speeds an answer up",
    "prompt_cache_key": "the prefix cache finds equal prefixes by itself",
    "prompt_cache_options": "the prefix cache finds equal prefixes by itself",
    "prompt_cache_retention": "the prefix cache keeps what it has room for",
    "safety_identifier": "nothing is reported to anyone",
    "service_tier": "there is one; `priority` orders requests",
    "store": "nothing is stored",
    "verbosity": "no supported model has this setting; `max_completion_tokens` limits an answer",
}
"""Field name -> why it makes no difference."""
