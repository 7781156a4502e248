"""Run a task of inspect_ai with its mock model, into the log folder argv[1]; prints each sample's scores as JSON."""

import json
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes, match
from inspect_ai.solver import generate, solver, system_message

ANSWERS = {"1 + 1 =": ["2", "It is 2"], "2 + 3 =": ["4", "5"]}


@solver
def fail_at_broken():
    async def solve(state, generate):
        if state.sample_id == "broken":
            raise ValueError("the tool\nbroke")
        return state

    return solve


def answer(messages, tools, tool_choice, config):
    text = ANSWERS[messages[-1].text].pop(0)
    output = ModelOutput.from_content("mockllm/model", text)
    # Else the mock model downloads a tokenizer, to count tokens.
    output.usage = ModelUsage(input_tokens=9, output_tokens=len(text), total_tokens=9 + len(text))
    return output


samples = [
    Sample(id="../two", input="1 + 1 =", target="2", metadata={"level": 3}),
    Sample(id="five", input="2 + 3 =", target=["5", "five"]),
    Sample(id="broken", input="0 / 0 =", target="?"),
]
task = Task(
    name="sums",
    dataset=samples,
    solver=[system_message("Answer."), fail_at_broken(), generate()],
    scorer=[match(location="exact"), includes()],
    epochs=2,
)
options = {"fail_on_error": False, "temperature": 0.5, "max_tokens": 17, "max_samples": 1, "max_connections": 1}
(log,) = eval(
    task, model=get_model("mockllm/model", custom_outputs=answer), log_dir=sys.argv[1], display="none", **options
)
print(
    json.dumps([[s.id, s.epoch, {name: score.value for name, score in (s.scores or {}).items()}] for s in log.samples])
)
