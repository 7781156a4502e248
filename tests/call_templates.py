"""Chat templates with tool calls as model families write them: the markup of each, without what other parts they have.

After the templates of Qwen3, Qwen3-Coder, Llama 3.2, Mistral 0.3 and Large 2411, DeepSeek V3 and GLM 4.5.
"""

from copy import deepcopy

from chat_models import chat_tokenizer
from transformers import PreTrainedTokenizerFast


def _chatml(shown_tools: str, call: str) -> str:
    """ChatML, whose tool results are a user's message. call: what is written of `call`."""
    return f"""\
{{%- if tools %}}<|im_start|>system
# Tools{{% for tool in tools %}}{{{{ '\\n' }}}}{{{{ tool | tojson }}}}{{% endfor %}}
{shown_tools}<|im_end|>{{{{ '\\n' }}}}{{%- endif %}}
{{%- for message in messages %}}
{{%- if message.role == 'assistant' %}}{{{{ '<|im_start|>assistant\\n' }}}}{{{{ message.content }}}}
{{%- for each in message.tool_calls or [] %}}{{%- set call = each.function %}}
{{%- if message.content or not loop.first %}}{{{{ '\\n' }}}}{{% endif %}}{call}{{% endfor %}}{{{{ '<|im_end|>\\n' }}}}
{{%- elif message.role == 'tool' %}}{{{{ '<|im_start|>user\\n<tool_response>\\n' + message.content }}}}
{{{{- '\\n</tool_response><|im_end|>\\n' }}}}
{{%- else %}}{{{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}{{% endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""


QWEN3 = _chatml(
    """For each call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>""",
    """{{ '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{ '}\\n</tool_call>' }}""",
)
QWEN3_CODER = _chatml(
    """If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
</function>
</tool_call>""",
    """{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for name, value in call.arguments | items %}{{ '<parameter=' + name + '>\\n' }}
{%- set is_json = value is mapping or (value is sequence and value is not string) %}
{{- value | tojson | safe if is_json else value | string }}{{ '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}""",
)
GLM = _chatml(
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>",
    """{{ '\\n<tool_call>' + call.name }}
{%- for name, value in call.arguments | items %}{{ '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}""",
)
DEEPSEEK = _chatml(
    "",
    """{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name + '\\n```json\\n' }}
{{- call.arguments | tojson }}{{ '\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}""",
)
LLAMA = """\
{%- for message in messages %}
{%- if message.role == 'user' and loop.first and tools %}{{ '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{{ message.content + '<|eot_id|>' }}
{%- elif message.tool_calls %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}{%- set call = message.tool_calls[0].function %}{{ '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) }}
{{- '<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
_MISTRAL = """\
{%%- for message in messages %%}
{%%- if message.role == 'user' %%}
{%%- if tools and loop.first %%}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{%% endif %%}
{{- '[INST]' + message.content + '[/INST]' }}
{%%- elif message.tool_calls %%}
{%%- for each in message.tool_calls %%}{%%- set call = each.function %%}
{%%- if each.id | length != 9 %%}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%%- endif %%}%s{%% endfor %%}{{ '</s>' }}
{%%- elif message.role == 'tool' %%}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%%- else %%}{{ message.content + '</s>' }}{%% endif %%}{%% endfor %%}"""
MISTRAL = _MISTRAL % (
    """{{ '[TOOL_CALLS][' if loop.first else ', ' }}{{ '{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments | tojson }}{{ ', "id": "' + each.id + '"}' }}{{ ']' if loop.last else '' }}"""
)
NEW_MISTRAL = _MISTRAL % """{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}{{ call.arguments | tojson }}"""
NO_CALLS = (
    """{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}{{ tools | length }}"""
)

FORMATS = {
    QWEN3: "hermes",
    QWEN3_CODER: "qwen3_coder",
    LLAMA: "llama",
    MISTRAL: "mistral",
    NEW_MISTRAL: "mistral",
    GLM: None,
    DEEPSEEK: None,
    NO_CALLS: None,
}
"""The format of tool calls of each template; None for one that ludic does not know."""


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """The tokenizer of chat_models with another chat template."""
    tokenizer = deepcopy(chat_tokenizer())
    tokenizer.chat_template = template
    return tokenizer
