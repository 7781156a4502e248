"""LLM judge as a Scorer: one request for each rollout, and a number out of its answer.

Everything that is wrong with an answer is a failure of that rollout. Raises ConfigError for options that can't work.
"""

import json
from hashlib import sha256
from typing import Any

from ludic.code.run import describe
from ludic.environments import judge as of_environments
from ludic.environments.judge import Reply, check_url, compile_pattern, read_key
from ludic.errors import JudgeError
from ludic.records import Rollout
from ludic.scoring.options import ScoreOptions
from ludic.scoring.outcome import CostedScore, Outcome, failed, to_outcome
from ludic.scoring.prompts import fill, read_template
from ludic.waits import SideLoop


class Judge:
    """A model behind an OpenAI-compatible server, as a Scorer."""

    name = "judge"

    def __init__(self, options: ScoreOptions) -> None:
        assert options.judge_url is not None
        assert options.judge_model is not None
        assert options.judge_prompt is not None
        self._options = options
        check_url(options.judge_url, "judge_url")
        compile_pattern(options.judge_pattern, "judge_pattern")
        self.model: str | None = options.judge_model
        self.prompt: str | None = read_template(options.judge_prompt)
        self._template = self.prompt
        about = [self.model, self.prompt, options.judge_pattern, dict(options.judge_options)]
        self.version = sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        read_key(options.judge_key_env, "judge_key_env")
        self._judge = of_environments.Judge(
            options.judge_url,
            options.judge_model,
            pattern=options.judge_pattern,
            options=options.judge_options,
            tries=options.judge_tries,
            timeout_s=options.scorer_timeout_s,
            key_env=options.judge_key_env,
            max_in_flight=options.concurrency,
        )
        self._loop = SideLoop()

    def score(self, rollout: Rollout, timeout_s: float) -> Outcome:
        """Score a rollout. The judge has the limit of time itself, with a better reason than a timeout."""
        try:
            reply = self._loop.run(self._judge.ask(fill(self._template, rollout)))
        except (JudgeError, ValueError) as error:
            return failed(str(error))
        except Exception as error:
            return failed(describe(error))
        costs = self._costs(reply)
        try:
            return to_outcome(CostedScore(value=self._judge.number_in(reply), **costs))
        except JudgeError as error:
            return failed(str(error), **costs)

    def close(self) -> None:
        """Close the connections."""
        self._loop.close()

    def _costs(self, reply: Reply) -> dict[str, Any]:
        num_input, num_output = reply.num_input_tokens, reply.num_output_tokens
        input_price, output_price = self._options.judge_input_price, self._options.judge_output_price
        cost = None
        if num_input is not None and num_output is not None and input_price is not None and output_price is not None:
            cost = (num_input * input_price + num_output * output_price) / 1e6
        return {"num_input_tokens": num_input, "num_output_tokens": num_output, "cost": cost}
