"""`jaxserve inspect`: what the engine would allocate and compile for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.model import load_llm
from jaxserve.cli.options import engine_options
from jaxserve.cli.tables import sections
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.llm import LLM

_MODEL_FACTS = (
    "architecture",
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_position",
)


@click.command("inspect", cls=Verb)
@click.option("--json", is_flag=True, help="One JSON object instead of tables.")
@log_option
@engine_options(warm_up=False)
def command(json: bool, config: EngineConfig) -> None:
    """Show the model, the pages that fit, the compiled shapes and the memory by part."""
    llm = load_llm(config)
    description = {"model": _model(llm), **llm.engine.describe()}
    click.echo(msgspec.json.encode(description) if json else sections(description))


def _model(llm: LLM) -> dict[str, Any]:
    facts = {name: getattr(llm.model_config, name) for name in _MODEL_FACTS}
    return {"name": llm.model_name, **facts}
