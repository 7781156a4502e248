"""Write the samples_*.jsonl of this folder to argv[1] with lm_eval 0.4.13 itself, over a model with fixed answers."""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "1 + 1 =", "answer": "2", "options": ["2", "3"], "gold": 0},
    {"question": "2 + 3 =", "answer": "5", "options": ["4", "5"], "gold": 1},
    {"question": "4 + 4 =", "answer": "8", "options": ["8", "9"], "gold": 0},
]
ANSWERS = {"1 + 1 =": "The answer is 2", "2 + 3 =": "#### 5 or 6", "4 + 4 =": ""}


class Fixed(LM):
    def generate_until(self, requests, **options):
        return [ANSWERS[request.args[0]] for request in requests]

    def loglikelihood(self, requests, **options):
        return [(-3.0 if request.args[1].strip() in "59" else -2.0, True) for request in requests]

    def loglikelihood_rolling(self, requests, **options):
        return [(-3.0,) for _ in requests]


folder = Path(sys.argv[1])
(folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
common = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
take_first = {"function": "take_first"}
generate = common | {
    "task": "sums_gen",
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "filter_list": [
        {"name": "strict-match", "filter": [{"function": "regex", "regex_pattern": r"#### (\d+)"}, take_first]},
        {
            "name": "flexible-extract",
            "filter": [{"function": "regex", "regex_pattern": r"(\d+)", "group_select": -1}, take_first],
        },
    ],
}
choose = common | {
    "task": "sums_mc",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "{{gold}}",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
}
tracker = EvaluationTracker(output_path=str(folder))
tracker.general_config_tracker.model_name_sanitized = "fixed"
tracker.date_id = "2026-11-01T10-20-30.123456"
results = lm_eval.simple_evaluate(
    model=Fixed(),
    tasks=[generate, choose],
    log_samples=True,
    bootstrap_iters=0,
    task_manager=TaskManager(include_defaults=False),
)
for name, samples in results["samples"].items():
    tracker.save_results_samples(name, samples)
