"""One entry of a recipe's pass list."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """A frozen model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PassSpec(Strict):
    """One entry of the pass list. In YAML the options stand beside `pass`: `{pass: ladder, layers: upper-half}`."""

    pass_name: str = Field(alias="pass", min_length=1)
    optional: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        own = {key: value[key] for key in ("pass", "optional") if key in value}
        return {**own, "options": {key: value[key] for key in value if key not in own}}

    def to_dict(self) -> dict[str, Any]:
        """As it stands in YAML."""
        return {"pass": self.pass_name, **self.options, **({"optional": True} if self.optional else {})}
