"""Answer the gateway's calls with an engine: prompts of stored tokens, sampling, and answers as messages.

Prompts are made by ludic.gateway.prompts, answers by ludic.gateway.answers. Raises RefusedCallError for a conversation
that the chat template refuses, and for a prompt that does not fit the model's context.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from ludic.agents import Agent, beside
from ludic.engines import Completion, GenerationRequest, SamplingParams, check_completion
from ludic.errors import ModelError
from ludic.gateway.answers import AnswerReader
from ludic.gateway.calls import CallRequest, Prompt, SampledCall, StoredCall, refused
from ludic.gateway.matching import SentMessages, tools_digest
from ludic.gateway.prompts import PromptMaker, begins, num_tokens

T = TypeVar("T")
_CHARACTERS_A_TOKEN = 4
"""About as many in English."""


class EngineBackend:
    """Samples with an engine, for an agent's tokenizer and format of tool calls."""

    def __init__(self, agent: Agent, *, keep_thinking: bool = False) -> None:
        """keep_thinking: keep stored tokens where the chat template leaves out the thinking of old answers."""
        self.model, self.engine = agent.model, agent.engine.name
        self._agent, self._tokenizer = agent, agent.tokenizer
        self._answers = AnswerReader(agent)
        self._prompts = PromptMaker(agent.tokenizer, self._answers.special_tokens, keep_thinking=keep_thinking)

    async def prepare(self, request: CallRequest, earlier: Sequence[StoredCall]) -> Prompt:
        """Return the prompt of a call. earlier: the stored calls of its episode, in order.

        Raises RefusedCallError if the chat template refuses the messages, or if the prompt is too long.
        """
        if request.prompt is not None:
            prompt = await self._given(request.prompt, earlier)
        else:
            prompt = await self._of_messages(request, earlier)
        assert prompt.tokens is not None, "an engine's prompts have tokens"
        limit = self._agent.engine.max_length
        if len(prompt.tokens) >= limit:
            # Agents find both APIs' sentences in the message, and compact the conversation.
            raise refused(
                "too_long",
                f"prompt is too long: {len(prompt.tokens)} tokens > {limit - 1} maximum. This model's maximum context "
                f"length is {limit} tokens, prompt and answer together; shorten the conversation",
                field="messages" if request.prompt is None else "prompt",
            )
        return prompt

    async def sample(self, request: CallRequest, prompt: Prompt, params: SamplingParams, seed: int) -> SampledCall:
        """Sample the answer. params: of the run, shortened by the client. Raises EngineError, ModelError, ConfigError.

        The completion also ends where the model's context ends, and at a stop text of the client that is one token.
        """
        assert prompt.tokens is not None, "an engine's prompts have tokens"
        engine = self._agent.engine
        room = min(params.max_tokens, engine.max_length - len(prompt.tokens))
        stop_tokens = tuple(self._answers.stop_tokens(request.stop)) if request.stop else ()
        if room < params.max_tokens or stop_tokens:
            params = replace(params, max_tokens=room, stop_token_ids=(*params.stop_token_ids, *stop_tokens))
        generation = GenerationRequest(prompt_tokens=prompt.tokens, params=params, seed=seed)
        completion = await engine.generate(generation)
        check_completion(engine.name, generation, completion, self._agent.vocab_size)
        read = partial(self._answers.read, request, prompt.tokens, completion, seed)
        return await beside(self._tokenizer, _CHARACTERS_A_TOKEN * len(completion.tokens), read)

    def token_texts(self, completion: Completion) -> tuple[str, ...]:
        """Return the text of each token of a completion."""
        return self._answers.token_texts(completion)

    async def count(self, request: CallRequest) -> int:
        """Return the number of prompt tokens of a call that extends no other. Raises RefusedCallError."""
        prompt = await (self._of_messages(request, ()) if request.prompt is None else self._given(request.prompt, ()))
        assert prompt.tokens is not None, "an engine's prompts have tokens"
        return len(prompt.tokens)

    async def _given(self, prompt: str | np.ndarray, earlier: Sequence[StoredCall]) -> Prompt:
        """Return the prompt of the dialect `completions`: token ids, or a text that is tokenised without template."""
        if isinstance(prompt, str):
            ids = await beside(self._tokenizer, len(prompt), partial(self._tokenizer, prompt))
            tokens = np.asarray(ids["input_ids"], np.int32)
        else:
            tokens = np.asarray(prompt, np.int32)
        if not len(tokens):
            raise refused("invalid", "the prompt has no tokens; wanted at least one", field="prompt")
        size = self._agent.vocab_size
        if tokens.min() < 0 or (size is not None and tokens.max() >= size):
            wanted = "0 or more" if size is None else f"0 to {size - 1}"
            sentence = f"the prompt has token ids from {tokens.min()} to {tokens.max()}, wanted {wanted}"
            raise refused("invalid", sentence, field="prompt")
        base = max((call for call in earlier if begins(call, tokens)), key=num_tokens, default=None)
        return Prompt(tokens=tokens, extends=None if base is None else base.call_id, made="given")

    async def _of_messages(self, request: CallRequest, earlier: Sequence[StoredCall]) -> Prompt:
        conversation = SentMessages(request.messages)
        known = conversation.longest_known(earlier)
        with_tokens = self._with_same_tools(request, earlier)
        base = known if known in with_tokens else conversation.longest_known(with_tokens)
        prompt: Prompt | None = None
        if base is not None:
            num_new = sum(len(each.content) for each in request.messages[len(base.messages) + 1 :])
            prompt = await self._beside(
                num_new, partial(self._prompts.extended, request, base, known, with_tokens, earlier)
            )
        if prompt is None:
            num_characters = sum(len(each.content) for each in request.messages)
            num_characters += len(msgspec.json.encode(request.tools, enc_hook=dict))
            prompt = await self._beside(num_characters, partial(self._prompts.whole, request, known, earlier))
        if known is None:
            return prompt
        return replace(prompt, messages_extend=known.call_id, num_known_messages=len(known.messages) + 1)

    async def _beside(self, num_characters: int, build: Callable[[], T]) -> T:
        try:
            return await beside(self._tokenizer, num_characters, build)
        except ModelError as error:
            raise refused("invalid", str(error), field="messages") from error

    @staticmethod
    def _with_same_tools(request: CallRequest, earlier: Sequence[StoredCall]) -> Sequence[StoredCall]:
        digest = tools_digest(request.tools) if earlier else None
        return [call for call in earlier if call.tools_digest == digest and call.completion is not None]
