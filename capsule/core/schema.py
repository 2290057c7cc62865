"""The form shared by every model: frozen, strict, nothing extra; and the scalar types that protocols are made of."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from capsule.core.canonical import INTEGER_LIMIT, canonical_checked, parse
from capsule.core.errors import MalformedError
from capsule.core.version import refuse_other_major

STRICT = ConfigDict(strict=True, extra="forbid")
"""How every value is read: no type is converted and no key is passed over."""


class Model(BaseModel):
    """A frozen value whose fields are checked strictly and whose unknown keys are refused."""

    model_config = ConfigDict(frozen=True, populate_by_name=True, **STRICT)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of this value, every field present, under the names of the format."""
        return self.model_dump(mode="json", by_alias=True)

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of this value."""
        return canonical_checked(self.to_json())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Read a value from its canonical bytes; `where` names the source in errors.

        Raises:
            MalformedError: not canonical JSON, not this model, or of another major version of it.
        """
        tree = parse(data, where)
        if "schema_" in cls.model_fields and isinstance(tree, dict) and isinstance(tree.get("schema"), str):
            refuse_other_major(tree["schema"], where)
        del tree  # which is larger than the value
        try:
            value = cls.model_validate_json(data, by_alias=True, by_name=False)
        except ValidationError as error:
            raise MalformedError(f"{where}: {first_error(error)}") from error
        if value.to_bytes() != data:
            raise MalformedError(f"{where}: expected every field written out, found defaults left away")
        return value


_COMPLETE: dict[type[Model], set[str]] = {}


def compact(value: Model) -> None:
    """Let a value that has every field, and those in it, share the set of their names, which is half its memory."""
    for item in value.__dict__.values():
        if isinstance(item, Model):
            compact(item)
    names = _COMPLETE.get(type(value)) or _COMPLETE.setdefault(type(value), set(type(value).model_fields))
    object.__setattr__(value, "__pydantic_fields_set__", names)


def first_error(error: ValidationError) -> str:
    """Return the first complaint of a validation as `key: words`, and how many more there are."""
    details = error.errors(include_url=False)
    path = key_path(details[0]["loc"])
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{path}: {details[0]['msg']}{more}" if path else f"{details[0]['msg']}{more}"


def key_path(location: tuple[int | str, ...]) -> str:
    """Write a validation location as a person reads it: `arms[1].trial`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


_DECIMAL = re.compile(r"[+-]?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")


def _decimal_text(value: Any) -> str:
    if isinstance(value, bool):
        raise ValueError("expected a number, found a boolean")
    text = str(value) if isinstance(value, int) else value
    if not isinstance(text, str) or len(text) > 64 or _DECIMAL.fullmatch(text.replace("_", "")) is None:
        raise ValueError(f"expected a finite decimal number, found {str(value)[:40]!r}")
    return text.replace("_", "")


def _positive(text: str) -> str:
    if Decimal(text) <= 0:
        raise ValueError(f"expected a number above zero, found {text}")
    return text


def _positive_text(value: Any) -> str:
    return _positive(_decimal_text(value))


def _non_negative_text(value: Any) -> str:
    text = _decimal_text(value)
    if Decimal(text) < 0:
        raise ValueError(f"expected zero or more, found {text}")
    return text


DecimalText = Annotated[str, BeforeValidator(_decimal_text)]
"""A finite number as its author wrote it; never a float, so that no float enters an identity."""

PositiveDecimal = Annotated[str, BeforeValidator(_positive_text)]
NonNegativeDecimal = Annotated[str, BeforeValidator(_non_negative_text)]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
"""A name that is safe in a path and in a shell: lower-case letters, digits, `.`, `_` and `-`."""

Identifier = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
"""The name of an observation: it becomes a table column."""

Text = Annotated[str, StringConstraints(min_length=1, max_length=10_000)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Natural = Annotated[int, Field(ge=0, lt=INTEGER_LIMIT)]
Whole = Annotated[int, Field(gt=-INTEGER_LIMIT, lt=INTEGER_LIMIT)]


def _within_double(text: str) -> str:
    if math.isinf(float(text)):
        raise ValueError(f"expected a number that a double can hold, found {text}")
    return text


class DecimalScalar(Model):
    """A number with a fraction among parameters; trials receive it as a float."""

    decimal: Annotated[DecimalText, AfterValidator(_within_double)]


Scalar = bool | Whole | str | DecimalScalar
Parameter = Scalar | tuple[Scalar, ...]
Parameters = dict[Annotated[str, StringConstraints(min_length=1, max_length=200)], Parameter]


def plain(value: Parameter) -> Any:
    """Return a parameter as the trial receives it: decimals as floats, tuples as lists."""
    if isinstance(value, DecimalScalar):
        return float(value.decimal)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value
