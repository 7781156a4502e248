"""An engine without a model, for runs on a simulated clock."""

import asyncio
import random

import numpy as np

from ludic.engines.engine import Completion, GenerationRequest
from ludic.records.rollout import WeightSpan


class SimulatedEngine:
    """Takes 20 to 300 ms a completion."""

    name, repeats_in_any_batch, max_length, policy_version = "simulated 1", True, 10_000, 0

    def __init__(self, max_batch: int) -> None:
        self.max_batch = max_batch

    async def generate(self, request: GenerationRequest) -> Completion:
        await asyncio.sleep(random.Random(request.seed).uniform(0.02, 0.3))
        return Completion(
            tokens=np.ones(4, np.int32),
            columns={"response_logprobs": np.full(4, -1.0, np.float32)},
            finish_reason="stop",
            weight_versions=(WeightSpan(version=0, start=0, end=4),),
        )

    def load_weights(self, folder: str, version: int) -> None:
        raise NotImplementedError
