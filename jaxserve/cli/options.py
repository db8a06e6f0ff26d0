"""Options made from dataclass fields, and the YAML profile that can fill them.

Knows how a field's type becomes a flag.  Does not know what any field means.

Precedence: flag, then environment, then profile, then the field's default; it is click's own,
with the profile as its `default_map`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import click

from jaxserve.cli.base import Decorated, SectionOption, one_line
from jaxserve.config import EngineConfig, load_profile


class IntList(click.ParamType[tuple[int, ...]]):
    """Integers separated by commas."""

    name = "int,int,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse "1,2,4"; a tuple is left as it is."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as 1,2,4", param, ctx)


def field_option(
    field: dataclasses.Field[Any],
    hint: Any,
    *,
    help: str,
    section: str,
    choices: Sequence[str] | None = None,
    default: Any = dataclasses.MISSING,
) -> Callable[[Decorated], Decorated]:
    """An option named after a field, with its type and default.

    Args:
        field: of the dataclass.
        hint: the field's resolved type.
        help: text for the user.
        section: heading in the help.
        choices: the allowed values, if few.
        default: instead of the field's.
    """
    flag = "--" + field.name.replace("_", "-")
    settings: dict[str, Any] = {
        "cls": SectionOption,
        "section": section,
        "help": help,
        "default": field.default if default is dataclasses.MISSING else default,
    }
    plain = _without_none(hint)
    if plain is bool:
        return click.option(f"{flag}/--no-{flag.removeprefix('--')}", field.name, **settings)
    if typing.get_origin(plain) is tuple:
        settings["type"] = IntList()
    else:
        settings["type"] = click.Choice(choices) if choices else plain
    return click.option(flag, field.name, **settings)


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def engine_options(
    *, without: Collection[str] = (), **defaults: Any
) -> Callable[[Decorated], Decorated]:
    """Add `--config` and a flag per field of EngineConfig; the verb gets one `config`.

    Args:
        without: fields that keep their default, as the verb has a flag of that name.
        defaults: the verb's own defaults for some fields.
    """
    fields = [field for field in dataclasses.fields(EngineConfig) if field.name not in without]
    hints = typing.get_type_hints(EngineConfig)

    def decorate(function: Decorated) -> Decorated:
        @functools.wraps(function)
        def verb(**kwargs: Any) -> Any:
            values = {field.name: kwargs.pop(field.name) for field in fields}
            return function(config=EngineConfig(**values), **kwargs)

        for field in reversed(fields):
            verb = field_option(
                field,
                hints[field.name],
                help=field.metadata["help"],
                section="Engine options",
                choices=field.metadata["choices"],
                default=defaults.get(field.name, field.default),
            )(verb)
        return typing.cast(Decorated, config_option(verb))

    return decorate


def config_option(function: Decorated) -> Decorated:
    """Add `--config`, whose file fills the defaults of the verb's other options."""
    return click.option(
        "--config",
        metavar="FILE",
        expose_value=False,
        is_eager=True,
        callback=_apply_profile,
        help="YAML file with flags of this verb as keys, or the name of a profile that ships with "
        "jaxserve, such as cpu-smoke.",
    )(function)


def _apply_profile(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    if path is not None:
        try:
            ctx.default_map = _read_profile(ctx, param, path)
        except ValueError as error:
            raise one_line(error) from error


def _read_profile(ctx: click.Context, param: click.Parameter, path: str) -> dict[str, Any]:
    values = load_profile(_find_profile(path))
    options = {
        _long_flag(option): option
        for option in ctx.command.params
        if isinstance(option, click.Option) and option is not param
    }
    unknown = sorted(values.keys() - options.keys())
    if unknown:
        raise ValueError(
            f"unknown keys in {path!r}: {', '.join(unknown)}; known to `{ctx.info_name}` are "
            f"{', '.join(sorted(options))}"
        )
    return {
        str(options[key].name): _checked(ctx, options[key], value, f"{path!r}: {key}")
        for key, value in values.items()
        if value is not None
    }


def _long_flag(option: click.Option) -> str:
    """As `load_profile` writes keys: "--max-num-seqs" is max_num_seqs."""
    return next(o for o in option.opts if o.startswith("--"))[2:].replace("-", "_")


def _checked(ctx: click.Context, option: click.Option, value: Any, where: str) -> Any:
    """The value as the flag would read it, so that 16.5 is no integer in a file either."""
    text: Any = _text(value)
    if isinstance(value, list):
        items = [_text(item) for item in value]
        text = items if option.multiple else ",".join(items)
    try:
        option.type_cast_value(ctx, text)
    except click.BadParameter as error:
        raise ValueError(f"{where}: {error.message}") from error
    return text


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _find_profile(name: str) -> Path:
    """A file of that name, else the shipped profile: in the wheel, or in a source checkout."""
    package = Path(__file__).parents[1]
    candidates = [Path(name)]
    if Path(name).name == name:
        for folder in (package / "configs", package.parent / "configs"):
            candidates += [folder / name, folder / f"{name}.yaml"]
    return next((path for path in candidates if path.is_file()), Path(name))
