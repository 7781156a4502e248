"""Define the options of scoring: the scorer, and the rollouts to score; imports nothing slow, to keep `--help` fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from ludic.errors import ConfigError
from ludic.settings import ROLLOUT_SCORER, Range, SecondsOfADay, takes_settings
from ludic.settings.table import check


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """A scorer, which is a user's function, a reward model or an LLM judge, and the rollouts that it scores."""

    scorer: str | None = None
    """What scores a rollout: path/to/file.py:function, or a reward model, model:PATH_OR_ID or pooling:URL of a vLLM
    server (docs/scores.md)."""
    scorer_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a reward model, as JSON: {"label": 1, "device": "cuda:0"} (ModelSettings, ServerSettings)."""
    name: str | None = None
    """Name of the scorer in the table; None uses that of the function or the model, and for a judge `judge`."""
    table: Literal["rollouts", "evals"] = "rollouts"
    """Table whose rollouts are scored."""
    where: str | None = None
    """Score only rollouts for which this SQL predicate is true; None scores all."""
    concurrency: Annotated[int, Range(1, 1024)] = 16
    """Maximum number of rollouts that are scored at the same time, each in a thread."""
    scorer_timeout_s: SecondsOfADay = 60.0
    """Maximum seconds of one rollout, retries of a judge included; then the rollout is stored as failed."""
    retry_failed: bool = False
    """Also score rollouts that this version of the scorer failed on before."""

    judge_url: str | None = None
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1; its model is the judge."""
    judge_model: str | None = None
    """Model that judges, by its name on the server."""
    judge_prompt: str | None = None
    """File with the template of the judge's prompt, in which {prompt}, {response} and {messages} are replaced."""
    judge_pattern: str | None = None
    """Regular expression whose last match in the answer, or its first group, is the value; None wants a JSON number."""
    judge_options: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """Further fields of a request to the judge, as JSON."""
    judge_tries: Annotated[int, Range(1, 100)] = 5
    """Maximum requests for one rollout if the server can't be reached, is overloaded or fails."""
    judge_key_env: str | None = None
    """Environment variable that holds the server's API key; the key is never stored. None sends no key."""
    judge_input_price: Annotated[float, Range(0, 10**9)] | None = None
    """Price of a million tokens that the judge reads, in any currency; with judge_output_price, costs are stored."""
    judge_output_price: Annotated[float, Range(0, 10**9)] | None = None
    """Price of a million tokens that the judge writes."""

    def __post_init__(self) -> None:
        """Raises ConfigError if options are missing or contradict each other."""
        check(self)
        if (self.scorer is None) == (self.judge_url is None):
            raise ConfigError(
                "wanted one scorer: scorer, path/to/file.py:function or model:PATH_OR_ID, or judge_url for an LLM judge"
            )
        if self.scorer_options and (self.scorer is None or not takes_settings(ROLLOUT_SCORER, self.scorer)):
            raise ConfigError("scorer_options are settings of a reward model, model:PATH_OR_ID or pooling:URL")
        if self.judge_url is None:
            self._refuse_judge_options()
        elif self.judge_model is None or self.judge_prompt is None:
            raise ConfigError("judge_url needs judge_model, and judge_prompt, the file of its prompt")
        if (self.judge_input_price is None) != (self.judge_output_price is None):
            raise ConfigError("judge_input_price and judge_output_price belong together; give both, or none")

    def _refuse_judge_options(self) -> None:
        for option in fields(self):
            default = option.default_factory() if callable(option.default_factory) else option.default
            if option.name.startswith("judge_") and getattr(self, option.name) != default:
                raise ConfigError(f"{option.name} is an option of a judge; leave it out, or give judge_url")
