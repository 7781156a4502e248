"""Find what should be equal on both sides of a comparison, and is not: settings, code that scored, prompts."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ludic.code.kept import from_dicts
from ludic.eval.samples import Samples
from ludic.store.catalogue import EVALUATIONS
from ludic.store.records import Evaluation

_SAMPLING = "select distinct temperature, top_p, top_k, max_tokens from eval_episodes order by all"
_PROMPTS = """
select
    env_example_id,
    min(md5(if(len(prompt) = 0, prompt_tokens::varchar, prompt::varchar))) as digest
from (
    select
        env_example_id,
        messages[1:coalesce(list_position([message.role for message in messages], 'assistant') - 1, len(messages))]
            as prompt,
        prompt_tokens
    from evals
    inner join eval_episodes using (rollout_id, env_example_id)
    where sample_index = 0
)
group by env_example_id
"""


def find_differences(a: Samples, b: Samples) -> list[str]:
    """Return warnings about the samples of the baseline (a) and another side (b)."""
    found = list(_of_prompts(a, b))
    of_a, of_b = _record(a), _record(b)
    if of_a is None or of_b is None:
        found.append("not both were sampled by `ludic eval`, so the code that scored them can't be compared")
        return [*found, *_of_sampling(a, b)]
    return [*found, *_of_settings(of_a.settings, of_b.settings), *_of_code(of_a, of_b)]


def _record(samples: Samples) -> Evaluation | None:
    return None if samples.evaluation is None else EVALUATIONS.read(samples.root, samples.evaluation)


def _of_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            yield f"{name} is {json.dumps(a.get(name))} in the baseline, {json.dumps(b.get(name))} here"


def _of_code(a: Evaluation, b: Evaluation) -> Iterator[str]:
    of_a, of_b = ({(record.role, record.name): record for record in from_dicts(each.code)} for each in (a, b))
    for key in sorted(of_a.keys() & of_b.keys()):
        if of_a[key].digests != of_b[key].digests:
            yield f"the {key[0]} {key[1]!r} was another version of its code in the baseline"


def _of_sampling(a: Samples, b: Samples) -> Iterator[str]:
    of_a, of_b = (each.ask(_SAMPLING).to_pylist() for each in (a, b))
    if of_a != of_b:
        yield f"sampled with {json.dumps(of_a)} in the baseline, {json.dumps(of_b)} here"


def _of_prompts(a: Samples, b: Samples) -> Iterator[str]:
    of_a, of_b = ({row["env_example_id"]: row["digest"] for row in each.ask(_PROMPTS).to_pylist()} for each in (a, b))
    common = of_a.keys() & of_b.keys()
    num = sum(of_a[example] != of_b[example] for example in common)
    if num:
        yield f"the prompts of {num} of {len(common)} examples differ"
