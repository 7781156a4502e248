"""Write the details_*.parquet of this folder below argv[1] with lighteval 0.13.0's own tracker, from fixed answers.

The files are renamed: names of lighteval hold `|` and the time. Its log() needs xxhash 3.5: newer ones take no text.
"""

import sys

from lighteval.logging.evaluation_tracker import EvaluationTracker
from lighteval.models.dummy.dummy_model import DummyModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc

tracker = EvaluationTracker(output_dir=sys.argv[1], save_details=True)
tracker.general_config_logger.log_model_info(DummyModelConfig())


def generated(number: int, question: str, answer: str, texts: list[str], match: float) -> None:
    task = "sums|0"
    doc = Doc(query=question, choices=[answer], gold_index=0, id=str(number), task_name=task)
    tokens = [[3, 4]] * len(texts)
    response = ModelResponse(input=f"user: {question}\n", text=texts, input_tokens=[1, 2], output_tokens=tokens)
    tracker.details_logger.log(task, doc, response, {"extractive_match": match, "length": len(texts[0])})


def chosen(number: int, question: str, gold: int, logprobs: list[float], accuracy: int) -> None:
    task = "choose|0"
    doc = Doc(query=question, choices=["4", "5"], gold_index=gold, id=str(number), task_name=task)
    response = ModelResponse(input=question, logprobs=logprobs, output_tokens=[[5], [6]])
    tracker.details_logger.log(task, doc, response, {"acc": accuracy})


generated(0, "1 + 1 =", "2", ["The answer is 2"], 1.0)
generated(1, "2 + 3 =", "5", ["6", "5"], 0.0)
generated(2, "4 + 4 =", "8", [""], float("nan"))
chosen(0, "2 + 3 =", 1, [-2.0, -1.0], 1)
chosen(1, "2 + 2 =", 0, [-2.0, -1.0], 0)
tracker.details_logger.aggregate()
tracker.save()
