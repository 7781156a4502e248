"""A real vLLM server with a reward model scores as transformers does, and names what is wrong."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import logits_by_hand, make_reward_model, tokens_by_hand
from vllm_servers import running_servers

from ludic.environments.environment import Transition
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError, ScorerError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

QUESTION = "what is the sum of a b"
ANSWERS = ["a", "b c d", "what is the end of two", "d"]


def answered(folder: Path, scorer: str, *answers: str, **settings: Any) -> list[Transition]:
    (folder / "rows.jsonl").write_text(json.dumps({"question": QUESTION}))
    options = {"scorer": scorer, "answer": None, "heldout_share": 0, "scorer_options": {scorer: settings}}
    environment = make_environment(f"qa/{folder}/rows.jsonl", options)()
    example = environment.example(0, "train")

    async def all_of() -> list[Transition]:
        waiting = []
        for answer in answers:
            environment.reset(example)
            waiting.append(environment.step(answer))
        return await asyncio.gather(*waiting)

    return asyncio.run(all_of())


@pytest.mark.timeout(900)
def test_a_server_scores_as_the_model_does_in_this_process(tmp_path: Path) -> None:
    folder = make_reward_model(tmp_path / "model", seed=1)
    flags = ("--runner", "pooling")
    with running_servers(folder, tmp_path, flags=flags) as [server]:
        scorer = f"pooling:{server.url}"
        by_server = [each.reward for each in answered(tmp_path, scorer, *ANSWERS)]
        here = [each.reward for each in answered(tmp_path, f"model:{folder}", *ANSWERS)]
        by_hand = [logits_by_hand(folder, ("user", QUESTION), ("assistant", answer))[0] for answer in ANSWERS]
        assert by_server == pytest.approx(by_hand, abs=1e-4)
        assert here == pytest.approx(by_hand, abs=1e-4)
        assert max(by_hand) - min(by_hand) > 0.1

        for side, kept in (("left", slice(-10, None)), ("right", slice(10))):
            tokens = tokens_by_hand(folder, ("user", QUESTION), ("assistant", ANSWERS[2]))[kept]
            (cut,) = answered(tmp_path, scorer, ANSWERS[2], truncate=side, max_length=10)
            assert cut.reward == pytest.approx(logits_by_hand(folder, tokens=tokens)[0], abs=1e-4)

        with pytest.raises(ScorerError, match=r"the server answered 400: .*maximum context length is 256 tokens"):
            answered(tmp_path, scorer, "d " * 300)
        with pytest.raises(ScorerError, match=r"the server answered 404: .*The model `other` does not exist"):
            answered(tmp_path, scorer, "a", model="other")
        with pytest.raises(ConfigError, match="the model has no label 1; it has 0"):
            answered(tmp_path, scorer, "a", label=1)
